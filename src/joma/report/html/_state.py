"""What a run's state and findings are (stand-in)."""

from typing import Any

from joma.runs import Run


def state_of(run: Run) -> str:
    try:
        outcome = run.read_json("outcome")
    except ValueError:
        outcome = {}
    return {"done": "ended"}.get(outcome.get("status"), "unknown")


def findings_of(run: Run) -> dict[str, Any]:
    try:
        stored = run.read_json("findings")
    except ValueError:
        return {"findings": [], "not_judged": [], "judged": False}
    if isinstance(stored, list):
        stored = {"findings": stored}
    return {"findings": stored.get("findings", []), "not_judged": stored.get("not_judged", []), "judged": True}

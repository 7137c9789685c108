"""The findings of a run, as `findings.json` of any version has them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma.runs._run import Run

FINDINGS_FILE = "findings.json"
_SEVERITIES = ("note", "warning", "critical")
_DIVERGED = ("not_finite", "diverged_loss")


@dataclass(frozen=True)
class RecordedFindings:
    """What was found in a run.

    Attributes:
        findings: A record for each finding, the most severe first: "kind", "severity" (None where
            an older version recorded none), "step", "sentence", "advice", "evidence", "module",
            "layer" and "head".
        not_judged: A record for each rule that could not be applied: "kind" and "needs".
    """

    findings: list[dict[str, Any]] = field(default_factory=list)
    not_judged: list[dict[str, Any]] = field(default_factory=list)

    @property
    def worst(self) -> dict[str, Any] | None:
        """The most severe finding, the earliest of several; None where there is none."""
        return min(self.findings, key=_rank, default=None)

    @property
    def divergence(self) -> dict[str, Any] | None:
        """The first critical finding that says that the training diverged; None without one."""
        found = (
            one
            for one in self.findings
            if one["severity"] == "critical" and one.get("kind") in _DIVERGED
        )
        return min(found, key=_rank, default=None)


def read_findings(run: "Run") -> RecordedFindings:
    """Return the findings of a run, none where nothing judged it.

    Raises:
        JomaError: `findings.json` is damaged.
    """
    if not (run.path / FINDINGS_FILE).is_file() and FINDINGS_FILE not in run.missing:
        return RecordedFindings()
    stored = run.read_json(FINDINGS_FILE.removesuffix(".json"))
    if isinstance(stored, list):  # of earlier versions, without severity and advice
        stored = {"findings": stored}
    found, missing = (_records(stored, name) for name in ("findings", "not_judged"))
    found = [{"severity": None, "advice": "", **one} for one in found]
    return RecordedFindings(sorted(found, key=_rank), missing)


def _records(stored: Any, name: str) -> list[dict[str, Any]]:
    """Return the objects of a list in a file, which may hold anything."""
    listed = stored.get(name) if isinstance(stored, dict) else None
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def _rank(finding: dict[str, Any]) -> tuple[int, float]:
    severity, step = finding.get("severity"), finding.get("step")
    level = _SEVERITIES.index(severity) if severity in _SEVERITIES else -1
    return -level, step if isinstance(step, int | float) else 0

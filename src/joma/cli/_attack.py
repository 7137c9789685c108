"""`joma verify --adversary`: every claim attacked in its whole domain."""

import math
import os
from collections.abc import Sequence
from typing import Any

from joma.cli import _show, _work
from joma.cli._progress import progress

SECONDS = 5.0
"""Processor time that a claim gets unless told otherwise."""
_SHARE = 0.95
"""Of the time, to leave some to slow claims, which may take longer than their share."""
_SHOWN = 120
"""Characters of the parameters that the table shows."""

Record = dict[str, Any]


def attack_claim(claim: str, seconds: float, seed: int) -> Record:
    """Attacks one claim, by its id; the record of one that has nothing to search says why."""
    from joma.experiments.claims import CLAIMS
    from joma.experiments.claims.adversary import attack

    found = next(candidate for candidate in CLAIMS if candidate.id == claim)
    if found.search is None:
        return {"claim": claim, "fixed": found.fixed or "nothing to search"}
    return attack(found, seconds, seed=seed).as_json()


def attack_all(ids: Sequence[str], seconds: float | None, seed: int) -> list[Record]:
    """Attacks claims in as many processes as there are processors.

    Args:
        ids: of the claims.
        seconds: about how long all of it may take; None for five of a processor to each claim.
        seed: of the search.
    """
    jobs = max(1, min(os.cpu_count() or 1, len(ids)))
    each = SECONDS if seconds is None else _SHARE * seconds * jobs / max(len(ids), 1)
    with progress("adversary", len(ids)) as advance, _work.workers(jobs) as submit:
        return _work.gather([submit(attack_claim, name, each, seed) for name in ids], advance)


def stands(records: Sequence[Record]) -> bool:
    """Whether no claim fell."""
    return not any(record.get("violated") for record in records)


def show(records: Sequence[Record], seconds: float) -> None:
    """Prints the attacks, the closest first, and a summary as the last line."""
    attacked = [record for record in records if "fixed" not in record]
    attacked.sort(key=lambda one: math.inf if one["ratio"] is None else one["ratio"], reverse=True)
    table = _show.table("claim", "points", "refused", "error / tolerance", "where")
    for record in attacked:
        ratio = "∞" if record["ratio"] is None else f"{record['ratio']:.2g}"
        word = "✗ falls: " if record["violated"] else ""
        where = ", ".join(f"{name} = {_short(it)}" for name, it in record["parameters"].items())
        failure = f"; {record['failure']}" if record["failure"] else ""
        cut = where if record["violated"] else where[:_SHOWN]
        made = record["evaluations"] + record["refused"]
        refused = f"{record['refused'] / max(made, 1):.0%}"
        points = str(record["evaluations"])
        table.add_row(record["claim"], points, refused, word + ratio, cut + failure)
    _show.put(table, "")
    few = [record["claim"] for record in attacked if not record["enough"]]
    if few:
        _show.put(f"Fewer than 1,000 points, too few to speak of a search: {', '.join(few)}.", "")
    fell = sum(record["violated"] for record in attacked)
    fixed = len(records) - len(attacked)
    points = sum(record["evaluations"] for record in attacked)
    rest = f"; {fixed} have no free parameters" if fixed else ""
    verb = "falls" if fell == 1 else "fall"
    _show.put(
        f"{fell} of {len(attacked)} claims {verb} in {points:,} points{rest}. {seconds:.1f} s."
    )


def _short(value: Any) -> str:
    """A parameter in few characters."""
    if isinstance(value, list):
        return f"({', '.join(map(_short, value))})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

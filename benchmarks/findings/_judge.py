"""How the rules fare on the stored cases, and what is known of these."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.findings._case import RATES, STEPS, Case
from benchmarks.findings._cases import Best
from benchmarks.findings._run import best_of
from benchmarks.findings._split import split
from benchmarks.findings._store import Stored, read_all
from joma.train.findings import Finding, judge, series_of

STATE_UNCLEAR = "unclear"
"""Neither sick nor known to be healthy, and counted for nothing: `truth_of` says when."""
LEARNED = 0.3
"""Nats below the entropy of single tokens at which a healthy run must end."""
RISEN = 0.1
"""Nats above its lowest validation loss at which a healthy run may end."""


@dataclass(frozen=True)
class Truth:
    """What is known of a case after it was trained.

    Attributes:
        state: "healthy", "sick", "note", "sweep", or "unclear".
        worse: Whether it ends worse than the best of the sweep by more than the spread of seeds;
            None where it cannot be compared with the sweep.
    """

    state: str
    worse: bool | None


def truth_of(stored: Stored, best: Mapping[str, Best]) -> Truth:
    """Return what is known of a case.

    A learning rate other than the best that does not end worse is unclear. So is a run meant to be
    healthy that learned less than single tokens tell by 0.3 nats, or ends 0.1 nats above its lowest
    validation loss.
    """
    case, of = stored.case, best[stored.case.architecture]
    like_sweep = (
        case.state != "healthy"
        and case.steps in (STEPS[case.architecture], 2 * STEPS[case.architecture])
        and math.isfinite(of.loss)
    )
    worse = None
    if like_sweep:
        # A loss that is NaN is worse than any.
        worse = not stored.facts["validation_loss"] <= of.loss + of.spread
    unclear = case.variant in RATES and worse is False
    if case.state == "healthy":
        facts = stored.facts
        fall = facts["unigram_entropy"] - facts["validation_loss"]
        rise = facts["validation_loss"] - facts["best_validation_loss"]
        unclear = not (fall >= LEARNED and rise <= RISEN)
    return Truth(STATE_UNCLEAR if unclear else case.state, worse)


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 95% interval of a rate by Wilson's score."""
    if total == 0:
        return 0.0, 1.0
    z, share = 1.959964, count / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + (z / 2 / total) ** 2)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _rate(count: int, total: int) -> dict[str, Any]:
    low, high = wilson(count, total)
    return {"count": count, "total": total, "low": low, "high": high}


def is_in_layer(case: Case, finding: Finding) -> bool:
    """Whether a finding names the layer in which the sickness was planted."""
    allowed = {case.layer}
    if case.variant in ("duplicated", "tied") and case.layer is not None:
        allowed.add(case.layer - 1)
    in_stack = not case.stack or case.stack in (finding.module or "")
    return finding.layer in allowed and in_stack


def judge_half(folder: Path, half: str | None) -> dict[str, Any]:
    """Return how the rules fare on one half of the evidence, on both if None.

    A sick run is found if a warning or critical finding has one of the kinds of its variant; one
    worth a note is found by a finding of any severity. Healthy runs must have neither warning nor
    critical finding.
    """
    best = best_of(folder)
    healthy: list[tuple[Case, Sequence[Finding]]] = []
    planted: list[tuple[Case, Sequence[Finding]]] = []
    unclear: list[str] = []
    not_trained: list[str] = []
    for stored in read_all(folder):
        case = stored.case
        if case.state == "sweep" or (half is not None and split(case) != half):
            continue
        if not stored.columns:
            not_trained.append(f"{case.name}: {stored.facts['skipped']}")
            continue
        state = truth_of(stored, best).state
        if state == STATE_UNCLEAR:
            unclear.append(case.name)
            continue
        found = judge(series_of(stored.columns)).findings
        (healthy if state == "healthy" else planted).append((case, found))
    result = _of_healthy(healthy)
    for state in ("sick", "note"):
        result[state] = _of_planted([one for one in planted if one[0].state == state], state)
    return {"half": half or "both", **result, "unclear": unclear, "not_trained": not_trained}


def _of_healthy(runs: Sequence[tuple[Case, Sequence[Finding]]]) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    alarmed, notes, alarms = 0, [], []
    for case, found in runs:
        kinds.update({f"{one.severity} {one.kind}" for one in found})
        loud = [one for one in found if one.severity != "note"]
        alarmed += bool(loud)
        alarms += [f"{case.name}: {_said(one)}" for one in loud]
        notes += [f"{case.name}: {_said(one)}" for one in found if one.severity == "note"]
    return {
        "false_alarms": _rate(alarmed, len(runs)),
        "false_alarms_by_kind": {
            kind: _rate(count, len(runs)) for kind, count in sorted(kinds.items())
        },
        "alarms_on_healthy": alarms,
        "notes_on_healthy": notes,
    }


def _of_planted(runs: Sequence[tuple[Case, Sequence[Finding]]], state: str) -> dict[str, Any]:
    by_variant: dict[str, list[bool]] = defaultdict(list)
    missed, elsewhere, placed, layered = [], [], 0, 0
    alarms_on_notes, alarmed = [], 0
    for case, found in runs:
        alarmed += any(one.severity != "note" for one in found)
        right = [
            one
            for one in found
            if one.kind in case.kinds and (state == "note" or one.severity != "note")
        ]
        by_variant[case.variant].append(bool(right))
        others = sorted({_said(one) for one in found if one not in right})
        if not right:
            missed.append(f"{case.name}: said {', '.join(others) or 'nothing'}")
        elif case.layer is not None:
            layered += 1
            if any(is_in_layer(case, one) for one in right):
                placed += 1
            else:
                where = sorted({f"{one.kind} {one.layer}" for one in right})
                elsewhere.append(f"{case.name}: layer {case.layer}, said {', '.join(where)}")
        if state == "note" and any(one.severity != "note" for one in found):
            alarms_on_notes.append(f"{case.name}: {', '.join(others)}")
    total = [one for ones in by_variant.values() for one in ones]
    result: dict[str, Any] = {
        "found": _rate(sum(total), len(total)),
        "any_warning": _rate(alarmed, len(total)),
        "by_variant": {name: _rate(sum(it), len(it)) for name, it in by_variant.items()},
        "right_layer": _rate(placed, layered),
        "wrong_layer": elsewhere,
        "missed": missed,
    }
    return result | ({"alarms": alarms_on_notes} if state == "note" else {})


def _said(finding: Finding) -> str:
    where = "" if finding.layer is None else f" in layer {finding.layer}"
    return f"{finding.severity} {finding.kind}{where} since step {finding.step}"

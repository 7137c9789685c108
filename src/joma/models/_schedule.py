"""At which steps a series should have checkpoints, given or inferred from the steps it has."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PYTHIA = (0, *(2**k for k in range(10)), *range(1000, 143_001, 1000))
"""The steps at which Pythia's 154 checkpoints were kept."""

SCHEDULES = {"pythia": PYTHIA}
"""Schedules known by name."""


@dataclass(frozen=True)
class Schedule:
    """Steps there should be, and why.

    Attributes:
        steps: in increasing order.
        reason: what makes them expected, as the end of a sentence.
    """

    steps: tuple[int, ...]
    reason: str


def inferred(steps: Sequence[int]) -> Schedule | None:
    """The regular schedule that `steps` are of, with perhaps a few missing; None where none is.

    Regular is constant spacing, powers of two, or powers of two followed by constant spacing, as
    Pythia has it. The spacing is the most frequent difference, at least twice and half of all, of
    which the others are multiples; a last step that ends the training early is no gap. No claim is
    made where spacing changes for good, nor where more than half as many would be missing as there
    are: those who keep few checkpoints on purpose should not be warned that they lost some.

    Args:
        steps: in increasing order, without repeats.
    """
    doubling = [step for step in steps if step & (step - 1) == 0]  # 0 too
    powers = [step for step in doubling if step]
    doubles = (
        len(powers) > 0
        and len(doubling) == len(steps)
        and powers == _doublings(powers[0], powers[-1])
    )
    if not doubles and (even := _even(steps)) is not None:  # 0, 1, 2, 4 lacks no 3
        spacing, there = even
        return _believable(Schedule(there, f"steps are {spacing} apart"), steps)
    if len(powers) < 3 or powers[0] > 2 or list(steps[: len(doubling)]) != doubling:
        return None
    first = [0] if steps[0] == 0 else []
    first += _doublings(powers[0], powers[-1])
    rest = [step for step in steps if step > powers[-1]]
    if not rest:
        return _believable(Schedule(tuple(first), "steps double"), steps)
    even = _even(rest)
    if even is None:
        return None
    spacing, there = even
    begin = powers[-1] // spacing * spacing + spacing if rest[0] % spacing == 0 else rest[0]
    if spacing == 1000 and set(steps) <= set(PYTHIA):
        first = [step for step in PYTHIA if step >= steps[0] and step < 1000]
    there = (*first, *range(begin, rest[0], spacing), *there)
    return _believable(Schedule(there, f"steps double, then are {spacing} apart"), steps)


def _even(steps: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
    """Constant spacing and the steps it gives, from the first step to the last."""
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    if len(gaps) < 2:
        return None
    counts = Counter(gaps)
    spacing, often = min(counts.items(), key=lambda item: (-item[1], item[0]))
    if gaps[-1] % spacing and len(gaps) > 2:  # training ended between two of them
        inner = _even(steps[:-1])
        return None if inner is None else (inner[0], (*inner[1], *_until(inner, steps[-1])))
    if often < 2 or 2 * often < len(gaps) or any(gap % spacing for gap in gaps):
        return None
    if gaps == sorted(gaps) and len(counts) > 1 and min(counts.values()) > 1:
        return None  # wider from some step on, which is a choice
    return spacing, tuple(range(steps[0], steps[-1] + 1, spacing))


def _until(inner: tuple[int, tuple[int, ...]], last: int) -> tuple[int, ...]:
    spacing, steps = inner
    return (*range(steps[-1] + spacing, last, spacing), last)


def _doublings(low: int, high: int) -> list[int]:
    return [2**k for k in range(high.bit_length()) if low <= 2**k <= high]


def _believable(schedule: Schedule, steps: Sequence[int]) -> Schedule | None:
    missing = len(set(schedule.steps) - set(steps))
    return schedule if 2 * missing <= len(steps) else None

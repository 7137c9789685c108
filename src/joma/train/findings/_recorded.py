"""The series of one training by name, and what rules have in common."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from joma.train.findings._finding import Finding, NotJudged
from joma.train.findings._series import Series

LAST = 3
"""Measurements at the end whose mean counts as where a series ends."""

Verdict = list[Finding | NotJudged]
"""What a rule returns: findings, and what it could not judge."""


class Recorded:
    """What was recorded of one training; single heads left out.

    In good trainings, too, some heads rest on one token: they are recorded and not judged.

    Args:
        series: In any order.
        ended: Whether the training has ended.
    """

    def __init__(self, series: Iterable[Series], *, ended: bool = True) -> None:
        self.ended = ended
        self._by_name: dict[str, list[Series]] = defaultdict(list)
        for one in series:
            if one.head is None and len(one.steps):
                self._by_name[one.name].append(one)
        self.last_step = max(
            (int(one.steps[-1]) for ones in self._by_name.values() for one in ones), default=0
        )

    def all(self, name: str) -> Sequence[Series]:
        """Return the series of a name, of all modules."""
        return self._by_name.get(name, ())

    def one(self, name: str) -> Series | None:
        """Return the series of a name that is of the whole model, None where there is none."""
        found = self.all(name)
        return found[0] if found else None

    def by_module(self, name: str) -> dict[str, Series]:
        """Return the series of a name by module."""
        return {one.module: one for one in self.all(name)}


Rule = Callable[[Recorded], Verdict]


@dataclass(frozen=True)
class Curve:
    """A loss over the steps, in medians of neighbouring steps.

    Attributes:
        steps: Step in the middle of each piece.
        levels: Median of each piece.
        noise: Typical distance of single losses from their piece's median.
        width: Steps of a piece.
    """

    steps: NDArray[np.int64]
    levels: NDArray[np.float64]
    noise: float
    width: int


def curve_of(loss: Series, pieces: int = 40, least: int = 5) -> Curve | None:
    """Return a loss in medians of neighbouring steps, None where it is too short or not finite.

    Args:
        loss: The loss of every step.
        pieces: How many pieces, at most.
        least: Steps of a piece, at least.
    """
    values = loss.values
    if not np.isfinite(values).all():
        return None
    width = max(least, -(-len(values) // pieces))
    count = len(values) // width
    if count < 4:
        return None
    # What is left over is at the beginning, where losses fall fast.
    values, steps = values[-count * width :], loss.steps[-count * width :]
    each = values.reshape(count, width)
    levels = np.median(each, axis=1)
    noise = float(np.median(np.abs(each - levels[:, None])) * 1.4826)
    return Curve(steps.reshape(count, width)[:, width // 2], levels, noise, width)


def end_of(values: NDArray[np.float64]) -> float | None:
    """Return where a series ends, None where it is too short to say."""
    return float(values[-LAST:].mean()) if len(values) >= LAST else None


def too_few(kind: str, measured: int, needed: int = LAST) -> NotJudged:
    """Return that a rule needs more measurements."""
    return NotJudged(kind, f"at least {needed} measurements; there {_are(measured)}")


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}" if count else "is none"


def place(one: Series) -> str:
    """Return where a series is from: "layer 3", "layer 0 (decoder cross)" or a module's path."""
    if one.layer is None:
        return one.module or "the model"
    which = one.kind if one.kind not in ("", "self") else ""
    if one.kind and "#" in one.module:
        which = f"{which} pass {one.module.rpartition('#')[2]}".strip()
    return f"layer {one.layer} ({which})" if which else f"layer {one.layer}"


def common_steps(series: Sequence[Series]) -> NDArray[np.int64]:
    """Return the steps that all series have."""
    common = series[0].steps
    for other in series[1:]:
        common = np.intersect1d(common, other.steps)
    return common


def at_steps(one: Series, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the values of a series at some of its steps."""
    return one.values[np.searchsorted(one.steps, steps)]

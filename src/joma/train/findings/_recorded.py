"""The recorded numbers of a training as series, and what several rules read of them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.train.findings._finding import Finding

LAST = 3
"""Measurements at the end whose mean counts as where a series ends."""
LOSSES = ("loss", "validation_loss")
"""Series of which values that are not finite are judged."""
UNTRAINED = 0.9
"""Share of ln(vocabulary) above which a first loss is of a model that knows nothing."""
SOLVED = 0.2
"""Share of ln(vocabulary) below which the loss is of a task that is solved, as text never is."""


class CannotJudgeError(Exception):
    """A rule needs what was not recorded; the message says what that is."""


class Rule(NamedTuple):
    """One entry of the table of rules.

    Attributes:
        kinds: The kinds of finding that it decides.
        judge: Returns what it found; raises CannotJudgeError where it cannot judge.
        series: A series of which it needs three measurements, "" for none.
    """

    kinds: tuple[str, ...]
    judge: Callable[["Recorded"], Iterable[Finding | None]]
    series: str = ""


@dataclass(frozen=True, eq=False)
class RecordedSeries:
    """One number over the steps of a training, in their order.

    Attributes:
        name: What was measured, "attention_entropy".
        steps: Steps of the measurements, increasing.
        values: One number for each step.
        module: Path of the module, "" for the whole model.
        layer: Layer index, None for what is in no layer.
        head: Head index, None for all heads.
        kind: Kind of attention ("self", "decoder cross"), "" for what is not attention.
    """

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    module: str = ""
    layer: int | None = None
    head: int | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        checked_series(self.steps, self.values)


def checked_series(steps: ArrayLike, values: ArrayLike) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Return steps and values as arrays.

    Raises:
        JomaError: They are not a series.
    """
    at, numbers = np.asarray(steps), np.asarray(values, dtype=np.float64)
    if at.ndim != 1 or at.shape != numbers.shape:
        raise JomaError(
            f"values must be one for each step, got shapes {numbers.shape} and {at.shape}"
        )
    if len(at) > 1 and not (np.diff(at) > 0).all():
        raise JomaError("steps must increase from one to the next")
    return at, numbers


def series_of(columns: Mapping[str, NDArray[Any]], member: int = 0) -> list[RecordedSeries]:
    """Return the series in the columns of a metrics log, as `run.metrics.read()` gives them.

    Args:
        columns: Columns by name.
        member: Member of an ensemble.
    """
    rows: dict[tuple[str, str, str, int, int], list[int]] = defaultdict(list)
    names, modules, kinds = columns["name"], columns["module"], columns["kind"]
    layers, heads = columns["layer"].tolist(), columns["head"].tolist()
    for row in np.flatnonzero(columns["member"] == member).tolist():
        what = str(names[row]), str(modules[row]), str(kinds[row])
        rows[*what, layers[row], heads[row]].append(row)
    found = []
    for (name, module, kind, layer, head), places in rows.items():
        series = in_order(columns["step"][places], columns["value"][places])
        where = (None if layer < 0 else layer, None if head < 0 else head)
        found.append(RecordedSeries(name, *series, module, *where, kind))
    return found


def in_order(
    steps: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return steps that increase with their values; of one that was logged again the later."""
    if (np.diff(steps) > 0).all():
        return steps, values
    order = np.argsort(steps, kind="stable")
    order = order[np.append(np.diff(steps[order]) > 0, True)]
    return steps[order], values[order]


@dataclass(frozen=True)
class LossCurve:
    """A loss over the steps, in medians of neighbouring steps.

    Attributes:
        steps: Step in the middle of each piece.
        levels: Median of each piece.
        noise: Typical distance of single losses from their piece's median.
    """

    steps: NDArray[np.int64]
    levels: NDArray[np.float64]
    noise: float


def curve_of(
    steps: NDArray[np.int64], values: NDArray[np.float64], pieces: int = 40
) -> LossCurve | None:
    """Return a loss in medians of neighbouring steps, None where it is short or not finite now.

    Args:
        steps: Every step.
        values: Loss of every step.
        pieces: How many pieces, at most; each has at least 5 steps.
    """
    finite = np.isfinite(values)
    if not finite[-10:].all():
        return None
    values, steps = values[finite], steps[finite]  # single ones, which have a finding of their own
    width = max(5, -(-len(values) // pieces))
    count = len(values) // width
    if count < 4:
        return None
    # What is left over is at the beginning, where losses fall fast.
    values, steps = values[-count * width :], steps[-count * width :]
    each = values.reshape(count, width)
    levels = np.median(each, axis=1)
    noise = float(np.median(np.abs(each - levels[:, None])) * 1.4826)
    return LossCurve(steps.reshape(count, width)[:, width // 2], levels, noise)


class Recorded:
    """What was recorded of one training; single heads left out.

    In good trainings, too, some heads rest on one token: they are recorded and not judged.

    Args:
        series: In any order.
        ended: Whether the training has ended.

    Attributes:
        by_name: The series of each name, of all modules.
        by_module: The same by name and module.
        last_step: The last step of any series.
        loss: The training loss, None where it was not recorded.
        curve: The same in medians, None where it is short or not finite.
        even_loss: The loss of a model that knows nothing, ln V; None where V is not known.
        is_fresh: Whether the training is known to begin with a model that knows nothing.
        is_solved: Whether the loss is nearly 0 for so many tokens, and at its lowest.
    """

    def __init__(self, series: Iterable[RecordedSeries], *, ended: bool = True) -> None:
        self.ended = ended
        self.by_name: dict[str, list[RecordedSeries]] = defaultdict(list)
        self.by_module: dict[str, dict[str, RecordedSeries]] = defaultdict(dict)
        for one in series:
            finite = np.isfinite(one.values)
            if one.name not in LOSSES and not finite.all():
                one = replace(one, steps=one.steps[finite], values=one.values[finite])
            if one.head is None and len(one.steps):
                self.by_name[one.name].append(one)
                self.by_module[one.name][one.module] = one
        self.last_step = max(
            (int(one.steps[-1]) for ones in self.by_name.values() for one in ones), default=0
        )
        self.loss = loss = next(iter(self.by_name["loss"]), None)
        self.curve = curve = None if loss is None else curve_of(loss.steps, loss.values)
        tokens = [float(one.values[-1]) for one in self.by_name["vocabulary"]]
        self.even_loss = even = math.log(tokens[0]) if tokens and tokens[0] >= 2 else None
        self.is_fresh = self.is_solved = False
        if loss is not None and even is not None and loss.steps[0] <= 1:
            self.is_fresh = UNTRAINED * even <= float(loss.values[0]) <= 3 * even
        if curve is not None and even is not None:
            end = curve.levels[-1]
            lowest = end - curve.levels.min() <= SOLVED * even / 2
            self.is_solved = bool(end <= SOLVED * even and lowest)


def end_of(values: NDArray[np.float64]) -> float | None:
    """Return where a series ends, None where it is too short to say."""
    return float(values[-LAST:].mean()) if len(values) >= LAST else None


def since(steps: NDArray[Any], holds: NDArray[np.bool_]) -> int:
    """Return the step since which a condition holds; the last one where it does not any more."""
    others = np.flatnonzero(~holds)
    return int(steps[min(int(others[-1]) + 1, len(steps) - 1) if len(others) else 0])


def check_enough(series: Iterable[RecordedSeries], unmeasured: str) -> None:
    """Raise CannotJudgeError where no series is long enough; `unmeasured` where there is none."""
    longest = max((len(one.steps) for one in series), default=0)
    if longest < LAST:
        raise CannotJudgeError(needs_more(longest) if longest else unmeasured)


def needs_more(count: int, needed: int = LAST, what: str = "measurements") -> str:
    """Return that a rule needs more measurements."""
    there = "is 1" if count == 1 else f"are {count}" if count else "is none"
    return f"at least {needed} {what}; there {there}"


def place_name(layer: int | None, module: str = "", kind: str = "") -> str:
    """Return where a series is from: "layer 3", "layer 0 (decoder cross)" or a module's path."""
    if layer is None:
        return module or "the model"
    which = kind if kind != "self" else ""
    if kind and "#" in module:
        which = f"{which} pass {module.rpartition('#')[2]}".strip()
    return f"layer {layer} ({which})" if which else f"layer {layer}"


def table_of(
    series: Sequence[RecordedSeries],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the steps that all series have, and their values there, (series, steps)."""
    steps = series[0].steps
    for other in series[1:]:
        steps = np.intersect1d(steps, other.steps)
    return steps, np.array([one.values[np.searchsorted(one.steps, steps)] for one in series])

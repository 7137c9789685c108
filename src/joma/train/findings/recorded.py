"""The recorded numbers of a training as series, and what rules have in common."""

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.train.findings.finding import Finding, NotJudged

LAST = 3
"""Measurements at the end whose mean counts as where a series ends."""

LOSSES = ("loss", "validation_loss")
"""Series of which values that are not finite are judged."""
UNTRAINED = 0.9
"""Share of ln(vocabulary) above which a first loss is of a model that knows nothing."""
SOLVED = 0.2
"""Share of ln(vocabulary) below which the loss is of a task that is solved, as text never is."""

Verdict = Iterator[Finding | NotJudged | None]
"""What a rule yields: findings, what it could not judge, and None for what it did not find."""


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
        series = _in_order(columns["step"][places], columns["value"][places])
        where = (None if layer < 0 else layer, None if head < 0 else head)
        found.append(RecordedSeries(name, *series, module, *where, kind))
    return found


def _in_order(
    steps: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return steps that increase with their values; of one that was logged again the later."""
    if (np.diff(steps) > 0).all():
        return steps, values
    order = np.argsort(steps, kind="stable")
    order = order[np.append(np.diff(steps[order]) > 0, True)]
    return steps[order], values[order]


MOST_NUMBERS = 2_000_000
"""Numbers kept in memory (16 bytes each); beyond that the older half of long series is thinned."""
_LONG = 1024
"""Numbers up to which a series is never thinned."""


class History:
    """The series of a training, grown row by row, so that nothing is read again to judge them.

    Numbers of single heads are not kept: they are recorded, and not judged.

    Attributes:
        changes: How many numbers were ever added; the same number means the same series.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._numbers, self._most = 0, MOST_NUMBERS
        self._series: dict[tuple[str, str, str, int | None], tuple[array[int], array[float]]] = {}

    def add(
        self,
        name: str,
        steps: Sequence[int],
        values: Sequence[float],
        module: str = "",
        kind: str = "",
        layer: int | None = None,
    ) -> None:
        """Add numbers to a series; the arguments are what `RecordedSeries` has."""
        key = name, module, kind, layer
        if key not in self._series:
            self._series[key] = array("q"), array("d")
        kept_steps, kept_values = self._series[key]
        kept_steps.extend(steps)
        kept_values.extend(values)
        self.changes += len(steps)
        self._numbers += len(steps)
        if self._numbers > self._most:
            self._thin()

    def add_columns(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Add what a metrics log has, as `run.metrics.read()` gives it."""
        kept = columns["head"] < 0
        for one in series_of({name: column[kept] for name, column in columns.items()}):
            steps, values = one.steps.tolist(), one.values.tolist()
            self.add(one.name, steps, values, one.module, one.kind, one.layer)

    def series(self) -> list[RecordedSeries]:
        """Return the series as they are now, in the order in which they began."""
        return [
            RecordedSeries(
                name, *_in_order(np.array(steps), np.array(values)), module, layer, None, kind
            )
            for (name, module, kind, layer), (steps, values) in self._series.items()
        ]

    def _thin(self) -> None:
        """Drop every second number of the older half of long series."""
        for steps, values in self._series.values():
            half = len(steps) // 2
            if len(steps) > _LONG:
                steps[:half], values[:half] = steps[:half:2], values[:half:2]
        self._numbers = sum(len(steps) for steps, _ in self._series.values())
        # Many series that are all short cannot be thinned, and need not be tried at every row.
        self._most = max(MOST_NUMBERS, 5 * self._numbers // 4)


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


class Recorded:
    """What was recorded of one training; single heads left out.

    In good trainings, too, some heads rest on one token: they are recorded and not judged.

    Args:
        series: In any order.
        ended: Whether the training has ended.
    """

    def __init__(self, series: Iterable[RecordedSeries], *, ended: bool = True) -> None:
        self.ended = ended
        self._by_name: dict[str, list[RecordedSeries]] = defaultdict(list)
        for one in series:
            whole = one if one.name in LOSSES else _finite(one)
            if whole.head is None and len(whole.steps):
                self._by_name[one.name].append(whole)
        self.last_step = max(
            (int(one.steps[-1]) for ones in self._by_name.values() for one in ones), default=0
        )

    def all(self, name: str) -> Sequence[RecordedSeries]:
        """Return the series of a name, of all modules."""
        return self._by_name.get(name, ())

    def one(self, name: str) -> RecordedSeries | None:
        """Return the series of a name that is of the whole model, None where there is none."""
        found = self.all(name)
        return found[0] if found else None

    @property
    def even_loss(self) -> float | None:
        """The loss of a model that knows nothing, ln V; None where V is not known."""
        vocabulary = self.one("vocabulary")
        tokens = 0.0 if vocabulary is None else float(vocabulary.values[-1])
        return math.log(tokens) if tokens >= 2 else None

    @property
    def is_fresh(self) -> bool:
        """Whether the training is known to begin with a model that knows nothing."""
        loss, even = self.one("loss"), self.even_loss
        if loss is None or even is None or loss.steps[0] > 1:
            return False
        return UNTRAINED * even <= float(loss.values[0]) <= 3 * even

    @property
    def is_solved(self) -> bool:
        """Whether the loss is nearly 0 for so many tokens, and at its lowest."""
        loss, even = self.one("loss"), self.even_loss
        curve = None if loss is None else curve_of(loss)
        if curve is None or even is None:
            return False
        end = curve.levels[-1]
        return bool(end <= SOLVED * even and end - curve.levels.min() <= SOLVED * even / 2)

    def by_module(self, name: str) -> dict[str, RecordedSeries]:
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


def curve_of(loss: RecordedSeries, pieces: int = 40, least: int = 5) -> Curve | None:
    """Return a loss in medians of neighbouring steps, None where it is short or not finite now.

    Args:
        loss: The loss of every step.
        pieces: How many pieces, at most.
        least: Steps of a piece, at least.
    """
    values, steps = loss.values, loss.steps
    finite = np.isfinite(values)
    if not finite[-10:].all():
        return None
    values, steps = values[finite], steps[finite]  # single ones, which have a finding of their own
    width = max(least, -(-len(values) // pieces))
    count = len(values) // width
    if count < 4:
        return None
    # What is left over is at the beginning, where losses fall fast.
    values, steps = values[-count * width :], steps[-count * width :]
    each = values.reshape(count, width)
    levels = np.median(each, axis=1)
    noise = float(np.median(np.abs(each - levels[:, None])) * 1.4826)
    return Curve(steps.reshape(count, width)[:, width // 2], levels, noise, width)


def _finite(one: RecordedSeries) -> RecordedSeries:
    """Return a series without values that are not finite."""
    finite = np.isfinite(one.values)
    return one if finite.all() else replace(one, steps=one.steps[finite], values=one.values[finite])


def end_of(values: NDArray[np.float64]) -> float | None:
    """Return where a series ends, None where it is too short to say."""
    return float(values[-LAST:].mean()) if len(values) >= LAST else None


def since(steps: NDArray[Any], holds: NDArray[np.bool_]) -> int:
    """Return the step since which a condition holds; the last one where it does not any more."""
    others = np.flatnonzero(~holds)
    return int(steps[min(int(others[-1]) + 1, len(steps) - 1) if len(others) else 0])


def not_enough(
    kinds: Sequence[str], series: Sequence[RecordedSeries], unmeasured: str
) -> Sequence[NotJudged]:
    """Return that rules need more measurements; nothing where a series is long enough.

    Args:
        kinds: Names of the rules.
        series: What they judge.
        unmeasured: What they need where there is no series.
    """
    longest = max((len(one.steps) for one in series), default=0)
    if longest >= LAST:
        return ()
    needs = needs_more(longest) if series else unmeasured
    return [NotJudged(kind, needs) for kind in kinds]


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


def common_steps(series: Sequence[RecordedSeries]) -> NDArray[np.int64]:
    """Return the steps that all series have."""
    common = series[0].steps
    for other in series[1:]:
        common = np.intersect1d(common, other.steps)
    return common


def at_steps(one: RecordedSeries, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the values of a series at some of its steps."""
    return one.values[np.searchsorted(one.steps, steps)]

"""The metrics log of a run as charts: a series for each key, thinned where it is long."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.report.html._words import EVEN, FACTS, SETTINGS, SHAPES, chart_words, order_of
from joma.report.thinning import kept_points

FEWEST_POINTS = 40
"""Points that every series keeps, however many series a run has."""
_NEGLIGIBLE = 1e-6
"""Bounds below this share of every value are given as one number for the series."""
_LARGEST_CODE = 2**62
_JOINED = {"validation_loss": "loss"}
"""Metrics that are drawn in the chart of another."""

Log = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RecordedSeries:
    """All numbers of a run that share a key.

    Attributes:
        metric: Name of the metric.
        module: Path of the module, None for the whole model.
        kind: Kind of attention, None for what is not attention.
        layer: Layer index, or None.
        head: Head index, or None.
        member: Member of the ensemble.
        steps: The steps (S,).
        values: The values (S,).
        bounds: Bounds on the error of the values (S,), NaN where there is none.
    """

    metric: str
    module: str | None
    kind: str | None
    layer: int | None
    head: int | None
    member: int
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    bounds: NDArray[np.float64]

    @property
    def role(self) -> str:
        """The module with a star for the layer, "encoder.layers.*.linear1": what layers share."""
        words = (self.module or "").split(".")
        if self.layer is not None and str(self.layer) in words:
            words[words.index(str(self.layer))] = "*"
        role = ".".join(words)
        return role if self.kind in (None, "self") else f"{role} ({self.kind})"

    @property
    def name(self) -> str:
        """What a legend calls it."""
        place = self.metric if self.layer is None else f"layer {self.layer}"
        if self.layer is None and self.module:
            place = self.module
        return place if self.head is None else f"{place}, head {self.head}"


def recorded_series(log: Log) -> Iterator[RecordedSeries]:
    """Yield the series of a metrics log, in the order of their first rows.

    Args:
        log: Columns, as `Metrics.read` returns them.
    """
    count = log["step"].size
    if not count:
        return
    code = np.zeros(count, dtype=np.int64)
    for column in ("name", "module", "kind", "layer", "head", "member"):
        numbers = _codes(log[column])
        if int(code.max() + 1) * int(numbers.max() + 1) > _LARGEST_CODE:
            code = _codes(code)
        code = code * (numbers.max() + 1) + numbers
    order = np.argsort(code, kind="stable")
    cuts = np.flatnonzero(np.diff(code[order])) + 1
    for rows in sorted(np.split(order, cuts), key=lambda it: it[0]):
        first = rows[0]
        yield RecordedSeries(
            metric=str(log["name"][first]),
            module=str(log["module"][first]) or None,
            kind=str(log["kind"][first]) or None,
            layer=_place(log["layer"][first]),
            head=_place(log["head"][first]),
            member=int(log["member"][first]),
            steps=log["step"][rows],
            values=log["value"][rows],
            bounds=log["bound"][rows],
        )


def charts(recorded: list[RecordedSeries], most_points: int, budget: int) -> list[dict[str, Any]]:
    """Return the charts of a run, JSON-ready.

    Where there are so many series that a few points of each exceed the budget, those of single
    heads are left out, and the charts say how many.

    Args:
        recorded: The series of its log.
        most_points: The most points of a series.
        budget: About the most points of all series together.
    """
    drawn = [it for it in recorded if it.metric not in (*SHAPES, EVEN) and not _is_fact(it)]
    by_chart: dict[str, list[RecordedSeries]] = {}
    left_out: dict[str, int] = {}
    crowded = len(drawn) * FEWEST_POINTS > 2 * budget
    for series in drawn:
        key = _JOINED.get(series.metric, series.metric)
        listed = by_chart.setdefault(key, [])
        if crowded and series.head is not None:
            left_out[key] = left_out.get(key, 0) + 1
        else:
            listed.append(series)
    chosen = [it for listed in by_chart.values() for it in listed]
    most = _Most.within(chosen, most_points, budget)
    even = sorted({float(it.values[-1]) for it in recorded if it.metric == EVEN and it.values.size})
    return [
        {
            **_chart(key, by_chart[key], most, even if key == "attention_entropy" else []),
            "left_out": left_out.get(key, 0),
        }
        for key in sorted(by_chart, key=order_of)
    ]


def facts(recorded: list[RecordedSeries]) -> list[dict[str, Any]]:
    """Return what is recorded once or when it changes, the last value of each."""
    return [
        {**_key(it), "step": int(it.steps[-1]), "value": _number(it.values[-1])}
        for it in recorded
        if _is_fact(it)
    ]


def _is_fact(series: RecordedSeries) -> bool:
    """Return whether a series is listed rather than drawn."""
    if series.metric in SETTINGS:
        return bool(np.all(series.values == series.values[:1]))
    return series.metric in FACTS


def _chart(
    key: str, listed: list[RecordedSeries], most: "_Most", even: list[float]
) -> dict[str, Any]:
    words = chart_words(key)
    listed = sorted(listed, key=_order)
    lines = [{"name": "even attention", "value": _number(value)} for value in even[:3]]
    return {
        "key": key,
        "title": words.title,
        "sentence": words.sentence,
        "unit": words.unit,
        "section": words.section,
        "axes": {"x": "step", "y": words.unit or words.title},
        "logarithmic": words.logarithmic,
        "lines": lines,
        "series": [_series(it, most.of(it)) for it in listed],
    }


def _series(series: RecordedSeries, most: int) -> dict[str, Any]:
    kept = kept_points(series.values, most)
    values = series.values[kept]
    record = {
        "name": series.name,
        **_key(series),
        "role": series.role,
        "steps": series.steps[kept].tolist(),
        "values": rounded(values),
        "marks": _marks(values),
        "thinned": kept.size < series.values.size,
        "total": int(series.values.size),
    }
    bound = _bound(series.values[kept], series.bounds[kept])
    if bound is not None:
        record["bound"] = bound
    return record


def _key(series: RecordedSeries) -> dict[str, Any]:
    return {
        "metric": series.metric,
        "module": series.module,
        "kind": series.kind,
        "layer": series.layer,
        "head": series.head,
        "member": series.member,
    }


def rounded(values: NDArray[np.float64]) -> list[float | None]:
    """Return values to six digits, None for what is not finite."""
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _marks(values: NDArray[np.float64]) -> dict[str, list[int]]:
    """Return the places of values that JSON has no number for."""
    found = {
        "nan": np.flatnonzero(np.isnan(values)),
        "inf": np.flatnonzero(values == np.inf),
        "-inf": np.flatnonzero(values == -np.inf),
    }
    return {name: places.tolist() for name, places in found.items() if places.size}


def _bound(
    values: NDArray[np.float64], bounds: NDArray[np.float64]
) -> float | list[float | None] | None:
    """Return the bounds of a series: one for all where they are negligible, None without any."""
    known = np.isfinite(bounds)
    if not known.any():
        return None
    if np.all(bounds[known] <= _NEGLIGIBLE * np.abs(values[known])):
        return float(f"{bounds[known].max():.2g}")
    return [float(f"{it:.2g}") if math.isfinite(it) else None for it in bounds.tolist()]


@dataclass(frozen=True)
class _Most:
    """The most points of a series that is of no single head, and of one that is."""

    whole: int
    head: int

    @classmethod
    def within(cls, chosen: list[RecordedSeries], most: int, budget: int) -> "_Most":
        """Return what keeps all within a budget; heads, which are many, get what others leave."""
        whole = [it.values.size for it in chosen if it.head is None]
        heads = [it.values.size for it in chosen if it.head is not None]
        of_whole = _most_points(whole, most, int((0.75 if heads else 1.0) * budget))
        left = budget - sum(min(size, of_whole) for size in whole)
        return cls(of_whole, _most_points(heads, most, max(left, 0)))

    def of(self, series: RecordedSeries) -> int:
        return self.whole if series.head is None else self.head


def _most_points(sizes: list[int], most: int, budget: int) -> int:
    """Return the most points of a series with which all of them stay within the budget."""
    counts = np.sort(np.asarray(sizes, dtype=np.int64))
    if not counts.size or np.minimum(counts, most).sum() <= budget:
        return most
    below = np.concatenate(([0], np.cumsum(counts)[:-1]))
    levels = (budget - below) / np.arange(counts.size, 0, -1)
    fits = np.flatnonzero(levels <= counts)
    level = int(levels[fits[0]]) if fits.size else most
    return max(FEWEST_POINTS, min(most, level))


def _order(series: RecordedSeries) -> tuple[Any, ...]:
    layer = -1 if series.layer is None else series.layer
    head = -1 if series.head is None else series.head
    return series.metric != "loss", series.metric, series.role, layer, head, series.member


def _codes(column: NDArray[Any]) -> NDArray[np.int64]:
    """Return a number for each entry, the same for the same entries, counted from 0."""
    if column.dtype != object:
        return np.unique(column, return_inverse=True)[1].astype(np.int64)
    # A log shares its words, so that few are compared as text.
    places = np.fromiter(map(id, column), np.int64, count=column.size)
    _, first, codes = np.unique(places, return_index=True, return_inverse=True)
    known: dict[Any, int] = {}
    same = np.array([known.setdefault(word, len(known)) for word in column[first]], np.int64)
    return same[codes]


def _place(value: Any) -> int | None:
    return None if value < 0 else int(value)

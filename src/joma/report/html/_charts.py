"""The metrics log of a run as charts: a series for each key, thinned where it is long."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.report._curves import chart_order, chart_words, energy_rank, kept_points

FEWEST_POINTS = 40
"""Points that every series keeps, however many series a run has."""
_NEGLIGIBLE = 1e-6
"""Bounds below this share of every value are given as one number for the series."""
_LARGEST_CODE = 2**62
_LISTED = ("requires_grad", "optimized", "tied_layer", "vocabulary", "not_finite", "frozen")
"""Metrics that are listed rather than drawn."""
_SETTINGS = ("learning_rate", "weight_decay")
"""Metrics that are drawn only where they change."""
_SHAPES = ("matrix_rows", "matrix_columns")
_EVEN = "attention_uniform"
"""Metric that holds the entropy of even attention; a line in the chart of the entropy."""
_BYTES = 4  # of a number in float32
_JOINED = {"validation_loss": "loss"}
"""Metrics that are drawn in the chart of another."""

Log = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class LoggedSeries:
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


def logged_series(log: Log) -> Iterator[LoggedSeries]:
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
        yield LoggedSeries(
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


def charts(logged: list[LoggedSeries], most_points: int, budget: int) -> list[dict[str, Any]]:
    """Return the charts of a run, JSON-ready.

    Where there are so many series that a few points of each exceed the budget, those of single
    heads are left out, and the charts say how many.

    Args:
        logged: The series of its log.
        most_points: The most points of a series.
        budget: About the most points of all series together.
    """
    drawn = [it for it in logged if it.metric not in (*_SHAPES, _EVEN) and not _is_listed(it)]
    crowded = len(drawn) * FEWEST_POINTS > 2 * budget
    by_chart: dict[str, list[LoggedSeries]] = {}
    for series in drawn:
        by_chart.setdefault(_JOINED.get(series.metric, series.metric), []).append(series)
    chosen = [it for it in drawn if not crowded or it.head is None]
    whole = [it.values.size for it in chosen if it.head is None]
    heads = [it.values.size for it in chosen if it.head is not None]
    most = _most_points(whole, most_points, int((0.75 if heads else 1.0) * budget))
    left = budget - sum(min(size, most) for size in whole)  # heads, which are many, get the rest
    most_of_heads = _most_points(heads, most_points, left)
    even = sorted({float(it.values[-1]) for it in logged if it.metric == _EVEN and it.values.size})
    found = []
    for key in sorted(by_chart, key=chart_order):
        words = chart_words(key)
        shown = sorted((it for it in by_chart[key] if it in chosen), key=_order)
        lines = even[:3] if key == "attention_entropy" else []
        found.append(
            {
                "key": key,
                **words,
                "axes": {"x": "step", "y": words["unit"] or words["title"]},
                "lines": [{"name": "even attention", "value": _number(it)} for it in lines],
                "series": [_series(it, most if it.head is None else most_of_heads) for it in shown],
                "left_out": len(by_chart[key]) - len(shown),
            }
        )
    return found


def listed_values(logged: list[LoggedSeries]) -> list[dict[str, Any]]:
    """Return what is recorded once or when it changes, the last value of each."""
    return [
        {**_key(it), "step": int(it.steps[-1]), "value": _number(it.values[-1])}
        for it in logged
        if _is_listed(it)
    ]


def _is_listed(series: LoggedSeries) -> bool:
    constant = series.metric in _SETTINGS and bool(np.all(series.values == series.values[:1]))
    return constant or series.metric in _LISTED


def _series(series: LoggedSeries, most: int) -> dict[str, Any]:
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


def _key(series: LoggedSeries) -> dict[str, Any]:
    names = ("metric", "module", "kind", "layer", "head", "member")
    return {name: getattr(series, name) for name in names}


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


def _most_points(sizes: list[int], most: int, budget: int) -> int:
    """Return the most points of a series with which all of them stay within the budget."""
    counts = np.asarray(sizes, dtype=np.int64)
    least = min(most, FEWEST_POINTS)
    while most > least and np.minimum(counts, most).sum() > budget:
        most = max(int(0.9 * most), least)
    return most


def _order(series: LoggedSeries) -> tuple[Any, ...]:
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


def gradient_ranks(logged: list[LoggedSeries]) -> dict[str, Any] | None:
    """Return the last finite rank of every gradient, and the optimizer's memory by rank.

    AdamW keeps two moments of a matrix of m × n, 2mn numbers. GaLore of rank r keeps two moments
    of r × max(m, n) and a basis of min(m, n) × r; a matrix whose smaller side is at most r is not
    projected.

    Args:
        logged: The series of a run's log.

    Returns:
        None where no gradient's rank was measured.
    """
    found: dict[str, dict[str, Any]] = {}
    for series in logged:
        rank = energy_rank(series.metric)
        finite = np.flatnonzero(np.isfinite(series.values))
        if series.head is not None or series.member or not series.module or not finite.size:
            continue
        entry = found.setdefault(series.module, {"layer": series.layer, "energy": {}})
        last = float(series.values[finite[-1]])
        if rank or series.metric == "gradient_stable_rank":
            entry["step"] = int(series.steps[finite[-1]])
            entry["lost"] = entry.get("lost", False) or finite[-1] + 1 < series.values.size
        if rank:
            entry["energy"][rank] = round(last, 6)
        elif series.metric == "gradient_stable_rank":
            entry["stable_rank"] = float(f"{last:.4g}")
        elif series.metric in ("matrix_rows", "matrix_columns"):
            entry[series.metric] = int(last)
    weights = [{"module": module, **entry} for module, entry in found.items() if "step" in entry]
    if not weights:
        return None
    lost = [weight.pop("lost") for weight in weights]
    ranks = sorted({rank for weight in weights for rank in weight["energy"]})
    shaped = [it for it in weights if "matrix_rows" in it and "matrix_columns" in it]
    return {
        "weights": weights,
        "ranks": [_at_rank(rank, weights, shaped) for rank in ranks],
        "finite": not any(lost),
        "shapes": len(shaped),
        "adamw_bytes": sum(2 * _BYTES * it["matrix_rows"] * it["matrix_columns"] for it in shaped)
        or None,
    }


def _at_rank(
    rank: int, weights: list[dict[str, Any]], shaped: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what a rank holds of the gradients, and what it would take of memory."""
    energies = sorted(it["energy"][rank] for it in weights if rank in it["energy"])
    return {
        "rank": rank,
        "gradients": len(energies),
        "least": energies[0],
        "median": energies[(len(energies) - 1) // 2],
        "galore_bytes": sum(_BYTES * _galore_numbers(it, rank) for it in shaped) or None,
    }


def _galore_numbers(weight: dict[str, Any], rank: int) -> int:
    small, large = sorted((weight["matrix_rows"], weight["matrix_columns"]))
    return 2 * small * large if small <= rank else rank * (2 * large + small)

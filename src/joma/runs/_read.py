"""What runs measured: a tidy table for one's own analysis, curves by layer, and differences."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from joma.common.checks import check_one_of
from joma.errors import JomaError
from joma.runs._metrics import KEYS
from joma.runs._run import Run

TableKind = Literal["arrow", "pandas", "polars"]
"""Which library's table `read` returns."""

_COLUMNS = ["step", "time", "name", "module", "kind", "layer", "head", "member", "value", "bound"]
"""Columns of a log in the order of the table, where the name is called the metric."""


def read(
    run: Run | Path | str | Sequence[Run | Path | str],
    *,
    metric: str | Sequence[str] | None = None,
    as_: TableKind = "arrow",
) -> Any:
    """Return what runs measured as a tidy table: one row for each number.

    Its columns are step, time (seconds since 1970), metric, module, kind (of attention), layer,
    head, member (of an ensemble), value and bound (on the error of the value). What a number does
    not have, such as a head, is null. Of several runs, the column run comes first: their folders.

    Args:
        run: A run or its folder, or a list of them. A run that is being written has what was
            flushed.
        metric: The metric to read, "attention_entropy", or several; otherwise all.
        as_: Library of the table: "arrow" for a pyarrow.Table, "pandas" or "polars" for their
            DataFrame, where they are installed.

    Raises:
        JomaError: A folder is not a run or is damaged, no run has such a metric, or the library is
            not installed.
    """
    check_one_of("as_", as_, get_args(TableKind))
    if as_ != "arrow" and importlib.util.find_spec(as_) is None:
        raise JomaError(
            f'as_="{as_}" needs {as_}, which is not installed; install it, or read as "arrow"'
        )
    several = not isinstance(run, Run | Path | str)
    given = list(run) if isinstance(run, Sequence) and several else [run]
    if not given:
        raise JomaError("run must be a run folder or a list of them, got an empty list")
    runs = [one if isinstance(one, Run) else Run.open(one) for one in given]
    names = None if metric is None else [metric] if isinstance(metric, str) else list(metric)
    table = _tidy(runs, names, several)
    if names is not None and table.num_rows == 0:
        known = sorted({name for one in runs for name in one.metrics.read()["name"].tolist()})
        if unknown := [name for name in names if name not in known]:
            raise JomaError(
                f"metric must be one that was recorded, got {', '.join(map(repr, unknown))}; "
                f"there is {', '.join(known) or 'none'}"
            )
    return _converted(table, as_)


def _tidy(runs: Sequence[Run], names: Sequence[str] | None, several: bool) -> Any:
    import pyarrow

    tables = []
    for one in runs:
        log = one.metrics.table(names)
        columns = {{"name": "metric"}.get(name, name): log.column(name) for name in _COLUMNS}
        if several:
            path = pyarrow.array([str(one.path)], pyarrow.string())
            zeros = pyarrow.nulls(log.num_rows, pyarrow.int32()).fill_null(0)
            columns = {"run": pyarrow.DictionaryArray.from_arrays(zeros, path), **columns}
        words = {
            name: column.cast(pyarrow.string())
            for name, column in columns.items()
            if pyarrow.types.is_dictionary(column.type)
        }
        tables.append(pyarrow.table({**columns, **words}))
    return pyarrow.concat_tables(tables).combine_chunks()


def _converted(table: Any, kind: TableKind) -> Any:
    if kind == "arrow":
        return table
    if kind == "polars":
        import polars  # pyright: ignore[reportMissingImports]

        return polars.from_arrow(table)
    import pandas  # pyright: ignore[reportMissingImports]
    import pyarrow

    # Nullable types: a missing layer is <NA>, not a layer of a column of floats.
    nullable = {
        pyarrow.int32(): pandas.Int32Dtype(),
        pyarrow.int64(): pandas.Int64Dtype(),
        pyarrow.string(): pandas.StringDtype(),
    }
    return table.to_pandas(types_mapper=nullable.get)


@dataclass(frozen=True, eq=False)
class Curve:
    """One number over the steps of a run.

    Attributes:
        label: What it is of: the layer's number, with the kind of attention where a layer has
            several; "" for the whole model.
        layer: Layer index, None for what is in no layer.
        steps: Increasing.
        values: One for each step; they may be NaN or infinite.
    """

    label: str
    layer: int | None
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


def curves_of(log: Mapping[str, NDArray[Any]], metric: str) -> list[Curve]:
    """Return a metric by layer, from what `run.metrics.read()` gives.

    Of an attention it is the mean over its heads, of a layer's weights the mean over its matrices;
    of an ensemble the mean over members. What is in no layer is left out where anything is in one.

    Args:
        log: Columns by name.
        metric: The metric's name.
    """
    chosen = log["name"] == metric
    chosen &= _whole(log, chosen)
    if np.any(log["layer"][chosen] >= 0):
        chosen &= log["layer"] >= 0
    if not chosen.any():
        return []
    rows = {name: log[name][chosen] for name in ("step", "layer", "module", "kind", "value")}
    module = np.where(rows["kind"] != "", rows["module"], "")
    places = [*zip(rows["layer"].tolist(), rows["kind"], module, strict=True)]
    known = sorted(set(places), key=lambda it: (it[1], it[0], it[2]))  # kind by kind
    numbers = {place: number for number, place in enumerate(known)}
    place = np.array([numbers[it] for it in places])
    curves, labels = [], _labels(known)
    for number, (layer, _, _) in enumerate(known):
        own = place == number
        curve = _mean_by_step(rows["step"][own], rows["value"][own])
        curves.append(Curve(labels[number], None if layer < 0 else int(layer), *curve))
    return curves


def loss_curves(log: Mapping[str, NDArray[Any]], metric: str = "loss") -> list[Curve]:
    """Return a metric of the whole model, one curve for each member of an ensemble.

    Args:
        log: As `run.metrics.read()` gives it.
        metric: Its name, "loss" or "validation_loss".
    """
    chosen = log["name"] == metric
    curves = []
    for member in np.unique(log["member"][chosen]).tolist():
        own = chosen & (log["member"] == member)
        label = "" if member == 0 else f"member {member}"
        curves.append(Curve(label, None, *_mean_by_step(log["step"][own], log["value"][own])))
    return curves


def _mean_by_step(
    steps: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    known, place = np.unique(steps, return_inverse=True)
    return known, np.bincount(place, values) / np.bincount(place)


def _whole(log: Mapping[str, NDArray[Any]], chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the rows of all heads together, or of heads where nothing else was recorded."""
    whole = log["head"] < 0
    with_whole = set(log["module"][chosen & whole].tolist())
    alone = [module not in with_whole for module in log["module"].tolist()]
    return whole | np.array(alone, dtype=bool)


def _labels(places: list[tuple[int, str, str]]) -> list[str]:
    layers = [layer for layer, _, _ in places]
    labels = []
    for layer, kind, module in places:
        words = [] if layer < 0 else [str(layer)]
        if layers.count(layer) > 1:
            same = [it for it in places if it[0] == layer and it[1] == kind]
            words += [kind] if len(same) == 1 else [kind, module.rpartition(".")[2]]
        labels.append(" ".join(word for word in words if word))
    return labels


@dataclass(frozen=True)
class TableDifference:
    """How a table differs between two runs.

    Attributes:
        table: Its name.
        same_shape: Whether both have the same columns and rows.
        largest: The largest absolute difference of each numeric column, NaN where only one of
            the two is NaN; the fraction of unequal entries for other columns.
    """

    table: str
    same_shape: bool
    largest: dict[str, float]

    @property
    def equal(self) -> bool:
        """Whether the tables are the same."""
        return self.same_shape and all(value == 0 for value in self.largest.values())


def compare_tables(first: Run, second: Run) -> list[TableDifference]:
    """Compare the tables that two runs have in common."""
    common = [name for name in first.tables if name in set(second.tables)]
    return [_compare(name, first.read_table(name), second.read_table(name)) for name in common]


def compare_metrics(first: Run, second: Run) -> TableDifference | None:
    """Compare what two runs logged, by name; return None if neither has a log.

    When it was logged does not count, nor in which order within a step.
    """
    one, two = (_in_order(run.metrics.read()) for run in (first, second))
    if not one["step"].size and not two["step"].size:
        return None
    if not all(np.array_equal(one[key], two[key]) for key in KEYS):
        return TableDifference("metrics", False, {})
    largest: dict[str, float] = {}
    for name in dict.fromkeys(one["name"]):
        rows = one["name"] == name
        for column, label in (("value", name), ("bound", f"{name} bound")):
            largest[label] = _largest(one[column][rows], two[column][rows])
    return TableDifference("metrics", True, largest)


def _in_order(log: Mapping[str, Any]) -> dict[str, Any]:
    sortable = dict(log)
    for key in ("name", "module", "kind"):
        sortable[key] = np.unique(log[key].astype(str), return_inverse=True)[1]
    order = np.lexsort([sortable[key] for key in reversed(KEYS)])
    return {key: column[order] for key, column in log.items()}


def _compare(table: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> TableDifference:
    shapes = [{name: column.shape for name, column in columns.items()} for columns in (one, two)]
    if shapes[0] != shapes[1]:
        return TableDifference(table, False, {})
    return TableDifference(table, True, {name: _largest(one[name], two[name]) for name in one})


def _largest(one: Any, two: Any) -> float:
    if one.size == 0:
        return 0.0
    if not all(np.issubdtype(column.dtype, np.number) for column in (one, two)):
        return float(np.mean(one != two))
    one, two = one.astype(np.float64), two.astype(np.float64)
    same = (one == two) | (np.isnan(one) & np.isnan(two))  # equal infinities have no difference
    gap = np.subtract(one, two, out=np.zeros_like(one), where=~same)
    return float(np.max(np.abs(gap)))

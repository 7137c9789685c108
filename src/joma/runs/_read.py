"""The metrics of runs as one tidy table, for one's own analysis."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from joma.common.checks import check_one_of
from joma.errors import JomaError
from joma.runs._run import Run

TableKind = Literal["arrow", "pandas", "polars"]
"""Which library's table `read` returns."""

_COLUMNS = {
    "step": "step",
    "time": "time",
    "metric": "name",
    "module": "module",
    "kind": "kind",
    "layer": "layer",
    "head": "head",
    "member": "member",
    "value": "value",
    "bound": "bound",
}
"""Columns of the table, and their names in a log."""


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
    _check_installed(as_)
    several = not isinstance(run, Run | Path | str)
    given = list(run) if isinstance(run, Sequence) and several else [run]
    if not given:
        raise JomaError("run must be a run folder or a list of them, got an empty list")
    runs = [_opened(one) for one in given]
    names = None if metric is None else [metric] if isinstance(metric, str) else list(metric)
    table = _tidy(runs, names, several)
    if names is not None and table.num_rows == 0:
        _check_names(runs, names)
    return _converted(table, as_)


def _opened(run: Any) -> Run:
    if isinstance(run, Run):
        return run
    if not isinstance(run, str | Path):
        raise JomaError(
            f"run must be a run, its folder or a list of them, got {type(run).__name__}"
        )
    return Run.open(run)


def _tidy(runs: Sequence[Run], names: Sequence[str] | None, several: bool) -> Any:
    import pyarrow

    tables = []
    for one in runs:
        log = one.metrics.table(names)
        columns = {column: log.column(name) for column, name in _COLUMNS.items()}
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


def _check_names(runs: Sequence[Run], names: Sequence[str]) -> None:
    known = sorted({name for run in runs for name in set(run.metrics.read()["name"])})
    if unknown := [name for name in names if name not in known]:
        raise JomaError(
            f"metric must be one that was recorded, got {', '.join(map(repr, unknown))}; "
            f"there is {', '.join(known) or 'none'}"
        )


def _check_installed(kind: TableKind) -> None:
    from importlib.util import find_spec

    if kind != "arrow" and find_spec(kind) is None:
        raise JomaError(
            f'as_="{kind}" needs {kind}, which is not installed; install it, or read as "arrow"'
        )


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

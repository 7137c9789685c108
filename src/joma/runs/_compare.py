"""Differences between two runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from joma.runs._metrics import KEYS
from joma.runs._run import Run


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

"""Tables of what was measured, and numbers and lists as sentences have them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows of equal keys as the columns of a table."""
    rows = list(rows)
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def long_table(values: np.ndarray, name: str, **axes: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return an array as a table with a row for each number.

    Args:
        values: The numbers.
        name: What the column of numbers is called.
        **axes: The labels along each axis of the array, in order.
    """
    places = np.indices(values.shape).reshape(values.ndim, -1)
    labels = zip(axes.items(), places, strict=True)
    return {
        **{axis: np.asarray(own)[place] for (axis, own), place in labels},
        name: values.ravel(),
    }


def concatenated(tables: Iterable[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return tables of equal columns one below the other; a single value is that of every row."""
    found: dict[str, list[np.ndarray]] = {}
    for table in tables:
        for name, values in zip(table, np.broadcast_arrays(*table.values()), strict=True):
            found.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in found.items()}


def listed(words: Iterable[Any]) -> str:
    """Return words in a sentence: "1, 2 and 5"."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


def mean_and_std(values: np.ndarray, digits: int = 2) -> str:
    """Return the mean over networks and, of several, its spread, as a table has it."""
    if len(values) < 2:
        return f"{values.mean():.{digits}f}"
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"


def mean_and_error(values: np.ndarray) -> str:
    """Return the mean over the networks that are there and, of several, its standard error."""
    there = values[np.isfinite(values)]
    error = f" ± {standard_error(there):.4f}" if len(there) > 1 else ""
    return f"{there.mean():.4f}{error}"


def standard_error(values: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean over seeds, the last axis."""
    return values.std(-1, ddof=1) / np.sqrt(values.shape[-1])

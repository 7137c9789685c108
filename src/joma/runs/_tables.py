"""Tables of a run: named columns of equal length, as Parquet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.runs import _parquet


def encode(columns: Mapping[str, ArrayLike]) -> bytes:
    """Return columns as the bytes of a Parquet file with a checksum."""
    import pyarrow

    arrays = _checked(columns)
    try:
        table = pyarrow.table({name: pyarrow.array(array) for name, array in arrays.items()})
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as e:
        raise JomaError(f"columns must hold numbers, text, dates or truth values: {e}") from e
    return _parquet.encode(table)


def decode(path: Path, data: bytes) -> dict[str, NDArray[Any]]:
    """Return the columns in the bytes of a Parquet file; `path` is for messages."""
    import pyarrow

    table, _ = _parquet.decode(path, data)
    try:
        return {
            name: _to_numpy(column)
            for name, column in zip(table.column_names, table.itercolumns(), strict=True)
        }
    except (pyarrow.ArrowException, ValueError, TypeError, IndexError) as error:
        raise JomaError(f"{path} is damaged or not a table of a run: {error}") from error


def _checked(columns: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
    if not columns:
        raise JomaError("columns must name at least one column, got none")
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    for name, array in arrays.items():
        if array.ndim != 1:
            raise JomaError(f"column {name!r} must have one axis, got shape {array.shape}")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise JomaError(f"columns must have equal lengths, got {lengths}")
    return arrays


def _to_numpy(column: Any) -> NDArray[Any]:
    import pyarrow.types

    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pyarrow.types.is_string(column.type) and column.null_count == 0:
        return np.asarray(column.to_pylist(), dtype=np.str_)
    return np.asarray(column.to_numpy())

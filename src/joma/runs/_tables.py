"""Tables of a run: named columns of equal length, as Parquet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.runs._write import replacing


def write(path: Path, columns: Mapping[str, ArrayLike]) -> None:
    """Writes columns as one Parquet file, whole or not at all."""
    import pyarrow
    import pyarrow.parquet

    arrays = _checked(columns)
    try:
        table = pyarrow.table({name: pyarrow.array(array) for name, array in arrays.items()})
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as e:
        raise JomaError(f"columns must hold numbers, text, dates or truth values: {e}") from e
    with replacing(path) as file:
        pyarrow.parquet.write_table(table, file)


def read(path: Path) -> dict[str, NDArray[Any]]:
    """The columns of a Parquet file as NumPy arrays."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path).read()
    except pyarrow.ArrowInvalid as error:
        raise JomaError(f"{path} is not a Parquet file: {error}") from error
    return {name: _to_numpy(table.column(name)) for name in table.column_names}


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

    if pyarrow.types.is_string(column.type) and column.null_count == 0:
        return np.asarray(column.to_pylist(), dtype=np.str_)
    return np.asarray(column.to_numpy())

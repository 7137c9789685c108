"""Tables as Parquet files with a checksum of all their bytes.

The SHA-256 stands in the file's own key-value metadata, which other readers ignore. It is that of
the file with zeros in its place.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.common.text import first_line
from joma.errors import JomaError

_KEY = b"joma.sha256"
_DIGITS = 64
_ZEROS = b"0" * _DIGITS
# Thrift's compact protocol has two bytes between a key and its value: the field's type, and a
# length of 64 that fits in one byte.
_BETWEEN = b"\x18\x40"


def encode(table: Any, **options: Any) -> bytes:
    """Return an Arrow table as the bytes of a Parquet file with a checksum.

    Args:
        table: The table.
        options: Options of `pyarrow.parquet.ParquetWriter`.
    """
    import pyarrow
    import pyarrow.parquet

    buffer = pyarrow.BufferOutputStream()
    with pyarrow.parquet.ParquetWriter(
        buffer, table.schema, write_page_checksum=True, **options
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_KEY.decode(): _ZEROS.decode()})
    data = bytearray(memoryview(buffer.getvalue()))
    start = _checksum_at(data)
    assert start is not None, "it was just written"
    assert data[start : start + _DIGITS] == _ZEROS
    data[start : start + _DIGITS] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def decode(path: Path, data: bytes) -> tuple[Any, bool]:
    """Return the Arrow table in the bytes of a Parquet file, and whether they have a checksum.

    Args:
        path: Where the bytes are from, for messages.
        data: The bytes. Without a checksum, as older files are, pages are still checked.
    """
    import pyarrow
    import pyarrow.parquet

    start = _checksum_at(data)
    if start is not None:
        zeroed = bytearray(data)
        zeroed[start : start + _DIGITS] = _ZEROS
        if hashlib.sha256(zeroed).hexdigest().encode() != data[start : start + _DIGITS]:
            raise JomaError(f"{path} is damaged: its contents do not match its checksum")
    try:
        file = pyarrow.parquet.ParquetFile(
            pyarrow.BufferReader(data), page_checksum_verification=True
        )
        table = file.read()
        table.validate(full=True)
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        reason = first_line(error).rstrip(".")
        raise JomaError(f"{path} is damaged or not a Parquet file: {reason}") from error
    return table.replace_schema_metadata(None), start is not None


def encode_columns(columns: Mapping[str, ArrayLike]) -> bytes:
    """Return named columns of equal length as the bytes of a Parquet file with a checksum."""
    import pyarrow

    if not columns:
        raise JomaError("columns must name at least one column, got none")
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    for name, array in arrays.items():
        if array.ndim != 1:
            raise JomaError(f"column {name!r} must have one axis, got shape {array.shape}")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise JomaError(f"columns must have equal lengths, got {lengths}")
    try:
        table = pyarrow.table({name: pyarrow.array(array) for name, array in arrays.items()})
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as e:
        raise JomaError(f"columns must hold numbers, text, dates or truth values: {e}") from e
    return encode(table)


def decode_columns(path: Path, data: bytes) -> dict[str, NDArray[Any]]:
    """Return the columns in the bytes of a Parquet file; `path` is for messages."""
    import pyarrow

    table, _ = decode(path, data)
    try:
        return {name: _to_numpy(table.column(name)) for name in table.column_names}
    except (pyarrow.ArrowException, ValueError, TypeError, IndexError, KeyError) as error:
        raise JomaError(f"{path} is damaged or not a table of a run: {error}") from error


def _to_numpy(column: Any) -> NDArray[Any]:
    import pyarrow.types

    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pyarrow.types.is_string(column.type) and column.null_count == 0:
        return np.asarray(column.to_pylist(), dtype=np.str_)
    return np.asarray(column.to_numpy())


def _checksum_at(data: bytes | bytearray) -> int | None:
    """Return where the checksum stands, None in a file without one."""
    found = data.rfind(_KEY + _BETWEEN)
    start = found + len(_KEY) + len(_BETWEEN)
    return None if found < 0 or start + _DIGITS > len(data) else start

"""Tables as Parquet files with a checksum of all their bytes, and the table of a metrics log.

The SHA-256 stands in the file's own key-value metadata, which other readers ignore. It is that of
the file with zeros in its place.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

_NONE = {"layer": -1, "head": -1, "bound": np.nan}
"""What stands for null once a column is a NumPy array."""

LOG_FORMAT: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": ["name", "module", "kind", "member", "layer", "head"],
    # Steps and times grow evenly, and most values were single precision: half the size.
    "column_encoding": {
        "step": "DELTA_BINARY_PACKED",
        "time": "BYTE_STREAM_SPLIT",
        "value": "BYTE_STREAM_SPLIT",
        "bound": "BYTE_STREAM_SPLIT",
    },
}
"""How a log is written."""


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
        data: The bytes. Without a checksum, pages are still checked.
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


class LogRows(NamedTuple):
    """The rows of one call: a value, and perhaps a bound, for each step and member."""

    name: str
    module: str | None
    kind: str | None
    layer: int | None
    head: int | None
    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    values_SE: NDArray[np.float64]
    bounds_SE: NDArray[np.float64] | None


def schema() -> Any:
    """Return the columns of a log, as Arrow has them."""
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    types = {"step": pa.int64(), "time": pa.float64(), "member": pa.int32()}
    types |= {"name": word, "module": word, "kind": word, "layer": pa.int32(), "head": pa.int32()}
    return pa.schema({**types, "value": pa.float64(), "bound": pa.float64()})


def log_table(calls: Sequence[LogRows]) -> Any:
    """Return the rows of calls as an Arrow table, step after step and member after member."""
    import pyarrow as pa

    sizes = [call.values_SE.size for call in calls]
    members = np.repeat(
        [call.values_SE.shape[1] for call in calls], [len(call.steps) for call in calls]
    )  # of each step
    begin = np.cumsum(members) - members
    absent = np.repeat([call.bounds_SE is None for call in calls], sizes)
    bounds = np.full(len(absent), np.nan)
    if not absent.all():
        given = [call.bounds_SE.ravel() for call in calls if call.bounds_SE is not None]
        bounds[~absent] = np.concatenate(given)

    def labels(field: str) -> Any:
        each = pa.array([getattr(call, field) for call in calls], own.field(field).type)
        return each.take(pa.array(np.repeat(np.arange(len(calls)), sizes)))

    own = schema()
    columns = {
        "step": np.repeat(np.concatenate([call.steps for call in calls]), members),
        "time": np.repeat(np.concatenate([call.times for call in calls]), members),
        "member": (np.arange(len(absent)) - np.repeat(begin, members)).astype(np.int32),
        **{field: labels(field) for field in ("name", "module", "kind", "layer", "head")},
        "value": np.concatenate([call.values_SE.ravel() for call in calls]),
        "bound": pa.array(bounds, mask=absent),
    }
    return pa.table(columns, schema=own)


def joined(tables: Sequence[Any]) -> Any:
    """Return one table of several, by step; rows of one step stay in the order of logging."""
    import pyarrow

    if not tables:
        return schema().empty_table()
    table = pyarrow.concat_tables(tables).unify_dictionaries().combine_chunks()
    step = table.column("step").to_numpy()
    if np.any(step[1:] < step[:-1]):
        table = table.take(pyarrow.array(np.argsort(step, kind="stable")))
    return table


def named(table: Any, names: Sequence[str]) -> Any:
    """Return the rows of a log whose name is one of `names`."""
    return table.filter(np.isin(words(table.column("name")), np.array(names, dtype=object)))


def columns(table: Any) -> dict[str, NDArray[Any]]:
    """Return the columns of a table as NumPy arrays, with -1, NaN or "" for null."""
    import pyarrow

    arrays: dict[str, NDArray[Any]] = {}
    for name, column in zip(table.column_names, table.itercolumns(), strict=True):
        if pyarrow.types.is_dictionary(column.type):
            arrays[name] = words(column)
        else:
            filled = column.fill_null(_NONE[name]) if column.null_count else column
            arrays[name] = filled.to_numpy()
    return arrays


def words(column: Any) -> NDArray[Any]:
    """Return text as an array of shared strings: a row costs a pointer, however long the word."""
    if len(column) == 0:
        return np.empty(0, dtype=object)
    array = column.unify_dictionaries().combine_chunks()
    known = np.array([*array.dictionary.to_pylist(), ""], dtype=object)
    return known[array.indices.fill_null(len(known) - 1).to_numpy()]

"""Parquet files with a checksum of all their bytes.

The SHA-256 stands in the file's own key-value metadata, which other readers ignore. It is that of
the file with zeros in its place.
"""

import hashlib
from pathlib import Path
from typing import Any

from joma.common.files import read_file, write_bytes
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


def write(path: Path, table: Any, **options: Any) -> None:
    """Write an Arrow table as a Parquet file with a checksum, whole or not at all."""
    write_bytes(path, encode(table, **options))


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
        found = hashlib.sha256(zeroed).hexdigest().encode()
        if found != data[start : start + _DIGITS]:
            raise JomaError(f"{path} is damaged: its contents do not match its checksum")
    try:
        file = pyarrow.parquet.ParquetFile(
            pyarrow.BufferReader(data), page_checksum_verification=True
        )
        table = file.read()
        table.validate(full=True)
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise JomaError(f"{path} is damaged or not a Parquet file: {_first_line(error)}") from error
    return table.replace_schema_metadata(None), start is not None


def read(path: Path) -> tuple[Any, bool]:
    """Return the Arrow table in a Parquet file, and whether the file has a checksum."""
    return decode(path, read_file(path))


def _checksum_at(data: bytes | bytearray) -> int | None:
    """Return where the checksum stands, None in a file without one."""
    found = data.rfind(_KEY + _BETWEEN)
    start = found + len(_KEY) + len(_BETWEEN)
    return None if found < 0 or start + _DIGITS > len(data) else start


def _first_line(error: Exception) -> str:
    lines = str(error).split("\n")
    return lines[0].rstrip(".") or type(error).__name__

"""Read and write JSON files: readable, strict, from Python and NumPy values alike."""

import json
import math
from collections.abc import Mapping, Set
from os import PathLike
from pathlib import Path
from typing import Any

from joma.common.files import read_file, write_bytes
from joma.common.quiet import first_line
from joma.errors import JomaError

LARGEST_JSON = 2**24
"""Bytes of a configuration; real ones have thousands."""

LARGEST_INDEX = 2**25
"""Bytes of an index of shards; the largest have millions."""


def plain(value: Any, *, finite: bool = True) -> Any:
    """`value` in the types JSON has.

    Args:
        value: of Python and NumPy types.
        finite: whether numbers that are not finite become null; JSON proper has none.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return None if finite and not math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {str(key): plain(item, finite=finite) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((plain(item, finite=finite) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(item, finite=finite) for item in value]
    if isinstance(value, PathLike):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy arrays and scalars, without importing NumPy
        return plain(value.tolist(), finite=finite)
    raise JomaError(f"{value!r} of type {type(value).__name__} cannot be written as JSON")


def encode(value: Any) -> bytes:
    """Return `value` as the bytes of a JSON file."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def decode(path: Path, data: bytes) -> Any:
    """Return the value in the bytes of a JSON file; `path` is for messages."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise JomaError(f"{path} is not valid JSON: {error}") from error


def write(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all."""
    write_bytes(path, encode(value))


def read(path: Path) -> Any:
    """Return the value in a JSON file."""
    try:
        data = read_file(path)
    except FileNotFoundError:
        raise JomaError(f"{path} does not exist") from None
    return decode(path, data)


def read_json(path: Path, largest: int = LARGEST_JSON) -> Any:
    """Return the contents of a JSON file.

    Args:
        path: The file.
        largest: How many bytes it may have.

    Raises:
        JomaError: It is no JSON, or too large.
    """
    try:
        size = path.stat().st_size
        if size > largest:
            raise JomaError(f"{path} has {size} bytes, more than the {largest} it may have")
        return json.loads(path.read_bytes())
    except JomaError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise JomaError(f"{path} must be a JSON file ({first_line(error)})") from error

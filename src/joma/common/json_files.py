"""Read and write JSON files: readable, strict, from Python and NumPy values alike."""

import json
import math
from collections.abc import Mapping, Set
from os import PathLike
from pathlib import Path
from typing import Any

from joma.common.files import read_file, write_bytes
from joma.common.text import first_line
from joma.errors import JomaError

LARGEST_JSON = 2**24
"""Most bytes of a model's configuration; real ones have thousands."""

LARGEST_INDEX = 2**25
"""Most bytes of an index of shards; the largest have millions."""


def plain(value: Any, *, finite: bool = True) -> Any:
    """Return a value in the types JSON has.

    Args:
        value: Of Python and NumPy types.
        finite: Whether numbers that are not finite become null; JSON proper has none.
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
        raise JomaError(f"{path} is not valid JSON: {first_line(error)}") from error


def write(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all."""
    write_bytes(path, encode(value))


def read(path: Path, *, largest: int | None = None) -> Any:
    """Return the value in a JSON file.

    Args:
        path: The file.
        largest: The most bytes it may have, if there is a limit.

    Raises:
        JomaError: It does not exist, is too large, or is not JSON.
    """
    try:
        data = read_file(path, largest=largest)
    except FileNotFoundError:
        raise JomaError(f"{path} does not exist") from None
    except OSError as error:
        raise JomaError(f"{path} cannot be read ({error.strerror})") from error
    return decode(path, data)

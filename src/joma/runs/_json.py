"""JSON as the run folder has it: readable, strict, from Python and NumPy values alike."""

import json
import math
from collections.abc import Mapping, Set
from os import PathLike
from pathlib import Path
from typing import Any

from joma.errors import JomaError
from joma.runs._read import read_file
from joma.runs._write import write_bytes


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

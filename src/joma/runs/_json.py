"""JSON as the run folder has it: readable, strict, from Python and NumPy values alike."""

import json
import math
from collections.abc import Mapping, Set
from os import PathLike
from pathlib import Path
from typing import Any

from joma.errors import JomaError
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


def write(path: Path, value: Any) -> None:
    """Writes `value` as JSON, whole or not at all."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


def read(path: Path) -> Any:
    """The value in a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JomaError(f"{path} does not exist") from None
    except (ValueError, RecursionError) as error:
        raise JomaError(f"{path} is not valid JSON: {error}") from error

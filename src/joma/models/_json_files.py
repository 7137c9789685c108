"""JSON files of a model, which may be damaged or far larger than they should be."""

import json
from pathlib import Path
from typing import Any

from joma.errors import JomaError
from joma.models._quiet import first_line

LARGEST_JSON = 2**24
"""Bytes of a configuration; real ones have thousands."""

LARGEST_INDEX = 2**25
"""Bytes of an index of shards; the largest have millions."""


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

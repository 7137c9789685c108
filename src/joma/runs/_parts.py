"""The files of a metrics log: which there are, which of them count, and what is in them.

A part is `part-N.parquet`, or `part-FIRST-LAST.parquet` when it holds what was in the parts FIRST
to LAST. By its name alone it takes their place: while it is there, those it covers do not count,
whether or not they were removed already. So merging is one rename, and no moment of it loses a
row or counts one twice.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.common.files import sync_folder
from joma.errors import JomaError
from joma.runs import _parquet

_NAME = re.compile(r"part-(\d{6,})(?:-(\d{6,}))?\.parquet")
_NONE = {"layer": -1, "head": -1, "bound": np.nan}
"""What stands for null once a column is a NumPy array."""

_FORMAT: dict[str, Any] = {
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


@dataclass(frozen=True)
class Part:
    """A file of the log, and the numbers of the parts whose rows it holds."""

    path: Path
    first: int
    last: int

    @classmethod
    def at(cls, folder: Path, first: int, last: int) -> "Part":
        """The part of `folder` for these numbers; its file need not be there."""
        numbers = f"{first:06d}" if first == last else f"{first:06d}-{last:06d}"
        return cls(folder / f"part-{numbers}.parquet", first, last)


def counting(folder: Path) -> tuple[list[Part], list[Part]]:
    """The parts that count, in their order, and those that others cover."""
    count: list[Part] = []
    covered: list[Part] = []
    for part in _there(folder):
        if not count or part.first > count[-1].last:
            count.append(part)
        elif part.last <= count[-1].last:
            covered.append(part)
        else:
            raise JomaError(
                f"{part.path} and {count[-1].path.name} hold the same parts in part, "
                f"which no metrics log has; one of them is not of this run"
            )
    return count, covered


def first_missing(count: Sequence[Part], expected: int) -> int | None:
    """Return the first of parts 0, …, `expected` - 1 and of those between that no file holds.

    Args:
        count: The parts that count, in their order.
        expected: How many there must be at least; more may have been written just before a kill.
    """
    following = 0
    for part in count:
        if part.first > following:
            return following
        following = part.last + 1
    return following if following < expected else None


def remove(parts: Sequence[Part]) -> None:
    """Removes files of parts."""
    for part in parts:
        part.path.unlink(missing_ok=True)
    if parts:
        sync_folder(parts[0].path.parent)


def schema() -> Any:
    """The columns of a log, as Arrow has them."""
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        {
            "step": pa.int64(),
            "time": pa.float64(),
            "member": pa.int32(),
            "name": word,
            "module": word,
            "kind": word,
            "layer": pa.int32(),
            "head": pa.int32(),
            "value": pa.float64(),
            "bound": pa.float64(),
        }
    )


def write(part: Part, table: Any) -> None:
    """Write a table as the file of a part, whole or not at all."""
    _parquet.write(part.path, table, **_FORMAT)


def read(part: Part) -> Any:
    """Return the table in the file of a part."""
    table, has_checksum = _parquet.read(part.path)
    if not has_checksum and table.schema.names == [n for n in schema().names if n != "kind"]:
        table = _with_kind(table)  # of an older version, which had neither
        has_checksum = True
    if not table.schema.equals(schema()):
        columns = ", ".join(table.schema.names)
        raise JomaError(f"{part.path} is not a metrics log: its columns are {columns}")
    if not has_checksum:
        raise JomaError(f"{part.path} is damaged: it has no checksum")
    return table


def _with_kind(table: Any) -> Any:
    """Return the table of an older log, which has no kinds, with an empty column of them."""
    import pyarrow

    field = schema().field("kind")
    position = schema().get_field_index("kind")
    return table.add_column(position, field, pyarrow.nulls(table.num_rows, field.type))


def joined(tables: Sequence[Any]) -> Any:
    """One table of several, by step; rows of one step stay in the order they were logged."""
    import pyarrow

    if not tables:
        return schema().empty_table()
    table = pyarrow.concat_tables(tables).unify_dictionaries().combine_chunks()
    step = table.column("step").to_numpy()
    if np.any(step[1:] < step[:-1]):
        table = table.take(pyarrow.array(np.argsort(step, kind="stable")))
    return table


def columns(table: Any) -> dict[str, NDArray[Any]]:
    """The columns of a table as NumPy arrays, with -1, NaN or "" for null."""
    import pyarrow

    arrays: dict[str, NDArray[Any]] = {}
    for name, column in zip(table.column_names, table.itercolumns(), strict=True):
        if pyarrow.types.is_dictionary(column.type):
            arrays[name] = _words(column)
        else:
            filled = column.fill_null(_NONE[name]) if column.null_count else column
            arrays[name] = filled.to_numpy()
    return arrays


def rows_of(table: Any, name: str) -> Any:
    """The rows of a table that have this name."""
    import pyarrow

    return table.filter(pyarrow.array(_words(table.column("name")) == name))


def rows_until(table: Any, step: int) -> Any:
    """The rows of a table up to and with this step."""
    import pyarrow

    return table.filter(pyarrow.array(table.column("step").to_numpy() <= step))


def _there(folder: Path) -> list[Part]:
    """All parts, one that covers others before them."""
    parts: list[Part] = []
    for name in os.listdir(folder) if folder.is_dir() else []:
        if match := _NAME.fullmatch(name):
            first, last = int(match[1]), int(match[2] or match[1])
            parts.append(Part(folder / name, first, last))
    return sorted(parts, key=lambda part: (part.first, -part.last))


def _words(column: Any) -> NDArray[Any]:
    """Text as an array of shared strings: a row costs a pointer, however long the word is."""
    if len(column) == 0:
        return np.empty(0, dtype=object)
    array = column.unify_dictionaries().combine_chunks()
    words = np.array([*array.dictionary.to_pylist(), ""], dtype=object)
    return words[array.indices.fill_null(len(words) - 1).to_numpy()]

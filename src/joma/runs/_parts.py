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

from joma.common.files import read_file, sync_folder, write_bytes
from joma.errors import JomaError
from joma.runs import _tables

KEYS = ("step", "name", "module", "kind", "layer", "head", "member")
"""The columns that identify a row."""

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
class LogPart:
    """A file of the log, and the numbers of the parts whose rows it holds."""

    path: Path
    first: int
    last: int

    @classmethod
    def at(cls, folder: Path, first: int, last: int) -> "LogPart":
        """Return the part of `folder` for these numbers; its file need not exist."""
        numbers = f"{first:06d}" if first == last else f"{first:06d}-{last:06d}"
        return cls(folder / f"part-{numbers}.parquet", first, last)

    def write(self, table: Any) -> None:
        """Write a table as the file, whole or not at all."""
        write_bytes(self.path, _tables.encode(table, **_FORMAT))

    def read(self) -> Any:
        """Return the table in the file."""
        import pyarrow

        table, has_checksum = _tables.decode(self.path, read_file(self.path))
        own = schema()
        if not has_checksum and table.schema.names == [n for n in own.names if n != "kind"]:
            has_checksum = True  # of an older version, which had neither
            kinds = pyarrow.nulls(table.num_rows, own.field("kind").type)
            table = table.add_column(own.get_field_index("kind"), own.field("kind"), kinds)
        if not table.schema.equals(own):
            columns = ", ".join(table.schema.names)
            raise JomaError(f"{self.path} is not a metrics log: its columns are {columns}")
        if not has_checksum:
            raise JomaError(f"{self.path} is damaged: it has no checksum")
        return table


def counting(folder: Path) -> tuple[list[LogPart], list[LogPart]]:
    """Return the parts that count, in their order, and those that others cover."""
    parts: list[LogPart] = []
    for name in os.listdir(folder) if folder.is_dir() else []:
        if match := _NAME.fullmatch(name):
            parts.append(LogPart(folder / name, int(match[1]), int(match[2] or match[1])))
    count: list[LogPart] = []
    covered: list[LogPart] = []
    for part in sorted(parts, key=lambda part: (part.first, -part.last)):
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


def first_missing(count: Sequence[LogPart], expected: int) -> int | None:
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


def remove(parts: Sequence[LogPart]) -> None:
    """Remove the files of parts."""
    for part in parts:
        part.path.unlink(missing_ok=True)
    if parts:
        sync_folder(parts[0].path.parent)


def schema() -> Any:
    """Return the columns of a log, as Arrow has them."""
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

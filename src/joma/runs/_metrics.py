"""The metrics log of a run: numbers by step, in long format, in one file or several.

A part is `part-N.parquet`, or `part-FIRST-LAST.parquet` when it holds what was in the parts FIRST
to LAST. By its name alone it takes their place: while it is there, those it covers do not count,
whether or not they were removed already. So merging is one rename, and no moment of it loses a
row or counts one twice.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time as now
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.common.checks import whole_number
from joma.common.files import read_end, read_file, sync_folder, write_bytes
from joma.errors import JomaError
from joma.runs import _tables
from joma.runs._manifest import Manifest
from joma.runs._tables import LogRows

KEYS = ("step", "name", "module", "kind", "layer", "head", "member")
"""The columns that identify a row."""

_NAME = re.compile(r"part-(\d{6,})(?:-(\d{6,}))?\.parquet")
T = TypeVar("T")
_INT64 = int(np.iinfo(np.int64).max)


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
        write_bytes(self.path, _tables.encode(table, **_tables.LOG_FORMAT))

    def check_end(self) -> None:
        """Raise JomaError if the file does not end as a Parquet file does."""
        if read_end(self.path, 4) != b"PAR1":
            raise JomaError(f"{self.path} is damaged: it was cut short")

    def read(self) -> Any:
        """Return the table in the file."""
        table, has_checksum = _tables.decode(self.path, read_file(self.path))
        own = _tables.schema()
        if not table.schema.equals(own):
            columns = ", ".join(table.schema.names)
            raise JomaError(f"{self.path} is not a metrics log: its columns are {columns}")
        if not has_checksum:
            raise JomaError(f"{self.path} is damaged: it has no checksum")
        return table


@dataclass
class _Unwritten:
    """Rows not yet written, and the part they go to once a flush was tried.

    A flush that failed after its file was in place, or was interrupted there, is repeated into the
    same part, so that no row comes twice.
    """

    calls: list[LogRows] = field(default_factory=list)
    part: LogPart | None = None


class Metrics:
    """The log of a run, `metrics/part-*.parquet`; got by `run.metrics`.

    A row is one number: step, time (seconds since 1970 in UTC), member (of the ensemble), name,
    module, kind (of attention), layer, head, value and bound (on the error of the value). Rows are
    kept in memory until `flush`; what was flushed survives a kill. One process writes a run's log;
    any may read it, also while it grows.

    Args:
        folder: The folder of the parts, which need not exist yet.
        manifest: The run's manifest, which says how many parts there are; a missing part is then
            refused.
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._unwritten = _Unwritten()

    def append(
        self,
        step: int,
        name: str,
        values: ArrayLike,
        *,
        module: str | None = None,
        kind: str = "",
        layer: int | None = None,
        head: int | None = None,
        bound: ArrayLike | None = None,
        time: float | None = None,
    ) -> None:
        """Log one step; write nothing yet.

        Args:
            step: The step at which it was measured.
            name: The metric's name.
            values: A number, or one for each member.
            module: Path of the module it was measured of; None or "" for the whole model.
            kind: Kind of attention ("self", "decoder cross", …), "" for other metrics.
            layer: Layer index, or None for the whole model.
            head: Head index, or None for all heads.
            bound: Bound on the error of the value; one for all, or one for each member.
            time: When it was measured, in seconds since 1970; otherwise now.
        """
        numbers = _numbers("values", values)
        if numbers.ndim > 1:
            raise JomaError(
                f"values must be a number or one for each member, got shape {numbers.shape}"
            )
        about = {"module": module, "kind": kind, "layer": layer, "head": head}
        self.append_many([step], name, numbers.reshape(1, -1), bound=bound, time=time, **about)

    def append_many(
        self,
        steps: ArrayLike,
        name: str,
        values_SE: ArrayLike,
        *,
        module: str | None = None,
        kind: str = "",
        layer: int | None = None,
        head: int | None = None,
        bound: ArrayLike | None = None,
        time: ArrayLike | None = None,
    ) -> None:
        """Log many steps at once, as `append` does one.

        Args:
            steps: The steps at which it was measured.
            name: The metric's name.
            values_SE: A number for each step and member.
            module: Path of the module it was measured of; None or "" for the whole model.
            kind: Kind of attention ("self", "decoder cross", …), "" for other metrics.
            layer: Layer index, or None for the whole model.
            head: Head index, or None for all heads.
            bound: Bound on the error; one for all, one for each member, or one for each value.
            time: One for all or one for each step; otherwise now.
        """
        values = _numbers("values_SE", values_SE)
        if values.ndim != 2:
            raise JomaError(f"values_SE must have axes (steps, members), got shape {values.shape}")
        numbers = _steps(steps)
        if len(numbers) != len(values):
            raise JomaError(
                f"values_SE must have a row for each of {len(numbers)} steps, got {len(values)}"
            )
        _check_labels(name, module, kind)
        times = _spread("time", now() if time is None else time, numbers.shape)
        bounds = None if bound is None else _spread("bound", bound, values.shape)
        places = _place("layer", layer), _place("head", head)
        labels = name, module or None, kind or None, *places
        self._unwritten.calls.append(LogRows(*labels, numbers, times, values, bounds))

    def flush(self) -> None:
        """Write what was appended since the last flush as a new part, whole or not at all.

        When that fails the rows are kept, and the next flush writes them.
        """
        unwritten = self._unwritten
        if not unwritten.calls:
            return
        if self._manifest is not None:
            self._manifest.check_folder()
        if unwritten.part is None:
            parts, _ = self._parts()
            number = parts[-1].last + 1 if parts else 0
            unwritten.part = LogPart.at(self._folder, number, number)
        unwritten.part.write(_tables.log_table(unwritten.calls))
        self._set_count(unwritten.part.last + 1)
        self._unwritten = _Unwritten()  # in one stroke: an interrupt finds them written, or kept

    def read(self, name: str | None = None) -> dict[str, NDArray[Any]]:
        """Return the columns of what was flushed, by step and within a step as it was logged.

        Where a row has no layer or head they are -1, where it has no bound that is NaN, and where
        it has no module or kind that is "". Words come as arrays of strings (dtype object).

        Args:
            name: The metric whose rows to read; otherwise all.
        """
        return _tables.columns(self.table(None if name is None else [name]))

    def table(self, names: Sequence[str] | None = None) -> Any:
        """Return what was flushed as an Arrow table, in the order of `read`, with nulls.

        Args:
            names: The metrics whose rows to read; otherwise all.
        """

        def chosen(parts: Sequence[LogPart]) -> Any:
            tables = [part.read() for part in parts]
            return _tables.joined(
                tables if names is None else [_tables.named(it, names) for it in tables]
            )

        return self._with_parts(chosen)

    def end(self, name: str) -> tuple[int | None, NDArray[np.float64] | None]:
        """Return the last step of the log, and the values of a metric at the last step it has.

        Parts are read from the end, and no more of them than needed. The values are one for each
        member, or for whatever else has the same name; either is None where there is no row.

        Args:
            name: The metric.
        """

        def found(parts: Sequence[LogPart]) -> tuple[int | None, NDArray[np.float64] | None]:
            last = None
            for part in reversed(parts):
                table = part.read()
                if last is None and table.num_rows:
                    last = int(table.column("step").to_numpy().max())
                rows = _tables.named(table, [name])
                if rows.num_rows:
                    steps, values = (rows.column(it).to_numpy() for it in ("step", "value"))
                    return last, values[steps == steps.max()]
            return last, None

        return self._with_parts(found)

    def check_ends(self) -> None:
        """Raise JomaError if a part is missing or was cut short, without reading them all."""
        self._with_parts(lambda parts: [part.check_end() for part in parts])

    def rewind(self, step: int) -> None:
        """Remove the rows after `step`, for a run that goes back there and logs them again.

        Each part is replaced whole: when this is cut short, rows up to `step` are all there, once,
        and it can be repeated.

        Args:
            step: The last step that is kept; -1 removes all rows.
        """
        step = whole_number("step", step, -1)
        if step == -1:
            self._unwritten = _Unwritten()
            parts, covered = _files(self._folder)  # whatever is damaged or missing goes too
        else:
            self.flush()
            parts, covered = self._parts()
        _remove(covered)  # first: they would count again if what covers them went
        stay = 0
        emptied: list[LogPart] = []
        for number, part in enumerate(parts if step >= 0 else (), 1):
            table = part.read()
            kept = table.filter(table.column("step").to_numpy() <= step)
            stay = number if kept.num_rows else stay
            if kept.num_rows == 0:
                emptied.append(part)
            elif kept.num_rows < table.num_rows:
                part.write(kept)
        for part in emptied:  # one between others stays, empty, so that none seems to be missing
            if part in parts[:stay]:
                part.write(_tables.joined([]))
        self._set_count(parts[stay - 1].last + 1 if stay else 0)
        for part in reversed(parts[stay:]):
            _remove([part])

    def compact(self) -> None:
        """Flush, and merge all parts into one; for the end of a run."""
        self.flush()
        parts, covered = self._parts()
        _remove(covered)
        if parts:
            self._set_count(parts[-1].last + 1)  # parts may have been copied here
        if len(parts) > 1:
            table = _tables.joined([part.read() for part in parts])
            LogPart.at(self._folder, parts[0].first, parts[-1].last).write(table)
            _remove(parts)

    def _with_parts(self, action: Callable[[Sequence[LogPart]], T]) -> T:
        """Return what an action makes of the parts that count."""
        before = None
        while True:
            parts, _ = self._parts()
            try:
                return action(parts)
            except FileNotFoundError:
                if parts == before:
                    raise
                before = parts  # the run has just merged or removed parts: list them again

    def _parts(self) -> tuple[list[LogPart], list[LogPart]]:
        """Return the parts that count and those others cover; raise JomaError if one is missing."""
        before = None
        while True:
            contents = None if self._manifest is None else self._manifest.read()
            found = _files(self._folder)
            missing = None if contents is None else _first_missing(found[0], contents.parts)
            if contents is None or missing is None:
                return found
            if (contents.parts, found) == before:
                path = LogPart.at(self._folder, missing, missing).path
                raise JomaError(f"{path} is missing: the run logged {contents.parts} parts")
            before = contents.parts, found  # the run may be writing: read both again

    def _set_count(self, count: int) -> None:
        if self._manifest is not None:
            self._manifest.set_parts(count)


def _files(folder: Path) -> tuple[list[LogPart], list[LogPart]]:
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


def _first_missing(count: Sequence[LogPart], expected: int) -> int | None:
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


def _remove(parts: Sequence[LogPart]) -> None:
    """Remove the files of parts."""
    for part in parts:
        part.path.unlink(missing_ok=True)
    if parts:
        sync_folder(parts[0].path.parent)


def _check_labels(name: str, module: str | None, kind: str) -> None:
    """Raise JomaError for words that cannot be written: such a row would block every flush."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise JomaError(f"name must be a word, got {name!r}")
    if module is not None and not (isinstance(module, str) and module.isprintable()):
        raise JomaError(f"module must be a module's name or None, got {module!r}")
    if not isinstance(kind, str) or not kind.isprintable():
        raise JomaError(f'kind must be a kind of attention or "", got {kind!r}')


def _numbers(what: str, given: ArrayLike) -> NDArray[np.float64]:
    """Return numbers as an array of our own: the caller may change theirs."""
    try:
        array = np.asarray(given)
    except ValueError:
        array = np.empty(0)
    if array.dtype.kind not in "fiub" or array.size == 0:
        raise JomaError(f"{what} must be one or more real numbers, got {given!r}")
    return array.astype(np.float64)


def _steps(given: ArrayLike) -> NDArray[np.int64]:
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError):
        array = np.empty(0)
    whole = array.dtype.kind in "iu" and array.ndim == 1 and array.size > 0
    if not whole or array.min() < 0 or array.max() > _INT64:
        raise JomaError(f"steps must be whole and ≥ 0, got {given!r}")
    return array.astype(np.int64)


def _spread(what: str, given: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float64]:
    array = _numbers(what, given)
    if array.ndim == 0:
        return np.full(shape, array)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise JomaError(
            f"{what} must be one number or fit what it is of, of shape {shape}, "
            f"got shape {array.shape}"
        ) from None


def _place(what: str, given: int | None) -> int | None:
    return None if given is None else whole_number(what, given, 0, below=2**31)

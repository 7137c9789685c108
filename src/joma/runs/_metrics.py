"""The metrics log of a run: numbers by step, in long format."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time as now
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.runs import _parts
from joma.runs._manifest import Manifest
from joma.runs._parts import LogPart

_INT64 = int(np.iinfo(np.int64).max)


class _Chunk(NamedTuple):
    """The rows of one call: a value, and perhaps a bound, for each step and member.

    -1 stands for no layer and no head.
    """

    name: str
    module: str | None
    kind: str | None
    layer: int
    head: int
    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    values: NDArray[np.float64]
    bounds: NDArray[np.float64] | None


@dataclass
class _Buffer:
    """Rows not yet written, and the part they go to once a flush was tried.

    A flush that failed after its file was in place, or was interrupted there, is repeated into the
    same part, so that no row comes twice.
    """

    chunks: list[_Chunk] = field(default_factory=list)
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
        self._buffer = _Buffer()

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
        labels = _labels(name, module, kind, layer, head)
        self._add(labels, _steps("step", [step]), numbers.reshape(1, -1), bound, time)

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
        numbers = _steps("steps", steps)
        if len(numbers) != len(values):
            raise JomaError(
                f"values_SE must have a row for each of {len(numbers)} steps, got {len(values)}"
            )
        self._add(_labels(name, module, kind, layer, head), numbers, values, bound, time)

    def flush(self) -> None:
        """Write what was appended since the last flush as a new part, whole or not at all.

        When that fails the rows are kept, and the next flush writes them.
        """
        buffer = self._buffer
        if not buffer.chunks:
            return
        if self._manifest is not None:
            self._manifest.check_folder()
        if buffer.part is None:
            count, _ = self._counting()
            number = count[-1].last + 1 if count else 0
            buffer.part = LogPart.at(self._folder, number, number)
        buffer.part.write(_table(buffer.chunks))
        self._set_parts(buffer.part.last + 1)
        self._buffer = _Buffer()  # in one stroke: an interrupt finds the rows written, or kept

    def read(self, name: str | None = None) -> dict[str, NDArray[Any]]:
        """Return the columns of what was flushed, by step and within a step as it was logged.

        Where a row has no layer or head they are -1, where it has no bound that is NaN, and where
        it has no module or kind that is "". Words come as arrays of strings (dtype object).

        Args:
            name: The metric whose rows to read; otherwise all.
        """
        before = None
        while True:
            count, _ = self._counting()
            try:
                tables = [part.read() for part in count]
            except FileNotFoundError:
                if count == before:
                    raise
                before = count  # the run has just merged or removed parts: list them again
                continue
            if name is not None:
                tables = [_rows(it, _parts.words(it.column("name")) == name) for it in tables]
            return _parts.columns(_parts.joined(tables))

    def rewind(self, step: int) -> None:
        """Remove the rows after `step`, for a run that goes back there and logs them again.

        Each part is replaced whole: when this is cut short, rows up to `step` are all there, once,
        and it can be repeated.

        Args:
            step: The last step that is kept; -1 removes all rows.
        """
        step = whole_number("step", step, -1)
        self._buffer = _Buffer() if step == -1 else self._buffer
        self.flush()
        count, covered = _parts.counting(self._folder) if step == -1 else self._counting()
        _parts.remove(covered)  # first: they would count again if what covers them went
        last = 0  # of the parts that stay
        emptied: list[LogPart] = []
        for number, part in enumerate(count if step >= 0 else (), 1):
            table = part.read()
            kept = _rows(table, table.column("step").to_numpy() <= step)
            last = number if kept.num_rows else last
            if kept.num_rows == 0:
                emptied.append(part)
            elif kept.num_rows < table.num_rows:
                part.write(kept)
        for part in emptied:  # one between others stays, empty, so that none seems to be missing
            if part in count[:last]:
                part.write(_parts.joined([]))
        self._set_parts(count[last - 1].last + 1 if last else 0)
        for part in reversed(count[last:]):
            _parts.remove([part])

    def compact(self) -> None:
        """Flush, and merge all parts into one; for the end of a run."""
        self.flush()
        count, covered = self._counting()
        _parts.remove(covered)
        if count:
            self._set_parts(count[-1].last + 1)  # parts may have been copied here
        if len(count) < 2:
            return
        table = _parts.joined([part.read() for part in count])
        LogPart.at(self._folder, count[0].first, count[-1].last).write(table)
        _parts.remove(count)

    def _counting(self) -> tuple[list[LogPart], list[LogPart]]:
        """Return the parts that count and those others cover; raise JomaError if one is missing."""
        before = None
        while True:
            contents = None if self._manifest is None else self._manifest.read()
            found = _parts.counting(self._folder)
            if contents is None:
                return found
            missing = _parts.first_missing(found[0], contents.parts)
            if missing is None:
                return found
            if (contents.parts, found) == before:
                path = LogPart.at(self._folder, missing, missing).path
                raise JomaError(f"{path} is missing: the run logged {contents.parts} parts")
            before = contents.parts, found  # the run may be writing: read both again

    def _set_parts(self, parts: int) -> None:
        if self._manifest is not None:
            self._manifest.set_parts(parts)

    def _add(
        self,
        labels: tuple[str, str | None, str | None, int, int],
        steps: NDArray[np.int64],
        values: NDArray[np.float64],
        bound: ArrayLike | None,
        time: ArrayLike | None,
    ) -> None:
        times = np.full(len(steps), now()) if time is None else _spread("time", time, steps.shape)
        bounds = None if bound is None else _spread("bound", bound, values.shape)
        self._buffer.chunks.append(_Chunk(*labels, steps, times, values, bounds))


def _table(chunks: Sequence[_Chunk]) -> Any:
    """Return the rows of chunks as an Arrow table, step after step and member after member."""
    import pyarrow as pa

    steps = np.concatenate([chunk.steps for chunk in chunks])
    times = np.concatenate([chunk.times for chunk in chunks])
    values = np.concatenate([chunk.values.ravel() for chunk in chunks])
    members = np.array([chunk.values.shape[1] for chunk in chunks])
    sizes = np.array([chunk.values.size for chunk in chunks])
    width = np.repeat(members, [len(chunk.steps) for chunk in chunks])  # of each step
    begin = np.cumsum(width) - width

    absent = np.repeat([chunk.bounds is None for chunk in chunks], sizes)
    bounds = np.full(len(values), np.nan)
    if not absent.all():
        given = [chunk.bounds.ravel() for chunk in chunks if chunk.bounds is not None]
        bounds[~absent] = np.concatenate(given)

    def words(label: str) -> Any:
        each = [getattr(chunk, label) for chunk in chunks]
        known = [word for word in dict.fromkeys(each) if word is not None]
        codes = {None: -1, **{word: code for code, word in enumerate(known)}}
        rows = np.repeat(np.array([codes[word] for word in each], dtype=np.int32), sizes)
        return pa.DictionaryArray.from_arrays(
            pa.array(rows, mask=rows < 0), pa.array(known, pa.string())
        )

    def places(label: str) -> Any:
        each = [getattr(chunk, label) for chunk in chunks]
        rows = np.repeat(np.array(each, dtype=np.int32), sizes)
        return pa.array(rows, mask=rows < 0)

    return pa.table(
        [
            np.repeat(steps, width),
            np.repeat(times, width),
            (np.arange(len(values)) - np.repeat(begin, width)).astype(np.int32),
            *map(words, ("name", "module", "kind")),
            *map(places, ("layer", "head")),
            values,
            pa.array(bounds, mask=absent),
        ],
        schema=_parts.schema(),
    )


def _labels(
    name: str, module: str | None, kind: str, layer: int | None, head: int | None
) -> tuple[str, str | None, str | None, int, int]:
    """Return the labels of a call's rows, checked."""
    # Printable is also what can be written: a row that cannot would block every flush.
    if not isinstance(name, str) or not name or not name.isprintable():
        raise JomaError(f"name must be a word, got {name!r}")
    if module is not None and not (isinstance(module, str) and module.isprintable()):
        raise JomaError(f"module must be a module's name or None, got {module!r}")
    if not isinstance(kind, str) or not kind.isprintable():
        raise JomaError(f'kind must be a kind of attention or "", got {kind!r}')
    return name, module or None, kind or None, _place("layer", layer), _place("head", head)


def _rows(table: Any, chosen: NDArray[np.bool_]) -> Any:
    import pyarrow

    return table.filter(pyarrow.array(chosen))


def _numbers(what: str, given: ArrayLike) -> NDArray[np.float64]:
    """Return numbers as an array of our own: the caller may change theirs."""
    try:
        array = np.asarray(given)
    except ValueError:
        array = np.empty(0)
    if array.dtype.kind not in "fiub" or array.size == 0:
        raise JomaError(f"{what} must be one or more real numbers, got {given!r}")
    return array.astype(np.float64)


def _steps(what: str, given: ArrayLike) -> NDArray[np.int64]:
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError):
        array = np.empty(0)
    whole = array.dtype.kind in "iu" and array.ndim == 1 and array.size > 0
    if not whole or array.min() < 0 or array.max() > _INT64:
        raise JomaError(f"{what} must be whole and ≥ 0, got {given!r}")
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


def _place(what: str, given: int | None) -> int:
    return -1 if given is None else whole_number(what, given, 0, below=2**31)

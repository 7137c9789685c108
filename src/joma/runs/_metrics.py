"""The metrics log of a run: numbers by step, in long format."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time as now
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.runs import _parts
from joma.runs._manifest import Manifest
from joma.runs._parts import Part

_INT32, _INT64 = (int(np.iinfo(kind).max) for kind in (np.int32, np.int64))


class _Labels(NamedTuple):
    """What the rows of one call have in common; -1 stands for no layer and no head."""

    name: str
    module: str | None
    kind: str | None
    layer: int
    head: int

    @classmethod
    def of(
        cls, name: str, module: str | None, kind: str, layer: int | None, head: int | None
    ) -> "_Labels":
        # Printable is also what can be written: a row that cannot would block every flush.
        if not isinstance(name, str) or not name or not name.isprintable():
            raise JomaError(f"name must be a word, got {name!r}")
        if module is not None and not (isinstance(module, str) and module.isprintable()):
            raise JomaError(f"module must be a module's name or None, got {module!r}")
        if not isinstance(kind, str) or not kind.isprintable():
            raise JomaError(f'kind must be a kind of attention or "", got {kind!r}')
        return cls(name, module or None, kind or None, _place("layer", layer), _place("head", head))


class _Chunk(NamedTuple):
    """The rows of one call: a value, and perhaps a bound, for each step and member."""

    labels: _Labels
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
    part: Part | None = None


class Metrics:
    """The log of a run, `metrics/part-*.parquet`; got by `run.metrics`.

    A row is one number: step, time (seconds since 1970 in UTC), member (of the ensemble), name,
    module, kind (of attention), layer, head, value and bound (on the error of the value). Rows are
    kept in memory until `flush`; what was flushed survives a kill. One process writes a run's log;
    any may read it, also while it grows.

    Args:
        folder: of the parts; need not be there yet.
        manifest: of the run, which says how many parts there are; a missing part is then refused.
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
        """Logs one step; writes nothing yet.

        Args:
            step: at which it was measured.
            name: of what was measured.
            values: a number, or one for each member.
            module: it is of, if of one; "" is the whole model, as None is.
            kind: of attention ("self", "decoder cross", …), "" for what is not attention.
            layer: it is of, if of one.
            head: it is of, if of one.
            bound: on the error of the value; one for all, or one for each member.
            time: when it was measured, in seconds since 1970; otherwise now.
        """
        labels = _Labels.of(name, module, kind, layer, head)
        held = _numbers("values", values)
        if held.ndim > 1:
            raise JomaError(
                f"values must be a number or one for each member, got shape {held.shape}"
            )
        self._hold(labels, _steps("step", [step]), held.reshape(1, -1), bound, time)

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
        """Logs many steps at once, as `append` does one.

        Args:
            steps: at which it was measured.
            name: of what was measured.
            values_SE: a number for each step and member.
            module: it is of, if of one.
            kind: of attention ("self", "decoder cross", …), "" for what is not attention.
            layer: it is of, if of one.
            head: it is of, if of one.
            bound: on the error; one for all, one for each member, or one for each value.
            time: one for all or one for each step; otherwise now.
        """
        labels = _Labels.of(name, module, kind, layer, head)
        values = _numbers("values_SE", values_SE)
        if values.ndim != 2:
            raise JomaError(f"values_SE must have axes (steps, members), got shape {values.shape}")
        held = _steps("steps", steps)
        if len(held) != len(values):
            raise JomaError(
                f"values_SE must have a row for each of {len(held)} steps, got {len(values)}"
            )
        self._hold(labels, held, values, bound, time)

    def flush(self) -> None:
        """Writes what was appended since the last flush as a new part, whole or not at all.

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
            buffer.part = Part.at(self._folder, number, number)
        _parts.write(buffer.part, _table(buffer.chunks))
        self._set_parts(buffer.part.last + 1)
        self._buffer = _Buffer()  # in one stroke: an interrupt finds the rows written, or kept

    def read(self, name: str | None = None) -> dict[str, NDArray[Any]]:
        """The columns of what was flushed, by step and within a step as it was logged.

        Where a row has no layer or head they are -1, where it has no bound that is NaN, and where
        it has no module or kind that is "". Words come as arrays of strings (dtype object).

        Args:
            name: whose rows to read; otherwise all.
        """
        before = None
        while True:
            count, _ = self._counting()
            try:
                tables = [_parts.read(part) for part in count]
            except FileNotFoundError:
                if count == before:
                    raise
                before = count  # the run has just merged or removed parts: look again
                continue
            if name is not None:
                tables = [_parts.rows_of(table, name) for table in tables]
            return _parts.columns(_parts.joined(tables))

    def rewind(self, step: int) -> None:
        """Forgets the rows after `step`, for a run that goes back there and logs them again.

        Each part is replaced whole: when this is cut short, rows up to `step` are all there, once,
        and it can be repeated.

        Args:
            step: the last one that is kept; -1 forgets all.
        """
        if not isinstance(step, int | np.integer) or step < -1:
            raise JomaError(f"step must be a whole number ≥ 0, or -1 for none, got {step!r}")
        self._buffer = _Buffer() if step == -1 else self._buffer
        self.flush()
        count, covered = _parts.counting(self._folder) if step == -1 else self._counting()
        _parts.remove(covered)  # first: they would count again if what covers them went
        last = 0  # of the parts that stay
        emptied: list[Part] = []
        for number, part in enumerate(count if step >= 0 else (), 1):
            table = _parts.read(part)
            kept = _parts.rows_until(table, int(step))
            last = number if kept.num_rows else last
            if kept.num_rows == 0:
                emptied.append(part)
            elif kept.num_rows < table.num_rows:
                _parts.write(part, kept)
        for part in emptied:  # one between others stays, empty, so that none seems to be missing
            if part in count[:last]:
                _parts.write(part, _parts.joined([]))
        self._set_parts(count[last - 1].last + 1 if last else 0)
        for part in reversed(count[last:]):
            _parts.remove([part])

    def compact(self) -> None:
        """Flushes, and merges all parts into one; for the end of a run."""
        self.flush()
        count, covered = self._counting()
        _parts.remove(covered)
        if count:
            self._set_parts(count[-1].last + 1)  # parts may have been copied here
        if len(count) < 2:
            return
        table = _parts.joined([_parts.read(part) for part in count])
        _parts.write(Part.at(self._folder, count[0].first, count[-1].last), table)
        _parts.remove(count)

    def _counting(self) -> tuple[list[Part], list[Part]]:
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
                path = Part.at(self._folder, missing, missing).path
                raise JomaError(f"{path} is missing: the run logged {contents.parts} parts")
            before = contents.parts, found  # the run may be writing: look again

    def _set_parts(self, parts: int) -> None:
        if self._manifest is not None:
            self._manifest.set_parts(parts)

    def _hold(
        self,
        labels: _Labels,
        steps: NDArray[np.int64],
        values: NDArray[np.float64],
        bound: ArrayLike | None,
        time: ArrayLike | None,
    ) -> None:
        times = np.full(len(steps), now()) if time is None else _spread("time", time, steps.shape)
        bounds = None if bound is None else _spread("bound", bound, values.shape)
        self._buffer.chunks.append(_Chunk(labels, steps, times, values, bounds))


def _table(chunks: Sequence[_Chunk]) -> Any:
    """The rows of chunks as an Arrow table, step after step and member after member."""
    import pyarrow as pa

    steps = np.concatenate([chunk.steps for chunk in chunks])
    times = np.concatenate([chunk.times for chunk in chunks])
    values = np.concatenate([chunk.values.ravel() for chunk in chunks])
    members = np.array([chunk.values.shape[1] for chunk in chunks])
    sizes = np.array([chunk.values.size for chunk in chunks])
    width = np.repeat(members, [len(chunk.steps) for chunk in chunks])  # of each step
    begin = np.cumsum(width) - width

    def word(words: Sequence[str | None]) -> Any:
        known = [word for word in dict.fromkeys(words) if word is not None]
        codes = {None: -1, **{word: code for code, word in enumerate(known)}}
        rows = np.repeat(np.array([codes[word] for word in words], dtype=np.int32), sizes)
        return pa.DictionaryArray.from_arrays(
            pa.array(rows, mask=rows < 0), pa.array(known, pa.string())
        )

    def place(places: Sequence[int]) -> Any:
        rows = np.repeat(np.array(places, dtype=np.int32), sizes)
        return pa.array(rows, mask=rows < 0)

    return pa.table(
        [
            np.repeat(steps, width),
            np.repeat(times, width),
            (np.arange(len(values)) - np.repeat(begin, width)).astype(np.int32),
            word([chunk.labels.name for chunk in chunks]),
            word([chunk.labels.module for chunk in chunks]),
            word([chunk.labels.kind for chunk in chunks]),
            place([chunk.labels.layer for chunk in chunks]),
            place([chunk.labels.head for chunk in chunks]),
            values,
            _bounds(chunks, sizes),
        ],
        schema=_parts.schema(),
    )


def _bounds(chunks: Sequence[_Chunk], sizes: NDArray[Any]) -> Any:
    import pyarrow as pa

    absent = np.repeat([chunk.bounds is None for chunk in chunks], sizes)
    bounds = np.full(len(absent), np.nan)
    if not absent.all():
        given = [chunk.bounds.ravel() for chunk in chunks if chunk.bounds is not None]
        bounds[~absent] = np.concatenate(given)
    return pa.array(bounds, mask=absent)


def _numbers(what: str, given: ArrayLike) -> NDArray[np.float64]:
    """`given` as an array of our own: the caller may go on using his."""
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
    if given is None:
        return -1
    if not isinstance(given, int | np.integer) or not 0 <= given <= _INT32:
        raise JomaError(f"{what} must be a whole number ≥ 0 or None, got {given!r}")
    return int(given)

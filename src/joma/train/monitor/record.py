"""What a monitor records: losses and rows, to memory, the run folder and loggers.

Any of these may fail; what cannot be written stays in memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from joma.errors import JomaError
from joma.runs import Run
from joma.train.findings import RecordedSeries, series_of
from joma.train.monitor.faults import Faults


@dataclass(frozen=True)
class Row:
    """One number as the metrics log has it.

    Attributes:
        name: What was measured, "stable_rank".
        value: The number.
        module: Path of the module, or the key of an attention call; None for the whole model.
        layer: Layer index, or None for what is in no layer.
        head: Head index, or None for the mean over heads or what has no heads.
        bound: Bound on the error of the value, or None where there is none.
        kind: Kind of attention, "self" or "decoder cross"; "" for what is not attention.
    """

    name: str
    value: float
    module: str | None = None
    layer: int | None = None
    head: int | None = None
    bound: float | None = None
    kind: str = ""

    @property
    def key(self) -> str:
        """A name for loggers that know one word for a series.

        "stable_rank/layer0/mlp.fc1"; for attention, whose heads are many, the layer stands for the
        module where the model has one attention per layer: "attention_entropy/layer0/head1".
        """
        words = [self.name]
        if self.layer is not None:
            words.append(f"layer{self.layer}")
        if self.kind not in ("", "self"):
            words.append(self.kind.replace(" ", "_"))
        if self.kind and self.module and "#" in self.module:
            words.append("pass" + self.module.rpartition("#")[2])
        if self.head is not None:
            words.append(f"head{self.head}")
        if self.module and not self.name.startswith("attention"):
            words.append(self.module)
        return "/".join(words)


_MANY = 4096


class Losses:
    """Keeps losses that were not recorded yet.

    Args:
        faults: Where losses that are no number are noted.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._kept: list[tuple[int, Tensor | float]] = []

    @property
    def many(self) -> bool:
        """Whether so many wait that they should be taken."""
        return len(self._kept) >= _MANY

    def kept(self, loss: Tensor | float | None) -> Tensor | float | None:
        """Return a copy of a loss, None where there is none or it is not one real number."""
        if loss is None:
            return None
        try:
            return _copied(loss)
        except Exception as error:
            self._faults.note("the loss", error, effect="not recorded")
            return None

    def keep(self, step: int, loss: Tensor | float | None) -> Tensor | float | None:
        """Keep a copy of a step's loss, and return it."""
        copy = self.kept(loss)
        if copy is not None:
            self._kept.append((step, copy))
        return copy

    def take(self) -> tuple[list[int], list[float]]:
        """Return the steps and losses kept, and forget them; waits for their device."""
        kept, self._kept = self._kept, []
        tensors = [loss for _, loss in kept if isinstance(loss, Tensor)]
        if len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1:
            values = iter(torch.stack(tensors).tolist())
        else:
            values = iter([float(tensor) for tensor in tensors])
        losses = [next(values) if isinstance(loss, Tensor) else loss for _, loss in kept]
        return [step for step, _ in kept], losses


def one_number(loss: Tensor | float) -> float:
    """Return a loss as a number; waits for its device.

    Raises:
        JomaError: It is not one real number.
    """
    return float(_copied(loss))


def _copied(loss: Tensor | float) -> Tensor | float:
    if type(loss) is Tensor and loss.ndim == 0 and loss.dtype == torch.float32 and not loss.is_meta:
        return loss.detach().clone()  # the usual case; this runs at every step
    if not isinstance(loss, Tensor):
        if isinstance(loss, str | bytes | complex):
            raise JomaError(f"loss must be one real number, got {loss!r:.40}")
        try:
            return float(loss)
        except OverflowError:
            return math.inf if loss > 0 else -math.inf
    if loss.numel() != 1:
        raise JomaError(f"loss must be one number, got shape {tuple(loss.shape)}")
    if loss.is_complex() or loss.device.type == "meta":
        raise JomaError(f"loss must be one real number, got {loss.dtype} on {loss.device}")
    loss = loss.detach()
    loss = loss.to_local() if isinstance(loss, DTensor) else loss
    # A copy: the graph of a compiled step writes the next loss to the same place.
    return loss.reshape(()).float().clone() if loss.dtype != torch.float64 else loss.clone()


MOST_NUMBERS = 2_000_000
"""Numbers kept in memory (16 bytes each); beyond that the older half of long series is thinned."""
_LONG = 1024
"""Numbers up to which a series is never thinned."""

_Key = tuple[str, str, str, int | None]


class History:
    """The series of a training, grown row by row, so that nothing is read again to judge them.

    Numbers of single heads are not kept: they are recorded, and not judged.

    Attributes:
        changes: How many numbers were ever added; the same number means the same series.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._numbers, self._most = 0, MOST_NUMBERS
        self._series: dict[_Key, _Growing] = {}

    def add_rows(self, step: int, rows: Sequence[Row]) -> None:
        """Add the rows of one step."""
        for row in rows:
            if row.head is None:
                key = row.name, row.module or "", row.kind, row.layer
                self._add(key, [step], [row.value])

    def add(self, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add numbers of the whole model.

        Args:
            name: What they are, "loss".
            steps: Their steps.
            values: One for each step.
        """
        self._add((name, "", "", None), steps, values)

    def add_columns(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Add what a metrics log holds, as `run.metrics.read()` gives it."""
        kept = columns["head"] < 0
        for one in series_of({name: column[kept] for name, column in columns.items()}):
            self._add((one.name, one.module, one.kind, one.layer), one.steps, one.values)

    def series(self) -> list[RecordedSeries]:
        """Return the series as they are now, in the order in which they began."""
        return [
            RecordedSeries(name, *growing.arrays, module, layer, None, kind)
            for (name, module, kind, layer), growing in self._series.items()
        ]

    def _add(
        self,
        key: _Key,
        steps: Sequence[int] | NDArray[np.int64],
        values: Sequence[float] | NDArray[np.float64],
    ) -> None:
        if len(steps) == 0:
            return
        growing = self._series.get(key)
        if growing is None:
            growing = self._series[key] = _Growing()
        growing.extend(steps, values)
        self.changes += len(steps)
        self._numbers += len(steps)
        if self._numbers > self._most:
            for one in self._series.values():
                one.thin()
            self._numbers = sum(map(len, self._series.values()))
            # Many series that are all short cannot be thinned, and need not be tried at every row.
            self._most = max(MOST_NUMBERS, 5 * self._numbers // 4)


class _Growing:
    """One series in arrays with room for more."""

    def __init__(self) -> None:
        self._steps = np.empty(4, dtype=np.int64)
        self._values = np.empty(4, dtype=np.float64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps, which increase, and values."""
        return self._steps[: self._length], self._values[: self._length]

    def extend(
        self,
        steps: Sequence[int] | NDArray[np.int64],
        values: Sequence[float] | NDArray[np.float64],
    ) -> None:
        """Add numbers; one of a step that is there takes its place."""
        last = int(self._steps[self._length - 1]) if self._length else -1
        if len(steps) == 1:  # the usual case: one more row
            in_order = steps[0] > last
        else:
            steps = np.asarray(steps, dtype=np.int64)
            in_order = bool(steps[0] > last) and bool((np.diff(steps) > 0).all())
        if not in_order:
            self._merge(steps, values)
            return
        end = self._length + len(steps)
        self._reserve(end)
        self._steps[self._length : end] = steps
        self._values[self._length : end] = values
        self._length = end

    def _merge(self, steps: Any, values: Any) -> None:
        before = self.arrays
        all_steps = np.concatenate([before[0], np.asarray(steps, dtype=np.int64)])
        all_values = np.concatenate([before[1], np.asarray(values, dtype=np.float64)])
        order = np.argsort(all_steps, kind="stable")
        order = order[np.append(np.diff(all_steps[order]) > 0, True)]  # the later one counts
        self._steps, self._values = all_steps[order], all_values[order]
        self._length = len(order)

    def _reserve(self, length: int) -> None:
        if length > len(self._steps):
            room = max(length, 2 * len(self._steps))
            # New arrays: series that were given away keep theirs.
            steps, values = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.float64)
            steps[: self._length], values[: self._length] = self.arrays
            self._steps, self._values = steps, values

    def thin(self) -> None:
        """Drop every second number of the older half, if the series is long."""
        if self._length > _LONG:
            half = self._length // 2
            kept = np.concatenate([np.arange(0, half, 2), np.arange(half, self._length)])
            self._steps, self._values = self._steps[kept], self._values[kept]
            self._length = len(kept)


Logger = Callable[[int, Mapping[str, float]], None]
"""Called at every measurement with the step and values by name, "attention_entropy/layer0"."""

WRITING = "writing to the run folder"
MOST_UNWRITTEN = 500_000
"""Numbers that wait while the run folder cannot be written; further ones are not written."""


class Recorder:
    """Writes rows to a run folder and hands them to loggers.

    Where the folder cannot be written, rows stay in memory and every later `flush` tries again. A
    logger that raises is dropped.

    Args:
        run: The run folder; None where it could not be made.
        loggers: Called with each measurement.
        faults: Where failures are noted.

    Attributes:
        history: The series recorded so far, which findings are judged by.
    """

    def __init__(self, run: Run | None, loggers: Sequence[Logger], faults: Faults) -> None:
        self.run = run
        self._loggers = list(loggers)
        self._faults = faults
        self.history = History()
        self._unwritten = 0

    def read_earlier(self) -> None:
        """Add what the run folder holds already to the history."""
        if self.run is not None:
            run = self.run
            self._faults.tried(
                "the run folder",
                lambda: self.history.add_columns(run.metrics.read()),
                effect="not readable",
            )

    def losses(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Record the losses of several steps; nothing is written before `flush`."""
        self.history.add("loss", steps, values)
        room = self._room(len(steps))
        if not room:
            return
        steps, values = steps[:room], values[:room]
        if self.run is not None:
            run = self.run
            self._faults.tried(
                WRITING,
                lambda: run.metrics.append_many(steps, "loss", [[value] for value in values]),
                effect="failed",
            )

    def rows(self, step: int, rows: Sequence[Row]) -> None:
        """Record the rows of one measurement; nothing is written before `flush`."""
        self.history.add_rows(step, rows)
        rows = rows[: self._room(len(rows))]
        if self.run is not None and rows:
            self._faults.tried(WRITING, lambda: self._append(step, rows), effect="failed")

    def _append(self, step: int, rows: Sequence[Row]) -> None:
        assert self.run is not None, "asked by the caller"
        for row in rows:
            self.run.metrics.append(
                step,
                row.name,
                row.value,
                module=row.module,
                layer=row.layer,
                head=row.head,
                bound=row.bound,
                kind=row.kind,
            )

    def flush(self) -> None:
        """Write what was recorded; where that fails it stays in memory."""
        if self.run is None:
            return
        try:
            self.run.metrics.flush()
        except Exception as error:  # a full disk, a folder that is gone
            self._faults.note(
                WRITING, error, effect="failed, and numbers stay in memory until it succeeds,"
            )
        else:
            self._unwritten = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Call the loggers; one that raises is dropped."""
        for logger in tuple(self._loggers):
            try:
                logger(step, values)
            except Exception as error:  # a dashboard's own trouble
                name = getattr(logger, "__qualname__", type(logger).__name__)
                self._faults.note(f"logger {name}", error, effect="dropped")
                self._loggers.remove(logger)

    def write_findings(self, findings: Mapping[str, Any]) -> bool:
        """Write `findings.json`, whole or not at all; return whether that succeeded.

        Args:
            findings: As `Judgement.as_json` gives them.
        """
        if self.run is None:
            return False
        run = self.run
        written = self._faults.tried(
            "findings.json", lambda: run.write_json("findings", findings), effect="not written"
        )
        return written is not None

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        if self.run is not None:
            run = self.run
            self._faults.tried(
                "merging the metrics log", lambda: run.metrics.compact(), effect="failed"
            )

    def _room(self, count: int) -> int:
        """Count rows that wait to be written; return how many of them may, at most `count`."""
        if self.run is None:
            return 0
        room = max(0, min(count, MOST_UNWRITTEN - self._unwritten))
        self._unwritten += room
        if room < count:
            self._faults.note(
                "numbers", f"{MOST_UNWRITTEN} of them wait to be written already", effect="dropped"
            )
        return room


def logged(rows: Sequence[Row]) -> dict[str, float]:
    """Return the values of rows by their logger names, each of which names one row."""
    named: dict[str, float] = {}
    for row in rows:
        key = row.key
        if key in named:
            key = f"{key}/{row.module}"
        named[key] = row.value
    return named

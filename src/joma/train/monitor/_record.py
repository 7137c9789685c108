"""What a monitor records: losses and rows, to memory, the run folder and loggers.

Any of these may fail; what cannot be written stays in memory.
"""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joma.common.sharded import local
from joma.errors import JomaError
from joma.runs import Run
from joma.train.findings._recorded import RecordedSeries, in_order, series_of
from joma.train.monitor._faults import Faults

Logger = Callable[[int, Mapping[str, float]], None]
"""Called at every measurement with the step and values by name, "attention_entropy/layer0"."""

WHEN_CHANGED = ("requires_grad", "optimized", "matrix_rows", "matrix_columns", "tied_layer")
WHEN_CHANGED += ("vocabulary",)
"""Rows that are recorded at first, and when they change."""
WRITING = "writing to the run folder"
MOST_UNWRITTEN = 500_000
"""Numbers that wait while the run folder cannot be written; further ones are not written."""


class Row(NamedTuple):
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


def _logger_name(row: Row) -> str:
    """Return a name for loggers that know one word for a series.

    "stable_rank/layer0/mlp.fc1"; for attention, whose heads are many, the layer stands for the
    module where the model has one attention per layer: "attention_entropy/layer0/head1".
    """
    words = [row.name]
    if row.layer is not None:
        words.append(f"layer{row.layer}")
    if row.kind not in ("", "self"):
        words.append(row.kind.replace(" ", "_"))
    if row.kind and row.module and "#" in row.module:
        words.append("pass" + row.module.rpartition("#")[2])
    if row.head is not None:
        words.append(f"head{row.head}")
    if row.module and not row.name.startswith("attention"):
        words.append(row.module)
    return "/".join(words)


MOST_NUMBERS = 2_000_000
"""Numbers kept in memory (16 bytes each); beyond that the older half of long series is thinned."""
_LONG = 1024
"""Numbers up to which a series is never thinned."""


class History:
    """The series of a training, grown row by row, so that nothing is read again to judge them.

    Numbers of single heads are not kept: they are recorded, and not judged.

    Attributes:
        changes: How many numbers were ever added; the same number means the same series.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._numbers, self._most = 0, MOST_NUMBERS
        self._series: dict[tuple[str, str, str, int | None], tuple[array[int], array[float]]] = {}

    def last(self, name: str, module: str, kind: str, layer: int | None) -> float | None:
        """Return the number of a series that was added last, None where there is none."""
        key = name, module, kind, layer
        return self._series[key][1][-1] if key in self._series else None

    def add(
        self,
        name: str,
        steps: Sequence[int],
        values: Sequence[float],
        module: str = "",
        kind: str = "",
        layer: int | None = None,
    ) -> None:
        """Add numbers to a series; the arguments are what `RecordedSeries` has."""
        key = name, module, kind, layer
        if key not in self._series:
            self._series[key] = array("q"), array("d")
        kept_steps, kept_values = self._series[key]
        kept_steps.extend(steps)
        kept_values.extend(values)
        self.changes += len(steps)
        self._numbers += len(steps)
        if self._numbers > self._most:
            self._thin()

    def add_columns(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Add what a metrics log has, as `run.metrics.read()` gives it."""
        kept = columns["head"] < 0
        for one in series_of({name: column[kept] for name, column in columns.items()}):
            steps, values = one.steps.tolist(), one.values.tolist()
            self.add(one.name, steps, values, one.module, one.kind, one.layer)

    def series(self) -> list[RecordedSeries]:
        """Return the series as they are now, in the order in which they began."""
        return [
            RecordedSeries(
                name, *in_order(np.array(steps), np.array(values)), module, layer, None, kind
            )
            for (name, module, kind, layer), (steps, values) in self._series.items()
        ]

    def _thin(self) -> None:
        """Drop every second number of the older half of long series."""
        for steps, values in self._series.values():
            half = len(steps) // 2
            if len(steps) > _LONG:
                steps[:half], values[:half] = steps[:half:2], values[:half:2]
        self._numbers = sum(len(steps) for steps, _ in self._series.values())
        # Many series that are all short cannot be thinned, and need not be tried at every row.
        self._most = max(MOST_NUMBERS, 5 * self._numbers // 4)


class Recorder:
    """Writes losses and rows to a run folder and passes them to loggers.

    Where the folder cannot be written, rows stay in memory and every later `write` tries again. A
    logger that raises is dropped.

    Args:
        run: The run folder; None where it could not be made.
        loggers: Called with each measurement.
        faults: Where failures are noted.

    Attributes:
        history: The series recorded so far, which findings are judged by.
        waiting: Losses that were kept and not yet recorded, by their steps.
    """

    def __init__(self, run: Run | None, loggers: Sequence[Logger], faults: Faults) -> None:
        self.run = run
        self._loggers = list(loggers)
        self._faults = faults
        self.history = History()
        self.waiting: list[tuple[int, Tensor | float]] = []
        self._unwritten = 0

    def read_earlier(self) -> None:
        """Add what the run folder has already to the history."""
        if self.run is not None:
            with self._faults.guard("the run folder", effect="not readable"):
                self.history.add_columns(self.run.metrics.read())

    def keep_loss(self, step: int, loss: Any) -> None:
        """Keep a copy of a step's loss, on its device, if it is one real number."""
        with self._faults.guard("the loss", effect="not recorded"):
            self.waiting.append((step, copied_loss(loss)))

    def record_losses(self) -> tuple[list[int], list[float]]:
        """Record the losses that were kept, and return their steps and values."""
        kept, self.waiting = self.waiting, []
        tensors = [loss for _, loss in kept if isinstance(loss, Tensor)]
        if len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1:
            values = iter(torch.stack(tensors).tolist())
        else:
            values = iter([float(tensor) for tensor in tensors])
        losses = [next(values) if isinstance(loss, Tensor) else loss for _, loss in kept]
        steps = [step for step, _ in kept]
        if steps:
            self.history.add("loss", steps, losses)
        room = self._room(len(steps))
        if self.run is not None and room:
            with self._faults.guard(WRITING, effect="failed"):
                each = [[loss] for loss in losses[:room]]
                self.run.metrics.append_many(steps[:room], "loss", each)
        return steps, losses

    def write(self, step: int, rows: Sequence[Row], loss: float | None = None) -> None:
        """Record the rows of one measurement, write what waits, and call the loggers.

        Args:
            step: The step.
            rows: What was measured.
            loss: Loss of the step, recorded already, for the loggers.
        """
        values = {} if loss is None else {"loss": loss}
        kept = list[Row]()
        for row in rows:
            where = row.module or "", row.kind, row.layer
            if row.name in WHEN_CHANGED and self.history.last(row.name, *where) == row.value:
                continue
            kept.append(row)
            if row.head is None:
                self.history.add(row.name, [step], [row.value], *where)
            name = _logger_name(row) if self._loggers else row.name
            values[f"{name}/{row.module}" if name in values else name] = row.value
        if self.run is not None:
            with self._faults.guard(WRITING, effect="failed"):
                for name, value, module, layer, head, bound, kind in kept[: self._room(len(kept))]:
                    self.run.metrics.append(
                        step, name, value, module=module, kind=kind, layer=layer, head=head,
                        bound=bound,
                    )  # fmt: skip
        self.flush()
        for logger in tuple(self._loggers):
            try:
                logger(step, values)
            except Exception as error:  # a dashboard's own trouble
                name = getattr(logger, "__qualname__", type(logger).__name__)
                self._faults.note(f"logger {name}", error, effect="dropped")
                self._loggers.remove(logger)

    def flush(self) -> None:
        """Write what was recorded; where that fails it stays in memory."""
        if self.run is not None:
            effect = "failed, and numbers stay in memory until it succeeds,"
            with self._faults.guard(WRITING, effect=effect):
                self.run.metrics.flush()
                self._unwritten = 0

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        if self.run is not None:
            with self._faults.guard("merging the metrics log", effect="failed"):
                self.run.metrics.compact()

    def draw(self) -> None:
        """Write `figures/training.png` of what was recorded."""
        if self.run is not None and self.history.changes:
            with self._faults.guard("figures/training.png", effect="not drawn"):
                from joma.report import figures, training  # takes a second, once, at the end

                drawn = figures.rendered(training.draw(self.run), "png", dpi=training.DPI)
                self.run.write_figure(f"{training.NAME}.png", drawn)

    def _room(self, count: int) -> int:
        """Count rows that wait to be written; return how many of them may, at most `count`."""
        if self.run is None:
            return 0
        room = max(0, min(count, MOST_UNWRITTEN - self._unwritten))
        self._unwritten += room
        if room < count:
            why = f"{MOST_UNWRITTEN} of them wait to be written already"
            self._faults.note("numbers", why, effect="dropped")
        return room


def copied_loss(loss: Any) -> Tensor | float:
    """Return a copy of a loss, a tensor on its device.

    Raises:
        JomaError: It is not one real number.
    """
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
    loss = local(loss.detach()).reshape(())
    # A copy: the graph of a compiled step writes the next loss to the same place.
    return loss.clone() if loss.dtype in (torch.float32, torch.float64) else loss.float()

"""The loop around a trainer: logs, looks, checkpoints, and going on after a kill."""

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from joma.common.float32 import float32_products
from joma.common.signals import TerminatedError
from joma.errors import JomaError
from joma.runs import Checkpoint, Run
from joma.train._checkpointing import CheckpointWriter, Snapshot
from joma.train._interrupt import interrupts_held
from joma.train.findings import Judgement
from joma.train.language._config import Config
from joma.train.language._export import remove_after, remove_leftovers, series_folder
from joma.train.language._length import check_made
from joma.train.language._processes import Processes
from joma.train.language._trainer import Trainer
from joma.train.language._watch import STATE, Watch

_logger = logging.getLogger(__name__)

PIECE_SECONDS = 1.0
"""About how long steps are made before anything else is thought of."""

LONGEST_PIECE = 100
"""Steps whose losses stay on the device before they must be fetched."""

RECENT = 50
"""Steps whose mean is shown as the loss."""

FLUSH_SECONDS = 5.0
"""About how long what was logged waits to be written."""

Progress = Callable[[str, int, int], None]
"""Takes how the training is doing, in words, the steps that are done, and how many there are."""


@dataclass(frozen=True)
class Trained:
    """How a training ended.

    Attributes:
        begun_at: the step it went on from, 0 for a new one.
        step: where it ended.
        loss: mean over the last 50 steps that were made here, NaN where there was none.
        validation_loss: the last, NaN where there was none.
        tokens_per_second: all processes together, looks and checkpoints included.
        seconds: it took, from `begun_at` on.
        monitor_seconds: that the monitor's looks took of it.
        parameters: of the model.
        judgement: What the monitor found, and what could not be judged.
        lines: That in plain words, line by line; none on other processes than the first.
        stopped: Why `monitor.stop_on` ended the training, None where it did not.
        refused: a sentence for each checkpoint that was damaged and not used.
    """

    begun_at: int
    step: int
    loss: float
    validation_loss: float
    tokens_per_second: float
    seconds: float
    monitor_seconds: float
    parameters: int
    judgement: Judgement
    lines: tuple[str, ...]
    stopped: str | None
    refused: tuple[str, ...]


def train(
    config: Config,
    run: Run | None,
    *,
    processes: Processes | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Trained:
    """Trains a language model, going on from the run's newest whole checkpoint.

    The loss of each step is logged under its number, before the update; what is measured at step s
    is of the model after s updates. Checkpoints are written while training continues. Ctrl-C and
    SIGTERM save one and then raise KeyboardInterrupt or `joma.common.signals.TerminatedError`. A
    run that was killed and resumed ends with the same weights and losses, bit for bit on the CPU, as one
    that was not. The models of the schedule are in the run's `series/`, each in Hugging Face
    layout. A training that `monitor.stop_on` ends saves a checkpoint, too.

    Args:
        config: what is trained, and how.
        run: where all of it goes, and where an earlier part of this training is. On other processes
            than the first, None.
        processes: that train together; this one alone, on the CPU, unless given.
        progress: is told now and then how it is doing.

    Raises:
        ValueError: the configuration is wrong, or the run's checkpoint is of another text or of a
            later step than the last one asked for; `config.json` is then what it was.
        OSError: what the system has against writing; what was written before is whole.
    """
    processes = processes or Processes()
    assert (run is not None) == (processes.rank == 0), "the first process alone has a run"
    devices = [processes.device] if processes.device.type == "cuda" else []
    with contextlib.ExitStack() as around:
        if run is not None:
            around.enter_context(run.locked())  # a second process would log all of it again
        around.enter_context(torch.random.fork_rng(devices=devices))
        around.enter_context(float32_products("ieee"))
        return _Loop(Trainer(config, processes), run, progress).run_through()


@dataclass(frozen=True)
class _Place:
    """Where a training goes on.

    Attributes:
        unlogged: the first step whose loss is not logged.
        validated: whether the validation loss of the model there is.
        unfinished: whether it is the last step, but was not when it was made.
        refused: what was said of checkpoints.
    """

    unlogged: int = 0
    validated: bool = False
    unfinished: bool = False
    refused: tuple[str, ...] = ()


class _Loop:
    """One training as it goes on."""

    def __init__(self, trainer: Trainer, run: Run | None, progress: Progress) -> None:
        self.trainer, self.run, self.progress = trainer, run, progress
        self.config, self.processes = trainer.config, trainer.processes
        self.steps = self.config.training.steps
        self.exports = frozenset(self.config.checkpoints.steps(self.steps))
        self.losses: list[Tensor] = []
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.validation_loss = math.nan
        self.speed = 0.0
        self.longest = 0.0
        self.writer: CheckpointWriter | None = None
        self.start = self.flushed = time.monotonic()

    def run_through(self) -> Trained:
        """Makes the steps that are left."""
        place = self._go_back()
        begun, piece = self.step, 1
        with contextlib.ExitStack() as around:
            if self.run is not None:
                around.callback(self.run.metrics.flush)
            watch = contextlib.closing(Watch(self.trainer, self.run, begun, self.watched))
            self.watch = around.enter_context(watch)
            stop = around.enter_context(interrupts_held())
            self.processes.first(self._accept)
            self.start = self.flushed = time.monotonic()
            if self.run is not None:
                writer = CheckpointWriter(self.run.checkpoints, self.config.checkpoints.seconds)
                self.writer = around.enter_context(writer)
            if begun == 0 or place.unfinished:
                self._look(validated=place.validated)
            self.watch.begin()  # last, so that the model's first pass is not charged to it
            while self.step < self.steps and self.watch.stop_reason is None:
                before = time.monotonic()
                self._advance(self._until(piece))
                slow = time.monotonic() - before >= PIECE_SECONDS
                slow, due, failed = self._agreed(slow, self._due(), self._failed())
                if failed:
                    self.processes.first(self._raise_failure)
                piece = max(piece // 2, 1) if slow else min(2 * piece, LONGEST_PIECE)
                self._look()
                stopped, terminated = self._agreed(stop.asked, stop.terminated)
                ended = self.step == self.steps or self.watch.stop_reason is not None
                self._keep(save=due or stopped or ended)
                self.progress(self._words(), self.step, self.steps)
                self.longest = max(0.9 * self.longest, time.monotonic() - before)
                if stopped:
                    self.processes.first(self._finish)
                    raise TerminatedError if terminated else KeyboardInterrupt
            self.processes.first(self._finish)
            seconds = time.monotonic() - self.start
        judgement, lines = self.watch.judgement(), self.watch.lines()  # of a training that ended
        if self.run is not None:
            self.run.metrics.compact()
        tokens = (self.step - begun) * self.config.data.batch * self.config.data.window
        return Trained(
            begun_at=begun,
            step=self.step,
            loss=self._loss(),
            validation_loss=self.validation_loss,
            tokens_per_second=tokens / seconds if tokens else 0.0,
            seconds=seconds,
            monitor_seconds=self.watch.seconds,
            parameters=self.trainer.parameters,
            judgement=judgement,
            lines=lines,
            stopped=self.watch.stop_reason,
            refused=place.refused,
        )

    def _advance(self, until: int) -> None:
        """Makes steps and logs their losses."""
        before, first = time.monotonic(), self.step
        for step in range(first, until):
            loss = self.trainer.backward(step)
            self.trainer.update(step)
            stops = self.watch.step()
            self.trainer.optimizer.zero_grad()
            self.losses.append(loss)
            if stops:  # on all processes at the same step
                until = step + 1
                break
        self.step = until
        losses = self.processes.mean(torch.stack(self.losses).double()).cpu()
        self.losses.clear()
        self.recent.extend(losses.tolist())
        if self.run is not None and until > max(first, self.unlogged):
            new = max(self.unlogged - first, 0)
            logged = losses[new:].unsqueeze(1).numpy()
            self.run.metrics.append_many(range(first + new, until), "loss", logged)
            self.watch.judge_by("loss", range(first + new, until), losses[new:].tolist())
        tokens = (until - first) * self.config.data.batch * self.config.data.window
        self.speed = tokens / max(time.monotonic() - before, 1e-9)

    def _look(self, *, validated: bool = False) -> None:
        """What is due after this many steps: the validation loss, a model for the series.

        Args:
            validated: whether that loss is logged already.
        """
        every = self.config.validation.every
        if every and (self.step % every == 0 or self.step == self.steps):
            self.validation_loss = self.trainer.validation_loss()
            if self.run is not None and not validated:
                self.run.metrics.append(self.step, "validation_loss", self.validation_loss)
                self.watch.judge_by("validation_loss", [self.step], [self.validation_loss])
        if self.step in self.exports:
            self.trainer.export(None if self.run is None else self.run.path, self.step)

    def _keep(self, *, save: bool) -> None:
        """Writes what was logged, and begins to write a checkpoint."""
        snapshot = None
        if save:
            self.processes.first(self._finish)  # an error of the last one must end all processes
            snapshot = self._copied()

        def write() -> None:
            assert self.run is not None, "the first process has one"
            self.run.metrics.flush()  # first: a checkpoint says that all before it is on disk
            if snapshot is not None:
                assert self.writer is not None, "the first process has one"
                self.writer.save(self.step, snapshot, self._about())

        now = time.monotonic()
        flush = save or now - self.flushed >= FLUSH_SECONDS
        if self._agreed(flush)[0]:
            self.processes.first(write)
            self.flushed = now

    def _copied(self) -> Snapshot | None:
        """Return a copy of the training's state, None on other processes than the first."""
        state = chain(self.trainer.state(), self.watch.state())
        if self.writer is not None:
            return self.writer.copy(state)
        for _ in state:  # the first process cannot gather its copy alone
            pass
        return None

    def _finish(self) -> None:
        assert self.writer is not None, "the first process has one"
        self.writer.finish()

    def _failed(self) -> bool:
        return self.writer is not None and self.writer.failed

    def _raise_failure(self) -> None:
        assert self.writer is not None, "the first process has one"
        self.writer.check()

    def _accept(self) -> None:
        """The run is from now on what was asked for: nothing stands against going on with it."""
        assert self.run is not None, "the first process has one"
        remove_after(self.run.path, self.steps)
        self.run.write_config()

    def _go_back(self) -> _Place:
        """Takes model and log to where they go on.

        Of that place the first process knows all, the others whether it is unfinished.
        """

        def find() -> tuple[Checkpoint | None, _Place]:
            assert self.run is not None, "the first process has one"
            remove_leftovers(self.run.path)
            found = self.run.checkpoints.latest()
            for sentence in found.refused:
                _logger.warning(sentence)
            if found.checkpoint is None:
                self.run.metrics.rewind(-1)
                return None, _Place(refused=found.refused)
            self._check(found.checkpoint)
            # What was logged after the checkpoint comes again. What was measured at its own step
            # was written before it and cannot; the loss of that step was logged after it.
            step = found.checkpoint.step
            self.run.metrics.rewind(step)
            logged, validated = (
                step in self.run.metrics.read(name)["step"] for name in ("loss", "validation_loss")
            )
            seen = validated or not self.config.validation.every
            exported = series_folder(self.run.path, step).is_dir()
            unfinished = step == self.steps and not (seen and exported)
            return found.checkpoint, _Place(step + logged, validated, unfinished, found.refused)

        checkpoint, place = self.processes.first(find) or (None, _Place())
        self.step, unfinished = self.processes.most(
            0 if checkpoint is None else checkpoint.step, int(place.unfinished)
        )
        self.unlogged = place.unlogged
        arrays = {} if checkpoint is None else dict(checkpoint.arrays)
        self.watched = {
            name.removeprefix(STATE): arrays.pop(name)
            for name in [name for name in arrays if name.startswith(STATE)]
        }
        if self.step > 0:
            self.trainer.load(arrays, self.step)
        return replace(place, unfinished=bool(unfinished))

    def _check(self, checkpoint: Checkpoint) -> None:
        check_made(self.config, checkpoint.step)
        if checkpoint.about != self._about():
            raise JomaError(
                f"the text of {self.config.data.corpus} or its tokenizer is not what "
                f"{checkpoint.path} was trained on; mend it, or train in another folder"
            )

    def _about(self) -> dict[str, Any]:
        return {"text": self.trainer.text.digest}

    def _until(self, piece: int) -> int:
        """Where to stop next: where something is to be seen or written, or told."""
        every = self.config.validation.every or self.steps
        ahead = (at for at in self.exports if at > self.step)
        seen = (self.step // every + 1) * every
        return min(self.step + piece, self.steps, seen, *ahead)

    def _due(self) -> bool:
        return self.writer is not None and self.writer.due(self.longest)

    def _agreed(self, *questions: bool) -> list[bool]:
        """Whether any process says yes to each: clocks and Ctrl-C are not the same everywhere."""
        return [bool(answer) for answer in self.processes.most(*map(int, questions))]

    def _loss(self) -> float:
        return fmean(self.recent) if self.recent else math.nan

    def _words(self) -> str:
        words = [f"loss {self._loss():.3f}", f"{_short(self.speed)} tokens/s"]
        entropy = self.watch.entropy
        return ", ".join([*words, *([] if entropy is None else [f"entropy {entropy:.2f}"])])


def _short(number: float) -> str:
    return f"{number / 1e6:.2f}M" if number >= 1e6 else f"{number / 1e3:.1f}k"

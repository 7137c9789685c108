"""Training a language model with its monitor, through the loop of `joma.train.loop`.

`estimate` makes a few steps alone, to say what all would take.
"""

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from joma.common.float32 import float32_products
from joma.common.progress import Progress
from joma.common.signals import deferring_signals
from joma.errors import JomaError
from joma.runs import Checkpoint, Run
from joma.train.findings import Judgement
from joma.train.language._compute import compiles
from joma.train.language._config import Config, check_made
from joma.train.language._export import remove_after, remove_leftovers, series_folder
from joma.train.language._trainer import Trainer
from joma.train.loop import Training, resume, take_turns, turns
from joma.train.monitor import Monitor
from joma.train.processes import Processes

RECENT = 50
"""Steps whose mean is shown as the loss."""

_MONITOR = "monitor."
"""What the names of the monitor's tensors in a checkpoint begin with."""


@dataclass(frozen=True)
class Trained:
    """How a training of a language model ended.

    Attributes:
        begun_at: The step it resumed from, 0 for a new one.
        step: The step it ended at.
        loss: Mean over the last 50 steps of the run, NaN where there was none.
        validation_loss: The last one, NaN where there was none.
        tokens_per_second: Of all processes together, measurements and checkpoints included.
        seconds: Duration, from `begun_at` on.
        monitor_seconds: Seconds of it that the monitor took.
        parameters: Number of parameters of the model.
        judgement: What the monitor found, and what could not be judged.
        lines: That in plain words, line by line; none on other processes than the first.
        stopped: Why `monitor.stop_on` ended the training, None where it did not.
        refused: A sentence for each checkpoint that was damaged and not used.
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
    """Train a language model, resuming from the run's newest undamaged checkpoint.

    The loss of each step is logged under its number, before the update; a measurement at step s is
    of the model after s updates. Checkpoints are written while training continues. Ctrl-C and
    SIGTERM save one and then raise KeyboardInterrupt or `joma.common.signals.TerminatedError`. A
    run that was killed and resumed ends with the same weights and losses, bit for bit on the CPU,
    as one that was not. The models of the schedule are in the run's `series/`, each in Hugging Face
    layout. A training that `monitor.stop_on` ends saves a checkpoint, too.

    Args:
        config: What is trained, and how.
        run: Run folder, which may have an earlier part of this training. None on other processes
            than the first.
        processes: The processes that train together; this one alone, on the CPU, unless given.
        progress: Function that is called now and then.

    Raises:
        ValueError: The configuration is wrong, or the run's checkpoint is of another text or of a
            later step than the last one asked for; `config.json` is then unchanged.
        OSError: The system refuses a write; what was written before is whole.
    """
    processes = processes or Processes()
    assert (run is not None) == (processes.rank == 0), "the first process alone has a run"
    devices = [processes.device] if processes.device.type == "cuda" else []
    with contextlib.ExitStack() as around:
        if run is not None:
            around.enter_context(run.locked())  # a second process would log all of it again
        around.enter_context(torch.random.fork_rng(devices=devices))
        around.enter_context(float32_products("ieee"))
        if compiles(config, processes):
            progress("compile the model", 0, config.training.steps)
        return _Session(Trainer(config, processes), run, progress).train()


class _Session:
    """A trainer and its monitor, as the loop trains them."""

    def __init__(self, trainer: Trainer, run: Run | None, progress: Progress) -> None:
        self.trainer, self.run, self.progress = trainer, run, progress
        self.config, self.processes = trainer.config, trainer.processes
        self.step = 0
        self.monitor: Monitor | None = None
        self.entropy: float | None = None  # mean of the last measurement, in nats
        self.exports = frozenset(self.config.checkpoints.steps(self.config.training.steps))
        self.validation_loss = math.nan
        self._monitor_state: dict[str, Tensor] = {}
        self._unlogged = 0
        self._new_losses: list[Tensor] = []
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._advanced_at = self._speed = 0.0

    def train(self) -> Trained:
        """Make the steps that are left."""
        every, steps = self.config.validation.every, self.config.training.steps
        self.validated_at = {*range(0, steps, every), steps} if every else set[int]()
        training = Training(
            self,
            self.run,
            steps,
            measure=self.measure,
            measure_at={0, *self.exports, *self.validated_at},
            checkpoint_seconds=self.config.checkpoints.seconds,
            keep_last=True,
            progress=lambda done, total: self.progress(self._words(), done, total),
            processes=self.processes,
        )
        self.processes.first(lambda: remove_leftovers(training.first_run.path))
        start = resume(training)
        begun, self._unlogged = self.step, start.unlogged
        if self.run is not None:  # the loss that is shown is the run's
            logged = self.run.metrics.read("loss")
            earlier = logged["value"][logged["step"] < begun]
            self._recent.extend(earlier[-RECENT:].tolist())
        with contextlib.ExitStack() as around:
            if self.run is not None:
                around.callback(self.run.metrics.flush)
            self.monitor = self._make_monitor()
            if self.monitor is not None:
                around.callback(self.monitor.close)
            around.callback(self.trainer.series.close)
            stop = around.enter_context(deferring_signals())
            self.processes.first(self._accept)
            if begun == steps:
                self._finish_last_step()
            (ended,) = take_turns([turns(training, start, stop)], stop)
            self.trainer.finish_exports()
        if self.run is not None:
            self.run.metrics.compact()
        tokens = (self.step - begun) * self.config.data.batch * self.config.data.window
        monitor = self.monitor
        return Trained(
            begun_at=begun,
            step=self.step,
            loss=self._loss(),
            validation_loss=self.validation_loss,
            tokens_per_second=tokens / ended.seconds if tokens else 0.0,
            seconds=ended.seconds,
            monitor_seconds=0.0 if monitor is None else monitor.seconds,
            parameters=self.trainer.parameters,
            judgement=Judgement() if monitor is None else monitor.judgement,
            lines=() if monitor is None else tuple(monitor.summary(width=0).splitlines()[1:]),
            stopped=self.stop_reason,
            refused=ended.refused,
        )

    @property
    def stop_reason(self) -> str | None:
        """Why the monitor stops the training; None where it does not."""
        return None if self.monitor is None else self.monitor.stop_reason

    def advance(self, steps: int) -> None:
        """Make steps, or fewer where the monitor stops the training."""
        self._advanced_at = time.monotonic()
        for step in range(self.step, self.step + steps):
            self._new_losses.append(self.trainer.backward(step))
            self.trainer.update(step)
            # While the gradients are there; the loop logs the loss, of all processes.
            stops = self.monitor is not None and self.monitor.step()
            self.trainer.clear()
            self.step += 1
            if stops:  # on all processes at the same step
                break

    def losses(self) -> tuple[range, Tensor]:
        """Return the steps since the last call and their losses, (steps, 1)."""
        steps = range(self.step - len(self._new_losses), self.step)
        losses = self.processes.mean(torch.stack(self._new_losses).double()).cpu()
        self._new_losses.clear()
        self._recent.extend(losses.tolist())
        new = max(self._unlogged - steps.start, 0)
        if steps[new:]:
            self._judge_by("loss", steps[new:], losses[new:].tolist())
        tokens = len(steps) * self.config.data.batch * self.config.data.window
        self._speed = tokens / max(time.monotonic() - self._advanced_at, 1e-9)
        return steps, losses.unsqueeze(1)

    def measure(self, step: int, *, validated: bool = False) -> None:
        """Do what is due at a step: log the validation loss, export a model, start the monitor.

        Args:
            step: Number of updates made.
            validated: Whether the validation loss is logged already.
        """
        if step in self.validated_at:
            self.validation_loss = self.trainer.validation_loss()
            if self.run is not None and not validated:
                self.run.metrics.append(step, "validation_loss", self.validation_loss)
                self._judge_by("validation_loss", [step], [self.validation_loss])
        if step in self.exports:
            self.trainer.export(None if self.run is None else self.run.path, step)
        if step == 0 and self.monitor is not None:
            self.monitor.begin()  # last, so that the model's first pass is not charged to it

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a checkpoint by name; all processes go through them.

        A training does not export again what was due before its checkpoint, so that waits for it.
        """
        self.trainer.finish_exports()
        yield from self.trainer.state()
        if self.monitor is not None:
            for name, tensor in self.monitor.state_dict().items():
                yield f"{_MONITOR}{name}", tensor

    def about(self) -> dict[str, Any]:
        """Return what a checkpoint keeps next to `state`, in JSON types."""
        return self.trainer.about()

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise JomaError if a checkpoint has more steps or another text."""
        check_made(self.config, checkpoint.step)
        if checkpoint.about["text"] != self.trainer.text.digest:
            raise JomaError(
                f"the text of {self.config.data.corpus} or its tokenizer is not what "
                f"{checkpoint.path} was trained on; put it back, or train in another folder"
            )

    def load_state(self, step: int, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Return to a checkpoint; the monitor is made later."""
        self.step = step
        self._monitor_state = {
            name.removeprefix(_MONITOR): tensor
            for name, tensor in state.items()
            if name.startswith(_MONITOR)
        }
        rest = {name: one for name, one in state.items() if not name.startswith(_MONITOR)}
        self.trainer.load(step, rest, about)

    def _make_monitor(self) -> Monitor | None:
        settings = self.config.monitor
        if settings.off:
            return None
        optimizer: Any = self.trainer.optimizer
        monitor = Monitor(
            self.trainer.model,
            optimizer if hasattr(optimizer, "param_groups") else None,
            every=settings.every,
            run=self.run,
            inputs=[{"input_ids": self.trainer.held_out(settings.windows)}],
            metrics=settings.metrics,
            theorem1=settings.theorem1,
            loggers=(self._note_entropy,),
            budget=settings.budget or None,
            step=self.step,
            stop_on=settings.stop_on or (),
        )
        if self.step:
            monitor.load_state_dict(self._monitor_state)
        return monitor

    def _accept(self) -> None:
        """Make the run what was asked for: nothing stands against resuming it."""
        assert self.run is not None, "the first process has one"
        remove_after(self.run.path, self.config.training.steps)
        self.run.write_config()

    def _finish_last_step(self) -> None:
        """Measure at the step of the checkpoint if it was not the last when it was made."""

        def missing() -> tuple[bool, bool]:
            assert self.run is not None, "the first process has one"
            validated = self.step in self.run.metrics.read("validation_loss")["step"]
            exported = series_folder(self.run.path, self.step).is_dir()
            return validated, not (exported and (validated or not self.validated_at))

        validated, unfinished = self.processes.first(missing) or (False, False)
        if any(self.processes.most(int(unfinished))):
            self.measure(self.step, validated=validated)

    def _judge_by(self, name: str, steps: Any, values: list[float]) -> None:
        """Let losses that the loop logs count for the monitor's findings."""
        if self.run is not None and self.monitor is not None:
            self.monitor.judge_by(name, steps, values)

    def _note_entropy(self, step: int, values: Mapping[str, float]) -> None:
        found = [value for name, value in values.items() if name.startswith("attention_entropy/")]
        if found:
            self.entropy = fmean(found)

    def _loss(self) -> float:
        return fmean(self._recent) if self._recent else math.nan

    def _words(self) -> str:
        speed = self._speed
        rate = f"{speed / 1e6:.2f}M" if speed >= 1e6 else f"{speed / 1e3:.1f}k"
        words = [f"loss {self._loss():.3f}", f"{rate} tokens/s"]
        return ", ".join(
            [*words, *([] if self.entropy is None else [f"entropy {self.entropy:.2f}"])]
        )


_SECONDS, _MOST_STEPS = 2.0, 10
"""For how long, and how many, steps are made to estimate a training."""
_KEPT = 3
"""Checkpoints that are on the disk at a time, one of them being written."""


@dataclass(frozen=True)
class TrainingEstimate:
    """What a training takes on one process.

    Attributes:
        parameters: Number of parameters of the model.
        tokens: Number of tokens that all steps read.
        seconds: Duration of the steps, without measurements and checkpoints.
        memory: Bytes at most, of the GPU where there is one; None where that is not known.
        disk: Bytes of series and checkpoints.
        exports: How many models the series has.
    """

    parameters: int
    tokens: int
    seconds: float
    memory: int | None
    disk: int
    exports: int


def estimate(config: Config, device: str = "cpu") -> TrainingEstimate:
    """Make a few steps of a training, which are thrown away, and scale them up."""
    processes = Processes(device=torch.device(device))
    with torch.random.fork_rng(devices=[device] if device == "cuda" else []):
        trainer = Trainer(config, processes)
        _step(trainer, 0)  # the first allocates and, where asked for, compiles
        start, done = time.monotonic(), 0
        while done < _MOST_STEPS and time.monotonic() - start < _SECONDS:
            done += 1
            _step(trainer, done % config.training.steps)
        each = (time.monotonic() - start) / done
    exports, parameters = len(config.checkpoints.steps(config.training.steps)), trainer.parameters
    return TrainingEstimate(
        parameters=parameters,
        tokens=config.training.steps * config.data.batch * config.data.window,
        seconds=each * config.training.steps,
        memory=_memory(device),
        disk=parameters * (4 * exports + 12 * _KEPT),
        exports=exports,
    )


def _step(trainer: Trainer, step: int) -> None:
    loss = trainer.backward(step)
    trainer.update(step)
    trainer.clear()
    loss.item()  # waits for a GPU


def _memory(device: str) -> int | None:
    """Return the most memory this process has had, of the GPU or of the machine."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""Training a language model with its monitor, through the loop of `joma.train.loop`."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from joma.common.float32 import float32_products
from joma.common.progress import Progress
from joma.common.signals import deferring_signals
from joma.errors import JomaError
from joma.optim.state import check_tensors, load_state, split_state
from joma.runs import Checkpoint, Run
from joma.train._checkpointing import BackgroundWriter, host_copies
from joma.train.findings import Judgement
from joma.train.language._config import Config, check_made
from joma.train.language._export import (
    export,
    remove_after,
    remove_leftovers,
    series_folder,
    weights_of,
)
from joma.train.language._model import (
    Compute,
    compiles,
    make_config,
    make_model,
    make_optimizer,
    without_masks,
)
from joma.train.language._text import Feed, Text, first_windows, read_tokens
from joma.train.loop import Training, make_steps, resume
from joma.train.monitor import Monitor
from joma.train.processes import Processes, shard_again, sharded_like, spread, summing, whole

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
        return LanguageTraining(config, run, processes, progress).train()


class LanguageTraining:
    """A language model, its optimizer, data and monitor, as `joma.train.loop` trains them.

    On several processes each has one, and all call the same methods in the same order.

    Args:
        config: What is trained, and how.
        run: Run folder, on the first process; None where nothing is kept.
        processes: The processes that train together.
        progress: Function that is called now and then.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        step: Number of updates made so far.
        monitor: The monitor, from `train` on.
    """

    def __init__(
        self,
        config: Config,
        run: Run | None,
        processes: Processes,
        progress: Progress = lambda what, done, total: None,
    ) -> None:
        _check(config, processes)
        self.config, self.run, self.processes, self.progress = config, run, processes, progress
        data, training = config.data, config.training
        self.text: Text = read_tokens(data)
        _check_text(self.text, config, processes)
        settings = make_config(config.model, self.text.tokenizer.size, data.window)
        self._shell = make_model(settings, None)  # sharding changes the class of the model itself
        self.model = make_model(settings, training.seed).to(processes.device).train()
        without_masks(self.model, data.window)
        self.feed = Feed(self.text.train, data.window, data.batch, training.seed, processes.device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._module = spread(self.model, processes, training.sharding)
        self.compute = Compute(self.model, self._module, config, processes)
        self.optimizer = make_optimizer(self.model, self._module, config.optimizer)
        self.compute.prepare(self._pieces(0)[0])
        self.step = 0
        self.monitor: Monitor | None = None
        self.entropy: float | None = None  # mean of the last measurement, in nats
        self.validation_loss = math.nan
        every, steps = config.validation.every, training.steps
        self._validated_at = {*range(0, steps, every), steps} if every else set[int]()
        self._exported_at = frozenset(config.checkpoints.steps(steps))
        self._exports = BackgroundWriter()
        self._held_out: dict[int, Tensor] = {}
        self._monitor_state: dict[str, Tensor] = {}
        self._unlogged = 0
        self._new_losses: list[Tensor] = []
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._advanced_at = self._speed = 0.0

    def train(self) -> Trained:
        """Make the steps that are left."""
        training = Training(
            self,
            self.run,
            self.config.training.steps,
            measure=self.measure,
            measure_at={0, *self._exported_at, *self._validated_at},
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
            around.enter_context(self._exports)
            stop = around.enter_context(deferring_signals())
            self.processes.first(self._accept)
            if begun == training.steps:
                self._finish_last_step()
            ended = make_steps(training, start, stop)
            self._finish_exports()
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
            parameters=self.parameters,
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
            self._new_losses.append(self.backward(step))
            self.update()
            # While the gradients are there; the loop logs the loss, of all processes.
            stops = self.monitor is not None and self.monitor.step()
            self.drop_gradients()
            self.step += 1
            if stops:  # on all processes at the same step
                break

    def backward(self, step: int) -> Tensor:
        """Compute the gradients of a step; return its loss on this process's part of the batch.

        An optimizer with `per_layer` moves the weights here.
        """
        rate = self.config.optimizer.learning_rate_at(step, self.config.training.steps)
        for group in getattr(self.optimizer, "param_groups", ()):
            group["lr"] = rate
        accumulate = getattr(self.optimizer, "accumulate", lambda *, last: nullcontext())
        pieces = self._pieces(step)
        losses = []
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            with summing(self._module, last=last), accumulate(last=last):
                losses.append(self.compute.backward(piece, step, number))
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def update(self) -> None:
        """Move the weights by the gradients of a step."""
        clip = self.config.optimizer.clip
        if clip and not hasattr(self.optimizer, "clip_norm"):
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()

    def drop_gradients(self) -> None:
        """Drop the gradients of a step, or set those to zero that a CUDA graph adds to."""
        self.optimizer.zero_grad()
        self.compute.keep_gradients()

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
        if step in self._validated_at:
            self.validation_loss = self._validation_loss()
            if self.run is not None and not validated:
                self.run.metrics.append(step, "validation_loss", self.validation_loss)
                self._judge_by("validation_loss", [step], [self.validation_loss])
        if step in self._exported_at:
            self._export(step)
        if step == 0 and self.monitor is not None:
            self.monitor.begin()  # last, so that the model's first pass is not charged to it

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a checkpoint by name, each whole; all processes go through them.

        A training does not export again what was due before its checkpoint, so that waits for it.
        """
        self._finish_exports()
        for name, parameter in self.model.named_parameters():
            yield f"model.{name}", whole(parameter)
        for name, tensor in self._optimizer_state()[0].items():
            yield f"optimizer.{name}", whole(tensor)
        if self.monitor is not None:
            for name, tensor in self.monitor.state_dict().items():
                yield f"{_MONITOR}{name}", tensor

    def about(self) -> dict[str, Any]:
        """Return what a checkpoint keeps next to `state`, in JSON types."""
        return {"text": self.text.digest, "optimizer": self._optimizer_state()[1]}

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise JomaError if a checkpoint has more steps or another text."""
        check_made(self.config, checkpoint.step)
        if checkpoint.about["text"] != self.text.digest:
            raise JomaError(
                f"the text of {self.config.data.corpus} or its tokenizer is not what "
                f"{checkpoint.path} was trained on; put it back, or train in another folder"
            )

    @torch.no_grad()
    def load_state(self, step: int, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Return to a checkpoint; the monitor is made later, and what `Feed` draws follows from it.

        Args:
            step: Number of updates after which it was saved.
            state: What `state` yielded; read on the first process only.
            about: What `about` returned; read on the first process only.

        Raises:
            JomaError: It is of another model.
        """
        self.step = step
        state, about = self.processes.tensors_from_first(state, about)
        kinds: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "monitor": {}}
        for name, tensor in state.items():
            kind, _, rest = name.partition(".")
            kinds[kind][rest] = tensor
        self._monitor_state = kinds["monitor"]
        parameters = dict(self.model.named_parameters())
        check_tensors("arrays must be of this model", kinds["model"], parameters, dtypes=False)
        for name, parameter in parameters.items():
            parameter.copy_(sharded_like(kinds["model"][name], parameter))
        tensors = {
            name: sharded_like(tensor, parameters.get(name.partition(".")[2]))
            for name, tensor in kinds["optimizer"].items()
        }
        load_state(self.optimizer, tensors, about["optimizer"])

    def _optimizer_state(self) -> tuple[dict[str, Tensor], Any]:
        return split_state(self.optimizer, self.model.named_parameters())

    def _pieces(self, step: int) -> list[Tensor]:
        """Return this process's part of a batch, cut into pieces that are computed one by one."""
        accumulate, own = self.config.training.accumulate, self.processes
        return list(self.feed.at(step).chunk(accumulate * own.size)[own.rank :: own.size])

    def _windows(self, count: int) -> Tensor:
        """Return the first windows of the validation text, or of the training text without one."""
        if count not in self._held_out:
            tokens = self.text.train if self.text.valid is None else self.text.valid
            windows = first_windows(tokens, self.config.data.window, count)
            self._held_out[count] = windows.to(self.processes.device)
        return self._held_out[count]

    def _validation_loss(self) -> float:
        """Return the mean loss over the validation windows, without dropout."""
        try:
            # The same on all processes: sharded ones must call the model together anyway.
            windows = self._windows(self.config.validation.windows)
            return float(self.compute.validation_loss(windows))
        finally:
            shard_again(self.model)

    def _export(self, step: int) -> None:
        """Copy the model of this step and write it into the run's series while training continues.

        Raises:
            OSError: This model, or one before, could not be written.
        """
        saves = self.processes.rank == 0
        copies = host_copies(one for one in weights_of(self.model) if saves)  # all gather

        def write() -> None:
            assert self.run is not None, "the first process has a run"
            export(series_folder(self.run.path, step), self._shell, copies, self.text.tokenizer)

        self.processes.first(lambda: self._exports.start(write))

    def _finish_exports(self) -> None:
        """Wait until all models are written; all processes must call it."""
        self.processes.first(self._exports.finish)

    def _make_monitor(self) -> Monitor | None:
        settings = self.config.monitor
        if settings.off:
            return None
        optimizer: Any = self.optimizer
        monitor = Monitor(
            self.model,
            optimizer if hasattr(optimizer, "param_groups") else None,
            every=settings.every,
            run=self.run,
            inputs=[{"input_ids": self._windows(settings.windows)[:, :-1]}],
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
            return validated, not (exported and (validated or not self._validated_at))

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
        """Return loss, speed and entropy, as the progress bar shows them."""
        speed = self._speed
        rate = f"{speed / 1e6:.2f}M" if speed >= 1e6 else f"{speed / 1e3:.1f}k"
        words = f"loss {self._loss():.3f}, {rate} tokens/s"
        return words if self.entropy is None else f"{words}, entropy {self.entropy:.2f}"


def _check(config: Config, processes: Processes) -> None:
    """Raise JomaError for what the device or the number of processes does not allow."""
    if config.training.precision == "bfloat16" and processes.device.type != "cuda":
        raise JomaError(
            f"training.precision bfloat16 is for a CUDA device, not {processes.device}; float32 "
            "goes with both"
        )
    parts = config.training.accumulate * processes.size
    if config.data.batch % parts:
        raise JomaError(
            f"data.batch must be a multiple of {parts}, the pieces of a step times the processes, "
            f"got {config.data.batch}"
        )


def _check_text(text: Text, config: Config, processes: Processes) -> None:
    """Raise JomaError for a text that is another on another process, or cannot be validated on."""
    number = int(text.digest[:15], 16)
    largest, smallest = processes.most(number, -number)
    if largest != -smallest:
        raise JomaError(
            "data.corpus and data.tokenizer must be the same for all processes, but their tokens "
            "differ"
        )
    if text.valid is None and config.validation.every:
        raise JomaError(
            f"validation.every must be 0 where the corpus has no valid split, as "
            f"{config.data.corpus} has none, got {config.validation.every}"
        )

"""The training loop: log losses, measure, save checkpoints, stop on signals, resume.

Ensembles (`joma.train.fit`) and language models (`joma.train.language.train`) go through it. A
*step* is one update of the parameters, and `step` is the number of updates made so far. The loss
with number s is that before update s + 1; a measurement at step s is of the parameters after s
updates. Steps are made in *chunks* of about a second, between which the loop does all the rest.
"""

import bisect
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from joma.common.signals import StopRequest, deferring_signals
from joma.errors import JomaError
from joma.runs import Checkpoint, Run
from joma.train._checkpointing import CHECKPOINT_SECONDS, CheckpointWriter, host_copies
from joma.train.processes import Processes

_logger = logging.getLogger(__name__)

LONGEST_CHUNK = 100
"""Steps whose losses stay on the device before they must be fetched."""

CHUNK_SECONDS = 1.0
"""About how long steps are made before the loop logs, measures and saves."""

FLUSH_SECONDS = 5.0
"""About how long logged values wait to be written."""


class Trainable(Protocol):
    """What the loop trains.

    Attributes:
        step: Number of updates made so far.
    """

    step: int

    @property
    def stop_reason(self) -> str | None:
        """Return why the training should end before its last step; None where it should not."""
        ...

    def advance(self, steps: int) -> None:
        """Make so many updates, or fewer where there is a reason to stop."""
        ...

    def losses(self) -> tuple[range, Tensor]:
        """Return the steps since the last call and their losses, (steps, members)."""
        ...

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """Return names and tensors that decide what comes next; all processes go through them."""
        ...

    def about(self) -> dict[str, Any]:
        """Return what a checkpoint keeps next to `state`, in JSON types."""
        ...

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise JomaError if the checkpoint is of another training."""
        ...

    def load_state(self, step: int, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Return to a checkpoint; on other processes than the first, `state` is empty."""
        ...


@dataclass(frozen=True, eq=False)
class Training:
    """What the loop needs to know of one training.

    Attributes:
        trained: What is trained; untrained if the run has no checkpoint.
        run: Run folder for metrics and checkpoints, which may have an earlier part of this
            training. None on other processes than the first.
        steps: Number of updates after which the training ends.
        measure: Function that measures and logs at a step, under other names than "loss".
        measure_at: Steps at which to measure, once each; 0 is before the first update. Steps
            beyond `steps` wait for a training with more.
        checkpoint_seconds: The most work, in seconds, that a kill may cost.
        keep_last: Whether to save a checkpoint at the end, to resume from with more steps.
        progress: Function that is called now and then with the step and `steps`.
        processes: The processes that train together; by default this one alone.
    """

    trained: Trainable
    run: Run | None
    steps: int
    measure: Callable[[int], None] | None = None
    measure_at: Collection[int] = ()
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    keep_last: bool = False
    progress: Callable[[int, int], None] = lambda done, total: None
    processes: Processes = field(default_factory=Processes)

    def __post_init__(self) -> None:
        if self.steps < 0 or self.steps % 1:
            raise JomaError(f"steps must be a whole number ≥ 0, got {self.steps}")
        if not self.checkpoint_seconds >= 0:
            raise JomaError(f"checkpoint_seconds must be ≥ 0, got {self.checkpoint_seconds}")
        if odd := [at for at in self.measure_at if at < 0 or at % 1]:
            raise JomaError(f"measure_at must be whole numbers ≥ 0, got {odd[0]}")

    @property
    def is_over(self) -> bool:
        """Whether no step is left, or the trained object asks to end before."""
        return self.trained.step >= self.steps or self.trained.stop_reason is not None

    @property
    def first_run(self) -> Run:
        """The run folder, on the first process."""
        assert self.run is not None, "the first process has a run folder"
        return self.run


@dataclass(frozen=True)
class Fit:
    """How a training ended.

    Attributes:
        begun_at: The step it resumed from, 0 for a new one.
        step: The step it ended at.
        seconds: Duration, from `begun_at` on.
        refused: A sentence for each checkpoint that was damaged and not used.
    """

    begun_at: int
    step: int
    seconds: float
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """Where a training starts.

    Attributes:
        new: Whether there was no checkpoint.
        unlogged: The first step whose loss is not in the metrics; known to the first process.
        refused: A sentence for each checkpoint that was damaged; known to the first process.
    """

    new: bool
    unlogged: int = 0
    refused: tuple[str, ...] = ()


def resume(training: Training) -> Start:
    """Load the run's newest undamaged checkpoint and remove what was logged after it.

    A run without a checkpoint starts again: its metrics are removed.

    Raises:
        JomaError: The checkpoint is of another training, or of a later step than the last.
    """
    trained, processes = training.trained, training.processes

    def find() -> tuple[Checkpoint | None, tuple[str, ...]]:
        run = training.first_run
        found = run.checkpoints.latest()
        for sentence in found.refused:
            _logger.warning(sentence)
        if found.checkpoint is not None:
            _check(training, found.checkpoint)
        elif trained.step:
            raise JomaError(
                f"ensemble must be untrained, since {run.path} has no checkpoint to resume from, "
                f"got one after {trained.step} steps"
            )
        return found.checkpoint, found.refused

    checkpoint, refused = processes.first(find) or (None, ())
    (newest,) = processes.most(-1 if checkpoint is None else checkpoint.step)
    if newest >= 0:
        arrays = {} if checkpoint is None else checkpoint.arrays
        state = {name: torch.from_numpy(array) for name, array in arrays.items()}
        trained.load_state(newest, state, {} if checkpoint is None else checkpoint.about)

    def rewind() -> int:
        # What was logged after the checkpoint comes again. The measurement of its own step was
        # written before it and cannot come again; the loss of that step was logged after it.
        metrics = training.first_run.metrics
        metrics.rewind(newest)
        return 0 if newest < 0 else newest + (newest in metrics.read("loss")["step"])

    return Start(newest < 0, processes.first(rewind) or 0, refused)


def _check(training: Training, checkpoint: Checkpoint) -> None:
    training.trained.check(checkpoint)
    if checkpoint.step > training.steps:
        raise JomaError(
            f"steps must be at least {checkpoint.step}, after which {checkpoint.path} was saved, "
            f"got {training.steps}"
        )


def make_steps(training: Training, start: Start, stop: StopRequest) -> Fit:
    """Train from where `resume` left off; return how it ended.

    Args:
        training: The training.
        start: What `resume` returned.
        stop: Whether Ctrl-C or SIGTERM came.

    Raises:
        KeyboardInterrupt: The training was asked to stop, and has saved its state.
    """
    trained, run, processes = training.trained, training.run, training.processes
    measure, measure_at = training.measure, sorted(set(training.measure_at))
    begun, start_time = trained.step, time.monotonic()
    saved_at = None if start.new else begun
    chunk, flushed = 1, start_time
    with contextlib.ExitStack() as around:
        if run is not None:
            around.callback(run.metrics.flush)
        checkpoints = None if run is None else run.checkpoints
        writer = around.enter_context(CheckpointWriter(checkpoints, training.checkpoint_seconds))
        if measure is not None and start.new and 0 in measure_at:
            measure(0)
        while True:
            stop.asked, stop.terminated = _any(processes, stop.asked, stop.terminated)
            if stop.asked or training.is_over:
                break
            before = time.monotonic()
            pause = measure_at[bisect.bisect_right(measure_at, trained.step) :][:1]
            trained.advance(min(trained.step + chunk, training.steps, *pause) - trained.step)
            _log(training, start.unlogged)
            slow = time.monotonic() - before >= CHUNK_SECONDS
            if measure is not None and trained.step in measure_at:
                measure(trained.step)
            # Clocks are not the same on all processes, and the first alone writes.
            flush = time.monotonic() - flushed >= FLUSH_SECONDS
            slow, due, flush = _any(processes, slow, writer.due(), flush)
            chunk = max(chunk // 2, 1) if slow else min(2 * chunk, LONGEST_CHUNK)
            if training.keep_last if training.is_over else due:
                _save(training, writer)
                saved_at = trained.step
            elif flush:
                processes.first(lambda: training.first_run.metrics.flush())
                flushed = time.monotonic()
            training.progress(trained.step, training.steps)
        if (stop.asked or training.keep_last) and saved_at != trained.step:
            _save(training, writer)
        processes.first(writer.finish)
        if stop.asked:
            raise stop.error()
    return Fit(begun, trained.step, time.monotonic() - start_time, start.refused)


def fit(ensemble: Trainable, run: Run, steps: int, **options: Any) -> Fit:
    """Train up to `steps` steps, resuming from the run's newest undamaged checkpoint.

    Each step's loss is logged under its number, before the update; a measurement at step s is of
    the networks after s updates. Logged values are written every few seconds, and in any case when
    the loop ends, also by an error. Checkpoints are written while training continues. Ctrl-C and
    SIGTERM save one and then raise KeyboardInterrupt or its subclass
    `joma.common.signals.TerminatedError`. A run that was killed and resumed has the same metrics,
    bit for bit on the CPU, as one that was not. A damaged checkpoint is logged as a warning and the
    one before it used.

    A run without checkpoints starts again, and its metrics are removed: whoever removes the
    checkpoints of a training that has ended must remember that it has. With a checkpoint of the
    last step nothing is done again, and a larger `steps` resumes from there.

    Args:
        ensemble: The networks and their data; untrained if the run has no checkpoint.
        run: Run folder for metrics and checkpoints. A checkpoint of other networks or with other
            settings of the optimizer is refused.
        steps: Number of updates after which the training ends.
        **options: The other attributes of `Training`.
    """
    training = Training(ensemble, run, steps, **options)
    with run.locked(), deferring_signals() as stop:  # a second process would log all of it again
        ended = make_steps(training, resume(training), stop)
        run.metrics.compact()
    return ended


def _log(training: Training, unlogged: int) -> None:
    """Log the losses since the last call, from step `unlogged` on."""
    steps, losses = training.trained.losses()
    new = max(unlogged - steps.start, 0)
    if training.run is not None and steps[new:]:
        training.run.metrics.append_many(steps[new:], "loss", losses[new:].numpy())


def _save(training: Training, writer: CheckpointWriter) -> None:
    """Begin to write a checkpoint; what was logged before is then on disk."""
    trained, processes = training.trained, training.processes
    processes.first(writer.finish)  # its error must end all processes
    saves = processes.rank == 0
    tensors = ((name, tensor) for name, tensor in trained.state() if saves)
    copies = host_copies(tensors)  # all go through them: one cannot gather its copy alone

    def write() -> None:
        training.first_run.metrics.flush()  # a checkpoint says that all before it is on disk
        writer.save(trained.step, copies, trained.about())

    processes.first(write)


def _any(processes: Processes, *questions: bool) -> list[bool]:
    """Return for each question whether any process says yes; all must call it."""
    return [bool(answer) for answer in processes.most(*map(int, questions))]

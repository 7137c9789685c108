"""The loop around an ensemble: logs, looks, checkpoints, and going on after a kill."""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from joma.errors import JomaError
from joma.runs import Checkpoint, Run
from joma.train._checkpointing import CHECKPOINT_SECONDS, CheckpointWriter
from joma.train._interrupt import StopRequest, interrupts_held
from joma.train.ensemble import KEPT, Ensemble

_logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""About how long what was logged waits to be written."""

_STREAMS = 32
"""How many streams torch has of a device."""
_PIECE_SECONDS = 1.0  # about how long steps are made before anything else is thought of

Look = Callable[[int], None]
"""Measures the networks as they are after that many steps and logs it to the run's metrics.

It logs under the step it is given alone, and under other names than "loss".
"""


@dataclass(frozen=True)
class Fit:
    """How a training ended.

    Attributes:
        begun_at: the step it went on from, 0 for a new one.
        step: where it ended.
        seconds: it took, from `begun_at` on.
        refused: a sentence for each checkpoint that was damaged and not used.
    """

    begun_at: int
    step: int
    seconds: float
    refused: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Training:
    """What `fit` is told.

    Attributes:
        ensemble: the networks and their data; untrained if the run has no checkpoint.
        run: where metrics and checkpoints go, and where an earlier part of this training is. A
            checkpoint of other networks or with other settings of the optimizer is refused.
        steps: the last step.
        look: is called at the steps of `look_at`, 0 for the untrained networks.
        look_at: when to look, once each; later ones than `steps` wait for a larger `steps`.
        checkpoint_seconds: the most work, in seconds, that a kill may cost.
        keep_last: whether a checkpoint is saved at the end, to go on from with more steps.
        progress: is told the step and `steps` now and then.
    """

    ensemble: Ensemble
    run: Run
    steps: int
    look: Look | None = None
    look_at: Collection[int] = ()
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    keep_last: bool = False
    progress: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        if self.steps < 0 or self.steps % 1:
            raise JomaError(f"steps must be a whole number ≥ 0, got {self.steps}")
        if not self.checkpoint_seconds >= 0:
            raise JomaError(f"checkpoint_seconds must be ≥ 0, got {self.checkpoint_seconds}")
        if odd := [at for at in self.look_at if at < 0 or at % 1]:
            raise JomaError(f"look_at must be whole numbers ≥ 0, got {odd[0]}")


def fit(
    ensemble: Ensemble,
    run: Run,
    steps: int,
    *,
    look: Look | None = None,
    look_at: Collection[int] = (),
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    keep_last: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fit:
    """Trains up to `steps` steps, going on from the run's newest whole checkpoint.

    Each step's loss is logged under its number, before the update; a look at step s sees the
    networks after s updates. What is logged is written every few seconds, and in any case when the
    loop ends, also by an error. Checkpoints are written while training continues. Ctrl-C and
    SIGTERM save one and then raise KeyboardInterrupt or its subclass
    `joma.common.signals.TerminatedError`. A run that was killed and resumed has the same metrics,
    bit for bit on the CPU, as one that was not. A checkpoint that is damaged is logged as a warning and the
    one before it used.

    A run without checkpoints begins anew, and what it had logged is forgotten: whoever removes the
    checkpoints of a training that has ended must remember that it has. With a checkpoint of the
    last step nothing is done again, and a larger `steps` goes on from there.

    The arguments are those of `Training`.
    """
    rest = look, look_at, checkpoint_seconds, keep_last, progress
    return fit_together([Training(ensemble, run, steps, *rest)])[0]


def fit_together(trainings: Sequence[Training]) -> list[Fit]:
    """`fit` of several trainings in turns, of which on a GPU each has its own stream.

    While one is looked at or saved the others go on; steps themselves become no faster, for small
    kernels of one wait where another's fill the GPU. What each does is what it would do alone, to
    the bit. An error of one ends all; Ctrl-C and SIGTERM save a checkpoint of each.
    """
    paths = [training.run.path.resolve() for training in trainings]
    if twice := [path for number, path in enumerate(paths) if path in paths[:number]]:
        raise JomaError(f"trainings must each have a run of their own, got {twice[0]} twice")
    with contextlib.ExitStack() as around:
        for training in trainings:  # a second process would log all of it again
            around.enter_context(training.run.locked())
        stop = around.enter_context(interrupts_held())
        turns = [
            around.enter_context(contextlib.closing(_turns(training, stop)))
            for training in trainings
        ]
        ended = _in_turns(turns, _streams(trainings))
        if ended is None:
            raise stop.error()
        return ended


class _StoppedError(Exception):
    """A training was asked to stop, and has saved where it is."""


Turns = Generator[None, None, Fit]
"""A training that gives others a turn whenever it has set the device to work."""


def _in_turns(
    turns: Sequence[Turns], streams: Sequence[contextlib.AbstractContextManager[Any]]
) -> list[Fit] | None:
    """Return how each training ended, None if they were asked to stop."""
    ended: dict[int, Fit] = {}
    going, stopped = dict(enumerate(turns)), False
    while going:
        for number, turn in list(going.items()):
            try:
                with streams[number]:
                    next(turn)
            except StopIteration as end:
                ended[number] = end.value
                del going[number]
            except _StoppedError:
                stopped = True
                del going[number]
    if stopped:
        return None
    return [ended[number] for number in range(len(turns))]


def _streams(
    trainings: Sequence[Training],
) -> Sequence[contextlib.AbstractContextManager[Any]]:
    """One for each, where several are on a GPU; what was set to work before is waited for."""
    devices = [training.ensemble.device for training in trainings]
    if len(trainings) < 2 or any(device.type != "cuda" for device in devices):
        return [contextlib.nullcontext()] * len(trainings)
    torch.cuda.synchronize()
    taken = [training.ensemble.captured_on for training in trainings]
    taken.append(torch.cuda.graph.default_capture_stream)  # of graphs that others capture
    streams = _different(devices, [stream for stream in taken if stream is not None])
    return [torch.cuda.stream(stream) for stream in streams]


def _different(
    devices: Sequence[torch.device], taken: Sequence[torch.cuda.Stream] = ()
) -> list[torch.cuda.Stream]:
    """A stream each that is no other's and not taken: torch gives out those it has in turn."""
    streams: list[torch.cuda.Stream] = []
    for device in devices:
        drawn = (torch.cuda.Stream(device) for _ in range(_STREAMS))
        other = next((own for own in drawn if own not in (*streams, *taken)), None)
        if other is None:
            raise JomaError(
                f"trainings of one GPU must be {_STREAMS} at most to be made together, got "
                f"{len(devices)}"
            )
        streams.append(other)
    return streams


def _turns(training: Training, stop: StopRequest) -> Turns:
    ensemble, run, steps = training.ensemble, training.run, training.steps
    look, looks = training.look, frozenset(training.look_at)
    found = run.checkpoints.latest()
    unlogged = _go_back(ensemble, run, found.checkpoint, steps)
    begun = ensemble.step
    piece = 1
    start = flushed = time.monotonic()
    longest = 0.0
    for sentence in found.refused:
        _logger.warning(sentence)
    with contextlib.ExitStack() as around:
        around.callback(run.metrics.flush)
        writer = around.enter_context(
            CheckpointWriter(run.checkpoints, training.checkpoint_seconds)
        )
        if look is not None and found.checkpoint is None and 0 in looks:
            look(0)
        while ensemble.step < steps:
            before = time.monotonic()
            ensemble.advance(_until(ensemble.step, piece, steps, looks) - ensemble.step)
            yield
            _log(ensemble, run, unlogged)
            quick = time.monotonic() - before < _PIECE_SECONDS
            piece = min(2 * piece, KEPT) if quick else max(piece // 2, 1)
            if look is not None and ensemble.step in looks:
                look(ensemble.step)
            training.progress(ensemble.step, steps)
            writer.check()
            now = time.monotonic()
            longest = max(0.9 * longest, now - before)
            due = ensemble.step < steps and (stop.asked or writer.due(longest))
            if due or now - flushed >= FLUSH_SECONDS:
                run.metrics.flush()  # first: a checkpoint says that all before it is on disk
                flushed = now
            if due:
                _save(ensemble, writer)
            if due and stop.asked:
                writer.finish()
                raise _StoppedError
        if stop.asked:  # in the last piece or look, which then need not be made again
            run.metrics.flush()
            _save(ensemble, writer)
            writer.finish()
            raise _StoppedError
        if training.keep_last and (found.checkpoint is None or ensemble.step > begun):
            run.metrics.flush()
            _save(ensemble, writer)
    run.metrics.compact()
    return Fit(begun, ensemble.step, time.monotonic() - start, found.refused)


def _go_back(ensemble: Ensemble, run: Run, checkpoint: Checkpoint | None, steps: int) -> int:
    """Takes networks and log to where they go on; gives the first step whose loss is not logged."""
    if checkpoint is None:
        if made := int(ensemble.optimizer.steps):
            raise JomaError(
                f"ensemble must be untrained, since {run.path} has no checkpoint to go on from, "
                f"got one after {made} steps"
            )
        run.metrics.rewind(-1)
        return 0
    if checkpoint.step > steps:
        raise JomaError(
            f"steps must be at least {checkpoint.step}, after which {checkpoint.path} was saved, "
            f"got {steps}"
        )
    _load(ensemble, checkpoint)
    # What was logged after the checkpoint comes again. Of the checkpoint's own step the look was
    # written before it and cannot come again; the loss was logged after it, and may be there.
    run.metrics.rewind(checkpoint.step)
    return checkpoint.step + (checkpoint.step in run.metrics.read("loss")["step"])


def _load(ensemble: Ensemble, checkpoint: Checkpoint) -> None:
    given, saved = _settings(ensemble), checkpoint.about
    if other := [name for name, value in given.items() if saved.get(name) != value]:
        wanted = " and ".join(f"{name} {saved.get(name)}" for name in other)
        got = " and ".join(f"{name} {given[name]}" for name in other)
        raise JomaError(
            f"ensemble must have {wanted}, as in {checkpoint.path}, from which the run goes on, "
            f"got {got}"
        )
    ensemble.load({name: torch.from_numpy(array) for name, array in checkpoint.arrays.items()})


def _save(ensemble: Ensemble, writer: CheckpointWriter) -> None:
    """Save a checkpoint while training continues; what was logged before is on disk."""
    writer.save(ensemble.step, writer.copy(ensemble.state().items()), _settings(ensemble))


def _settings(ensemble: Ensemble) -> dict[str, Any]:
    """What decides how the state goes on; all but the data, which the run's configuration says."""
    model, optimizer = ensemble.model, ensemble.optimizer
    return {
        "seeds": list(model.seeds),
        **model.settings(),
        "precision": ensemble.precision,
        **optimizer.settings(),
        "restart_every": ensemble.restart_every,
    }


def _until(step: int, piece: int, steps: int, looks: Collection[int]) -> int:
    """Where to stop next: at a look, at the end, or when it is time to write or to tell."""
    ahead = (at for at in looks if at > step)
    return min(step + piece, steps, *ahead)


def _log(ensemble: Ensemble, run: Run, unlogged: int) -> None:
    """Logs the losses since the last call, from step `unlogged` on."""
    steps, losses = ensemble.losses()
    new = max(unlogged - steps.start, 0)
    if steps[new:]:
        run.metrics.append_many(steps[new:], "loss", losses[new:].numpy())

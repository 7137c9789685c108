"""The loop around an ensemble: logs, looks, checkpoints, and going on after a kill."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from joma.runs import Run
from joma.train.ensemble import KEPT, Ensemble

FLUSH_SECONDS = 5.0
"""About how long what was logged waits to be written."""

Look = Callable[[int], None]
"""Measures the networks as they are after that many steps and logs it to the run's metrics."""


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


def fit(
    ensemble: Ensemble,
    run: Run,
    steps: int,
    *,
    look: Look | None = None,
    look_at: Collection[int] = (),
    checkpoint_seconds: float = 120.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fit:
    """Trains up to `steps` steps, going on from the run's newest whole checkpoint.

    Each step's loss is logged under its number, before the update; a look at step s sees the
    networks after s updates. What is logged is written every few seconds, and in any case when the
    loop ends, also by an error or Ctrl-C. A run that was killed and continued
    has the same metrics, bit for bit on the CPU, as one that was not.

    Args:
        ensemble: the networks and their data.
        run: where metrics and checkpoints go, and where an earlier part of this training is.
        steps: the last step.
        look: is called at the steps of `look_at`, 0 for the untrained networks.
        look_at: when to look.
        checkpoint_seconds: about how long a kill may throw the training back.
        progress: is told the step and `steps` now and then.
    """
    found = run.checkpoints.latest()
    begun = 0
    if found.checkpoint is not None:
        arrays = found.checkpoint.arrays
        ensemble.load({name: torch.from_numpy(array) for name, array in arrays.items()})
        begun = ensemble.step
    # Steps after the checkpoint are made again, and logged again.
    run.metrics.rewind(begun if begun else -1)
    start = saved = flushed = time.monotonic()
    try:
        if begun == 0 and look is not None and 0 in look_at:
            look(0)
        while ensemble.step < steps:
            ensemble.advance(_until(ensemble.step, steps, look_at) - ensemble.step)
            _log(ensemble, run)
            if look is not None and ensemble.step in look_at:
                look(ensemble.step)
            progress(ensemble.step, steps)
            now = time.monotonic()
            due = ensemble.step < steps and now - saved >= checkpoint_seconds
            if due or now - flushed >= FLUSH_SECONDS:
                run.metrics.flush()  # first: a checkpoint says that all before it is on disk
                flushed = now
            if due:
                _save(ensemble, run)
                saved = time.monotonic()
    finally:
        run.metrics.flush()
    run.metrics.compact()
    return Fit(begun, ensemble.step, time.monotonic() - start, found.refused)


def _until(step: int, steps: int, look_at: Collection[int]) -> int:
    """Where to stop next: at a look, at the end, or when the losses must be fetched."""
    ahead = (at for at in look_at if at > step)
    return min(step + KEPT, steps, *ahead)


def _log(ensemble: Ensemble, run: Run) -> None:
    steps, losses = ensemble.losses()
    run.metrics.append_many(steps, "loss", losses.numpy())


def _save(ensemble: Ensemble, run: Run) -> None:
    arrays = {name: tensor.cpu().numpy() for name, tensor in ensemble.state().items()}
    run.checkpoints.save(ensemble.step, arrays, {"precision": ensemble.precision})

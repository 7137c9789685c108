"""What a training takes, from a few steps that are thrown away."""

import sys
import time
from dataclasses import dataclass

import torch

from joma.train.language._config import Config
from joma.train.language._training import LanguageTraining
from joma.train.processes import Processes

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
        trainer = LanguageTraining(config, None, processes)
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


def _step(trainer: LanguageTraining, step: int) -> None:
    loss = trainer.backward(step)
    trainer.update()
    trainer.drop_gradients()
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

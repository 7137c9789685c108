"""The small ensemble, trained in a run folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from joma.runs import Run
from joma.train import Ensemble, Fit, fit
from tests.runs._log import COLUMNS
from tests.train._small import ensemble

STEPS = 28
MEASURED_AT = (0, 1, 6, 12, 13, 20, STEPS)


def train(
    folder: Path,
    steps: int = STEPS,
    *,
    trained: Ensemble | None = None,
    measured: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Fit:
    """Begin or resume; a checkpoint is due at every opportunity.

    Args:
        folder: of the run.
        steps: to make.
        trained: the networks, if not the small ensemble.
        measured: is called with the step of each measurement, halfway through it.
        options: of `fit`.
    """
    run = Run.resume("small", {}, out=folder)
    networks = trained or ensemble()

    def measure(step: int) -> None:
        with networks.evaluating() as model:
            for layer, block in enumerate(model.blocks):
                norms = torch.stack([p.flatten(1).norm(dim=1) for p in block.parameters()])
                run.metrics.append(step, "norm", norms.sum(0).numpy(), layer=layer, bound=1e-9)
                if layer == 0:
                    measured(step)
        run.metrics.append(step, "scale", model.output.weight.std().item(), module="output")

    settings = {
        "measure": measure,
        "measure_at": MEASURED_AT,
        "checkpoint_seconds": 0.0,
        "keep_last": True,
    }
    return fit(networks, run, steps, **{**settings, **options})


class Ended(NamedTuple):
    """All that a training leaves: its log without times, and networks and moments in one file."""

    log: dict[str, Any]
    last: bytes

    @classmethod
    def of(cls, folder: Path) -> "Ended":
        run = Run.open(folder)
        log = run.metrics.read()
        columns = {
            name: log[name].tolist() if kind is object else log[name].tobytes()
            for name, kind in COLUMNS.items()
            if name != "time"
        }
        return cls(columns, file_of(folder, run.checkpoints.steps[0]).read_bytes())


def file_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:09d}.safetensors"

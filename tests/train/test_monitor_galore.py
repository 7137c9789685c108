"""What a monitor measures of the subspaces of a GaLore optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch

import joma
from joma.optim import GaLoreAdamW
from joma.runs import Run
from tests.train._watched import batches, encoder, loss_of, of_run

METRICS = [
    "projection_energy",
    "projection_angle_max",
    "projection_angle_mean",
    "projection_refreshes",
]
MODULE = "encoder.layers.1.linear1"


def steps(model: Any, optimizer: Any, monitor: joma.Monitor | None, count: int) -> list[Any]:
    """Make steps; return what the optimizer says of one matrix after each."""
    feed, found = batches(), []
    torch.manual_seed(7)
    for _ in range(count):
        tokens = next(feed)
        loss_of(model(tokens), tokens).backward()
        optimizer.step()
        found += [one for one in optimizer.projected if one.name == f"{MODULE}.weight"]
        if monitor is not None:
            monitor.step()
        optimizer.zero_grad()
    return found


def optimizer_of(model: Any, *, named: bool = True, **settings: Any) -> GaLoreAdamW:
    parameters = model if named else model.parameters()
    return GaLoreAdamW(parameters, 1e-2, rank=4, gap=3, stagger=False, verbose=False, **settings)


@pytest.mark.parametrize("per_layer", [pytest.param(False, marks=pytest.mark.slow), True])
def test_energy_angles_and_refreshes_are_logged(tmp_path: Path, per_layer: bool) -> None:
    model = encoder()
    optimizer = optimizer_of(model, named=False, per_layer=per_layer)
    options: dict[str, Any] = {"every": 4, "budget": None, "metrics": METRICS}
    with joma.Monitor(model, optimizer, run=tmp_path / "run", **options) as monitor:
        found = steps(model, optimizer, monitor, 8)
    assert [one.energy is not None for one in found] == [
        step in (1, 2, 4, 8) for step in range(1, 9)
    ]
    run = Run.open(tmp_path / "run")
    at = [1, 2, 4, 8]
    read = {name: of_run(run, name, module=MODULE) for name in METRICS}
    assert read["projection_energy"] == (at, pytest.approx([found[step - 1].energy for step in at]))
    assert read["projection_refreshes"] == (at, [1.0, 1.0, 2.0, 3.0])
    later = [found[3].angles, found[7].angles]
    assert read["projection_angle_max"] == ([4, 8], pytest.approx([one[0] for one in later]))
    assert read["projection_angle_mean"] == ([4, 8], pytest.approx([one[1] for one in later]))
    assert 0 < later[1][1] < later[1][0] <= 90
    assert (optimizer.record_energy, optimizer.record_angles) == (False, False)  # it is closed
    alone = encoder()
    steps(alone, optimizer_of(alone, named=False, per_layer=per_layer), None, 8)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


def test_other_optimizers_and_wrapped_ones(tmp_path: Path) -> None:
    class Wrapper:
        """As trainers wrap optimizers."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    for number, kind in enumerate((torch.optim.SGD, None)):
        model = encoder()
        optimizer: Any = kind(model.parameters(), lr=0.1) if kind else optimizer_of(model)
        watched: Any = optimizer if kind else Wrapper(optimizer)
        folder = tmp_path / str(number)
        with joma.Monitor(model, watched, run=folder, every=1, budget=None) as monitor:
            tokens = next(batches())
            loss_of(model(tokens), tokens).backward()
            optimizer.step()
            monitor.step()
        there, _ = of_run(Run.open(folder), "projection_refreshes", module=MODULE)
        assert there == ([] if kind else [1])

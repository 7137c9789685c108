"""Table 1 at its smallest, and what its numbers are made to say."""

import dataclasses

import numpy as np
import pytest

from joma.data import LatentHierarchy
from joma.experiments import EXPERIMENTS, Verdict
from joma.experiments.table1 import printed
from joma.experiments.table1.printed import CELLS, GROUPS, LEVELS, MEASURES, SIZES, Table1Cell
from joma.experiments.table1.results import CellResults
from joma.runs import Run

EXPERIMENT = EXPERIMENTS["table1"]
TINY = SIZES["tiny"]


def test_a_network_is_measured_as_by_hand(tmp_path):
    """NCorr of the untrained networks of a cell, by NumPy, class by class."""
    import torch

    run = Run.create("table1", {}, out=tmp_path / "run")
    work = printed.Table1Networks(run, GROUPS["C20-N2"], TINY, EXPERIMENT.request(scale="tiny"))
    hierarchy = work.hierarchies[0]
    batch = hierarchy.sample(TINY.samples, 2**40)
    nodes: dict[int, torch.Tensor] = {}

    def watch(name: str, layer: int, x: torch.Tensor) -> None:
        if name == "hidden":
            nodes[layer] = x.amax(2)

    tokens = torch.cat([batch.tokens, batch.tokens])  # the other cell's members are not read
    with torch.no_grad():
        work.ensemble.model(tokens, watch=watch)
    expected = np.zeros((2, 2))
    for s in range(2):
        for member in range(2):
            latents = batch.latents[s][member].numpy().astype(float)
            own = nodes[s][member].double().numpy()
            table = np.zeros((latents.shape[1], own.shape[1]))
            for i, latent in enumerate(latents.T):
                for j, node in enumerate(own.T):
                    if latent.std() > 0 and node.std() > 0:
                        table[i, j] = np.corrcoef(latent, node)[0, 1]
            expected[s, member] = table.max(1).mean()
    work.measure(0)
    run.metrics.flush()
    log = run.metrics.read()

    def read(name: str) -> np.ndarray:
        """The first cell's two networks, by level."""
        at = (log["name"] == name) & (log["member"] < 2)
        order = np.lexsort((log["member"][at], log["layer"][at]))
        return log["value"][at][order].reshape(LEVELS, 2)

    np.testing.assert_allclose(read("ncorr")[:2], expected, atol=1e-5)
    # Over samples the control is empty: every half has every input.
    assert abs((read("ncorr") - read("held_out_samples"))[:2].mean()) < 0.1
    assert read("shuffled_samples").max() < 0.3
    assert read("shuffled_classes")[:2].mean() > read("shuffled_samples").mean() + 0.1
    assert np.isnan(read("held_out_classes")[2]).all()  # a class is in one half alone


def made_up(trained: float, untrained: float, kept: float) -> CellResults:
    """Results in which every cell reads the published numbers plus something."""
    cells = tuple(CELLS)
    published = np.array([[*cell.published, 0.5] for cell in cells])[:, :, None, None]
    noise = np.linspace(-0.01, 0.01, 5)
    shape = (12, LEVELS, 3, 5)
    values = {name: np.full(shape, 0.3) + noise for name in MEASURES}
    values["ncorr"] = np.broadcast_to(published, shape) + noise
    values["ncorr"] = values["ncorr"] + np.array([untrained, untrained, trained])[:, None]
    values["held_out_classes"] = values["held_out_classes"] + np.array([0, 0, kept])[:, None]
    return CellResults(cells, (0, 1, 100), values, {"accuracy": np.full((12, 3, 5), 0.9)})


def judge(results: CellResults, published_size: bool, bounds: float = 1.0):
    shape = (len(results.cells), LEVELS, 5)
    return printed.judge(results, np.full(shape, bounds), published_size)


def test_the_verdict_can_turn():
    same = judge(made_up(0.02, 0.02, 0.0), published_size=True)
    assert same.agrees
    assert "24 of 24 numbers of trained networks" in same.finding
    assert "and 24 of untrained ones" in same.finding
    assert "training adds +0.00 and +0.00" in same.finding
    off = judge(made_up(0.08, 0.08, 0.0), published_size=True)
    assert off.verdict is Verdict.DIFFERS
    assert "0 of 24" in off.finding
    for shift in (0.02, 0.08):
        other = judge(made_up(shift, shift, 0.0), published_size=False)
        assert other.verdict is Verdict.NOT_COMPARABLE


def test_some_cells_alone_are_incomplete():
    whole = made_up(0.02, 0.02, 0.0)
    part = dataclasses.replace(
        whole,
        cells=whole.cells[:2],
        by_level={name: values[:2] for name, values in whole.by_level.items()},
        whole={name: values[:2] for name, values in whole.whole.items()},
    )
    assert judge(part, published_size=True).verdict is Verdict.INCOMPLETE


def test_bounds_count_what_no_class_uses():
    cell = Table1Cell((20, 30), 20, 2, (0.97, 0.80))
    bounds = printed.largest_possible([cell], TINY, 0)
    for member, seed in enumerate(cell.seeds(0, TINY.seeds)):
        hierarchy = LatentHierarchy(20, 2, (20, 30), seeds=[seed])
        for s, count in enumerate((20, 30)):
            used = hierarchy.latent_values[s][0].any(0).sum()
            assert bounds[0, s, member] == pytest.approx(float(used) / count)
    assert (bounds[:, 2] == 1).all()

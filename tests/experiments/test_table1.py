"""Table 1 at its smallest, and what its numbers are made to say."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from joma.data import LatentHierarchy
from joma.experiments import EXPERIMENTS, Verdict
from joma.experiments.table1 import printed
from joma.experiments.table1.printed import CELLS, GROUPS, LEVELS, MEASURES, SIZES, Table1Cell
from joma.experiments.table1.results import CellResults
from joma.runs import Run
from tests.cli._command import joma

EXPERIMENT = EXPERIMENTS["table1"]
TINY = SIZES["tiny"]


def test_every_cell_is_there_with_its_published_numbers():
    assert len(CELLS) == 12
    assert [len(cells) for cells in GROUPS.values()] == [2] * 6
    by_name = {cell.name: cell.published for cell in CELLS}
    # From the printed table, a corner each.
    assert by_name["C20-N2-10-20"] == (0.99, 0.81)
    assert by_name["C30-N3-20-30"] == (0.95, 0.66)
    assert by_name["C50-N3-10-20"] == (0.99, 0.64)
    seeds = [seed for cell in CELLS for seed in cell.seeds(0, 5)]
    assert len(set(seeds)) == 60


def test_the_published_setting():
    full = SIZES["full"]
    assert (full.seeds, full.width, full.hidden) == (5, 1024, 4096)
    assert (full.learning_rate, full.steps) == (1e-5, 10_000)
    assert {0, 1, 1000, 2000, 10_000} <= set(full.measure_at)
    options = {"hidden": 400, "learning-rate": 1e-4}
    assert full.with_options(options) == dataclasses.replace(full, hidden=400, learning_rate=1e-4)


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


def test_one_group_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("reproduce", "table1", "--scale", "tiny", "--group", "C20-N2", "--hidden", "32")
    result = joma(*arguments, "--out", "here", "--device", "cpu", "--json")
    (record,) = json.loads(result.stdout)
    assert [(row["cell"], row["s"]) for row in record["table"]] == [
        (f"C=20 N=2 {latents}", s) for latents in ("(10, 20)", "(20, 30)") for s in "012"
    ]
    assert Run.open("here").config["options"] == {"learning-rate": None, "hidden": 32}
    assert Run.open("here/groups/C20-N2").config["hidden"] == 32
    refused = joma(*arguments[:-1], "64", "--out", "here", "--device", "cpu")
    assert refused.exit_code == 2
    assert re.search("hidden 32.*hidden 64|hidden.*32.*64", refused.stderr.replace("\n", " "))
    assert not Path("here/groups/C20-N3").exists()


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


def test_the_power_of_the_control_is_said():
    words = " ".join(judge(made_up(0.0, 0.0, 0.0), True).paragraphs)
    assert "C = 20: s = 0 0.30 of 0.7, 0.30 of 0.8" in words
    assert words.count("0.30 of 0.95") == 6


def test_the_words_follow_the_numbers():
    nothing = " ".join(judge(made_up(0.0, 0.0, 0.0), True).paragraphs)
    assert nothing.count("less than 0.05") == 4
    much = " ".join(judge(made_up(0.0, -0.3, 0.4), True).paragraphs)
    assert "less than 0.05" not in much
    assert "NCorr by +0.30 at s = 0 and +0.30 at s = 1" in much
    assert "correlation by +0.40 at s = 0" in much


def test_what_these_hierarchies_cannot_read_is_said():
    words = " ".join(judge(made_up(0.0, 0.0, 0.0), True, bounds=0.78).paragraphs)
    assert "C20-N2-10-20 at s = 1 (0.81 against at most 0.78)" in words
    assert "C20-N3-10-20 at s = 1" not in words


def test_bounds_count_what_no_class_uses():
    cell = Table1Cell((20, 30), 20, 2, (0.97, 0.80))
    bounds = printed.largest_possible([cell], TINY, 0)
    for member, seed in enumerate(cell.seeds(0, TINY.seeds)):
        hierarchy = LatentHierarchy(20, 2, (20, 30), seeds=[seed])
        for s, count in enumerate((20, 30)):
            used = hierarchy.latent_values[s][0].any(0).sum()
            assert bounds[0, s, member] == pytest.approx(float(used) / count)
    assert (bounds[:, 2] == 1).all()

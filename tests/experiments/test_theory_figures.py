"""Each theory figure is made, with its data next to it, and its verdict follows from the data."""

import dataclasses

import numpy as np
import pytest

from joma.experiments import EXPERIMENTS, Request
from joma.experiments.theory_figures import cooccurrence, fig4, fig9, linear_block
from joma.runs import Run

TABLES = {
    "fig2": {
        f"{what}_{kind}" for what in ("correlation", "frequencies") for kind in linear_block.TITLES
    },
    "fig3": {f"v0_{kind}" for kind in linear_block.TITLES},
    "fig4": {"as_printed", "as_drawn", "targets"},
    "fig9": {"curves", "critical_points"},
    "cooccurrence": {"cooccurrence", "near_one"},
    "scan-snap": {"logits", "entropy", "phases"},
}


@pytest.mark.parametrize("name", TABLES)
def test_an_experiment_writes_figures_and_tables_and_agrees(name: str, tmp_path):
    run = Run.create(name, {"seed": 0}, out=tmp_path / name)
    outcome = EXPERIMENTS[name].reproduce(run, Request())
    assert outcome.agrees, outcome.finding
    assert {path.name for path in run.figures} == {f"{name}.png", f"{name}.svg"}
    assert set(run.tables) == TABLES[name]


def test_those_are_all_that_train_no_networks():
    assert {name for name, one in EXPERIMENTS.items() if not one.scales} == set(TABLES)


def test_fig2_differs_when_the_whole_does_not_predict():
    steps = np.arange(0, 2001, 10)
    low = np.full(steps.size, 0.2)
    names = ["whole", "own", "shared", "whole_centered", "own_centered", "shared_centered"]
    curves = dict.fromkeys([*names, "predicted", "memory"], low)
    assert not linear_block.judge_fig2(steps, {"smooth": curves}).agrees


def test_fig3_differs_when_all_grow():
    everywhere = np.linspace(0, 1, 200)[:, None] * np.ones(20)
    assert not linear_block.judge_fig3({"smooth": everywhere}).agrees


def test_fig4_differs_without_a_rebound():
    mu = fig4.targets(0)
    curves = fig4.as_printed(mu)
    low = int(np.argmin(curves.entropy))
    stopped = dataclasses.replace(
        curves, t=curves.t[:low], v=curves.v[:low], entropy=curves.entropy[:low]
    )
    assert fig4.judge(mu, {"whole": curves}).agrees
    assert not fig4.judge(mu, {"stopped": stopped}).agrees


def test_fig9_differs_without_any_critical_point():
    gaussian = fig9.trace(fig9.FAMILIES["Gaussian"])
    assert gaussian.points == []
    assert not fig9.judge({"Gaussian": gaussian}).agrees


def test_cooccurrence_differs_where_the_observation_fails():
    data = cooccurrence.compute(0)
    assert cooccurrence.judge(data).agrees
    assert (np.abs(data.derived - data.sampled) < 4 * data.standard_error).all()
    assert (np.abs(data.printed - data.sampled) > 10 * data.standard_error).all()
    rising = {"sampled": data.sampled[::-1], "derived": data.derived[::-1]}
    for changes in (
        rising,
        {"derived": data.printed},
        {"limit_error": np.full_like(data.limit_error, 0.1)},
    ):
        assert not cooccurrence.judge(dataclasses.replace(data, **changes)).agrees

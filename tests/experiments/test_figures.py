"""Each theory figure is made, with its data next to it, and its verdict follows from the data."""

import dataclasses

import numpy as np
import pytest

from joma.experiments import EXPERIMENTS, Request
from joma.experiments.fig2 import figure as fig2
from joma.experiments.fig3 import figure as fig3
from joma.experiments.fig4 import figure as fig4
from joma.experiments.fig9 import figure as fig9
from joma.runs import Run

THEORY = [name for name, experiment in EXPERIMENTS.items() if not experiment.scales]


@pytest.mark.parametrize("name", THEORY)
def test_experiment_writes_figures_and_tables_and_agrees(name, tmp_path):
    run = Run.create(name, {"seed": 0}, out=tmp_path / name)
    outcome = EXPERIMENTS[name].reproduce(run, Request())
    assert outcome.agrees, outcome.finding
    made = {path.suffix for path in (run.path / "figures").iterdir()}
    assert made == {".png", ".svg"}
    assert list((run.path / "tables").glob("*.parquet"))


def test_fig2_differs_when_the_whole_does_not_predict():
    steps = np.arange(0, 2001, 10)
    low = np.full(steps.size, 0.2)
    names = ["whole", "own", "shared", "whole_centered", "own_centered", "shared_centered"]
    curves = dict.fromkeys([*names, "predicted", "memory"], low)
    assert not fig2.judge(steps, {"smooth": curves}).agrees


def test_fig3_differs_when_all_grow():
    everywhere = np.linspace(0, 1, 200)[:, None] * np.ones(20)
    assert not fig3.judge({"smooth": everywhere}).agrees


def test_fig4_differs_without_a_rebound():
    mu = fig4.targets(0)
    course = fig4.as_printed(mu)
    low = int(np.argmin(course.entropy))
    stopped = dataclasses.replace(
        course, t=course.t[:low], v=course.v[:low], entropy=course.entropy[:low]
    )
    assert fig4.judge(mu, {"whole": course}).agrees
    assert not fig4.judge(mu, {"stopped": stopped}).agrees


def test_fig9_differs_without_any_critical_point():
    gaussian = fig9.trace(fig9.FAMILIES["Gaussian"])
    assert gaussian.points == []
    assert not fig9.judge({"Gaussian": gaussian}).agrees

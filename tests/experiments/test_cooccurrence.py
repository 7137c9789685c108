"""The co-occurrence experiment writes what it says and its verdict follows the data."""

import dataclasses

import numpy as np

from joma.experiments import Request
from joma.experiments.cooccurrence import EXPERIMENT
from joma.experiments.cooccurrence import figure as cooccurrence
from joma.runs import Run


def test_run_folder_holds_tables_and_figures(tmp_path):
    run = Run.create("cooccurrence", {"seed": 0}, out=tmp_path / "run")
    outcome = EXPERIMENT.reproduce(run, Request())
    assert outcome.agrees
    assert run.tables == ["cooccurrence", "near_one"]
    assert {path.suffix for path in run.figures} == {".png", ".svg"}
    table = run.read_table("cooccurrence")
    assert np.all(np.abs(table["derived"] - table["sampled"]) < 4 * table["standard_error"])
    assert np.all(np.abs(table["printed"] - table["sampled"]) > 10 * table["standard_error"])
    assert run.read_table("near_one")["epsilon"].size == 18


def test_verdict_turns_where_the_observation_fails():
    data = cooccurrence.compute(0)
    assert cooccurrence.judge(data).agrees
    rising = {"sampled": data.sampled[::-1], "derived": data.derived[::-1]}
    for changes in (
        rising,
        {"derived": data.printed},
        {"limit_error": np.full_like(data.limit_error, 0.1)},
    ):
        assert not cooccurrence.judge(dataclasses.replace(data, **changes)).agrees

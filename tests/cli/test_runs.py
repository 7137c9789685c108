"""`joma runs`: what it prints and how it exits."""

import json
from pathlib import Path

import numpy as np
import pytest

from joma.runs import Run
from tests.cli._command import joma, sentence


class TestRuns:
    @pytest.fixture(autouse=True)
    def two_runs(self):
        for name, value in (("one", 1.0), ("two", 1.5)):
            run = Run.create("fig2", {"seed": value}, out=Path("runs", name))
            run.write_table("curve", {"value": [value]})
            run.write_json("outcome", {"status": "done", "agrees": name == "one", "finding": "f."})

    def test_list(self):
        result = joma("runs", "list")
        assert "runs/one" in result.stdout
        assert "agrees" in result.stdout
        assert "differs" in result.stdout
        records = json.loads(joma("runs", "list", "runs", "--json").stdout)
        assert [record["name"] for record in records] == ["fig2", "fig2"]

    def test_list_of_nothing(self):
        Path("empty").mkdir()
        assert joma("runs", "list", "empty").stdout == "No runs in empty.\n"
        assert sentence(joma("runs", "list", "nowhere")) == "joma: DIR nowhere does not exist"
        assert "is not a folder" in sentence(joma("runs", "list", "runs/one/config.json"))

    def test_list_before_the_first_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path / "runs")
        result = joma("runs", "list")
        assert result.exit_code == 0
        assert result.stdout == "No runs in ./runs yet.\n"
        assert json.loads(joma("runs", "list", "--json").stdout) == []

    def test_show(self):
        result = joma("runs", "show", "runs/one")
        assert "1 rows: value" in result.stdout
        assert json.loads(joma("runs", "show", "runs/one", "--json").stdout)["config"] == {
            "name": "fig2",
            "seed": 1.0,
        }
        assert "is not a run folder" in sentence(joma("runs", "show", "runs"))

    def test_compare(self):
        result = joma("runs", "compare", "runs/one", "runs/two")
        assert result.exit_code == 0
        assert "config seed" in result.stdout
        assert "table curve: largest differences: value 5.00e-01" in result.stdout
        record = json.loads(joma("runs", "compare", "runs/one", "runs/two", "--json").stdout)
        assert record["config"] == {"seed": [1.0, 1.5]}
        assert record["tables"]["curve"] == {"equal": False, "largest": {"value": 0.5}}
        same = joma("runs", "compare", "runs/one", "runs/one").stdout
        assert same.splitlines() == [
            "Settings, environment and outcome are the same.",
            "table curve: equal",
        ]


def logged(folder: str, values, steps=(0, 100), order=("loss", "ncorr")) -> Run:
    """A run with two members' metrics, logged in this order within a step."""
    run = Run.create("table1", {}, out=folder)
    for step, loss in zip(steps, values, strict=True):
        for name in order:
            run.metrics.append(step, name, [loss, 2.0], layer=1)
    run.metrics.flush()
    return run


class TestMetrics:
    def test_show(self):
        run = logged("one", [1.0, 0.5])
        run.checkpoints.save(50, {"weight": np.zeros(2)}, {})
        run.checkpoints.save(100, {"weight": np.zeros(2)}, {})
        Path("one/checkpoints/step-foreign.safetensors").touch()
        record = json.loads(joma("runs", "show", "one", "--json").stdout)
        assert record["checkpoints"] == [50, 100]
        assert record["metrics"] == {
            "rows": 8,
            "names": ["loss", "ncorr"],
            "members": 2,
            "last_step": 100,
        }
        lines = [line.split() for line in joma("runs", "show", "one").stdout.splitlines()]
        assert ["metrics", "rows", "8"] in lines
        assert ["checkpoints", "at", "steps", "50", "100"] in lines

    def test_show_of_a_run_without(self):
        Run.create("fig2", {}, out="none")
        record = json.loads(joma("runs", "show", "none", "--json").stdout)
        assert (record["metrics"], record["checkpoints"]) == (None, [])
        text = joma("runs", "show", "none").stdout
        assert "metrics" not in text
        assert "checkpoints" not in text

    def test_show_has_the_findings_in_both_formats(self):
        run = Run.create("monitor", {}, out="watched")
        found = {"kind": "dead_layer", "layer": 1, "head": None, "step": 3, "sentence": "It died."}
        found |= {"evidence": {"end": 0.0}, "module": "layers.1"}
        run.write_json("findings", [found])  # as before there were severities
        assert "–  step 3  It died." in joma("runs", "show", "watched").stdout
        record = json.loads(joma("runs", "show", "watched", "--json").stdout)
        assert record["findings"]["findings"] == [found | {"severity": None, "advice": ""}]
        found |= {"severity": "warning", "advice": "Train it."}
        missing = [{"kind": "overfitting", "needs": "validation losses"}]
        run.write_json("findings", {"findings": [found], "not_judged": missing})
        lines = [line.split() for line in joma("runs", "show", "watched").stdout.splitlines()]
        at = lines.index(["warning", "step", "3", "It", "died."])
        assert lines[at + 1] == ["Train", "it."]
        assert ["not", "judged:", "overfitting;", "needs", "validation", "losses"] in lines
        record = json.loads(joma("runs", "show", "watched", "--json").stdout)
        assert record["findings"] == {"findings": [found], "not_judged": missing}

    def test_show_says_when_it_was_resumed(self):
        Run.create("table1", {}, out="one")
        Run.resume("table1", {}, out="one", device="cuda")
        lines = [line.split() for line in joma("runs", "show", "one").stdout.splitlines()]
        assert ["environment", "resumed", "1", "device", "cuda"] in lines

    def test_the_same_numbers_at_another_time_in_another_order(self):
        logged("one", [1.0, 0.5])
        logged("two", [1.0, 0.5], order=("ncorr", "loss"))
        assert "metrics: equal" in joma("runs", "compare", "one", "two").stdout

    def test_other_numbers(self):
        logged("one", [1.0, 0.5], order=("loss",))
        logged("two", [1.0, 0.75], order=("loss",))
        text = joma("runs", "compare", "one", "two").stdout
        assert "Losses differ by more than 2% from step 100 on." in text
        assert text.splitlines()[-1].split() == ["loss", "1.25", "1.375", "+0.125", "one"]
        record = json.loads(joma("runs", "compare", "one", "two", "--json").stdout)
        assert record["metrics"] == {"equal": False, "largest": {"loss": 0.25, "loss bound": 0.0}}

    def test_a_number_against_none(self):
        logged("one", [1.0, float("inf")])
        logged("two", [1.0, float("nan")])
        record = json.loads(joma("runs", "compare", "one", "two", "--json").stdout)
        assert record["metrics"]["equal"] is False
        assert record["metrics"]["largest"]["loss"] is None
        same = json.loads(joma("runs", "compare", "one", "one", "--json").stdout)
        assert same["metrics"]["equal"] is True

    def test_other_steps(self):
        logged("one", [1.0, 0.5])
        logged("two", [1.0, 0.5], steps=(0, 200))
        text = joma("runs", "compare", "one", "two").stdout
        assert "The runs did not log the same steps, names or members." in text
        assert "Equal at the end: loss, ncorr" in text
        logged("three", [1.0], steps=(0,))
        record = json.loads(joma("runs", "compare", "one", "three", "--json").stdout)
        assert record["metrics"] == {"equal": False, "largest": {}}

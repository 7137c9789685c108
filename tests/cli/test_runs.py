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

    def test_show_has_the_findings(self):
        run = Run.create("monitor", {}, out="watched")
        found = {"kind": "dead_layer", "layer": 1, "head": None, "step": 3, "sentence": "It died."}
        found |= {"evidence": {"end": 0.0}, "module": "layers.1"}
        found |= {"severity": "warning", "advice": "Train it."}
        missing = [{"kind": "overfitting", "needs": "validation losses"}]
        run.write_json("findings", {"findings": [found], "not_judged": missing})
        lines = [line.split() for line in joma("runs", "show", "watched").stdout.splitlines()]
        at = lines.index(["warning", "step", "3", "It", "died."])
        assert lines[at + 1] == ["Train", "it."]
        assert ["not", "judged:", "overfitting;", "needs", "validation", "losses"] in lines
        record = json.loads(joma("runs", "show", "watched", "--json").stdout)
        assert record["findings"] == {"findings": [found], "not_judged": missing}

    def test_the_same_numbers_at_another_time_in_another_order(self):
        logged("one", [1.0, 0.5])
        logged("two", [1.0, 0.5], order=("ncorr", "loss"))
        assert "metrics: equal" in joma("runs", "compare", "one", "two").stdout

    def test_a_loss_that_is_not_finite_is_never_better(self):
        logged("one", [1.0, float("nan")], order=("loss",))
        logged("two", [1.0, 0.75, 0.5], (0, 100, 200), order=("loss",))
        text = joma("runs", "compare", "one", "two").stdout
        assert "The runs end at different steps, 100 and 200." in text
        assert text.splitlines()[-1].split()[:2] == ["loss", "nan"]
        assert text.splitlines()[-1].split()[-1] == "two"

    def test_other_numbers(self):
        logged("one", [1.0, 0.5], order=("loss",))
        logged("two", [1.0, 0.75], order=("loss",))
        text = joma("runs", "compare", "one", "two").stdout
        assert "Losses first differ by more than 2% at step 100." in text
        assert text.splitlines()[-1].split() == ["loss", "1.25", "1.375", "+0.125", "one"]
        record = json.loads(joma("runs", "compare", "one", "two", "--json").stdout)
        assert record["metrics"] == {"equal": False, "largest": {"loss": 0.25, "loss bound": 0.0}}

    def test_other_steps(self):
        logged("one", [1.0, 0.5])
        logged("two", [1.0, 0.5], steps=(0, 200))
        text = joma("runs", "compare", "one", "two").stdout
        assert "The runs did not log the same steps, names or members." in text
        assert "Equal at the end: loss, ncorr" in text
        logged("three", [1.0], steps=(0,))
        record = json.loads(joma("runs", "compare", "one", "three", "--json").stdout)
        assert record["metrics"] == {"equal": False, "largest": {}}


class TestMonitored:
    """Runs of a monitor in every state."""

    @pytest.fixture(autouse=True)
    def runs(self) -> None:
        finding = {"kind": "not_finite", "severity": "critical", "step": 3, "layer": 1}
        finding |= {"sentence": "The loss is not finite since step 3.", "advice": "Lower the rate."}
        for number, (name, outcome) in enumerate(
            {
                "ended": {"status": "done"},
                "killed": {"status": "running"},
                "diverged": {"status": "done"},
                "a-run-with-a-name-that-is-longer-than-most-names-are": {"status": "interrupted"},
                "broken": {"status": "done"},
                "old": None,
            }.items()
        ):
            run = Run.create("monitor", {"optimizer": {"lr": number}}, out=Path("runs", name))
            for step in range(1, 5):
                run.metrics.append(step, "loss", 4.0 / step + number * (step > 2))
                for layer in range(2):
                    where = {"module": f"layers.{layer}", "kind": "self", "layer": layer}
                    run.metrics.append(step, "attention_entropy", 1.0 + layer, **where)
            run.metrics.flush()
            if outcome is not None:
                run.write_json("outcome", outcome)
            if name == "diverged":
                run.metrics.append(5, "loss", float("nan"))
                run.metrics.flush()
                run.write_json("findings", {"findings": [finding], "not_judged": []})
            if name == "broken":
                part = run.path / "metrics" / "part-000000.parquet"
                part.write_bytes(part.read_bytes()[:-20])

    @pytest.mark.parametrize("columns", [80, 120])
    def test_list_shows_each_as_what_it_is(self, monkeypatch, columns: int):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = joma("runs", "list").stdout
        assert max(map(len, text.splitlines())) <= columns
        rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("runs/")}
        for name, words in {
            "ended": ["ended", "4", "1"],
            "killed": ["died", "4", "2"],
            "diverged": ["diverged", "5", "nan", "critical:"],
            "old": ["unknown", "4", "6"],
            "broken": ["damaged"],
        }.items():
            assert all(word in rows[f"runs/{name}"].split() for word in words), rows
        records = json.loads(joma("runs", "list", "--json").stdout)
        states = {Path(record["path"]).name: record["state"] for record in records}
        assert states["diverged"] == "diverged"
        assert states["broken"] == "damaged"
        assert states["a-run-with-a-name-that-is-longer-than-most-names-are"] == "stopped"

    @pytest.mark.parametrize("columns", [80, 120])
    def test_show_begins_with_findings_and_curves(self, monkeypatch, columns: int):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = joma("runs", "show", "runs/diverged").stdout
        assert max(map(len, text.splitlines())) <= columns
        heads = ["Findings", "Loss,", "Attention", "Settings"]
        places = [text.index(f"\n{head}") for head in heads]
        assert places == sorted(places)
        assert text.startswith("runs/diverged: diverged\n")
        assert "critical  step 3  The loss is not finite since step 3." in text
        lines = [line.split() for line in text.splitlines()]
        assert ["loss", "4", "█▁▆▅×", "nan"] in lines
        assert ["layer", "1", "2", "████", "2"] in lines

    def test_a_damaged_run_is_named_by_show_compare_and_plot(self):
        said = "joma: runs/broken/metrics/part-000000.parquet is damaged"
        for words in (["show"], ["compare", "runs/ended"], ["plot"]):
            assert sentence(joma("runs", *words, "runs/broken")).startswith(said)

    def test_compare_shows_settings_curves_and_ends(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        text = joma("runs", "compare", "runs/ended", "runs/killed").stdout
        assert max(map(len, text.splitlines())) <= 80
        lines = [line.split() for line in text.splitlines()]
        assert ["config", "optimizer.lr", "0", "1"] in lines
        assert ["state", "ended", "died"] in lines
        assert ["loss", "1", "2", "+1", "ended"] in lines
        assert "Losses first differ by more than 2% at step 3." in text
        assert "Equal at the end: attention_entropy" in text
        record = json.loads(joma("runs", "compare", "runs/ended", "runs/diverged", "--json").stdout)
        assert record["losses_part_at"] == 3
        assert record["ends"]["loss"] == [1.0, None]

    def test_plot(self):
        assert joma("runs", "plot", "runs/ended").stdout == "runs/ended/figures/training.png\n"
        assert Run.open("runs/ended").verified
        for out in ("a.png", "b.svg", "c.pdf"):
            words = ["--metric", "attention_entropy"]
            assert joma("runs", "plot", "runs/old", "--out", out, *words).stdout == f"{out}\n"
            assert Path(out).stat().st_size > 1000
        record = json.loads(joma("runs", "plot", "runs/diverged", "--json").stdout)
        assert record == {"figure": "runs/diverged/figures/training.png"}
        with Run.open("runs/killed").locked():
            assert joma("runs", "plot", "runs/killed").stdout == "killed-training.png\n"
        assert not Path("runs/killed/figures").exists()
        bad = joma("runs", "plot", "runs/ended", "--out", "a.txt")
        assert sentence(bad) == "joma: --out must end in .png, .svg, .pdf, got a.txt"
        bad = joma("runs", "plot", "runs/ended", "--metric", "los")
        assert "got 'los'; there is attention_entropy, loss" in sentence(bad)
        assert "cannot write to --out" in sentence(
            joma("runs", "plot", "runs/ended", "--out", "a.png/b.png")
        )

"""`joma runs`: what it prints and how it exits."""

import json
from pathlib import Path

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

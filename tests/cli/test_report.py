"""`joma report`: what it writes, where, and how it exits."""

import json
from pathlib import Path

import pytest

from tests.cli._command import joma, sentence
from tests.report._runs import finding, made_run


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_run(Path("runs/one"), findings=[finding()])
    made_run(Path("runs/two"), seed=1, config={"learning_rate": 1e-2})


def _damage(run: Path) -> None:
    part = next((run / "metrics").iterdir())
    part.write_bytes(part.read_bytes()[:300])


def test_one_run_goes_into_its_folder():
    result = joma("report", "runs/one")
    assert result.exit_code == 0
    assert "runs/one/report.html" in result.stdout
    assert "Attention of layer 1 has collapsed." in Path("runs/one/report.html").read_text()
    assert joma("report", "runs/one").exit_code == 0  # a report of ours may be written again
    assert json.loads(joma("runs", "show", "runs/one", "--json").stdout)["verified"]


def test_several_runs_and_json():
    result = joma("report", "runs/one", "runs/two", "--json")
    record = json.loads(result.stdout)
    assert record["out"] == "report.html"
    assert record["bytes"] == Path("report.html").stat().st_size < 1e6
    assert [it["state"] for it in record["runs"]] == ["ended", "ended"]


def test_files_of_others_stay():
    Path("mine.html").write_text("mine")
    line = sentence(joma("report", "runs/one", "--out", "mine.html"))
    assert line.startswith("joma: --out mine.html exists and is not a report")
    assert Path("mine.html").read_text() == "mine"
    Path("report.html").mkdir()
    assert joma("report", "runs/one", "runs/two").exit_code == 0
    assert Path("report.html/report.html").is_file()


def test_damaged_runs():
    _damage(Path("runs/two"))
    assert "is damaged" in sentence(joma("report", "runs/two"))
    result = joma("report", "runs/one", "runs/two")
    assert result.exit_code == 0
    assert "runs/two is shown as damaged" in result.stderr
    assert '"state":"damaged"' in Path("report.html").read_text()
    Path("runs/two/environment.json").write_text("{")
    result = joma("report", "runs/one", "runs/two")
    assert "runs/two is shown as damaged: runs/two/environment.json is not" in result.stderr
    _damage(Path("runs/one"))
    assert "is damaged" in sentence(joma("report", "runs/one", "runs/two"))


def test_what_is_no_run():
    assert sentence(joma("report", "runs")) == "joma: runs is not a run folder"
    assert "is not a run folder" in sentence(joma("report", "runs/one", "nowhere"))


def test_reference():
    Path("curves.csv").write_text("step,lr,loss\n0,0.1,3\n10,0.1,2\n0,0.2,3\n")
    result = joma("report", "runs/one", "--reference", "curves.csv", "--where", "lr=0.1")
    assert result.exit_code == 0
    assert '"name":"curves.csv"' in Path("runs/one/report.html").read_text()
    wrong = joma("report", "runs/one", "--reference", "curves.csv", "--where", "lr")
    assert "--where must be COLUMN=VALUE" in sentence(wrong)

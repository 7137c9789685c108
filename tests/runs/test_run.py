"""Run folders: made, refused, filled, read, listed and compared."""

import itertools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from joma.errors import JomaError
from joma.runs import Run, compare_tables, differing, list_runs
from tests.runs._failing import contents, visible


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create("fig4", {"seed": 3}, out=tmp_path / "run")


def test_folders_of_older_versions_are_refused(run: Run):
    around = json.loads((run.path / "environment.json").read_text())
    (run.path / "environment.json").write_text(json.dumps({**around, "joma": "0.2.0"}))
    (run.path / "manifest.json").unlink()
    with pytest.raises(JomaError, match=r"was written by joma 0\.2\.0, which only that reads"):
        Run.open(run.path)
    assert list_runs(run.path)[0].state == "damaged"


def test_commit_of_the_working_folder(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    numbers = itertools.count()

    def commit_of_a_run() -> str | None:
        run = Run.create("fig4", {}, out=tmp_path.parent / f"{tmp_path.name}-{next(numbers)}")
        assert run.environment["packages"]["numpy"] == np.__version__
        return run.environment["commit"]

    assert commit_of_a_run() is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first", "--no-verify"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert commit_of_a_run() == commit.stdout.strip()
    (tmp_path / "file").write_text("2")
    assert commit_of_a_run() == f"{commit.stdout.strip()}-dirty"


def test_a_folder_with_other_things_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"out .* other things"):
        Run.create("fig4", {}, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(ValueError, match="is a file"):
        Run.create("fig4", {}, out=tmp_path / "config.json")


@pytest.mark.parametrize("name", ["manifest.json", "environment.json"])
def test_a_file_of_somebody_else_with_our_name_is_kept(tmp_path: Path, name: str):
    (tmp_path / name).write_text('{"name": "my web page", "files": {}}')
    before = contents(tmp_path)
    for enter in (Run.create, Run.resume, partial(Run.create, existing="next")):
        with pytest.raises(JomaError, match=r"out .* other things"):
            enter("fig4", {}, out=tmp_path)
    assert contents(tmp_path) == before


def test_an_earlier_run_is_refused_and_stays_as_it_was(tmp_path: Path):
    out = tmp_path / "mine"
    first = Run.create("fig4", {"seed": 1}, out=out)
    first.write_json("findings", [1])
    first.write_json("outcome", {"status": "done"})
    first.write_table("old", {"a": [1]})
    first.write_figure("old.png", b"png")
    first.metrics.append(1, "loss", 1.0)
    first.metrics.flush()
    first.checkpoints.save(1, {"a": np.zeros(3)}, {})
    before = contents(tmp_path)
    for existing in ("refuse", "restart"):
        with pytest.raises(JomaError) as error:
            Run.create("fig4", {"seed": 1}, out=out, existing=existing)
        assert str(error.value) == (
            f"out {out} holds an earlier fig4 run, which is kept; give another folder, such as "
            f"{out}-2"
        )
        assert contents(tmp_path) == before


def test_the_next_folder_is_made_and_named(tmp_path: Path, caplog):
    out = tmp_path / "mine"
    runs = [Run.create("fig4", {"seed": n}, out=out, existing="next") for n in range(2)]
    (tmp_path / "mine-3").write_text("a file")
    (tmp_path / "mine-4").mkdir()
    (tmp_path / "mine-4" / "thesis.txt").write_text("not of a run")
    runs += [Run.create(name, {}, out=out, existing="next") for name in ("fig4", "other")]
    assert [run.path.name for run in runs] == ["mine", "mine-2", "mine-5", "mine-6"]
    assert caplog.messages == [
        f"{out} holds an earlier run; this one is written to {run.path}" for run in runs[1:]
    ]
    for run in runs:
        assert Run.open(run.path) == run
    assert visible(tmp_path / "mine-4") == ["thesis.txt"]


def test_the_next_folder_of_something_else_is_refused(tmp_path: Path, monkeypatch):
    (tmp_path / "thesis.txt").write_text("not of a run")
    for out in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(JomaError, match=r"other things in it|is a file"):
            Run.create("fig4", {}, out=out, existing="next")
    assert visible(tmp_path) == ["thesis.txt"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert [Run.create("a", {}, out=".", existing="next").path.name for _ in range(2)] == [
        "",
        "here-2",
    ]


def test_processes_that_start_together_get_a_folder_each(tmp_path: Path):
    code = (
        "import sys; from joma.runs import Run; sys.stdin.readline()\n"
        "print(Run.create('mine', {}, out=sys.argv[1], existing='next').path)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "mine")]
    pipe = subprocess.PIPE
    starting = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(4)
    ]
    for process in starting:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    paths = [Path(process.communicate(timeout=300)[0].strip()) for process in starting]
    assert len(set(paths)) == 4
    assert {Run.open(path).name for path in paths} == {"mine"}
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_an_unfinished_run_is_restarted_where_asked(run: Run):
    run.write_json("outcome", {"status": "interrupted"})
    run.write_table("old", {"a": [1]})
    run.metrics.append(1, "loss", 1.0)
    run.metrics.flush()
    again = Run.create("fig4", {"seed": 3}, out=run.path, existing="restart")
    assert again.metrics.read()["step"].size == 0
    assert again.tables == ["old"]
    assert len(again.environment["resumed"]) == 1
    with pytest.raises(JomaError, match="seed 3, but seed 4"):
        Run.create("fig4", {"seed": 4}, out=run.path, existing="restart")
    with pytest.raises(JomaError, match="existing must be one of refuse, next, restart"):
        Run.create("fig4", {"seed": 3}, out=run.path, existing="overwrite")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "a b"])
def test_bad_names_are_refused(run: Run, name: str):
    for refused in (
        lambda: Run.create(name, {}, out=run.path),
        lambda: run.write_table(name, {"a": [1]}),
        lambda: run.write_json(name, 1),
        lambda: run.write_figure(name, b""),
    ):
        with pytest.raises(ValueError, match="name must be letters"):
            refused()


def test_json_has_no_nan_and_takes_numpy(run: Run):
    value = {"a": np.float64("nan"), "b": np.arange(2), "c": (np.int64(1), float("inf")), "d": True}
    run.write_json("values", value)
    assert run.read_json("values") == {"a": None, "b": [0, 1], "c": [1, None], "d": True}
    with pytest.raises(ValueError, match="cannot be written"):
        run.write_json("values", object())
    with pytest.raises(ValueError, match="keeps itself"):
        run.write_json("config", {})
    with pytest.raises(ValueError, match="does not exist"):
        run.read_json("nothing")
    with pytest.raises(ValueError, match="no table 'curv'; it has no tables"):
        run.read_table("curv")


def test_table_round_trip(run: Run):
    columns = {
        "step": np.arange(3),
        "value": np.array([0.5, np.nan, -np.inf]),
        "half": np.array([1, 2, 3], dtype=np.float32),
        "name": ["a", "", "Δ"],
        "flag": np.array([True, False, True]),
    }
    path = run.write_table("curve", columns)
    assert path == run.path / "tables" / "curve.parquet"
    back = run.read_table("curve")
    assert list(back) == list(columns)
    for name, column in columns.items():
        np.testing.assert_array_equal(back[name], np.asarray(column))
        assert back[name].dtype.kind == np.asarray(column).dtype.kind
    assert run.tables == ["curve"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "at least one column"),
        ({"a": [1, 2], "b": [1]}, "equal lengths"),
        ({"a": [[1, 2]]}, "one axis"),
        ({"a": 1}, "one axis"),
        ({"a": np.array([1j])}, "columns must hold"),
    ],
)
def test_bad_tables_are_refused(run: Run, columns, message: str):
    with pytest.raises(ValueError, match=message):
        run.write_table("bad", columns)
    assert run.tables == []


def test_list_finds_runs_below_and_names_what_is_damaged(tmp_path: Path):
    outer = Run.create("demo", {}, out=tmp_path / "demo")
    inner = Run.create("fig4", {}, out=tmp_path / "demo" / "fig4")
    inner.write_json("outcome", {"status": "done", "agrees": True})
    inner.write_figure("a.png", b"x")
    (tmp_path / "other").mkdir()
    broken = Run.create("fig2", {}, out=tmp_path / "broken")
    (broken.path / "config.json").write_text("{")
    summaries = {summary.path: summary for summary in list_runs(tmp_path)}
    assert set(summaries) == {outer.path, inner.path, broken.path}
    assert summaries[broken.path].state == "damaged"
    assert "is damaged" in summaries[broken.path].reason
    assert summaries[inner.path].outcome["agrees"]
    assert summaries[inner.path].figures == 1
    json.dumps(summaries[inner.path].as_json())
    with pytest.raises(ValueError, match="root must be a folder"):
        list_runs(tmp_path / "nothing")


def test_compare(tmp_path: Path):
    one = Run.create("a", {"seed": 1, "model": {"size": 2}}, out=tmp_path / "one")
    two = Run.create("a", {"seed": 1, "model": {"size": 3}, "new": 0}, out=tmp_path / "two")
    assert differing(one.config, two.config) == {"model.size": (2, 3), "new": (None, 0)}
    one.write_table("same", {"x": [np.inf, np.nan], "k": ["a", "b"]})
    two.write_table("same", {"x": [np.inf, np.nan], "k": ["a", "b"]})
    one.write_table("near", {"x": [1.0, 2.0], "k": ["a", "b"]})
    two.write_table("near", {"x": [1.0, 2.5], "k": ["a", "c"]})
    one.write_table("shape", {"x": [1.0]})
    two.write_table("shape", {"x": [1.0, 2.0]})
    one.write_table("alone", {"x": [1.0]})
    near, same, shape = compare_tables(one, two)
    assert near.largest == {"x": 0.5, "k": 0.5}
    assert not near.equal
    assert same.equal
    assert not shape.same_shape
    assert not shape.equal


def test_nothing_heavy_is_imported_with_the_room_and_torch_never(tmp_path: Path):
    code = (
        "import sys, numpy, joma.runs\n"
        "print([m for m in ('torch', 'pyarrow', 'safetensors') if m in sys.modules])\n"
        "run = joma.runs.Run.create('any', {}, out=sys.argv[1])\n"
        "run.metrics.append(0, 'loss', 1.0); run.metrics.compact(); run.metrics.read()\n"
        "run.checkpoints.save(0, {'a': numpy.ones(1)}, {}); assert run.checkpoints.latest()\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["[]", "False", ""]

"""The manifest: what it lists, what it finds damaged or missing, and kills at any moment."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from joma.errors import JomaError
from joma.runs import Run
from tests.cli._command import joma, sentence
from tests.runs._failing import every_kill


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with a file of every kind, and five parts of a log."""
    made = Run.create("fit", {"seed": 1}, out=tmp_path / "run")
    made.write_table("curve", {"a": [1.0, 2.0], "word": ["x", "y"]})
    made.write_figure("curve.png", b"png")
    made.write_json("findings", [1, 2])
    for step in range(5):
        made.metrics.append(step, "loss", [float(step), -1.0])
        made.metrics.flush()
    return made


def steps(run: Run) -> list[int]:
    return sorted(set(Run.open(run.path).metrics.read()["step"].tolist()))


def test_it_lists_what_the_run_owns(run: Run):
    listed = json.loads((run.path / "manifest.json").read_text())
    assert list(listed["files"]) == [
        "config.json",
        "environment.json",
        "figures/curve.png",
        "findings.json",
        "tables/curve.parquet",
    ]
    for name, entries in listed["files"].items():
        assert entries[-1]["size"] == (run.path / name).stat().st_size
    assert listed["metrics"] == {"parts": 5}
    assert run.verified
    assert run.missing == []
    (run.path / "figures" / "curve.png").unlink()
    assert run.missing == ["figures/curve.png"]
    (run.path / "notes.json").write_text("{}")
    assert not run.verified


def test_a_changed_or_missing_file_is_refused_in_one_sentence(run: Run):
    findings = run.path / "findings.json"
    findings.write_text("[1, 3]\n")
    with pytest.raises(JomaError) as error:
        run.read_json("findings")
    assert str(error.value) == (
        f"{findings} is damaged: it does not match manifest.json; restore it, or delete "
        "manifest.json to open the run unverified"
    )
    findings.unlink()
    with pytest.raises(JomaError, match=r"findings\.json is missing: it does not match"):
        run.read_json("findings")
    run.write_json("findings", [4])  # written again, it is whole again
    assert run.read_json("findings") == [4]
    with pytest.raises(JomaError, match=r"never\.json does not exist"):
        run.read_json("never")


def test_a_table_replaced_by_a_metrics_part_is_refused(run: Run):
    part, table = run.path / "metrics/part-000001.parquet", run.path / "tables/curve.parquet"
    shutil.copy(part, table)
    assert "curve.parquet is damaged" in sentence(joma("runs", "show", str(run.path)))
    (run.path / "manifest.json").unlink()  # as in a folder of an older version
    result = joma("runs", "show", str(run.path))
    assert result.exit_code == 0, result.stderr
    shutil.copy(run.path / "config.json", table)
    message = sentence(joma("runs", "show", str(run.path)))
    assert "curve.parquet is damaged or not a Parquet file" in message


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_a_missing_part_is_refused(run: Run, lost: int):
    part = run.path / "metrics" / f"part-{lost:06d}.parquet"
    data = part.read_bytes()
    part.unlink()
    metrics = Run.open(run.path).metrics
    metrics.append(9, "loss", 1.0)
    for read in (metrics.read, metrics.flush, metrics.compact, lambda: metrics.rewind(3)):
        with pytest.raises(JomaError) as error:
            read()
        assert str(error.value) == f"{part} is missing: the run logged 5 parts"
    part.write_bytes(data)
    metrics.flush()
    assert steps(run) == [0, 1, 2, 3, 4, 9]


def test_a_missing_log_is_refused_and_can_be_started_over(run: Run):
    shutil.rmtree(run.path / "metrics")
    with pytest.raises(JomaError, match=r"part-000000\.parquet is missing"):
        run.metrics.read()
    run.metrics.rewind(-1)
    assert steps(run) == []


def test_a_part_between_others_is_emptied_and_not_removed(run: Run):
    run.metrics.append(7, "late", 1.0)
    run.metrics.flush()
    run.metrics.append(1, "early", 2.0)
    run.metrics.flush()
    run.metrics.append(8, "loss", 2.0)
    run.metrics.flush()
    run.metrics.rewind(2)
    assert steps(run) == [0, 1, 2]
    assert len(list((run.path / "metrics").glob("part-*.parquet"))) == 7
    run.metrics.append(3, "loss", 1.0)
    run.metrics.compact()
    assert steps(run) == [0, 1, 2, 3]
    assert len(list((run.path / "metrics").glob("part-*.parquet"))) == 1


CHANGES = {
    "json": lambda run: run.write_json("findings", [3]),
    "new json": lambda run: run.write_json("outcome", {"status": "done"}),
    "table": lambda run: run.write_table("curve", {"a": [3.0]}),
    "flush": lambda run: (run.metrics.append(5, "loss", 1.0), run.metrics.flush()),
    "compact": lambda run: run.metrics.compact(),
    "rewind": lambda run: run.metrics.rewind(2),
    "resume": lambda run: Run.resume("fit", {"seed": 1}, out=run.path),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kill_at_any_moment_damages_nothing(run: Run, tmp_path: Path, monkeypatch, change: str):
    copies = iter(range(1000))

    def fresh() -> Run:
        return Run.open(shutil.copytree(run.path, tmp_path / f"copy-{next(copies)}"))

    current = fresh()

    def act() -> Any:
        CHANGES[change](current)

    for _ in every_kill(monkeypatch, act):
        left = Run.open(current.path)
        assert left.verified
        assert left.read_json("findings") in ([1, 2], [3])
        assert left.read_table("curve")["a"].tolist() in ([1.0, 2.0], [3.0])
        assert set(steps(left)) >= {0, 1, 2}
        CHANGES[change](left)  # it can be done again
        assert left.verified
        assert set(steps(left)) >= {0, 1, 2}
        current = fresh()


def test_a_damaged_manifest_is_refused_and_can_be_deleted(run: Run):
    path = run.path / "manifest.json"
    whole = path.read_bytes()
    for content in (b"", b"{}", b"[]", b"null", whole[:-1], whole.replace(b" 5", b" 4"), b"\xff"):
        path.write_bytes(content)
        with pytest.raises(JomaError, match=r"manifest\.json is damaged; restore it, or delete it"):
            Run.open(run.path)
    path.unlink()
    assert not Run.open(run.path).verified
    assert steps(run) == [0, 1, 2, 3, 4]


def test_readers_meet_no_damage_while_the_run_writes(run: Run):
    stop, failed = threading.Event(), []

    def read() -> None:
        other = Run.open(run.path)
        try:
            while not stop.is_set():
                assert other.read_json("findings") is not None
                other.metrics.read()
        except Exception as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(12):
        run.write_json("findings", [number])
        run.metrics.append(10 + number, "loss", 1.0)
        run.metrics.flush()
        if number % 4 == 3:
            run.metrics.compact()
    stop.set()
    reader.join()
    assert not failed


def test_a_removed_folder_does_not_come_back(run: Run):
    moved = run.path.with_name("moved")
    os.rename(run.path, moved)
    run.metrics.append(9, "loss", 1.0)
    for write in (
        run.metrics.flush,
        lambda: run.write_json("outcome", {}),
        lambda: run.write_table("curve", {"a": [1]}),
        lambda: run.write_figure("a.png", b""),
        lambda: run.checkpoints.save(1, {"a": np.zeros(2)}, {}),
    ):
        with pytest.raises(JomaError, match="was removed or replaced while the run was writing"):
            write()
        assert not run.path.exists()
    run.path.write_text("a file")
    with pytest.raises(JomaError, match="was removed or replaced"):
        run.metrics.flush()


@pytest.mark.parametrize("name", ["config.json", "environment.json", "manifest.json"])
def test_a_pipe_does_not_hang_a_reader(run: Run, name: str):
    os.unlink(run.path / name)
    os.mkfifo(run.path / name)
    assert sentence(joma("runs", "show", str(run.path)))
    assert joma("runs", "list", str(run.path.parent)).exit_code == 0

"""The metrics log on a full disk, killed, torn, damaged and read while it changes."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from joma.runs import Metrics
from tests.runs._failing import STEPS_OF_A_WRITE, every_kill, fill_disk, visible
from tests.runs._log import in_parts, rows


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    return Metrics(tmp_path / "metrics")


@pytest.mark.parametrize("step", STEPS_OF_A_WRITE)
def test_a_full_disk_keeps_the_rows_for_the_next_flush(tmp_path, metrics, monkeypatch, step):
    metrics.append(1, "loss", 1.0)
    metrics.flush()
    metrics.append(2, "loss", 2.0)
    with monkeypatch.context() as patch:
        fill_disk(patch, step)
        for change in (metrics.flush, metrics.compact, lambda: metrics.rewind(0)):
            with pytest.raises(OSError, match="No space left"):
                change()
        assert os.listdir(tmp_path / "metrics") == ["part-000000.parquet"]
        assert metrics.read()["step"].tolist() == [1]
    metrics.append(3, "loss", 3.0)
    metrics.flush()
    assert metrics.read()["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_flush_that_broke_after_its_rename_is_not_written_twice(metrics, monkeypatch, error):
    metrics.append(1, "loss", 1.0)
    replace = os.replace

    def and_break(*paths: Any) -> None:
        replace(*paths)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", and_break)
        with pytest.raises(type(error)):
            metrics.flush()
    assert metrics.read()["step"].tolist() == [1]
    metrics.append(2, "loss", 2.0)
    metrics.compact()
    assert metrics.read()["step"].tolist() == [1, 2]


def test_a_really_full_disk(small_disk: Path):
    metrics = Metrics(small_disk / "metrics")
    metrics.append(0, "loss", 0.0)
    metrics.flush()
    values = np.random.default_rng(0).normal(size=(1000, 200))
    metrics.append_many(np.arange(1, 1001), "loss", values)  # 1.6 MB that do not compress
    for change in (metrics.flush, metrics.compact):
        with pytest.raises(OSError, match="No space left"):
            change()
        assert os.listdir(small_disk / "metrics") == ["part-000000.parquet"]
    assert metrics.read()["step"].tolist() == [0]


def test_a_kill_at_any_moment_of_a_compaction(tmp_path: Path, monkeypatch):
    expected = rows(in_parts(tmp_path / "whole", 4))
    parts = []
    folder = tmp_path / "0"

    def compact() -> None:
        Metrics(folder).compact()

    in_parts(folder, 4)
    for moment in every_kill(monkeypatch, compact):
        parts.append(len(visible(folder)))
        after = Metrics(folder)
        assert rows(after) == expected
        after.append(9, "loss", 1.0)  # the log goes on from there
        after.flush()
        assert rows(Metrics(folder)) == [*expected, (9, 0, "loss", "", "", -1, -1, 1.0, None)]
        after.compact()
        assert visible(folder) == ["part-000000-000004.parquet"]
        assert rows(Metrics(folder)) == [*expected, (9, 0, "loss", "", "", -1, -1, 1.0, None)]
        folder = tmp_path / f"{moment + 1}"
        in_parts(folder, 4)
    assert parts == [4, 4, 4, 5, 5, 4, 3, 2, 1, 1]


def test_a_reader_meets_a_compaction(tmp_path: Path, monkeypatch):
    writer, reader = in_parts(tmp_path, 3), Metrics(tmp_path)
    expected = rows(reader)
    listdir = os.listdir

    def then_compact(folder: Any) -> list[str]:
        names = listdir(folder)
        monkeypatch.setattr(os, "listdir", listdir)
        writer.compact()
        return names

    monkeypatch.setattr(os, "listdir", then_compact)
    assert rows(reader) == expected
    (tmp_path / "part-000007.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        reader.read()

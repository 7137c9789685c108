"""Models that are written while training continues."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from joma.train.language import Processes, _series, _trainer
from joma.train.language._series import SeriesWriter
from joma.train.language._trainer import Trainer
from tests.train._language import begin, make, write_text


class Disk:
    """Keeps what is written, once it may write."""

    def __init__(self) -> None:
        self.written: list[tuple[int, list[float]]] = []
        self.ready = threading.Event()

    def write(self, step: int, weights: dict[str, Tensor]) -> None:
        assert self.ready.wait(60)
        if step == 13:
            raise OSError("disk full")
        self.written.append((step, weights["w"].tolist()))


def test_models_are_those_of_when_they_were_given_and_in_their_order():
    disk, weights = Disk(), torch.zeros(2)
    writer = SeriesWriter(disk.write)
    for step in range(4):
        writer.add(step, [("w", weights)])
        weights += 1
    assert disk.written == []
    disk.ready.set()
    writer.finish()
    assert disk.written == [(step, [step, step]) for step in range(4)]
    writer.finish()
    assert "series" not in [thread.name for thread in threading.enumerate()]


def test_an_error_is_raised_once_and_ends_the_series():
    disk = Disk()
    disk.ready.set()
    writer = SeriesWriter(disk.write)
    writer.add(13, [("w", torch.zeros(1))])
    with pytest.raises(OSError, match="disk full"):
        writer.finish()
    writer.finish()
    writer.add(13, [("w", torch.zeros(1))])
    writer.close()  # logged
    assert disk.written == []


def test_the_training_waits_where_too_many_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_series, "MOST_BYTES", 12)
    disk = Disk()
    writer = SeriesWriter(disk.write)
    writer.add(0, [("w", torch.zeros(100))])  # one is always taken
    added = threading.Event()

    def second() -> None:
        writer.add(1, [("w", torch.zeros(1))])
        added.set()

    threading.Thread(target=second, daemon=True).start()
    assert not added.wait(0.1)
    disk.ready.set()
    assert added.wait(60)
    writer.finish()
    assert [step for step, _ in disk.written] == [0, 1]


def test_a_checkpoint_waits_for_the_models_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    config = make(write_text(tmp_path / "text"))
    exported, export = [], _trainer.export

    def slow(folder: Path, *args: object) -> Path:
        assert not exported or folder > exported[-1]
        threading.Event().wait(0.05)
        exported.append(folder)
        return export(folder, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(_trainer, "export", slow)
    state = Trainer.state

    def checked(trainer: Trainer) -> object:
        due = [step for step in (0, 4, 8, 12) if step <= at[-1]]
        assert len(exported) == len(due)
        return state(trainer)

    at = [0]
    monkeypatch.setattr(Trainer, "state", checked)
    update = Trainer.update

    def counted(trainer: Trainer, step: int) -> float:
        at.append(step + 1)
        return update(trainer, step)

    monkeypatch.setattr(Trainer, "update", counted)
    assert begin(config, tmp_path / "run").step == 12
    assert len(exported) == 4


def test_exporting_changes_no_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The model that is trained makes no masks; the one that is written says nothing of it."""
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    trainer = Trainer(make(write_text(tmp_path / "text")), Processes())
    (tmp_path / "run").mkdir()
    trainer.export(tmp_path / "run", 0)
    trainer.finish_exports()
    (config,) = (tmp_path / "run").rglob("config.json")
    assert "joma" not in config.read_text(encoding="utf-8")

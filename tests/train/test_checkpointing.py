"""Checkpoints written on a thread: copies, one at a time, errors, and when they are due."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from joma.runs import Checkpoints
from joma.train import _checkpointing
from joma.train._checkpointing import CheckpointWriter


class SlowDisk(Checkpoints):
    """Checkpoints whose writing waits to be let go, and may fail."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        super().__init__(folder)
        object.__setattr__(self, "go", threading.Event())
        object.__setattr__(self, "error", error)

    def save(self, *given: Any, **named: Any) -> Path:
        assert self.go.wait(60)  # type: ignore[attr-defined]
        if self.error is not None:  # type: ignore[attr-defined]
            raise self.error  # type: ignore[attr-defined]
        return super().save(*given, **named)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(_checkpointing.time, "monotonic", lambda: now[0])
    return now


def saved(disk: Checkpoints, name: str = "a") -> list[float]:
    found = disk.latest().checkpoint
    assert found is not None
    return found.arrays[name].tolist()


def test_what_is_written_is_what_was_there_when_it_was_copied(tmp_path: Path):
    disk, weight = SlowDisk(tmp_path / "checkpoints"), torch.zeros(3)
    with CheckpointWriter(disk) as writer:
        writer.save(1, writer.copy([("a", weight)]), {})
        weight += 1  # the next step
        assert writer.busy
        disk.go.set()  # type: ignore[attr-defined]
    assert saved(disk) == [0, 0, 0]


def test_the_next_one_waits_for_the_one_before(tmp_path: Path):
    disk, weight = SlowDisk(tmp_path / "checkpoints"), torch.zeros(3)
    with CheckpointWriter(disk, 60.0) as writer:
        writer.save(1, writer.copy([("a", weight)]), {})
        assert not writer.due()
        timer = threading.Timer(0.05, disk.go.set)  # type: ignore[attr-defined]
        timer.start()
        writer.save(2, writer.copy([("a", weight + 1)]), {})
        assert 1 in disk.steps
    assert disk.steps == [2, 1]
    assert saved(disk) == [1, 1, 1]


def failing(folder: Path) -> CheckpointWriter:
    """Return a writer whose first checkpoint could not be written."""
    disk = SlowDisk(folder / "checkpoints", OSError(28, "No space left on device"))
    disk.go.set()  # type: ignore[attr-defined]
    writer = CheckpointWriter(disk)
    writer.save(1, writer.copy([("a", torch.zeros(2))]), {})
    assert writer._thread is not None
    writer._thread.join()
    return writer


@pytest.mark.parametrize(
    "call",
    [
        lambda writer: writer.copy([("a", torch.zeros(2))]),
        lambda writer: writer.finish(),
        lambda writer: writer.__exit__(None, None, None),
    ],
    ids=["copy", "finish", "exit"],
)
def test_an_error_of_the_thread_is_raised_by_the_next_call(tmp_path: Path, call):
    writer = failing(tmp_path)
    assert writer.failed
    with pytest.raises(OSError, match="No space"):
        call(writer)
    assert not writer.failed


def test_an_error_in_the_block_comes_first(tmp_path: Path, caplog):
    writer = failing(tmp_path)
    writer.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert caplog.messages == [
        "what was copied last could not be written: [Errno 28] No space left on device"
    ]


def test_a_kill_costs_at_most_the_time_asked_for(tmp_path: Path, clock: list[float]):
    """Also where writing takes long, or a step: then the next one is taken earlier."""
    disk = Checkpoints(tmp_path / "checkpoints")
    for writing, longest in ((0.0, 0.0), (5.0, 5.0), (12.0, 14.0), (20.0, 5.0)):
        with CheckpointWriter(disk, 60.0) as writer:
            writer._writing = writing
            start = clock[0]
            while not writer.due(longest):
                clock[0] += 0.01
            assert clock[0] - start >= 30
            assert clock[0] - start + writing + longest <= 60.01


def test_zero_seconds_is_always_due(tmp_path: Path):
    with CheckpointWriter(Checkpoints(tmp_path), 0.0) as writer:
        assert writer.due()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_copy_of_a_gpu_is_of_the_step_it_was_taken_after(tmp_path: Path, graph: bool):
    weight = torch.zeros(1 << 22, device="cuda")

    def step() -> None:
        weight.add_(1)

    replay = step
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        replay = captured.replay
    disk = Checkpoints(tmp_path / "checkpoints")
    with CheckpointWriter(disk) as writer:
        for number in range(1, 40):
            replay()
            if number % 4 == 0:
                writer.save(number, writer.copy([("a", weight)]), {})
    found = disk.latest().checkpoint
    assert found is not None
    assert found.step == 36
    assert set(found.arrays["a"].tolist()) == {36.0}

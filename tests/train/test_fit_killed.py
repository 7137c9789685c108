"""`fit` killed, on damaged checkpoints and on full disks: it ends as if nothing had happened."""

import importlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from joma.common import files
from joma.runs import Checkpoints, Run
from tests.runs._failing import every_kill, fill_disk
from tests.train._child import STEPS, Ended, file_of, train
from tests.train._sound import check_sound

module = importlib.import_module("joma.train.loop")


CHECKPOINT, PART, MERGED = r"step-\d+\.safetensors", r"part-\d+\.parquet", r"part-\d+-\d+\.parquet"


def test_killed_before_any_change_of_the_disk(straight: Path, folder: Path, monkeypatch):
    """Each life is granted one change of the disk more than the one before."""
    reached = []
    for _ in every_kill(monkeypatch, lambda: train(folder) and None):
        check_sound(folder, straight)
        reached.append(max([0, *Checkpoints(folder / "checkpoints").steps]))
    assert reached == sorted(reached)
    assert (reached[0], reached[-1]) == (0, STEPS)
    assert len(set(reached)) > 8  # it did die in between
    assert Ended.of(folder) == Ended.of(straight)


# Damaged checkpoints


def _flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


class _Trap:
    """What would make a folder if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["JOMA_TRAP"],)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda content: content[: len(content) // 2],
    "without its last byte": lambda content: content[:-1],
    "a weight": lambda content: _flipped(content, len(content) // 2),
    "what it is about": lambda content: content.replace(b"0.003", b"0.004", 1),
    "a pickle": lambda content: pickle.dumps(_Trap()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_not_gone_on_from(
    straight: Path, begun: Path, tmp_path: Path, monkeypatch, damage: str
):
    monkeypatch.setenv("JOMA_TRAP", str(tmp_path / "trap"))
    newest = file_of(begun, 13)
    whole = newest.read_bytes()
    newest.write_bytes(DAMAGES[damage](whole))
    assert newest.read_bytes() != whole
    ended = train(begun)
    (sentence,) = ended.refused
    assert str(newest) in sentence
    assert "\n" not in sentence
    assert (ended.begun_at, ended.step) == (12, STEPS)
    assert Ended.of(begun) == Ended.of(straight)
    assert not (tmp_path / "trap").exists()


def test_a_checkpoint_under_another_name_is_not_gone_on_from(straight: Path, begun: Path):
    file_of(begun, 13).rename(file_of(begun, 27))
    ended = train(begun)
    (sentence,) = ended.refused
    assert "was saved after step 13" in sentence
    assert ended.begun_at == 12
    assert Ended.of(begun) == Ended.of(straight)


# Full disks


def full_from(monkeypatch: pytest.MonkeyPatch, write: int, step: str) -> Callable[[], int]:
    """Lets a step of the n-th write fail, and of all later ones; gives how many were begun."""
    begun = 0

    def counted(path: Path, mode: str) -> Any:
        nonlocal begun
        begun += 1
        if begun == write:
            fill_disk(monkeypatch, step)  # takes the place of this function if it is the opening
        return (vars(files)["open"] if begun == write and step == "write" else open)(path, mode)

    monkeypatch.setattr(files, "open", counted, raising=False)
    return lambda: begun


@pytest.mark.parametrize(
    ("step", "writes"),
    [("write", [1, 2, 8, -2, -1]), ("fsync", [5, -1]), ("replace", [4, -2])],
)
def test_a_full_disk_stops_it_and_it_goes_on(
    straight: Path, tmp_path: Path, monkeypatch, step: str, writes: list[int]
):
    """The last writes are of the log, of the last checkpoint, and of the merged log."""
    with monkeypatch.context() as patch:
        count = full_from(patch, 0, step)
        train(tmp_path / "counted")
    for write in writes:
        folder = Run.create("small", {}, out=tmp_path / str(write)).path
        begun = 1  # going on writes the environment
        with monkeypatch.context() as patch:
            full_from(patch, begun + write if write > 0 else count() + write, step)
            with pytest.raises(OSError, match="No space left"):
                train(folder)
        check_sound(folder, straight)
        assert not list(folder.rglob("*.tmp"))
        assert train(folder).refused == ()
        assert Ended.of(folder) == Ended.of(straight)

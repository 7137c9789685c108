"""`fit` killed, on damaged checkpoints and on full disks: it ends as if nothing had happened."""

import importlib
import os
import pickle
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from joma.common import files
from joma.runs import Checkpoints, Metrics, Run
from tests.runs import _failing
from tests.runs._failing import every_kill, fill_disk, visible
from tests.train._child import STEPS, Children, Ended, after, file_of, train, written
from tests.train._sound import check_sound

module = importlib.import_module("joma.train.loop")


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    if not hasattr(os, "fork"):
        pytest.skip("processes cannot be forked here")
    made = Children()
    yield made
    made.close()


CHECKPOINT, PART, MERGED = r"step-\d+\.safetensors", r"part-\d+\.parquet", r"part-\d+-\d+\.parquet"


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments(children: Children, straight: Path, tmp_path: Path, seed: int):
    moments = random.Random(seed)
    folder, kills = tmp_path / "0", 0
    for life in range(1, 40):
        Run.resume("small", {}, out=folder)
        doom = moments.choice(
            [
                after(moments.uniform(0, 0.3), folder),
                written(folder / "checkpoints", CHECKPOINT, moments.randrange(1, 5)),
                written(folder / "metrics", PART, moments.randrange(1, 5)),
            ]
        )
        if children.live(folder, doom) == 0:  # the end came before its moment: once more
            assert Ended.of(folder) == Ended.of(straight)
            folder = tmp_path / str(life)
        else:
            check_sound(folder, straight)
            kills += 1
        if kills == 4:
            break
    assert kills == 4
    assert children.live(folder) == 0
    assert Ended.of(folder) == Ended.of(straight)
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("place", "pattern"),
    [("checkpoints", CHECKPOINT), ("metrics", PART), ("metrics", MERGED)],
    ids=["checkpoint", "metrics", "compaction"],
)
def test_killed_while_a_file_is_written(
    children: Children, straight: Path, tmp_path: Path, place: str, pattern: str
):
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        code = children.live(
            folder, written(folder / place, pattern, 1 if pattern == MERGED else 3)
        )
        if code == -signal.SIGKILL and written(folder / place, pattern)():  # it was left behind
            break
    else:
        pytest.fail("the process was never killed while it wrote")
    check_sound(folder, straight)
    assert children.live(folder) == 0
    assert Ended.of(folder) == Ended.of(straight)
    assert not list(folder.rglob("*.tmp"))


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


def test_killed_at_any_moment_of_the_end(straight: Path, tmp_path: Path, monkeypatch):
    """The last checkpoint is there: what is left is to merge the parts of the log."""
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "compact", lambda metrics: None)
        for steps in (6, 12, STEPS):
            train(tmp_path / "begun", steps, checkpoint_seconds=60)
    assert len(visible(tmp_path / "begun" / "metrics")) == 3
    folder = shutil.copytree(tmp_path / "begun", tmp_path / "0")
    parts = []

    def end() -> None:
        train(folder)

    for moment in every_kill(monkeypatch, end):
        parts.append(len(visible(folder / "metrics")))
        assert Ended.of(folder) == Ended.of(straight)
        train(folder)
        assert Ended.of(folder) == Ended.of(straight)
        assert len(visible(folder / "metrics")) == 1
        folder = shutil.copytree(tmp_path / "begun", tmp_path / str(moment + 1))
    assert set(parts) == {1, 2, 3, 4}


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


def test_where_all_are_damaged_it_begins_anew(straight: Path, begun: Path):
    for step in (12, 13):
        file_of(begun, step).write_bytes(DAMAGES["torn"](file_of(begun, step).read_bytes()))
    ended = train(begun)
    assert [
        f"step-{step:09d}" in said for step, said in zip((13, 12), ended.refused, strict=True)
    ] == [True] * 2
    assert ended.begun_at == 0
    assert Ended.of(begun) == Ended.of(straight)


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from _failing.small_disk(tmp_path / "small")


def test_a_really_full_disk(straight: Path, small_disk: Path):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(200_000))  # two checkpoints fit, and the writing of a third does not
    with pytest.raises(OSError, match="No space left"):
        train(small_disk / "run")
    check_sound(small_disk / "run", straight)
    assert Run.open(small_disk / "run").checkpoints.steps == [3, 1]
    with pytest.raises(OSError, match="No space left"):
        train(small_disk / "run")
    filler.unlink()
    ended = train(small_disk / "run")
    assert (ended.begun_at, ended.step) == (3, STEPS)
    assert Ended.of(small_disk / "run") == Ended.of(straight)


# The real thing

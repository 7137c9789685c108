"""`fit`: whatever stops a training, and wherever, it ends as one that nothing stopped."""

import importlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from joma.models import Transformer, TransformerConfig
from joma.optim import StackedAdam
from joma.runs import Checkpoints, Metrics, Run, _write
from joma.train import Ensemble, fit
from joma.train.ensemble import KEPT
from tests.runs import _failing
from tests.runs._failing import every_kill, fill_disk, visible
from tests.runs._log import rows
from tests.train._child import LOOKS, STEPS, Children, Ended, after, file_of, train, written
from tests.train._small import CLASSES, DECAYS, RATES, SEEDS, ensemble, hierarchy

module = importlib.import_module("joma.train.fit")  # the room's `fit` is the function


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine, checkpoints come at the same steps."""
    monkeypatch.setattr(module, "_PIECE_SECONDS", float("inf"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A training that nothing stopped."""
    folder = tmp_path_factory.mktemp("straight")
    ended = train(folder)
    assert (ended.begun_at, ended.step, ended.refused) == (0, STEPS, ())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that has just begun."""
    return Run.create("small", {}, out=tmp_path / "run").path


def check_sound(folder: Path, straight: Path) -> None:
    """Nothing is in the log twice or wrong, and all that the newest checkpoint stands for is."""
    run, whole = Run.open(folder), rows(Run.open(straight).metrics)
    there = rows(run.metrics)
    assert len(set(there)) == len(there)
    assert set(there) <= set(whole)
    found = run.checkpoints.latest()
    assert found.refused == ()
    step = found.checkpoint.step if found.checkpoint else 0
    assert {row for row in whole if row[0] < step} <= set(there)
    looks = {row for row in whole if row[0] == step > 0 and row[2] != "loss"}
    assert looks <= set(there)


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
                after(moments.uniform(0, 0.3)),
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


class Stop(Exception):  # noqa: N818
    pass


def stop_after(step: int) -> Callable[[int, int], None]:
    def progress(done: int, _: int) -> None:
        if done > step:
            raise Stop

    return progress


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A training that stopped some steps after its checkpoints at 12 and 13."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stop):
        train(folder, progress=stop_after(13))
    assert Run.open(folder).checkpoints.steps == [13, 12]
    return folder


@pytest.fixture
def begun(stopped: Path, tmp_path: Path) -> Path:
    """A copy of that."""
    return shutil.copytree(stopped, tmp_path / "begun")


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
        return (vars(_write)["open"] if begun == write and step == "write" else open)(path, mode)

    monkeypatch.setattr(_write, "open", counted, raising=False)
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


# Other trainings


def other(
    seeds: tuple[int, ...] = SEEDS,
    rates: tuple[float, ...] = RATES,
    decays: tuple[float, ...] = DECAYS,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    depths: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Ensemble:
    """The small ensemble but for what is said."""
    config: dict[str, Any] = {"layers": 2, "width": 16, "hidden": 32, **changes}
    model = Transformer(TransformerConfig(21, CLASSES, **config), seeds, depths=depths, dtype=dtype)
    optimizer = StackedAdam(model.named_parameters(), rates, decays, betas=betas, epsilon=epsilon)
    data = hierarchy(seeds)
    precision = str(dtype).removeprefix("torch.")
    return Ensemble(model, optimizer, lambda step: data.distinct(128, step), precision=precision)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "seeds": ({"seeds": (5, 0, 8)}, r"must have seeds [5, 0, 9], .* got seeds [5, 0, 8]"),
    "members": (
        {"seeds": SEEDS[:2], "rates": RATES[:2], "decays": DECAYS[:2]},
        "must have seeds [5, 0, 9] and learning_rates [0.001, 0.003, 0.01] and .* got seeds [5, 0]",
    ),
    "width": ({"width": 24}, "must have width 16, .* got width 24"),
    "heads": ({"heads": 2}, "must have heads 1, .* got heads 2"),
    "depths": ({"depths": (2, 1, 2)}, "must have depths None, .* got depths [2, 1, 2]"),
    "activation": ({"activation": "tanh"}, "must have activation relu, .* got activation tanh"),
    "precision": ({"dtype": torch.float32}, "must have precision float64, .* got precision float3"),
    "rates": (
        {"rates": (1e-3, 3e-3, 2e-2)},
        "must have learning_rates [0.001, 0.003, 0.01], .* got learning_rates [0.001, 0.003, 0.02]",
    ),
    "decays": ({"decays": (0.0, 0.0, 0.0)}, "must have weight_decays [0.0001, 0.0, 0.01], as in"),
    "betas": ({"betas": (0.9, 0.99)}, "must have betas [0.9, 0.999], .* got betas [0.9, 0.99]"),
    "epsilon": ({"epsilon": 1e-6}, "must have epsilon 1e-08, .* got epsilon 1e-06"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_training_is_not_gone_on_with(begun: Path, what: str):
    changes, expected = OTHERS[what]
    run, before = Run.open(begun), snapshot(begun)
    pattern = re.escape(f"ensemble {expected}").replace(r"\.\*", f".*{file_of(begun, 13)}.*")
    with pytest.raises(ValueError, match=f"^{pattern}") as refusal:
        fit(other(**changes), run, STEPS)
    assert "\n" not in str(refusal.value)
    assert snapshot(begun) == before


def test_the_same_training_made_elsewhere_is_gone_on_with(straight: Path, begun: Path):
    assert train(begun, trained=other()).begun_at == 13
    assert Ended.of(begun) == Ended.of(straight)


def test_fewer_steps_than_were_made_are_refused(begun: Path):
    before = snapshot(begun)
    with pytest.raises(ValueError, match=r"^steps must be at least 13, after which .*, got 12$"):
        fit(ensemble(), Run.open(begun), 12)
    assert snapshot(begun) == before


def test_networks_that_were_trained_need_a_checkpoint(folder: Path):
    trained = ensemble()
    train(folder, 6, trained=trained, checkpoint_seconds=60, keep_last=False)
    before = snapshot(folder)
    with pytest.raises(ValueError, match=r"^ensemble must be untrained, .*, got one after 6 steps"):
        fit(trained, Run.open(folder), STEPS)
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"steps": -1}, "steps must be a whole number ≥ 0, got -1"),
        ({"steps": 1.5}, "steps must be a whole number ≥ 0, got 1.5"),
        ({"look_at": [0, -1]}, "look_at must be whole numbers ≥ 0, got -1"),
        ({"look_at": [0.5]}, "look_at must be whole numbers ≥ 0, got 0.5"),
        ({"checkpoint_seconds": -1.0}, "checkpoint_seconds must be ≥ 0, got -1.0"),
        ({"checkpoint_seconds": float("nan")}, "checkpoint_seconds must be ≥ 0, got nan"),
    ],
)
def test_bad_arguments_are_refused(begun: Path, bad: dict[str, Any], message: str):
    before = snapshot(begun)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit(ensemble(), Run.open(begun), **{"steps": STEPS, **bad})
    assert snapshot(begun) == before


# Stopped by an error


def losses_until(straight: Path, step: int) -> list[Any]:
    return [row for row in rows(Run.open(straight).metrics) if row[2] == "loss" and row[0] < step]


def looks_until(straight: Path, step: int) -> list[Any]:
    return [row for row in rows(Run.open(straight).metrics) if row[2] != "loss" and row[0] <= step]


def check_log(folder: Path, straight: Path, losses: int, looks: int) -> None:
    """The log holds the losses of so many steps, and the looks up to that step; nothing else."""
    log = rows(Run.open(folder).metrics)
    assert [row for row in log if row[2] == "loss"] == losses_until(straight, losses)
    assert [row for row in log if row[2] != "loss"] == looks_until(straight, looks)


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 60.0])
def test_an_interrupt_loses_nothing_that_was_logged(
    straight: Path, folder: Path, checkpoint_seconds: float
):
    def interrupt(done: int, _: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(folder, progress=interrupt, checkpoint_seconds=checkpoint_seconds)
    check_log(folder, straight, losses=20, looks=20)
    train(folder)
    assert Ended.of(folder) == Ended.of(straight)


def test_a_look_that_fails_loses_nothing_that_was_logged(straight: Path, folder: Path):
    def fail(step: int) -> None:
        if step == 13:
            raise Stop

    with pytest.raises(Stop):
        train(folder, looked=fail, checkpoint_seconds=60)
    half = [row for row in looks_until(straight, 13) if row[0] == 13 and row[4] == 0]
    log = rows(Run.open(folder).metrics)
    assert len(half) == len(SEEDS)
    assert [row for row in log if row[0] == 13] == half
    assert [row for row in log if row[2] == "loss"] == losses_until(straight, 13)
    assert [row for row in log if row[2] != "loss"] == [*looks_until(straight, 12), *half]
    train(folder)
    assert Ended.of(folder) == Ended.of(straight)


def test_data_that_fail_lose_nothing_that_was_logged(straight: Path, folder: Path):
    data = hierarchy()

    def batches(step: int | torch.Tensor) -> Any:
        if step == 15:
            raise Stop
        return data.distinct(128, step)

    with pytest.raises(Stop):
        train(folder, trained=ensemble(batches=batches), checkpoint_seconds=60)
    check_log(folder, straight, losses=13, looks=13)  # what was made after that was not fetched


# Looks, progress, and how it ends


def test_looks_and_progress(folder: Path):
    looked, told = [], []
    train(folder, looked=looked.append, progress=lambda *both: told.append(both))
    assert looked == list(LOOKS)
    assert told[-1] == (STEPS, STEPS)
    assert told == sorted(set(told))
    assert {at for at, _ in told} >= {at for at in LOOKS if at}
    assert {total for _, total in told} == {STEPS}


def test_a_look_at_the_step_it_goes_on_from_is_not_repeated(straight: Path, begun: Path):
    log = rows(Run.open(begun).metrics)
    assert [row for row in log if row[0] == 13 and row[2] == "loss"]  # logged, and comes again
    looked: list[int] = []
    assert train(begun, looked=looked.append).begun_at == 13
    assert looked == [at for at in LOOKS if at > 13]
    assert Ended.of(begun) == Ended.of(straight)


def test_slow_steps_are_told_one_by_one_and_quick_ones_together(folder: Path, monkeypatch):
    told: list[int] = []
    run = Run.open(folder)
    fit(ensemble((5,), 1e-3, 0.0), run, 227, progress=lambda done, _: told.append(done))
    pieces = [after - before for before, after in zip([0, *told], told, strict=False)]
    assert pieces[:3] == [1, 2, 4]
    assert max(pieces) == KEPT
    told.clear()
    monkeypatch.setattr(module, "_PIECE_SECONDS", 0.0)
    fit(ensemble((5,), 1e-3, 0.0), run, 5, progress=lambda done, _: told.append(done))
    assert told == [1, 2, 3, 4, 5]


def test_what_has_ended_is_left_alone(folder: Path):
    train(folder)
    before = snapshot(folder)

    def look(step: int) -> None:
        pytest.fail(f"looked at {step}")

    ended = fit(ensemble(), Run.open(folder), STEPS, look=look, look_at=LOOKS)
    assert (ended.begun_at, ended.step) == (STEPS, STEPS)
    again = fit(ensemble(), Run.open(folder), STEPS, look_at=LOOKS, keep_last=True)
    assert (again.begun_at, again.step) == (STEPS, STEPS)
    assert snapshot(folder) == before


def test_without_checkpoints_it_begins_anew(straight: Path, folder: Path):
    train(folder)
    Run.open(folder).checkpoints.clear()
    looked: list[int] = []
    assert train(folder, looked=looked.append).begun_at == 0
    assert looked == list(LOOKS)
    assert Ended.of(folder) == Ended.of(straight)


def test_the_last_checkpoint_is_kept_where_asked(straight: Path, tmp_path: Path):
    train(tmp_path / "without", keep_last=False)
    steps = Run.open(tmp_path / "without").checkpoints.steps
    assert max(steps) < STEPS
    assert rows(Run.open(tmp_path / "without").metrics) == rows(Run.open(straight).metrics)
    train(tmp_path / "with", checkpoint_seconds=60)
    assert Run.open(tmp_path / "with").checkpoints.steps == [STEPS]
    assert Ended.of(tmp_path / "with") == Ended.of(straight)


def test_it_goes_on_with_more_steps(straight: Path, folder: Path):
    looked: list[int] = []
    train(folder, 0, looked=looked.append)
    assert Run.open(folder).checkpoints.steps == [0]
    for steps in (13, 14, STEPS):
        ended = train(folder, steps, looked=looked.append, checkpoint_seconds=60)
        assert ended.step == steps
    assert looked == list(LOOKS)
    assert ended.begun_at == 14
    assert Ended.of(folder) == Ended.of(straight)


# The real thing

EAGER = """
import joma.train
joma.train.fit.__kwdefaults__["checkpoint_seconds"] = 0.0  # or none would be due in this short time
from joma.cli import main
main()
"""


def joma(*words: str) -> list[str]:
    return [sys.executable, "-c", EAGER, *words]


@pytest.mark.slow
def test_table_1_killed_at_random_moments(tmp_path: Path):
    groups = ("C20-N2", "C20-N3")
    line = "reproduce table1 --scale tiny --device cpu --group C20-N2 --group C20-N3 --out"
    straight, killed = (str(tmp_path / name) for name in ("straight", "killed"))
    done = subprocess.run(joma(*line.split(), straight), capture_output=True, check=False)
    moments, codes = random.Random(0), []
    for group in (*sorted(groups * 2), "", ""):
        child = subprocess.Popen(joma(*line.split(), killed), stdout=subprocess.PIPE)
        folder = tmp_path / "killed" / "groups" / group / "checkpoints"
        saved, late = written(folder, CHECKPOINT, moments.randrange(2, 5)), moments.uniform(1, 9)
        moment = saved if group else after(late)
        while child.poll() is None and not moment():
            time.sleep(5e-4)
        child.kill()
        child.communicate()
        codes.append(child.returncode)
    assert codes.count(-signal.SIGKILL) > 2
    again = subprocess.run(joma(*line.split(), killed), capture_output=True, check=False)
    assert again.returncode == done.returncode
    for part in ("", *(f"groups/{group}" for group in groups)):
        pair = [str(Path(run) / part) for run in (straight, killed)]
        compared = subprocess.run(
            joma("runs", "compare", *pair, "--json"), capture_output=True, check=True
        )
        record = json.loads(compared.stdout)
        assert record["tables_in_one_only"] == []
        numbers = [*record["tables"].values(), *([record["metrics"]] if part else [])]
        assert numbers
        assert all(number["equal"] for number in numbers)
    ends = [Run.open(Path(killed) / "groups" / group).read_json("outcome") for group in groups]
    assert any(end["begun_at"] > 0 for end in ends)

"""Trainings of a language model that were stopped, on full disks and by Ctrl-C, end the same."""

import errno
from pathlib import Path
from typing import Any

import pytest

from joma.runs import Checkpoints, Run
from joma.train import loop
from joma.train.language import (
    Config,
    changing,
    check_length,
    series_folder,
    train,
)
from tests.runs import _failing
from tests.train._language import STEPS, Stop, begin, ended, logged, make, stop_after, write_text


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


@pytest.mark.parametrize(("kind", "stops"), [("gpt_neox", (1, STEPS)), ("gpt2", (5,))])
def test_stopped_anywhere_it_ends_the_same(
    text: Path, tmp_path: Path, kind: str, stops: tuple[int, ...]
):
    config = make(text, kind)
    straight = begin(config, tmp_path / "straight")
    for step in stops:
        folder = tmp_path / str(step)
        with pytest.raises(Stop):
            begin(config, folder, progress=stop_after(step))
        result = begin(config, folder)
        assert step <= result.begun_at <= result.step == STEPS
        assert result.loss == straight.loss
        assert ended(folder) == ended(tmp_path / "straight")


@pytest.mark.parametrize(("kind", "first"), [("gpt_neox", 10), ("gpt2", 12)])
def test_one_that_has_ended_is_made_longer(text: Path, tmp_path: Path, kind: str, first: int):
    def lasting(steps: int) -> Config:
        constant = {"schedule": "constant", "warmup": 4}
        return make(text, kind, training={"steps": steps}, optimizer=constant)

    begin(lasting(20), tmp_path / "straight")
    begin(lasting(first), tmp_path / "run")
    with pytest.raises(Stop):
        begin(lasting(16), tmp_path / "run", progress=stop_after(14))
    result = begin(lasting(20), tmp_path / "run")
    assert first < result.begun_at < result.step == 20
    assert Run.open(tmp_path / "run").config == Run.open(tmp_path / "straight").config
    longer, straight = (ended(tmp_path / name) for name in ("run", "straight"))
    (steps, losses), measured = longer[1], dict(zip(*straight[1], strict=True))
    assert longer[0] == straight[0]
    assert longer[2:] == straight[2:]
    assert dict(zip(steps, losses, strict=True)).items() >= measured.items()
    assert set(steps) - set(measured) == {first} - set(measured)  # its former end was measured
    with pytest.raises(ValueError, match=r"steps must be at least 20, which .* made, got 16"):
        begin(lasting(16), tmp_path / "run")
    assert Run.open(tmp_path / "run").config["training"]["steps"] == 20


def constant(text: Path, steps: int) -> Config:
    return make(text, training={"steps": steps}, optimizer={"schedule": "constant"})


@pytest.fixture
def stepwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else is thought of after each step."""
    monkeypatch.setattr(loop, "LONGEST_CHUNK", 1)


@pytest.mark.usefixtures("stepwise")
@pytest.mark.parametrize(("stop", "end"), [(7, 7), (5, 5), (8, 8), (7, 10)])
def test_one_that_was_stopped_is_made_shorter(text: Path, tmp_path: Path, stop: int, end: int):
    folder = tmp_path / "run"
    begin(constant(text, end), tmp_path / "straight")
    with pytest.raises(Stop):
        begin(constant(text, 1000), folder, progress=stop_after(stop))
    few = rf"steps must be at least {stop}, which .* made, got {stop - 1}"
    with pytest.raises(ValueError, match=few):
        begin(constant(text, stop - 1), folder)
    assert Run.open(folder).config["training"]["steps"] == 1000
    assert begin(constant(text, end), folder).step == end
    assert Run.open(folder).config == Run.open(tmp_path / "straight").config
    assert ended(folder) == ended(tmp_path / "straight")
    assert begin(constant(text, end), folder).begun_at == end
    assert ended(folder) == ended(tmp_path / "straight")


@pytest.mark.usefixtures("stepwise")
def test_models_past_the_new_end_are_removed(text: Path, tmp_path: Path):
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        begin(constant(text, STEPS), folder, progress=stop_after(8))
    (folder / "checkpoints" / "step-000000008.safetensors").unlink()  # as if none had been due
    assert series_folder(folder, 8).is_dir()
    assert begin(constant(text, 7), folder).begun_at == 7
    names = sorted(path.name for path in (folder / "series").iterdir())
    assert names == ["step-000000", "step-000004", "step-000007"]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_where_rates_follow_from_the_number_of_steps_it_is_not(
    text: Path, tmp_path: Path, schedule: str
):
    def asked(**training: int) -> Config:
        return make(text, optimizer={"schedule": schedule}, training=training)

    assert changing(asked()) == ("checkpoints.seconds", "training.compile")
    run = Run.create("train", asked().sections(), out=tmp_path / "run")
    for steps in (8, 20):
        said = f"must stay 12 with the schedule {schedule}.* got {steps};"
        with pytest.raises(ValueError, match=said):
            check_length(asked(steps=steps), run)
    check_length(asked(), run)
    check_length(asked(steps=20, seed=1), run)  # another training anyway


def test_another_text_is_not_gone_on_with(text: Path, tmp_path: Path):
    config = make(text)
    with pytest.raises(Stop):
        begin(config, tmp_path / "run", progress=stop_after(4))
    (text / "train.txt").write_text("on the mat sat the cat. " * 100)
    with pytest.raises(ValueError, match=r"is not what .* was trained on"):
        begin(config, tmp_path / "run")


@pytest.mark.parametrize("step", _failing.STEPS_OF_A_WRITE)
def test_a_full_disk_loses_nothing(text: Path, tmp_path: Path, monkeypatch: Any, step: str):
    config, folder = make(text), tmp_path / "run"
    begin(config, tmp_path / "straight")
    with pytest.raises(Stop):
        begin(config, folder, progress=stop_after(6))
    kept = Run.open(folder).checkpoints.steps[0]
    run = Run.resume("train", config.sections(), out=folder)
    with monkeypatch.context() as patch:
        _failing.fill_disk(patch, step)
        with pytest.raises(OSError, match="No space left"):
            train(config, run)
    assert Checkpoints(folder / "checkpoints").latest().checkpoint is not None
    assert Run.open(folder).checkpoints.steps[0] == kept
    assert set(range(kept)) <= set(logged(folder, "loss")[0])
    begin(config, folder)
    assert ended(folder) == ended(tmp_path / "straight")
    assert not list(folder.rglob("*.tmp"))


def test_a_disk_that_is_full_for_a_model_of_the_series(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from safetensors import SafetensorError

    def full(tensors: Any, path: Any, **options: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    config, folder = make(text), tmp_path / "run"
    begin(config, tmp_path / "straight")
    with pytest.raises(Stop):
        begin(config, folder, progress=stop_after(4))
    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", full)
        with pytest.raises(OSError, match="No space left") as caught:
            begin(config, folder)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(path.name for path in (folder / "series").iterdir()) == [
        "step-000000",
        "step-000004",
    ]
    begin(config, folder)
    assert ended(folder) == ended(tmp_path / "straight")


def test_what_killed_exports_left_is_removed(text: Path, tmp_path: Path):
    begin(make(text), tmp_path / "run")
    for name in (".step-000004.tmp", ".step-000004.old"):
        (tmp_path / "run" / "series" / name).mkdir()
    begin(make(text), tmp_path / "run")
    assert not list((tmp_path / "run" / "series").glob(".*"))

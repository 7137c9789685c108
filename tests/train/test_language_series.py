"""Models that are written while training continues."""

import threading
from pathlib import Path

import pytest
from torch import nn

from joma.train.language import LanguageTraining, series_folder
from tests.train._language import begin, make, write_text


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))


def test_a_checkpoint_waits_for_the_models_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, written = make(write_text(tmp_path / "text")), []
    state = LanguageTraining.state

    def checked(training: LanguageTraining) -> object:
        due = [step for step in (0, 4, 8, 12) if step <= training.step]
        found = state(training)
        first = next(found)
        written.append([series_folder(tmp_path / "run", step).is_dir() for step in due])
        yield first
        yield from found

    monkeypatch.setattr(LanguageTraining, "state", checked)
    assert begin(config, tmp_path / "run").step == 12
    assert len(written) > 4
    assert all(all(one) for one in written)


def test_a_model_is_that_of_its_step_however_slow_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from transformers import AutoModelForCausalLM, GPTNeoXForCausalLM

    config, save = make(write_text(tmp_path / "text")), GPTNeoXForCausalLM.save_pretrained

    def slow(model: nn.Module, *given: object, **named: object) -> object:
        threading.Event().wait(0.05)
        return save(model, *given, **named)  # type: ignore[arg-type]

    begin(config, tmp_path / "fast")
    monkeypatch.setattr(GPTNeoXForCausalLM, "save_pretrained", slow)
    begin(config, tmp_path / "slow")
    for step in (0, 4, 8, 12):
        folders = [series_folder(tmp_path / name, step) for name in ("fast", "slow")]
        one, two = (folder / "model.safetensors" for folder in folders)
        assert one.read_bytes() == two.read_bytes()
        model = AutoModelForCausalLM.from_pretrained(folders[0])
        assert "joma" not in str(model.config)  # the model that is trained makes no masks


def test_a_model_that_cannot_be_written_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    config = make(write_text(tmp_path / "text"))
    monkeypatch.setattr("transformers.GPTNeoXForCausalLM.save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        begin(config, tmp_path / "run")
    assert not any((tmp_path / "run" / "series").glob("step-*"))

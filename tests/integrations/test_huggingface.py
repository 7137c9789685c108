"""The monitor in a real Hugging Face Trainer."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from joma.integrations.huggingface import MonitorCallback
from joma.runs import Run
from joma.train.findings import Finding, Judgement, RecordedSeries
from tests.train._watched import LENGTH, VOCABULARY, hugging_face, of_run

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

STEPS, WEIGHT = 6, "gpt_neox.layers.1.mlp.dense_h_to_4h"


class Sequences(Dataset[dict[str, Tensor]]):
    """Fixed random sequences."""

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(VOCABULARY, (40, LENGTH), generator=dice)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


class Gradients(TrainerCallback):
    """The norm of one gradient at every step, seen by other means."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gradient = kwargs["model"].get_submodule(WEIGHT).weight.grad
        self.norms.append(float(gradient.double().norm()))


class Evaluating(TrainerCallback):
    """Calls the model between two batches, as evaluations do."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        tokens = Sequences().tokens[:2]
        kwargs["model"].eval()
        with torch.no_grad():
            kwargs["model"](input_ids=tokens, labels=tokens)
        kwargs["model"].train()


class Stopping(TrainerCallback):
    """Breaks a training off."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def train(
    folder: Path,
    callbacks: Sequence[TrainerCallback] = (),
    *,
    kind: str = "gpt_neox",
    resume: str | None = None,
    validated: list[tuple[int, float]] | None = None,
    **arguments: Any,
) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Losses the Trainer logged, the last weights, and what the global generator says next."""
    model = hugging_face(kind, attention_dropout=0.1)
    chosen: dict[str, Any] = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
        "learning_rate": 1e-2,
    }
    trainer = Trainer(
        model,  # type: ignore[arg-type]
        TrainingArguments(
            str(folder),
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            **chosen | arguments,
        ),
        train_dataset=Sequences(),
        eval_dataset=Sequences(),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    if validated is not None:
        history = [row for row in trainer.state.log_history if "eval_loss" in row]
        validated += [(int(row["step"]), row["eval_loss"]) for row in history]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, {k: v.clone() for k, v in model.state_dict().items()}, torch.rand(3)


def assert_same(one: tuple[Any, dict[str, Tensor], Tensor], other: Any) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
    assert torch.equal(one[2], other[2])


def test_a_trainer_does_not_notice_and_everything_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = train(tmp_path / "alone", [Evaluating()])
    assert len(set(alone[0])) == STEPS
    watching, gradients = MonitorCallback(every=2, budget=None), Gradients()
    assert_same(alone, train(tmp_path / "watched", [watching, gradients, Evaluating()]))

    run = Run.open(tmp_path / "watched" / "monitor")
    assert of_run(run, "loss") == (list(range(1, STEPS + 1)), pytest.approx(alone[0], rel=1e-6))
    assert of_run(run, "learning_rate")[1][0] == 1e-2
    assert of_run(run, "attention_entropy", layer=1, head=1)[0] == [1, 2, 4, 6]
    # It sees gradients: those of two batches, clipped.
    norms = [pytest.approx(gradients.norms[step - 1], rel=1e-5) for step in (1, 2, 4, 6)]
    assert of_run(run, "gradient_norm", module=WEIGHT) == ([1, 2, 4, 6], norms)
    assert run.read_json("findings") == watching.monitor.judgement.as_json()
    assert f"{STEPS} steps watched" in capsys.readouterr().out


def test_a_training_that_goes_on_is_watched_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    inputs = {"input_ids": Sequences().tokens[:3]}
    options: dict[str, Any] = {"every": 2, "budget": None, "inputs": inputs}
    often: dict[str, Any] = {"kind": "llama", "save_strategy": "steps", "save_steps": 3}
    straight = train(tmp_path / "straight", [MonitorCallback(**options)], kind="llama")
    stopped = MonitorCallback(**options)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", [stopped, Stopping(5)], **often)
    stopped.monitor.close()  # as the end of its process would
    checkpoint = str(tmp_path / "stopped" / "checkpoint-3")
    ended = train(tmp_path / "stopped", [MonitorCallback(**options)], resume=checkpoint, **often)
    assert_same(straight, ended)
    one, other = (Run.open(tmp_path / name / "monitor") for name in ("straight", "stopped"))
    for name in ("loss", "learning_rate", "attention_entropy"):
        expected = of_run(one, name, head=-1)
        assert of_run(other, name, head=-1) == expected
        assert expected[0][-1] == STEPS


def test_a_loss_that_the_trainer_hides_is_reported(tmp_path: Path) -> None:
    watching = MonitorCallback(every=1, metrics=["attention_entropy"])
    losses, _, _ = train(tmp_path, [watching], learning_rate=1e30, max_grad_norm=0.0)
    assert np.isfinite(losses).all()  # logging_nan_inf_filter
    found = [one.sentence for one in watching.monitor.findings if one.kind == "not_finite"]
    assert any("The loss is NaN since step 2" in sentence for sentence in found)


def test_a_loss_that_the_model_does_not_return_is_that_of_the_log(tmp_path: Path) -> None:
    watching = MonitorCallback(every=100)
    losses, _, _ = train(tmp_path, [watching], label_smoothing_factor=0.1)
    run = Run.open(tmp_path / "monitor")
    assert of_run(run, "loss") == (list(range(1, STEPS + 1)), losses)


def test_validation_losses_and_the_optimizer_are_read(tmp_path: Path) -> None:
    watching = MonitorCallback(every=1, budget=None, metrics=["stable_rank"])
    validated: list[tuple[int, float]] = []
    evaluating = {"eval_strategy": "steps", "eval_steps": 2, "weight_decay": 0.02}
    train(tmp_path, [watching], validated=validated, **evaluating)
    run = Run.open(tmp_path / "monitor")
    assert [step for step, _ in validated] == [2, 4, 6]
    assert list(zip(*of_run(run, "validation_loss"), strict=True)) == validated
    rates = [pytest.approx(1e-2 * (STEPS - step) / STEPS) for step in range(STEPS)]
    assert of_run(run, "learning_rate") == (list(range(1, STEPS + 1)), rates)
    assert of_run(run, "weight_decay")[1] == [0.02] * STEPS


def test_trainings_in_a_row_with_one_callback(tmp_path: Path) -> None:
    watching = MonitorCallback(every=1, run=tmp_path / "own", metrics=["stable_rank"])
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "a", [watching, Stopping(3)])
    broken = watching.monitor
    train(tmp_path / "b", [watching])
    assert watching.monitor is not broken
    assert of_run(Run.open(tmp_path / "own"), "loss")[0] == [1, 2, 3]
    assert of_run(Run.open(tmp_path / "own-2"), "loss")[0] == list(range(1, STEPS + 1))
    assert not (tmp_path / "b" / "monitor").exists()


def test_options_are_checked_before_there_is_a_model() -> None:
    with pytest.raises(ValueError, match=r"options must be among every, .*, got 'evry'"):
        MonitorCallback(evry=3)
    with pytest.raises(ValueError, match="got 'step'"):
        MonitorCallback(step=3)
    with pytest.raises(ValueError, match="once a training has begun"):
        _ = MonitorCallback().monitor


def test_where_transformers_is_missing_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "joma.integrations.huggingface")
    with pytest.raises(ImportError, match=r"needs transformers: pip install .* -e '\.\[hf\]'"):
        importlib.import_module("joma.integrations.huggingface")


def collapsed_from_step_3(series: Sequence[RecordedSeries], *, ended: bool) -> Judgement:
    if max(one.steps[-1] for one in series) < 3:
        return Judgement()
    return Judgement((Finding("attention_collapse", "warning", 2, "It collapsed.", "Try less."),))


def test_a_finding_ends_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("joma.train.findings.judge", collapsed_from_step_3)
    options: dict[str, Any] = {"every": 1, "budget": None, "metrics": ["stable_rank"]}
    heard: list[Finding] = []
    watching = MonitorCallback(stop_on={"collapse"}, on_finding=heard.append, **options)
    losses, _, _ = train(tmp_path, [watching])
    assert len(losses) == 3
    assert [one.kind for one in heard] == ["attention_collapse"]
    said = capsys.readouterr().out
    assert said.count("Training stops: It collapsed.") == 1
    assert "- warning, step 2: It collapsed.\n    Try less." in said


class Breaking(TrainerCallback):
    """Makes one weight infinite before the third step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            with torch.no_grad():
                kwargs["model"].get_submodule(WEIGHT).weight[0, 0] = torch.inf


def test_stop_on_nan_ends_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watching = MonitorCallback(every=1, stop_on=["nan"], metrics=["stable_rank"])
    train(tmp_path, [watching, Breaking()])
    assert of_run(Run.open(tmp_path / "monitor"), "loss")[0] == [1, 2, 3]
    said = capsys.readouterr().out
    assert "Training stops: The loss is NaN since step 3; the first weight that is not" in said

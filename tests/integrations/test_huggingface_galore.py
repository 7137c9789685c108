"""GaLore in a real Hugging Face Trainer: one line, accumulation, clipping, resume."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from joma.errors import JomaError
from joma.integrations.huggingface import PerLayerCallback
from joma.optim import AdamW8bit, GaLoreAdamW
from tests.integrations.test_huggingface import Sequences, Stopping
from tests.train._watched import hugging_face

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

STEPS = 5
GALORE = {"lr": 1e-2, "rank": 4, "gap": 2, "verbose": False}


def trainer_of(
    folder: Path,
    settings: dict[str, Any],
    *,
    kind: str = "gpt_neox",
    callbacks: Any = (),
    optimizer: Any = GaLoreAdamW,
    **arguments: Any,
) -> Trainer:
    chosen: dict[str, Any] = {
        "max_steps": STEPS,
        "save_strategy": "no",
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
    }
    model = hugging_face(kind, **({"tie_word_embeddings": True} if kind == "llama" else {}))
    return Trainer(
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
        optimizer_cls_and_kwargs=(optimizer, dict(settings)),
        callbacks=list(callbacks),
    )


def inner(trainer: Trainer) -> Any:
    return trainer.optimizer.optimizer  # type: ignore[union-attr]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt_neox", "gpt2")]


@pytest.mark.parametrize("kind", ["llama", *SLOW])
def test_one_line_projects_what_the_model_itself_would(tmp_path: Path, kind: str) -> None:
    trainer = trainer_of(tmp_path, GALORE, kind=kind)
    model = trainer.model
    assert isinstance(model, nn.Module)
    before = weights(model)
    trainer.train()
    optimizer = inner(trainer)
    assert not [name for name, one in weights(model).items() if torch.equal(one, before[name])]
    alone = GaLoreAdamW(model, rank=4, verbose=False)
    assert {one.name for one in optimizer.projected} == {one.name for one in alone.projected}
    assert not [one for one in optimizer.projected if "embed" in one.name or "head" in one.name]
    assert {one.refreshes for one in optimizer.projected} <= {2, 3}
    decay = {
        one: group["weight_decay"] for group in optimizer.param_groups for one in group["params"]
    }
    assert {decay[one] for one in model.parameters() if one.ndim == 1} == {0.0}
    assert {decay[one] for one, _ in optimizer.subspaces()} == {0.1}
    rows = [row for row in trainer.state.log_history if "loss" in row]
    rates = [row["learning_rate"] for row in rows]
    assert rates == pytest.approx([1e-2 * (STEPS - step) / STEPS for step in range(STEPS)])


@pytest.mark.parametrize("clip", [pytest.param(0.0, marks=pytest.mark.slow), 0.02])
def test_passes_of_a_step_are_those_of_accumulate(tmp_path: Path, clip: float) -> None:
    """Ten batches make two steps of four and one of two; a loop by hand does the same."""
    trainer = trainer_of(
        tmp_path,
        GALORE | {"per_layer": True},
        callbacks=[PerLayerCallback()],
        gradient_accumulation_steps=4,
        max_grad_norm=clip,
        lr_scheduler_type="constant",
    )
    model = trainer.model
    assert isinstance(model, nn.Module)
    by_hand, passes = hugging_face(), []
    model.register_forward_pre_hook(lambda _, args, kwargs: passes.append(kwargs), with_kwargs=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    clipping = [one for one in caught if "is applied as clip_norm" in str(one.message)]
    assert len(clipping) == (clip > 0)
    assert len(passes) == 4 + 4 + 2 + 4 + 4

    groups = [
        {"params": [one for one in by_hand.parameters() if one.ndim == 2], "weight_decay": 0.1},
        {"params": [one for one in by_hand.parameters() if one.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = GaLoreAdamW(groups, **GALORE, per_layer=True, clip_norm=clip or None)
    by_hand.train()
    last = (3, 7, 9, 13, 17)
    for number, inputs in enumerate(passes):
        with optimizer.accumulate(last=number in last):
            by_hand(**inputs).loss.backward()
        if number in last:
            optimizer.step()
    for name, one in weights(model).items():
        torch.testing.assert_close(one, weights(by_hand)[name], rtol=0, atol=1e-6)
    steps = {int(state["step"]) for state in inner(trainer).state.values()}
    assert steps == {STEPS}
    assert inner(trainer)._last  # the last pass has ended
    assert not model._forward_pre_hooks or len(model._forward_pre_hooks) == 1  # the test's own


def test_without_the_callback_a_second_pass_is_refused(tmp_path: Path) -> None:
    settings = GALORE | {"per_layer": True}
    trainer = trainer_of(tmp_path, settings, gradient_accumulation_steps=2)
    with pytest.raises(JomaError, match=r"a second backward pass.*optimizer\.accumulate"):
        trainer.train()


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (GaLoreAdamW, GALORE | {"per_layer": True, "bits": 8, "projector_bits": 8}),
        pytest.param(
            GaLoreAdamW,
            GALORE | {"state_dtype": torch.bfloat16, "moments": "rotate"},
            marks=pytest.mark.slow,
        ),
        pytest.param(AdamW8bit, {"lr": 1e-2}, marks=pytest.mark.slow),
    ],
)
def test_a_training_resumes_bit_for_bit(
    tmp_path: Path, optimizer: Any, settings: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "optimizer": optimizer,
        "kind": "llama",  # the Trainer does not read the head of a GPT-NeoX back
    }
    straight = trainer_of(tmp_path / "a", settings, callbacks=[PerLayerCallback()], **options)
    straight.train()
    broken = trainer_of(
        tmp_path / "b", settings, callbacks=[PerLayerCallback(), Stopping(4)], **options
    )
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = trainer_of(tmp_path / "b", settings, callbacks=[PerLayerCallback()], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    assert isinstance(straight.model, nn.Module)
    assert isinstance(resumed.model, nn.Module)
    for name, one in weights(straight.model).items():
        assert torch.equal(one, weights(resumed.model)[name])
    one, other = (inner(trainer).state_dict()["state"] for trainer in (straight, resumed))
    assert one.keys() == other.keys()
    for number, state in one.items():
        for key, value in state.items():
            assert other[number][key].dtype == value.dtype
            assert torch.equal(other[number][key], value)


def test_what_a_trainer_does_after_the_pass_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = GaLoreAdamW(model, rank=2, per_layer=True, verbose=False)

    def begin(of: Any, **settings: Any) -> None:
        usual = {"max_grad_norm": None, "fp16": False, "world_size": 1}
        arguments = SimpleNamespace(**{**usual, **settings})
        PerLayerCallback().on_train_begin(arguments, None, None, optimizer=of, model=model)

    with pytest.raises(JomaError, match="bfloat16 or float32"):
        begin(optimizer, fp16=True)
    with pytest.raises(JomaError, match="per_layer needs FSDP2"):
        begin(optimizer, world_size=2)
    for other in (torch.optim.AdamW(model.parameters()), None):
        begin(other, fp16=True, world_size=2)
        assert not model._forward_pre_hooks

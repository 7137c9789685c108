"""GaLore and eight-bit AdamW in `joma train`: settings, accumulation, clipping, resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from joma.errors import JomaError
from joma.train.language import Config, LanguageTraining, Processes
from tests.train._language import STEPS, Stop, begin, logged, make, stop_after, write_text
from tests.train.test_optimizers import left

GALORE: dict[str, Any] = {
    "name": "galore-adamw",
    "rank": 4,
    "gap": 3,
    "weight_decay": 0.1,
    "verbose": False,
}
EIGHT_BITS = {"bits": 8, "projector_bits": 8, "per_layer": True}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    return write_text(tmp_path / "text")


def trainer_of(
    text: Path, kind: str = "gpt_neox", accumulate: int = 1, **settings: Any
) -> LanguageTraining:
    sections = {"optimizer": GALORE | settings, "training": {"accumulate": accumulate}}
    return LanguageTraining(make(text, kind, **sections), None, Processes())


def steps(trainer: LanguageTraining, first: int, last: int) -> dict[str, Tensor]:
    for step in range(first, last):
        trainer.backward(step)
        trainer.update()
        trainer.optimizer.zero_grad()
    return {name: one.detach().clone() for name, one in trainer.model.named_parameters()}


def settings_of(trainer: LanguageTraining, name: str) -> dict[str, Any]:
    groups = trainer.optimizer.param_groups  # type: ignore[attr-defined]
    pairs = ((one, group[name]) for group in groups for one in group["param_names"])
    return dict(pairs)


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "llama", "opt"])
def test_matrices_of_layers_are_projected_and_matrices_decay(text: Path, kind: str) -> None:
    trainer = trainer_of(text, kind)
    names = {one.name for one in trainer.optimizer.projected}  # type: ignore[attr-defined]
    inside = {
        name
        for name, one in trainer.model.named_parameters()
        if one.ndim == 2 and (".layers." in name or ".h." in name)
    }
    assert names == inside
    decay = settings_of(trainer, "weight_decay")
    flat = {name: one.ndim < 2 for name, one in trainer.model.named_parameters()}
    assert decay == {name: 0.0 if is_flat else 0.1 for name, is_flat in flat.items()}


def test_groups_of_a_configuration(text: Path) -> None:
    groups = [
        {"match": r"layers\.0\.mlp", "rank": 2},
        {"match": "layernorm", "weight_decay": 0.2},
        {"match": r"layers\.1\.mlp\..*bias$", "scale": 0.5},
    ]
    trainer = trainer_of(text, groups=groups, state_dtype="bfloat16")
    layer = "gpt_neox.layers.0.mlp.dense_h_to_4h"
    decay, rank = settings_of(trainer, "weight_decay"), settings_of(trainer, "rank")
    assert (rank[f"{layer}.weight"], decay[f"{layer}.weight"]) == (2, 0.1)
    assert (rank[f"{layer}.bias"], decay[f"{layer}.bias"]) == (None, 0.0)
    assert decay["gpt_neox.layers.0.input_layernorm.weight"] == 0.2
    bias = "gpt_neox.layers.1.mlp.dense_h_to_4h.bias"
    assert (settings_of(trainer, "scale")[bias], decay[bias]) == (0.5, 0.0)
    assert set(settings_of(trainer, "state_dtype").values()) == {torch.bfloat16}
    with pytest.raises(JomaError, match=r"optimizer\.groups must have a regular expression"):
        trainer_of(text, groups=[{"rank": 4}])
    with pytest.raises(JomaError, match=r"no parameter's name matches 'nothing'"):
        trainer_of(text, groups=[{"match": "nothing"}])
    with pytest.raises(JomaError, match=r"state_dtype must be a type of torch"):
        trainer_of(text, state_dtype="bfloat17")


def test_a_wrong_setting_is_named(text: Path) -> None:
    with pytest.raises(JomaError, match="rang"):
        make(text, optimizer=GALORE | {"rang": 4})
    with pytest.raises(JomaError, match="the rank must be below the shorter side"):
        trainer_of(text, rank=64)


def test_per_layer_moves_as_much_with_the_same_clipping(text: Path) -> None:
    plain = steps(trainer_of(text, clip=0.05), 0, 5)
    layered = trainer_of(text, clip=0.05, per_layer=True)
    assert layered.optimizer.clip_norm == 0.05  # type: ignore[attr-defined]
    for name, one in steps(layered, 0, 5).items():
        torch.testing.assert_close(one, plain[name], rtol=0, atol=1e-6)
    free = steps(trainer_of(text, clip=0.0), 0, 5)
    assert max(float((free[name] - one).abs().max()) for name, one in plain.items()) > 1e-4


def test_pieces_of_a_step_are_accumulated(text: Path) -> None:
    """In subspaces that are the same at the beginning, per layer and not, and stay.

    Without ε, Adam would turn the rounding of gradients that are 0 into steps.
    """
    options: dict[str, Any] = {"accumulate": 4, "gap": 1000, "eps": 1e-4}
    plain = trainer_of(text, **options)
    steps(plain, 0, 1)
    layered = trainer_of(text, per_layer=True, **options)
    layered.load_state(1, dict(plain.state()), plain.about())
    expected = steps(plain, 1, 5)
    for name, one in steps(layered, 1, 5).items():
        torch.testing.assert_close(one, expected[name], rtol=0, atol=1e-6)
    states = layered.optimizer.state.values()  # type: ignore[attr-defined]
    assert {int(state["step"]) for state in states} == {5}


def configs(text: Path) -> dict[str, Config]:
    return {
        "galore": make(text, optimizer=GALORE),
        "eight bits": make(
            text,
            "gpt2",
            optimizer=GALORE | EIGHT_BITS,
            training={"accumulate": 2},
            monitor={"off": False, "every": 4, "budget": 0.0, "metrics": ["projection_energy"]},
        ),
        "half": make(text, optimizer=GALORE | {"state_dtype": "bfloat16", "moments": "rotate"}),
        "adamw-8bit": make(text, optimizer={"name": "adamw-8bit", "weight_decay": 0.1}),
    }


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("galore", "half", "adamw-8bit")]


@pytest.mark.parametrize("name", ["eight bits", *SLOW])
def test_a_training_resumes_bit_for_bit(text: Path, tmp_path: Path, name: str) -> None:
    config = configs(text)[name]
    assert Config.of(config.sections()) == config
    begin(config, tmp_path / "straight")
    losses = logged(tmp_path / "straight", "loss")[1]
    assert losses[-1] < losses[0]
    for step in (7,) if name == "eight bits" else (1, 7):
        with pytest.raises(Stop):
            begin(config, tmp_path / str(step), progress=stop_after(step))
        assert step <= begin(config, tmp_path / str(step)).begun_at < STEPS
        assert left(tmp_path / str(step)) == left(tmp_path / "straight")
    if name == "eight bits":
        for run in ("straight", "7"):
            at, shares = logged(tmp_path / run, "projection_energy")
            assert set(at) == {1, 2, 4, 8, 12}
            assert 0 < min(shares) <= max(shares) <= 1 + 1e-6
        assert logged(tmp_path / "7", "projection_energy") == logged(
            tmp_path / "straight", "projection_energy"
        )

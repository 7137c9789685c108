"""`training.compile`: the same losses, resume, what cannot be compiled, what steps wait for."""

import importlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from joma.errors import JomaError
from joma.train.language import Config, LanguageTraining, Processes
from tests.train._language import (
    SIZES,
    Stop,
    begin,
    logged,
    make,
    stop_after,
    trainer_of,
    write_text,
)
from tests.train.test_optimizers import left

COMPUTE = "joma.train.language._model"
MONITOR: dict[str, Any] = {"off": False, "every": 4, "budget": 0.0}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    return write_text(tmp_path / "text")


class Graphs:
    """A compiler that runs what it is given, and keeps it."""

    def __init__(self) -> None:
        self.code: list[str] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.code.append(graph.code)
        return graph.forward


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    found = Graphs()
    monkeypatch.setattr(f"{COMPUTE}.BACKEND", found)
    return found


def refuse(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no compiler was found\nand here is what to install")


def steps(trainer: LanguageTraining, count: int) -> list[float]:
    losses = []
    for step in range(count):
        losses.append(float(trainer.backward(step)))
        trainer.update()
        trainer.drop_gradients()
    return losses


_GROUPED = {"num_key_value_heads": 2}
_SLIDING = {**_GROUPED, "sliding_window": 8}


@pytest.mark.parametrize(
    ("kind", "settings", "bare"),
    [
        ("llama", _GROUPED, True),
        ("mistral", {**_GROUPED, "sliding_window": 64}, True),
        ("mistral", _SLIDING, False),
        ("gemma3_text", {**_SLIDING, "head_dim": 8}, False),
        ("qwen2", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1}, False),
        ("llama4_text", {**_GROUPED, "head_dim": 8, "attention_chunk_size": 8}, False),
        ("falcon", {}, False),  # it computes with its mask
    ],
)
def test_masks_are_left_out_only_where_they_change_nothing(
    kind: str, settings: dict[str, Any], bare: bool
):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": 50}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, **settings, pad_token_id=0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    tokens = torch.randint(0, 50, (2, 40))
    with torch.no_grad():
        model.eval()
        expected = model(input_ids=tokens).logits
        model.train()
        importlib.import_module(COMPUTE).without_masks(model, 40)
        assert model.training
        model.eval()
        torch.testing.assert_close(model(input_ids=tokens).logits, expected)
    assert (model.config._attn_implementation != "sdpa") is bare


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in SIZES if kind != "gpt_neox"]


@pytest.mark.parametrize("kind", ["gpt_neox", *SLOW])
def test_one_graph_with_causal_attention_and_the_loss_in_it(text: Path, graphs: Graphs, kind: str):
    trainer_of(make(text, kind, training={"compile": True}))
    assert len(graphs.code) == 2  # one for training, one for validation
    for code in graphs.code:
        attention = [line for line in code.splitlines() if "scaled_dot_product" in line]
        assert len(attention) == 2
        assert all("is_causal = True" in line for line in attention)
        assert "cross_entropy" in code


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_losses_are_those_of_an_uncompiled_training(
    text: Path, tmp_path: Path, graphs: Graphs, accumulate: int
):
    for compiled in (False, True):
        training = {"compile": compiled, "accumulate": accumulate}
        begin(make(text, training=training, monitor=MONITOR), tmp_path / str(compiled))
    assert len(graphs.code) == 2  # the monitor makes nothing compile again
    for name in ("loss", "validation_loss", "attention_entropy"):
        (at, plain), (too, compiled) = (logged(tmp_path / str(it), name) for it in (False, True))
        assert at == too
        np.testing.assert_allclose(compiled, plain, rtol=1e-5)


def test_auto_is_off_on_the_cpu_and_trains_where_nothing_can_be_compiled(
    text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    plain = trainer_of(make(text))
    assert not plain.compute.compiled
    monkeypatch.setattr(f"{COMPUTE}.BACKEND", refuse)
    monkeypatch.setattr(f"{COMPUTE}.compiles", lambda config, processes: True)
    with caplog.at_level(logging.WARNING, "joma"):
        fallen = trainer_of(make(text))
    (record,) = caplog.records
    said = "torch cannot compile the model (RuntimeError: no compiler was found)"
    assert record.message.startswith(said)
    assert record.message.endswith("; it is trained uncompiled, which is slower")
    assert not fallen.compute.compiled
    assert steps(fallen, 3) == steps(plain, 3)
    windows = plain.feed.at(0)
    assert fallen.compute.validation_loss(windows) == plain.compute.validation_loss(windows)


def wrong(graph: Any, inputs: Any) -> Any:
    """A compiler whose code multiplies what it computes."""

    def run(*given: Any) -> Any:
        return tuple(
            1.5 * it if isinstance(it, torch.Tensor) and it.is_floating_point() else it
            for it in graph.forward(*given)
        )

    return run


def test_code_that_computes_something_else_is_not_used(
    text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    plain = trainer_of(make(text))
    monkeypatch.setattr(f"{COMPUTE}.BACKEND", wrong)
    with pytest.raises(JomaError, match="its compiled loss is"):
        trainer_of(make(text, training={"compile": True}))
    monkeypatch.setattr(f"{COMPUTE}.compiles", lambda config, processes: True)
    with caplog.at_level(logging.WARNING, "joma"):
        fallen = trainer_of(make(text))
    assert "its compiled loss is" in caplog.text
    assert not fallen.compute.compiled
    assert steps(fallen, 3) == steps(plain, 3)


@pytest.mark.parametrize(
    ("kind", "drops"), [("gpt_neox", False), ("llama", False), ("gpt2", True), ("opt", True)]
)
def test_only_dropout_is_seeded(text: Path, kind: str, drops: bool):
    trainer = trainer_of(make(text, kind))
    assert trainer.compute.drops == drops
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        trainer.backward(3)
        assert torch.equal(torch.get_rng_state(), before) != drops


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2"])
def test_compiled_code_itself(text: Path, tmp_path: Path, kind: str):
    """GPT-2 without dropout, of which compiled code draws other numbers."""
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    config = make(text, kind, model=still, training={"compile": True}, monitor=MONITOR)
    begin(config, tmp_path / "straight")
    begin(make(text, kind, model=still), tmp_path / "plain")
    for name in ("loss", "validation_loss"):
        compiled, plain = (logged(tmp_path / it, name) for it in ("straight", "plain"))
        assert compiled[0] == plain[0]
        np.testing.assert_allclose(compiled[1], plain[1], rtol=1e-4)
    with pytest.raises(Stop):
        begin(config, tmp_path / "run", progress=stop_after(5))
    begin(config, tmp_path / "run")
    assert left(tmp_path / "run") == left(tmp_path / "straight")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("kind", "accumulate"), [("gpt_neox", 1), ("gpt_neox", 2), ("llama", 2)])
def test_cuda_graphs_train_as_uncompiled_steps_do(
    text: Path, tmp_path: Path, kind: str, accumulate: int
):
    """With the monitor, validation, exports and checkpoints in between, and resumed."""

    def config(compile: bool | str) -> Config:
        training = {"accumulate": accumulate, "precision": "bfloat16", "compile": compile}
        return make(text, kind, training=training, monitor=MONITOR)

    gpu = Processes(device=torch.device("cuda"))
    trainer = trainer_of(config("auto"), gpu)
    assert trainer.compute.graphs
    del trainer
    begin(config(False), tmp_path / "plain", processes=gpu)
    begin(config("auto"), tmp_path / "straight", processes=gpu)
    with pytest.raises(Stop):
        begin(config("auto"), tmp_path / "run", progress=stop_after(5), processes=gpu)
    begin(config("auto"), tmp_path / "run", processes=gpu)
    for name in ("loss", "validation_loss"):
        plain = logged(tmp_path / "plain", name)
        for other in ("straight", "run"):
            found = logged(tmp_path / other, name)
            assert found[0] == plain[0]
            np.testing.assert_allclose(found[1], plain[1], rtol=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_on_a_gpu_do_not_wait_for_it(text: Path):
    gpu = Processes(device=torch.device("cuda"))
    session = trainer_of(make(text), gpu)
    session.advance(3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        session.advance(5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert session.losses()[1].isfinite().all()

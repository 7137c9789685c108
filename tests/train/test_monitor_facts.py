"""What a monitor reads at every measurement: norms, what is trained, tied layers, vocabulary."""

from pathlib import Path

import pytest
import torch
from torch import nn

import joma
from tests.train._watched import VOCABULARY, batches, encoder, loss_of, of_run


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_a_tied_layer_is_recorded_in_either_stack(stack: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        pad_token_id=19, decoder_start_token_id=19, use_cache=False,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    blocks = model.get_submodule(stack).block
    blocks[1] = blocks[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with joma.Monitor(model, optimizer, run=tmp_path / "run") as monitor:
        tokens = torch.arange(8)[None]
        loss = model(input_ids=tokens, decoder_input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    tied = [(one.kind, one.layer, one.module) for one in monitor.findings]
    assert ("tied_layer", 1, f"{stack}.block.1") in tied


def test_norms_and_moves_are_those_of_every_measurement(tmp_path: Path) -> None:
    model, feed = encoder(), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = "encoder.layers.1.linear1"
    weight = model.get_parameter(f"{name}.weight")
    weights, gradients, moves = [], [], []
    with joma.Monitor(model, optimizer, every=4, run=tmp_path / "run", budget=None) as monitor:
        for _ in range(5):
            tokens = next(feed)
            loss_of(model(tokens), tokens).backward()
            before = weight.detach().clone()
            optimizer.step()
            now = weight.detach()
            weights.append(float(now.norm()))
            assert weight.grad is not None
            gradients.append(float(weight.grad.norm()))
            moves.append(float((now - before).norm() / before.norm()))
            monitor.step()
            optimizer.zero_grad()
    run = monitor.run
    assert run is not None
    measured, moved = [1, 2, 4], [2, 3, 5]
    for metric, steps, values in (
        ("weight_norm", measured, weights),
        ("gradient_norm", measured, gradients),
        ("update_relative", moved, moves),
    ):
        expected = [pytest.approx(values[step - 1], rel=1e-4) for step in steps]
        assert of_run(run, metric, module=name) == (steps, expected), metric
    for fact in ("requires_grad", "optimized"):
        assert of_run(run, fact, module=name) == ([1], [1.0])


def test_a_vocabulary_is_known_only_of_models_that_predict_tokens(tmp_path: Path) -> None:
    model = encoder()
    with joma.Monitor(model, run=tmp_path / "tokens", inputs=next(batches())) as monitor:
        monitor.measure()
    assert monitor.run is not None
    assert of_run(monitor.run, "vocabulary")[1] == [VOCABULARY]
    model.output = nn.Linear(16, 1)
    with joma.Monitor(model, run=tmp_path / "value", inputs=next(batches())) as monitor:
        monitor.measure()
    assert monitor.run is not None
    assert of_run(monitor.run, "vocabulary")[1] == []

"""A monitor that nobody notices: losses, weights and random numbers are the same to the bit."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import joma
from joma.runs import Run
from joma.train.monitor import METRICS
from tests.train._watched import encoder, hugging_face, loss_of, of_run, train

STEPS = 12


def hugging_face_call(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def in_autocast(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return loss_of(model(tokens), tokens)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = encoder(), reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        inner = self.inner
        x = inner.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in inner.encoder.layers:
            x = checkpoint(layer, x, mask, use_reentrant=self.reentrant)
        return inner.output(x)


def compiled_blocks() -> nn.Module:
    model = encoder()
    for number, layer in enumerate(model.encoder.layers):
        model.encoder.layers[number] = torch.compile(layer, backend="aot_eager")  # type: ignore[assignment]
    return model


def compiled_in_place() -> nn.Module:
    model = encoder()
    model.compile(backend="aot_eager")
    return model


Make = Callable[[], nn.Module]
CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "encoder": (encoder, {}),
    "accumulation": (encoder, {"accumulate": 3}),
    "autocast": (encoder, {"call": in_autocast}),
    "checkpointing": (lambda: Checkpointed(False), {}),
    "reentrant checkpointing": (lambda: Checkpointed(True), {}),
    "compiled": (lambda: torch.compile(encoder(), backend="aot_eager"), {}),  # type: ignore[dict-item]
    "compiled in place": (compiled_in_place, {}),
    "compiled blocks": (compiled_blocks, {}),
    "gpt_neox": (hugging_face, {"call": hugging_face_call}),
    "llama": (lambda: hugging_face("llama", num_key_value_heads=1), {"call": hugging_face_call}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler's own
def test_losses_are_the_same_to_the_bit_with_the_monitor_on_and_off(
    case: str, tmp_path: Path
) -> None:
    make, options = CASES[case]
    alone = train(make(), STEPS, **options)
    model = make()
    python = random.getstate()
    with joma.Monitor(model, every=4, run=tmp_path / "run", budget=None, theorem1=1) as monitor:
        watched = train(model, STEPS, after_step=monitor.step, **options)
    assert watched[0] == alone[0]
    assert all(torch.equal(watched[1][name], tensor) for name, tensor in alone[1].items())
    assert torch.equal(watched[2], alone[2])
    assert random.getstate() == python
    run = Run.open(tmp_path / "run")
    assert of_run(run, "loss") == (list(range(1, STEPS + 1)), pytest.approx(alone[0]))
    steps, entropies = of_run(run, "attention_entropy", layer=1, head=1)
    assert steps == [1, 2, 4, 8, 12]
    assert all(0 < entropy <= 1.67 for entropy in entropies)
    for name in METRICS:
        if name.startswith("projection_"):  # of optimizers that project gradients
            continue
        known = name if name != "gradient_energy" else "gradient_energy_8"
        if name != "update_stable_rank":  # which needs two of the rarer measurements
            assert of_run(run, known)[0], name
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(module.training for module in model.modules())

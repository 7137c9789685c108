"""The stacked transformer against plainly written ones and torch's own."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from benchmarks.plain import PlainTransformer
from torch import Tensor, nn

from joma.models import Linear, Transformer, TransformerConfig

SMALL = TransformerConfig(vocabulary=12, outputs=5, layers=3, width=8, hidden=16)


def make(config: TransformerConfig = SMALL, seeds=(3, 1, 4), **options) -> Transformer:
    return Transformer(config, seeds, dtype=torch.float64, **options)


def blocks(model: Transformer | PlainTransformer) -> Any:
    return model.blocks  # nn.ModuleList does not say what it holds


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def some_tokens(members: int = 3, batch: int = 6, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, SMALL.vocabulary, (members, batch, length), generator=generator)


def changed(**changes) -> TransformerConfig:
    return dataclasses.replace(SMALL, **changes)


def watched(model: Transformer, tokens: Tensor, **options) -> dict[tuple[str, int], Tensor]:
    seen: dict[tuple[str, int], Tensor] = {}
    model(tokens, watch=lambda name, layer, x: seen.update({(name, layer): x.detach()}), **options)
    return seen


def copy_linear(target: nn.Linear, source: Linear, member: int) -> None:
    target.weight.copy_(source.weight[member].T)
    if source.bias is not None:
        target.bias.copy_(source.bias[member, 0])


@torch.no_grad()
def plain_copy(model: Transformer, member: int) -> PlainTransformer:
    """The member as a network that shares no code with ours."""
    config = model.config
    plain = PlainTransformer(
        config.vocabulary, config.outputs, config.layers, config.width, config.hidden
    ).double()
    plain.embedding.weight.copy_(model.embedding.weight[member])
    copy_linear(plain.output, model.output, member)
    for ours, theirs in zip(blocks(model), blocks(plain), strict=True):
        for name in ("query", "key", "value"):
            copy_linear(getattr(theirs, name), getattr(ours.attention, name), member)
        for name in ("lower", "upper"):
            copy_linear(getattr(theirs, name), getattr(ours.mlp, name), member)
        for name in ("norm_attention", "norm_mlp"):
            getattr(theirs, name).weight.copy_(getattr(ours, name).weight[member])
            getattr(theirs, name).bias.copy_(getattr(ours, name).bias[member])
    return plain


def shake(model: Transformer) -> None:
    """Moves scales and shifts off their initial ones and zeros, which would hide a mistake."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )


def test_each_member_is_the_plain_network():
    model, tokens = make(), some_tokens()
    shake(model)
    outputs, nodes = model(tokens), watched(model, tokens)
    loss = outputs.square().sum()
    loss.backward()
    for member in range(3):
        plain = plain_copy(model, member)
        expected = plain(tokens[member])
        torch.testing.assert_close(outputs[member], expected, rtol=1e-12, atol=1e-12)
        for layer, block in enumerate(blocks(plain)):
            torch.testing.assert_close(nodes["hidden", layer][member], block.nodes)
        expected.square().sum().backward()
        ours = gradient(model.embedding.weight)[member]
        torch.testing.assert_close(ours, gradient(plain.embedding.weight))
        ours = gradient(blocks(model)[0].mlp.lower.weight)[member]
        torch.testing.assert_close(ours, gradient(blocks(plain)[0].lower.weight).T)


def test_the_last_position_alone_gives_the_same_output_and_gradient():
    model, tokens = make(), some_tokens()
    gradients = []
    for watch in (None, lambda *_: None):
        model.zero_grad()
        outputs = model(tokens, watch=watch)
        outputs.square().sum().backward()
        gradients.append([outputs.detach(), *(gradient(p).clone() for p in model.parameters())])
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


def test_leading_tokens_merge():
    """One padding that counts as 5 is five paddings, for outputs, gradients and pooled nodes."""
    model = make()
    rest = some_tokens(length=4)
    padded = torch.cat([torch.zeros(3, 6, 5, dtype=torch.int64), rest], -1)
    merged = torch.cat([torch.zeros(3, 6, 1, dtype=torch.int64), rest], -1)
    results = []
    for tokens, leading in ((padded, 1), (merged, 5)):
        model.zero_grad()
        outputs = model(tokens, leading=leading)
        outputs.square().sum().backward()
        hidden = watched(model, tokens, leading=leading)
        pooled = [hidden["hidden", layer].amax(2) for layer in range(3)]
        results.append(
            [outputs.detach(), *pooled, *(gradient(p).clone() for p in model.parameters())]
        )
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)
    wrong = model(merged, leading=4)
    assert not torch.allclose(wrong, results[0][0], rtol=1e-6)


def test_a_member_starts_as_it_would_alone():
    together = make().state_dict()
    for member, seed in enumerate((3, 1, 4)):
        for name, parameter in make(seeds=(seed,)).state_dict().items():
            assert torch.equal(together[name][member], parameter[0])
    assert not torch.equal(together["output.weight"][0], together["output.weight"][1])


def test_initial_values_are_torchs():
    config = changed(width=64, hidden=256, vocabulary=100)
    model = Transformer(config, range(4))
    for name, parameter in model.state_dict().items():
        if "norm" in name:
            assert bool((parameter == (1 if name.endswith("weight") else 0)).all())
        elif name == "embedding.weight":
            assert float(parameter.mean()) == pytest.approx(0, abs=0.03)
            assert float(parameter.std()) == pytest.approx(1, abs=0.02)
        else:
            inputs = 256 if "upper" in name else 64
            reference = nn.Linear(inputs, 8).weight.detach().abs().max()  # close to its bound
            bound = float(parameter.abs().max())
            assert bound == pytest.approx(1 / math.sqrt(inputs), rel=0.1)
            assert bound == pytest.approx(float(reference), rel=0.1)
            assert float(parameter.std()) == pytest.approx(
                1 / math.sqrt(3 * inputs), rel=0.3 if parameter.numel() < 100 else 0.06
            )


def with_token(token: int) -> Any:
    tokens = some_tokens()
    tokens[0, 0, 0] = token
    return make()(tokens)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("layers must be a whole number from 1 on", lambda: changed(layers=0)),
        ("hidden must be a whole number from 1 on", lambda: changed(hidden=2.5)),
        ("seeds must hold at least one", lambda: make(seeds=())),
        ("seeds must be whole, from", lambda: make(seeds=(0, 1.5))),
        ("seeds must be whole, from", lambda: make(seeds=(0, 2**63))),
        ("leading must be at least 1", lambda: make()(some_tokens(), leading=0)),
        ("tokens must lie from 0 to 11", lambda: with_token(-1)),  # it would be another member's
        ("tokens must lie from 0 to 11", lambda: with_token(SMALL.vocabulary)),
    ],
)
def test_mistakes_are_named(message: str, call: Any):
    with pytest.raises(ValueError, match=message):
        call()

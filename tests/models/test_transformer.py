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


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_block_is_torchs_encoder_layer(norm, heads, activation, causal):
    config = changed(norm=norm, heads=heads, activation=activation, causal=causal, projection=True)
    model = make(config)
    shake(model)
    x = torch.randn(3, 4, 6, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    from joma.models.transformer import Seen

    block = blocks(model)[1]
    ours = block(x, Seen(6, causal, 1, x), False, None)
    for member in range(3):
        layer = nn.TransformerEncoderLayer(
            8, heads, 16, 0.0, activation, batch_first=True, norm_first=norm == "pre"
        ).double()
        attention = layer.self_attn
        parts = (block.attention.query, block.attention.key, block.attention.value)
        attention.in_proj_weight.copy_(torch.cat([part.weight[member].T for part in parts]))
        attention.in_proj_bias.zero_()
        copy_linear(attention.out_proj, block.attention.projection, member)
        copy_linear(layer.linear1, block.mlp.lower, member)
        copy_linear(layer.linear2, block.mlp.upper, member)
        for name, theirs in (("norm_attention", layer.norm1), ("norm_mlp", layer.norm2)):
            theirs.weight.copy_(getattr(block, name).weight[member])
            theirs.bias.copy_(getattr(block, name).bias[member])
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1) if causal else None
        layer.train()  # the fast path of eval mode is another implementation
        torch.testing.assert_close(ours[member], layer(x[member], src_mask=mask))


@pytest.mark.parametrize("kind", ["exp", "linear"])
def test_unnormalised_attention(kind):
    """Weights exp(q·k/√d) or q·k/√d themselves, one query and key at a time."""
    model, tokens = make(changed(attention=kind, norm="none", layers=1)), some_tokens()
    attention, x = blocks(model)[0].attention, model.embedding(tokens)
    weights = watched(model, tokens)["attention", 0]
    x, tables = x.detach(), {name: p.detach() for name, p in attention.named_parameters()}
    for member, row, query, key in [(0, 0, 0, 0), (1, 2, 5, 3), (2, 5, 6, 6), (0, 1, 2, 4)]:
        q = x[member, row, query] @ tables["query.weight"][member]
        k = x[member, row, key] @ tables["key.weight"][member]
        score = float(q @ k) / math.sqrt(8)
        expected = 0.0 if key > query else math.exp(score) if kind == "exp" else score
        assert float(weights[member, row, 0, query, key]) == pytest.approx(expected, abs=1e-12)
    model(tokens).sum().backward()
    assert all(bool(gradient(p).isfinite().all()) for p in model.parameters())


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


def test_depths_are_those_of_shallower_networks():
    depths = (2, 3, 1)
    model, tokens = make(depths=depths), some_tokens()
    outputs = model(tokens)
    outputs.square().sum().backward()
    for member, (seed, depth) in enumerate(zip((3, 1, 4), depths, strict=True)):
        alone = make(changed(layers=depth), (seed,))
        expected = alone(tokens[member : member + 1])
        torch.testing.assert_close(outputs[member], expected[0])
        expected.square().sum().backward()
        ours = dict(model.named_parameters())
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(gradient(ours[name])[member], gradient(parameter)[0])
        for layer in range(depth, 3):
            assert not gradient(ours[f"blocks.{layer}.mlp.lower.weight"])[member].any()


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


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_positions_tell_orders_apart(positions):
    tokens = torch.tensor([[[1, 2, 3, 4], [2, 1, 3, 4]]])
    without = make(changed(causal=False, layers=1), (0,))(tokens)
    torch.testing.assert_close(without[0, 0], without[0, 1])  # a set of tokens, without positions
    model = make(changed(causal=False, layers=1, positions=positions, length=4), (0,))
    outputs = model(tokens)
    assert not torch.allclose(outputs[0, 0], outputs[0, 1], rtol=1e-3)
    with pytest.raises(ValueError, match="at most 4 positions, got 5"):
        model(torch.zeros(1, 1, 5, dtype=torch.int64))


def test_sinusoids():
    model = make(changed(positions="sinusoidal", length=9), (0,))
    for position, place in [(0, 0), (3, 0), (3, 1), (8, 4), (8, 7)]:
        angle = position / 10_000 ** (2 * (place // 2) / 8)
        expected = math.cos(angle) if place % 2 else math.sin(angle)
        assert float(model.sinusoids_TD[position, place]) == pytest.approx(expected)


def test_all_positions_can_be_read_out():
    tokens = some_tokens()
    everywhere = make(changed(readout="all"))(tokens)
    assert everywhere.shape == (3, 6, 7, 5)
    torch.testing.assert_close(everywhere[:, :, -1], make()(tokens))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"heads": 3}, "heads must divide the width 8, got 3"),
        ({"attention": "hard"}, "attention must be one of softmax, exp, linear, got 'hard'"),
        ({"norm": "both"}, "norm must be one of post, pre, none"),
        ({"layers": 0}, "layers must be a whole number from 1 on, got 0"),
        ({"hidden": 2.5}, "hidden must be a whole number from 1 on, got 2.5"),
        ({"positions": "learned"}, "length must say the longest sequence"),
        ({"positions": "sinusoidal", "width": 7, "length": 3}, "width must be even"),
        ({"activation": "swish"}, "activation must be one of relu"),
    ],
)
def test_bad_configurations(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        changed(**changes)


def test_bad_members():
    with pytest.raises(ValueError, match="seeds must hold at least one"):
        make(seeds=())
    with pytest.raises(ValueError, match="one for each of the 3 members"):
        make(depths=(1, 2))
    with pytest.raises(ValueError, match="between 1 and the 3 layers"):
        make(depths=(1, 2, 4))
    with pytest.raises(ValueError, match="leading must be 1 unless"):
        make(changed(attention="exp"))(some_tokens(), leading=2)
    with pytest.raises(ValueError, match="leading must be at least 1"):
        make()(some_tokens(), leading=0)


@pytest.mark.parametrize("token", [-1, SMALL.vocabulary])
def test_a_token_of_nobody_is_refused(token):
    """It would be another member's."""
    tokens = some_tokens()
    tokens[0, 0, 0] = token
    with pytest.raises(ValueError, match="tokens must lie from 0 to 11"):
        make()(tokens)


@pytest.mark.parametrize("seed", [1.5, 2**63])
def test_seeds_are_whole_and_not_too_large(seed):
    with pytest.raises(ValueError, match="seeds must be whole, from"):
        make(seeds=(0, seed))

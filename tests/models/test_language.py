"""The language models against torch's own encoder layers, which share no code with them."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.kernels.language import Dropout
from joma.models import LanguageConfig, LanguageModel
from joma.models.networks import LanguageBlock

CONFIG = LanguageConfig(vocabulary=50, layers=3, width=12, hidden=16, heads=2, length=9)


def make(seeds: tuple[int, ...] = (3, 4), config: LanguageConfig = CONFIG) -> LanguageModel:
    model = LanguageModel(config, seeds, dtype=torch.float64)
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # no bias 0, no layer like another
            parameter += 0.1 * torch.randn(parameter.shape, generator=dice, dtype=torch.float64)
    return model


def words(*shape: int) -> Tensor:
    return torch.randint(CONFIG.vocabulary, shape, generator=torch.Generator().manual_seed(1))


def by_torch(model: LanguageModel, member: int, tokens_BT: Tensor) -> Tensor:
    config = model.config
    layer = nn.TransformerEncoderLayer(
        config.width, config.heads, config.hidden, dropout=0.0, batch_first=True
    )
    encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False).double()
    for own, block in zip(encoder.layers, model.blocks, strict=True):
        assert isinstance(block, LanguageBlock)
        names = {
            "self_attn.in_proj": block.queries_keys_values,
            "self_attn.out_proj": block.projection,
            "linear1": block.lower,
            "linear2": block.upper,
        }
        state = {}
        for name, linear in names.items():
            joint = "_" if name.endswith("in_proj") else "."
            assert linear.bias is not None
            state[f"{name}{joint}weight"] = linear.weight[member].mT
            state[f"{name}{joint}bias"] = linear.bias[member, 0]
        for name, norm in (("norm1", block.norm_attention), ("norm2", block.norm_mlp)):
            state[f"{name}.weight"], state[f"{name}.bias"] = norm.weight[member], norm.bias[member]
        own.load_state_dict(state)
    length = tokens_BT.shape[1]
    place = torch.arange(length, dtype=torch.float64)[:, None]
    rate = 10_000 ** (-torch.arange(0, config.width, 2, dtype=torch.float64) / config.width)
    waves = torch.zeros(length, config.width, dtype=torch.float64)
    waves[:, 0::2], waves[:, 1::2] = (place * rate).sin(), (place * rate).cos()
    x = functional.embedding(tokens_BT, model.embedding.weight[member]) * math.sqrt(config.width)
    mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
    y = encoder(x + waves, mask=mask)
    assert model.output.bias is not None
    logits = y @ model.output.weight[member] + model.output.bias[member]
    return logits[..., : config.vocabulary]


@pytest.mark.parametrize("length", [9, 5])
def test_every_member_is_torchs_encoder(length: int) -> None:
    model, tokens = make(), words(4, length)
    logits = model(tokens)
    for member in range(2):
        torch.testing.assert_close(logits[member], by_torch(model, member, tokens))


def test_gradients_are_those_of_torchs_encoder() -> None:
    model, tokens, targets = make((7,)), words(4, 9), words(4, 9).flip(0)
    weights = torch.rand(4, 9, dtype=torch.float64)
    weights /= weights.sum()
    model.losses(tokens, targets, weights_BT=weights).sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    other = make((7,))
    each = functional.cross_entropy(
        by_torch(other, 0, tokens).flatten(0, 1), targets.flatten(), reduction="none"
    )
    # The reference copies the blocks' parameters; those outside the blocks stay in its graph.
    outside = [other.embedding.weight, other.output.weight, other.output.bias]
    expected = torch.autograd.grad((each * weights.flatten()).sum(), outside)
    by_name = dict(zip([n for n, _ in model.named_parameters()], found, strict=True))
    names = ("embedding.weight", "output.weight", "output.bias")
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(by_name[name], gradient)


def test_initial_values() -> None:
    model = LanguageModel(LanguageConfig(vocabulary=300, layers=2), (0, 1)).requires_grad_(False)
    bounds = {"blocks.0.lower.bias": 200**-0.5, "blocks.1.projection.weight": 200**-0.5}
    for name, bound in {**bounds, "embedding.weight": 0.1, "output.weight": 0.1}.items():
        parameter = model.get_parameter(name)
        assert parameter.abs().max() == pytest.approx(bound, rel=2e-2)
        assert not torch.equal(*parameter)


def test_no_position_sees_what_comes_later() -> None:
    model, tokens = make(), words(2, 9)
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % CONFIG.vocabulary
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :, :6], after[:, :, :6])
    assert not torch.equal(before[:, :, 6:], after[:, :, 6:])


def test_what_is_dropped_follows_from_seed_and_step_alone() -> None:
    tokens = words(2, 9)
    pair, alone = make((3, 4)), LanguageModel(CONFIG, (4,), dtype=torch.float64)
    with torch.no_grad():
        for own, other in zip(alone.parameters(), pair.parameters(), strict=True):
            own.copy_(other[1:])
    torch.testing.assert_close(pair(tokens, step=5)[1:], alone(tokens, step=5))
    assert torch.equal(pair(tokens, step=5), pair(tokens, step=torch.tensor(5)))
    assert not torch.equal(pair(tokens, step=5), pair(tokens, step=6))
    assert not torch.equal(pair(tokens, step=5), pair(tokens))


def test_a_fifth_is_dropped_and_the_mean_stays() -> None:
    drop = Dropout(torch.tensor([1, 2]), 3, 0.2)
    dropped = drop(torch.ones(2, 100, 1000), "anywhere")
    assert (dropped == 0).double().mean() == pytest.approx(0.2, abs=3e-3)
    assert set(dropped.unique().tolist()) == {0.0, 1.25}
    assert not torch.equal(dropped[0], dropped[1])


def test_attention_can_be_watched() -> None:
    model, seen = make(), {}

    def watch(name: str, layer: int, x: Tensor) -> None:
        seen[name, layer] = x

    model(words(4, 9), watch=watch)
    assert sorted(seen) == [(n, layer) for n in ("attention", "hidden") for layer in range(3)]
    assert seen["attention", 1].shape == (2, 4, 2, 9, 9)
    torch.testing.assert_close(seen["attention", 1].sum(-1), torch.ones(2, 4, 2, 9).double())


@pytest.mark.parametrize(
    "change", [{"dropout": 1.0}, {"layers": 0}, {"heads": 7}, {"width": 11}, {"vocabulary": 2.5}]
)
def test_bad_configurations_are_refused(change: dict) -> None:
    (name,) = change
    with pytest.raises(ValueError, match="width" if name == "heads" else name):
        LanguageConfig(**({"vocabulary": 9, "layers": 1} | change))


def test_evaluate_returns_what_losses_and_attention_are() -> None:
    model, tokens, targets = make(), words(4, 9), words(4, 9).flip(0)
    fast = LanguageModel(CONFIG, (3, 4), dtype=torch.float64)
    fast.load_state_dict(model.state_dict())
    weights = torch.rand(4, 9, dtype=torch.float64)
    rows = []

    def watch(name: str, layer: int, x: torch.Tensor) -> None:
        if name == "attention":
            rows.append(-(x * x.clamp(min=1e-300).log()).sum(-1).mean(2))

    expected = model.losses(tokens, targets, weights_BT=weights, watch=watch)
    losses, entropies = fast.evaluate(tokens, targets, weights)
    torch.testing.assert_close(losses, expected.detach())
    for layer, own in enumerate(rows):
        torch.testing.assert_close(entropies[layer], (own.detach() * weights).sum((1, 2)))
    with pytest.raises(ValueError, match="at most 9 positions, got 10"):
        model(words(1, 10))
    with pytest.raises(ValueError, match="at most"):
        fast.evaluate(words(2, 99), words(2, 99), torch.ones(2, 99))

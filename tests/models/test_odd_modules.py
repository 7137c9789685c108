"""Modules that store their weights in unusual ways: found, or left out with a reason."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from joma.models import Found, Weight, find_weights

WIDTH, NODES = 8, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, NODES), nn.ReLU(), nn.Linear(NODES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn.o_proj(self.attn.q_proj(x)) + self.mlp(x)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.positions = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return Small()


def _at(found: Found, module: str) -> Weight:
    return next(weight for weight in found.weights if weight.module == module)


def test_a_plain_model_of_ones_own(model: Any):
    found = find_weights(model)
    assert not found.missing
    assert [weight.module for weight in found.weights] == [
        "embedding",
        *(
            f"blocks.{layer}.{name}"
            for layer in range(2)
            for name in (
                "attn.q_proj",
                "attn.k_proj",
                "attn.v_proj",
                "attn.o_proj",
                "mlp.0",
                "mlp.2",
            )
        ),
    ]
    assert [weight.layer for weight in found.weights] == [None, *[0] * 6, *[1] * 6]
    assert [(it.heads, it.key_heads) for it in found.attentions] == [(2, 2)] * 2
    assert [block.module for block in found.blocks] == ["blocks.0", "blocks.1"]
    named = dict(model.named_parameters())
    for weight in found.weights:
        assert weight.matrix(named) is named[weight.name]
        assert weight.of(model) is named[weight.name]


def _computed(module: nn.Module) -> Tensor:
    """What a linear module multiplies with, read off by feeding it the identity."""
    with torch.no_grad():
        return (module(torch.eye(WIDTH)) - module(torch.zeros(1, WIDTH))).T


@pytest.mark.parametrize(
    ("wrap", "stored"),
    [
        (parametrizations.weight_norm, 2),
        (parametrizations.spectral_norm, 1),
        (parametrizations.orthogonal, 1),
        (weight_norm, 2),
        (spectral_norm, 1),
        (lambda module: prune.random_unstructured(module, "weight", 0.5), 1),
    ],
    ids=["weight norm", "spectral norm", "orthogonal", "old weight norm", "old spectral", "pruned"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_weights_that_are_computed(model: Any, wrap: Any, stored: int):
    query = wrap(model.blocks[1].attn.q_proj)
    model.blocks[1].attn.q_proj = query
    with torch.no_grad():
        for parameter in query.parameters():  # as an optimizer does, after the last forward pass
            parameter.mul_(1.5)
    weight = _at(find_weights(model), "blocks.1.attn.q_proj")
    assert len(weight.names) == stored
    assert set(weight.names) <= dict(model.named_parameters()).keys()
    before = copy.deepcopy(model.state_dict())
    for training in (True, False):
        found = weight.of(model.train(training)).detach()
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before), "reading moved it"
    torch.testing.assert_close(found, _computed(query.eval()))
    with pytest.raises(ValueError, match=r"read it with Weight\.of"):
        weight.matrix(dict(model.named_parameters()))


def _lazy(block: Any) -> None:
    block.attn.q_proj = nn.LazyLinear(WIDTH)


def _complex(block: Any) -> None:
    block.attn.q_proj.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.complex64))


def _quantized(block: Any) -> None:
    whole = torch.zeros(WIDTH, WIDTH, dtype=torch.int8)
    block.attn.q_proj.weight = nn.Parameter(whole, requires_grad=False)


@pytest.mark.parametrize(
    ("damage", "why"), [(_lazy, "lazy"), (_complex, "complex"), (_quantized, "quantized")]
)
def test_what_cannot_be_measured_is_left_out_with_a_reason(model: Any, damage: Any, why: str):
    damage(model.blocks[1])
    found = find_weights(model)
    assert why in found.missing["blocks.1.attn.q_proj"]
    modules = [weight.module for weight in found.weights]
    assert "blocks.1.attn.q_proj" not in modules
    assert {"blocks.0.attn.q_proj", "blocks.1.attn.k_proj", "blocks.1.mlp.2"} <= set(modules)
    assert not found.attentions[1].has_scores


def test_removed_parts(model: Any):
    model.blocks[0].attn = nn.Identity()
    model.blocks[1].mlp = None
    found = find_weights(model)
    assert [it.module for it in found.attentions] == ["blocks.1.attn"]
    assert [it.module for it in found.mlps] == ["blocks.0.mlp"]
    assert [it.layer for it in (*found.attentions, *found.mlps)] == [1, 0]


def test_an_embedding_alone():
    found = find_weights(nn.Embedding(5, 3))
    assert [(it.role, it.name) for it in found.weights] == [("embedding", "weight")]
    assert "query" in found.missing


@pytest.mark.parametrize(
    "model", [nn.Identity(), nn.Linear(3, 4), nn.Sequential(nn.Conv2d(3, 4, 2))]
)
def test_nothing_to_find(model: nn.Module):
    found = find_weights(model)
    assert not found.weights
    assert {"embedding", "query", "mlp_down"} <= set(found.missing)


def test_the_meta_device(model: Any):
    assert find_weights(model.to("meta")) == find_weights(Small())


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_layers_of_torch(kind: Any):
    model = nn.Sequential(*(kind(WIDTH, 2, NODES, batch_first=True) for _ in range(2)))
    found = find_weights(model)
    cross = ["multihead_attn"] if kind is nn.TransformerDecoderLayer else []
    names = ["self_attn", *cross]
    assert [it.module for it in found.attentions] == [f"{i}.{it}" for i in range(2) for it in names]
    attention: Any = found.attentions[0]
    whole: Any = model.get_parameter("0.self_attn.in_proj_weight")
    for role, rows in zip(("query", "key", "value"), whole.chunk(3), strict=True):
        assert torch.equal(getattr(attention, role).of(model), rows)
    assert attention.output.name == "0.self_attn.out_proj.weight"
    assert [it.down_path for it in found.mlps] == ["0.linear2", "1.linear2"]
    apart = nn.MultiheadAttention(WIDTH, 2, kdim=3, vdim=5)
    roles = [weight.name for weight in find_weights(apart).weights]
    assert roles == ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]


def test_checkpointed_blocks_have_their_usual_names(model: Any):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    plain = [weight.module for weight in find_weights(model).weights]
    wrap = checkpoint_wrapper.checkpoint_wrapper
    model.blocks = nn.ModuleList(wrap(block) for block in model.blocks)
    found = find_weights(model)
    assert [weight.module for weight in found.weights] == plain
    assert [weight.layer for weight in found.weights] == [None, *[0] * 6, *[1] * 6]
    for weight in found.weights:
        assert weight.of(model) is model.get_parameter(weight.name)

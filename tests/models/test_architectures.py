import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.activations import ACT2FN

from joma.models import (
    Architecture,
    Part,
    Place,
    architecture_of,
    module_at,
    number_of_layers,
    register,
    weights,
)
from tests.models.tiny import CASES, HEADS, LAYERS, VOCABULARY, tiny, tokens


def _names(model):
    return [name for name, _ in model.named_parameters()]


def _weights(model, roles=("embedding", "query", "key", "mlp_lower", "mlp_up")):
    architecture = architecture_of(model)
    heads, _ = architecture.head_counts(model)
    return weights(_names(model), architecture, roles, heads=heads)


def _inputs(model, module):
    """What a module is given when the model runs, by whatever name it takes it."""
    kept = []

    def hook(_, arguments, options):
        kept.append(arguments[0] if arguments else options["hidden_states"])

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(tokens())
    handle.remove()
    return kept[0]


@pytest.mark.parametrize("name", CASES)
def test_hidden_activations_follow_from_the_mlp_weights_and_blocks_follow_each_other(name):
    model = tiny(name)
    architecture = architecture_of(model)
    config = model.config
    activation = next(
        ACT2FN[getattr(config, key)]
        for key in ("activation_function", "hidden_activation", "hidden_act")
        if isinstance(getattr(config, key, None), str)
    )
    for layer in range(LAYERS):
        mine = {weight.role: weight for weight in _weights(model) if weight.layer == layer}
        lower = model.get_submodule(mine["mlp_lower"].module)
        hidden = _inputs(model, lower)
        made = hidden @ mine["mlp_lower"].read(model.get_parameter(mine["mlp_lower"].name)).T
        if getattr(lower, "bias", None) is not None:
            made = made + lower.bias
        made = activation(made)
        if "mlp_up" in mine:
            made = made * (hidden @ model.get_parameter(mine["mlp_up"].name).T)
        down = _inputs(model, module_at(model, architecture.mlp_down, layer))
        torch.testing.assert_close(down, made)
    kept: list[Any] = []
    block, following = (module_at(model, architecture.layer, layer) for layer in (0, 1))
    block.register_forward_hook(lambda _, __, output: kept.append(output))
    inputs = _inputs(model, following)
    torch.testing.assert_close(kept[0][0] if isinstance(kept[0], tuple) else kept[0], inputs)


@pytest.mark.parametrize("name", CASES)
def test_names_with_and_without_a_head_tell_of_the_same_weights(name):
    model = tiny(name)
    base = model.base_model
    assert number_of_layers(_names(model), architecture_of(model)) == LAYERS
    whole, bare = _weights(model), _weights(base)
    assert [(w.role, w.layer) for w in whole] == [(w.role, w.layer) for w in bare]
    assert whole[0].role == "embedding"
    assert whole[0].layer is None
    for one, other in zip(whole, bare, strict=True):
        assert one.name.endswith(other.name)
        assert model.get_parameter(one.name) is base.get_parameter(other.name)
    embedding = whole[0].read(model.get_parameter(whole[0].name))
    assert embedding is model.get_input_embeddings().weight
    assert embedding.shape[0] == VOCABULARY


def test_head_counts_from_a_model_a_configuration_and_a_file():
    model = tiny("llama")
    architecture = architecture_of(model)
    for thing in (model, model.config, model.config.to_dict()):
        assert architecture.head_counts(thing) == (HEADS, 2)
    gpt2 = tiny("gpt2")
    assert architecture_of(gpt2).head_counts(gpt2.config.to_dict()) == (HEADS, HEADS)
    with pytest.raises(ValueError, match="num_attention_heads"):
        architecture.head_counts({"model_type": "llama"})


def test_modules_are_named_as_a_reader_knows_them():
    modules = [weight.module for weight in _weights(tiny("gpt2")) if weight.layer in (None, 2)]
    assert modules == [
        "transformer.wte",
        "transformer.h.2.attn.c_attn[query]",
        "transformer.h.2.attn.c_attn[key]",
        "transformer.h.2.mlp.c_fc",
    ]
    bert = tiny("bert")
    assert module_at(bert, "encoder.layer.{layer}", 1) is bert.get_submodule("bert.encoder.layer.1")


@settings(deadline=None, max_examples=30)
@given(
    parts=st.integers(1, 4),
    heads=st.integers(1, 4),
    size=st.integers(1, 3),
    by_head=st.booleans(),
    transposed=st.booleans(),
)
def test_parts_make_up_the_whole(parts, heads, size, by_head, transposed):
    rows = torch.arange(parts * heads * size * 2.0).reshape(-1, 2)
    stored = rows.T if transposed else rows
    pieces = [
        weights(
            ["emb", "b.0.fused"],
            _small(Place("b.{layer}.fused", Part(index, parts, by_head), transposed)),
            ["query"],
            heads=heads,
        )[0].read(stored)
        for index in range(parts)
    ]
    if by_head:
        pieces = [piece.unflatten(0, (heads, size)) for piece in pieces]
        whole = torch.stack(pieces, 1).reshape(rows.shape)
    else:
        whole = torch.cat(pieces)
    assert torch.equal(whole, rows)


def _small(query: Place) -> Architecture:
    return Architecture(
        name="small",
        model_types=("small",),
        prefixes=("",),
        embedding=Place("emb"),
        query=query,
        key=Place("b.{layer}.k"),
        mlp_lower=Place("b.{layer}.m"),
        layer="b.{layer}",
        attention="b.{layer}.a",
        mlp_down="b.{layer}.d",
    )


QUERY = _small(Place("b.{layer}.q", Part(0, 3, by_head=True)))


@pytest.mark.parametrize(
    ("names", "heads", "message"),
    [
        (["other.emb"], None, "no parameter is named"),
        (["emb", "b.0.q", "b.1.k"], 1, r"query at b\.1\.q"),
        (["emb", "b.0.q", "b.2.q"], 1, "none numbered 1"),
        (["emb", "b.0.q"], None, "number of heads, got None"),
    ],
)
def test_names_that_do_not_fit_a_map_are_reported(names, heads, message):
    with pytest.raises(ValueError, match=message):
        weights(names, QUERY, ["query"], heads=heads)


def test_matrices_that_do_not_fit_a_map_are_reported():
    for shape, message in (((4, 2), "divisible by 6, got 4"), ((4,), "must be a matrix")):
        with pytest.raises(ValueError, match=message):
            weights(["emb", "b.0.q"], QUERY, ["query"], heads=2)[0].read(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"key must have \{layer\} once"):
        Architecture(**{**vars(QUERY), "key": Place("k")})


@pytest.fixture
def own_maps(monkeypatch):
    monkeypatch.setattr("joma.models.architectures._registered", [])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({"qkv": nn.Linear(4, 12)})
        self.mlp = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})


class Homemade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))


@pytest.mark.usefixtures("own_maps")
def test_an_unknown_module_is_answered_with_a_map_that_can_be_pasted():
    model = Homemade()
    with pytest.raises(ValueError, match="no map") as refused:
        architecture_of(model)
    message = str(refused.value)
    assert message.count("  layers.{layer}.self_attn.qkv.weight (12, 4)\n") == 1
    exec(textwrap.dedent(message[message.index("    from joma") :]))
    query = next(
        weight for weight in _weights_of(model) if weight.module.endswith("0.self_attn.qkv[query]")
    )
    fused = model.get_parameter("layers.0.self_attn.qkv.weight")
    assert torch.equal(query.read(fused), fused[:4])
    assert module_at(model, "layers.{layer}.mlp", 1) is model.layers[1].mlp


def _weights_of(model):
    return weights(_names(model), architecture_of(model))


@pytest.mark.usefixtures("own_maps")
def test_an_unknown_configuration_shows_its_names_before_anything_is_loaded():
    config = {"model_type": "gptj", "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4}
    with pytest.raises(ValueError, match=r"'gptj'.*known are bert, gemma") as refused:
        architecture_of(config)
    assert "h.{layer}.attn.q_proj.weight (16, 16)" in str(refused.value)
    register(_small(Place("b.{layer}.q")))
    assert architecture_of({"model_type": "small"}).name == "small"


@pytest.mark.usefixtures("own_maps")
def test_a_newer_map_is_used():
    newer = Architecture(**{**vars(architecture_of({"model_type": "llama"})), "name": "newer"})
    register(newer)
    assert architecture_of({"model_type": "llama"}) is newer

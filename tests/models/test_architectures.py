import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.activations import ACT2FN

from joma.models import Architecture, Found, Part, Place, Rows, Weight, find_weights, register
from joma.probes import probe_weights
from tests.models.tiny import CASES, HEADS, LAYERS, VOCABULARY, tiny, tokens


def _inputs(model, path):
    """What a module is given when the model runs, by whatever name it takes it."""
    kept = []

    def hook(_, arguments, options):
        kept.append(arguments[0] if arguments else options["hidden_states"])

    handle = model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(tokens())
    handle.remove()
    return kept[0]


@pytest.mark.parametrize("name", CASES)
def test_hidden_activations_follow_from_the_mlp_weights(name):
    model = tiny(name)
    config = model.config
    activation = next(
        ACT2FN[getattr(config, key)]
        for key in ("activation_function", "hidden_activation", "hidden_act")
        if isinstance(getattr(config, key, None), str)
    )
    found = find_weights(model).mlps
    assert [mlp.layer for mlp in found] == list(range(LAYERS))
    for mlp in found:
        assert mlp.lower is not None
        lower = model.get_submodule(mlp.lower.module)
        hidden = _inputs(model, mlp.lower.module)
        made = hidden @ mlp.lower.of(model).T
        if getattr(lower, "bias", None) is not None:
            made = made + lower.bias
        made = activation(made)
        if mlp.up is not None:
            made = made * (hidden @ mlp.up.of(model).T)
        torch.testing.assert_close(_inputs(model, mlp.down_path), made)


@pytest.mark.parametrize("name", CASES)
def test_a_block_hands_the_residual_stream_to_the_next(name):
    model = tiny(name)
    first, second, *_ = find_weights(model).blocks
    kept = []
    model.get_submodule(first.module).register_forward_hook(
        lambda _, __, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    following = _inputs(model, second.module)
    torch.testing.assert_close(kept[0], following)


@pytest.mark.parametrize("name", CASES)
def test_names_with_and_without_a_head_tell_of_the_same_weights(name):
    model: Any = tiny(name)
    base = model.base_model
    whole, bare = find_weights(model).weights, find_weights(base).weights
    assert [(w.role, w.layer) for w in whole] == [(w.role, w.layer) for w in bare]
    assert (whole[0].role, whole[0].layer) == ("embedding", None)
    for one, other in zip(whole, bare, strict=True):
        assert one.name.endswith(other.name)
        assert model.get_parameter(one.name) is base.get_parameter(other.name)
    embedding = whole[0].read(model.get_parameter(whole[0].name))
    assert embedding is model.get_input_embeddings().weight
    assert embedding.shape[0] == VOCABULARY


def test_head_counts_from_a_model_a_configuration_and_a_file():
    model: Any = tiny("llama")
    known = _small(Place("b.{layer}.q"), key_value_heads="num_key_value_heads")
    for thing in (model, model.config, model.config.to_dict()):
        assert known.head_counts(thing) == (HEADS, 2)
    gpt2: Any = tiny("gpt2")
    own = _small(Place("b.{layer}.q"), heads="n_head", key_value_heads="num_key_value_heads")
    assert own.head_counts(gpt2.config.to_dict()) == (HEADS, HEADS)
    with pytest.raises(ValueError, match="num_attention_heads"):
        known.head_counts({"model_type": "llama"})


def test_modules_are_named_as_a_reader_knows_them():
    weights = find_weights(tiny("gpt2")).weights
    assert [weight.module for weight in weights if weight.layer in (None, 2)] == [
        "transformer.wte",
        "transformer.h.2.attn.c_attn[query]",
        "transformer.h.2.attn.c_attn[key]",
        "transformer.h.2.attn.c_attn[value]",
        "transformer.h.2.attn.c_proj",
        "transformer.h.2.mlp.c_fc",
        "transformer.h.2.mlp.c_proj",
    ]


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
    places = [Place("w", Part(index, parts, by_head), transposed) for index in range(parts)]
    pieces = [Weight("query", 0, "w", "w", place, heads).read(stored) for place in places]
    if by_head:
        pieces = [piece.unflatten(0, (heads, size)) for piece in pieces]
        whole = torch.stack(pieces, 1).reshape(rows.shape)
    else:
        whole = torch.cat(pieces)
    assert torch.equal(whole, rows)


def _small(query: Place, **others: Any) -> Architecture:
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
        **others,
    )


def _found(names: list[str], architecture: Architecture | None = None) -> Found:
    model = nn.Module()
    for name in names:
        *path, last = name.split(".")
        inside = model
        for part in path:
            if part not in inside._modules:
                inside.add_module(part, nn.Module())
            inside = inside.get_submodule(part)
        inside.register_parameter(last, nn.Parameter(torch.zeros(4, 2)))
    return find_weights(model, architecture=architecture)


def test_mistakes_are_reported():
    small = _small(Place("b.{layer}.q", Part(0, 3, by_head=True)), heads=2)
    block = ["b.0.q", "b.0.k", "b.0.m", "b.0.d.weight"]
    with pytest.raises(ValueError, match="no parameter is named"):
        _found(["other.emb"], small)
    with pytest.raises(ValueError, match=r"query at b\.1\.q"):
        _found(["emb", *block, "b.1.k"], small)
    with pytest.raises(ValueError, match="none numbered 1"):
        _found(["emb", *block, "b.2.q"], small)
    query = _found(["emb", *block], small).attentions[0].query
    assert query is not None
    with pytest.raises(ValueError, match="divisible by 6, got 4"):
        query.read(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="must be a matrix"):
        query.read(torch.zeros(4))
    with pytest.raises(ValueError, match="index"):
        Part(3, 3)
    with pytest.raises(ValueError, match="start < stop"):
        Rows(2, 2, 3)
    with pytest.raises(ValueError, match=r"key must have \{layer\} once"):
        Architecture(**{**vars(small), "key": Place("k")})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleDict({"fused": nn.Linear(4, 12)})
        self.change = nn.ModuleDict({"wide": nn.Linear(4, 8), "narrow": nn.Linear(8, 4)})


class Homemade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))


def test_an_unknown_module_is_answered_with_a_map_that_can_be_filled_in(monkeypatch):
    monkeypatch.setattr("joma.models.architectures._registered", [])
    model = Homemade()
    with pytest.raises(ValueError, match="cannot be measured") as refused:
        probe_weights(model, roles=["query"])
    message = str(refused.value)
    assert message.count("  layers.{layer}.mix.fused.weight (12, 4)\n") == 1
    example = textwrap.dedent(message[message.index("    from joma") :])
    for wrong, right in (
        ("embed_tokens", "table"),
        ("self_attn.qkv", "mix.fused"),
        ("self_attn", "mix"),
        ("mlp.up", "change.wide"),
        ("mlp.down", "change.narrow"),
        ('heads="num_attention_heads"', "heads=2"),
    ):
        example = example.replace(wrong, right)
    exec(example)
    query = find_weights(model).attentions[0].query
    assert query is not None
    fused = model.get_parameter("layers.0.mix.fused.weight")
    assert torch.equal(query.of(model), fused[:4])


def test_a_long_list_is_cut():
    wide = nn.Module()
    for index in range(200):
        wide.add_module(f"part{index}", nn.Linear(index + 1, 2))
    with pytest.raises(ValueError, match="cannot be measured") as refused:
        probe_weights(wide, metrics=["stable_rank"])
    assert "… and 140 more" in str(refused.value)
    assert "part150" not in str(refused.value)


def test_a_newer_map_is_used(monkeypatch):
    monkeypatch.setattr("joma.models.architectures._registered", [])
    for heads in (1, 2):
        known = _small(Place("b.{layer}.q"), heads=heads)
        register(Architecture(**{**vars(known), "model_types": ("Module",)}))
    found = _found(["emb", "b.0.q", "b.0.k", "b.0.m", "b.0.d.weight"])
    assert found.attentions[0].heads == 2

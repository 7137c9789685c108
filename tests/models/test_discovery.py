"""Weights found by reading the module tree or a file, against references that use nothing of it.

Which rows of a fused matrix make queries and keys is read off the model itself: the output of the
fused module is replaced by the numbers of its rows, and the numbers that reach the first position
of attention are the rows. Nothing is turned there by rotary embeddings.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from joma.models import Weight, WeightFiles, find_stored_weights, find_weights
from joma.probes.session import probe_weights
from tests.architectures._models import BY_NAME, build

WIDTH, HEADS = 32, 4


def _built(model_type: str, **settings: Any) -> Any:
    architecture = BY_NAME[model_type]
    return build(replace(architecture, own={**architecture.own, **settings}))


_NOT_BY_GROUP = {"new_decoder_architecture": False}
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon with one key": ("falcon", {**_NOT_BY_GROUP, "multi_query": True}),
    "falcon by head": ("falcon", {**_NOT_BY_GROUP, "multi_query": False, "num_kv_heads": 4}),
    "gpt_bigcode by head": ("gpt_bigcode", {"multi_query": False, "num_key_value_heads": 4}),
    "persimmon": ("persimmon", {"qk_layernorm": False}),
    **{name: (name, {}) for name in ("falcon", "bloom", "gpt_neox", "mpt", "phi3", "gpt_bigcode")},
    **{name: (name, {}) for name in ("gpt2", "codegen", "modernbert")},
}


class _Operands(TorchFunctionMode):
    """Keeps the operands of the first product of stacks of matrices."""

    kept: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.kept is None and name in ("baddbmm", "matmul", "scaled_dot_product_attention"):
            given = [it for it in (*args, *kwargs.values()) if isinstance(it, Tensor)]
            given = given[1:] if name == "baddbmm" else given
            if min(it.ndim for it in given[:2]) > 2:
                transposed = name != "scaled_dot_product_attention"
                key = given[1].mT if transposed else given[1]
                self.kept = given[0], key
        return func(*args, **kwargs)


def _rows_seen(model: nn.Module, module: nn.Module, out: int) -> tuple[list[int], list[int]]:
    """Numbers of the rows of a fused matrix that make the queries and the keys of all heads."""
    handle = module.register_forward_hook(
        lambda _, __, output: torch.arange(out, dtype=output.dtype).expand_as(output).clone()
    )
    with torch.no_grad(), _Operands() as operands:
        model(torch.tensor([[7, 8, 9]]))
    handle.remove()
    assert operands.kept is not None
    heads = [it.reshape(-1, *it.shape[-2:])[:, 0] for it in operands.kept]
    query, key = ([round(value) for value in it.flatten().tolist()] for it in heads)
    return query, list(dict.fromkeys(key))  # keys that several queries share may be repeated


@pytest.mark.parametrize("case", FUSED)
def test_rows_of_fused_matrices(case: str):
    model_type, settings = FUSED[case]
    model = _built(model_type, **settings)
    attention = find_weights(model).attentions[0]
    query, key, value, _ = attention.weights
    assert len({query.name, key.name, value.name}) == 1
    whole = model.get_parameter(query.name)
    whole = whole.T if query.place.transposed else whole
    module = model.get_submodule(query.name.removesuffix(".weight"))
    rows = _rows_seen(model, module, len(whole))
    assert torch.equal(query.of(model), whole[rows[0]])
    assert torch.equal(key.of(model), whole[rows[1]])
    rest = sorted(set(range(len(whole))) - set(rows[0]) - set(rows[1]))
    assert torch.equal(value.of(model).sort(0).values, whole[rest].sort(0).values)
    assert (attention.heads, attention.key_heads) == (HEADS, len(rows[1]) * HEADS // len(rows[0]))


def test_encoder_and_decoder_are_distinguished():
    found = find_weights(build("t5"))
    blocks = [("encoder", 0), ("encoder", 1), *(("decoder", layer) for layer in range(3))]
    assert [block.module for block in found.blocks] == [f"{it}.block.{n}" for it, n in blocks]
    assert [(it.module, it.layer) for it in found.attentions] == [
        (f"{stack}.block.{layer}.layer.{place}", layer)
        for stack, layer in blocks
        for place in ("0.SelfAttention", "1.EncDecAttention")[: 1 + (stack == "decoder")]
    ]
    assert all(it.has_scores for it in found.attentions)
    assert len({weight.module for weight in found.weights}) == len(found.weights)
    assert [weight.name for weight in found.embeddings] == ["shared.weight"]


def test_a_shared_block_is_found_once():
    found = find_weights(build("albert"))
    assert len(found.blocks) == len(found.attentions) == len(found.mlps) == 1


class TestExperts:
    @pytest.mark.parametrize("size", [16, 32, 64])  # half the width, the width, and twice the width
    @pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "llama4_text"])
    def test_axes_of_stacked_matrices(self, model_type: str, size: int):
        settings = {"intermediate_size": size, "num_local_experts": 3}
        settings |= {"interleave_moe_layer_step": 1} if model_type == "llama4_text" else {}
        model = _built(model_type, **settings)
        found = find_weights(model)
        experts = [it for it in found.mlps if it.expert is not None]
        assert [it.expert for it in experts] == [0, 1, 2] * 2
        assert experts[0].module.endswith("experts[0]")
        mlp = experts[4]
        lower, upper, down = mlp.weights
        assert lower.of(model).shape == upper.of(model).shape == (size, WIDTH)
        assert down.of(model).shape == (WIDTH, size)
        inside: Any = model.get_submodule(mlp.module.removesuffix("[1]"))
        x = torch.randn(5, WIDTH)
        with torch.no_grad():
            stored = inside.gate_up_proj[1]
            gate_up = x @ (stored.T if model_type == "mixtral" else stored)
            alternating = model_type == "gpt_oss"
            gate, up = (
                (gate_up[:, ::2], gate_up[:, 1::2]) if alternating else gate_up.chunk(2, dim=-1)
            )
        torch.testing.assert_close(x @ lower.of(model).T, gate)
        torch.testing.assert_close(x @ upper.of(model).T, up)

    def test_experts_in_a_list(self):
        class Expert(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w1, self.w3 = nn.Linear(8, 12), nn.Linear(8, 12)
                self.w2 = nn.Linear(12, 8)

        class Mixture(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate = nn.Linear(8, 2)
                self.experts = nn.ModuleList(Expert() for _ in range(2))

        model = nn.ModuleList(nn.ModuleDict({"moe": Mixture()}) for _ in range(2))
        found = find_weights(model)
        assert [(it.module, it.layer, it.expert) for it in found.mlps] == [
            (f"{layer}.moe.experts.{expert}", layer, expert)
            for layer in range(2)
            for expert in range(2)
        ]
        assert found.mlps[0].down_path == "0.moe.experts.0.w2"


def test_latent_attention_says_what_is_measured():
    model = build("deepseek_v3")
    found = find_weights(model)
    attention = found.attentions[0]
    assert attention.latent
    assert not attention.has_scores
    assert set(found.missing) == {
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(2)
        for name in ("q_a_proj", "kv_a_proj_with_mqa")
    }
    by_role: dict[str, Weight] = {weight.role: weight for weight in attention.weights}
    whole: Any = model.get_parameter("model.layers.0.self_attn.kv_b_proj.weight")
    heads = whole.unflatten(0, (HEADS, 18))
    assert torch.equal(by_role["key"].of(model), heads[:, :8].flatten(0, 1))
    assert torch.equal(by_role["value"].of(model), heads[:, 8:].flatten(0, 1))


def test_wrappers_of_a_whole_model():
    model = build("llama")
    plain = [weight.module for weight in find_weights(model).weights]
    wrapped = nn.Module()
    wrapped.module = model  # as DistributedDataParallel names it
    found = find_weights(wrapped)
    assert [weight.module for weight in found.weights] == [f"module.{name}" for name in plain]
    assert {(it.heads, it.key_heads) for it in found.attentions} == {(HEADS, 2)}
    compiled = torch.compile(model, backend="eager")
    assert [weight.module for weight in find_weights(compiled).weights] == plain  # type: ignore[arg-type]


# Weights in files, by names and shapes, against those of the loaded model

STORED = ("llama", "gpt2", "gpt_bigcode", "gpt_neox", "phi3", "falcon", "bert", "bart", "mixtral")


@pytest.mark.parametrize("model_type", STORED)
def test_the_same_matrices_in_files_as_in_the_model(model_type: str, tmp_path: Path):
    model = build(model_type)
    model.save_pretrained(tmp_path)
    files, expected = WeightFiles(tmp_path), find_weights(model)
    found = find_stored_weights(files)
    assert len(found.weights) == len(expected.weights)
    for it, own in zip(found.attentions, expected.attentions, strict=True):
        # Bart's configuration has one number for the encoder and one for the decoder.
        assert (it.heads, it.key_heads) in ((own.heads, own.key_heads), (None, None))
        assert it.heads is not None or model_type == "bart"
    left = list(expected.weights)
    for weight in found.weights:
        matrix, what = weight.matrix(files.read), (weight.role, weight.layer, weight.expert)
        same = [it for it in left if (it.role, it.layer, it.expert) == what]
        (own,) = [it for it in same if torch.equal(it.of(model), matrix)]
        left.remove(own)


def test_names_without_the_prefix_of_the_model(tmp_path: Path):
    """As the hub has GPT-2."""
    model = build("gpt2")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    save_file({name.removeprefix("transformer."): it for name, it in whole.items()}, path)
    found = find_stored_weights(WeightFiles(tmp_path))
    assert found.attentions[0].module == "h.0.attn"
    ranks = {it.module: it.value for it in probe_weights(WeightFiles(tmp_path))}
    own = {it.module: it.value for it in probe_weights(model)}
    assert {f"transformer.{module}": value for module, value in ranks.items()} == own


def test_hostile_names_make_no_trouble(tmp_path: Path):
    names = ["a..b", ".", "", "x." * 60 + "w", "forward.weight", "_modules.weight", "a.b", "a.b.c"]
    save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    files = WeightFiles(tmp_path)
    assert not find_stored_weights(files).weights
    with pytest.raises(ValueError, match="stable_rank cannot be measured"):
        probe_weights(files)


def test_without_a_configuration(tmp_path: Path):
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find_stored_weights(WeightFiles(tmp_path))

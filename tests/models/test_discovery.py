"""Weights found by reading the module tree, against references that use nothing of it.

Which rows of a fused matrix make queries and keys is read off the model itself: the output of the
fused module is replaced by the numbers of its rows, and the numbers that reach the first position
of attention are the rows. Nothing is turned there by rotary embeddings.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from joma.common.quiet import quietly
from joma.models import Weight, find_weights
from joma.probes.session import probe_weights

transformers = pytest.importorskip("transformers")

WIDTH, HEADS = 32, 4
_SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2: dict[str, Any] = {"vocab_size": 61, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS}


def _built(model_type: str, **settings: Any) -> nn.Module:
    with torch.random.fork_rng(), quietly():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(model_type, **settings)
        model = transformers.AutoModel.from_config(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


FUSED = {
    "falcon by group": ("falcon", {**_SMALL, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon with one key": ("falcon", {**_SMALL, "multi_query": True}),
    "falcon by head": ("falcon", {**_SMALL, "multi_query": False, "alibi": True}),
    "bloom": ("bloom", {**_SMALL, "n_layer": 2, "n_head": HEADS}),
    "gpt_neox": ("gpt_neox", {**_SMALL, "intermediate_size": 40}),
    "persimmon": ("persimmon", {**_SMALL, "intermediate_size": 40, "qk_layernorm": False}),
    "mpt": ("mpt", {"vocab_size": 61, "d_model": WIDTH, "n_layers": 2, "n_heads": HEADS}),
    "phi3": ("phi3", {**_SMALL, "intermediate_size": 40, "num_key_value_heads": 2}),
    "gpt_bigcode with one key": ("gpt_bigcode", {**_GPT2, "multi_query": True}),
    "gpt_bigcode by head": ("gpt_bigcode", {**_GPT2, "multi_query": False}),
    "gpt2": ("gpt2", _GPT2),
    "codegen": ("codegen", {**_GPT2, "rotary_dim": 4}),
    "modernbert": ("modernbert", {**_SMALL, "intermediate_size": 40}),
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
    model = _built(FUSED[case][0], **FUSED[case][1])
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


def test_ranks_are_those_of_the_right_rows():
    model = _built(*FUSED["falcon by group"][:1], **FUSED["falcon by group"][1])
    fused = "h.1.self_attention.query_key_value"
    whole = model.get_parameter(f"{fused}.weight").detach()
    query, key = _rows_seen_of_last(model, fused, len(whole))
    ranks = {it.module: it for it in probe_weights(model)}
    for role, rows in (("query", query), ("key", key)):
        values = np.linalg.svd(whole[rows].double().numpy(), compute_uv=False)
        expected = (values**2).sum() / values[0] ** 2
        got = ranks[f"{fused}[{role}]"]
        assert got.bound is not None
        assert abs(got.value - expected) <= got.bound


def _rows_seen_of_last(model: nn.Module, path: str, out: int) -> tuple[list[int], list[int]]:
    """The same of the second layer: the first layer's output is not read."""
    return _rows_seen(model, model.get_submodule(path.replace("h.1", "h.0")), out)


def test_encoder_and_decoder_are_distinguished():
    settings = {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2}
    model = _built("t5", **settings, num_heads=4, decoder_start_token_id=0)
    found = find_weights(model)
    assert [(it.module, it.layer) for it in found.attentions] == [
        ("encoder.block.0.layer.0.SelfAttention", 0),
        ("encoder.block.1.layer.0.SelfAttention", 1),
        ("decoder.block.0.layer.0.SelfAttention", 0),
        ("decoder.block.0.layer.1.EncDecAttention", 0),
        ("decoder.block.1.layer.0.SelfAttention", 1),
        ("decoder.block.1.layer.1.EncDecAttention", 1),
    ]
    assert all(it.has_scores for it in found.attentions)
    assert [block.module for block in found.blocks] == [
        "encoder.block.0",
        "encoder.block.1",
        "decoder.block.0",
        "decoder.block.1",
    ]
    assert len({weight.module for weight in found.weights}) == len(found.weights)
    assert [weight.name for weight in found.embeddings] == ["shared.weight"]


def test_a_shared_block_is_found_once():
    model = _built("albert", **_SMALL, intermediate_size=40, embedding_size=16)
    found = find_weights(model)
    assert len(found.blocks) == len(found.attentions) == len(found.mlps) == 1


class TestExperts:
    SETTINGS: dict[str, Any] = {  # noqa: RUF012
        **_SMALL,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
    }

    @pytest.mark.parametrize("size", [16, 32, 64])  # half the width, the width, and twice the width
    @pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "llama4_text"])
    def test_axes_of_stacked_matrices(self, model_type: str, size: int):
        settings = {**self.SETTINGS, "intermediate_size": size, "num_local_experts": 3}
        if model_type == "llama4_text":
            settings |= {"head_dim": 8, "intermediate_size_mlp": 40}
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
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    model = _built("deepseek_v3", **_SMALL, **latent, intermediate_size=40)
    found = find_weights(model)
    attention = found.attentions[0]
    assert attention.latent
    assert not attention.has_scores
    assert set(found.missing) == {
        f"layers.{layer}.self_attn.{name}"
        for layer in range(2)
        for name in ("q_a_proj", "kv_a_proj_with_mqa")
    }
    by_role: dict[str, Weight] = {weight.role: weight for weight in attention.weights}
    whole: Any = model.get_parameter("layers.0.self_attn.kv_b_proj.weight")
    heads = whole.unflatten(0, (HEADS, 18))
    assert torch.equal(by_role["key"].of(model), heads[:, :8].flatten(0, 1))
    assert torch.equal(by_role["value"].of(model), heads[:, 8:].flatten(0, 1))


def test_wrappers_of_a_whole_model():
    model = _built("llama", **_SMALL, intermediate_size=40)
    plain = [weight.module for weight in find_weights(model).weights]
    wrapped = nn.Module()
    wrapped.module = model  # as DistributedDataParallel names it
    found = find_weights(wrapped)
    assert [weight.module for weight in found.weights] == [f"module.{name}" for name in plain]
    assert {(it.heads, it.key_heads) for it in found.attentions} == {(HEADS, HEADS)}
    compiled = torch.compile(model, backend="eager")
    assert [weight.module for weight in find_weights(compiled).weights] == plain  # type: ignore[arg-type]

"""Which weight of which architecture is what, written by hand from the models' own code.

Nothing of joma is used. `matrices` gives the (out, in) matrices of attention and MLPs under the
name of the parameter, the role and the number of the expert. Fused matrices are cut as the model
cuts what they produce. XLNet's projections, parameters of three axes, are left out.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

Parts = dict[str, Tensor]
Split = Callable[[Tensor, Any], Parts]
"""From an (out, in) matrix and the configuration to the matrices it holds, by role."""

_QKV = ("query", "key", "value")


def _thirds(matrix: Tensor, config: Any) -> Parts:
    return dict(zip(_QKV, matrix.chunk(3), strict=True))


def _halves(matrix: Tensor, config: Any) -> Parts:
    return dict(zip(("mlp_lower", "mlp_up"), matrix.chunk(2), strict=True))


def _alternating(matrix: Tensor, config: Any) -> Parts:
    return {"mlp_lower": matrix[::2], "mlp_up": matrix[1::2]}


def _by_head(matrix: Tensor, config: Any) -> Parts:
    """Head after head, each with its query, key and value."""
    parts = matrix.unflatten(0, (config.num_attention_heads, 3, -1)).unbind(1)
    return {role: part.flatten(0, 1) for role, part in zip(_QKV, parts, strict=True)}


def _by_group(matrix: Tensor, config: Any) -> Parts:
    """Group after group, each with its queries, one key and one value."""
    groups = config.num_kv_heads
    size = config.hidden_size // config.num_attention_heads
    grouped = matrix.unflatten(0, (groups, -1, size))
    parts = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
    return {role: part.flatten(0, 2) for role, part in zip(_QKV, parts, strict=True)}


def _one_after_another(matrix: Tensor, config: Any) -> Parts:
    size = config.hidden_size // config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or 1
    sizes = [config.num_attention_heads * size, keys * size, keys * size]
    return dict(zip(_QKV, matrix.split(sizes), strict=True))


def _query_and_gate(matrix: Tensor, config: Any) -> Parts:
    """Head after head, each with its query and a gate of the output."""
    query = matrix.unflatten(0, (config.num_attention_heads, 2, -1))[:, 0]
    return {"query": query.flatten(0, 1)}


def _in_four(matrix: Tensor, config: Any) -> Parts:
    """Four groups of heads, each with its queries, values and keys, in this order."""
    query, value, key = matrix.unflatten(0, (4, 3, -1)).unbind(1)
    return {"query": query.flatten(0, 1), "key": key.flatten(0, 1), "value": value.flatten(0, 1)}


def _latent(matrix: Tensor, config: Any) -> Parts:
    """Head after head, each with its key (but for what carries positions) and value."""
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    key, value = matrix.unflatten(0, (config.num_attention_heads, -1)).split(sizes, 1)
    return {"key": key.flatten(0, 1), "value": value.flatten(0, 1)}


def _whole(role: str) -> Split:
    return lambda matrix, config: {role: matrix}


FUSED: dict[str, dict[str, Split]] = {
    "gpt2": {r"attn\.c_attn\.weight": _thirds},
    "gpt_bigcode": {r"attn\.c_attn\.weight": _one_after_another},
    "gpt_neox": {r"query_key_value\.weight": _by_head},
    "persimmon": {r"query_key_value\.weight": _by_head},
    "bloom": {r"query_key_value\.weight": _by_head},
    "falcon": {r"query_key_value\.weight": _by_group},
    "mpt": {r"Wqkv\.weight": _thirds},
    "modernbert": {r"Wqkv\.weight": _thirds, r"mlp\.Wi\.weight": _halves},
    "qwen2_vl": {r"attn\.qkv\.weight": _thirds},
    "phi3": {r"qkv_proj\.weight": _one_after_another, r"gate_up_proj\.weight": _halves},
    "glm": {r"gate_up_proj\.weight": _halves},
    "glm4": {r"gate_up_proj\.weight": _halves},
    "qwen3_next": {r"self_attn\.q_proj\.weight": _query_and_gate},
    "codegen": {r"qkv_proj\.weight": _in_four},
    "openai-gpt": {r"attn\.c_attn\.weight": _thirds},
    "deberta": {r"in_proj\.weight": _by_head},
    "deepseek_v2": {r"kv_b_proj\.weight": _latent},
    "deepseek_v3": {r"kv_b_proj\.weight": _latent},
    "gpt_oss": {r"experts\.gate_up_proj": _alternating},
}
"""By model type: patterns of names and how the matrix is cut; the rest is in `_PLAIN`."""

_ATTENTION = r"(\w*(attn|attention|Attention)|self|temporal_block)\."
_PLAIN: list[tuple[str, Split]] = [
    (_ATTENTION + r"(q_proj|query|query_proj|q|q_lin|Wq|q_b_proj)\.weight", _whole("query")),
    (_ATTENTION + r"(k_proj|key|key_proj|k|k_lin|Wk)\.weight", _whole("key")),
    (_ATTENTION + r"(v_proj|value|value_proj|v|v_lin|Wv)\.weight", _whole("value")),
    (
        _ATTENTION + r"(o_proj|out_proj|o|out_lin|dense|output\.dense|c_proj|Wo|proj)\.weight",
        _whole("output"),
    ),
    (r"experts\.gate_up_proj", _halves),
    (r"experts\.down_proj", _whole("mlp_down")),
    (r"(gate_proj|w1|wi_0)\.weight", _whole("mlp_lower")),
    (r"(w3|wi_1)\.weight", _whole("mlp_up")),
    (
        r"(fc1|fc_in|lin1|wi|c_fc|dense_h_to_4h|intermediate\.dense|intermediate_dense|ffn)\.weight"
        r"|h\.\d+\.ffn\.0\.weight|ff\.layer_1\.weight",
        _whole("mlp_lower"),
    ),
    (
        r"(down_proj|w2|fc2|fc_out|lin2|wo|dense_4h_to_h|output_dense|ffn_output)\.weight"
        r"|h\.\d+\.ffn\.2\.weight|ff\.layer_2\.weight|mlp\.(c_proj|Wo)\.weight|layer\.\d+\.output\.dense\.weight",
        _whole("mlp_down"),
    ),
]
_NO_PART = re.compile(
    r"linear_attn|mamba|\.conv\.|rg_lru|merger|pooler|multi_modal_projector|vision_model\.head"
)
_IN_OUT = {
    "gpt2": r"weight",
    "openai-gpt": r"weight",
    "gpt_oss": r"experts\.",
    "llama4_text": r"experts\.",
}
"""Weights stored as (in, out)."""


def matrices(model: nn.Module) -> Iterator[tuple[str, str, int | None, Tensor]]:
    """(name of the parameter, role, expert, matrix) of attention and MLPs of all blocks."""
    config: Any = model.config
    parts = [config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))]
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or not re.search(r"\.\d+\.", name) or _NO_PART.search(name):
            continue
        splits = [
            split
            for pattern, split in (*FUSED.get(config.model_type, {}).items(), *_rest(parts, name))
            if re.search(rf"(^|\.)({pattern})$", name)
        ]
        if not splits:
            continue
        swapped = re.search(_IN_OUT.get(config.model_type, "$^"), name) is not None
        experts = [None] if parameter.ndim == 2 else range(len(parameter))
        for expert in experts:
            matrix = parameter.detach() if expert is None else parameter.detach()[expert]
            for role, part in splits[0](matrix.T if swapped else matrix, config).items():
                yield name, role, expert, part


def _rest(parts: list[Any], name: str) -> list[tuple[str, Split]]:
    """What is not fused; an `up_proj` is the first matrix where no gate stands next to it."""
    gated = not any(getattr(part, "model_type", "") in _UNGATED for part in parts)
    return [*_PLAIN, (r"up_proj\.weight", _whole("mlp_up" if gated else "mlp_lower"))]


_UNGATED = {"nemotron", "arcee", "apertus", "mpt"}

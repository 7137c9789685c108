"""Finding the modules that compute attention, and which matrices make queries, keys and values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from joma.models.architectures import config_entry
from joma.models.discovery._projections import Child, Projection, parameter_projection
from joma.models.parts import Rows

Near = Mapping[str, Child]
"""The parts of a module and the parts of those, as `children` gives them."""

# The names by which models call their projections; a new family adds a line here at most.

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("linear_q", "linear_k", "linear_v"),
    ("to_q", "to_k", "to_v"),
    ("w_q", "w_k", "w_v"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_linear", "k_linear", "v_linear"),
    ("fc_q", "fc_k", "fc_v"),
)
"""Queries, keys and values made by modules of their own."""

_FUSED = (
    "query_key_value",
    "qkv_proj",
    "c_attn",
    "wqkv",
    "qkv",
    "in_proj",
    "to_qkv",
    "w_qkv",
    "qkv_linear",
    "c_qkv",
)
"""Queries, keys and values made by one module."""

_FUSED_KEY_VALUE = ("kv_proj", "kv", "key_value", "to_kv", "c_attn", "wkv", "linear_kv")
"""Keys and values made by one module, where the queries have another."""

_LONE_QUERY = ("q_attn", "q_proj", "query", "q", "to_q", "wq", "q_lin")
"""The queries' module where keys and values are made by one."""

_OUTPUT = (
    "o_proj",
    "out_proj",
    "o",
    "out_lin",
    "wo",
    "dense",
    "c_proj",
    "linear_out",
    "to_out.0",
    "to_out",
    "out",
    "proj",
    "output",
    "w_o",
    "out_linear",
    "fc_o",
    "projection",
)
"""The matrix after attention."""

_OUTPUT_NEXT_TO_ATTENTION = ("output.dense", "output", "o_proj", "out_proj")
"""The same, in the parent of the module that holds queries and keys (BERT)."""

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head")

_HEAD_WIDTH = (
    "head_dim",
    "attention_head_size",
    "key_value_proj_dim",
    "head_size",
    "d_kv",
    "depth",
    "dim_head",
)
"""Attributes of attention modules and configurations."""

_ROLES = ("query", "key", "value")
_ALTERNATING = ("query_key_value",)
"""Names of fused modules whose parts alternate by head."""
_ALTERNATING_CLASSES = ("DisentangledSelfAttention", "DebertaSelfAttention", "GPTBigCodeAttention")
_CODEGEN = "CodeGenAttention"
_CODEGEN_PIECES = 4


@dataclass(frozen=True)
class Layout:
    """One way to read a fused matrix.

    Args:
        name: "one after the other", "by head", "in four pieces".
        rows: those of each role.
        heads: of the queries.
        key_heads: of the keys.
    """

    name: str
    rows: Mapping[str, Rows]
    heads: int
    key_heads: int


def layouts(
    out: int, heads: int, width: int, *, name: str = "", class_name: str = ""
) -> list[Layout]:
    """Return the ways a matrix of `out` rows may hold queries, keys and values, likeliest first.

    The number of heads of the keys follows: out = (heads + 2·key_heads)·width.

    Args:
        out: rows of the matrix.
        heads: of the queries.
        width: rows of one head.
        name: what the module is called.
        class_name: the class of the attention that holds it.
    """
    rest = out - heads * width
    if rest <= 0 or rest % (2 * width):
        return []
    key_heads = rest // (2 * width)
    if heads % key_heads:
        return []
    each = heads // key_heads
    queries, keys = heads * width, key_heads * width

    def layout(name: str, rows: list[Rows], roles: tuple[str, ...] = _ROLES) -> Layout:
        return Layout(name, dict(zip(roles, rows, strict=True)), heads, key_heads)

    ways = [layout("one after the other", Rows.following(queries, keys, keys))]
    if key_heads > 1:  # with one head of keys both are one
        ways.append(layout("by head", Rows.following(each * width, width, width)))
    if name.lower() in _ALTERNATING or class_name in _ALTERNATING_CLASSES:
        ways.reverse()
    if heads == key_heads and heads % _CODEGEN_PIECES == 0:
        rows = Rows.following(*3 * [queries // _CODEGEN_PIECES])
        pieces = layout("in four pieces", rows, ("query", "value", "key"))
        ways = [pieces, *ways] if class_name == _CODEGEN else [*ways, pieces]
    return ways


Parts = dict[str, tuple[Projection, Rows | None]]
"""By role the projection, and the rows of it where it is fused."""


@dataclass
class FoundAttention:
    """One attention: the projection of each role, and which of its rows.

    Args:
        path: of the module.
        parts: by role the projection, and the rows of it where it is fused.
        heads: of the queries.
        key_heads: of the keys.
        latent: queries and keys come from compressed vectors.
        ways: other ways to read the fused matrix, likeliest first.
        notes: what is not measured and why, by module.
        checked: whether a forward pass saw these matrices make queries and keys.
    """

    path: str
    parts: Parts
    heads: int | None = None
    key_heads: int | None = None
    latent: bool = False
    ways: list[Layout] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    checked: bool = False


def attention_at(
    module: nn.Module, path: str, near: Near, above: Near, config: Any
) -> FoundAttention | None:
    """Return the attention a module computes with matrices it holds; None where it holds none.

    Args:
        module: may be an attention.
        path: where it is in the model.
        near: the parts of the module.
        above: the parts of the module that holds it.
        config: the configuration of this part of the model.
    """
    if isinstance(module, nn.MultiheadAttention):
        found = _of_torch(module, path)
    else:
        found = (
            _latent(module, path, near, config)
            or _separate(module, path, near, config)
            or _fused(module, path, near, config)
        )
    if found is None:
        return None
    if "output" not in found.parts:
        output = _output(near, above, found)
        if output is not None:
            found.parts["output"] = (output, None)
    only_query = {"query", "output"} >= found.parts.keys()
    if only_query and len(found.parts) < 2:
        return None  # something else is called so
    return found


def _projection(near: Near, name: str) -> Projection | None:
    return near[name].projection if name in near else None


def _separate(module: nn.Module, path: str, near: Near, config: Any) -> FoundAttention | None:
    both = next(
        (it for name in _FUSED_KEY_VALUE if (it := _projection(near, name)) and it.out % 2 == 0),
        None,
    )
    for names in _SEPARATE:
        made = [_projection(near, name) for name in names]
        # Some models use the keys as values.
        parts: Parts = {role: (it, None) for role, it in zip(_ROLES, made, strict=True) if it}
        if "query" in parts:
            if len(parts) == 1 and both is not None:
                parts |= _halves(both)
            return _with_heads(FoundAttention(path, parts), module, config)
    # Keys and values are made by one module (GPT-2's cross-attention).
    query = next((it for name in _LONE_QUERY if (it := _projection(near, name))), None)
    if both is None or query is None:
        return None
    found = FoundAttention(path, {"query": (query, None), **_halves(both)})
    return _with_heads(found, module, config)


def _halves(both: Projection) -> Parts:
    if both.why_not:
        return {"key": (both, None), "value": (both, None)}
    key, value = Rows.following(both.out // 2, both.out // 2)
    return {"key": (both, key), "value": (both, value)}


def _fused(module: nn.Module, path: str, near: Near, config: Any) -> FoundAttention | None:
    if any(part.startswith("conv") for part in module._modules):
        return None  # a convolution's or state space model's in_proj
    name = next((name for name in _FUSED if _projection(near, name) is not None), "")
    whole = _projection(near, name)
    if whole is None:
        return None
    if whole.why_not:
        return FoundAttention(path, {"query": (whole, None)}, notes={whole.path: whole.why_not})
    heads, width = head_count(module, config), head_width(module, config)
    if heads and not width and whole.out % (3 * heads) == 0:
        width = whole.out // (3 * heads)
    ways = []
    if heads and width:
        class_name = _class_name(module, config)
        ways = layouts(whole.out, heads, width, name=name, class_name=class_name)
    known = bool(ways)
    if not known:
        if whole.out != 3 * whole.inputs:
            return None
        if name in _ALTERNATING:
            why = "it is fused by head, and the number of heads is unknown"
            return FoundAttention(path, {}, notes={whole.path: why})
        ways = layouts(whole.out, 1, whole.inputs, name=name)
    found = FoundAttention(path, {}, ways=ways)
    read_as(found, ways[0], whole)
    if not known:
        found.heads = found.key_heads = None
    return found


def read_as(found: FoundAttention, way: Layout, whole: Projection) -> None:
    """Take the rows of a fused matrix as a layout has them."""
    found.parts |= {role: (whole, way.rows[role]) for role in _ROLES}
    found.heads, found.key_heads = way.heads, way.key_heads


def _latent(module: nn.Module, path: str, near: Near, config: Any) -> FoundAttention | None:
    """Return latent attention, whose keys and values are made from one compressed vector."""
    both = _projection(near, "kv_b_proj")
    query = _projection(near, "q_b_proj") or _projection(near, "q_proj")
    if both is None or query is None:
        return None
    parts: Parts = {"query": (query, None)}
    notes = {
        name: "in latent attention (MLA) it makes what queries, keys and values are made of"
        for name in ("q_a_proj", "kv_a_proj_with_mqa")
        if name in module._modules
    }
    own = _number(module, "qk_nope_head_dim") or _number(config, "qk_nope_head_dim")
    values = _number(module, "v_head_dim") or _number(config, "v_head_dim")
    heads = head_count(module, config)
    if own and values and heads and not both.why_not and both.out == heads * (own + values):
        key, value = Rows.following(own, values)
        parts |= {"key": (both, key), "value": (both, value)}
    else:
        notes[both.path] = both.why_not or "which of its rows make keys is unknown"
    return FoundAttention(path, parts, heads, heads, latent=True, notes=notes)


def _of_torch(module: nn.MultiheadAttention, path: str) -> FoundAttention:
    parts: Parts = {}
    whole = module._parameters.get("in_proj_weight")
    if whole is not None:
        made = parameter_projection(path, "in_proj_weight", whole)
        if made is not None and made.why_not:
            parts = {"query": (made, None)}
        elif made is not None:
            thirds = Rows.following(*3 * [made.out // 3])
            parts = {role: (made, rows) for role, rows in zip(_ROLES, thirds, strict=True)}
    for role in _ROLES:
        name = f"{role[0]}_proj_weight"
        own = module._parameters.get(name)
        made = None if own is None else parameter_projection(path, name, own)
        if made is not None:
            parts[role] = (made, None)
    return FoundAttention(path, parts, module.num_heads, module.num_heads)


def _output(near: Near, above: Near, found: FoundAttention) -> Projection | None:
    taken = {projection.name for projection, _ in found.parts.values()}
    inside = [_projection(near, name) for name in _OUTPUT]
    inside += [_projection(above, name) for name in _OUTPUT_NEXT_TO_ATTENTION]
    fits = (it for it in inside if it and it.name not in taken and _fits(it, found))
    return next(fits, None)


def _fits(output: Projection, found: FoundAttention) -> bool:
    """Return whether the output matrix takes what the heads gather, as far as that is known."""
    if output.why_not:
        return True
    value, rows = found.parts.get("value", (None, None))
    if value is None or value.why_not:
        return True
    width = value.out if rows is None else value.out // rows.of * (rows.stop - rows.start)
    if not found.heads or not found.key_heads:
        return output.inputs % width == 0
    return output.inputs == width // found.key_heads * found.heads


def _with_heads(found: FoundAttention, module: nn.Module, config: Any) -> FoundAttention:
    """Set the numbers of heads from the width of one, checked against the configuration."""
    query, _ = found.parts["query"]
    key, rows = found.parts.get("key", (None, None))
    width, said = head_width(module, config), head_count(module, config)
    if query.why_not or (key is not None and key.why_not):
        return found
    if not width and said and query.out % said == 0:
        width = query.out // said
    if not width or query.out % width:
        return found
    heads = query.out // width
    if said and heads == 2 * said:  # every head has a gate after its query (Qwen3-Next)
        found.parts["query"] = (query, Rows(0, width, 2 * width))
        heads = said
    elif said and heads != said and _number(module, "head_dim") is None:
        return found
    found.heads = heads
    if key is not None:
        keys = key.out if rows is None else rows.stop - rows.start
        if keys % width == 0 and keys and heads % (keys // width) == 0:
            found.key_heads = keys // width
        else:
            found.heads = None
    return found


def head_count(module: nn.Module, config: Any) -> int | None:
    """Return how many heads the queries have, by the module or its configuration."""
    return _first(module, _HEADS) or _first(config, _HEADS)


def head_width(module: nn.Module, config: Any) -> int | None:
    """Return how many rows of the queries' matrix one head has."""
    width = _first(module, _HEAD_WIDTH) or _first(config, _HEAD_WIDTH[:-2])
    if width:
        return width
    heads = head_count(module, config)
    total = _first(config, ("hidden_size", "n_embd", "d_model", "dim"))
    return total // heads if heads and total and total % heads == 0 else None


def _first(holder: Any, names: tuple[str, ...]) -> int | None:
    return next((number for name in names if (number := _number(holder, name))), None)


def _number(holder: Any, name: str) -> int | None:
    # Not getattr of a module, which wrappers answer from elsewhere.
    number = config_entry(vars(holder) if isinstance(holder, nn.Module) else holder, name)
    good = isinstance(number, int) and not isinstance(number, bool) and number > 0
    return number if good else None


def _class_name(module: nn.Module, config: Any) -> str:
    name = type(module).__name__
    model_type = config_entry(config, "model_type") if isinstance(config, Mapping) else None
    known = {"codegen": "CodeGenAttention", "deberta": "DisentangledSelfAttention"}
    if model_type == "gpt_bigcode":
        return "GPTBigCodeAttention"
    return known.get(str(model_type), name)

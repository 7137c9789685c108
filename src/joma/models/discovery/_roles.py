"""What the matrices of a module are to it: queries, keys, values and output, or those of an MLP.

Names say it, those of `names.toml`, and shapes confirm it.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from joma.models.architectures import config_entry
from joma.models.discovery._matrices import StoredMatrix, join, matrix_stored_as, reader_path
from joma.models.model_weights import Rows

_NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
_ATTENTION, _MLP = (SimpleNamespace(**_NAMES[part]) for part in ("attention", "mlp"))

Parts = dict[str, tuple[StoredMatrix, Rows | None]]
"""By role the matrix, and the rows of it where it is fused."""
Lookup = Callable[[str], StoredMatrix | None]
"""Returns the matrix at a path relative to a module, in lower case."""


@dataclass
class FoundAttention:
    """One attention.

    Args:
        path: of the module.
        parts: by role the matrix, and the rows of it where it is fused.
        heads: of the queries.
        key_heads: of the keys.
        latent: queries and keys come from compressed vectors.
        notes: what is not measured and why, by module.
    """

    path: str
    parts: Parts
    heads: int | None = None
    key_heads: int | None = None
    latent: bool = False
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FoundMlp:
    """One MLP, or all experts of one mixture.

    Args:
        path: of the module that holds its matrices.
        parts: by role the matrix, and the rows of it where it is fused.
        down_path: the module whose input is the hidden activations.
        experts: how many matrices are stacked in each parameter; None where they are not.
    """

    path: str
    parts: Parts
    down_path: str | None = None
    experts: int | None = None


def attention_at(
    module: nn.Module, path: str, inside: Lookup, above: Lookup, config: Any
) -> FoundAttention | None:
    """Return the attention a module computes with matrices it holds; None where it holds none.

    Args:
        module: may be an attention.
        path: where it is in the model.
        inside: finds the matrices of the module.
        above: finds those of the module that holds it.
        config: the configuration of this part of the model.
    """
    if isinstance(module, nn.MultiheadAttention):
        found = _of_torch(module, path)
    else:
        found = _latent(module, path, inside, config) or _separate(module, path, inside, config)
        found = found or _fused(module, path, inside, config)
    if found is None:
        return None
    taken = {matrix.name for matrix, _ in found.parts.values()}
    outputs = [*map(inside, _ATTENTION.output), *map(above, _ATTENTION.output_next_to_it)]
    for output in outputs:
        if output is not None and output.name not in taken and _fits(output, found):
            found.parts["output"] = (output, None)
            break
    alone = len(found.parts) == 1 and "query" in found.parts and not found.notes
    return None if alone else found  # else something is called so


def _separate(module: nn.Module, path: str, inside: Lookup, config: Any) -> FoundAttention | None:
    both = next(
        (it for it in map(inside, _ATTENTION.fused_key_value) if it and it.out % 2 == 0), None
    )
    for names in (*_ATTENTION.separate, *((name,) for name in _ATTENTION.lone_query)):
        # Some models use the keys as values, or the keys of another layer.
        made = zip(("query", "key", "value"), map(inside, names), strict=False)
        parts: Parts = {role: (it, None) for role, it in made if it is not None}
        if "query" in parts and len(parts) == 1 and both is not None:
            key, value = Rows.following(both.out // 2, both.out // 2)
            parts |= {"key": (both, key), "value": (both, value)}
        if len(parts) > 1 or (parts.keys() == {"query"} and len(names) > 1):
            return _with_heads(FoundAttention(path, parts), module, config)
    return None


def _fused(module: nn.Module, path: str, inside: Lookup, config: Any) -> FoundAttention | None:
    if any(name.startswith("conv") for name in module._modules):
        return None  # a convolution's or state space model's in_proj
    name = next((name for name in _ATTENTION.fused if inside(name) is not None), "")
    whole = inside(name) if name else None
    if whole is None:
        return None
    heads, width = _entry(module, config, _ATTENTION.heads), _head_width(module, config)
    if heads and not width and whole.out % (3 * heads) == 0:
        width = whole.out // (3 * heads)
    if heads and width:
        key_heads = (whole.out - heads * width) // (2 * width)
        if key_heads < 1 or heads % key_heads or (heads + 2 * key_heads) * width != whole.out:
            return None
        rows = _fused_rows(name, config, heads, key_heads, width)
        parts: Parts = {role: (whole, part) for role, part in rows.items()}
        return FoundAttention(path, parts, heads, key_heads)
    if whole.out != 3 * whole.inputs:
        return None
    if name in _ATTENTION.by_head_names:
        why = "it is fused by head, and the number of heads is unknown"
        return FoundAttention(path, {}, notes={whole.path: why})
    return FoundAttention(path, _thirds(whole))


def _fused_rows(
    name: str, config: Any, heads: int, key_heads: int, width: int
) -> Mapping[str, Rows]:
    """Return the rows of queries, keys and values in one matrix.

    With several heads of keys, and all by head, each head of keys follows the queries that use it.
    """
    model_type = str(config_entry(config, "model_type"))
    if model_type in _ATTENTION.in_four_models:
        return dict(
            zip(("query", "value", "key"), Rows.following(*3 * [heads * width // 4]), strict=True)
        )
    each = heads // key_heads
    sizes = (heads * width, key_heads * width, key_heads * width)
    if key_heads > 1 and (
        name in _ATTENTION.by_head_names or model_type in _ATTENTION.by_head_models
    ):
        sizes = (each * width, width, width)
    return dict(zip(("query", "key", "value"), Rows.following(*sizes), strict=True))


def _thirds(whole: StoredMatrix) -> Parts:
    rows = Rows.following(*3 * [whole.out // 3])
    return {role: (whole, part) for role, part in zip(("query", "key", "value"), rows, strict=True)}


def _latent(module: nn.Module, path: str, inside: Lookup, config: Any) -> FoundAttention | None:
    """Return latent attention, whose keys and values are made from one compressed vector."""
    both, query = inside("kv_b_proj"), inside("q_b_proj") or inside("q_proj")
    if both is None or query is None:
        return None
    notes = {
        it.path: "in latent attention (MLA) it makes what queries, keys and values are made of"
        for it in map(inside, ("q_a_proj", "kv_a_proj_with_mqa"))
        if it is not None
    }
    heads = _entry(module, config, _ATTENTION.heads)
    own, values = (_entry(module, config, [name]) for name in ("qk_nope_head_dim", "v_head_dim"))
    parts: Parts = {"query": (query, None)}
    if own and values and heads and both.out == heads * (own + values):
        key, value = Rows.following(own, values)
        parts |= {"key": (both, key), "value": (both, value)}
    else:
        notes[both.path] = "which of its rows make keys is unknown"
    return FoundAttention(path, parts, heads, heads, latent=True, notes=notes)


def _of_torch(module: nn.MultiheadAttention, path: str) -> FoundAttention:
    parts: Parts = {}
    names = {"query": "q_proj_weight", "key": "k_proj_weight", "value": "v_proj_weight"}
    for role, name in {"": "in_proj_weight", **names}.items():
        own = module._parameters.get(name)
        made = None if own is None else matrix_stored_as(own, join(path, name), join(path, name))
        if made is not None:
            parts |= {role: (made, None)} if role else _thirds(made)
    return FoundAttention(path, parts, module.num_heads, module.num_heads)


def _fits(output: StoredMatrix, found: FoundAttention) -> bool:
    """Return whether the output matrix takes what the heads gather, as far as that is known."""
    value, rows = found.parts.get("value", (None, None))
    if value is None:
        return True
    width = value.out if rows is None else value.out // rows.of * (rows.stop - rows.start)
    if not found.heads or not found.key_heads:
        return output.inputs % width == 0
    return output.inputs == width // found.key_heads * found.heads


def _with_heads(found: FoundAttention, module: nn.Module, config: Any) -> FoundAttention:
    """Set the numbers of heads from the width of one, checked against the configuration."""
    if "query" not in found.parts:
        return found
    query, _ = found.parts["query"]
    key, rows = found.parts.get("key", (None, None))
    width, said = _head_width(module, config), _entry(module, config, _ATTENTION.heads)
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
    if key is None:
        found.heads = heads
        return found
    keys = key.out if rows is None else rows.stop - rows.start
    if keys and keys % width == 0 and heads % (keys // width) == 0:
        found.heads, found.key_heads = heads, keys // width
    return found


def _head_width(module: nn.Module, config: Any) -> int | None:
    """Return how many rows of the queries' matrix one head has."""
    if width := _entry(module, config, _ATTENTION.head_width):
        return width
    heads, total = (
        _entry(module, config, _ATTENTION.heads),
        _entry(None, config, _ATTENTION.width),
    )
    return total // heads if heads and total and total % heads == 0 else None


def _entry(module: nn.Module | None, config: Any, names: Sequence[str]) -> int | None:
    """Return a positive number by the attributes of a module, else of its configuration."""
    every = [(holder, name) for holder in (module, config) for name in names]
    return next((it for holder, name in every if (it := _number(holder, name))), None)


def _number(holder: Any, name: str) -> int | None:
    # Not getattr of a module, which wrappers answer from elsewhere.
    number = config_entry(vars(holder) if isinstance(holder, nn.Module) else holder, name)
    good = isinstance(number, int) and not isinstance(number, bool) and number > 0
    return number if good else None


def mlp_at(
    module: nn.Module,
    path: str,
    inside: Lookup,
    stacks: Mapping[str, tuple[str, Tensor]],
    taken: set[str],
    config: Any,
) -> FoundMlp | None:
    """Return the MLP a module holds, or its experts as stacks of matrices; None where it has none.

    Args:
        module: may be an MLP, or a block that holds an MLP's matrices itself.
        path: where it is in the model.
        inside: finds its matrices.
        stacks: name and parameter of stacks of matrices, by path in lower case.
        taken: names of parameters that have a role already.
        config: the configuration of this part of the model.
    """
    for names in (*_MLP.gated, *_MLP.plain):
        if names[0].isdigit() and not isinstance(module, nn.Sequential):
            continue
        made = [it for it in map(inside, names) if it is not None]
        if len(made) < len(names) or {it.name for it in made} & taken:
            continue
        parts = _gated(*made) if len(made) == 3 else _plain(*made)
        if parts is not None:
            return FoundMlp(path, parts, made[-1].holder)
    if "attention" in path or "attn" in path:
        return None  # experts of attention's own projections (JetMoE)
    for names in _MLP.experts:
        lower, down = (stacks.get(join(path, name).lower()) for name in names)
        if lower is not None and down is not None and len(lower[1]) == len(down[1]):
            known = getattr(module, "is_transposed", None)
            alternating = config_entry(config, "model_type") in _MLP.alternating_models
            for transposed in (known,) if isinstance(known, bool) else (False, True):
                first, last = _slice(*lower, transposed), _slice(*down, transposed)
                parts = _plain(first, last, alternating=alternating)
                if parts is not None:
                    return FoundMlp(path, parts, experts=len(lower[1]))
    return None


def _gated(lower: StoredMatrix, up: StoredMatrix, down: StoredMatrix) -> Parts | None:
    if (lower.out, lower.inputs) != (up.out, up.inputs) or not _closes(lower, down):
        return None
    return {"mlp_lower": (lower, None), "mlp_up": (up, None), "mlp_down": (down, None)}


def _plain(lower: StoredMatrix, down: StoredMatrix, *, alternating: bool = False) -> Parts | None:
    """Return roles of two matrices; the first may hold a gate and its partner."""
    if _closes(lower, down):
        return {"mlp_lower": (lower, None), "mlp_down": (down, None)}
    if lower.out != 2 * down.inputs or lower.inputs != down.out:
        return None
    half = 1 if alternating else down.inputs
    gate, up = Rows.following(half, half)
    return {"mlp_lower": (lower, gate), "mlp_up": (lower, up), "mlp_down": (down, None)}


def _closes(lower: StoredMatrix, down: StoredMatrix) -> bool:
    """Return whether the second matrix leads back to where the first began."""
    return lower.out == down.inputs and lower.inputs == down.out


def _slice(name: str, stack: Tensor, transposed: bool) -> StoredMatrix:
    out, inputs = stack.shape[:0:-1] if transposed else stack.shape[1:]
    return StoredMatrix(reader_path(name.removesuffix(".weight")), name, out, inputs, transposed)

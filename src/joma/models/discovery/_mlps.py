"""Finding MLPs and experts, and which of their matrices comes first, gates, and comes last."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from joma.models.discovery._projections import Child, Projection, join, reader_path, unreadable
from joma.models.parts import Rows

# The names by which models call the matrices of an MLP.

_GATED = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("w1", "w2", "w3"),
    ("w1", "v1", "w2"),
    ("wi_0", "wi_1", "wo"),
    ("gate", "up", "down"),
    ("gate_linear", "up_linear", "down_linear"),
    ("linear_1", "linear_v", "linear_2"),
    ("fc1_g", "fc1_x", "fc2"),
)
"""The gate, its partner and the second matrix of a gated MLP."""

_PLAIN = (
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("fc_in", "fc_out"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("lin1", "lin2"),
    ("wi", "wo"),
    ("intermediate_dense", "output_dense"),
    ("intermediate.dense", "output.dense"),
    ("ffn", "ffn_output"),
    ("linear1", "linear2"),
    ("linear_1", "linear_2"),
    ("layer_1", "layer_2"),
    ("input_linear", "output_linear"),
    ("linear_in", "linear_out"),
    ("weights_in", "weights_out"),
    ("w_in", "w_out"),
    ("w12", "w3"),
    ("w1", "w2"),
    ("up", "down"),
    ("fc", "proj"),
    ("0", "1"),
    ("0", "2"),
    ("0", "3"),
)
"""The two matrices of an MLP; the first may hold a gate and its partner, one after the other."""

_EXPERTS = (
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("w1", "w2"),
)
"""The same as stacks of matrices, (experts, …, …)."""


@dataclass(frozen=True)
class FoundMlp:
    """One MLP, or all experts of one mixture.

    Args:
        path: of the module that holds its matrices.
        parts: by role the projection, and the rows of it where it is fused.
        down_path: the module whose input is the hidden activations.
        experts: how many matrices are stacked in each parameter; None where they are not.
    """

    path: str
    parts: Mapping[str, tuple[Projection, Rows | None]]
    down_path: str | None = None
    experts: int | None = None


def mlp_at(
    module: nn.Module, path: str, near: Mapping[str, Child], taken: set[str]
) -> FoundMlp | None:
    """Return the MLP a module holds, or its experts as stacks of matrices; None where it has none.

    Args:
        module: may be an MLP, or a block that holds an MLP's matrices itself.
        path: where it is in the model.
        near: its parts.
        taken: names of parameters that have a role already.
    """
    for names in (*_GATED, *_PLAIN):
        if names[0].isdigit() and not isinstance(module, nn.Sequential):
            continue
        made = [near[name].projection for name in names if name in near]
        found = [it for it in made if it is not None]
        if len(found) < len(names) or {it.name for it in found} & taken:
            continue
        parts = _gated(*found) if len(found) == 3 else _plain(*found)
        if parts is not None:
            return FoundMlp(path, parts, near[names[-1]].path)
    return _experts(module, path, near)


Parts = dict[str, tuple[Projection, Rows | None]]


def _gated(lower: Projection, up: Projection, down: Projection) -> Parts | None:
    odd = lower.why_not or up.why_not or down.why_not
    same = (lower.out, lower.inputs) == (up.out, up.inputs)
    if not odd and not (same and _closes(lower, down)):
        return None
    return {"mlp_lower": (lower, None), "mlp_up": (up, None), "mlp_down": (down, None)}


def _experts(module: nn.Module, path: str, near: Mapping[str, Child]) -> FoundMlp | None:
    if "attention" in path or "attn" in path:
        return None  # experts of attention's own projections (JetMoE)
    for names in _EXPERTS:
        lower, down = (_stack(module, path, near, name) for name in names)
        if lower is None or down is None:
            continue
        for stack in (lower, down):
            if why_not := unreadable(stack[1]):
                bad = Projection(reader_path(stack[0]), stack[0], 0, 0, why_not=why_not)
                return FoundMlp(path, {"mlp_down": (bad, None)}, experts=1)
        number = lower[1].shape[0]
        if down[1].shape[0] != number:
            continue
        known = getattr(module, "is_transposed", None)
        for transposed in (known,) if isinstance(known, bool) else (False, True):
            first, last = _slice(*lower, transposed), _slice(*down, transposed)
            joined = getattr(module, "is_concatenated", True) is not False
            parts = _plain(first, last, concatenated=joined)
            if parts is not None:
                return FoundMlp(path, parts, experts=number)
    return None


def _plain(lower: Projection, down: Projection, *, concatenated: bool = True) -> Parts | None:
    """Return roles of two matrices; the first may hold a gate and its partner."""
    if lower.why_not or down.why_not or _closes(lower, down):
        return {"mlp_lower": (lower, None), "mlp_down": (down, None)}
    if lower.out == 2 * down.inputs and lower.inputs == down.out:
        # Where they are not concatenated, every gate is followed by its partner (gpt_oss).
        half = down.inputs if concatenated else 1
        gate, up = Rows.following(half, half)
        return {"mlp_lower": (lower, gate), "mlp_up": (lower, up), "mlp_down": (down, None)}
    return None


def _closes(lower: Projection, down: Projection) -> bool:
    """Return whether the second matrix leads back to where the first began."""
    return lower.out == down.inputs and lower.inputs == down.out


def _stack(
    module: nn.Module, path: str, near: Mapping[str, Child], name: str
) -> tuple[str, Tensor] | None:
    """Return a stack of matrices: a parameter of the module, or the weight of a part of it."""
    own, where = module._parameters.get(name), join(path, name)
    if own is None and name in near:
        own, where = near[name].module._parameters.get("weight"), join(near[name].path, "weight")
    if own is None or (not unreadable(own) and own.ndim != 3):
        return None
    return where, own


def _slice(name: str, stack: Tensor, transposed: bool) -> Projection:
    out, inputs = stack.shape[1:]
    if transposed:
        out, inputs = inputs, out
    return Projection(reader_path(name.removesuffix(".weight")), name, out, inputs, transposed)

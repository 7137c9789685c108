"""Finding MLPs and experts, and which of their matrices comes first, gates, and comes last."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from joma.models.discovery import _names
from joma.models.discovery._projections import (
    Projection,
    child,
    child_projection,
    join,
    reader_path,
    unreadable,
)
from joma.models.parts import Rows


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


def mlp_at(module: nn.Module, path: str, taken: set[str]) -> FoundMlp | None:
    """Return the MLP a module holds; None where it holds none.

    Args:
        module: may be an MLP, or a block that holds an MLP's matrices itself.
        path: where it is in the model.
        taken: names of parameters that have a role already.
    """
    for names in _names.GATED:
        made = [child_projection(module, path, name) for name in names]
        lower, up, down = made
        if lower is None or up is None or down is None:
            continue
        if {it.name for it in (lower, up, down)} & taken:
            continue
        odd = lower.why_not or up.why_not or down.why_not
        same = (lower.out, lower.inputs) == (up.out, up.inputs)
        if odd or (same and _closes(lower, down)):
            parts = {"mlp_lower": (lower, None), "mlp_up": (up, None), "mlp_down": (down, None)}
            return FoundMlp(path, parts, _path(module, path, names[2]))
    for names in _names.PLAIN:
        if names[0].isdigit() and not isinstance(module, nn.Sequential):
            continue
        lower, down = (child_projection(module, path, name) for name in names)
        if lower is None or down is None or {lower.name, down.name} & taken:
            continue
        parts = _plain(lower, down)
        if parts is not None:
            return FoundMlp(path, parts, _path(module, path, names[1]))
    return None


def experts_at(module: nn.Module, path: str) -> FoundMlp | None:
    """Return the experts a module holds as stacks of matrices; None where it holds none."""
    if "attention" in path or "attn" in path:
        return None  # experts of attention's own projections (JetMoE)
    for names in _names.EXPERTS:
        lower, down = (_stack(module, path, name) for name in names)
        if lower is None or down is None:
            continue
        for stack in (lower, down):
            if why_not := unreadable(stack[1]):
                bad = Projection(reader_path(stack[0]), stack[0], 0, 0, why_not=why_not)
                return FoundMlp(path, {"mlp_down": (bad, None)}, experts=1)
        number = lower[1].shape[0]
        if down[1].shape[0] != number:
            continue
        for transposed in (False, True):
            first, last = _slice(*lower, transposed), _slice(*down, transposed)
            known = getattr(module, "is_transposed", None)
            if isinstance(known, bool) and known != transposed:
                continue
            parts = _plain(first, last, getattr(module, "is_concatenated", True) is not False)
            if parts is not None:
                return FoundMlp(path, parts, experts=number)
    return None


def _plain(
    lower: Projection, down: Projection, concatenated: bool = True
) -> dict[str, tuple[Projection, Rows | None]] | None:
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


def _stack(module: nn.Module, path: str, name: str) -> tuple[str, Tensor] | None:
    """Return a stack of matrices: a parameter of the module, or the weight of a part of it."""
    own = module._parameters.get(name)
    where = join(path, name)
    if own is None:
        inside = child(module, path, name)
        if inside is None:
            return None
        own, where = inside[0]._parameters.get("weight"), join(inside[1], "weight")
    if own is None or (not unreadable(own) and own.ndim != 3):
        return None
    return where, own


def _slice(name: str, stack: Tensor, transposed: bool) -> Projection:
    out, inputs = stack.shape[1:]
    if transposed:
        out, inputs = inputs, out
    return Projection(reader_path(name.removesuffix(".weight")), name, out, inputs, transposed)


def _path(module: nn.Module, path: str, name: str) -> str | None:
    inside = child(module, path, name)
    return None if inside is None else inside[1]

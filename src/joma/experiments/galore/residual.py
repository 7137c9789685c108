"""GaLore that also follows the part of the gradient outside its subspace, scaled."""

from typing import Any

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.kernels.galore import lift
from joma.kernels.moments import adam_changes
from joma.optim import GaLoreAdamW

GROWTH = 1.01
"""How much longer the residual part of an update may be than that of the step before."""

_LENGTH = "residual_length"


class ResidualGaLoreAdamW(GaLoreAdamW):
    """GaLore with residual scaling, after the idea of Fira (Chen et al., 2024).

    Adam takes the projected gradient R = PᵀG to ψ(R). The rest of the gradient, G − PR, is added to
    the update, each column j scaled as Adam scales that column of R:

        W ← W − η · scale · (P ψ(R) + S),  S_j = (G − PR)_j ‖ψ(R)_j‖ / ‖R_j‖.

    Where ‖S‖ exceeds `GROWTH` times its length at the step before, S is shortened to that. For a
    projection on the right, R = GP, rows take the place of columns. The state grows by one number
    for each matrix. Gradients must be there in `step`: neither per layer nor clipped.
    """

    def __init__(self, *parameters: Any, **settings: Any) -> None:
        for name in ("per_layer", "clip_norm"):
            if settings.get(name):
                raise JomaError(f"{name} must not be given with residual scaling")
        super().__init__(*parameters, **settings)

    moves_at_once = False

    def _move(self, slot: Any, gradient: Tensor) -> None:
        if slot.side is None:
            super()._move(slot, gradient)
            return
        work, (weights, state) = self._work(slot, gradient), (slot.weights, slot.state)
        changes = adam_changes(state, gradient, slot.group, work.seed)
        change = torch.cat([one for _, one in changes])
        moved = residual_move(slot.parameter.grad, gradient, change, work.basis, slot.side)
        move, state[_LENGTH] = limited(moved, state.get(_LENGTH))
        lift(weights, work.basis, change, slot.side, work.kept, slot.group["scale"])
        weights.add_(move.to(weights.dtype), alpha=work.kept * slot.group["scale"])


def residual_move(
    gradient: Tensor, projected: Tensor, change: Tensor, basis: Tensor, side: str
) -> Tensor:
    """Return by what the residual moves a matrix, before the limit.

    Args:
        gradient: G (m, n).
        projected: R, (r, n) on the left, (m, r) on the right.
        change: −η ψ(R), by what Adam moves in the space of R.
        basis: P.
        side: "left" or "right".
    """
    along = 0 if side == "left" else 1
    inside = basis @ projected if side == "left" else projected @ basis.mT
    lengths = torch.linalg.vector_norm(projected, dim=along, keepdim=True)
    moves = torch.linalg.vector_norm(change, dim=along, keepdim=True)
    ratio = torch.where(lengths > 0, moves / lengths, torch.zeros_like(lengths))
    return (inside - gradient) * ratio


def limited(move: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a move that is at most `GROWTH` times as long as the one before, and its length.

    Args:
        move: The move.
        before: Length of the move of the step before; None or 0 for no limit.
    """
    length = torch.linalg.vector_norm(move)
    if before is None:
        return move, length
    longest = torch.where(before > 0, GROWTH * before, length)
    factor = torch.where(length > longest, longest / length, torch.ones_like(length))
    return move * factor, torch.minimum(length, longest)

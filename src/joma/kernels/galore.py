"""A step of AdamW in the subspace of a gradient: torch operations, and a kernel for bfloat16."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from joma.kernels.arguments import ALIGNED, Side, Work
from joma.kernels.choice import has_kernels
from joma.kernels.moments import adam_changes

NOTHING = 1e-10
"""Energy along a direction, over that along the strongest one, below which it is rounding: products
in float32 have relative errors of about 1e-6, whose square is 1e-12."""


def step(works: Sequence[Work]) -> None:
    """Move matrices by AdamW in their subspaces: those that fit on a GPU by one kernel together."""
    kinds: dict[Any, list[Work]] = {}
    for work in works:
        if _fits(work):
            key = work.state["exp_avg"].dtype, work.weights.device
            kinds.setdefault(key, []).append(work)
            continue
        left = work.side == "left"
        projected = (
            product(work.basis.mT, work.gradient) if left else product(work.gradient, work.basis)
        )
        move(work, without_rounding(projected, work.side))
    if kinds:
        from joma.kernels import _galore_step

        for same in kinds.values():
            _galore_step.step(same)


def move(work: Work, projected: Tensor) -> None:
    """Move a matrix by AdamW, given the projected gradient R."""
    changes = [change for _, change in adam_changes(work.state, projected, work.group, work.seed)]
    change = changes[0] if len(changes) == 1 else torch.cat(changes)
    lift(work.weights, work.basis, change, work.side, work.kept, work.group["scale"])


def lift(
    weights: Tensor, basis: Tensor, change: Tensor, side: Side, kept: float, scale: float
) -> None:
    """Move weights by a change in the subspace, W ← kept · (W + scale · PC) or (W + scale · CPᵀ).

    The weights decay after the step, as in the code of the paper.
    """
    left, right = (basis, change) if side == "left" else (change, basis.mT)
    left, right = left.to(weights.dtype), right.to(weights.dtype)
    weights.addmm_(left, right, beta=kept, alpha=kept * scale)


def without_rounding(projected: Tensor, side: Side, processes: Any = None) -> Tensor:
    """Return R with zeros along directions in which it is only a rounding error.

    A gradient of a lower rank than that of the basis leaves such directions. Adam would divide
    these rounding errors by themselves and move the weights along them at full speed.

    Args:
        projected: R, or this process's rows of it.
        side: Side of the basis.
        processes: The processes that have the other rows, if any.
    """
    squares = direction_energies(projected, side)
    if processes is not None:
        dist.all_reduce(squares, group=processes)
    kept = (squares > NOTHING * squares.max()).to(projected.dtype)
    return projected * (kept[:, None] if side == "left" else kept)


def direction_energies(projected: Tensor, side: Side) -> Tensor:
    """Return the sum of squares of R along each direction of the basis, in float64."""
    across = 1 if side == "left" else 0
    return torch.linalg.vector_norm(projected, dim=across, dtype=torch.float64).square()


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return a product in float32, of numbers in the lower of both types on a GPU."""
    if left.dtype == torch.float32 and right.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        low = left.dtype if left.dtype != torch.float32 else right.dtype
        return torch.mm(left.to(low), right.to(low), out_dtype=torch.float32)
    return left.float() @ right.float()


def _fits(work: Work) -> bool:
    """Return whether the kernel takes a matrix: bfloat16, aligned, without empty directions."""
    weights, gradient, state = work.weights, work.gradient, work.state
    return (
        has_kernels(gradient.device)
        and all(
            one.dtype == torch.bfloat16 and one.is_contiguous()
            for one in (weights, gradient, work.basis)
        )
        and state["exp_avg"].dtype in (torch.bfloat16, torch.uint8)
        and work.basis.shape[1] % ALIGNED == 0
        and (gradient.data_ptr() % 16 == 0 or weights.shape[1] % ALIGNED != 0)
        and weights.numel() < 1 << 31  # the kernel counts in 32 bits
        and not int(state.get("null_directions", 0))
    )

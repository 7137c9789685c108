"""The greatest singular value of a matrix that has moved a little, from what is known of before.

Below: the greatest Rayleigh quotient within the old top vectors. Above: σ₁ moves by at most the
norm of the change, σ₁(A) ≤ σ₁(A₀) + ‖A − A₀‖, and a change D is seen in the sketch Ωᵀ·D that an old
Gaussian Ω of b columns makes of it: with g = uᵀΩ for its top singular vector u, ‖Ωᵀ·D‖ ≥ ‖D‖·‖g‖,
so ‖D‖² is at most ‖Ωᵀ·D‖² over the quantile of ‖g‖², a chi-square variable. Ω must not have
influenced the change, as nothing that only measures has.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from joma.probes.spectrum._krylov import chi_square_floor
from joma.probes.spectrum._operator import Operator

_VECTORS = 8
_SKETCH = 24
_ROUNDS = 6


@dataclass(frozen=True, eq=False)
class Anchor:
    """What is kept of a matrix: its leading vectors, a random start and what it made of it.

    Attributes:
        block_SB: leading vectors, then the columns of the start.
        vectors: how many are leading vectors.
        sketch_TB: Aᵀ of the start.
        ceiling: upper bound of σ₁.
    """

    block_SB: Tensor
    vectors: int
    sketch_TB: Tensor
    ceiling: float


def anchors(linear: Operator, top_LS: Tensor, ceilings: list[float], seed: int) -> list[Anchor]:
    """What to keep of each of L matrices, whose top vectors are known."""
    dice = torch.Generator(linear.device).manual_seed(seed + 1)  # not the start that found them
    like = {"generator": dice, "device": linear.device, "dtype": linear.dtype}
    more = torch.randn(linear.count, linear.side, min(_VECTORS, linear.side) - 1, **like)
    vectors = torch.cat([top_LS.to(linear.dtype).unsqueeze(-1), more], -1)
    for _ in range(_ROUNDS):
        vectors = torch.linalg.qr(linear.apply(vectors)).Q
    start = torch.randn(linear.count, linear.side, _SKETCH, **like)
    sketch = linear.across(start)
    block = torch.cat([torch.linalg.qr(vectors).Q, start], -1)
    return [
        Anchor(b, vectors.shape[-1], s, ceiling)
        for b, s, ceiling in zip(block, sketch, ceilings, strict=True)
    ]


def refreshed(linear: Operator, anchor: Anchor, failure: float) -> tuple[float, float, float]:
    """Lower and upper bound of σ₁² and ‖A‖_F of the matrix as it is now."""
    side, kept = linear.side, len(anchor.block_SB)
    if kept != side or anchor.block_SB.device != linear.device:
        raise ValueError(
            f"start must come from a matrix of the same shape on {linear.device}, got one with a "
            f"shorter side of {kept} on {anchor.block_SB.device}, not {side}"
        )
    image = linear.across(anchor.block_SB.to(linear.dtype).unsqueeze(0))[0].double()
    if len(image) != len(anchor.sketch_TB):
        raise ValueError(
            f"start must come from a matrix of the same shape, got one with a longer side of "
            f"{len(anchor.sketch_TB)}, not {len(image)}"
        )
    image[:, anchor.vectors :] -= anchor.sketch_TB
    # Both Gram matrices stand on the diagonal of one; one wait for the device.
    packed = torch.cat([(image.mT @ image).reshape(-1), linear.frobenius()]).cpu()
    norm = float(packed[-1])
    if not bool(packed.isfinite().all()):
        return math.nan, math.nan, norm
    gram = packed[:-1].view(image.shape[-1], -1)
    k = anchor.vectors
    floor = float(torch.linalg.eigvalsh(gram[:k, :k])[-1])
    seen = float(torch.linalg.eigvalsh(gram[k:, k:])[-1])
    moved = math.sqrt(max(seen, 0.0) / chi_square_floor(_SKETCH, failure))
    ceiling = min(anchor.ceiling + moved, norm) * (1 + 1e-5)
    return floor, max(ceiling**2, floor), norm

"""The greatest singular values of many small matrices, by squaring their Gram matrices.

Let P₀ = G/‖G‖_F for a Gram matrix G, and P_{j+1} = P_j²/n_j with n_j = ‖P_j²‖_F. The eigenvectors
stay, so the top eigenvalue has

    ln λ(P₀) = Σ_{j<k} 2^{−j−1} ln n_j + 2^{−k} ln λ(P_k),

and since ‖P_k‖_F = 1 and no eigenvalue is negative, 1/tr P_k ≤ λ(P_k) ≤ 1, where tr P_k ≤ √s for s
rows: the bounds close to a factor of s^{2^{−k}/2}, whatever the spectrum. It is matrix products all
the way, of which a GPU makes those of many matrices at once.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from joma.probes.spectrum._arithmetic import power_of_two

_CHUNK = 1 << 22
_PIECE = 1 << 24
"""Numbers of matrices that are worked on at a time."""
_EPS = 2.0**-53


class Tops(NamedTuple):
    """Of L matrices; floor and ceiling are 0 for a matrix of zeros.

    Attributes:
        floor: σ₁²/‖A‖_F² is at least this, (L,).
        ceiling: and at most this, (L,).
        norm: ‖A‖_F, (L,).
    """

    floor: Tensor
    ceiling: Tensor
    norm: Tensor


def tops(matrices_LMN: Tensor, tolerance: float) -> Tops:
    """Bounds of the greatest singular values, by float64 arithmetic, rounding included.

    Args:
        matrices_LMN: of one shape, on one device; NaN and infinity give NaN.
        tolerance: the bounds lie no further apart than this share.
    """
    count = max(1, _PIECE // matrices_LMN[0].numel())
    pieces = [_tops(piece_LMN, tolerance) for piece_LMN in matrices_LMN.split(count)]
    return Tops(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _tops(matrices_LMN: Tensor, tolerance: float) -> Tops:
    power_LSS, scale_L = _grams(matrices_LMN)
    side, inner = power_LSS.shape[-1], max(matrices_LMN.shape[1:])
    total_L = power_LSS.diagonal(dim1=-2, dim2=-1).sum(-1)
    size_L = _norms(power_LSS)
    power_LSS /= size_L.clamp(min=1e-300)[:, None, None]
    log_L = torch.zeros_like(size_L)
    squarings = max(1, math.ceil(math.log2(math.log(side + 1) / tolerance)))
    for j in range(squarings):
        power_LSS = power_LSS @ power_LSS
        n_L = _norms(power_LSS).clamp(min=1e-300)
        power_LSS /= n_L[:, None, None]
        log_L += n_L.log() * 2.0 ** (-j - 1)
    trace_L = power_LSS.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(1.0, side**0.5)
    ceiling_L = size_L / total_L.clamp(min=1e-300) * log_L.exp()
    floor_L = ceiling_L * trace_L ** -(2.0**-squarings)
    # |fl(AAᵀ) − AAᵀ| ≤ n·eps·|A||A|ᵀ, of norm n·eps·‖A‖_F² at most, and its trace, ‖A‖_F², is off
    # by n·eps, too. |fl(P²) − P²| ≤ s·eps·|P|², of norm s·eps, beside λ(P²) ≥ 1/s; that of the j-th
    # squaring counts 2^{−j−1}.
    rounding = (1.1 * inner * (1 + ceiling_L) + ceiling_L * (4 * side * side + 64)) * _EPS
    return Tops(
        (floor_L - rounding).clamp(min=0) * (total_L > 0),
        (ceiling_L + rounding) * (total_L > 0),
        total_L.sqrt() * scale_L,
    )


def _grams(matrices_LMN: Tensor) -> tuple[Tensor, Tensor]:
    """A·Aᵀ/c² on the shorter side, (L, S, S), and c, a power of two near the largest entry."""
    low_L, high_L = torch.aminmax(matrices_LMN.flatten(1), dim=-1)
    most_L = torch.maximum(high_L.double(), -low_L.double())
    scale_L = power_of_two(most_L.clamp(1e-300, 1e300).log2().floor()) + 0 * most_L  # NaN stays
    if matrices_LMN.shape[1] > matrices_LMN.shape[2]:
        matrices_LMN = matrices_LMN.mT
    count, side, _ = matrices_LMN.shape
    gram_LSS = scale_L.new_zeros(count, side, side)
    for part_LSC in matrices_LMN.split(max(1, _CHUNK // (count * side)), dim=-1):
        wide_LSC = part_LSC.double() / scale_L[:, None, None]
        gram_LSS.baddbmm_(wide_LSC, wide_LSC.mT)
    return gram_LSS, scale_L


def _norms(matrices_LSS: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices_LSS.flatten(1), dim=-1)

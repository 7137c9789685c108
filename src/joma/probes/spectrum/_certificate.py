"""Upper bounds of the greatest singular value that are proofs, not probabilities.

**Cholesky.** If c·1 − A·Aᵀ has a Cholesky factor, it has no negative eigenvalue, so σ₁² ≤ c. In
floating point the factor proves it for c plus what the rounding of the Gram matrix and of the
factorisation can amount to (Rump, Verification of positive definiteness, BIT 2006), which in
float64 is some 1e-9 of σ₁² for the largest weights there are.

**Squaring**, for many small matrices on a GPU. Let P₀ = G/‖G‖_F for a Gram matrix G, and
P_{j+1} = P_j²/n_j with n_j = ‖P_j²‖_F. The eigenvectors stay, so the top eigenvalue has

    ln λ(P₀) = Σ_{j<k} 2^{−j−1} ln n_j + 2^{−k} ln λ(P_k),

and since ‖P_k‖_F = 1 and no eigenvalue is negative, 1/tr P_k ≤ λ(P_k) ≤ 1, where tr P_k ≤ √s for s
rows: the bounds close to a factor of s^{2^{−k}/2}, whatever the spectrum. It consists of matrix
products alone, batched over all matrices of a shape. The mark of 1% for a monitor needs it on a
GPU: iterations take twice as long for many small weights, and load libraries that training does not
use (`python -m benchmarks.spectrum`).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from joma.probes.spectrum._matrix import check_finite, power_of_two

_CHUNK = 1 << 22
"""Entries widened to float64 at a time."""
_PIECE = 1 << 24
"""Entries of stacked matrices that are squared at a time."""
_EPS = 2.0**-53
_NEAR = 1e-5
"""Share of σ₁² that a vector said to be near the top one may miss."""


class Top(NamedTuple):
    """Certified bounds of σ₁² of a matrix scaled to entries up to 2.

    Attributes:
        floor: σ₁² is at least this.
        ceiling: σ₁² is at most this.
        norm: ‖A‖_F of the scaled matrix.
        vector: a unit vector that attains the floor.
        scale: what the matrix was divided by, a power of two.
    """

    floor: float
    ceiling: float
    norm: float
    vector: Tensor
    scale: float


class Tops(NamedTuple):
    """Certified bounds of L matrices; floor and ceiling are 0 for a matrix of zeros.

    Attributes:
        floor: σ₁²/‖A‖_F² is at least this, (L,).
        ceiling: σ₁²/‖A‖_F² is at most this, (L,).
        norm: ‖A‖_F, (L,).
        vector: unit vectors near the top eigenvectors of A·Aᵀ, (L, S), or (L, 0) if not asked for.
    """

    floor: Tensor
    ceiling: Tensor
    norm: Tensor
    vector: Tensor


def top(matrix: Tensor, seed: int, near: Tensor | None = None) -> Top:
    """Return bounds on both sides of the greatest singular value, by Cholesky in float64.

    Args:
        matrix: of any size.
        seed: of the search for the top vector.
        near: a vector near the top one, which saves the search.
    """
    gram, scale = gram_matrix(matrix)
    total = float(gram.diagonal().sum())
    if total == 0:
        return Top(0.0, 0.0, 0.0, gram[0], scale)
    side, inner = len(gram), matrix.numel() // len(gram)
    one = torch.eye(side, dtype=torch.float64, device=gram.device)
    # Rounding of the Gram matrix, |fl(AAᵀ) − AAᵀ| ≤ n·eps·|A||A|ᵀ of norm ≤ n·eps·‖A‖_F², and of
    # the factorisation, (s + 1)·eps·trace(c·1 − AAᵀ).
    rounding = 1.1 * inner * _EPS * total
    x, floor = gram[0], 0.0
    for given in (None,) if near is None else (near, None):
        x = _top_vector(gram, seed) if given is None else given.double() / given.double().norm()
        floor = float(x @ (gram @ x))
        for excess in (1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0):
            if given is not None and excess > _NEAR:
                break  # that vector is not near
            ceiling = floor * (1 + excess)
            _, info = torch.linalg.cholesky_ex(ceiling * one - gram)
            if int(info) == 0:
                factor = 1.1 * (side + 1) * _EPS * (side * ceiling)
                return Top(floor - rounding, ceiling + rounding + factor, total**0.5, x, scale)
    return Top(floor - rounding, total + rounding, total**0.5, x, scale)


def gram_matrix(matrix: Tensor) -> tuple[Tensor, float]:
    """Return A·Aᵀ/c² on the shorter side in float64, and c, a power of two at the largest entry."""
    gram_1SS, scale_1 = _grams(matrix.unsqueeze(0))
    check_finite(scale := float(scale_1))
    return gram_1SS[0], scale


def tops(matrices_LMN: Tensor, tolerance: float, *, vectors: bool = False) -> Tops:
    """Return bounds of the greatest singular values, by squaring in float64, rounding included.

    Args:
        matrices_LMN: of one shape, on one device; NaN and infinity give NaN.
        tolerance: the bounds lie no further apart than this share.
        vectors: whether to return top vectors, which loads further kernels on a GPU.
    """
    count = max(1, _PIECE // matrices_LMN[0].numel())
    pieces = [_tops(piece_LMN, tolerance, vectors) for piece_LMN in matrices_LMN.split(count)]
    return Tops(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _tops(matrices_LMN: Tensor, tolerance: float, vectors: bool) -> Tops:
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
    diagonal_LS = power_LSS.diagonal(dim1=-2, dim2=-1)
    trace_L = diagonal_LS.sum(-1).clamp(1.0, side**0.5)
    ceiling_L = size_L / total_L.clamp(min=1e-300) * log_L.exp()
    floor_L = ceiling_L * trace_L ** -(2.0**-squarings)
    # |fl(AAᵀ) − AAᵀ| ≤ n·eps·|A||A|ᵀ, of norm n·eps·‖A‖_F² at most, and its trace, ‖A‖_F², is off
    # by n·eps, too. |fl(P²) − P²| ≤ s·eps·|P|², of norm s·eps, where λ(P²) ≥ 1/s; the rounding of
    # the j-th squaring counts 2^{−j−1}.
    rounding = (1.1 * inner * (1 + ceiling_L) + ceiling_L * (4 * side * side + 64)) * _EPS
    vector_LS = power_LSS[:, :0, 0]
    if vectors:  # the power is nearly u·uᵀ: take its longest column
        best_L = diagonal_LS.argmax(-1)
        vector_LS = power_LSS[torch.arange(len(best_L), device=best_L.device), :, best_L]
        vector_LS = torch.nn.functional.normalize(vector_LS, dim=-1)
    return Tops(
        (floor_L - rounding).clamp(min=0) * (total_L > 0),
        (ceiling_L + rounding) * (total_L > 0),
        total_L.sqrt() * scale_L,
        vector_LS,
    )


def _grams(matrices_LMN: Tensor) -> tuple[Tensor, Tensor]:
    """Return A·Aᵀ/c² on the shorter side, (L, S, S), and c, a power of two at the largest entry.

    A few columns are widened at a time. c is NaN for a matrix that is not finite.
    """
    stored = matrices_LMN if matrices_LMN.is_contiguous() else matrices_LMN.mT  # not copied
    low_L, high_L = torch.aminmax(stored.flatten(1), dim=-1)
    most_L = torch.maximum(high_L.double(), -low_L.double())
    scale_L = power_of_two(most_L.clamp(1e-300, 1.7e308).log2().floor()) + 0 * most_L  # NaN stays
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


def _top_vector(gram: Tensor, seed: int) -> Tensor:
    """Return the top eigenvector: by `eigh` of small matrices, by repeated squaring of others."""
    if len(gram) <= 1024:
        return torch.linalg.eigh(gram).eigenvectors[:, -1]
    power = gram
    for _ in range(24):
        power = power / torch.linalg.matrix_norm(power)
        power = power @ power
    dice = torch.Generator(gram.device).manual_seed(seed)
    x = power @ torch.randn(len(gram), generator=dice, device=gram.device, dtype=gram.dtype)
    return x / torch.linalg.vector_norm(x)

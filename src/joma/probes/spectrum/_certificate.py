"""An upper bound of the greatest singular value that is a proof, not a probability.

If c·1 − A·Aᵀ has a Cholesky factor, it has no negative eigenvalue, so σ₁² ≤ c. In floating point
the factor proves it for c plus what the rounding of the Gram matrix and of the factorisation can
amount to (Rump, Verification of positive definiteness, BIT 2006), which in float64 is some 1e-9 of
σ₁² for the largest weights there are.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_CHUNK = 1 << 22
_EPS = 2.0**-53


class Top(NamedTuple):
    """Certified lower and upper bound of σ₁², ‖A‖_F, and a vector that attains the lower bound."""

    floor: float
    ceiling: float
    norm: float
    vector: Tensor


def top(matrix: Tensor, seed: int) -> Top:
    """The greatest singular value between two bounds, by float64 arithmetic."""
    gram, norm_squared = gram_matrix(matrix)
    if not bool(torch.isfinite(norm_squared)):
        raise ValueError("matrix must be finite, got NaN or infinity")
    total = float(norm_squared)
    if total == 0:
        return Top(0.0, 0.0, 0.0, gram[0])
    side, inner = len(gram), matrix.numel() // len(gram)
    x = _top_vector(gram, seed)
    floor = float(x @ (gram @ x))
    one = torch.eye(side, dtype=torch.float64, device=gram.device)
    # Rounding of the Gram matrix, |fl(AAᵀ) − AAᵀ| ≤ n·eps·|A||A|ᵀ of norm ≤ n·eps·‖A‖_F², and of
    # the factorisation, (s + 1)·eps·trace(c·1 − AAᵀ).
    rounding = 1.1 * inner * _EPS * total
    for excess in (1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        ceiling = floor * (1 + excess)
        _, info = torch.linalg.cholesky_ex(ceiling * one - gram)
        if int(info) == 0:
            factor = 1.1 * (side + 1) * _EPS * (side * ceiling)
            return Top(floor - rounding, ceiling + rounding + factor, total**0.5, x)
    return Top(floor - rounding, total + rounding, total**0.5, x)


def gram_matrix(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A·Aᵀ on the shorter side and ‖A‖_F², in float64, a few columns at a time."""
    if isinstance(matrix, DTensor):
        matrix = matrix.full_tensor()
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.mT
    side = len(matrix)
    gram = torch.zeros(side, side, dtype=torch.float64, device=matrix.device)
    for columns in matrix.split(max(1, _CHUNK // side), dim=1):
        wide = columns.double()
        gram.addmm_(wide, wide.mT)
    return gram, gram.diagonal().sum()


def _top_vector(gram: Tensor, seed: int) -> Tensor:
    """The top eigenvector: by all of them where there are few, by repeated squaring elsewhere."""
    if len(gram) <= 1024:
        return torch.linalg.eigh(gram).eigenvectors[:, -1]
    power = gram
    for _ in range(24):
        power = power / torch.linalg.matrix_norm(power)
        power = power @ power
    dice = torch.Generator(gram.device).manual_seed(seed)
    x = power @ torch.randn(len(gram), generator=dice, device=gram.device, dtype=gram.dtype)
    return x / torch.linalg.vector_norm(x)

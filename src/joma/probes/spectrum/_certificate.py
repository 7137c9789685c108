"""An upper bound of the greatest singular value that is a proof, not a probability.

If c·1 − A·Aᵀ has a Cholesky factor, it has no negative eigenvalue, so σ₁² ≤ c. In floating point
the factor proves it for c plus what the rounding of the Gram matrix and of the factorisation can
amount to (Rump, Verification of positive definiteness, BIT 2006), which in float64 is some 1e-9 of
σ₁² for the largest weights there are.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from joma.errors import JomaError

_CHUNK = 1 << 22
_EPS = 2.0**-53


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


def top(matrix: Tensor, seed: int, near: Tensor | None = None) -> Top:
    """The greatest singular value between two bounds, by float64 arithmetic.

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
    x = _top_vector(gram, seed) if near is None else near.double() / near.double().norm()
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
            return Top(floor - rounding, ceiling + rounding + factor, total**0.5, x, scale)
    return Top(floor - rounding, total + rounding, total**0.5, x, scale)


def gram_matrix(matrix: Tensor) -> tuple[Tensor, float]:
    """A·Aᵀ/c² on the shorter side in float64, a few columns at a time, and c.

    c is the power of two at the largest entry, so that no square over- or underflows.
    """
    if isinstance(matrix, DTensor):
        matrix = matrix.full_tensor()
    low, high = (float(x) for x in torch.aminmax(matrix))
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.mT
    most = max(abs(low), abs(high))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise JomaError("matrix must be finite, got NaN or infinity")
    scale = math.ldexp(1.0, math.frexp(most)[1] - 1) if most else 1.0
    side = len(matrix)
    gram = torch.zeros(side, side, dtype=torch.float64, device=matrix.device)
    for columns in matrix.split(max(1, _CHUNK // side), dim=1):
        wide = columns.double() / scale
        gram.addmm_(wide, wide.mT)
    return gram, scale


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

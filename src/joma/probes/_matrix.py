"""A matrix as the spectra use it: checked, scaled, with products, its norm and its Gram matrix.

The Gram matrix M = A·Aᵀ is taken on the shorter side, so blocks are as short as they can be.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from joma.common.float32 import float32_is_coarse, float32_products
from joma.common.sharded import is_dtensor
from joma.errors import JomaError
from joma.probes._checks import computable

EPS = 2.0**-53
_METHODS = ("auto", "lanczos", "exact")
_LOCK = threading.RLock()
"""Float32 settings belong to the whole process."""
_USUAL = (1e-6, 1e6)
"""Matrices whose largest entry lies outside are scaled, lest squares over- or underflow."""
_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Entries of a matrix that are converted at a time."""


class ScaledMatrix(NamedTuple):
    """A matrix, detached and whole, and the power of two that it was divided by; 0 if it is 0."""

    matrix: Tensor
    scale: float


def checked(matrix: Tensor, method: str = "auto", tolerance: float = 1e-3) -> ScaledMatrix:
    """Return a matrix to compute with.

    Raises:
        JomaError: It is none, or not finite, or the method is unknown, or no method can reach the
            tolerance.
    """
    if method not in _METHODS:
        raise JomaError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")
    if not 1e-7 <= tolerance < 1:
        raise JomaError(f"tolerance must lie from 1e-7 below 1, got {tolerance!r}")
    if is_dtensor(matrix):
        matrix = matrix.full_tensor()
    try:
        matrix = computable("matrix", torch.as_tensor(matrix))
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, JomaError):
            raise
        raise JomaError(f"matrix must be a torch.Tensor, got a {type(matrix).__name__}") from None
    if matrix.ndim != 2 or matrix.numel() == 0:
        raise JomaError(f"matrix must have two axes, none empty, got shape {tuple(matrix.shape)}")
    if matrix.is_complex():
        raise JomaError(f"matrix must be real numbers, got {matrix.dtype}")
    matrix = matrix.detach()
    matrix = matrix if matrix.is_floating_point() else matrix.to(torch.float64)
    largest = float(torch.stack(torch.aminmax(matrix)).double().abs().amax())
    if not largest < math.inf:
        raise JomaError("matrix must be finite, got NaN or infinity")
    if largest == 0 or _USUAL[0] <= largest <= _USUAL[1]:
        return ScaledMatrix(matrix, float(largest > 0))
    scale = math.ldexp(1.0, min(max(math.frexp(largest)[1], -1022), 1023))
    return ScaledMatrix(matrix.double() / scale, scale)


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in IEEE float32 on that device, without autocast and gradients, in one thread."""
    with _LOCK, torch.no_grad(), ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if float32_is_coarse():
            stack.enter_context(float32_products("ieee"))
        yield


class Operator:
    """Products with one matrix, in float32 or float64; others are converted a piece at a time.

    Attributes:
        side: length of the vectors, the shorter side.
        inner: length of the longer side.
        dtype: of the vectors, float32 or float64.
        device: of the vectors.
        rounding: what rounding may hide of the top eigenvalue, as a share of it.
    """

    def __init__(self, matrix_MN: Tensor) -> None:
        rows, columns = matrix_MN.shape
        self._matrix = matrix_MN if rows <= columns else matrix_MN.mT
        self.side, self.inner = self._matrix.shape
        self.device = matrix_MN.device
        self.dtype = torch.float64 if matrix_MN.dtype == torch.float64 else torch.float32
        self.rounding = 1e-5 if self.dtype == torch.float32 else 1e-10

    @cached_property
    def frobenius(self) -> float:
        """‖A‖_F, added up in float64."""
        return math.sqrt(sum(part.double().square().sum() for part in self._pieces()))

    def apply(self, block_SB: Tensor) -> Tensor:
        """Return M of a block, for a matrix scaled to Frobenius norm 1."""
        return self.along(self.across(block_SB)) / self.frobenius**2

    def quotient(self, x_S: Tensor) -> float:
        """Return ‖Aᵀx‖² of a unit vector, for a matrix scaled to Frobenius norm 1."""
        image = self.across(x_S.unsqueeze(-1)).double()
        return float(image.square().sum()) / self.frobenius**2

    def across(self, block_SB: Tensor) -> Tensor:
        """Return Aᵀ of a block."""
        if self._matrix.dtype == self.dtype:
            return self._matrix.mT @ block_SB
        return torch.cat([part.to(self.dtype).mT @ block_SB for part in self._pieces()])

    def along(self, block_TB: Tensor) -> Tensor:
        """Return A of a block."""
        if self._matrix.dtype == self.dtype:
            return self._matrix @ block_TB
        out_SB, start = block_TB.new_zeros(self.side, block_TB.shape[-1]), 0
        for part in self._pieces():
            stop = start + part.shape[-1]
            out_SB.addmm_(part.to(self.dtype), block_TB[start:stop])
            start = stop
        return out_SB

    def gram(self) -> Tensor:
        """Return A·Aᵀ on the shorter side in float64."""
        gram_SS = self._matrix.new_zeros(self.side, self.side, dtype=torch.float64)
        for part in self._pieces():
            wide = part.double()
            gram_SS.addmm_(wide, wide.mT)
        return gram_SS

    def _pieces(self) -> tuple[Tensor, ...]:
        """Return pieces of the longer side."""
        at_once = _AT_ONCE.get(self.device.type, 1 << 20)
        return self._matrix.split(max(1, at_once // self.side), dim=-1)


class Tops(NamedTuple):
    """Certified bounds of L matrices.

    Attributes:
        floor: σ₁²/‖A‖_F² is at least this, (L,).
        ceiling: σ₁²/‖A‖_F² is at most this, (L,).
        norm: ‖A‖_F, (L,).
        vector: unit vectors near the top eigenvectors of A·Aᵀ, (L, S).
    """

    floor: Tensor
    ceiling: Tensor
    norm: Tensor
    vector: Tensor


def tops_by_squaring(matrices: list[Tensor], tolerance: float) -> Tops:
    """Return bounds of the greatest singular values, by squaring in float64, rounding included.

    Let P₀ = G/‖G‖_F for a Gram matrix G, and P_{j+1} = P_j²/n_j with n_j = ‖P_j²‖_F. The
    eigenvectors stay, so the top eigenvalue has

        ln λ(P₀) = Σ_{j<k} 2^{−j−1} ln n_j + 2^{−k} ln λ(P_k),

    and since ‖P_k‖_F = 1 and no eigenvalue is negative, 1/tr P_k ≤ λ(P_k) ≤ 1, where tr P_k ≤ √s
    for s rows: the bounds close to a factor of s^{2^{−k}/2}, whatever the spectrum. All of it are
    matrix products, which a GPU does for all matrices of a shape together.

    Args:
        matrices: of one shape, on one device, none of them 0.
        tolerance: the bounds lie no further apart than this share.
    """
    linear = [Operator(matrix) for matrix in matrices]
    power_LSS = torch.stack([of.gram() for of in linear])
    side, inner = linear[0].side, linear[0].inner
    total_L = power_LSS.diagonal(dim1=-2, dim2=-1).sum(-1)
    size_L = torch.linalg.matrix_norm(power_LSS)
    power_LSS /= size_L[:, None, None]
    log_L = torch.zeros_like(size_L)
    squarings = max(1, math.ceil(math.log2(math.log(side + 1) / tolerance)))
    for j in range(squarings):
        power_LSS = power_LSS @ power_LSS
        norm_L = torch.linalg.matrix_norm(power_LSS)
        power_LSS /= norm_L[:, None, None]
        log_L += norm_L.log() * 2.0 ** (-j - 1)
    diagonal_LS = power_LSS.diagonal(dim1=-2, dim2=-1)
    ceiling_L = size_L / total_L * log_L.exp()
    floor_L = ceiling_L * diagonal_LS.sum(-1).clamp(1.0, side**0.5) ** -(2.0**-squarings)
    # |fl(AAᵀ) − AAᵀ| ≤ n·eps·|A||A|ᵀ, of norm n·eps·‖A‖_F² at most, and its trace, ‖A‖_F², is off
    # by n·eps, too. |fl(P²) − P²| ≤ s·eps·|P|², of norm s·eps, where λ(P²) ≥ 1/s; the rounding of
    # the j-th squaring counts 2^{−j−1}.
    rounding = (1.1 * inner * (1 + ceiling_L) + ceiling_L * (4 * side * side + 64)) * EPS
    # The power is nearly u·uᵀ: its longest column is nearly u.
    best_L = diagonal_LS.argmax(-1)[:, None, None].expand(-1, side, 1)
    vector_LS = torch.nn.functional.normalize(power_LSS.gather(-1, best_L).squeeze(-1), dim=-1)
    floor_L = (floor_L - rounding).clamp(min=0)
    return Tops(floor_L, ceiling_L + rounding, total_L.sqrt(), vector_LS)

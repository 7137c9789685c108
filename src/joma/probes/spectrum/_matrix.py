"""A matrix as the spectra use it: checked, with products, its norm and a Rayleigh quotient.

The Gram matrix M = A·Aᵀ is taken on the shorter side, so blocks are as short as they can be.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property

import torch
from torch import Tensor

from joma.common.float32 import float32_is_coarse, float32_products
from joma.common.sharded import is_dtensor
from joma.errors import JomaError
from joma.kernels.choice import has_kernels
from joma.probes._checks import computable

_METHODS = ("auto", "lanczos", "exact")
_LOCK = threading.RLock()
"""Float32 settings and the buffers of captured graphs belong to the whole process."""
_CHUNK = 1 << 20
"""Entries of a half-precision matrix widened at a time on a CPU."""
_PIECE = 1024
"""Entries whose squares are added up in float32."""
_NORM_KERNEL_FROM = 1 << 22
"""Entries from which on the norm of a matrix on a GPU is taken by a kernel of our own."""


def checked(matrix: Tensor, method: str = "auto", tolerance: float = 1e-3) -> Tensor:
    """Return the matrix, detached and whole; integers become float64.

    Raises:
        JomaError: It is none, or the method is unknown, or no method can reach the tolerance.
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
    return matrix if matrix.is_floating_point() else matrix.to(torch.float64)


def check_finite(*norms: float) -> None:
    """Raise JomaError where a norm shows that a matrix holds NaN or infinity."""
    if not all(abs(norm) < float("inf") for norm in norms):
        raise JomaError("matrix must be finite, got NaN or infinity")


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in IEEE float32 on that device, without autocast and gradients, in one thread."""
    # Only settings that differ are entered: entering all of them costs as much as a small kernel.
    with _LOCK, torch.no_grad(), ExitStack() as stack:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            stack.enter_context(torch.cuda.device(device))
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if float32_is_coarse():
            stack.enter_context(float32_products("ieee"))
        yield


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2ⁿ in float64 for integers n from −1022 to 1023, by its bits.

    exp2 and ldexp are not exact on every device, and exp2 is compiled at its first call.
    """
    return (exponent.long() + 1023 << 52).view(torch.float64)


class Operator:
    """Products with one matrix, in float32 or float64.

    Half-precision entries are widened a few rows at a time.

    Attributes:
        side: length of the vectors, the shorter side.
        dtype: of the vectors, float32 or float64.
        device: of the vectors.
        rounding: what rounding may hide of the top eigenvalue, as a share of it.
    """

    def __init__(self, matrix_MN: Tensor) -> None:
        rows, columns = matrix_MN.shape
        self._matrix = matrix_MN if rows <= columns else matrix_MN.mT
        self.side, self.device = min(rows, columns), matrix_MN.device
        self.dtype = torch.float64 if matrix_MN.dtype == torch.float64 else torch.float32
        self.rounding = 1e-5 if self.dtype == torch.float32 else 1e-10

    def apply(self, block_SB: Tensor) -> Tensor:
        """Return M of a block, for a matrix scaled to Frobenius norm 1."""
        return self._scaled(self.along, self._scaled(self.across, block_SB))

    def quotient(self, x_S: Tensor) -> Tensor:
        """Return ‖Aᵀx‖² of a unit vector for a matrix scaled to Frobenius norm 1, in float64."""
        return self._scaled(self.across, x_S.unsqueeze(-1)).double().square().sum()

    @cached_property
    def frobenius(self) -> Tensor:
        """‖A‖_F, in float64."""
        turned = self._matrix if self._matrix.is_contiguous() else self._matrix.mT
        if turned.dtype != torch.float64 and turned.is_contiguous():
            if turned.is_cuda:
                if turned.numel() < _NORM_KERNEL_FROM or not has_kernels(turned.device):
                    return torch.linalg.vector_norm(turned, dtype=torch.float64)
                from joma.probes.spectrum import _dither_kernel  # Triton comes with CUDA builds

                return _dither_kernel.frobenius(turned)
            norm = torch.linalg.vector_norm(_norms_of_pieces(turned.flatten()))
            if 1e-15 < float(norm) < 1e15:
                return norm
        most = torch.stack(torch.aminmax(self._matrix)).abs().amax().double()
        total = torch.zeros_like(most)
        for part in self._slices():
            scaled = self._matrix[:, part].double() / most.clamp(min=1e-320)
            total += scaled.square().sum()
        return most * total.sqrt()

    def _scaled(self, product: Callable[[Tensor], Tensor], block: Tensor) -> Tensor:
        """Return a product over ‖A‖_F; the block is scaled first, so that nothing overflows."""
        before, after = self._factors
        return product(block * before) * after

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        norm = self.frobenius.clamp(min=1e-300)
        least, most = (-60, 110) if self.dtype == torch.float32 else (-900, 900)
        power = power_of_two((-norm.log2()).round().clamp(least, most))
        return power.to(self.dtype), (1 / (power * norm)).to(self.dtype)

    def across(self, block_SB: Tensor) -> Tensor:
        """Return Aᵀ of a block, unscaled, in full precision."""
        if self._matrix.dtype == self.dtype:
            return self._matrix.mT @ block_SB
        if self._matrix.is_cuda:
            return wide_product(self._matrix.mT, block_SB)
        out_TB = block_SB.new_empty(self._matrix.shape[-1], block_SB.shape[-1])
        for part in self._slices():
            torch.matmul(self._matrix[:, part].to(self.dtype).mT, block_SB, out=out_TB[part])
        return out_TB

    def along(self, block_TB: Tensor) -> Tensor:
        """Return A of a block, unscaled, in full precision."""
        if self._matrix.dtype == self.dtype:
            return self._matrix @ block_TB
        if self._matrix.is_cuda:
            return wide_product(self._matrix, block_TB)
        out_SB = block_TB.new_zeros(self.side, block_TB.shape[-1])
        for part in self._slices():
            out_SB.addmm_(self._matrix[:, part].to(self.dtype), block_TB[part])
        return out_SB

    def _slices(self) -> Iterator[slice]:
        """Yield pieces of the longer side."""
        step = max(1, _CHUNK // self.side)
        for start in range(0, self._matrix.shape[-1], step):
            yield slice(start, start + step)


def _norms_of_pieces(flat_N: Tensor) -> Tensor:
    """Return norms of pieces of 1,024 entries, in float64.

    A piece is added up in float32, which is fast; more entries of one size than that would add up
    their rounding, too. Entries of another type go through one buffer.
    """
    parts = []
    buffer = torch.empty(_CHUNK, dtype=torch.float32, device=flat_N.device)
    for part in flat_N.split(_CHUNK):
        if part.dtype != torch.float32:
            part = buffer[: len(part)].copy_(part)
        whole = len(part) // _PIECE * _PIECE
        for piece in (part[:whole].unflatten(0, (-1, _PIECE)), part[None, whole:]):
            parts.append(torch.linalg.vector_norm(piece, dim=-1).double())
    return torch.cat(parts)


def wide_product(matrix: Tensor, block: Tensor) -> Tensor:
    """Return the float32 product with a matrix on a GPU, which may be in half precision."""
    if matrix.dtype == torch.float32:
        return matrix @ block
    parts: list[Tensor] = []
    for _ in range(3):  # three parts of 8 bits or more are all of a float32
        parts.append(block.to(matrix.dtype))
        block = block - parts[-1].float()
    product = torch.mm(matrix, torch.cat(parts, -1), out_dtype=torch.float32)
    return sum(product.chunk(3, -1), start=block.new_zeros(()))


def weighted_entries(matrix: Tensor, top: float) -> float:
    """Return an upper bound of √Σ a_ij²·u_i²·v_j² for the top singular vectors u, v.

    It is the largest entry where u and v could have all their weight there. But u_i = a_i·v/σ₁
    for the row a_i, so u_i² ≤ ‖a_i‖²/σ₁²: the rows with the largest entries get as much weight as
    that, until it adds up to 1; and so do columns. Outliers of trained weights need it.

    Args:
        matrix: the matrix.
        top: σ₁² is at least this.
    """
    bounds = []
    for dim in (0, 1):
        low, high = torch.aminmax(matrix, dim=dim)
        most, order = torch.maximum(high, -low).double().square().sort(descending=True)
        norm = torch.linalg.vector_norm(matrix, dim=dim, dtype=torch.float64)
        weight = (norm[order].square() / top).clamp(max=1.0)
        before = weight.cumsum(0) - weight
        weight = torch.minimum(weight, (1 - before).clamp(min=0.0))
        bounds.append((weight * most).sum())
    return math.sqrt(float(torch.stack(bounds).amin()))

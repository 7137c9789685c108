"""A matrix as the spectra see it: products with blocks of vectors, its norm, a Rayleigh quotient.

The Gram matrix M = A·Aᵀ is taken on the shorter side, so blocks are as short as they can be.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from joma.probes.spectrum._arithmetic import power_of_two

_CHUNK = 1 << 20
_PIECE = 1024
"""Entries of a half-precision matrix widened at a time on a CPU."""
_DITHER_FROM = 1 << 22
"""Entries from which on a float32 matrix on a GPU is multiplied through a dithered half copy."""


class Operator(Protocol):
    """L matrices of one shape.

    Attributes:
        side: length of the vectors, the shorter side.
        count: L.
        dtype: of the vectors, float32 or float64.
        device: of the vectors.
    """

    side: int
    count: int
    dtype: torch.dtype
    device: torch.device

    def apply(self, block_LSB: Tensor) -> Tensor:
        """M of a block, for matrices scaled to Frobenius norm 1."""
        ...

    def quotient(self, x_LS: Tensor) -> Tensor:
        """‖Aᵀx‖² of unit vectors for matrices scaled to Frobenius norm 1, (L,), in float64."""
        ...

    def frobenius(self) -> Tensor:
        """‖A‖_F, (L,), in float64."""
        ...

    def across(self, block_LSB: Tensor) -> Tensor:
        """Aᵀ of a block, unscaled, in full precision."""
        ...

    def along(self, block_LTB: Tensor) -> Tensor:
        """A of a block, unscaled, in full precision."""
        ...

    def slack(self, top_L: Tensor, failure: float) -> Tensor:
        """What rounding may hide of the top eigenvalue, as a share of it, (L,)."""
        ...


def operator(matrices_LMN: Tensor, seed: int | None) -> Operator:
    """The operator of matrices on a CPU or a GPU, whole or sharded.

    Args:
        matrices_LMN: the matrices.
        seed: of the dice for a dithered copy; None where so few products follow that a copy would
            not pay.
    """
    if isinstance(matrices_LMN, DTensor):
        return _Sharded(matrices_LMN)
    if seed is None or not matrices_LMN.is_cuda or matrices_LMN.dtype == torch.float64:
        return _Dense(matrices_LMN)
    if matrices_LMN.dtype == torch.float32 and matrices_LMN[0].numel() < _DITHER_FROM:
        return _Dense(matrices_LMN)
    return _Dithered(matrices_LMN, seed)


class _Plain(ABC):
    """What products alone decide: Gram matrix and quotient of matrices scaled to ‖A‖_F = 1."""

    def __init__(self, count: int, shape: torch.Size, kind: torch.dtype, device: torch.device):
        self.count, self.side = count, min(shape[-2:])
        self.dtype = torch.float64 if kind == torch.float64 else torch.float32
        self.device = device
        self._norm_L: Tensor | None = None

    def apply(self, block_LSB: Tensor) -> Tensor:
        return self._scaled(self.along, self._scaled(self.across, block_LSB))

    def quotient(self, x_LS: Tensor) -> Tensor:
        return self._scaled(self.across, x_LS.unsqueeze(-1)).double().square().sum((-2, -1))

    def frobenius(self) -> Tensor:
        if self._norm_L is None:
            self._norm_L = self._norm()
        return self._norm_L

    def slack(self, top_L: Tensor, failure: float) -> Tensor:
        return torch.full_like(top_L, 1e-5 if self.dtype == torch.float32 else 1e-10)

    @abstractmethod
    def across(self, block_LSB: Tensor) -> Tensor: ...

    @abstractmethod
    def along(self, block_LTB: Tensor) -> Tensor: ...

    @abstractmethod
    def _norm(self) -> Tensor: ...

    def _scaled(self, product: Callable[[Tensor], Tensor], block: Tensor) -> Tensor:
        """A product over ‖A‖_F; the block takes up the scale first, so that nothing overflows."""
        before, after = self._factors
        return product(block * before) * after

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        norm_L11 = self.frobenius().clamp(min=1e-300)[:, None, None]
        least, most = (-60, 110) if self.dtype == torch.float32 else (-900, 900)
        power = power_of_two((-norm_L11.log2()).round().clamp(least, most))
        return power.to(self.dtype), (1 / (power * norm_L11)).to(self.dtype)


class _Dense(_Plain):
    """Products in float32 or float64; half-precision entries are widened a few rows at a time."""

    def __init__(self, matrices_LMN: Tensor) -> None:
        super().__init__(
            len(matrices_LMN), matrices_LMN.shape, matrices_LMN.dtype, matrices_LMN.device
        )
        rows, columns = matrices_LMN.shape[-2:]
        self._matrices = matrices_LMN if rows <= columns else matrices_LMN.mT

    def across(self, block_LSB: Tensor) -> Tensor:
        if self._matrices.dtype == self.dtype:
            return self._matrices.mT @ block_LSB
        if self._matrices.is_cuda:
            return wide_product(self._matrices.mT, block_LSB)
        out_LTB = block_LSB.new_empty(self.count, self._matrices.shape[-1], block_LSB.shape[-1])
        for part in self._slices():
            wide = self._matrices[..., part].to(self.dtype)
            torch.matmul(wide.mT, block_LSB, out=out_LTB[:, part])
        return out_LTB

    def along(self, block_LTB: Tensor) -> Tensor:
        if self._matrices.dtype == self.dtype:
            return self._matrices @ block_LTB
        if self._matrices.is_cuda:
            return wide_product(self._matrices, block_LTB)
        out_LSB = block_LTB.new_zeros(self.count, self.side, block_LTB.shape[-1])
        for part in self._slices():
            out_LSB.baddbmm_(self._matrices[..., part].to(self.dtype), block_LTB[:, part])
        return out_LSB

    def _norm(self) -> Tensor:
        turned = self._matrices if self._matrices.is_contiguous() else self._matrices.mT
        if turned.dtype != torch.float64 and turned.is_contiguous():
            if turned.is_cuda and turned[0].numel() < _DITHER_FROM:
                return torch.linalg.vector_norm(turned.flatten(1), dim=-1, dtype=torch.float64)
            if turned.is_cuda:
                from joma.probes.spectrum import _dither_kernel  # Triton comes with CUDA builds

                return _dither_kernel.frobenius(turned)
            norm_L = torch.linalg.vector_norm(_norms_of_pieces(turned.flatten(1)), dim=-1)
            if bool(((norm_L > 1e-15) & (norm_L < 1e15)).all()):
                return norm_L
        low_high = [torch.stack(torch.aminmax(matrix)) for matrix in self._matrices]
        most_L = torch.stack(low_high).abs().amax(-1).double()
        total_L = torch.zeros_like(most_L)
        for part in self._slices():
            scaled = self._matrices[..., part].double() / most_L.clamp(min=1e-320)[:, None, None]
            total_L += scaled.square().sum((-2, -1))
        return most_L * total_L.sqrt()

    def _slices(self) -> Iterator[slice]:
        """Pieces of the longer side."""
        step = max(1, _CHUNK // (self.count * self.side))
        for start in range(0, self._matrices.shape[-1], step):
            yield slice(start, start + step)


def _norms_of_pieces(flat_LN: Tensor) -> Tensor:
    """Norms of pieces of 1,024 entries, (L, pieces) in float64.

    A piece is added up in float32, which is fast; more entries of one size than that would add up
    their rounding, too. Entries of another type go through one buffer.
    """
    parts = []
    buffer = torch.empty(len(flat_LN), _CHUNK, dtype=torch.float32, device=flat_LN.device)
    for part in flat_LN.split(_CHUNK, 1):
        if part.dtype != torch.float32:
            part = buffer[:, : part.shape[1]].copy_(part)
        whole = part.shape[1] // _PIECE * _PIECE
        pieces = part[:, :whole].unflatten(1, (-1, _PIECE)), part[:, None, whole:]
        parts += [torch.linalg.vector_norm(piece, dim=-1).double() for piece in pieces]
    return torch.cat(parts, 1)


class _Dithered:
    """Products with a half-precision copy whose rounding is random, so that it cannot conspire.

    An entry goes to one of its two neighbours in float16 with probabilities that make the copy Ã
    right on average. Then uᵀ(Ã − A)v for the top singular vectors u, v of A, which know nothing of
    the dice, is a sum of independent terms of mean zero, by Hoeffding below
    ½·step·√(2 ln(1/failure)) but with probability `failure`, step ≤ 2⁻¹⁰·max|A|. Since
    σ₁(Ã) ≥ uᵀÃv = σ₁(A) + uᵀ(Ã − A)v, a bound above Ã is one above A with that slack. The
    lower bound is a Rayleigh quotient of A itself. Blocks go in as two float16 parts, 22 bits.
    """

    def __init__(self, matrices_LMN: Tensor, seed: int) -> None:
        rows, columns = matrices_LMN.shape[-2:]
        self._wide = rows <= columns
        self._matrices = matrices_LMN
        self.count, self.side = len(matrices_LMN), min(rows, columns)
        self.dtype, self.device = torch.float32, matrices_LMN.device
        from joma.probes.spectrum import _dither_kernel  # Triton comes with CUDA builds

        self._norm_L, self._most_L, copy = _dither_kernel.half_copy(matrices_LMN, seed)
        self._copy = copy if self._wide else copy.mT

    def apply(self, block_LSB: Tensor) -> Tensor:
        return self._half(self._copy, self._half(self._copy.mT, block_LSB))

    def _half(self, copy: Tensor, block: Tensor) -> Tensor:
        # The copy has entries up to 2¹⁴; a block of unit vectors is brought to the same range.
        largest = block.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)
        block = block * (16384.0 / largest)
        high = block.to(torch.float16)
        low = ((block - high) * 2048.0).to(torch.float16)
        product = _product(copy, torch.cat([high, low], -1))
        high, low = product.chunk(2, -1)
        back = (largest / 16384.0) * (self._most_L / 16384.0 / self._norm_L)[:, None, None]
        return torch.add(high, low, alpha=1 / 2048) * back.float()

    def quotient(self, x_LS: Tensor) -> Tensor:
        image = self.across(x_LS.unsqueeze(-1)).squeeze(-1)
        return (image.double() / self._norm_L.unsqueeze(-1)).square().sum(-1)

    def across(self, block_LSB: Tensor) -> Tensor:
        return wide_product(self._matrices.mT if self._wide else self._matrices, block_LSB)

    def along(self, block_LTB: Tensor) -> Tensor:
        return wide_product(self._matrices if self._wide else self._matrices.mT, block_LTB)

    def frobenius(self) -> Tensor:
        return self._norm_L

    def slack(self, top_L: Tensor, failure: float) -> Tensor:
        exact = self._matrices.dtype != torch.float32
        triples = zip(self._most_L.tolist(), self._norm_L.tolist(), top_L.tolist(), strict=True)
        return top_L.new_tensor([dither_slack(*triple, failure, exact) for triple in triples])


def dither_slack(most: float, norm: float, top: float, failure: float, exact: bool) -> float:
    """What a dithered copy may hide of the top eigenvalue, as a share of it.

    Args:
        most: the least power of two above the entries of the matrix.
        norm: its ‖A‖_F.
        top: its top eigenvalue over ‖A‖_F².
        failure: probability that the dice hide more.
        exact: whether its entries were representable.
    """
    if exact:
        return 3e-5
    # The largest entry lies in [most/2, most), where float16 has steps of 2⁻¹⁰·most/2.
    sway = 0.5 * (most / 2 / norm * 2.0**-10) * math.sqrt(2 * math.log(1 / failure))
    return 3e-5 + 2 * sway / math.sqrt(max(top, 1e-300))


class _Sharded(_Plain):
    """A sharded matrix: every rank holds the same blocks, products are gathered."""

    def __init__(self, matrices_LMN: DTensor) -> None:
        matrix = matrices_LMN.squeeze(0)
        rows, columns = matrix.shape
        matrix = matrix if rows <= columns else matrix.t()
        assert isinstance(matrix, DTensor)
        super().__init__(1, matrix.shape, matrix.dtype, matrix.to_local().device)
        self._matrix = matrix

    def _norm(self) -> Tensor:
        most = _gathered(self._matrix.abs().max()).double()
        scaled = self._matrix.to(torch.float64) / most.clamp(min=1e-320).item()
        return (most * _gathered(scaled.square().sum()).sqrt()).reshape(1)

    def across(self, block_LSB: Tensor) -> Tensor:
        return self._product(self._matrix.t(), block_LSB)

    def along(self, block_LTB: Tensor) -> Tensor:
        return self._product(self._matrix, block_LTB)

    def _product(self, matrix: Tensor, block_1SB: Tensor) -> Tensor:
        mesh = self._matrix.device_mesh
        copies = [Replicate()] * mesh.ndim
        block = DTensor.from_local(block_1SB[0], mesh, copies, run_check=False)
        return _gathered(matrix.to(self.dtype) @ block).unsqueeze(0)


def _gathered(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def _product(half: Tensor, block: Tensor) -> Tensor:
    """float16 products added up in float32."""
    if len(half) == 1:
        return torch.mm(half[0], block[0], out_dtype=torch.float32).unsqueeze(0)
    return torch.bmm(half, block, out_dtype=torch.float32)


def wide_product(matrices: Tensor, block: Tensor) -> Tensor:
    """float32 products with matrices that may be in half precision, which are not copied."""
    if matrices.dtype == torch.float32:
        return matrices @ block
    parts: list[Tensor] = []
    for _ in range(3):  # three parts of 8 bits or more are all of a float32
        parts.append(block.to(matrices.dtype))
        block = block - parts[-1].float()
    return sum(_product(matrices, torch.cat(parts, -1)).chunk(3, -1), start=block.new_zeros(()))

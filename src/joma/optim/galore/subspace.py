"""The subspace of a gradient: block power iteration, a safe orthonormalisation, the exact SVD.

A gradient G (m, n) is projected on the left, R = PᵀG with P (m, r), or on the right, R = GP with
P (n, r). The columns of P are orthonormal and span, nearly, the r leading singular directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from joma.errors import JomaError

Side = Literal["left", "right"]
SIDES = ("short", "left", "right", "smallest")
PROJECTIONS = ("power", "svd")

_FRESH = 0.5
"""Length of the random part of a warm start, next to a basis of length 1: a direction that the old
basis misses altogether is found through it."""
_SHIFT = 1e-13
"""Added to a Gram matrix with a diagonal of ones, for each of its rows: above the rounding of
float64, so that the factorisation exists for any columns."""

_MOST_PASSES = 6
_NUMBERS_AT_ONCE = 1 << 24
"""Numbers of the columns that power iterations make orthonormal together."""
_SQUARED_AT_ONCE = 1 << 22
"""Numbers whose squares are summed at once, if rows are not longer: 32 MiB in float64."""
_BLOCK = 64
"""Triangles up to this size are inverted by substitution."""


def choose_side(
    side: str, shape: tuple[int, int], *, moment_bytes: float = 8.0, projector_bytes: float = 4.0
) -> Side:
    """Return the side on which a matrix is projected.

    Args:
        side: "left", "right", "short" (P has the length of the shorter side, as in the paper) or
            "smallest" (the least memory for P and the moments together).
        shape: (m, n).
        moment_bytes: Bytes of all moments for each number of R.
        projector_bytes: Bytes for each number of P.
    """
    rows, columns = shape
    if side == "left":
        return "left"
    if side == "right":
        return "right"
    if side == "short":
        return "left" if rows < columns else "right"
    left = projector_bytes * rows + moment_bytes * columns
    right = projector_bytes * columns + moment_bytes * rows
    return "left" if left < right else "right"


@dataclass
class GradientMatrix:
    """A gradient matrix, of which a process may have a part only.

    Attributes:
        matrix: What this process has, (rows, n).
        share: "whole": all of G. "rows": some rows of G, in the order of the processes. "mean": a
            matrix as large as G; G is the mean over the processes.
        group: The processes.
        first_row: Number of the first of the rows.
        all_rows: Number of rows of G; for "rows" all processes but the last ones have equally many.
    """

    matrix: Tensor
    share: Literal["whole", "rows", "mean"] = "whole"
    group: Any = None
    first_row: int = 0
    all_rows: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        rows, columns = self.matrix.shape
        return self.all_rows or rows, columns

    def times(self, right: Tensor) -> Tensor:
        """Return the rows of GX that this process has, for X (n, r), in float32."""
        return self.mean(_product(self.matrix, right))

    def transposed_times(self, left: Tensor) -> Tensor:
        """Return GᵀY for Y (m, r), of which this process has the rows it has of G."""
        return self.sum_of_rows(self.mean(_product(self.matrix.mT, left)))

    def sum_of_rows(self, product: Tensor) -> Tensor:
        """Return a product over the rows, from the products over the rows of each process."""
        if self.share == "rows":
            dist.all_reduce(product, group=self.group)
        return product

    def mean(self, product: Tensor) -> Tensor:
        """Return the mean of a product over the processes, where G is one; in place."""
        if self.share == "mean":
            dist.all_reduce(product, group=self.group)
            product /= dist.get_world_size(self.group)
        return product

    def project(self, basis: Tensor, side: Side) -> Tensor:
        """Return R: PᵀG, or the rows of GP that this process has, in float32."""
        if side == "right":
            return self.times(basis)
        return self.sum_of_rows(self.mean(_product(basis.mT, self.matrix)))

    def energy(self) -> Tensor:
        """Return ‖G‖², for "mean" the mean over the processes."""
        energy = square_sum(self.matrix)
        return self.sum_of_rows(self.mean(energy))

    def whole(self) -> Tensor:
        """Return all of G, in float32; every process calls it."""
        matrix = self.matrix.float()
        if self.share == "mean":
            return self.mean(matrix.clone())
        if self.share == "rows":
            processes = dist.get_world_size(self.group)
            padded = matrix.new_zeros(-(-self.shape[0] // processes), matrix.shape[1])
            padded[: len(matrix)] = matrix
            parts = [torch.empty_like(padded) for _ in range(processes)]
            dist.all_gather(parts, padded, group=self.group)
            return torch.cat(parts)[: self.shape[0]]
        return matrix

    def own_rows(self, whole: Tensor) -> Tensor:
        """Return the rows of a matrix with the rows of G that this process has."""
        return whole[self.first_row :][: len(self.matrix)] if self.share == "rows" else whole


@dataclass
class BasisSearch:
    """What the search for one basis needs.

    Attributes:
        gradient: The gradient.
        side: Which singular directions.
        rank: Number of columns.
        old: The basis to start from, (m, rank) or (n, rank), if any.
        random: Where random numbers come from; the same on every process.
        exact: Whether it is to be found by the singular value decomposition.
    """

    gradient: GradientMatrix
    side: Side
    rank: int
    old: Tensor | None
    random: torch.Generator
    exact: bool = False


def batches(searches: Sequence[BasisSearch]) -> list[list[int]]:
    """Return which searches to make together: on one device, and with little memory."""
    found: list[list[int]] = []
    numbers, last = 0, None
    for at, one in enumerate(searches):
        size = max(one.gradient.shape) * one.rank
        device = one.gradient.matrix.device
        if not found or numbers + size > _NUMBERS_AT_ONCE or device != last:
            found.append([])
            numbers = 0
        found[-1].append(at)
        numbers, last = numbers + size, device
    return found


def power_bases(searches: Sequence[BasisSearch]) -> list[Tensor]:
    """Return orthonormal bases after one block power iteration of several gradients.

    The iteration is made in two halves, with columns made orthonormal after each: G and Gᵀ are
    applied to columns whose condition is that of G at most, not its square.
    """
    halves, owners = [], []
    for one in searches:
        length = one.gradient.shape[one.side == "right"]
        start = random_columns(one.gradient, one.side, one.rank, one.random)
        if one.old is not None:
            start = one.old.float() + start * (_FRESH / length**0.5)
        right = one.side == "right"
        halves.append(one.gradient.times(start) if right else one.gradient.transposed_times(start))
        owners.append(one.gradient if right else None)
    halves = orthonormal(halves, owners, passes=1)
    wholes, owners = [], []
    for one, half in zip(searches, halves, strict=True):
        right = one.side == "right"
        wholes.append(one.gradient.transposed_times(half) if right else one.gradient.times(half))
        owners.append(None if right else one.gradient)
    return orthonormal(wholes, owners)


def square_sum(tensor: Tensor) -> Tensor:
    """Return the sum of squares in float64, which neither overflows nor vanishes.

    torch copies what it sums to float64: some rows at a time, a large tensor needs little memory.
    """
    tensor = torch.atleast_1d(tensor)
    rows = max(_SQUARED_AT_ONCE * len(tensor) // max(tensor.numel(), 1), 1)
    norms = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in tensor.split(rows)]
    return torch.stack(norms).square().sum()


def direction_energies(projected: Tensor, side: Side) -> Tensor:
    """Return the sum of squares of R along each direction of the basis, in float64."""
    across = 1 if side == "left" else 0
    return torch.linalg.vector_norm(projected, dim=across, dtype=torch.float64).square()


def random_columns(
    gradient: GradientMatrix, side: Side, rank: int, random: torch.Generator
) -> Tensor:
    """Return Gaussian columns of the length of a basis, with the rows that this process has."""
    length = gradient.shape[side == "right"]
    columns = torch.randn(length, rank, generator=random, device=gradient.matrix.device)
    return gradient.own_rows(columns) if side == "left" else columns


def random_basis(search: BasisSearch) -> Tensor:
    """Return orthonormal columns that are chosen at random."""
    columns = random_columns(search.gradient, search.side, search.rank, search.random)
    (basis,) = orthonormal([columns], [search.gradient if search.side == "left" else None])
    return basis


def svd_basis(search: BasisSearch) -> Tensor:
    """Return the leading singular directions, by the singular value decomposition of all of G."""
    left, _, right = torch.linalg.svd(search.gradient.whole(), full_matrices=False)
    if search.side == "right":
        return right[: search.rank].mT.contiguous()
    return search.gradient.own_rows(left[:, : search.rank]).contiguous()


def energy_rank(gradient: GradientMatrix, share: float) -> int:
    """Return the smallest rank whose best subspace has a share of ‖G‖²."""
    squares = torch.linalg.svdvals(gradient.whole()).double().square()
    if not squares.sum() > 0:
        return 1
    reached = squares.cumsum(0) / squares.sum() >= share * (1 - 1e-12)
    return int(reached.float().argmax()) + 1


def orthonormal(
    several: Sequence[Tensor],
    rows_of: Sequence[GradientMatrix | None] | None = None,
    passes: int = 2,
) -> list[Tensor]:
    """Return orthonormal columns with the span of those given, by Cholesky-QR in float64.

    The first pass adds a shift to the Gram matrix, so that it can be factorised whatever the
    columns are; each later pass repairs what the one before left, and passes are added while a
    factorisation fails. Columns that depend on others are replaced by directions that rounding
    chooses.

    Args:
        several: Matrices (rows, r); those with equally many columns are factorised together.
        rows_of: For each the gradient whose rows are distributed over processes as its rows are.
        passes: Number of passes. After one the columns span the right space and are
            nearly orthonormal, except along directions 10⁵ times weaker than the strongest.

    Raises:
        JomaError: The columns are not finite.
    """
    owners = list(rows_of or [None] * len(several))
    found: list[Tensor] = [one.double() for one in several]
    for rank in {one.shape[1] for one in several}:
        chosen = [at for at, one in enumerate(several) if one.shape[1] == rank]
        done, shift = 0, _SHIFT * rank
        while rank and done < passes:
            grams = []
            for at in chosen:
                gram, owner = found[at].mT @ found[at], owners[at]
                grams.append(gram if owner is None else owner.sum_of_rows(gram))
            inner = torch.stack(grams)
            lengths = inner.diagonal(dim1=1, dim2=2).sqrt()
            lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
            inner = inner / lengths[:, :, None] / lengths[:, None, :]
            diagonal = inner.diagonal(dim1=1, dim2=2)
            diagonal.clamp_(min=1.0).add_(shift)  # a column of zeros stays one
            factors, failed = torch.linalg.cholesky_ex(inner)
            if int(failed.max()):
                if done > _MOST_PASSES or not bool(torch.isfinite(inner).all()):
                    raise JomaError("the subspace of a gradient is not finite")
                shift, passes = _SHIFT * rank, max(passes, done + 2)
                done += 1
                continue
            inverses = _inverse_of_triangles(factors) / lengths[:, None, :]
            for at, inverse in zip(chosen, inverses, strict=True):
                found[at] = found[at] @ inverse.mT
            done, shift = done + 1, 0.0
    return [one.to(before.dtype) for one, before in zip(found, several, strict=True)]


def _inverse_of_triangles(lower: Tensor) -> Tensor:
    """Return the inverses of lower triangular matrices, by blocks: two halves and a product."""
    size = lower.shape[-1]
    if size <= _BLOCK or size % 2:
        one = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
        return torch.linalg.solve_triangular(lower, one, upper=False)
    half = size // 2
    corners = torch.stack((lower[..., :half, :half], lower[..., half:, half:]))
    first, second = _inverse_of_triangles(corners)
    result = torch.zeros_like(lower)
    result[..., :half, :half], result[..., half:, half:] = first, second
    result[..., half:, :half] = -second @ lower[..., half:, :half] @ first
    return result


def lift(projected: Tensor, basis: Tensor, side: Side) -> Tensor:
    """Return PR or RPᵀ, in the type of the basis: the matrix of which R is the projection."""
    projected = projected.to(basis.dtype)
    return basis @ projected if side == "left" else projected @ basis.mT


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return a product in float32, of numbers in the type of the gradient."""
    if left.dtype == torch.float32 and right.dtype == torch.float32:
        return left @ right
    if left.is_cuda or left.is_meta:
        low = left.dtype if left.dtype != torch.float32 else right.dtype
        left, right = left.to(low), right.to(low)
        if left.is_meta:  # not every version of torch has this product there
            return left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def principal_angles(overlap: Tensor) -> Tensor:
    """Return the largest and the mean principal angle of two subspaces, in degrees.

    The singular values of P'ᵀP are the cosines of the angles.
    """
    cosines = torch.linalg.svdvals(overlap.double()).clamp(max=1.0)
    angles = torch.rad2deg(torch.arccos(cosines))
    return torch.stack([angles.amax(), angles.mean()]).float().cpu()


def nearest_rotation(overlap: Tensor) -> Tensor:
    """Return the rotation that takes a new basis closest to an old one (orthogonal Procrustes)."""
    left, _, right = torch.linalg.svd(overlap.double())
    return (left @ right).float()

"""The subspace of a gradient: block power iteration, a safe orthonormalisation, the exact SVD.

A gradient G (m, n) is projected on the left, R = PᵀG with P (m, r), or on the right, R = GP with
P (n, r). The columns of P are orthonormal and span, nearly, the r leading singular directions.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from joma.errors import JomaError
from joma.kernels.galore import Side, product

_FRESH = 0.5
"""Length of the random part of a warm start, next to a basis of length 1: a direction that the old
basis misses altogether is found through it."""
_SHIFT = 1e-13
"""Added to a Gram matrix with a diagonal of ones, for each of its rows: above the rounding of
float64, so that the factorisation exists for any columns."""

_MOST_PASSES = 6
_SQUARED_AT_ONCE = 1 << 22
"""Numbers whose squares are summed at once, if rows are not longer: 32 MiB in float64."""


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
    if side == "short":
        return "left" if rows < columns else "right"
    if side == "smallest":
        left = projector_bytes * rows + moment_bytes * columns
        return "left" if left < projector_bytes * columns + moment_bytes * rows else "right"
    return "left" if side == "left" else "right"


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
        return self.mean(product(self.matrix, right))

    def transposed_times(self, left: Tensor) -> Tensor:
        """Return GᵀY for Y (m, r), of which this process has the rows it has of G."""
        return self.sum_of_rows(self.mean(product(self.matrix.mT, left)))

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
        return self.sum_of_rows(self.mean(product(basis.mT, self.matrix)))

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


def find_basis(
    gradient: GradientMatrix,
    side: Side,
    rank: int,
    old: Tensor | None,
    random: torch.Generator,
    kind: Literal["power", "svd", "random"] = "power",
) -> Tensor:
    """Return an orthonormal basis, this process's rows of it.

    A power iteration is made in two halves, with columns made orthonormal after each: G and Gᵀ are
    applied to columns whose condition is that of G at most, not its square.

    Args:
        gradient: The gradient.
        side: Which singular directions.
        rank: Number of columns.
        old: The basis to start from, (m, rank) or (n, rank), if any.
        random: Where random numbers come from; the same on every process.
        kind: "power" for one block power iteration, "svd" for the singular value decomposition of
            all of G, "random" for directions chosen at random.
    """
    right = side == "right"
    if kind == "svd":
        lefts, _, rights = torch.linalg.svd(gradient.whole(), full_matrices=False)
        if right:
            return rights[:rank].mT.contiguous()
        return gradient.own_rows(lefts[:, :rank]).contiguous()
    length, device = gradient.shape[right], gradient.matrix.device
    columns = torch.randn(length, rank, generator=random, device=device)
    columns = columns if right else gradient.own_rows(columns)
    if kind == "random":
        return orthonormal(columns, None if right else gradient)
    if old is not None:
        columns = old.float() + columns * (_FRESH / length**0.5)
    if right:
        half = orthonormal(gradient.times(columns), gradient, passes=1)
        return orthonormal(gradient.transposed_times(half))
    half = orthonormal(gradient.transposed_times(columns), passes=1)
    return orthonormal(gradient.times(half), gradient)


def square_sum(tensor: Tensor) -> Tensor:
    """Return the sum of squares in float64, which neither overflows nor vanishes.

    torch copies what it sums to float64: some rows at a time, a large tensor needs little memory.
    """
    tensor = torch.atleast_1d(tensor)
    rows = max(_SQUARED_AT_ONCE * len(tensor) // max(tensor.numel(), 1), 1)
    norms = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in tensor.split(rows)]
    return torch.stack(norms).square().sum()


def energy_rank(gradient: GradientMatrix, share: float) -> int:
    """Return the smallest rank whose best subspace has a share of ‖G‖²."""
    squares = torch.linalg.svdvals(gradient.whole()).double().square()
    if not squares.sum() > 0:
        return 1
    reached = squares.cumsum(0) / squares.sum() >= share * (1 - 1e-12)
    return int(reached.float().argmax()) + 1


def orthonormal(columns: Tensor, rows_of: GradientMatrix | None = None, passes: int = 2) -> Tensor:
    """Return orthonormal columns with the span of those given, by Cholesky-QR in float64.

    The first pass adds a shift to the Gram matrix, so that it can be factorised whatever the
    columns are; each later pass repairs what the one before left, and passes are added while a
    factorisation fails. Columns that depend on others are replaced by directions that rounding
    chooses.

    Args:
        columns: Matrix (rows, r).
        rows_of: The gradient whose rows are distributed over processes as its rows are.
        passes: Number of passes. After one the columns span the right space and are
            nearly orthonormal, except along directions 10⁵ times weaker than the strongest.

    Raises:
        JomaError: The columns are not finite.
    """
    found, done, shift = columns.double(), 0, _SHIFT * columns.shape[1]
    while done < passes:
        gram = found.mT @ found
        gram = gram if rows_of is None else rows_of.sum_of_rows(gram)
        lengths = gram.diagonal().sqrt()
        lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
        gram = gram / lengths[:, None] / lengths
        gram.diagonal().clamp_(min=1.0).add_(shift)  # a column of zeros stays one
        factor, failed = torch.linalg.cholesky_ex(gram)
        done += 1
        if int(failed):
            if done > _MOST_PASSES or not bool(torch.isfinite(gram).all()):
                raise JomaError("the subspace of a gradient is not finite")
            shift, passes = _SHIFT * columns.shape[1], max(passes, done + 1)
            continue
        found = torch.linalg.solve_triangular(factor.mT, found / lengths, upper=True, left=False)
        shift = 0.0
    return found.to(columns.dtype)


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

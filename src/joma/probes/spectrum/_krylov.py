"""The top of a spectrum from a random start, with a bound that holds with stated probability.

Let M = A·Aᵀ with eigenvalues λ₁ ≥ λ₂ ≥ … and unit eigenvectors u_i, and Ω a Gaussian start of b
columns. Block Lanczos builds V_j = P_j-transformed powers of M on Ω, Qᵀ·Q ⪯ 1 for Q = [V_0 … V_q],
where P_j are b × b matrix polynomials known from the recurrence. **Below:** the Rayleigh quotient
of any vector is at most λ₁. **Above:** let g = u₁ᵀΩ, which is N(0, 1_b) whatever M is. Since
u₁ᵀV_j = gᵀP_j(λ₁) and the u₁-components of Q add up to at most 1,

    gᵀ·K(λ₁)·g ≤ 1,   K(λ) = Σ_j P_j(λ)·P_j(λ)ᵀ  (the Christoffel kernel of the start).

With probability 1 − δ the chi-square variable ‖g‖² exceeds its δ-quantile r, so λ₁ cannot be a λ
at which r·K(λ) ≻ 1: the smallest such λ above the Rayleigh quotient bounds λ₁. Nothing is assumed
of the spectrum. K grows exponentially beyond the spectrum's edge, so the bound closes as fast as
the method converges; it stays wider than the true error because it must exclude an eigenvector the
start happens to miss.

**Between the values of λ that are tried** the least eigenvalue of K is taken to grow. For one
column that is a theorem (all zeros of P_j lie below the top Ritz value); for blocks it is not: over
4,500 random cases it fell somewhere in 25, by .05% at the most. The margin of 1% is there for it,
and every λ tried beyond the bound, up to 8% and more, must be excluded, too.

A new block is W·X, where W = M·V_j less what the basis already has. Directions of W of the size of
rounding are not blown up to length 1: they stay short, which the inequality allows (they say that M
gives almost nothing there, without which a matrix of rank one would have no bound). Small ones are
not multiplied on: they have lost digits to cancellation. Where later blocks come to overlap them,
Qᵀ·Q exceeds 1; it is measured, and K divided by it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from scipy.special import gammaincinv
from torch import Tensor

_KEPT = {torch.float32: 1e-3, torch.float64: 1e-7}
"""Directions of a new block below this share of ‖M‖ have lost digits: they are not built upon."""
_RIDGE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Directions below this share of ‖M‖ are rounding: they are not blown up to length 1."""
_MARGIN = 1.01
"""By how much r·K must exceed 1."""
_MOST_SQUARINGS = 18
"""More would cost as much as all eigenvectors."""


@cache
def chi_square_floor(degrees: int, failure: float) -> float:
    """What a chi-square variable of that many degrees exceeds with probability 1 − failure."""
    return 2.0 * float(gammaincinv(degrees / 2, failure))


def squarings_for(size: int, miss: float) -> int:
    """How often a matrix of that size is squared to find its top eigenvalue up to a share.

    The column of the power 2^s that has most of the top eigenvector has at least 1/size of it, so
    the best of all columns misses at most (ln size + 1)/2^(s+1) of the eigenvalue.
    """
    return max(0, math.ceil(math.log2((math.log(size) + 1) / (2 * miss))))


@dataclass(eq=False)
class Krylov:
    """A growing block Krylov basis of L operators at once.

    Attributes:
        apply: M of a block, (L, s, b) → (L, s, b).
        start_LSB: the Gaussian start Ω.
        careful: find the short directions of every block by its eigenvectors; otherwise blocks are
            taken to have full rank, and `sound` says whether they had.
        blocks: V_j, short columns included.
        kept: which columns of V_j are orthonormal, (L, b); the others are short.
        columns: Qᵀ·M·V_j over kept columns, (L, (j + 1)·b, b).
        scalings: X of each block, in float64.
    """

    apply: Callable[[Tensor], Tensor]
    start_LSB: Tensor
    careful: bool = True
    blocks: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    scalings: list[Tensor] = field(default_factory=list)
    size_L: Tensor | None = None

    def __post_init__(self) -> None:
        self._append(self.start_LSB, _gram(self.start_LSB), None)

    @property
    def applications(self) -> int:
        """How often M was applied."""
        return len(self.columns)

    def extend(self) -> None:
        """One more application of M and one more block of the basis."""
        all_LSN = self._orthonormal(self.applications + 1)
        b = self.start_LSB.shape[-1]
        rest = self.apply(all_LSN[..., -b:])
        first_LNB = all_LSN.mT @ rest
        rest = torch.baddbmm(rest, all_LSN, first_LNB, alpha=-1)
        # Once is not enough: what rounding leaves of the old directions would grow step by step.
        second_LNB = all_LSN.mT @ rest
        rest = torch.baddbmm(rest, all_LSN, second_LNB, alpha=-1)
        column_LNB = first_LNB + second_LNB
        gram = _gram(rest)
        own = column_LNB[:, -b:].diagonal(dim1=-2, dim2=-1).amax(-1)
        size = torch.maximum(own, gram.diagonal(dim1=-2, dim2=-1).amax(-1).sqrt())
        self.size_L = size if self.size_L is None else torch.maximum(self.size_L, size)
        self.columns.append(column_LNB)
        self._append(rest, gram, self.size_L)

    def sound(self) -> Tensor:
        """Whether every block had full rank where that was taken for granted, (L,)."""
        lengths = torch.cat(self.blocks, -1).square().sum(-2)
        return ((lengths - 1).abs() < 1e-3).all(-1)  # not so where a factorisation made NaN

    def ritz(self, miss: float) -> tuple[Tensor, Tensor]:
        """The top eigenvalue within the basis, (L,), and a unit vector close to it, (L, s).

        Args:
            miss: by what share of it the value may be too small.
        """
        count = self.applications
        project = self._projection()
        squarings = squarings_for(project.shape[-1], miss)
        if project.is_cuda and project.dtype == torch.float32 and squarings <= _MOST_SQUARINGS:
            # Products are what a GPU does fast.
            power = _squared(project, squarings)
            square_LN = power.square().sum(-2)
            quotient_LN = (power * (project @ power)).sum(-2) / square_LN
            best_L = quotient_LN.where(square_LN > 1e-20, 0.0).argmax(-1)
            y_LN = power[torch.arange(len(best_L), device=best_L.device), :, best_L]
            y_LN = y_LN / torch.linalg.vector_norm(y_LN, dim=-1, keepdim=True).clamp(min=1e-30)
        else:
            project = project.nan_to_num()  # what overflowed is found by its quotient
            y_LN = torch.linalg.eigh(project.double()).eigenvectors[..., -1].to(project.dtype)
        top_L = (y_LN.unsqueeze(-2) @ project @ y_LN.unsqueeze(-1)).flatten()
        x_LS = (self._orthonormal(count) @ y_LN.unsqueeze(-1)).squeeze(-1)
        return top_L.double(), x_LS / torch.linalg.vector_norm(x_LS, dim=-1, keepdim=True).clamp(
            min=1e-30
        )

    def top(self, k: int) -> Tensor:
        """Unit vectors close to the k top eigenvectors of the first operator, (s, k)."""
        vector_NN = torch.linalg.eigh(self._projection()[0].double()).eigenvectors
        top_NK = vector_NN[:, -k:].flip(1).to(self.start_LSB.dtype)
        x_SK = self._orthonormal(self.applications)[0] @ top_NK
        return x_SK / torch.linalg.vector_norm(x_SK, dim=0).clamp(min=1e-30)

    def excluded(self, value_LG: Tensor, failure: float) -> Tensor:
        """Which values the top eigenvalue cannot have, but with that probability: r·K(λ) ≻ 1.

        K is kept as K⁻¹ = F·Fᵀ, and the polynomials as Fᵀ·P: the least eigenvalue of K, which
        decides, is then the greatest of F·Fᵀ, and nothing overflows. A margin makes up for what
        that eigenvalue may fall between two values of λ (see the top of this file).

        Args:
            value_LG: λ, each above the top eigenvalue within the basis.
            failure: probability, over the start, that λ₁ is excluded wrongly.
        """
        L, G = value_LG.shape
        b = self.start_LSB.shape[-1]
        value = value_LG.double().reshape(L * G, 1, 1)
        one = torch.eye(b, dtype=torch.float64, device=value.device)
        first = self.scalings[0]
        # P_0·P_0ᵀ = X·Xᵀ, so F = X⁻ᵀ and Fᵀ·P_0 = 1.
        factor = torch.linalg.inv_ex(first).inverse.mT.repeat_interleave(G, 0)
        white = one.repeat(L * G, 1, 1)
        for column, scaling, kept in zip(
            self.columns, self.scalings[1:], self.kept[:-1], strict=True
        ):
            column, scaling, kept = (
                x.double().repeat_interleave(G, 0) for x in (column, scaling, kept)
            )
            last = white[:, :, -b:] * kept.unsqueeze(-2)
            new = (value * last - white @ column) @ scaling
            root, _ = torch.linalg.cholesky_ex(one + new @ new.mT)
            white = torch.linalg.solve_triangular(root, torch.cat([white, new], -1), upper=False)
            factor = torch.linalg.solve_triangular(root, factor.mT, upper=False).mT
        defect = self._defect().double().repeat_interleave(G)
        quantile = chi_square_floor(b, failure) / (_MARGIN * defect)
        _, info = torch.linalg.cholesky_ex(quantile[:, None, None] * one - factor @ factor.mT)
        return (info == 0).view(L, G)

    def _projection(self) -> Tensor:
        """Qᵀ·M·Q over kept columns, (L, N, N)."""
        count, b = self.applications, self.start_LSB.shape[-1]
        matrix = self.start_LSB.new_zeros(len(self.start_LSB), count * b, count * b)
        for j, column in enumerate(self.columns):
            matrix[:, : (j + 1) * b, j * b : (j + 1) * b] = column
            matrix[:, j * b : (j + 1) * b, : j * b] = column[:, : j * b].mT
        return matrix

    def _append(self, block: Tensor, gram: Tensor, size_L: Tensor | None) -> None:
        b = block.shape[-1]
        kept = torch.ones(len(block), b, dtype=torch.bool, device=block.device)
        if size_L is None or not self.careful:
            one = torch.eye(b, dtype=gram.dtype, device=gram.device)
            root, _ = torch.linalg.cholesky_ex(gram, upper=True)
            scaling = torch.linalg.solve_triangular(root, one.expand_as(root), upper=True)
        else:
            value_LB, vector_LBB = torch.linalg.eigh(gram)
            squared_L1 = size_L.double().square().clamp(min=1e-30).unsqueeze(-1)
            kept = value_LB > squared_L1 * _KEPT[block.dtype] ** 2
            length_LB = torch.maximum(value_LB, squared_L1 * _RIDGE[block.dtype] ** 2).sqrt()
            scaling = vector_LBB / length_LB.unsqueeze(-2)
        self.blocks.append(block @ scaling.to(block.dtype))
        self.kept.append(kept)
        self.scalings.append(scaling)

    def _orthonormal(self, count: int) -> Tensor:
        """The kept columns of the first blocks, zeros in place of the short ones, (L, s, N)."""
        all_LSN = torch.cat(self.blocks[:count], -1)
        if not self.careful:
            return all_LSN
        return all_LSN * torch.cat(self.kept[:count], -1).unsqueeze(-2)

    def _defect(self) -> Tensor:
        """An upper bound of the greatest eigenvalue of Qᵀ·Q, (L,): 1 but for rounding."""
        all_LSN = torch.cat(self.blocks, -1)
        return (all_LSN.mT @ all_LSN).abs().sum(-1).amax(-1)


def _squared(power: Tensor, times: int) -> Tensor:
    """The matrix to the power 2^times, but for its length."""
    for _ in range(times):
        power = power / torch.linalg.matrix_norm(power, keepdim=True).clamp(min=1e-30)
        power = power @ power
    return power / torch.linalg.matrix_norm(power, keepdim=True).clamp(min=1e-30)


def _gram(block: Tensor) -> Tensor:
    """blockᵀ·block in float64: in float32, directions below 3e-4 of the greatest would be noise."""
    wide = block.double()
    return wide.mT @ wide

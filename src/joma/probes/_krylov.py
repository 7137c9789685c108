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
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from joma.probes._matrix import Operator

_KEPT = {torch.float32: 3e-5, torch.float64: 1e-7}
"""Directions of a new block below this share of ‖M‖ have lost digits: they are not built upon.

At 1e-3 the bounds of fast spectra (σ ∝ 1/i) could stand still, and a certificate was needed.
"""
_RIDGE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Directions below this share of ‖M‖ are rounding: they are not blown up to length 1."""
_MARGIN = 1.01
"""By how much r·K must exceed 1."""
_STEPS = 12
_MISS = 0.08
"""Share of the tolerance by which the top eigenvalue within the basis may be missed."""


@cache
def chi_square_floor(degrees: int, failure: float) -> float:
    """Return the quantile that a chi-square variable exceeds with probability 1 − failure."""
    from scipy.special import gammaincinv

    return 2.0 * float(gammaincinv(degrees / 2, failure)) * (1 - 1e-9)


class Iterated(NamedTuple):
    """The top of a spectrum as an iteration leaves it.

    Attributes:
        floor: σ₁²/‖A‖_F² is at least this.
        share: 1/floor exceeds the true stable rank by at most this share of it.
        products: how often the matrix was multiplied with a block of vectors.
        vector_S: a unit vector near the top one.
    """

    floor: float
    share: float
    products: int
    vector_S: Tensor


def iterate(linear: Operator, tolerance: float, seed: int, failure: float) -> Iterated | None:
    """Run block Lanczos until the bound is at most the tolerance.

    There is no answer where the basis has no more room or the bounds stop falling.

    Args:
        linear: a matrix that is not 0.
        tolerance: wanted bound as a share of the value.
        seed: of the random start.
        failure: probability, over the start, that the bound does not hold.
    """
    b = min(16, linear.side // 8)
    last = linear.side // max(b, 1) - 1
    # So short a side has no room to iterate in; a tolerance below the rounding cannot be met.
    if b < 4 or linear.rounding >= tolerance:
        return None
    krylov = Krylov(linear.apply, gaussian(linear, b, seed))
    shares: list[float] = []
    check = 3
    while krylov.applications < last:
        krylov.extend()
        if krylov.applications < min(check, last):
            continue
        top, x_S = krylov.ritz()
        floor = linear.quotient(x_S)
        ceiling = top * (1 + krylov.excess(top, tolerance, linear.rounding, failure))
        share = ceiling / floor - 1 + linear.rounding if floor > 0 else -1.0
        if share < 0:  # a ceiling below the floor, or none, is rounding that got out of hand
            return None
        if share <= tolerance:
            return Iterated(floor, share, 2 * krylov.applications + 1, x_S)
        shares.append(share)
        if len(shares) > 2 and math.isfinite(shares[-3]) and min(shares[-2:]) >= shares[-3]:
            return None  # the last two checks brought nothing: the rest is too small to build upon
        check = krylov.applications + max(1, krylov.applications // 4)  # a check takes a few steps
    return None


def gaussian(linear: Operator, columns: int, seed: int) -> Tensor:
    """Return a Gaussian start for a matrix, (s, columns)."""
    dice = torch.Generator(linear.device).manual_seed(seed)
    shape = (linear.side, columns)
    return torch.randn(shape, generator=dice, device=linear.device, dtype=linear.dtype)


class Krylov:
    """A growing block Krylov basis; small matrices are kept and factorised on the CPU, in float64.

    Args:
        apply: M of a block, (s, b) → (s, b).
        start_SB: the Gaussian start Ω.
    """

    def __init__(self, apply: Callable[[Tensor], Tensor], start_SB: Tensor) -> None:
        self._apply = apply
        self._b = start_SB.shape[-1]
        self._basis_SN = start_SB[:, :0]
        """All V_j, short columns included."""
        self._kept_N = torch.zeros(0, dtype=torch.bool)
        """Which columns are orthonormal; the others are short."""
        self._columns: list[Tensor] = []
        """Qᵀ·M·V_j over kept columns, ((j + 1)·b, b)."""
        self._scalings: list[Tensor] = []
        """X of each block."""
        root = torch.linalg.cholesky(_gram(start_SB).cpu(), upper=True)
        self._append(start_SB, torch.linalg.inv(root), torch.ones(self._b, dtype=torch.bool))
        self._size = 0.0
        """The largest ‖M·V_j‖ so far."""

    @property
    def applications(self) -> int:
        """How often M was applied."""
        return len(self._columns)

    def extend(self) -> None:
        """Apply M once more and append a block to the basis."""
        all_SN = self._orthonormal()
        rest = self._apply(all_SN[:, -self._b :])
        first_NB = all_SN.mT @ rest
        rest = torch.addmm(rest, all_SN, first_NB, alpha=-1)
        # Once is not enough: what rounding leaves of the old directions would grow step by step.
        second_NB = all_SN.mT @ rest
        rest = torch.addmm(rest, all_SN, second_NB, alpha=-1)
        small = torch.cat([(first_NB + second_NB).double(), _gram(rest)]).cpu()  # one wait
        column_NB, gram = small[: -self._b], small[-self._b :]
        sizes = (column_NB[-self._b :].diagonal().amax(), gram.diagonal().amax().sqrt())
        self._size = max(self._size, *map(float, sizes), 1e-15)
        self._columns.append(column_NB)
        value_B, vector_BB = torch.linalg.eigh(gram)
        ridge, kept = (self._size * of[rest.dtype] for of in (_RIDGE, _KEPT))
        length_B = value_B.clamp(min=ridge**2).sqrt()
        self._append(rest, vector_BB / length_B, value_B > kept**2)

    def ritz(self) -> tuple[float, Tensor]:
        """Return the top eigenvalue within the basis, and a unit vector close to it."""
        project = self._projection()
        y_N = torch.linalg.eigh(project).eigenvectors[:, -1]
        return float(y_N @ (project @ y_N)), self._vectors(y_N[:, None]).squeeze(-1)

    def top(self, k: int) -> Tensor:
        """Return unit vectors close to the k top eigenvectors, (s, k)."""
        vector_NN = torch.linalg.eigh(self._projection()).eigenvectors
        return self._vectors(vector_NN[:, -k:].flip(1))

    def excess(self, top: float, tolerance: float, slack: float, failure: float) -> float:
        """Return how far above the estimate the top eigenvalue can lie, as a share of it.

        It is ∞ where no value that is tried, and all beyond it, can be excluded.
        """
        powers = torch.arange(-_STEPS // 2, _STEPS, dtype=torch.float64)
        # K grows only beyond the top eigenvalue of the projection, which may be missed a little.
        excess_G = max(tolerance - slack, 1e-6) * 0.98 * 1.5**powers
        excess_G = excess_G.clamp(min=_MISS * tolerance)
        out_G = self.excluded(top * (1 + excess_G), failure)
        at = len(out_G) - int(out_G.flip(0).to(torch.int8).cummin(0).values.sum())
        return float(excess_G[at]) if at < len(out_G) else math.inf

    def excluded(self, value_G: Tensor, failure: float) -> Tensor:
        """Return which values the top eigenvalue cannot have, where r·K(λ) ≻ 1.

        K is kept as K⁻¹ = F·Fᵀ, and the polynomials as Fᵀ·P: the least eigenvalue of K, which
        decides, is then the greatest of F·Fᵀ, and nothing overflows. A margin makes up for what
        that eigenvalue may fall between two values of λ (see the top of this file).

        Args:
            value_G: λ, each above the top eigenvalue within the basis.
            failure: probability, over the start, that λ₁ is excluded wrongly.
        """
        G, b = len(value_G), self._b
        value = value_G.reshape(G, 1, 1)
        one = torch.eye(b, dtype=torch.float64)
        # P_0·P_0ᵀ = X·Xᵀ, so F = X⁻ᵀ and Fᵀ·P_0 = 1.
        factor = torch.linalg.inv_ex(self._scalings[0]).inverse.mT.expand(G, b, b)
        white = one.repeat(G, 1, 1)
        kept = self._kept_N.double().split(b)
        for column, scaling, kept_B in zip(
            self._columns, self._scalings[1:], kept[:-1], strict=True
        ):
            new = (value * (white[:, :, -b:] * kept_B) - white @ column) @ scaling
            root, _ = torch.linalg.cholesky_ex(one + new @ new.mT)
            white = torch.linalg.solve_triangular(root, torch.cat([white, new], -1), upper=False)
            factor = torch.linalg.solve_triangular(root, factor.mT, upper=False).mT
        quantile = chi_square_floor(b, failure) / (_MARGIN * self._defect())
        _, info = torch.linalg.cholesky_ex(quantile * one - factor @ factor.mT)
        return info == 0

    def _projection(self) -> Tensor:
        """Return Qᵀ·M·Q over kept columns, (N, N)."""
        count, b = self.applications, self._b
        matrix = torch.zeros(count * b, count * b, dtype=torch.float64)
        for j, column in enumerate(self._columns):
            matrix[: (j + 1) * b, j * b : (j + 1) * b] = column
            matrix[j * b : (j + 1) * b, : j * b] = column[: j * b].mT
        return matrix.nan_to_num()  # what overflowed is found by its quotient

    def _append(self, block: Tensor, scaling: Tensor, kept: Tensor) -> None:
        self._basis_SN = torch.cat([self._basis_SN, block @ scaling.to(block)], -1)
        self._scalings.append(scaling)
        self._kept_N = torch.cat([self._kept_N, kept])

    def _orthonormal(self) -> Tensor:
        """Return the kept columns of the basis, zeros in place of the short ones, (s, N)."""
        return self._basis_SN * self._kept_N.to(self._basis_SN.device)

    def _vectors(self, y_NK: Tensor) -> Tensor:
        """Return unit vectors of these coefficients, (s, k)."""
        x_SK = self._orthonormal()[:, : len(y_NK)] @ y_NK.to(self._basis_SN)
        return x_SK / torch.linalg.vector_norm(x_SK, dim=0).clamp(min=1e-30)

    def _defect(self) -> float:
        """Return an upper bound of the greatest eigenvalue of Qᵀ·Q: 1 but for rounding."""
        return float((self._basis_SN.mT @ self._basis_SN).abs().sum(-1).amax())


def _gram(block: Tensor) -> Tensor:
    """Return blockᵀ·block in float64: float32 turns directions below 3e-4 of the top into noise."""
    wide = block.double()
    return wide.mT @ wide

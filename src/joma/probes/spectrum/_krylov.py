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

_KEPT = {torch.float32: 3e-5, torch.float64: 1e-7}
"""Directions of a new block below this share of ‖M‖ have lost digits: they are not built upon.

At 1e-3 the bounds of fast spectra (σ ∝ 1/i) could stand still, and a certificate was needed.
"""
_RIDGE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Directions below this share of ‖M‖ are rounding: they are not blown up to length 1."""
_MARGIN = 1.01
"""By how much r·K must exceed 1."""
_GAMMAINC_ERROR = 1e-9
"""Quantiles from torch's incomplete gamma function are off by up to 2·10⁻¹⁰."""


@cache
def chi_square_floor(degrees: int, failure: float) -> float:
    """Return the quantile that a chi-square variable exceeds with probability 1 − failure.

    Bisected, and never above the quantile itself; a first measurement that had to import SciPy
    for it would take 0.13 s longer.
    """

    def is_below(x: float) -> bool:
        half, bound = torch.tensor((degrees / 2, x), dtype=torch.float64, device="cpu")
        return bool(torch.special.gammainc(half, bound) <= failure)

    # P(a, x) ≤ xᵃ / Γ(a + 1): the quantile is not below where that is the failure.
    low = math.exp((math.log(failure) + math.lgamma(degrees / 2 + 1)) * 2 / degrees)
    high = max(2 * low, 1.0)
    while is_below(high):
        high *= 2
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return 2.0 * low * (1 - _GAMMAINC_ERROR)


def next_check(checks: list[tuple[int, float]], tolerance: float) -> int:
    """Return when to compute the bound again: bounds fall geometrically once they are finite.

    Args:
        checks: applications so far and what bound they gave, as a share of the value; may be ∞.
        tolerance: wanted share.
    """
    now, share = checks[-1]
    if math.isinf(share):
        return 2 * now
    then, before = checks[-2] if len(checks) > 1 else (now, math.inf)
    if math.isinf(before) or before <= share:
        # As if the first application had given a bound of 100%.
        steps = (now - 1) * math.log(share / tolerance) / max(-math.log(share), 1e-6)
        return now + max(1, min(math.ceil(now / 2), math.ceil(steps)))
    steps = (now - then) * math.log(share / tolerance) / math.log(before / share)
    return now + min(max(math.ceil(steps), 1), now)


class Iterated(NamedTuple):
    """The top of a spectrum as an iteration leaves it.

    Attributes:
        floor: σ₁²/‖A‖_F² is at least this.
        share: 1/floor exceeds the true stable rank by at most this share of it.
        norm: ‖A‖_F.
        products: how often the matrix was multiplied with a block of vectors.
        vector_S: a unit vector near the top one.
    """

    floor: float
    share: float
    norm: float
    products: int
    vector_S: Tensor


class Krylov:
    """A growing block Krylov basis.

    Args:
        apply: M of a block, (s, b) → (s, b).
        start_SB: the Gaussian start Ω.
    """

    def __init__(self, apply: Callable[[Tensor], Tensor], start_SB: Tensor) -> None:
        self._apply = apply
        self._b = start_SB.shape[-1]
        self._blocks: list[Tensor] = []
        """V_j, short columns included."""
        self._kept: list[Tensor] = []
        """Which columns of V_j are orthonormal, (b,); the others are short."""
        self._columns: list[Tensor] = []
        """Qᵀ·M·V_j over kept columns, ((j + 1)·b, b)."""
        self._scalings: list[Tensor] = []
        """X of each block, in float64."""
        root, _ = torch.linalg.cholesky_ex(_gram(start_SB), upper=True)
        one = torch.eye(self._b, dtype=root.dtype, device=root.device)
        scaling = torch.linalg.solve_triangular(root, one, upper=True)
        self._append(start_SB, scaling, torch.ones(self._b, dtype=torch.bool, device=root.device))
        self._size = one.new_zeros(())
        """The largest ‖M·V_j‖ so far."""

    @property
    def applications(self) -> int:
        """How often M was applied."""
        return len(self._columns)

    def extend(self) -> None:
        """Apply M once more and append a block to the basis."""
        all_SN = self._orthonormal(self.applications + 1)
        rest = self._apply(all_SN[:, -self._b :])
        first_NB = all_SN.mT @ rest
        rest = torch.addmm(rest, all_SN, first_NB, alpha=-1)
        # Once is not enough: what rounding leaves of the old directions would grow step by step.
        second_NB = all_SN.mT @ rest
        rest = torch.addmm(rest, all_SN, second_NB, alpha=-1)
        column_NB = first_NB + second_NB
        gram = _gram(rest)
        for size in (column_NB[-self._b :].diagonal().amax(), gram.diagonal().amax().sqrt()):
            self._size = torch.maximum(self._size, size.double())
        self._columns.append(column_NB)
        value_B, vector_BB = torch.linalg.eigh(gram)
        squared = self._size.double().square().clamp(min=1e-30)
        length_B = torch.maximum(value_B, squared * _RIDGE[rest.dtype] ** 2).sqrt()
        self._append(rest, vector_BB / length_B, value_B > squared * _KEPT[rest.dtype] ** 2)

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return the top eigenvalue within the basis, in float64, and a unit vector close to it."""
        project = self._projection().nan_to_num()  # what overflowed is found by its quotient
        y_N = torch.linalg.eigh(project.double()).eigenvectors[:, -1].to(project.dtype)
        x_S = (self._orthonormal(self.applications) @ y_N[:, None]).squeeze(-1)
        length = torch.linalg.vector_norm(x_S).clamp(min=1e-30)
        return (y_N[None] @ project @ y_N[:, None]).double().squeeze(), x_S / length

    def top(self, k: int) -> Tensor:
        """Return unit vectors close to the k top eigenvectors, (s, k)."""
        vector_NN = torch.linalg.eigh(self._projection().double()).eigenvectors
        top_NK = vector_NN[:, -k:].flip(1).to(self._blocks[0].dtype)
        x_SK = self._orthonormal(self.applications) @ top_NK
        return x_SK / torch.linalg.vector_norm(x_SK, dim=0).clamp(min=1e-30)

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
        value = value_G.double().reshape(G, 1, 1)
        one = torch.eye(b, dtype=torch.float64, device=value.device)
        # P_0·P_0ᵀ = X·Xᵀ, so F = X⁻ᵀ and Fᵀ·P_0 = 1.
        factor = torch.linalg.inv_ex(self._scalings[0]).inverse.mT.expand(G, b, b)
        white = one.repeat(G, 1, 1)
        for column, scaling, kept in zip(
            self._columns, self._scalings[1:], self._kept[:-1], strict=True
        ):
            last = white[:, :, -b:] * kept.double()
            new = (value * last - white @ column.double()) @ scaling
            root, _ = torch.linalg.cholesky_ex(one + new @ new.mT)
            white = torch.linalg.solve_triangular(root, torch.cat([white, new], -1), upper=False)
            factor = torch.linalg.solve_triangular(root, factor.mT, upper=False).mT
        quantile = chi_square_floor(b, failure) / (_MARGIN * self._defect())
        _, info = torch.linalg.cholesky_ex(quantile * one - factor @ factor.mT)
        return info == 0

    def _projection(self) -> Tensor:
        """Return Qᵀ·M·Q over kept columns, (N, N)."""
        count, b = self.applications, self._b
        matrix = self._blocks[0].new_zeros(count * b, count * b)
        for j, column in enumerate(self._columns):
            matrix[: (j + 1) * b, j * b : (j + 1) * b] = column
            matrix[j * b : (j + 1) * b, : j * b] = column[: j * b].mT
        return matrix

    def _append(self, block: Tensor, scaling: Tensor, kept: Tensor) -> None:
        self._blocks.append(block @ scaling.to(block.dtype))
        self._scalings.append(scaling)
        self._kept.append(kept)

    def _orthonormal(self, count: int) -> Tensor:
        """Return the kept columns of the first blocks, zeros in place of the short ones, (s, N)."""
        return torch.cat(self._blocks[:count], -1) * torch.cat(self._kept[:count])

    def _defect(self) -> float:
        """Return an upper bound of the greatest eigenvalue of Qᵀ·Q: 1 but for rounding."""
        all_SN = torch.cat(self._blocks, -1)
        return float((all_SN.mT @ all_SN).abs().sum(-1).amax())


def _gram(block: Tensor) -> Tensor:
    """Return blockᵀ·block in float64: float32 turns directions below 3e-4 of the top into noise."""
    wide = block.double()
    return wide.mT @ wide

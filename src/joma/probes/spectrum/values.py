"""Top singular values, the energy in the top directions, effective rank: each with its bound."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.probes.spectrum._certificate import gram_matrix
from joma.probes.spectrum._krylov import Krylov
from joma.probes.spectrum._matrix import Operator, check_finite, checked, plain_arithmetic
from joma.probes.spectrum.stable import StableRank

_LARGE = 2048
"""Shorter sides beyond this are not solved whole unless asked."""
_EPS = 2.0**-53
_ADDED_UP = 2e-5
"""By how much of itself a square of a norm may be off that is added up in float32."""


@dataclass(frozen=True)
class Energy:
    """Share of ‖A‖_F² in the top r singular directions (the GaLore question).

    Attributes:
        value: Σ_{i ≤ r} σ_i² / ‖A‖_F², at most the true share but for rounding.
        bound: |value − true| ≤ bound.
        certain: as of `SingularValues`.
    """

    value: float
    bound: float
    certain: bool


@dataclass(frozen=True, eq=False)
class SingularValues:
    """The greatest singular values of a matrix, in descending order.

    Attributes:
        values: (k,), float64.
        bounds: (k,), float64: within this of each value lies a singular value of the matrix.
        certain: True where all singular values were computed, so that none can have been passed
            over; False where the iteration found these, as it does from almost every start.
        frobenius: ‖A‖_F.
        rounding: by how much of itself ‖A‖_F² may be off.
    """

    values: Tensor
    bounds: Tensor
    certain: bool
    frobenius: float
    rounding: float

    def energy(self, r: int) -> Energy:
        """Return the share of ‖A‖_F² in the top r of these directions.

        Args:
            r: How many directions, from 1 to the number of these values.
        """
        known = len(self.values)
        if isinstance(r, bool) or not isinstance(r, int) or not 1 <= r <= known:
            raise JomaError(
                f"r must be a whole number from 1 to {known}, the number of known values, got {r!r}"
            )
        if self.frobenius == 0:
            return Energy(0.0, 0.0, True)
        values, bounds = self.values[:r] / self.frobenius, self.bounds[:r] / self.frobenius
        share = float(values.square().sum())
        spread = float(((values + bounds).square() - values.square()).sum())
        return Energy(min(share, 1.0), spread + self.rounding * share, self.certain)

    def stable_rank(self) -> StableRank:
        """Return ‖A‖_F²/σ₁²; only where these are certain to be the greatest."""
        assert self.certain, "a greater one may have been passed over"
        if self.frobenius == 0:
            return StableRank(0.0, 0.0, True, 0.0, 0.0, 1)
        top, bound = float(self.values[0]), float(self.bounds[0])
        value = (self.frobenius / top) ** 2
        share = (1 - bound / top) ** -2 * (1 + self.rounding) - 1
        return StableRank(value, value * share, True, top - bound, self.frobenius, 1)


@dataclass(frozen=True)
class EffectiveRank:
    """exp of the entropy of σ_i / Σσ (Roy & Vetterli, The effective rank, EUSIPCO 2007).

    Attributes:
        value: between 1 and the rank; 0 for a matrix of zeros.
        bound: |value − true| ≤ bound, by float64 rounding alone.
    """

    value: float
    bound: float


def singular_values(
    matrix: Tensor, k: int, *, tolerance: float = 1e-3, method: str = "auto", seed: int = 0
) -> SingularValues:
    """Return the k greatest singular values.

    Args:
        matrix: (m, n), as of `stable_rank`.
        k: how many, at most the shorter side.
        tolerance: wanted bound on each value as a share of it, for `"lanczos"`.
        method: `"exact"` takes all eigenvalues of the Gram matrix in float64, `"lanczos"` iterates,
            `"auto"` iterates on matrices whose shorter side is above 2,048.
        seed: of the random start.
    """
    matrix = checked(matrix, method, tolerance)
    side = min(matrix.shape)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= side:
        raise JomaError(f"k must be a whole number from 1 to the shorter side, {side}, got {k!r}")
    with plain_arithmetic(matrix.device):
        if method == "lanczos" or (method == "auto" and side > _LARGE):
            found = _iterated(Operator(matrix), k, tolerance, seed)
            if found is not None:
                values, bounds, norm = found
                return SingularValues(values, bounds, False, norm, _ADDED_UP)
        values, bounds, norm = _all(matrix)
    return SingularValues(values[:k], bounds[:k], True, norm, 1.1 * matrix.numel() * _EPS)


def energy(
    matrix: Tensor, r: int, *, tolerance: float = 1e-3, method: str = "auto", seed: int = 0
) -> Energy:
    """Return the share of ‖A‖_F² in the top r directions; arguments as of `singular_values`."""
    found = singular_values(matrix, r, tolerance=tolerance, method=method, seed=seed)
    return found.energy(r)


def effective_rank(matrix: Tensor) -> EffectiveRank:
    """Return the effective rank, from all singular values, in float64."""
    matrix = checked(matrix)
    with plain_arithmetic(matrix.device):
        values, bounds, norm = _all(matrix)
    if norm == 0:
        return EffectiveRank(0.0, 0.0)
    total = values.sum()
    share = values / total
    entropy = -float(torch.xlogy(share, share).sum())  # entr is compiled at its first call
    # To first order an error e of σ_i moves the entropy by e·(|ln p_i| + entropy)/Σσ.
    wide = (values + bounds).clamp(min=1e-300) / total
    move = float((bounds / total * (wide.log().abs() + entropy)).sum())
    return EffectiveRank(math.exp(entropy), math.exp(entropy) * math.expm1(2 * move))


def _all(matrix: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return all singular values, descending, bounds, and ‖A‖_F, by the Gram matrix in float64."""
    gram, scale = gram_matrix(matrix)
    total = float(gram.diagonal().sum())
    squares = torch.linalg.eigvalsh(gram).flip(0).clamp(min=0)
    side, inner = len(gram), matrix.numel() // len(gram)
    # Of the product, and of the eigenvalues, backward stable with a modest constant.
    error = (1.1 * inner * total + 16 * side * float(squares[0])) * _EPS
    values = squares.sqrt()
    # |σ − σ̂| = |σ² − σ̂²|/(σ + σ̂), at most √error where both are small.
    bounds = torch.minimum(error / values.clamp(min=1e-300), torch.tensor(math.sqrt(error)))
    return values * scale, bounds * scale, math.sqrt(total) * scale


def _iterated(
    linear: Operator, k: int, tolerance: float, seed: int
) -> tuple[Tensor, Tensor, float] | None:
    """Return values, bounds and ‖A‖_F by block Lanczos; None where the basis has no more room."""
    check_finite(norm := float(linear.frobenius))
    if norm == 0:
        nothing = torch.zeros(k, dtype=torch.float64, device=linear.device)
        return nothing, nothing, 0.0
    b = max(16, k + 8)
    dice = torch.Generator(linear.device).manual_seed(seed)
    like = {"generator": dice, "device": linear.device, "dtype": linear.dtype}
    krylov = Krylov(linear.apply, torch.randn(linear.side, b, **like))
    while (krylov.applications + 2) * b <= linear.side:
        krylov.extend()
        if krylov.applications % 3:
            continue
        vectors_SK = krylov.top(k)
        image = linear.apply(vectors_SK).double()
        vectors = vectors_SK.double()
        squares = (vectors * image).sum(0)
        # |λ − θ| ≤ ‖Mx − θx‖ for a unit vector x; the last term is the rounding of the product.
        rest = torch.linalg.vector_norm(image - squares * vectors, dim=0) + 1e-6 * squares[0]
        values = squares.clamp(min=1e-300).sqrt()
        bounds = rest / values
        if bool((bounds <= tolerance * values).all()):
            return values * norm, bounds * norm, norm
    return None

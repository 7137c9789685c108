"""Top singular values, the energy in the top directions, effective rank: each with its bound."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.probes.spectrum._krylov import Krylov, gaussian
from joma.probes.spectrum._matrix import EPS, Operator, checked, plain_arithmetic

_LARGE = 2048
"""Shorter sides beyond this are not solved whole unless asked."""


@dataclass(frozen=True, eq=False)
class Anchor:
    """What is kept of a matrix: its leading vectors, a random start and what it made of it.

    Attributes:
        block_SB: leading vectors, then the columns of the start.
        vectors: how many are leading vectors.
        before_TB: zeros for the leading vectors, then Aᵀ of the start.
        ceiling: upper bound of σ₁.
        scale: what the matrix was divided by before.
    """

    block_SB: Tensor
    vectors: int
    before_TB: Tensor
    ceiling: float
    scale: float = 1.0


@dataclass(frozen=True)
class StableRank:
    """‖A‖_F²/σ₁², 0 for a matrix of zeros.

    Attributes:
        value: the best estimate.
        bound: |value − true| ≤ bound, in the sense `certain` says.
        certain: True where the bound is a certificate; False where it holds with probability
            1 − 1e-6 over the random start, whatever the matrix.
        top: σ₁, at most.
        frobenius: ‖A‖_F.
        products: how often the matrix was multiplied with a block of vectors.
        anchor: what `start=` needs of this result, where it was asked to be kept.
    """

    value: float
    bound: float
    certain: bool
    top: float
    frobenius: float
    products: int
    anchor: Anchor | None = field(default=None, repr=False, compare=False)


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
    scaled = checked(matrix, method, tolerance)
    side = min(scaled.matrix.shape)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= side:
        raise JomaError(f"k must be a whole number from 1 to the shorter side, {side}, got {k!r}")
    with plain_arithmetic(scaled.matrix.device):
        found = None
        if scaled.scale and (method == "lanczos" or (method == "auto" and side > _LARGE)):
            found = _iterated(Operator(scaled.matrix), k, tolerance, seed)
        if found is None:
            found, _ = all_values(scaled.matrix)
    scale = scaled.scale
    return replace(
        found,
        values=found.values[:k] * scale,
        bounds=found.bounds[:k] * scale,
        frobenius=found.frobenius * scale,
    )


def energy(
    matrix: Tensor, r: int, *, tolerance: float = 1e-3, method: str = "auto", seed: int = 0
) -> Energy:
    """Return the share of ‖A‖_F² in the top r directions; arguments as of `singular_values`."""
    found = singular_values(matrix, r, tolerance=tolerance, method=method, seed=seed)
    return found.energy(r)


def effective_rank(matrix: Tensor) -> EffectiveRank:
    """Return the effective rank, from all singular values, in float64."""
    scaled = checked(matrix)
    if scaled.scale == 0:
        return EffectiveRank(0.0, 0.0)
    with plain_arithmetic(scaled.matrix.device):
        found, _ = all_values(scaled.matrix)
    values, bounds = found.values, found.bounds
    total = values.sum()
    share = values / total
    entropy = -float(torch.xlogy(share, share).sum())
    # To first order an error e of σ_i moves the entropy by e·(|ln p_i| + entropy)/Σσ.
    wide = (values + bounds).clamp(min=1e-300) / total
    move = float((bounds / total * (wide.log().abs() + entropy)).sum())
    return EffectiveRank(math.exp(entropy), math.exp(entropy) * math.expm1(2 * move))


def all_values(matrix: Tensor, *, vector: bool = False) -> tuple[SingularValues, Tensor | None]:
    """Return all singular values by the Gram matrix in float64, and a top vector if asked for."""
    linear = Operator(matrix)
    gram, vector_S = linear.gram(), None
    if vector:
        squares, vectors = torch.linalg.eigh(gram)
        vector_S = vectors[:, -1]
    else:
        squares = torch.linalg.eigvalsh(gram)
    squares = squares.flip(0).clamp(min=0)
    total = float(gram.diagonal().sum())
    # Of the product, and of the eigenvalues, backward stable with a modest constant.
    error = (1.1 * linear.inner * total + 16 * linear.side * float(squares[0])) * EPS
    values = squares.sqrt()
    # |σ − σ̂| = |σ² − σ̂²|/(σ + σ̂), at most √error where both are small.
    bounds = (error / values.clamp(min=1e-300)).clamp(max=math.sqrt(error))
    rounding = 1.1 * matrix.numel() * EPS
    return SingularValues(values, bounds, True, math.sqrt(total), rounding), vector_S


def _iterated(linear: Operator, k: int, tolerance: float, seed: int) -> SingularValues | None:
    """Return values and bounds by block Lanczos; None where the basis has no more room."""
    b, norm = max(16, k + 8), linear.frobenius
    krylov = Krylov(linear.apply, gaussian(linear, b, seed))
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
            rounding = 1.1 * linear.side * linear.inner * EPS
            return SingularValues(values * norm, bounds * norm, False, norm, rounding)
    return None

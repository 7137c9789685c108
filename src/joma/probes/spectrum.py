"""Stable ranks, singular values, energies and effective ranks of weights, with error bounds.

- `stable_rank`, `stable_ranks`: ‖A‖_F²/σ₁², which JoMA's Fig. 7 follows over training, by block
  Lanczos from a random start, with a bound that holds with probability 1 − 1e-6 whatever the
  matrix, or with a certificate.
- `singular_values`, `energy`, `effective_rank`: the top of the spectrum, its share, its entropy.

Matrices may lie on a CPU or a GPU, in any floating-point type, whole or sharded (DTensor).

Of a matrix that moved a little since it was measured, the stable rank is refreshed. Below: the
greatest Rayleigh quotient within the old top vectors. Above: σ₁ moves by at most the norm of the
change, σ₁(A) ≤ σ₁(A₀) + ‖A − A₀‖, and a change D is seen in the sketch Ωᵀ·D that an old Gaussian Ω
of b columns makes of it: with g = uᵀΩ for its top singular vector u, ‖Ωᵀ·D‖ ≥ ‖D‖·‖g‖, so ‖D‖² is
at most ‖Ωᵀ·D‖² over the quantile of ‖g‖², a chi-square variable. Ω must not have influenced the
change; a measurement never does.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.probes._krylov import Krylov, chi_square_floor, gaussian, iterate
from joma.probes._matrix import (
    EPS,
    Operator,
    ScaledMatrix,
    checked,
    plain_arithmetic,
    tops_by_squaring,
)

FAILURE = 1e-6
"""Probability, over the random start, that a bound does not hold."""
_EVENT = 0.36 * FAILURE
"""Probability of one attempt; there may be two, or one and what a warm start adds."""
_SMALL = 192
"""Matrices with shorter sides up to this get a certificate."""
_SQUARED = 1024
"""Matrices with shorter sides below this get a certificate on a GPU, those of a shape together."""
_STACKED = 1 << 24
"""Entries of Gram matrices that are squared at a time."""
_VECTORS, _SKETCH, _ROUNDS = 8, 24, 6
"""Leading vectors and random columns kept of a matrix, and iterations for the former."""
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


def stable_rank(
    matrix: Tensor,
    *,
    tolerance: float = 1e-3,
    method: str = "auto",
    keep: bool = False,
    start: StableRank | None = None,
    seed: int = 0,
) -> StableRank:
    """Return the stable rank ‖A‖_F²/σ₁² of one matrix, with an error bound.

    `"lanczos"` iterates until the bound is at most `tolerance` of the value; it holds with
    probability 1 − 1e-6 over the random start, for every matrix. `"exact"` takes the eigenvalues of
    the Gram matrix in float64 and gives a certificate. `"auto"` takes a certificate of small
    matrices, on a GPU by squaring Gram matrices, and iterates on others.

    Args:
        matrix: (m, n), any floating-point type, on any device, whole or a DTensor (every rank then
            calls this and gets the unsharded answer).
        tolerance: wanted bound as a share of the value.
        method: `"auto"`, `"lanczos"` or `"exact"`.
        keep: keep what a later call needs to start from this result.
        start: result, made with `keep`, for a nearby matrix, such as the same weight some steps
            ago. The value is then refreshed from its top vectors, at one product, and the bound
            says how far σ₁ can have moved since, as a random sketch of the change shows: cheap, and
            wider the more the matrix moved. `tolerance` is not promised.
        seed: of the random start.

    Raises:
        ValueError: for a matrix that is not one, or holds NaN or infinity.
    """
    if start is not None:
        scaled = checked(matrix, method, tolerance)
        with plain_arithmetic(scaled.matrix.device):
            found = _refreshed(scaled, start)
        if found is not None:
            return found
        keep = True  # the old vectors say nothing of this matrix: from the beginning
    return stable_ranks([matrix], tolerance=tolerance, method=method, keep=keep, seed=seed)[0]


def stable_ranks(
    matrices: Sequence[Tensor],
    *,
    tolerance: float = 1e-3,
    method: str = "auto",
    keep: bool = False,
    seed: int = 0,
) -> list[StableRank]:
    """Return `stable_rank` of many matrices; on a GPU small ones of one shape are batched."""
    results: dict[int, StableRank] = {}
    alike: defaultdict[tuple[torch.Size, torch.device], list[tuple[int, ScaledMatrix]]]
    alike = defaultdict(list)
    for i, given in enumerate(matrices):
        scaled = checked(given, method, tolerance)
        matrix = scaled.matrix
        if scaled.scale == 0:
            results[i] = _ZERO
        elif method == "auto" and matrix.is_cuda and min(matrix.shape) < _SQUARED:
            alike[matrix.shape, matrix.device].append((i, scaled))
        else:
            with plain_arithmetic(matrix.device):
                results[i] = _solve(scaled, tolerance, method, keep, seed)
    for (shape, device), group in alike.items():
        at_once = max(1, _STACKED // min(shape) ** 2)
        for start in range(0, len(group), at_once):
            some = group[start : start + at_once]
            with plain_arithmetic(device):
                found = _squared([scaled for _, scaled in some], tolerance, keep, seed)
            results.update(zip((i for i, _ in some), found, strict=True))
    return [results[i] for i in range(len(results))]


_ZERO = StableRank(0.0, 0.0, True, 0.0, 0.0, 1)


def _solve(given: ScaledMatrix, tolerance: float, method: str, keep: bool, seed: int) -> StableRank:
    linear = Operator(given.matrix)
    found = None
    if method == "lanczos" or (method == "auto" and linear.side > _SMALL):
        if linear.device.type != "cpu" and linear.dtype != given.matrix.dtype:
            linear = Operator(given.matrix.float())  # once, not in every step
        found = iterate(linear, tolerance, seed, _EVENT)
    norm = linear.frobenius
    if found is None:
        return _exact(given, keep, seed)
    value = 1 / found.floor
    top = norm * math.sqrt(found.floor)
    rank = StableRank(value, value * found.share, False, top, norm, found.products)
    return _finished(rank, given, found.vector_S if keep else None, seed)


def _squared(
    given: list[ScaledMatrix], tolerance: float, keep: bool, seed: int
) -> list[StableRank]:
    """Return stable ranks from certified bounds that a quarter of the tolerance separates."""
    *bounds, vector_LS = tops_by_squaring([each.matrix for each in given], tolerance / 4)
    ranks = []
    for i, (floor, ceiling, norm) in enumerate(torch.stack(bounds, -1).tolist()):  # one wait
        value = 2 / (floor + ceiling)
        bound = max(1 / floor - value, value - 1 / ceiling) if floor > 0 else math.inf
        rank = StableRank(value, bound, True, norm * floor**0.5, norm, 1)
        ranks.append(_finished(rank, given[i], vector_LS[i] if keep else None, seed))
    return ranks


def _exact(given: ScaledMatrix, keep: bool, seed: int) -> StableRank:
    found, top_S = all_values(given.matrix, vector=keep)
    return _finished(found.stable_rank(), given, top_S, seed)


def _finished(
    found: StableRank, given: ScaledMatrix, top_S: Tensor | None, seed: int
) -> StableRank:
    """Return a result in the matrix's own units, with an anchor if its top vector is given."""
    if top_S is not None:
        ceiling = found.frobenius / math.sqrt(found.value - found.bound)
        found = replace(found, anchor=_anchor(given, top_S, ceiling, seed))
    return replace(found, top=found.top * given.scale, frobenius=found.frobenius * given.scale)


def _anchor(given: ScaledMatrix, top_S: Tensor, ceiling: float, seed: int) -> Anchor:
    """Return what to keep of a matrix whose top vector and upper bound of σ₁ are known."""
    linear = Operator(given.matrix)
    count = min(_VECTORS, linear.side)
    vectors = gaussian(linear, count, seed + 1)  # not the start that found them
    vectors[:, 0] = top_S
    for _ in range(_ROUNDS):
        vectors = torch.linalg.qr(linear.apply(vectors)).Q
    start = gaussian(linear, _SKETCH, seed + 2)
    before = torch.nn.functional.pad(linear.across(start), (count, 0))
    return Anchor(torch.cat([vectors, start], -1), count, before, ceiling, given.scale)


def _refreshed(given: ScaledMatrix, start: StableRank) -> StableRank | None:
    """Return the value from old vectors; None where they say nothing of this matrix."""
    anchor = start.anchor
    if anchor is None:
        raise JomaError("start must be a result made with keep=True, of a matrix that is not zero")
    linear = Operator(given.matrix)
    if (linear.side, linear.inner) != (len(anchor.block_SB), len(anchor.before_TB)) or (
        linear.device != anchor.block_SB.device
    ):
        raise JomaError(
            f"start must come from a matrix of the same shape on {linear.device}, got one with "
            f"sides of {len(anchor.block_SB)} and {len(anchor.before_TB)} on "
            f"{anchor.block_SB.device}, not {linear.side} and {linear.inner}"
        )
    if given.scale != anchor.scale:
        return _ZERO if given.scale == 0 else None
    image_TB = linear.across(anchor.block_SB.to(linear.dtype))
    image_TB = (image_TB - anchor.before_TB).double()
    gram = (image_TB.mT @ image_TB).cpu()
    if not gram.isfinite().all():
        return None
    k, norm = anchor.vectors, linear.frobenius
    floor = float(torch.linalg.eigvalsh(gram[:k, :k])[-1])
    seen = float(torch.linalg.eigvalsh(gram[k:, k:])[-1])
    moved = math.sqrt(max(seen, 0.0) / chi_square_floor(_SKETCH, FAILURE / 10))
    ceiling = (min(anchor.ceiling + moved, norm) * (1 + 1e-5)) ** 2
    if not 0 < floor <= ceiling:  # rounding that got out of hand
        return None
    value = norm**2 / floor
    bound, scale = value - norm**2 / ceiling, given.scale
    return StableRank(value, bound, False, math.sqrt(floor) * scale, norm * scale, 1, anchor)

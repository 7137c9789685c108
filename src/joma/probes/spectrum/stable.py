"""Stable rank ‖A‖_F²/σ₁², which JoMA's Fig. 7 follows over training, with its error bound.

Of a matrix that moved a little since it was measured, the value is refreshed. Below: the greatest
Rayleigh quotient within the old top vectors. Above: σ₁ moves by at most the norm of the change,
σ₁(A) ≤ σ₁(A₀) + ‖A − A₀‖, and a change D is seen in the sketch Ωᵀ·D that an old Gaussian Ω of b
columns makes of it: with g = uᵀΩ for its top singular vector u, ‖Ωᵀ·D‖ ≥ ‖D‖·‖g‖, so ‖D‖² is at
most ‖Ωᵀ·D‖² over the quantile of ‖g‖², a chi-square variable. Ω must not have influenced the
change; a measurement never does.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.probes.spectrum._krylov import chi_square_floor, gaussian, iterate
from joma.probes.spectrum._matrix import (
    Operator,
    Scaled,
    checked,
    plain_arithmetic,
    tops_by_squaring,
)
from joma.probes.spectrum.values import Anchor, StableRank, all_values

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
    alike: defaultdict[tuple[torch.Size, torch.device], list[tuple[int, Scaled]]]
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


def _solve(given: Scaled, tolerance: float, method: str, keep: bool, seed: int) -> StableRank:
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


def _squared(given: list[Scaled], tolerance: float, keep: bool, seed: int) -> list[StableRank]:
    """Return stable ranks from certified bounds that a quarter of the tolerance separates."""
    *bounds, vector_LS = tops_by_squaring([each.matrix for each in given], tolerance / 4)
    ranks = []
    for i, (floor, ceiling, norm) in enumerate(torch.stack(bounds, -1).tolist()):  # one wait
        value = 2 / (floor + ceiling)
        bound = max(1 / floor - value, value - 1 / ceiling) if floor > 0 else math.inf
        rank = StableRank(value, bound, True, norm * floor**0.5, norm, 1)
        ranks.append(_finished(rank, given[i], vector_LS[i] if keep else None, seed))
    return ranks


def _exact(given: Scaled, keep: bool, seed: int) -> StableRank:
    found, top_S = all_values(given.matrix, vector=keep)
    return _finished(found.stable_rank(), given, top_S, seed)


def _finished(found: StableRank, given: Scaled, top_S: Tensor | None, seed: int) -> StableRank:
    """Return a result in the matrix's own units, with an anchor if its top vector is given."""
    if top_S is not None:
        ceiling = found.frobenius / math.sqrt(found.value - found.bound)
        found = replace(found, anchor=_anchor(given, top_S, ceiling, seed))
    return replace(found, top=found.top * given.scale, frobenius=found.frobenius * given.scale)


def _anchor(given: Scaled, top_S: Tensor, ceiling: float, seed: int) -> Anchor:
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


def _refreshed(given: Scaled, start: StableRank) -> StableRank | None:
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

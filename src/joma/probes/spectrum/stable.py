"""Stable rank ‖A‖_F²/σ₁², which JoMA's Fig. 7 follows over training, with its error bound."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from joma.errors import JomaError
from joma.probes.spectrum import _certificate, _refresh, _squaring
from joma.probes.spectrum._arithmetic import plain_arithmetic
from joma.probes.spectrum._given import as_matrix, check_method, check_tolerance
from joma.probes.spectrum._krylov import Krylov
from joma.probes.spectrum._operator import Operator, dither_slack, operator

FAILURE = 1e-6
"""Probability, over the random start, that a bound does not hold."""
_EVENT = 0.4 * FAILURE
"""Of one attempt; there may be two, or one and what a warm start adds."""
_TINY = 1e-25
"""Matrices of smaller norms are worked on in float64 on a GPU."""
_SMALL = 192
"""Shorter sides up to this are solved whole."""
_SQUARED = 1024
"""On a GPU shorter sides below this are squared: products of all matrices of a shape at once."""
_STEPS = 12
_MISS = 0.08
"""Share of the tolerance by which the top eigenvalue within the basis may be missed."""


class Estimate(Protocol):
    """A number and how far it can be off: |value − true| ≤ bound."""

    @property
    def value(self) -> float:
        """The number."""
        ...

    @property
    def bound(self) -> float:
        """How far it can be off."""
        ...


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
    anchor: "_refresh.Anchor | None" = field(default=None, repr=False, compare=False)


def stable_rank(
    matrix: Tensor,
    *,
    tolerance: float = 1e-3,
    method: str = "auto",
    keep: bool = False,
    start: StableRank | None = None,
    seed: int = 0,
) -> StableRank:
    """Stable rank ‖A‖_F²/σ₁² of one matrix, with an error bound.

    `"lanczos"` iterates until the bound is at most `tolerance` of the value; it holds with
    probability 1 − 1e-6 over the random start, for every matrix. `"exact"` factorises
    the Gram matrix in float64 and gives a certificate. `"auto"` takes the certificate of small
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
        check_method(method)
        check_tolerance(tolerance)
        whole = as_matrix(matrix)
        with plain_arithmetic(whole.device):
            found = _refreshed(whole, start)
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
    """`stable_rank` of many matrices; on a GPU those of one shape are worked on together."""
    check_method(method)
    check_tolerance(tolerance)
    checked = [as_matrix(matrix) for matrix in matrices]
    results: dict[int, StableRank] = {}
    for group in _alike(checked):
        with plain_arithmetic(checked[group[0]].device):
            stacked = _stack([checked[i] for i in group])
            solved = _solve(stacked, tolerance, method, keep, seed)
        results.update(zip(group, solved, strict=True))
    return [results[i] for i in range(len(checked))]


def _alike(matrices: list[Tensor]) -> list[list[int]]:
    """Which matrices can be stacked: on a GPU those of one shape and type, elsewhere none."""
    groups: dict[object, list[int]] = {}
    for i, matrix in enumerate(matrices):
        together = matrix.is_cuda and not isinstance(matrix, DTensor) and matrix.numel() < 1 << 22
        key = (matrix.shape, matrix.dtype, matrix.device) if together else i
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _stack(matrices: list[Tensor]) -> Tensor:
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)


def _solve(
    stacked: Tensor, tolerance: float, method: str, keep: bool, seed: int
) -> list[StableRank]:
    if not len(stacked):
        return []
    side = min(stacked.shape[-2:])
    whole = stacked.is_cuda and not isinstance(stacked, DTensor)
    if method == "auto" and whole and side < _SQUARED and not keep:
        return _squared(stacked, tolerance)
    small = side <= _SMALL
    if method == "exact" or (small and method == "auto"):
        return [_exact(matrix, keep, seed) for matrix in stacked]
    if (found := _by_graph(stacked, tolerance, keep, seed)) is not None:
        return [found]
    linear = operator(stacked, seed)
    norm_L = linear.frobenius()
    if not bool(norm_L.isfinite().all()):
        raise JomaError("matrix must be finite, got NaN or infinity")
    if bool((norm_L == 0).any()):
        rest = iter(_solve(stacked[norm_L > 0], tolerance, method, keep, seed))
        nothing = StableRank(0.0, 0.0, True, 0.0, 0.0, 0)
        return [nothing if norm == 0 else next(rest) for norm in norm_L.tolist()]
    if stacked.is_cuda and stacked.dtype != torch.float64 and bool((norm_L < _TINY).any()):
        return _solve(stacked.double(), tolerance, method, keep, seed)
    # On a GPU, where the eigenvectors of every block cost more than its products, it is first
    # taken for granted that blocks have full rank, as they have unless the matrix has not.
    near_LS = None
    for careful in (False, True) if linear.device.type == "cuda" else (True,):
        solved, near_LS = _iterate(linear, tolerance, keep, seed, careful=careful)
        if solved is not None:
            return solved
    return [
        _exact(matrix, keep, seed, None if near_LS is None else near_LS[i])
        for i, matrix in enumerate(stacked)
    ]


def _iterate(
    linear: Operator, tolerance: float, keep: bool, seed: int, *, careful: bool
) -> tuple[list[StableRank] | None, Tensor | None]:
    """Block Lanczos until the bounds are met, and unit vectors near the top ones.

    There is no answer where blocks lost rank, room ran out, or the bounds stand still.
    """
    b = _block(linear)
    last = linear.side // max(b, 1) - 1
    slack_L = linear.slack(torch.ones(linear.count, device=linear.device), _EVENT / 10)
    # So short a side has no room to iterate in; a tolerance below the rounding cannot be met.
    if b < 4 or bool((slack_L >= tolerance).any()):
        return None, None
    dice = torch.Generator(linear.device).manual_seed(seed)
    start_LSB = torch.randn(
        linear.count, linear.side, b, generator=dice, device=linear.device, dtype=linear.dtype
    )
    krylov = Krylov(linear.apply, start_LSB, careful)
    looks: list[tuple[int, float]] = []
    check, x_LS = 3, None
    while krylov.applications < last:
        krylov.extend()
        if krylov.applications < min(check, last):
            continue
        top_L, x_LS = krylov.ritz(_MISS * tolerance)
        floor_L = linear.quotient(x_LS)
        slack_L = linear.slack(floor_L, _EVENT / 10)
        ceiling_L = top_L * (1 + _excess(krylov, top_L, tolerance, slack_L))
        bad = ~krylov.sound() if not careful else torch.zeros_like(floor_L, dtype=torch.bool)
        numbers = torch.stack(
            [floor_L, ceiling_L, slack_L, bad.double(), linear.frobenius()]
        ).tolist()  # one wait for the device
        share = [
            ceiling / floor - 1 + slack if floor > 0 else -1.0
            for floor, ceiling, slack, _, _ in zip(*numbers, strict=True)
        ]
        # A ceiling below the floor, or none, is rounding that got out of hand.
        if any(numbers[3]) or min(share) < 0:
            return None, None
        if max(share) <= tolerance:
            products = 2 * krylov.applications + 1
            found = [
                _result(floor, s, norm, products)
                for floor, s, norm in zip(numbers[0], share, numbers[4], strict=True)
            ]
            return _anchored(found, linear, x_LS, seed) if keep else found, x_LS
        looks.append((krylov.applications, max(share)))
        if _stands_still(looks):
            break
        check = _next_check(looks, tolerance)
    return None, x_LS


def _stands_still(looks: list[tuple[int, float]]) -> bool:
    """Whether the last two looks brought nothing: what is left is too small to build upon."""
    shares = [share for _, share in looks[-3:]]
    return len(shares) == 3 and math.isfinite(shares[0]) and min(shares[1:]) >= shares[0]


def _block(linear: Operator) -> int:
    """Columns of the start: on a GPU more are nearly free, on a CPU each costs its share."""
    wanted = 64 if linear.device.type == "cuda" else 16
    return min(wanted, linear.side // 8)


def _excess(krylov: Krylov, top_L: Tensor, tolerance: float, slack_L: Tensor) -> Tensor:
    """How far above the estimate the top eigenvalue can lie, as a share of it; may be ∞."""
    wanted_L = (tolerance - slack_L).clamp(min=1e-6)
    powers = torch.arange(-_STEPS // 2, _STEPS, dtype=torch.float64, device=top_L.device)
    # K grows with λ only beyond the top eigenvalue of the projection, which may be missed a little.
    excess_LG = (wanted_L.unsqueeze(-1) * (0.98 * 1.5**powers)).clamp(min=_MISS * tolerance)
    out_LG = krylov.excluded(top_L.unsqueeze(-1) * (1 + excess_LG), _EVENT * 0.9)
    # The first from which on all are excluded.
    at = out_LG.shape[-1] - out_LG.flip(-1).to(torch.int8).cummin(-1).values.sum(-1)
    padded = torch.nn.functional.pad(excess_LG, (0, 1), value=math.inf)
    return padded.gather(-1, at.long().unsqueeze(-1)).squeeze(-1)


def _next_check(looks: list[tuple[int, float]], tolerance: float) -> int:
    """When to look again: bounds fall geometrically once they are there at all.

    Args:
        looks: applications so far and what bound they gave, as a share of the value; may be ∞.
        tolerance: wanted share.
    """
    now, share = looks[-1]
    if math.isinf(share):
        return 2 * now
    then, before = looks[-2] if len(looks) > 1 else (now, math.inf)
    if math.isinf(before) or before <= share:
        return now + math.ceil(now / 2)
    steps = (now - then) * math.log(share / tolerance) / math.log(before / share)
    return now + min(max(math.ceil(steps), 1), now)


def _result(floor: float, share: float, norm: float, products: int) -> StableRank:
    if norm == 0:
        return StableRank(0.0, 0.0, True, 0.0, 0.0, products)
    value = 1 / floor
    return StableRank(value, value * share, False, norm * math.sqrt(floor), norm, products)


def release() -> None:
    """Free the GPU memory that is kept for the shapes measured last."""
    graph = sys.modules.get("joma.probes.spectrum._graph")
    if graph is not None:
        graph.plan.cache_clear()


def _by_graph(stacked: Tensor, tolerance: float, keep: bool, seed: int) -> StableRank | None:
    """One large matrix on a GPU; None where that way is not open or ends without an answer."""
    if isinstance(stacked, DTensor) or not stacked.is_cuda or len(stacked) > 1:
        return None
    if stacked.dtype == torch.float64 or min(stacked.shape[1:]) < 1024 or tolerance < 1e-4:
        return None
    from joma.probes.spectrum import _graph  # Triton comes with torch's CUDA builds alone

    matrix = stacked[0] if stacked[0].is_contiguous() else stacked[0].mT
    if not matrix.is_contiguous():
        return None
    plan = _graph.plan(*matrix.shape, matrix.device, _EVENT * 0.9)
    scales = plan.load(matrix, tolerance, seed)
    since, stop = None, plan.likely
    direct = stop > 0
    while stop < len(_graph.STOPS):
        look = plan.advance(matrix, stop, since)
        numbers = torch.cat([look.numbers, scales, look.length]).tolist()  # one wait for the device
        excess, top, sound, norm, most, fits, length = numbers
        if not fits:  # entries of another size than the last matrix had
            scales = plan.load(matrix, tolerance, seed, afresh=True)
            since, stop = None, plan.likely
            continue
        if not math.isfinite(norm):
            raise JomaError("matrix must be finite, got NaN or infinity")
        if norm == 0:
            return StableRank(0.0, 0.0, True, 0.0, 0.0, 1)
        if not sound and not direct:
            return None
        if not sound:  # gone too far for so fast a spectrum: once more, with all looks
            plan.likely = stop = 0
            since, direct = None, False
            continue
        floor = (length / norm) ** 2
        exact = matrix.dtype != torch.float32
        share = top * (1 + excess) / floor - 1 + dither_slack(most, norm, floor, _EVENT / 10, exact)
        if share < 0:  # a ceiling below the floor is rounding that got out of hand
            return None
        if share <= tolerance:
            plan.likely = stop
            found = _result(floor, share, norm, 2 * _graph.STOPS[stop] + 1)
            if not keep:
                return found
            linear = operator(stacked, None)
            return _anchored([found], linear, look.vector_S.unsqueeze(0), seed)[0]
        since, stop = stop, stop + 1
    return None


def _anchored(
    found: list[StableRank], linear: Operator, top_LS: Tensor, seed: int
) -> list[StableRank]:
    ceilings = [result.frobenius / math.sqrt(result.value - result.bound) for result in found]
    anchors = _refresh.anchors(linear, top_LS, ceilings, seed)
    return [replace(r, anchor=anchor) for r, anchor in zip(found, anchors, strict=True)]


def _squared(stacked: Tensor, tolerance: float) -> list[StableRank]:
    """From bounds on both sides of σ₁² that a quarter of the tolerance separates."""
    numbers = torch.stack(_squaring.tops(stacked, tolerance / 4)).tolist()  # one wait
    found = []
    for floor, ceiling, norm in zip(*numbers, strict=True):
        if not math.isfinite(norm):
            raise JomaError("matrix must be finite, got NaN or infinity")
        if norm == 0:
            found.append(StableRank(0.0, 0.0, True, 0.0, 0.0, 1))
            continue
        value = 2 / (floor + ceiling)
        bound = max(1 / floor - value, value - 1 / ceiling) if floor > 0 else math.inf
        found.append(StableRank(value, bound, True, norm * floor**0.5, norm, 1))
    return found


def _exact(matrix: Tensor, keep: bool, seed: int, near: Tensor | None = None) -> StableRank:
    top = _certificate.top(matrix, seed, near)
    if top.norm == 0:
        return StableRank(0.0, 0.0, True, 0.0, 0.0, 1)
    value = top.norm**2 / top.floor
    bound = value - top.norm**2 / top.ceiling
    sigma, ceiling = (top.scale * math.sqrt(square) for square in (top.floor, top.ceiling))
    found = StableRank(value, bound, True, sigma, top.scale * top.norm, 1)
    if not keep:
        return found
    linear = operator(matrix.unsqueeze(0), None)
    (anchor,) = _refresh.anchors(linear, top.vector.unsqueeze(0), [ceiling], seed)
    return replace(found, anchor=anchor)


def _refreshed(matrix: Tensor, start: StableRank) -> StableRank | None:
    """The value from old vectors; None where they say nothing of this matrix."""
    if start.anchor is None:
        raise JomaError("start must be a result made with keep=True, of a matrix that is not zero")
    linear = operator(matrix.unsqueeze(0), None)
    whole = matrix.is_cuda and not isinstance(matrix, DTensor)
    where = (matrix.data_ptr(), matrix.shape, matrix.stride(), matrix.dtype) if whole else None
    floor, ceiling, norm = _refresh.refreshed(linear, start.anchor, FAILURE / 10, where)
    if not math.isfinite(norm):
        raise JomaError("matrix must be finite, got NaN or infinity")
    if norm == 0:
        return StableRank(0.0, 0.0, True, 0.0, 0.0, 1)
    # Products of so small a matrix lose digits; a ceiling below the floor is rounding, too.
    if norm < _TINY or not 0 < floor <= ceiling:
        return None
    value = norm**2 / floor
    top = math.sqrt(floor)
    return StableRank(value, value - norm**2 / ceiling, False, top, norm, 1, start.anchor)

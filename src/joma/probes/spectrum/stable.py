"""Stable rank ‖A‖_F²/σ₁², which JoMA's Fig. 7 follows over training, with its error bound.

Of a matrix that moved a little since it was measured, the value is refreshed. Below: the greatest
Rayleigh quotient within the old top vectors. Above: σ₁ moves by at most the norm of the change,
σ₁(A) ≤ σ₁(A₀) + ‖A − A₀‖, and a change D is seen in the sketch Ωᵀ·D that an old Gaussian Ω of b
columns makes of it: with g = uᵀΩ for its top singular vector u, ‖Ωᵀ·D‖ ≥ ‖D‖·‖g‖, so ‖D‖² is at
most ‖Ωᵀ·D‖² over the quantile of ‖g‖², a chi-square variable. Ω must not have influenced the
change; a measurement never does.
"""

import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.errors import JomaError
from joma.kernels.choice import has_kernels
from joma.probes.spectrum import _certificate
from joma.probes.spectrum._krylov import Iterated, Krylov, chi_square_floor, next_check
from joma.probes.spectrum._matrix import Operator, check_finite, checked, plain_arithmetic

FAILURE = 1e-6
"""Probability, over the random start, that a bound does not hold."""
_EVENT = 0.4 * FAILURE
"""Probability of one attempt; there may be two, or one and what a warm start adds."""
_TINY = 1e-25
"""Matrices of smaller norms are worked on in float64 on a GPU."""
_SMALL = 192
"""Matrices with shorter sides up to this get a certificate on a CPU."""
_SQUARED = 1024
"""Matrices with shorter sides below this get a certificate on a GPU, those of a shape together."""
_STACKED = 1 << 22
"""Entries from which on a matrix is not stacked with others."""
_STEPS = 12
_MISS = 0.08
"""Share of the tolerance by which the top eigenvalue within the basis may be missed."""
_VECTORS, _SKETCH, _ROUNDS = 8, 24, 6
"""Leading vectors and random columns kept of a matrix, and iterations for the former."""


@dataclass(frozen=True, eq=False)
class Anchor:
    """What is kept of a matrix: its leading vectors, a random start and what it made of it.

    Attributes:
        block_SB: leading vectors, then the columns of the start.
        vectors: how many are leading vectors.
        before_TB: zeros for the leading vectors, then Aᵀ of the start.
        ceiling: upper bound of σ₁.
        replay: on a GPU, the captured work of a refresh.
    """

    block_SB: Tensor
    vectors: int
    before_TB: Tensor
    ceiling: float
    replay: dict[str, Any] = field(default_factory=dict, repr=False)


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
        whole = checked(matrix, method, tolerance)
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
    """Return `stable_rank` of many matrices; on a GPU small ones of one shape are batched."""
    groups: dict[tuple[bool, object], list[tuple[int, Tensor]]] = {}
    for i, given in enumerate(matrices):
        matrix = checked(given, method, tolerance)
        squared = method == "auto" and matrix.is_cuda and min(matrix.shape) < _SQUARED
        together = squared and matrix.numel() < _STACKED
        key = (squared, (matrix.shape, matrix.dtype, matrix.device) if together else i)
        groups.setdefault(key, []).append((i, matrix))
    results: dict[int, StableRank] = {}
    for (squared, _), group in groups.items():
        alike = [matrix for _, matrix in group]
        with plain_arithmetic(alike[0].device):
            if squared:
                stacked = torch.stack(alike) if len(alike) > 1 else alike[0].unsqueeze(0)
                solved = _squared(stacked, tolerance, keep, seed)
            else:
                solved = [_solve(matrix, tolerance, method, keep, seed) for matrix in alike]
        results.update(zip((i for i, _ in group), solved, strict=True))
    return [results[i] for i in range(len(results))]


def release() -> None:
    """Free the GPU memory that is kept for the shapes measured last."""
    graph = sys.modules.get("joma.probes.spectrum._graph")
    if graph is not None:
        graph.plan.cache_clear()


def _zero(products: int) -> StableRank:
    return StableRank(0.0, 0.0, True, 0.0, 0.0, products)


def _solve(matrix: Tensor, tolerance: float, method: str, keep: bool, seed: int) -> StableRank:
    side = min(matrix.shape)
    if method == "exact" or (side <= _SMALL and method == "auto"):
        return _exact(matrix, keep, seed)
    kind = matrix.dtype
    if side >= 1024 and tolerance >= 1e-4 and kind != torch.float64 and has_kernels(matrix.device):
        from joma.probes.spectrum import _graph  # Triton comes with torch's CUDA builds alone

        found = _graph.iterate(matrix, tolerance, seed, _EVENT)
        if found is not None:
            return _result(found, matrix, keep, seed)
    if matrix.is_cuda and kind != torch.float64:
        matrix = matrix.float()  # blocks in half precision would overflow at some scales
    linear = Operator(matrix)
    check_finite(norm := float(linear.frobenius))
    if norm == 0:
        return _zero(0)
    if matrix.is_cuda and kind != torch.float64 and norm < _TINY:
        return _solve(matrix.double(), tolerance, method, keep, seed)
    found, near_S = _iterate(linear, tolerance, seed)
    if found is not None:
        return _result(found, matrix, keep, seed)
    return _exact(matrix, keep, seed, near_S)


def _iterate(
    linear: Operator, tolerance: float, seed: int
) -> tuple[Iterated | None, Tensor | None]:
    """Run block Lanczos until the bound is met; return that, and a unit vector near the top one.

    There is no answer where the basis has no more room or the bounds stop falling.
    """
    b = min(16, linear.side // 8)
    last = linear.side // max(b, 1) - 1
    slack = linear.rounding
    # So short a side has no room to iterate in; a tolerance below the rounding cannot be met.
    if b < 4 or slack >= tolerance:
        return None, None
    dice = torch.Generator(linear.device).manual_seed(seed)
    start_SB = torch.randn(linear.side, b, generator=dice, device=linear.device, dtype=linear.dtype)
    krylov = Krylov(linear.apply, start_SB)
    checks: list[tuple[int, float]] = []
    check, x_S = 3, None
    while krylov.applications < last:
        krylov.extend()
        if krylov.applications < min(check, last):
            continue
        top, x_S = krylov.ritz()
        floor = float(linear.quotient(x_S))
        ceiling = float(top * (1 + _excess(krylov, top, tolerance, slack)))
        share = ceiling / floor - 1 + slack if floor > 0 else -1.0
        if share < 0:  # a ceiling below the floor, or none, is rounding that got out of hand
            return None, None
        if share <= tolerance:
            products = 2 * krylov.applications + 1
            return Iterated(floor, share, float(linear.frobenius), products, x_S), x_S
        checks.append((krylov.applications, share))
        if _has_stalled(checks):
            break
        check = next_check(checks, tolerance)
    return None, x_S


def _has_stalled(checks: list[tuple[int, float]]) -> bool:
    """Return whether the last two checks brought nothing: the rest is too small to build upon."""
    shares = [share for _, share in checks[-3:]]
    return len(shares) == 3 and math.isfinite(shares[0]) and min(shares[1:]) >= shares[0]


def _excess(krylov: Krylov, top: Tensor, tolerance: float, slack: float) -> Tensor:
    """Return how far above the estimate the top eigenvalue can lie, as a share of it; may be ∞."""
    powers = torch.arange(-_STEPS // 2, _STEPS, dtype=torch.float64, device=top.device)
    # K grows with λ only beyond the top eigenvalue of the projection, which may be missed a little.
    excess_G = (max(tolerance - slack, 1e-6) * (0.98 * 1.5**powers)).clamp(min=_MISS * tolerance)
    out_G = krylov.excluded(top * (1 + excess_G), _EVENT * 0.9)
    # The first from which on all are excluded.
    at = len(out_G) - out_G.flip(0).to(torch.int8).cummin(0).values.sum()
    return torch.nn.functional.pad(excess_G, (0, 1), value=math.inf)[at]


def _result(found: Iterated, matrix: Tensor, keep: bool, seed: int) -> StableRank:
    floor, share, norm, products, top_S = found
    if norm == 0:
        return _zero(products)
    value = 1 / floor
    rank = StableRank(value, value * share, False, norm * math.sqrt(floor), norm, products)
    return _anchored(rank, matrix, top_S, seed) if keep else rank


def _anchored(found: StableRank, matrix: Tensor, top_S: Tensor, seed: int) -> StableRank:
    ceiling = found.frobenius / math.sqrt(found.value - found.bound)
    return replace(found, anchor=_anchor(Operator(matrix), top_S, ceiling, seed))


def _squared(stacked: Tensor, tolerance: float, keep: bool, seed: int) -> list[StableRank]:
    """Return stable ranks from certified bounds that a quarter of the tolerance separates."""
    *bounds, vector_LS = _certificate.tops(stacked, tolerance / 4, vectors=keep)
    numbers = torch.stack(bounds).tolist()  # one wait for the device
    check_finite(*numbers[2])
    ranks = []
    for i, (floor, ceiling, norm) in enumerate(zip(*numbers, strict=True)):
        if norm == 0:
            ranks.append(_zero(1))
            continue
        value = 2 / (floor + ceiling)
        bound = max(1 / floor - value, value - 1 / ceiling) if floor > 0 else math.inf
        rank = StableRank(value, bound, True, norm * floor**0.5, norm, 1)
        ranks.append(_anchored(rank, stacked[i], vector_LS[i], seed) if keep else rank)
    return ranks


def _exact(matrix: Tensor, keep: bool, seed: int, near_S: Tensor | None = None) -> StableRank:
    top = _certificate.top(matrix, seed, near_S)
    if top.norm == 0:
        return _zero(1)
    value = top.norm**2 / top.floor
    bound = value - top.norm**2 / top.ceiling
    sigma, ceiling = (top.scale * math.sqrt(square) for square in (top.floor, top.ceiling))
    found = StableRank(value, bound, True, sigma, top.scale * top.norm, 1)
    if not keep:
        return found
    return replace(found, anchor=_anchor(Operator(matrix), top.vector, ceiling, seed))


def _refreshed(matrix: Tensor, start: StableRank) -> StableRank | None:
    """Return the value from old vectors; None where they say nothing of this matrix."""
    if start.anchor is None:
        raise JomaError("start must be a result made with keep=True, of a matrix that is not zero")
    place = (matrix.data_ptr(), matrix.shape, matrix.stride(), matrix.dtype)
    where = place if matrix.is_cuda else None
    floor, ceiling, norm = _bounds_now(Operator(matrix), start.anchor, FAILURE / 10, where)
    check_finite(norm)
    if norm == 0:
        return _zero(1)
    # Products of so small a matrix lose digits; a ceiling below the floor is rounding, too.
    if norm < _TINY or not 0 < floor <= ceiling:
        return None
    value = norm**2 / floor
    top = math.sqrt(floor)
    return StableRank(value, value - norm**2 / ceiling, False, top, norm, 1, start.anchor)


def _anchor(linear: Operator, top_S: Tensor, ceiling: float, seed: int) -> Anchor:
    """Return what to keep of a matrix whose top vector and upper bound of σ₁ are known."""
    dice = torch.Generator(linear.device).manual_seed(seed + 1)  # not the start that found them
    like = {"generator": dice, "device": linear.device, "dtype": linear.dtype}
    more = torch.randn(linear.side, min(_VECTORS, linear.side) - 1, **like)
    vectors = torch.cat([top_S.to(linear.dtype).unsqueeze(-1), more], -1)
    for _ in range(_ROUNDS):
        vectors = torch.linalg.qr(linear.apply(vectors)).Q
    start = torch.randn(linear.side, _SKETCH, **like)
    before = torch.nn.functional.pad(linear.across(start), (vectors.shape[-1], 0))
    block = torch.cat([torch.linalg.qr(vectors).Q, start], -1)
    return Anchor(block, vectors.shape[-1], before, ceiling)


def _bounds_now(
    linear: Operator, anchor: Anchor, failure: float, where: Hashable = None
) -> tuple[float, float, float]:
    """Return lower and upper bound of σ₁² and ‖A‖_F of the matrix as it is now.

    Args:
        linear: the matrix.
        anchor: what was kept of it.
        failure: probability that the upper bound does not hold.
        where: on a GPU, what identifies the memory of the matrix. A weight that training changes
            in place stays there, and from the second time on the work is replayed.
    """
    side, kept = linear.side, len(anchor.block_SB)
    if kept != side or anchor.block_SB.device != linear.device:
        raise JomaError(
            f"start must come from a matrix of the same shape on {linear.device}, got one with a "
            f"shorter side of {kept} on {anchor.block_SB.device}, not {side}"
        )
    packed = _replayed(linear, anchor, where).cpu().numpy()  # one wait for the device
    norm = float(packed[-1])
    if not np.isfinite(packed).all():
        return math.nan, math.nan, norm
    gram = packed[:-1].reshape(anchor.block_SB.shape[1], -1)
    k = anchor.vectors
    floor = float(np.linalg.eigvalsh(gram[:k, :k])[-1])
    seen = float(np.linalg.eigvalsh(gram[k:, k:])[-1])
    moved = math.sqrt(max(seen, 0.0) / chi_square_floor(_SKETCH, failure))
    ceiling = min(anchor.ceiling + moved, norm) * (1 + 1e-5)
    return floor, ceiling**2, norm


@cache
def _pool(device: torch.device) -> Any:
    """Return one pool of memory for all graphs, since no two of them are replayed at once.

    It is that of a graph which is kept: torch cannot capture in a pool whose graphs are all gone.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=_stream(device), capture_error_mode="thread_local"):
        torch.zeros(1, device=device)
    _kept.append(graph)
    return graph.pool()


_kept: list[Any] = []


@cache
def _stream(device: torch.device) -> Any:
    """Return the stream on which graphs are captured; torch's own is of the GPU it met first."""
    return torch.cuda.Stream(device)


def _packed(linear: Operator, anchor: Anchor) -> Tensor:
    """Return the Gram matrix of what the block gives, whose two halves count, and ‖A‖_F, packed."""
    image = linear.across(anchor.block_SB.to(linear.dtype))
    if len(image) != len(anchor.before_TB):
        raise JomaError(
            f"start must come from a matrix of the same shape, got one with a longer side of "
            f"{len(anchor.before_TB)}, not {len(image)}"
        )
    image = (image - anchor.before_TB).double()
    return torch.cat([(image.mT @ image).reshape(-1), linear.frobenius.reshape(1)])


def _replayed(linear: Operator, anchor: Anchor, where: Hashable) -> Tensor:
    """Return `_packed`, from a captured graph where the matrix has the same memory as last time.

    Launched one by one, its kernels take less time than their launches: the mark of 0.4 ms for a
    warm start needs the graph (`python -m benchmarks.probes`).
    """
    if where is None or torch.cuda.is_current_stream_capturing():
        return _packed(linear, anchor)
    if anchor.replay.get("where") != where:
        anchor.replay.clear()
        anchor.replay["where"] = where
        return _packed(linear, anchor)
    if "graph" not in anchor.replay:
        graph = torch.cuda.CUDAGraph()
        device = linear.device
        with torch.cuda.graph(graph, _pool(device), _stream(device), "thread_local"):
            anchor.replay["packed"] = _packed(linear, anchor)
        anchor.replay["graph"] = graph
    anchor.replay["graph"].replay()
    return anchor.replay["packed"]

"""Block Lanczos of one large matrix on a GPU as captured graphs.

The mark of 1 ms for a 4096 × 11008 matrix needs this module and its kernels: launched one by one
from Python a step takes 1 ms, as a graph of library calls 0.14, with these kernels 0.095, and there
are 3 to 18 steps (`docs/performance.md`). `python -m benchmarks.spectrum` shows what that buys a
probe and a monitored training.

A step is eight kernels, all but the two products of a few microseconds. For each shape the steps
are captured once, over buffers of their own, and replayed. The mathematics is that of `_krylov`,
with three-term recurrence alone, M·V_j = V_{j−1}·R_jᵀ + V_j·A_j + V_{j+1}·R_{j+1}.

**The blocks need not stay orthogonal.** Where the top vectors stand out (rank r plus noise, as
trained weights have it), they are found in two or three steps, and rounding brings them back into
later blocks, amplified by ‖M‖/‖R‖ each time. The bound of `_krylov` rests on the recurrence, which
holds to rounding whatever R is, and on Qᵀ·Q, whose norm is measured at the end and divides K: an
overlap of several blocks costs less than the next step brings. Nor need a block have full rank:
directions below `_RIDGE` stay short, as in `_krylov`. Where a number is not finite all the same
there is no answer and `_krylov` is used.

**Products go through a half-precision copy** whose rounding is random. An entry goes to one of its
two neighbours in float16 with probabilities that make the copy Ã right on average. Then uᵀ(Ã − A)v
for the top singular vectors u, v of A, which are independent of the dice, is a sum of independent
terms of mean zero, by Hoeffding below ½·step·√(2 ln(1/failure)) but with probability `failure`,
step ≤ 2⁻¹⁰·max|A| (`weighted_entries` has less). Since σ₁(Ã) ≥ uᵀÃv = σ₁(A) + uᵀ(Ã − A)v, a bound
above Ã is one above A with that slack. The lower bound is a Rayleigh quotient of A itself. Blocks
go in as two float16 parts, 22 bits.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from joma.probes.spectrum._graph_plan import SHARES, Plan
from joma.probes.spectrum._krylov import Iterated
from joma.probes.spectrum._matrix import check_finite, weighted_entries
from joma.probes.spectrum._pace import STOPS


def iterate(matrix: Tensor, tolerance: float, seed: int, failure: float) -> Iterated | None:
    """Iterate until the bound is at most the tolerance; return None where there is no answer.

    Args:
        matrix: a whole matrix on a GPU, not of float64.
        tolerance: wanted bound as a share of the value.
        seed: of the random start and the rounding.
        failure: probability that the bound does not hold.
    """
    matrix = matrix if matrix.is_contiguous() else matrix.mT
    if not matrix.is_contiguous():
        return None
    shape = plan(*matrix.shape, matrix.device, failure * 0.9)
    scales = shape.load(matrix, tolerance, seed)
    pace, exact = shape.pace, matrix.dtype != torch.float32
    reach = math.inf
    since, stop = None, pace.begin()
    while stop is not None:
        check = shape.advance(matrix, stop, since)
        numbers = torch.cat([check.numbers, scales, check.length]).tolist()  # one wait
        excess, top, overlap, norm, most, fits, length = numbers
        if not fits:  # entries of another size than the last matrix had
            scales = shape.load(matrix, tolerance, seed, rescale=True)
            since, stop = None, pace.begin()
            continue
        check_finite(norm)
        if norm == 0:
            return Iterated(0.0, 0.0, 0.0, 1, check.vector_S)
        if not math.isfinite(top + overlap + length) or length == 0:
            since, stop = None, pace.restart()
            continue
        floor = (length / norm) ** 2
        # The largest entry lies in [most/2, most), where float16 has steps of 2⁻¹⁰·most/2.
        slack = 3e-5 if exact else _slack(min(most / 2, reach), length, failure / 10)
        if slack > tolerance / 2 and math.isinf(reach):
            reach = weighted_entries(matrix, length**2)
            slack = _slack(min(most / 2, reach), length, failure / 10)
        share = top * (1 + excess) / floor - 1 + slack
        if share < 0 or slack >= tolerance:  # rounding got out of hand, or hides too much
            return None
        if share <= tolerance:
            pace.done(over=excess <= SHARES[0] * tolerance * 1.01)
            return Iterated(floor, share, norm, 2 * STOPS[stop] + 1, check.vector_S)
        since, stop = stop, pace.next(share, tolerance)
        if stop is None and overlap > 1.1:  # gone too far, perhaps
            since, stop = None, pace.restart()
    return None


def _slack(reach: float, top: float, failure: float) -> float:
    """Return what the half-precision copy may hide of the top eigenvalue, as a share of it.

    Args:
        reach: √Σ a_ij²·u_i²·v_j² is at most this for the top singular vectors.
        top: σ₁ is at least this.
        failure: probability that the dice hide more.
    """
    sway = 0.5 * 2.0**-10 * reach * math.sqrt(2 * math.log(1 / failure))
    return 3e-5 + 2 * sway / top


@lru_cache(maxsize=4)
def plan(rows: int, columns: int, device: torch.device, failure: float) -> Plan:
    """Return the buffers and graphs of one shape; those of the four shapes used last are kept.

    `joma.probes.spectrum.release` frees them.
    """
    return Plan(rows, columns, device, failure)

"""Which values the top eigenvalue cannot have, from the recurrence of `_graph` (Triton)."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import triton
import triton.language as tl


@triton.jit
def _white(kernel, factor, now, before, BLOCK: tl.constexpr):
    """L⁻¹ of factor and polynomials, for the Cholesky factor L of K, by elimination."""
    row, place = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)
    pivots = tl.full([BLOCK], 1.0, tl.float64)
    for k in range(BLOCK):
        line = tl.sum(tl.where(row == k, kernel, 0.0), 0)
        pivot = tl.sum(tl.where(place == k, line, 0.0), 0)
        pivots = tl.where(place == k, pivot, pivots)
        share = tl.where(place > k, line / pivot, 0.0)[:, None]
        kernel -= share * line[None, :]
        factor -= share * tl.sum(tl.where(row == k, factor, 0.0), 0)[None, :]
        now -= share * tl.sum(tl.where(row == k, now, 0.0), 0)[None, :]
        before -= share * tl.sum(tl.where(row == k, before, 0.0), 0)[None, :]
    scale = (1.0 / tl.sqrt(pivots))[:, None]
    return factor * scale, now * scale, before * scale


@triton.jit
def excluded(
    columns,
    inverse,
    top,
    excess,
    defect,
    out,
    count,
    quantile,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    RAISED: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
):
    """Whether r·K(λ) ≻ 1, one λ per program.

    K(λ) = Σ P_j·P_jᵀ with P_{j+1} = (λ·P_j − P_j·A_j − P_{j−1}·B_j)·R⁻¹, in float64. After a
    change of basis by F the test is r·F·K·Fᵀ ≻ F·Fᵀ.
    """
    row, place = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)
    at = row * BLOCK + place[None, :]
    size: tl.constexpr = BLOCK * BLOCK
    one = tl.where(row == place[None, :], 1.0, 0.0).to(tl.float64)
    level = tl.load(top).to(tl.float64)
    level *= 1.0 + tl.load(excess + tl.program_id(0)).to(tl.float64)
    before = tl.zeros([BLOCK, BLOCK], tl.float64)
    now = tl.load(inverse + at).to(tl.float64)
    total = tl.dot(now, tl.trans(now), out_dtype=tl.float64)
    factor = one
    inside = level > 0
    for j in range(count):
        cross = tl.load(columns + j * 2 * size + at).to(tl.float64)
        own = tl.load(columns + j * 2 * size + size + at).to(tl.float64)
        back = tl.load(inverse + (j + 1) * size + at).to(tl.float64)
        new = level * now - tl.dot(now, own, out_dtype=tl.float64)
        new -= tl.dot(before, cross, out_dtype=tl.float64)
        new = tl.dot(new, back, out_dtype=tl.float64)
        gain = tl.dot(new, tl.trans(new), out_dtype=tl.float64)
        # Beyond the range nothing is added; what was added so far is a bound already.
        inside &= tl.max(tl.max(tl.abs(gain), 1), 0) < LARGEST
        total += tl.where(inside, gain, 0.0)
        before, now = now, new
        if (j == EARLY) | (j == LATE):  # noqa: SIM102
            if tl.max(tl.max(tl.abs(total), 1), 0) > RAISED:
                factor, now, before = _white(total, factor, now, before, BLOCK)
                total = one
    # Gaussian elimination: positive definite if and only if all pivots are positive.
    rest = total * (quantile / tl.load(defect))
    rest -= tl.dot(factor, tl.trans(factor), out_dtype=tl.float64)
    positive = level > 0
    for k in range(BLOCK):
        line = tl.sum(tl.where(row == k, rest, 0.0), 0)
        pivot = tl.sum(tl.where(place == k, line, 0.0), 0)
        positive &= pivot > 0  # false for NaN too
        rest -= line[:, None] * line[None, :] / pivot
    tl.store(out + tl.program_id(0), positive.to(tl.int32))

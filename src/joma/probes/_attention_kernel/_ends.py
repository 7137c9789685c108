"""What rows come to: from the sums over all keys, or over parts of them that programs shared."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from joma.probes._attention_kernel._score import LOWEST, START

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
MOST_PARTS = 64
SUMS = 4
"""Numbers that are kept of a row and a part: maximum, sum, moment and reference."""


@triton.jit
def write_rows(
    most, total, moment, reference, out, inside, logsumexp, entropy, level_out, reference_out,
    MASK: tl.constexpr,
):  # fmt: skip
    """Write what the sums of rows give; return their log-sum-exp in bits, ∞ where nothing was seen.

    A row that sees nothing has sums of 0; one all of whose scores are −∞ a moment of NaN.
    """
    unseen = (total == 0) & (moment == 0)
    broken = (total == 0) & (moment != 0)
    level = most + tl.log2(total)
    lse = level * _LN2
    if MASK == 2:
        reference = tl.where(unseen, 0.0, reference)
        lse += reference
    lse = tl.where(broken, float("nan"), lse)
    tl.store(logsumexp + out, tl.where(unseen, float("-inf"), lse), mask=inside)
    bits_of_row = tl.log2(total) - moment / total
    tl.store(entropy + out, tl.where(unseen, 0.0, bits_of_row * _LN2), mask=inside)
    level = tl.where(unseen, float("inf"), level)
    if MASK == 2:
        tl.store(level_out + out, level, mask=inside)
        tl.store(reference_out + out, reference, mask=inside)
    return level, reference


@triton.jit
def write_part(parts, part, rows, out, inside, most, total, moment, reference):
    """Write the sums of rows over a part of the keys."""
    parts += part.to(tl.int64) * rows * 4 + out
    tl.store(parts, most, mask=inside)
    tl.store(parts + rows, total, mask=inside)
    tl.store(parts + 2 * rows, moment, mask=inside)
    tl.store(parts + 3 * rows, reference, mask=inside)


@triton.jit(
    do_not_specialize=["rows", "count"],
    do_not_specialize_on_alignment=["logsumexp", "entropy", "level_out", "reference_out"],
)
def join_kernel(
    parts,
    logsumexp,
    entropy,
    level_out,
    reference_out,
    rows,
    count,
    MASK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the sums over parts of the keys, all relative to the greatest score of any part."""
    row_R = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part_P = tl.arange(0, PARTS)
    inside = (part_P < count)[:, None] & (row_R < rows)[None, :]
    parts += (part_P.to(tl.int64) * rows * 4)[:, None] + row_R[None, :]
    most_PR = tl.load(parts, mask=inside, other=START)
    total_PR = tl.load(parts + rows, mask=inside, other=0.0)
    moment_PR = tl.load(parts + 2 * rows, mask=inside, other=0.0)
    reference_PR = tl.load(parts + 3 * rows, mask=inside, other=START)
    reference_R = tl.max(reference_PR, 0)
    if MASK == 2:
        most_PR += (reference_PR - reference_R[None, :]) * _LOG2E
        most_PR = tl.maximum(most_PR, LOWEST)
    most_R = tl.max(most_PR, 0)
    shift_PR = most_PR - most_R[None, :]
    kept_PR = tl.exp2(shift_PR)
    total_R = tl.sum(kept_PR * total_PR, 0)
    moment_R = tl.sum(kept_PR * (moment_PR + shift_PR * total_PR), 0)
    write_rows(
        most_R, total_R, moment_R, reference_R, row_R, row_R < rows, logsumexp, entropy, level_out,
        reference_out, MASK,
    )  # fmt: skip

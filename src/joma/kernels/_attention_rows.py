"""The kernel over rows: log-sum-exp, entropy, and mass on the first and the last keys."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from joma.kernels._attention_blocks import (
    block_ranges,
    columns_of,
    laid_out_as,
    mask_block,
    rows_of,
    scaled,
    seen_bits,
    sees,
    tile_extent,
)

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_TILE = tl.constexpr(64)
_HIDDEN = tl.constexpr(-1e38)
"""Score in bits of a key that is hidden: finite, so that 2^x · x is 0, and not NaN."""
_START = tl.constexpr(-1e37)
"""Greatest score of a row that has seen no key: above that of hidden keys, whose weights are 0."""
_LOWEST = tl.constexpr(-3e38)
"""No less may come of moving what was summed up so far to another reference: −∞ times 0 is NaN."""


@triton.jit
def _add(over_TS, new, most, total, moment):
    """Add a block of scores relative to the new maximum to the sums of each row."""
    weight_TS = tl.exp2(over_TS)
    rise = most - new
    kept = tl.exp2(rise)
    product_TS = weight_TS * over_TS
    moment = kept * (moment + rise * total) + tl.sum(product_TS, 1)
    total = kept * total + tl.sum(weight_TS, 1)
    return new, total, moment


@triton.jit
def _add_full(
    low, high, most, total, moment, query_TD, key, stride, S, bits, inverse,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys from `low` to `high`, which all rows see, to maximum, sum and moment."""
    for start in range(low, high, BLOCK_S):
        key_DS = columns_of(key, start + tl.arange(0, BLOCK_S), stride, S, D, BLOCK_D)
        score_TS = tl.dot(query_TD, key_DS, input_precision=PRECISION)
        if SOFTCAP:
            score_TS = scaled(score_TS, bits, inverse, SOFTCAP)
            new = tl.maximum(most, tl.max(score_TS, 1))
            over_TS = score_TS - new[:, None]
        else:  # scaled and subtracted in one instruction
            new = tl.maximum(most, tl.max(score_TS, 1) * bits)
            over_TS = score_TS * bits - new[:, None]
        most, total, moment = _add(over_TS, new, most, total, moment)
    return most, total, moment


@triton.jit
def _add_partial(
    low, full_low, full_high, high, most, total, moment, reference, query_TD, key, padding, mask,
    row_T, position_T, stride, mask_rows, S, holes, real_start, real_stop, behind, ahead, bits,
    inverse, lowest, top,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add keys which some rows do not see, and what a mask adds.

    They lie from `low` to `full_low` and from `full_high` to `high`; one loop is compiled once.
    Scores are relative to the greatest number that a mask has added to the row so far, its
    `reference`: a large number added to all keys of a row costs no digits.
    """
    before = full_low - low
    for turn in range(0, before + tl.maximum(high - full_high, 0), BLOCK_S):
        start = tl.where(turn < before, low + turn, full_high + turn - before)
        start = tl.multiple_of(start, BLOCK_S)
        key_S = start + tl.arange(0, BLOCK_S)
        if MASK == 2:
            entry_TS = mask_block(mask, row_T, key_S, mask_rows, S)
        key_DS = columns_of(key, key_S, stride, S, D, BLOCK_D)
        score_TS = tl.dot(query_TD, key_DS, input_precision=PRECISION)
        score_TS = scaled(score_TS, bits, inverse, SOFTCAP)
        # Inside of what all rows see by their places the mask alone decides.
        edge = (start < real_start) | (start + BLOCK_S > real_stop) | (holes != 0)
        edge |= (start < top + BLOCK_T - 1 - behind) | (start + BLOCK_S - 1 > top + ahead)
        if MASK == 2:
            # Entries that hide are below all others, and −∞ is finite relative to the reference.
            entry_TS = laid_out_as(entry_TS.to(tl.float32), score_TS)
            if edge:
                near = sees(position_T, key_S, padding, holes, real_start, real_stop, behind, ahead)
                entry_TS = tl.where(near, entry_TS, float("-inf"))
            new = tl.maximum(reference, tl.max(entry_TS, 1))
            score_TS += (entry_TS - new[:, None]) * _LOG2E
            # What was summed up so far is relative to `most`, which moves with it.
            most = tl.maximum(most + (reference - new) * _LOG2E, _LOWEST)
            reference = new
            score_TS = tl.where(entry_TS <= lowest, _HIDDEN, score_TS)
        else:
            if MASK == 1:
                shown = seen_bits(mask, row_T, start, mask_rows, S, BLOCK_S)
                score_TS = tl.where(shown, score_TS, _HIDDEN)
            if edge:
                near = sees(position_T, key_S, padding, holes, real_start, real_stop, behind, ahead)
                score_TS = tl.where(near, score_TS, _HIDDEN)
        new = tl.maximum(most, tl.max(score_TS, 1))
        most, total, moment = _add(score_TS - new[:, None], new, most, total, moment)
    return most, total, moment, reference


@triton.jit
def _masses(
    low, middle, start, high, first, last, level_T, reference, query_TD, key, padding, mask, row_T,
    position_T, stride, mask_rows, S, holes, real_start, real_stop, behind, ahead, bits, inverse,
    lowest,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return each row's probability on its `first` and on its `last` keys.

    They lie in blocks from `low` to `middle` and from `start` to `high`.
    """
    first_mass = tl.zeros_like(level_T)
    last_mass = tl.zeros_like(level_T)
    before = tl.cdiv(tl.maximum(middle - low, 0), BLOCK_S) * BLOCK_S
    start = tl.maximum(start, low + before)
    for turn in range(0, before + tl.maximum(high - start, 0), BLOCK_S):
        here = tl.where(turn < before, low + turn, start + turn - before)
        here = tl.multiple_of(here, BLOCK_S)
        key_S = here + tl.arange(0, BLOCK_S)
        key_DS = columns_of(key, key_S, stride, S, D, BLOCK_D)
        score_TS = tl.dot(query_TD, key_DS, input_precision=PRECISION)
        score_TS = scaled(score_TS, bits, inverse, SOFTCAP)
        visible = sees(position_T, key_S, padding, holes, real_start, real_stop, behind, ahead)
        if MASK == 1:
            visible &= seen_bits(mask, row_T, here, mask_rows, S, BLOCK_S)
        if MASK == 2:
            entry_TS = mask_block(mask, row_T, key_S, mask_rows, S).to(tl.float32)
            visible &= (entry_TS <= lowest) == 0
            score_TS += (entry_TS - reference[:, None]) * _LOG2E
        share_TS = tl.where(visible, tl.exp2(score_TS - level_T[:, None]), 0.0)
        first_mass += tl.sum(tl.where((key_S < first)[None, :], share_TS, 0.0), 1)
        behind_TS = position_T[:, None] - key_S[None, :]
        last_mass += tl.sum(tl.where((behind_TS >= 0) & (behind_TS < last), share_TS, 0.0), 1)
    return first_mass, last_mass


@triton.jit(do_not_specialize=["heads", "group", "first", "last", "behind", "ahead"])
def row_kernel(
    query, key, out, masses, padding, extent, mask, tiles, query_stride_B, query_stride_H,
    query_stride_T, key_stride_B, key_stride_H, key_stride_S, heads, group, T, S, bits, inverse,
    first, last, behind, ahead, mask_batches, mask_heads, mask_rows, lowest,
    D: tl.constexpr, PADDED: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    MASSES: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write log-sum-exp, entropy, level and reference (B, H, T) one after the other to `out`.

    The level is the log-sum-exp in bits, relative to the reference; +∞ where a row sees no key.
    """
    # Late queries see the most keys: they go first, so that no long block is left to the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query += batch.to(tl.int64) * query_stride_B + head.to(tl.int64) * query_stride_H
    key += batch.to(tl.int64) * key_stride_B + (head // group).to(tl.int64) * key_stride_H
    row_T = block * BLOCK_T + tl.arange(0, BLOCK_T)
    position_T = row_T + (S - T)
    query_TD = rows_of(query, row_T, query_stride_T, T, D, BLOCK_D)
    top = block * BLOCK_T + (S - T)

    # Keys some row of the block sees, and inside them the keys all of its rows see.
    holes, real_start, real_stop = 0, 0, S
    if PADDED:
        padding += batch.to(tl.int64) * S
        real_start = tl.load(extent + batch * 3)
        real_stop = tl.load(extent + batch * 3 + 1)
        holes = tl.load(extent + batch * 3 + 2)
    across = tl.cdiv(S, _TILE)
    tile_first, tile_stop, tile_whole, tile_end = 0, across, 0, across
    if MASK != 0:
        line = (batch % mask_batches * mask_heads + head % mask_heads).to(tl.int64)
        mask += line * mask_rows * (S if MASK == 2 else across * (_TILE // 32))
        line = line * tl.cdiv(mask_rows, _TILE)
        tiles += (line + tl.where(mask_rows == 1, 0, block * BLOCK_T // _TILE)) * across
        tile_first, tile_stop, tile_whole, tile_end = tile_extent(tiles, 1, across)
    low, full_low, full_high, high = block_ranges(
        top, S, real_start, real_stop, holes, behind, ahead, tile_first, tile_stop, tile_whole,
        tile_end, BLOCK_T, BLOCK_S,
    )  # fmt: skip

    # Loops that test single keys need more registers for each: they take fewer.
    SMALL: tl.constexpr = 64 if BLOCK_S > 64 else BLOCK_S
    most = tl.full([BLOCK_T], _START, tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    moment = tl.zeros([BLOCK_T], tl.float32)
    most, total, moment = _add_full(
        full_low, full_high, most, total, moment, query_TD, key, key_stride_S, S, bits, inverse, D,
        BLOCK_D, BLOCK_S, SOFTCAP, PRECISION,
    )  # fmt: skip
    reference = tl.zeros([BLOCK_T], tl.float32)
    if MASK == 2:  # the keys so far were given 0
        reference = tl.where(full_high > full_low, reference, _START)
    most, total, moment, reference = _add_partial(
        low, full_low, full_high, high, most, total, moment, reference, query_TD, key, padding,
        mask, row_T, position_T, key_stride_S, mask_rows, S, holes, real_start, real_stop, behind,
        ahead, bits, inverse, lowest, top, D, BLOCK_D, BLOCK_T, SMALL, MASK, SOFTCAP, PRECISION,
    )  # fmt: skip

    # A row that sees nothing has sums of 0; one all of whose scores are −∞ a moment of NaN.
    unseen = (total == 0) & (moment == 0)
    broken = (total == 0) & (moment != 0)
    level = most + tl.log2(total)
    logsumexp = level * _LN2
    if MASK == 2:
        reference = tl.where(unseen, 0.0, reference)
        logsumexp += reference
    logsumexp = tl.where(broken, float("nan"), logsumexp)
    entropy = (tl.log2(total) - moment / total) * _LN2
    level = tl.where(unseen, float("inf"), level)
    rows = tl.num_programs(1).to(tl.int64) * T
    place, inside = tl.program_id(1).to(tl.int64) * T + row_T, row_T < T
    tl.store(out + place, tl.where(unseen, float("-inf"), logsumexp), mask=inside)
    tl.store(out + rows + place, tl.where(unseen, 0.0, entropy), mask=inside)
    tl.store(out + 2 * rows + place, level, mask=inside)
    tl.store(out + 3 * rows + place, reference, mask=inside)
    if MASSES:
        start = tl.maximum(tl.maximum(top - last + 1, 0) // BLOCK_S * BLOCK_S, low)
        stop = tl.minimum(high, tl.maximum(top + BLOCK_T, 0))
        mass_on_first, mass_on_last = _masses(
            low, tl.minimum(high, first), start, tl.where(last > 0, stop, start), first, last,
            level, reference, query_TD, key, padding, mask, row_T, position_T, key_stride_S,
            mask_rows, S, holes, real_start, real_stop, behind, ahead, bits, inverse, lowest, D,
            BLOCK_D, SMALL, MASK, SOFTCAP, PRECISION,
        )  # fmt: skip
        tl.store(masses + place, mass_on_first, mask=inside)
        tl.store(masses + rows + place, mass_on_last, mask=inside)

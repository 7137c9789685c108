"""The kernel over rows: log-sum-exp, entropy, and mass on the first and the last keys."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from joma.probes._attention_kernel._ends import write_part, write_rows
from joma.probes._attention_kernel._extent import block_ranges, tile_extent
from joma.probes._attention_kernel._score import (
    HIDDEN,
    LOWEST,
    START,
    capped,
    columns_of,
    laid_out_as,
    mask_block,
    places_of,
    rows_of,
    seen_bits,
    sees,
    within,
)

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_keys(
    low, high, most, total, moment, query_TD, key, position_T, stride, S, bits,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    inverse=0.0,
    SOFTCAP: tl.constexpr = 0,
):  # fmt: skip
    """Adds the keys from `low` to `high` to maximum, sum and moment of each row.

    With SOFTCAP scores are capped at `bits` and come in bits; else `bits` scales them.
    """
    for start in range(low, high, BLOCK_S):
        key_S = start + tl.arange(0, BLOCK_S)
        key_DS = columns_of(key, key_S, stride, S, D, BLOCK_D)
        score_TS = tl.dot(query_TD, key_DS, input_precision=PRECISION)
        if MASKED:
            visible = within(position_T, key_S, S, CAUSAL)
            score_TS = tl.where(visible, score_TS * bits, HIDDEN)
            most, total, moment = _add_scores(score_TS, most, total, moment)
        else:
            if SOFTCAP:
                score_TS = capped(score_TS, inverse, bits, SOFTCAP)
                new = tl.maximum(most, tl.max(score_TS, 1))
                over_TS = score_TS - new[:, None]
            else:
                new = tl.maximum(most, tl.max(score_TS, 1) * bits)
                over_TS = score_TS * bits - new[:, None]
            weight_TS = tl.exp2(over_TS)
            rise = most - new
            kept = tl.exp2(rise)
            product_TS = weight_TS * over_TS
            moment = kept * (moment + rise * total) + tl.sum(product_TS, 1)
            total = kept * total + tl.sum(weight_TS, 1)
            most = new
    return most, total, moment


@triton.jit
def _add_scores(score_TS, most, total, moment):
    """Adds a block of scores in bits, `HIDDEN` where keys are not visible."""
    new = tl.maximum(most, tl.max(score_TS, 1))
    over_TS = score_TS - new[:, None]
    weight_TS = tl.exp2(over_TS)
    rise = most - new
    product_TS = weight_TS * over_TS
    kept = tl.exp2(rise)
    moment = kept * (moment + rise * total) + tl.sum(product_TS, 1)
    total = kept * total + tl.sum(weight_TS, 1)
    return new, total, moment


@triton.jit
def _add_some_keys(
    low, full_low, full_high, high, most, total, moment, reference, query_TD, key, padding, mask,
    row_T, position_T, stride, mask_rows, mask_stride_T, mask_stride_S, S, holes, real_start,
    real_stop, behind, ahead, bits, inverse, lowest, top,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MASK: tl.constexpr,
    EVEN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_add_keys`, where some rows do not see all of them; adds what a mask adds.

    Keys from `low` to `full_low` and from `full_high` to `high`, in one loop: it is compiled once.

    Scores are then relative to the greatest number a mask has added to the row so far, its
    `reference`: a large number added to all keys of a row costs no digits.
    """
    before = full_low - low
    for turn in range(0, before + tl.maximum(high - full_high, 0), BLOCK_S):
        start = tl.where(turn < before, low + turn, full_high + turn - before)
        key_S = tl.multiple_of(start, BLOCK_S) + tl.arange(0, BLOCK_S)
        if MASK == 2:
            entry_TS = mask_block(
                mask, row_T, key_S, mask_rows, S, mask_stride_T, mask_stride_S, EVEN
            )
        key_DS = columns_of(key, key_S, stride, S, D, BLOCK_D)
        score_TS = tl.dot(query_TD, key_DS, input_precision=PRECISION)
        if SOFTCAP:
            score_TS = capped(score_TS, inverse, bits, SOFTCAP)
        else:
            score_TS *= bits
        # Inside of what all rows see by their places the mask alone decides.
        edge = (start < real_start) | (start + BLOCK_S > real_stop) | (holes != 0)
        edge |= (start < top + BLOCK_T - 1 - behind) | (start + BLOCK_S - 1 > top + ahead)
        if MASK == 2:
            # Entries that hide are below all others, and −∞ is finite relative to the reference.
            entry_TS = laid_out_as(entry_TS.to(tl.float32), score_TS)
            if edge:
                place_S = places_of(key_S, padding, holes, real_start, real_stop)
                visible = sees(position_T, place_S, behind, ahead)
                entry_TS = tl.where(visible, entry_TS, float("-inf"))
            new = tl.maximum(reference, tl.max(entry_TS, 1))
            score_TS += (entry_TS - new[:, None]) * _LOG2E
            # What was summed up so far is relative to `most`, which moves with it.
            most = tl.maximum(most + (reference - new) * _LOG2E, LOWEST)
            reference = new
            score_TS = tl.where(entry_TS <= lowest, HIDDEN, score_TS)
        else:
            if MASK == 1:
                shown = seen_bits(mask, row_T, start, mask_rows, S, mask_stride_T, BLOCK_S)
                score_TS = tl.where(shown, score_TS, HIDDEN)
            if edge:
                place_S = places_of(key_S, padding, holes, real_start, real_stop)
                visible = sees(position_T, place_S, behind, ahead)
                score_TS = tl.where(visible, score_TS, HIDDEN)
        most, total, moment = _add_scores(score_TS, most, total, moment)
    return most, total, moment, reference


@triton.jit
def _masses(
    low, middle, start, high, first, last, level_T, reference, query_TD, key, padding, mask, row_T,
    position_T, stride, mask_rows, mask_stride_T, mask_stride_S, S, holes, real_start, real_stop,
    behind, ahead, bits, inverse, lowest,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    GENERAL: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    EVEN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Each row's probability on its `first` and on its `last` keys.

    They lie in blocks from `low` to `middle` and from `start` to `high`.
    """
    first_mass = tl.zeros_like(level_T)
    last_mass = tl.zeros_like(level_T)
    before = tl.cdiv(tl.maximum(middle - low, 0), BLOCK_S) * BLOCK_S
    start = tl.maximum(start, low + before)
    for turn in range(0, before + tl.maximum(high - start, 0), BLOCK_S):
        here = tl.where(turn < before, low + turn, start + turn - before)
        key_S = tl.multiple_of(here, BLOCK_S) + tl.arange(0, BLOCK_S)
        if MASK == 2:
            entry_TS = mask_block(
                mask, row_T, key_S, mask_rows, S, mask_stride_T, mask_stride_S, EVEN
            )
        key_DS = columns_of(key, key_S, stride, S, D, BLOCK_D)
        score_TS = tl.dot(query_TD, key_DS, input_precision=PRECISION)
        if SOFTCAP:
            score_TS = capped(score_TS, inverse, bits, SOFTCAP)
        else:
            score_TS *= bits
        if GENERAL:
            place_S = places_of(key_S, padding, holes, real_start, real_stop)
            visible = sees(position_T, place_S, behind, ahead)
        else:
            visible = within(position_T, key_S, S, CAUSAL)
        if MASK == 1:
            visible &= seen_bits(mask, row_T, here, mask_rows, S, mask_stride_T, BLOCK_S)
        if MASK == 2:
            entry_TS = laid_out_as(entry_TS.to(tl.float32), score_TS)
            visible &= (entry_TS <= lowest) == 0
            score_TS += (entry_TS - reference[:, None]) * _LOG2E
        share_TS = tl.where(visible, tl.exp2(score_TS - level_T[:, None]), 0.0)
        first_mass += tl.sum(tl.where((key_S < first)[None, :], share_TS, 0.0), 1)
        behind_TS = position_T[:, None] - key_S[None, :]
        last_mass += tl.sum(tl.where((behind_TS >= 0) & (behind_TS < last), share_TS, 0.0), 1)
    return first_mass, last_mass


@triton.jit(
    do_not_specialize=[
        "heads", "group", "T", "S", "first", "last", "span", "padded", "behind", "ahead",
        "has_rows", "tiled", "mask_rows", "mask_stride_B", "mask_stride_H", "mask_stride_T",
        "mask_stride_S", "tile_stride_B", "tile_stride_H", "tile_stride_T",
    ],
    do_not_specialize_on_alignment=[
        "padding", "real_rows", "logsumexp", "entropy", "first_mass", "last_mass", "level_out",
        "reference_out",
    ],
)  # fmt: skip
def row_kernel(
    query,
    key,
    logsumexp,
    entropy,
    first_mass,
    last_mass,
    query_stride_B,
    query_stride_H,
    query_stride_T,
    key_stride_B,
    key_stride_H,
    key_stride_S,
    heads,
    group,
    T,
    S,
    bits,
    first,
    last,
    # What follows is read with GENERAL alone.
    padding,
    extent,
    real_rows,
    mask,
    tiles,
    level_out,
    reference_out,
    parts,
    span,
    padded,
    behind,
    ahead,
    has_rows,
    tiled,
    mask_rows,
    mask_stride_B,
    mask_stride_H,
    mask_stride_T,
    mask_stride_S,
    tile_stride_B,
    tile_stride_H,
    tile_stride_T,
    inverse,
    lowest,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASSES: tl.constexpr,
    GENERAL: tl.constexpr,
    MASK: tl.constexpr,
    EVEN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    if EVEN:  # said to the compiler in this way, not by a kernel for every kind of T and S
        T, S = T // 16 * 16, S // 16 * 16
    # Late queries see the most keys: they go first, so that no long block is left to the end.
    block = tl.program_id(0)
    if CAUSAL or GENERAL:
        block = tl.num_programs(0) - 1 - block
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query += batch.to(tl.int64) * query_stride_B + head.to(tl.int64) * query_stride_H
    key += batch.to(tl.int64) * key_stride_B + (head // group).to(tl.int64) * key_stride_H
    row_T = block * BLOCK_T + tl.arange(0, BLOCK_T)
    position_T = row_T + (S - T)
    query_TD = rows_of(query, row_T, query_stride_T, T, D, BLOCK_D)
    inside = row_T < T
    top = block * BLOCK_T + (S - T)

    # Keys some row of the block sees, and inside them the keys all of its rows see.
    holes, real_start, real_stop = 0, 0, S
    real_T = inside
    if GENERAL:
        padding += batch.to(tl.int64) * S
        extent += batch * 3
        real_start = tl.load(extent, mask=padded != 0, other=0)
        real_stop = tl.load(extent + 1, mask=padded != 0, other=S)
        holes = tl.load(extent + 2, mask=padded != 0, other=0)
        real_rows += batch.to(tl.int64) * T + row_T
        real_T &= tl.load(real_rows, mask=inside & (has_rows != 0), other=1) != 0
        tile_first, tile_stop, tile_whole, tile_end = 0, S, 0, S
        if MASK != 0:
            if EVEN and MASK == 2:
                mask += batch.to(tl.int64) * (mask_stride_B // 16 * 16)
                mask += head.to(tl.int64) * (mask_stride_H // 16 * 16)
            else:
                mask += batch.to(tl.int64) * mask_stride_B + head.to(tl.int64) * mask_stride_H
            tiles += batch.to(tl.int64) * tile_stride_B + head.to(tl.int64) * tile_stride_H
            tiles += (block * BLOCK_T // 64).to(tl.int64) * tile_stride_T
            tile_stop = (S + 63) // 64
            tile_whole, tile_end = tile_stop, tile_stop
            if tiled != 0:
                tile_first, tile_stop, tile_whole, tile_end = tile_extent(tiles, 1, tile_stop)
        low, full_low, full_high, high = block_ranges(
            top, S, real_start, real_stop, holes, behind, ahead, tile_first, tile_stop,
            tile_whole, tile_end, BLOCK_T, BLOCK_S,
        )  # fmt: skip
        if tl.max(real_T.to(tl.int32), 0) == 0:  # nobody looks
            high = low
            full_low = low
            full_high = low
    else:
        low, high = 0, S
        if CAUSAL:
            high = tl.maximum(tl.minimum(S, top + BLOCK_T), 0)
        full_low, full_high = low, high
        if CAUSAL:
            full_high = tl.minimum(full_high, tl.maximum(top + 1, 0))
        full_high = full_high // BLOCK_S * BLOCK_S
    if PARTS:  # of the keys the program has its part alone
        low = tl.maximum(low, tl.program_id(2) * span)
        high = tl.maximum(tl.minimum(high, (tl.program_id(2) + 1) * span), low)
        full_high = tl.maximum(tl.minimum(full_high, high // BLOCK_S * BLOCK_S), low)
        full_low = tl.minimum(tl.maximum(full_low, low), full_high)

    # Loops that test single keys need more registers for each: of many rows they take fewer.
    SMALL: tl.constexpr = 64 if BLOCK_S > 64 and BLOCK_T > 16 else BLOCK_S
    most = tl.full([BLOCK_T], START, tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    moment = tl.zeros([BLOCK_T], tl.float32)
    reference = tl.zeros([BLOCK_T], tl.float32)
    most, total, moment = _add_keys(
        full_low, full_high, most, total, moment, query_TD, key, position_T, key_stride_S, S, bits,
        False, D, BLOCK_D, BLOCK_S, CAUSAL, PRECISION, inverse, SOFTCAP,
    )  # fmt: skip
    if GENERAL:
        if MASK == 2:  # the keys so far were given 0
            reference = tl.where(full_high > full_low, reference, START)
        most, total, moment, reference = _add_some_keys(
            low, full_low, full_high, high, most, total, moment, reference, query_TD, key, padding,
            mask, row_T, position_T, key_stride_S, mask_rows, mask_stride_T, mask_stride_S, S,
            holes, real_start, real_stop, behind, ahead, bits, inverse, lowest, top, D,
            BLOCK_D, BLOCK_T, SMALL, MASK, EVEN, SOFTCAP, PRECISION,
        )  # fmt: skip
    else:
        most, total, moment = _add_keys(
            full_high, high, most, total, moment, query_TD, key, position_T, key_stride_S, S, bits,
            True, D, BLOCK_D, BLOCK_S, CAUSAL, PRECISION,
        )  # fmt: skip

    if GENERAL:  # rows that are not real saw nothing
        total = tl.where(real_T, total, 0.0)
        moment = tl.where(real_T, moment, 0.0)
    out = tl.program_id(1).to(tl.int64) * T + row_T
    if PARTS:
        rows = tl.num_programs(1).to(tl.int64) * T
        write_part(
            parts, tl.program_id(2), rows, out, inside, most, total, moment, reference
        )  # fmt: skip
        return
    level, reference = write_rows(
        most, total, moment, reference, out, inside, logsumexp, entropy, level_out, reference_out,
        MASK,
    )  # fmt: skip
    if MASSES:
        start = tl.maximum(tl.maximum(top - last + 1, 0) // BLOCK_S * BLOCK_S, low)
        stop = tl.minimum(high, tl.maximum(top + BLOCK_T, 0))
        mass_on_first, mass_on_last = _masses(
            low, tl.minimum(high, first), start, tl.where(last > 0, stop, start), first, last,
            level, reference, query_TD, key, padding, mask, row_T, position_T, key_stride_S,
            mask_rows, mask_stride_T, mask_stride_S, S, holes, real_start, real_stop, behind,
            ahead, bits, inverse, lowest, D, BLOCK_D, SMALL, GENERAL, CAUSAL, MASK, EVEN,
            SOFTCAP, PRECISION,
        )  # fmt: skip
        tl.store(first_mass + out, mass_on_first, mask=inside & (first > 0))
        tl.store(last_mass + out, mass_on_last, mask=inside & (last > 0))

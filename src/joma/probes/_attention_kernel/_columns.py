"""The kernel over keys: the mass each receives from all rows, whose log-sum-exp is known."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from joma.probes._attention_kernel._extent import block_ranges, tile_extent
from joma.probes._attention_kernel._score import (
    capped,
    columns_of,
    mask_block,
    rows_of,
    seen_bits,
    sees,
    within,
)

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_queries(
    low, high, mass, key_SD, query, logsumexp, key_S, stride, T, S, bits,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what the queries from `low` to `high` give to each key of the block."""
    for start in range(low, high, BLOCK_T):
        row_T = start + tl.arange(0, BLOCK_T)
        query_DT = columns_of(query, row_T, stride, T, D, BLOCK_D)
        level_T = tl.load(logsumexp + row_T, mask=row_T < T, other=float("inf")) * _LOG2E
        score_ST = tl.dot(key_SD, query_DT, input_precision=PRECISION)
        if MASKED:
            level_T = tl.where(level_T == float("-inf"), float("inf"), level_T)
            weight_ST = tl.exp2(score_ST * bits - level_T[None, :])
            visible_TS = within(row_T + (S - T), key_S, S, CAUSAL)
            weight_ST = tl.where(tl.trans(visible_TS), weight_ST, 0.0)
        else:
            weight_ST = tl.exp2(score_ST * bits - level_T[None, :])
        mass += tl.sum(weight_ST, 1)
    return mass


@triton.jit
def _add_some_queries(
    low, full_low, full_high, high, mass, key_SD, query, level, reference, mask, key_S, first,
    stride, mask_rows, mask_stride_T, mask_stride_S, T, S, behind, ahead, bits, inverse, lowest,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MASK: tl.constexpr,
    EVEN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_add_queries`, from `low` to `full_low` and from `full_high` to `high`.

    Where numbers are added, `level` is in bits, relative to the row's `reference`; else it is the
    log-sum-exp.
    """
    before = full_low - low
    for turn in range(0, before + tl.maximum(high - full_high, 0), BLOCK_T):
        start = tl.where(turn < before, low + turn, full_high + turn - before)
        row_T = tl.multiple_of(start, BLOCK_T) + tl.arange(0, BLOCK_T)
        query_DT = columns_of(query, row_T, stride, T, D, BLOCK_D)
        level_T = tl.load(level + row_T, mask=row_T < T, other=float("inf"))
        if MASK == 2:
            reference_T = tl.load(reference + row_T, mask=row_T < T, other=float("inf"))
            if not MASKED:  # they were given 0
                level_T += reference_T * _LOG2E
        else:
            level_T *= _LOG2E
        level_T = tl.where(level_T == float("-inf"), float("inf"), level_T)
        score_ST = tl.dot(key_SD, query_DT, input_precision=PRECISION)
        if SOFTCAP:
            score_ST = capped(score_ST, inverse, bits, SOFTCAP)
        else:
            score_ST *= bits
        if MASKED:
            visible_TS = sees(row_T + (S - T), key_S, behind, ahead)
            if MASK == 1:
                visible_TS &= seen_bits(mask, row_T, first, mask_rows, S, mask_stride_T, BLOCK_S)
            if MASK == 2:
                entry_TS = mask_block(
                    mask, row_T, key_S, mask_rows, S, mask_stride_T, mask_stride_S, EVEN
                ).to(tl.float32)
                visible_TS &= (entry_TS <= lowest) == 0
                score_ST += tl.trans((entry_TS - reference_T[:, None]) * _LOG2E)
            weight_ST = tl.exp2(score_ST - level_T[None, :])
            weight_ST = tl.where(tl.trans(visible_TS), weight_ST, 0.0)
        else:
            weight_ST = tl.exp2(score_ST - level_T[None, :])
        mass += tl.sum(weight_ST, 1)
    return mass


@triton.jit(
    do_not_specialize=[
        "heads", "group", "T", "S", "padded", "behind", "ahead", "tiled", "mask_rows",
        "mask_stride_B", "mask_stride_H", "mask_stride_T", "mask_stride_S", "tile_stride_B",
        "tile_stride_H", "tile_stride_T",
    ],
    do_not_specialize_on_alignment=["padding", "logsumexp", "reference"],
)  # fmt: skip
def column_kernel(
    query,
    key,
    logsumexp,
    received,
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
    # What follows is read with GENERAL alone.
    padding,
    extent,
    mask,
    tiles,
    reference,
    padded,
    behind,
    ahead,
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
    GENERAL: tl.constexpr,
    MASK: tl.constexpr,
    EVEN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    if EVEN:  # said to the compiler in this way, not by a kernel for every kind of T and S
        T, S = T // 16 * 16, S // 16 * 16
    block = tl.program_id(0)  # early keys are seen by the most queries: they go first
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query += batch.to(tl.int64) * query_stride_B + head.to(tl.int64) * query_stride_H
    key += batch.to(tl.int64) * key_stride_B + (head // group).to(tl.int64) * key_stride_H
    logsumexp += tl.program_id(1).to(tl.int64) * T
    key_S = block * BLOCK_S + tl.arange(0, BLOCK_S)
    key_SD = rows_of(key, key_S, key_stride_S, S, D, BLOCK_D)
    mass = tl.zeros([BLOCK_S], tl.float32)

    # The loop that looks closer needs more registers for a query: it takes fewer at a time.
    SMALL: tl.constexpr = BLOCK_T if BLOCK_T < 64 else 64
    # Queries that see some key of the block, and inside them those that see all of its keys.
    top = block * BLOCK_S - (S - T)
    if GENERAL:
        reference += tl.program_id(1).to(tl.int64) * T
        real_start = tl.load(extent + batch * 3, mask=padded != 0, other=0)
        real_stop = tl.load(extent + batch * 3 + 1, mask=padded != 0, other=S)
        tile_first, tile_stop, tile_whole, tile_end = 0, T, 0, T
        if MASK != 0:
            if EVEN and MASK == 2:
                mask += batch.to(tl.int64) * (mask_stride_B // 16 * 16)
                mask += head.to(tl.int64) * (mask_stride_H // 16 * 16)
            else:
                mask += batch.to(tl.int64) * mask_stride_B + head.to(tl.int64) * mask_stride_H
            tiles += batch.to(tl.int64) * tile_stride_B + head.to(tl.int64) * tile_stride_H
            tile_stop = (T + 63) // 64
            tile_whole, tile_end = tile_stop, tile_stop
            if tiled != 0:
                tile_first, tile_stop, tile_whole, tile_end = tile_extent(
                    tiles + block // (64 // BLOCK_S), tile_stride_T, tile_stop
                )
        # A key looks back at queries as far as they look ahead.
        low, full_low, full_high, high = block_ranges(
            top, T, 0, T, 0, ahead, behind, tile_first, tile_stop, tile_whole, tile_end,
            BLOCK_S, BLOCK_T,
        )  # fmt: skip
        if (block * BLOCK_S >= real_stop) | ((block + 1) * BLOCK_S <= real_start):
            low = high
            full_low = high
            full_high = high
        mass = _add_some_queries(
            full_low, full_high, high, high, mass, key_SD, query, logsumexp, reference, mask, key_S,
            block * BLOCK_S, query_stride_T, mask_rows, mask_stride_T, mask_stride_S, T, S, behind,
            ahead, bits, inverse, lowest, False, D, BLOCK_D, BLOCK_T, BLOCK_S, MASK, EVEN,
            SOFTCAP, PRECISION,
        )  # fmt: skip
        mass = _add_some_queries(
            low, full_low, full_high, high, mass, key_SD, query, logsumexp, reference, mask, key_S,
            block * BLOCK_S, query_stride_T, mask_rows, mask_stride_T, mask_stride_S, T, S, behind,
            ahead, bits, inverse, lowest, True, D, BLOCK_D, SMALL, BLOCK_S, MASK, EVEN,
            SOFTCAP, PRECISION,
        )  # fmt: skip
        real_S = (key_S >= real_start) & (key_S < real_stop)
        padding += batch.to(tl.int64) * S + key_S
        real_S &= tl.load(padding, mask=real_S & (padded != 0), other=1) != 0
        mass = tl.where(real_S, mass, 0.0)
    else:
        low, high = 0, T
        if CAUSAL:
            low = tl.maximum(top, 0) // BLOCK_T * BLOCK_T
        full_low, full_high = low, high
        if CAUSAL:
            full_low = (tl.maximum(top + BLOCK_S - 1, 0) + BLOCK_T - 1) // BLOCK_T * BLOCK_T
        full_high = T // BLOCK_T * BLOCK_T
        full_low = tl.maximum(tl.minimum(full_low, high), low)
        full_high = tl.maximum(full_high, full_low)
        mass = _add_queries(
            low, full_low, mass, key_SD, query, logsumexp, key_S, query_stride_T, T, S, bits, True,
            D, BLOCK_D, BLOCK_T, CAUSAL, PRECISION,
        )  # fmt: skip
        mass = _add_queries(
            full_low, full_high, mass, key_SD, query, logsumexp, key_S, query_stride_T, T, S, bits,
            False, D, BLOCK_D, BLOCK_T, CAUSAL, PRECISION,
        )  # fmt: skip
        mass = _add_queries(
            full_high, high, mass, key_SD, query, logsumexp, key_S, query_stride_T, T, S, bits,
            True, D, BLOCK_D, BLOCK_T, CAUSAL, PRECISION,
        )  # fmt: skip
    out = received + tl.program_id(1).to(tl.int64) * S + key_S
    tl.store(out, mass, mask=key_S < S)

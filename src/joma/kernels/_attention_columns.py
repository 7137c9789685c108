"""The kernel over keys: the mass each receives from all rows, whose log-sum-exp is known."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from joma.kernels._attention_blocks import (
    block_ranges,
    columns_of,
    mask_block,
    rows_of,
    scaled,
    seen_bits,
    sees,
    tile_extent,
)

_LOG2E = tl.constexpr(1.4426950408889634)
_TILE = tl.constexpr(64)


@triton.jit
def _add_queries(
    low, full_low, full_high, high, mass, key_SD, query, out, rows, mask, padding, key_S, first,
    stride, mask_rows, T, S, holes, real_start, real_stop, behind, ahead, bits, inverse, lowest,
    PARTIAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what queries give to each key of the block.

    They lie from `low` to `full_low` and from `full_high` to `high`. With PARTIAL some of them do
    not see all of the keys.
    """
    before = full_low - low
    for turn in range(0, before + tl.maximum(high - full_high, 0), BLOCK_T):
        start = tl.where(turn < before, low + turn, full_high + turn - before)
        row_T = tl.multiple_of(start, BLOCK_T) + tl.arange(0, BLOCK_T)
        query_DT = columns_of(query, row_T, stride, T, D, BLOCK_D)
        level_T = tl.load(out + 2 * rows + row_T, mask=row_T < T, other=float("inf"))
        if MASK == 2:
            reference_T = tl.load(out + 3 * rows + row_T, mask=row_T < T, other=float("inf"))
            if not PARTIAL:  # these keys were given 0
                level_T += reference_T * _LOG2E
        score_ST = tl.dot(key_SD, query_DT, input_precision=PRECISION)
        score_ST = scaled(score_ST, bits, inverse, SOFTCAP)
        if PARTIAL:
            position_T = row_T + (S - T)
            visible_TS = sees(
                position_T, key_S, padding, holes, real_start, real_stop, behind, ahead
            )
            if MASK == 1:
                visible_TS &= seen_bits(mask, row_T, first, mask_rows, S, BLOCK_S)
            if MASK == 2:
                entry_TS = mask_block(mask, row_T, key_S, mask_rows, S).to(tl.float32)
                visible_TS &= (entry_TS <= lowest) == 0
                score_ST += tl.trans((entry_TS - reference_T[:, None]) * _LOG2E)
            weight_ST = tl.exp2(score_ST - level_T[None, :])
            weight_ST = tl.where(tl.trans(visible_TS), weight_ST, 0.0)
        else:
            weight_ST = tl.exp2(score_ST - level_T[None, :])
        mass += tl.sum(weight_ST, 1)
    return mass


@triton.jit(do_not_specialize=["heads", "group", "behind", "ahead"])
def column_kernel(
    query, key, out, received, padding, extent, mask, tiles, query_stride_B, query_stride_H,
    query_stride_T, key_stride_B, key_stride_H, key_stride_S, heads, group, T, S, bits, inverse,
    behind, ahead, mask_batches, mask_heads, mask_rows, lowest,
    D: tl.constexpr, PADDED: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write the mass that each key receives; `out` is what `row_kernel` wrote."""
    block = tl.program_id(0)  # early keys are seen by the most queries: they go first
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query += batch.to(tl.int64) * query_stride_B + head.to(tl.int64) * query_stride_H
    key += batch.to(tl.int64) * key_stride_B + (head // group).to(tl.int64) * key_stride_H
    rows = tl.num_programs(1).to(tl.int64) * T
    out += tl.program_id(1).to(tl.int64) * T
    first = block * BLOCK_S
    key_S = first + tl.arange(0, BLOCK_S)
    key_SD = rows_of(key, key_S, key_stride_S, S, D, BLOCK_D)
    mass = tl.zeros([BLOCK_S], tl.float32)

    # Queries that see some key of the block, and inside them those that see all of its keys.
    holes, real_start, real_stop = 0, 0, S
    if PADDED:
        padding += batch.to(tl.int64) * S
        real_start = tl.load(extent + batch * 3)
        real_stop = tl.load(extent + batch * 3 + 1)
        holes = tl.load(extent + batch * 3 + 2)
    down = tl.cdiv(T, _TILE)
    tile_first, tile_stop, tile_whole, tile_end = 0, down, 0, down
    if MASK != 0:
        across = tl.cdiv(S, _TILE)
        line = (batch % mask_batches * mask_heads + head % mask_heads).to(tl.int64)
        mask += line * mask_rows * (S if MASK == 2 else across * (_TILE // 32))
        tiles += line * tl.cdiv(mask_rows, _TILE) * across + first // _TILE
        tile_first, tile_stop, tile_whole, tile_end = tile_extent(
            tiles, tl.where(mask_rows == 1, 0, across), down
        )
    # A key looks back at queries as far as they look ahead.
    low, full_low, full_high, high = block_ranges(
        first - (S - T), T, 0, T, 0, ahead, behind, tile_first, tile_stop, tile_whole, tile_end,
        BLOCK_S, BLOCK_T,
    )  # fmt: skip
    if (first >= real_stop) | (first + BLOCK_S <= real_start):
        low, full_low, full_high = high, high, high
    # The loop that looks closer needs more registers for a query: it takes fewer at a time.
    SMALL: tl.constexpr = BLOCK_T if BLOCK_T < 64 else 64
    mass = _add_queries(
        full_low, full_high, high, high, mass, key_SD, query, out, rows, mask, padding, key_S,
        first, query_stride_T, mask_rows, T, S, holes, real_start, real_stop, behind, ahead, bits,
        inverse, lowest, False, D, BLOCK_D, BLOCK_T, BLOCK_S, MASK, SOFTCAP, PRECISION,
    )  # fmt: skip
    mass = _add_queries(
        low, full_low, full_high, high, mass, key_SD, query, out, rows, mask, padding, key_S, first,
        query_stride_T, mask_rows, T, S, holes, real_start, real_stop, behind, ahead, bits, inverse,
        lowest, True, D, BLOCK_D, SMALL, BLOCK_S, MASK, SOFTCAP, PRECISION,
    )  # fmt: skip
    if PADDED:  # keys outside, or in holes, were seen by queries of full blocks
        real_S = (key_S >= real_start) & (key_S < real_stop)
        real_S &= tl.load(padding + key_S, mask=real_S, other=0) != 0
        mass = tl.where(real_S, mass, 0.0)
    place = tl.program_id(1).to(tl.int64) * S + key_S
    tl.store(received + place, mass, mask=key_S < S)

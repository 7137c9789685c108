"""Where real keys begin and end, and which parts of a mask hide nothing or everything.

Both are found on the device, in one small launch each, and read by the kernels, which then leave
out blocks that no row sees and go through blocks that all rows see without looking at the mask.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

import triton
import triton.language as tl

from joma.probes._attention_kernel._score import mask_block

NONE, SOME, ALL = 0, 1, 2
"""What is seen of a tile of the mask; ALL also means that nothing is added."""


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["padding"])
def padding_kernel(padding, extent, S, BLOCK: tl.constexpr):
    """Of each sequence: the first real key, one past the last, and whether some between are not."""
    batch = tl.program_id(0).to(tl.int64)
    padding += batch * S
    first, stop, count = S, 0, 0
    for start in range(0, S, BLOCK):
        key_S = start + tl.arange(0, BLOCK)
        real = tl.load(padding + key_S, mask=key_S < S, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(real, key_S, S)))
        stop = tl.maximum(stop, tl.max(tl.where(real, key_S + 1, 0)))
        count += tl.sum(real.to(tl.int32))
    first = tl.minimum(first, stop)
    tl.store(extent + 3 * batch, first)
    tl.store(extent + 3 * batch + 1, stop)
    tl.store(extent + 3 * batch + 2, (count != stop - first).to(tl.int32))


@triton.jit(
    do_not_specialize=["stride_B", "stride_H", "stride_T", "stride_S", "heads", "T", "S", "down"]
)
def tile_kernel(
    mask,
    tiles,
    words,
    stride_B,
    stride_H,
    stride_T,
    stride_S,
    heads,
    T,
    S,
    down,
    lowest,
    NUMBERS: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """What rows of a tile of the mask see, for `heads` heads of masks with `down` rows of tiles.

    A boolean mask is also written as bits, two words of 32 keys for each row of a tile: a thread of
    the kernels then needs a word where it would need a byte for each of 32 scores.
    """
    if EVEN:
        S = S // 16 * 16
    across = tl.cdiv(S, TILE)
    column = tl.program_id(0) % across
    row = tl.program_id(0) // across % down
    which = (tl.program_id(0) // across // down).to(tl.int64)
    if EVEN:
        mask += (which // heads) * (stride_B // 16 * 16) + (which % heads) * (stride_H // 16 * 16)
    else:
        mask += (which // heads) * stride_B + (which % heads) * stride_H
    row_T = row * TILE + tl.arange(0, TILE)
    key_S = column * TILE + tl.arange(0, TILE)
    entry = mask_block(mask, row_T, key_S, T, S, stride_T, stride_S, EVEN)
    if NUMBERS:
        entry = entry.to(tl.float32)
        seen = (entry <= lowest) == 0
        plain = entry == 0
    else:
        seen = entry != 0
        plain = seen
    inside = (key_S < S)[None, :]
    some = tl.max(tl.max((seen & inside).to(tl.int32), 1), 0)
    every = tl.min(tl.min((plain | (inside == 0)).to(tl.int32), 1), 0)
    tl.store(tiles + tl.program_id(0), (some + every * some).to(tl.int8))
    if not NUMBERS:
        bit = (seen & inside).to(tl.int32) << (key_S % 32)[None, :]
        word = tl.sum(tl.reshape(bit, (TILE, TILE // 32, 32)), 2)
        words += (which * T + row_T.to(tl.int64))[:, None] * (across * (TILE // 32))
        place = column * (TILE // 32) + tl.arange(0, TILE // 32)
        tl.store(words + place[None, :], word, mask=(row_T < T)[:, None])


@triton.jit
def tile_extent(tiles, stride, count):
    """Of a line of tiles: the first that is seen, one past the last, and a run that is seen whole.

    The run is the first one, from its first tile to one past its last.
    """
    chunk: tl.constexpr = 128
    first, stop, whole, end = count, 0, count, count
    for start in range(0, count, chunk):
        place = start + tl.arange(0, chunk)
        kind = tl.load(tiles + place.to(tl.int64) * stride, mask=place < count, other=0)
        first = tl.minimum(first, tl.min(tl.where(kind > 0, place, count)))
        stop = tl.maximum(stop, tl.max(tl.where(kind > 0, place + 1, 0)))
        whole = tl.minimum(whole, tl.min(tl.where(kind == 2, place, count)))
    for start in range(0, count, chunk):
        place = start + tl.arange(0, chunk)
        kind = tl.load(tiles + place.to(tl.int64) * stride, mask=place < count, other=0)
        end = tl.minimum(end, tl.min(tl.where((kind != 2) & (place > whole), place, count)))
    return first, stop, whole, end


@triton.jit
def block_ranges(
    top, count, start, stop, holes, behind, ahead, first, last, whole, end,
    OUTER: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """What a block of `OUTER` rows whose first has the place `top` sees, and what it sees whole.

    Args:
        top: Place of the block's first row among what it looks at.
        count: How many there are to look at.
        start: The first that is real.
        stop: One past the last that is real.
        holes: Whether some between are not.
        behind: How far back a row sees.
        ahead: How far ahead.
        first: The first tile of the mask in which a row sees something.
        last: One past the last.
        whole: The first tile of a run of which every row sees everything.
        end: One past its last.
        OUTER: Rows of a block.
        INNER: How many are looked at together; all ranges but the last end on multiples of it.
    """
    tile: tl.constexpr = 64
    bottom = top + OUTER - 1
    low = tl.maximum(tl.maximum(top - behind, start), tl.maximum(first * tile, 0))
    low = low // INNER * INNER
    high = tl.minimum(tl.minimum(bottom + ahead + 1, stop), tl.minimum(last * tile, count))
    full_low = tl.maximum(tl.maximum(bottom - behind, start), tl.maximum(whole * tile, 0))
    full_low = (full_low + INNER - 1) // INNER * INNER
    full_high = tl.minimum(tl.minimum(top + ahead + 1, stop), tl.minimum(end * tile, count))
    full_high = tl.maximum(full_high, 0) // INNER * INNER
    full_high = tl.where(holes != 0, low, full_high)
    full_high = tl.maximum(full_high, low)
    full_low = tl.minimum(tl.maximum(full_low, low), full_high)
    return low, full_low, full_high, high

"""What the attention kernels do with a block: load it, see which keys count, scale the scores.

Where real keys begin and end, and which tiles of a mask hide nothing or everything, is found on the
device in one small launch each. The kernels then leave out blocks that no row sees, and go through
blocks that all rows see without looking at the mask.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
TILE = 64
"""Rows and keys of a tile of a mask; outer blocks of the kernels are no larger."""
_TILE = tl.constexpr(TILE)
_ELSEWHERE = tl.constexpr(-(3 << 29))
"""Place of a key that is not real: outside of what any query sees."""


@triton.jit
def rows_of(vectors, place, stride, count, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return vectors at these places, (places, D)."""
    feature = tl.arange(0, BLOCK_D)
    # 64-bit: place × stride passes 2³¹ beyond 524,288 keys at stride 4096
    address = vectors + place.to(tl.int64)[:, None] * stride + feature[None, :]
    inside = (place < count)[:, None]
    if D == BLOCK_D:
        return tl.load(address, mask=inside, other=0.0)
    return tl.load(address, mask=inside & (feature < D)[None, :], other=0.0)


@triton.jit
def columns_of(vectors, place, stride, count, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return vectors at these places, transposed: (D, places)."""
    feature = tl.arange(0, BLOCK_D)
    address = vectors + place.to(tl.int64)[None, :] * stride + feature[:, None]
    inside = (place < count)[None, :]
    if D == BLOCK_D:
        return tl.load(address, mask=inside, other=0.0)
    return tl.load(address, mask=inside & (feature < D)[:, None], other=0.0)


@triton.jit
def sees(position_T, key_S, padding, holes, start, stop, behind, ahead):
    """Return which keys queries see by their places, (T, S): one comparison without sign.

    Keys are real from `start` to `stop`, but for those that `padding` marks where there are holes.
    """
    place_S = tl.where((key_S >= start) & (key_S < stop), key_S, _ELSEWHERE)
    if holes != 0:
        real_S = tl.load(padding + key_S, mask=place_S >= 0, other=0) != 0
        place_S = tl.where(real_S, place_S, _ELSEWHERE)
    away = place_S[None, :] - (position_T - behind)[:, None]
    reach = behind.to(tl.uint32, bitcast=True) + ahead.to(tl.uint32, bitcast=True)
    return away.to(tl.uint32, bitcast=True) <= reach


@triton.jit
def seen_bits(words, row_T, start, mask_rows, S, BLOCK_S: tl.constexpr):
    """Return which keys a boolean mask shows, (T, S), from the bits that `tile_kernel` made of it.

    The keys are `BLOCK_S` from `start`, a multiple of that; the last row counts for rows past it.
    """
    stride = tl.cdiv(S, _TILE) * (_TILE // 32)
    words += tl.minimum(row_T, mask_rows - 1).to(tl.int64) * stride + start // 32
    column_S = tl.arange(0, BLOCK_S)
    if BLOCK_S > 64:
        inside = (start + column_S < S)[None, :]
        word_TS = tl.load(words[:, None] + (column_S // 32)[None, :], mask=inside, other=0)
    else:
        word_TS = tl.load(words)[:, None]
        if BLOCK_S == 64:
            word_TS = tl.where((column_S < 32)[None, :], word_TS, tl.load(words + 1)[:, None])
    return ((word_TS >> (column_S % 32)[None, :]) & 1) != 0


@triton.jit
def mask_block(mask, row_T, key_S, mask_rows, S):
    """Return entries of a mask, (T, S); of its last row for rows past it, 0 for keys past S."""
    row_T = tl.minimum(row_T, mask_rows - 1).to(tl.int64)
    return tl.load(mask + row_T[:, None] * S + key_S[None, :], mask=(key_S < S)[None, :], other=0)


@triton.jit
def scaled(score, bits, inverse, SOFTCAP: tl.constexpr):
    """Return scores in bits: times `bits`, or capped there: bits · tanh(score · inverse).

    Where all scores of a block are below half of the cap, a polynomial in the square takes the
    place of an exponential, of which a GPU can make few. It is right to 1.3·10⁻⁸ and rounding. The
    exponential is to 10⁻⁷ of the cap: with SOFTCAP 2, for caps next to which small scores are
    nothing, these keep the polynomial in all blocks.
    """
    if SOFTCAP:
        if tl.max(tl.max(tl.abs(score), 1), 0) * tl.abs(inverse) <= 0.5:
            found = _capped_small(score, bits, inverse)
        else:
            power = tl.exp2(score * (2 * _LOG2E * inverse))
            found = bits - (2 * bits) * reciprocal(1 + power)
            if SOFTCAP == 2:
                small = tl.abs(score * inverse) <= 0.5
                found = tl.where(small, _capped_small(score, bits, inverse), found)
        return found
    return score * bits


@triton.jit
def _capped_small(score, bits, inverse):
    x = score * inverse
    y = x * x
    share = 0.0171350067901 * y - 0.0529860753713
    share = share * y + 0.133247793189
    share = share * y - 0.333330693941
    share = share * y + 0.999999986872
    return (score * (bits * inverse)) * share


@triton.jit
def tile_extent(tiles, stride, count):
    """Of a line of tiles: the first that is seen, one past the last, and a run that is seen whole.

    The run is the first one, from its first tile to one past its last.
    """
    chunk: tl.constexpr = 128
    first, stop, whole, end = count, 0, count, count
    for start in range(0, count, chunk):
        place = start + tl.arange(0, chunk)
        seen = tl.load(tiles + place.to(tl.int64) * stride, mask=place < count, other=0)
        first = tl.minimum(first, tl.min(tl.where(seen > 0, place, count)))
        stop = tl.maximum(stop, tl.max(tl.where(seen > 0, place + 1, 0)))
        whole = tl.minimum(whole, tl.min(tl.where(seen == 2, place, count)))
    for start in range(0, count, chunk):
        place = start + tl.arange(0, chunk)
        seen = tl.load(tiles + place.to(tl.int64) * stride, mask=place < count, other=0)
        end = tl.minimum(end, tl.min(tl.where((seen != 2) & (place > whole), place, count)))
    return first, stop, whole, end


@triton.jit
def block_ranges(
    top, count, start, stop, holes, behind, ahead, first, last, whole, end,
    OUTER: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Return what a block of `OUTER` rows sees: low, full_low, full_high, high.

    From `full_low` to `full_high` all its rows see everything; ends are multiples of `INNER`.

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
        INNER: How many are looked at together.
    """
    bottom = top + OUTER - 1
    low = tl.maximum(tl.maximum(top - behind, start), tl.maximum(first * _TILE, 0))
    low = low // INNER * INNER
    high = tl.minimum(tl.minimum(bottom + ahead + 1, stop), tl.minimum(last * _TILE, count))
    full_low = tl.maximum(tl.maximum(bottom - behind, start), tl.maximum(whole * _TILE, 0))
    full_low = (full_low + INNER - 1) // INNER * INNER
    full_high = tl.minimum(tl.minimum(top + ahead + 1, stop), tl.minimum(end * _TILE, count))
    full_high = tl.maximum(full_high, 0) // INNER * INNER
    full_high = tl.where(holes != 0, low, full_high)
    full_high = tl.maximum(full_high, low)
    full_low = tl.minimum(tl.maximum(full_low, low), full_high)
    return low, full_low, full_high, high


@triton.jit(do_not_specialize=["S"])
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


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(mask, tiles, words, rows, S, lowest, NUMBERS: tl.constexpr):
    """Write what rows of a tile of a mask see: 0 for nothing, 1, or 2 for all and nothing added.

    A boolean mask is also written as bits, two words of 32 keys for each row of a tile: a thread of
    the kernels then needs a word where it would need a byte for each of 32 scores.
    """
    across, down = tl.cdiv(S, _TILE), tl.cdiv(rows, _TILE)
    column = tl.program_id(0) % across
    row = tl.program_id(0) // across % down
    line = (tl.program_id(0) // across // down).to(tl.int64) * rows
    row_T = row * _TILE + tl.arange(0, _TILE)
    key_S = column * _TILE + tl.arange(0, _TILE)
    entry = mask_block(mask + line * S, row_T, key_S, rows, S)
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
        word = tl.sum(tl.reshape(bit, (_TILE, _TILE // 32, 32)), 2)
        words += (line + row_T)[:, None] * (across * (_TILE // 32))
        place = column * (_TILE // 32) + tl.arange(0, _TILE // 32)
        tl.store(words + place[None, :], word, mask=(row_T < rows)[:, None])


if triton.knobs.runtime.interpret:

    @triton.jit
    def reciprocal(x):
        """Return 1 / x."""
        return 1 / x

    @triton.jit
    def laid_out_as(entry, score):
        """Return the entry."""
        return entry

else:

    @triton.jit
    def reciprocal(x):
        """Return 1 / x, right to a unit in the last place, in one instruction."""
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def laid_out_as(entry, score):
        """Return the entry, each number with the thread that has that of the score.

        Otherwise the compiler splits what is done with it between two layouts, and exchanges four
        times as much between threads.
        """
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f,f", [entry, score], dtype=tl.float32, is_pure=False, pack=1
        )

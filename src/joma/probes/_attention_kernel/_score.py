"""What both kernels do with a block: load rows, see which keys count, and scale the scores."""

# pyright: reportMissingImports=false, reportIndexIssue=false

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
TILE = 64
"""Rows and keys of a tile of the mask, and of the usual outer block of both kernels."""
HIDDEN = tl.constexpr(-1e38)
"""Score in bits of a key that is hidden: finite, so that 2^x · x is 0, and not NaN."""
START = tl.constexpr(-1e37)
"""Greatest score of a row that has seen no key: above that of hidden keys, whose weights are 0."""
LOWEST = tl.constexpr(-3e38)
"""No less may come of moving what was summed up so far to another reference: −∞ times 0 is NaN."""
_ELSEWHERE = tl.constexpr(-(3 << 29))
"""Place of a key that is not real: outside of what any query sees."""


@triton.jit
def rows_of(query, position, stride, T, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a block: (T, D)."""
    feature = tl.arange(0, BLOCK_D)
    address = query + position.to(tl.int64)[:, None] * stride + feature[None, :]
    if D == BLOCK_D:
        return tl.load(address, mask=(position < T)[:, None], other=0.0)
    return tl.load(address, mask=(position < T)[:, None] & (feature < D)[None, :], other=0.0)


@triton.jit
def columns_of(key, key_S, stride, S, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a block, transposed: (D, S)."""
    feature = tl.arange(0, BLOCK_D)
    # 64-bit: place × stride passes 2³¹ beyond 524,288 keys at stride 4096
    address = key + key_S.to(tl.int64)[None, :] * stride + feature[:, None]
    if D == BLOCK_D:
        return tl.load(address, mask=(key_S < S)[None, :], other=0.0)
    return tl.load(address, mask=(key_S < S)[None, :] & (feature < D)[:, None], other=0.0)


@triton.jit
def within(position_T, key_S, S, CAUSAL: tl.constexpr):
    """Which keys a query sees where nothing but causality hides them, (T, S)."""
    visible = (key_S < S)[None, :]
    if CAUSAL:
        visible &= key_S[None, :] <= position_T[:, None]
    return visible


@triton.jit
def places_of(key_S, padding, holes, start, stop):
    """Places of keys, with those that are not real elsewhere.

    Keys are real from `start` to `stop`, but for those that `padding` marks where there are holes.
    """
    place_S = tl.where((key_S >= start) & (key_S < stop), key_S, _ELSEWHERE)
    if holes != 0:
        real_S = tl.load(padding + key_S, mask=place_S >= 0, other=0) != 0
        place_S = tl.where(real_S, place_S, _ELSEWHERE)
    return place_S


@triton.jit
def sees(position_T, place_S, behind, ahead):
    """Which keys a query sees by their places, (T, S): one comparison of numbers without sign."""
    away = place_S[None, :] - (position_T - behind)[:, None]
    reach = behind.to(tl.uint32, bitcast=True) + ahead.to(tl.uint32, bitcast=True)
    return away.to(tl.uint32, bitcast=True) <= reach


@triton.jit
def seen_bits(words, row_T, start, T, S, stride, BLOCK_S: tl.constexpr):
    """Which keys a boolean mask shows, (T, S), from the bits that `tile_kernel` made of it.

    The keys are `BLOCK_S` from `start`, a multiple of that; the last row counts for rows past it.
    """
    words += tl.minimum(row_T, T - 1).to(tl.int64) * stride + start // 32
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
def mask_block(mask, row_T, key_S, T, S, stride_T, stride_S, EVEN: tl.constexpr):
    """Entries of a mask, (T, S); those of the last row for rows past it, 0 for keys past S.

    EVEN says that strides but the last, which is 1, are multiples of 16.
    """
    row_T = tl.minimum(row_T, T - 1).to(tl.int64)
    if EVEN:
        address = mask + row_T[:, None] * (stride_T // 16 * 16) + key_S[None, :]
    else:
        address = mask + row_T[:, None] * stride_T + key_S.to(tl.int64)[None, :] * stride_S
    return tl.load(address, mask=(key_S < S)[None, :], other=0)


@triton.jit
def capped(score, inverse, cap, SOFTCAP: tl.constexpr):
    """Return cap · tanh(score · inverse), right to some units in the last place.

    Blocks all of whose scores are below half of the cap take a polynomial in the square. Others
    take an exponential, whose errors are 10⁻⁷ of the cap; the GPU can make so few of them that this
    is slower. With SOFTCAP 2, for caps next to which small scores are nothing, these keep the
    polynomial in such blocks, too.
    """
    largest = tl.max(tl.max(tl.abs(score), 1), 0)
    if largest * tl.abs(inverse) <= 0.5:
        found = _capped_small(score, inverse, cap)
    else:
        power = tl.exp2(score * (2 * _LOG2E * inverse))
        found = cap - (2 * cap) * reciprocal(1 + power)
        if SOFTCAP == 2:
            small = tl.abs(score * inverse) <= 0.5
            found = tl.where(small, _capped_small(score, inverse, cap), found)
    return found


@triton.jit
def _capped_small(score, inverse, cap):
    """The same to 1.3·10⁻⁸ and rounding, where |score · inverse| is at most a half."""
    x = score * inverse
    y = x * x
    share = 0.0171350067901 * y - 0.0529860753713
    share = share * y + 0.133247793189
    share = share * y - 0.333330693941
    share = share * y + 0.999999986872
    return (score * (cap * inverse)) * share


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

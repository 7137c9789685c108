"""What both kernels do with a block: load rows, see which keys count, and scale the scores."""

# pyright: reportMissingImports=false, reportIndexIssue=false

import triton
import triton.language as tl

TILE = 64
"""Rows and keys of a tile of the mask, and of the outer block of both kernels."""


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
def sees(position_T, key_S, padding, holes, start, stop, behind, ahead):
    """Which keys a query sees by their places and padding, (T, S).

    Keys are real from `start` to `stop`, but for those that `padding` marks where there are holes.
    """
    real_S = (key_S >= start) & (key_S < stop)
    real_S &= tl.load(padding + key_S, mask=real_S & (holes != 0), other=1) != 0
    visible = real_S[None, :] & (key_S[None, :] <= position_T[:, None] + ahead)
    return visible & (key_S[None, :] >= position_T[:, None] - behind)


@triton.jit
def mask_block(mask, row_T, key_S, T, S, stride_T, stride_S, EVEN: tl.constexpr):
    """The entries of the mask, (T, S); those of the last row for rows past it, 0 for keys past S.

    EVEN says that strides but the last, which is 1, are multiples of 16.
    """
    row_T = tl.minimum(row_T, T - 1).to(tl.int64)
    if EVEN:
        address = mask + row_T[:, None] * (stride_T // 16 * 16) + key_S[None, :]
    else:
        address = mask + row_T[:, None] * stride_T + key_S.to(tl.int64)[None, :] * stride_S
    return tl.load(address, mask=(key_S < S)[None, :], other=0)


@triton.jit
def capped(score, inverse, cap):
    """Return cap · tanh(score · inverse).

    A rational function, right to some units in the last place: one reciprocal, where a tanh made of
    an exponential would take two of what there is least of, and lose digits near 0.
    """
    x = tl.maximum(score * inverse, -7.90531110763549805, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 7.90531110763549805, propagate_nan=tl.PropagateNan.ALL)
    y = x * x
    top = -2.76076847742355e-16 * y + 2.00018790482477e-13
    top = top * y - 8.60467152213735e-11
    top = top * y + 5.12229709037114e-08
    top = top * y + 1.48572235717979e-05
    top = top * y + 6.37261928875436e-04
    top = top * y + 4.89352455891786e-03
    low = 1.19825839466702e-06 * y + 1.18534705686654e-04
    low = low * y + 2.26843463243900e-03
    low = low * y + 4.89352518554385e-03
    return (cap * x) * (top / low)

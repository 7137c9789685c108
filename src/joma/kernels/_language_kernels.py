"""The kernels of `joma.kernels.language`, each in one pass over memory (Triton).

All compute in float32, read and write the precision of what they are given, keep nothing that can
be made again, and draw the words that `joma.random` draws.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import zlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

_ROWS, _SUMMED_ROWS = 8, 4
"""Rows that a program works on; the second is for one warp that adds up over them."""
_PROGRAMS = 1056
"""About as many as a GPU works on at once: more would only leave more sums to be added up."""
_LOGIT_ROWS, _LOGIT_COLUMNS = 4, 1024
"""Logits that one program works on at a time: of rows that share a bias, which costs as much."""


def _block(width: int) -> int:
    return max(4, triton.next_power_of_2(width))  # the generator makes four at a time


def _drawn(drop: Any, place: str) -> tuple[Tensor, Tensor, int, float]:
    """Return seeds, step, stream and share for a kernel."""
    step = torch.as_tensor(drop.step, device=drop.seeds_E.device)
    return drop.seeds_E, step, zlib.crc32(f"dropout.{place}".encode()), drop.share


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seeds_E: Tensor, step: Tensor, stream: int, share: float):
        E, D, out = len(x), x.shape[-1], torch.empty_like(x)
        rows = x[0].numel() // D
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _dropped[(triton.cdiv(rows, _ROWS), E)](
                x, out, seeds_E, step, stream, rows, share, 1 / (1 - share),
                D=D, BLOCK_D=_block(D), ROWS=_ROWS,
            )  # fmt: skip
        ctx.save_for_backward(seeds_E, step)
        ctx.drawn = stream, share
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        dx = _Dropped.apply(gradients[0].contiguous(), *ctx.saved_tensors, *ctx.drawn)
        return dx, None, None, None, None


def dropped(x: Tensor, drop: Any, place: str) -> Tensor:
    """Do what `joma.kernels.language.Dropout` does."""
    return _Dropped.apply(x.contiguous(), *_drawn(drop, place))


class _NormOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, bias_E1D, residual, scale_ED, shift_ED, seeds_E, step, stream, share):
        E, D = scale_ED.shape
        rows = x.numel() // (E * D)
        total, out = torch.empty_like(x), torch.empty_like(x)
        with torch.cuda.device_of(x):
            _norm_of_sum[(triton.cdiv(rows, _ROWS), E)](
                x, bias_E1D, residual, scale_ED, shift_ED, total, out, seeds_E, step, stream, rows,
                share, 1 / (1 - share), D=D, BLOCK_D=_block(D), ROWS=_ROWS,
                DROP=share > 0,
            )  # fmt: skip
        ctx.save_for_backward(total, scale_ED, seeds_E, step)
        ctx.stream, ctx.share, ctx.rows = stream, share, rows
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        total, scale_ED, seeds_E, step = ctx.saved_tensors
        E, D = scale_ED.shape
        dy, d_total = gradients[0].contiguous(), torch.empty_like(total)
        dx = torch.empty_like(total) if ctx.share > 0 else d_total  # equal where nothing is dropped
        tiles = max(1, triton.cdiv(ctx.rows * E, _SUMMED_ROWS * _PROGRAMS))
        blocks = triton.cdiv(ctx.rows, _SUMMED_ROWS * tiles)
        partial = torch.empty(3, E, blocks, D, dtype=torch.float32, device=dy.device)
        with torch.cuda.device_of(dy):
            _norm_of_sum_backward[(blocks, E)](
                dy, total, scale_ED, dx, d_total, partial, seeds_E, step, ctx.stream, ctx.rows,
                tiles, ctx.share, 1 / (1 - ctx.share), D=D, BLOCK_D=_block(D),
                ROWS=_SUMMED_ROWS, DROP=ctx.share > 0, num_warps=1,  # sums across take longest
            )  # fmt: skip
        d_scale, d_shift, d_bias = partial.sum(2).unbind(0)
        return dx, d_bias.unsqueeze(1), d_total, d_scale, d_shift, None, None, None, None


def norm_of_sum(
    y: Tensor,
    bias_E1D: Tensor,
    residual: Tensor,
    scale_ED: Tensor,
    shift_ED: Tensor,
    drop: Any,
    place: str,
) -> Tensor:
    """Return the layer norm of residual + dropout(y + bias)."""
    settings = scale_ED, shift_ED, *_drawn(drop, place)
    return _NormOfSum.apply(y.contiguous(), bias_E1D, residual.contiguous(), *settings)


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias, targets_N, weights_N, words, descend):
        # Columns of ones next to the rest: a product with them is the gradient of the bias.
        widened = functional.pad(x, (0, 8), value=1.0)
        logits = torch.bmm(widened[..., : x.shape[-1]], weight)
        E, N, V = logits.shape
        each_EN = torch.empty(E, N, dtype=torch.float32, device=x.device)
        with torch.cuda.device_of(x):
            _cross_entropy[(triton.cdiv(N, _LOGIT_ROWS), E)](
                logits, bias, targets_N, weights_N, each_EN, N, V, words,
                ROWS=_LOGIT_ROWS, BLOCK=_LOGIT_COLUMNS, DESCEND=descend,
            )  # fmt: skip
        if descend:
            ctx.save_for_backward(widened, weight, logits)
            ctx.bias_type = bias.dtype
        return each_EN.double().sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        widened, weight, d_logits = ctx.saved_tensors
        width, each = weight.shape[1], gradients[0].view(-1, 1, 1).to(weight.dtype)
        d_x = torch.bmm(d_logits, weight.mT).mul_(each)
        d_weight = torch.bmm((widened * each).mT, d_logits)
        d_bias = d_weight[:, width : width + 1].to(ctx.bias_type)
        return d_x, d_weight[:, :width], d_bias, None, None, None, None


def cross_entropies(
    x: Tensor, weight: Tensor, bias: Tensor, targets_N: Tensor, weights_N: Tensor, words: int
) -> Tensor:
    """Do what `joma.kernels.language.cross_entropies` does."""
    descend = torch.is_grad_enabled()
    return _CrossEntropies.apply(x, weight, bias, targets_N, weights_N, words, descend)


@triton.jit
def _kept(seeds, member, step, stream, row, share, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """1 where a number of some rows is kept; each begins with a block, which has four words."""
    block = (row[:, None] * ((D + 3) // 4) + tl.arange(0, BLOCK_D // 4)[None, :]).to(tl.uint32)
    seed, count = tl.load(seeds + member), tl.load(step)
    low = (count & 0xFFFFFFFF).to(tl.uint32)
    high = ((count >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = tl.philox(seed, block, zero + stream.to(tl.uint32), zero + low, zero + high)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08 >= share


@triton.jit
def _tile_of_rows(number, member, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Rows and columns of one tile of a member's part, which of them are there, and where."""
    row, place = number * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (place < D)[None, :]
    return row, place, inside, (member.to(tl.int64) * rows + row[:, None]) * D + place[None, :]


@triton.jit
def _dropped(
    x, out, seeds, step, stream, rows, share, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, _, inside, at = _tile_of_rows(tl.program_id(0), member, rows, D, BLOCK_D, ROWS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    keep = _kept(seeds, member, step, stream, row, share, D, BLOCK_D)
    value = tl.where(keep, value * scale, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_of_sum(
    x, linear, residual, weight, bias, total, out, seeds, step, stream, rows, share, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place, inside, at = _tile_of_rows(tl.program_id(0), member, rows, D, BLOCK_D, ROWS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(linear + member * D + place, mask=place < D, other=0.0)[None, :]
    if DROP:
        keep = _kept(seeds, member, step, stream, row, share, D, BLOCK_D)
        value = tl.where(keep, value * scale, 0.0)
    value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
    mean = tl.sum(value, 1) / D
    centred = tl.where(inside, value - mean[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, 1) / D + 1e-5)
    w = tl.load(weight + member * D + place, mask=place < D, other=0.0).to(tl.float32)
    b = tl.load(bias + member * D + place, mask=place < D, other=0.0).to(tl.float32)
    y = centred * spread[:, None] * w[None, :] + b[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_of_sum_backward(
    dy, total, weight, dx, d_total, partial, seeds, step, stream, rows, tiles, share, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    member, place = tl.program_id(1), tl.arange(0, BLOCK_D)
    w = tl.load(weight + member * D + place, mask=place < D, other=0.0).to(tl.float32)
    d_scale = tl.zeros([ROWS, BLOCK_D], tl.float32)
    d_shift = tl.zeros([ROWS, BLOCK_D], tl.float32)
    d_bias = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for tile in range(tiles):
        number = tl.program_id(0) * tiles + tile
        row, place, inside, at = _tile_of_rows(number, member, rows, D, BLOCK_D, ROWS)
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(value, 1) / D
        centred = tl.where(inside, value - mean[:, None], 0.0)
        spread = tl.rsqrt(tl.sum(centred * centred, 1) / D + 1e-5)
        normal = centred * spread[:, None]
        d_scale += g * normal
        d_shift += g
        g = g * w[None, :]
        inner = tl.sum(g * normal, 1) / D
        g = (g - (tl.sum(g, 1) / D)[:, None] - normal * inner[:, None]) * spread[:, None]
        tl.store(d_total + at, g.to(d_total.dtype.element_ty), mask=inside)
        if DROP:
            keep = _kept(seeds, member, step, stream, row, share, D, BLOCK_D)
            g = tl.where(keep, g * scale, 0.0)
            tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
        d_bias += tl.where(inside, g, 0.0)
    out = partial + (member * tl.num_programs(0) + tl.program_id(0)) * D + place
    next_sum = tl.num_programs(1) * tl.num_programs(0) * D
    tl.store(out, tl.sum(d_scale, 0), mask=place < D)
    tl.store(out + next_sum, tl.sum(d_shift, 0), mask=place < D)
    tl.store(out + 2 * next_sum, tl.sum(d_bias, 0), mask=place < D)


@triton.jit
def _cross_entropy(
    logits, bias, targets, weights, each, rows, columns, words,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DESCEND: tl.constexpr,
):  # fmt: skip
    """Once over the rows for the sum of exponentials, and again, from the cache, for gradients."""
    member, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    base = logits + (member.to(tl.int64) * rows + row[:, None]) * columns
    own = bias + member.to(tl.int64) * columns
    target = tl.load(targets + row, mask=there, other=0)
    weight = tl.load(weights + row, mask=there, other=0.0)
    top = tl.full([ROWS, BLOCK], -1e30, tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        x = _logits(base, own, first + tl.arange(0, BLOCK), there, words)
        higher = tl.maximum(top, x)
        total = total * tl.exp2(top - higher) + tl.exp2(x - higher)
        top = higher
    highest = tl.max(top, 1)
    total = tl.sum(total * tl.exp2(top - highest[:, None]), 1)
    log_sum = highest + tl.log2(total)
    right = tl.load(base + target[:, None], mask=there[:, None], other=0.0).to(tl.float32)
    right = tl.sum(right, 1) + tl.load(own + target, mask=there, other=0.0).to(tl.float32)
    out = (log_sum * 0.6931471805599453 - right) * weight
    tl.store(each + member * rows + row, out, mask=there)
    if DESCEND:
        tl.debug_barrier()  # what is right has been read by all before it is written over
        for first in range(0, columns, BLOCK):
            place = first + tl.arange(0, BLOCK)
            x = _logits(base, own, place, there, words)
            g = tl.exp2(x - log_sum[:, None])
            g = (g - tl.where(place[None, :] == target[:, None], 1.0, 0.0)) * weight[:, None]
            inside = there[:, None] & (place < columns)[None, :]
            tl.store(base + place[None, :], g.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _logits(base, own, place, there, words):
    """Some columns of some rows of logits with their bias, over log 2; none beyond the words."""
    inside = there[:, None] & (place < words)[None, :]
    x = tl.load(base + place[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    bias = tl.load(own + place, mask=place < words, other=0.0).to(tl.float32)
    return (x + bias[None, :]) * 1.4426950408889634

"""What a language model does between its matrix products, on a GPU (Triton), with gradients.

Each function here takes the place of several operations of `joma.models.language`, keeps nothing
that can be made again, and draws the same random words: what is dropped is the same on a CPU. All
compute in float32 and read and write the precision of what they are given.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.models.full_speed._dropping_kernel import Drop, kept

_ROWS = 8
"""Rows of the residual stream that one program works on."""
_LOGIT_ROWS, _LOGIT_COLUMNS = 4, 1024
"""Logits that one program works on at a time: of rows that share a bias, which costs as much."""
_NORM_ROWS = 4
"""Of a program that adds up over rows too; one warp, since sums across warps take longest."""
_PROGRAMS = 1056
"""About as many as a GPU works on at once: more would only leave more sums to be added up."""


class _SumNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, bias_E1D, residual, scale_ED, shift_ED, seeds_E, step, stream, share):
        E, D = scale_ED.shape
        rows = x.numel() // (E * D)
        total, out = torch.empty_like(x), torch.empty_like(x)
        _sum_norm[(triton.cdiv(rows, _ROWS), E)](
            x, bias_E1D, residual, scale_ED, shift_ED, total, out, seeds_E, step, stream, rows,
            share, 1 / (1 - share), D=D, BLOCK_D=triton.next_power_of_2(D), ROWS=_ROWS,
            DROP=share > 0,
        )  # fmt: skip
        ctx.save_for_backward(total, scale_ED, seeds_E, step)
        ctx.stream, ctx.share, ctx.rows = stream, share, rows
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        total, scale_ED, seeds_E, step = ctx.saved_tensors
        E, D = scale_ED.shape
        dy = gradients[0].contiguous()
        dx, d_total = torch.empty_like(total), torch.empty_like(total)
        tiles = triton.cdiv(ctx.rows * E, _NORM_ROWS * _PROGRAMS)
        blocks = triton.cdiv(ctx.rows, _NORM_ROWS * tiles)
        partial = torch.empty(3, E, blocks, D, dtype=torch.float32, device=dy.device)
        _sum_norm_backward[(blocks, E)](
            dy, total, scale_ED, dx, d_total, partial, seeds_E, step, ctx.stream, ctx.rows, tiles,
            ctx.share, 1 / (1 - ctx.share), D=D, BLOCK_D=triton.next_power_of_2(D), ROWS=_NORM_ROWS,
            DROP=ctx.share > 0, num_warps=1,
        )  # fmt: skip
        d_scale, d_shift, d_bias = partial.sum(2).unbind(0)
        return dx, d_bias.unsqueeze(1), d_total, d_scale, d_shift, None, None, None, None


def sum_norm(
    x: Tensor,
    bias_E1D: Tensor,
    residual: Tensor,
    scale_ED: Tensor,
    shift_ED: Tensor,
    drop: Drop,
    place: str,
) -> Tensor:
    """Layer norm of residual + dropout(x + bias), (E, B, T, width)."""
    x, residual = x.contiguous(), residual.contiguous()
    return _SumNorm.apply(x, bias_E1D, residual, scale_ED, shift_ED, *drop.at(place))


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, waves_TD, kind, seeds_E, step, stream, share):
        E, (T, D) = len(x), x.shape[-2:]
        rows, scale = x[0].numel() // D, 1 / (1 - share)
        out = torch.empty_like(x, dtype=kind)
        _placed[(triton.cdiv(rows, _ROWS), E)](
            x, waves_TD, out, seeds_E, step, stream, rows, share, scale, D**0.5,
            T=T, D=D, BLOCK_D=triton.next_power_of_2(D), ROWS=_ROWS, DROP=share > 0, FORWARD=True,
        )  # fmt: skip
        ctx.save_for_backward(seeds_E, step)
        ctx.stream, ctx.share, ctx.kind = stream, share, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        seeds_E, step = ctx.saved_tensors
        dy = gradients[0].contiguous()
        E, (T, D) = len(dy), dy.shape[-2:]
        rows, scale = dy[0].numel() // D, 1 / (1 - ctx.share)
        dx = torch.empty_like(dy, dtype=ctx.kind)
        _placed[(triton.cdiv(rows, _ROWS), E)](
            dy, dy, dx, seeds_E, step, ctx.stream, rows, ctx.share, scale, D**0.5, T=T, D=D,
            BLOCK_D=triton.next_power_of_2(D), ROWS=_ROWS, DROP=ctx.share > 0, FORWARD=False,
        )  # fmt: skip
        return dx, None, None, None, None, None, None


def placed(x: Tensor, waves_TD: Tensor, kind: torch.dtype, drop: Drop, place: str) -> Tensor:
    """Dropout of √width·x + waves for embeddings (E, B, T, width), in another precision."""
    return _Placed.apply(x.contiguous(), waves_TD.contiguous(), kind, *drop.at(place))


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, bias_E1H, seeds_E, step, stream, share):
        E, H = len(x), x.shape[-1]
        rows, out = x[0].numel() // H, torch.empty_like(x)
        _relu[(triton.cdiv(rows, _ROWS), E)](
            x, bias_E1H, out, seeds_E, step, stream, rows, share, 1 / (1 - share),
            D=H, BLOCK_D=triton.next_power_of_2(H), ROWS=_ROWS, DROP=share > 0,
        )  # fmt: skip
        ctx.save_for_backward(out)
        ctx.share = share
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        (out,) = ctx.saved_tensors
        dy, dx = gradients[0].contiguous(), torch.empty_like(out)
        E, H = len(out), out.shape[-1]
        rows = out[0].numel() // H
        blocks = triton.cdiv(rows, _ROWS)
        partial = torch.empty(E, blocks, H, dtype=torch.float32, device=dy.device)
        _relu_backward[(blocks, E)](
            dy, out, dx, partial, rows, 1 / (1 - ctx.share),
            D=H, BLOCK_D=triton.next_power_of_2(H), ROWS=_ROWS, num_warps=1,
        )  # fmt: skip
        return dx, partial.sum(1, keepdim=True), None, None, None, None


def relu(x: Tensor, bias_E1H: Tensor, drop: Drop, place: str) -> Tensor:
    """Dropout of ReLU of x + bias, (E, B, T, hidden)."""
    return _Relu.apply(x.contiguous(), bias_E1H, *drop.at(place))


def cross_entropy_(
    logits_ENV: Tensor, bias_E1V: Tensor, targets_N: Tensor, weights_N: Tensor, words: int
) -> Tensor:
    """Weighted cross-entropy of each member, (E,); the logits become their own gradients.

    Args:
        logits_ENV: without the bias; columns from `words` on are none.
        bias_E1V: of the output layer.
        targets_N: the right words.
        weights_N: how much each counts, in float32.
        words: how many there are.
    """
    each_EN = _cross_entropies(logits_ENV, bias_E1V, targets_N, weights_N, words, descend=True)
    return each_EN.double().sum(1)


def cross_entropies(
    logits_ENV: Tensor, bias_E1V: Tensor, targets_N: Tensor, weights_N: Tensor, words: int
) -> Tensor:
    """As `cross_entropy_`, with the logits left as they are."""
    each_EN = _cross_entropies(logits_ENV, bias_E1V, targets_N, weights_N, words, descend=False)
    return each_EN.double().sum(1)


def _cross_entropies(
    logits_ENV: Tensor,
    bias_E1V: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    words: int,
    *,
    descend: bool,
) -> Tensor:
    E, N, V = logits_ENV.shape
    each_EN = torch.empty(E, N, dtype=torch.float32, device=logits_ENV.device)
    _cross_entropy[(triton.cdiv(N, _LOGIT_ROWS), E)](
        logits_ENV, bias_E1V, targets_N, weights_N, each_EN, N, V, words,
        ROWS=_LOGIT_ROWS, BLOCK=_LOGIT_COLUMNS, DESCEND=descend,
    )  # fmt: skip
    return each_EN


@triton.jit
def _tile(number, member, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Rows and columns of one tile of a member's part, which of them are there, and where."""
    row, place = number * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (place < D)[None, :]
    return row, place, inside, (member.to(tl.int64) * rows + row[:, None]) * D + place[None, :]


@triton.jit
def _placed(
    x, waves, out, seeds, step, stream, rows, share, scale, root,
    T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place, inside, at = _tile(tl.program_id(0), member, rows, D, BLOCK_D, ROWS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * root
    if FORWARD:
        wave = waves + (row % T)[:, None] * D + place[None, :]
        value += tl.load(wave, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        keep = kept(seeds, member, step, stream, row, share, D, BLOCK_D)
        value = tl.where(keep, value * scale, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_norm(
    x, linear, residual, weight, bias, total, out, seeds, step, stream, rows, share, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place, inside, at = _tile(tl.program_id(0), member, rows, D, BLOCK_D, ROWS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(linear + member * D + place, mask=place < D, other=0.0)[None, :]
    if DROP:
        keep = kept(seeds, member, step, stream, row, share, D, BLOCK_D)
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
def _sum_norm_backward(
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
        row, place, inside, at = _tile(number, member, rows, D, BLOCK_D, ROWS)
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
            keep = kept(seeds, member, step, stream, row, share, D, BLOCK_D)
            g = tl.where(keep, g * scale, 0.0)
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
        d_bias += tl.where(inside, g, 0.0)
    out = partial + (member * tl.num_programs(0) + tl.program_id(0)) * D + place
    next_sum = tl.num_programs(1) * tl.num_programs(0) * D
    tl.store(out, tl.sum(d_scale, 0), mask=place < D)
    tl.store(out + next_sum, tl.sum(d_shift, 0), mask=place < D)
    tl.store(out + 2 * next_sum, tl.sum(d_bias, 0), mask=place < D)


@triton.jit
def _relu(
    x, bias, out, seeds, step, stream, rows, share, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place, inside, at = _tile(tl.program_id(0), member, rows, D, BLOCK_D, ROWS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + member * D + place, mask=place < D, other=0.0)[None, :]
    value = tl.maximum(value, 0.0)
    if DROP:
        keep = kept(seeds, member, step, stream, row, share, D, BLOCK_D)
        value = tl.where(keep, value * scale, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _relu_backward(
    dy, out, dx, partial, rows, scale, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    member = tl.program_id(1)
    _, place, inside, at = _tile(tl.program_id(0), member, rows, D, BLOCK_D, ROWS)
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    # What is dropped or negative is 0 in the output.
    g = tl.where(tl.load(out + at, mask=inside, other=0.0) > 0, g * scale, 0.0)
    tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
    block = (member * tl.num_programs(0) + tl.program_id(0)) * D
    tl.store(partial + block + place, tl.sum(g, 0), mask=place < D)


@triton.jit
def _logits(base, own, place, there, words):
    """Some columns of some rows of logits with their bias, over log 2; none beyond the words."""
    inside = there[:, None] & (place < words)[None, :]
    x = tl.load(base + place[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    bias = tl.load(own + place, mask=place < words, other=0.0).to(tl.float32)
    return (x + bias[None, :]) * 1.4426950408889634


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

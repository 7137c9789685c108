"""What a language model does between its matrix products, on a GPU (Triton), with gradients.

Each function here takes the place of several operations of `joma.models.language`, keeps nothing
that can be made again, and draws the same random words: what is dropped is the same on a CPU. All
compute in float32 and read and write the precision of what they are given.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import zlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 8
"""Rows of the residual stream that one program works on."""
_WARPS = 16
"""Of a program that holds a row of logits."""
_PROGRAMS = 528
"""About as many as a GPU works on at once: more would only leave more sums to be added up."""


def takes(x: Tensor, heads: int) -> bool:
    """Whether activations (E, B, T, width) can be worked on here."""
    return x.is_cuda and heads == 1 and x.shape[-1] % 4 == 0 and x.shape[-2] <= 64


def stream_number(place: str) -> int:
    """The number of a stream of random words, as `joma.random` has it."""
    return zlib.crc32(f"dropout.{place}".encode())


class Drop:
    """Which numbers are dropped, for the functions here.

    Args:
        seeds_E: of the members.
        step: of the training, a tensor that counts on the device.
        share: of the numbers, dropped; 0 where nothing is.
    """

    def __init__(self, seeds_E: Tensor, step: Tensor, share: float) -> None:
        self.seeds_E, self.step, self.share = seeds_E, step, share

    def at(self, place: str) -> tuple[Tensor, Tensor, int, float]:
        """Seeds, step, stream and share for a kernel."""
        return self.seeds_E, self.step, stream_number(place), self.share


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
        tiles = triton.cdiv(ctx.rows * E, _ROWS * _PROGRAMS)
        blocks = triton.cdiv(ctx.rows, _ROWS * tiles)
        partial = torch.empty(E, blocks, 3, D, dtype=torch.float32, device=dy.device)
        _sum_norm_backward[(blocks, E)](
            dy, total, scale_ED, dx, d_total, partial, seeds_E, step, ctx.stream, ctx.rows, tiles,
            ctx.share, 1 / (1 - ctx.share), D=D, BLOCK_D=triton.next_power_of_2(D), ROWS=_ROWS,
            DROP=ctx.share > 0,
        )  # fmt: skip
        d_scale, d_shift, d_bias = partial.sum(1).unbind(1)
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
            D=H, BLOCK_D=triton.next_power_of_2(H), ROWS=_ROWS,
        )  # fmt: skip
        return dx, partial.sum(1, keepdim=True), None, None, None, None


def relu(x: Tensor, bias_E1H: Tensor, drop: Drop, place: str) -> Tensor:
    """Dropout of ReLU of x + bias, (E, B, T, hidden)."""
    return _Relu.apply(x.contiguous(), bias_E1H, *drop.at(place))


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined, bias, seeds_E, step, stream, share):
        E, B, T, three = joined.shape
        D = three // 3
        out = torch.empty(E, B, T, D, dtype=joined.dtype, device=joined.device)
        _attended[(B, E)](
            joined, bias, out, seeds_E, step, stream, share, 1 / (1 - share), D**-0.5,
            T=T, D=D, BLOCK_T=64, BLOCK_D=triton.next_power_of_2(D), DROP=share > 0, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(joined, bias, seeds_E, step)
        ctx.stream, ctx.share = stream, share
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        joined, bias, seeds_E, step = ctx.saved_tensors
        E, B, T, three = joined.shape
        D = three // 3
        dy, d_joined = gradients[0].contiguous(), torch.empty_like(joined)
        partial = torch.empty(E, B, three, dtype=torch.float32, device=dy.device)
        _attended_backward[(B, E)](
            joined, bias, dy, d_joined, partial, seeds_E, step, ctx.stream, ctx.share,
            1 / (1 - ctx.share), D**-0.5, T=T, D=D, BLOCK_T=64,
            BLOCK_D=triton.next_power_of_2(D), DROP=ctx.share > 0, num_warps=8,
        )  # fmt: skip
        return d_joined, partial.sum(1, keepdim=True), None, None, None, None


def attended(joined: Tensor, bias: Tensor, drop: Drop, place: str) -> Tensor:
    """Causal attention of one head.

    Args:
        joined: queries, keys and values side by side, (E, B, T, 3·width), without their biases.
        bias: theirs, (E, 1, 3·width).
        drop: what is dropped of the weights.
        place: where.
    """
    return _Attended.apply(joined.contiguous(), bias, *drop.at(place))


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
    E, N, V = logits_ENV.shape
    each_EN = torch.empty(E, N, dtype=torch.float32, device=logits_ENV.device)
    _cross_entropy[(N, E)](
        logits_ENV, bias_E1V, targets_N, weights_N, each_EN, N, V, words,
        BLOCK=triton.next_power_of_2(V), num_warps=_WARPS if V > 8192 else 4,
    )  # fmt: skip
    return each_EN.double().sum(1)


@triton.jit
def _words(seeds, member, step, stream, block):
    """The four random words of each block, as `joma.random` has them."""
    seed, count = tl.load(seeds + member), tl.load(step)
    low = (count & 0xFFFFFFFF).to(tl.uint32)
    high = ((count >> 32) & 0xFFFFFFFF).to(tl.uint32)
    block = block.to(tl.uint32)
    zero = block * 0
    return tl.philox(seed, block, zero + stream.to(tl.uint32), zero + low, zero + high)


@triton.jit
def _at_least(word, share):
    """Whether a word stands for a number of at least `share`, between 0 and 1."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08 >= share


@triton.jit
def _kept(seeds, member, step, stream, block, share):
    """1 where a number is kept: four words of every block, side by side along the last axis."""
    w0, w1, w2, w3 = _words(seeds, member, step, stream, block)
    return _at_least(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)), share)


@triton.jit
def _placed(
    x, waves, out, seeds, step, stream, rows, share, scale, root,
    T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (place < D)[None, :]
    at = (member.to(tl.int64) * rows + row[:, None]) * D + place[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * root
    if FORWARD:
        wave = waves + (row % T)[:, None] * D + place[None, :]
        value += tl.load(wave, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        block = (row[:, None] * D) // 4 + tl.arange(0, BLOCK_D // 4)[None, :]
        value = tl.where(_kept(seeds, member, step, stream, block, share), value * scale, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_norm(
    x, linear, residual, weight, bias, total, out, seeds, step, stream, rows, share, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (place < D)[None, :]
    at = (member.to(tl.int64) * rows + row[:, None]) * D + place[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(linear + member * D + place, mask=place < D, other=0.0)[None, :]
    if DROP:
        block = (row[:, None] * D) // 4 + tl.arange(0, BLOCK_D // 4)[None, :]
        value = tl.where(_kept(seeds, member, step, stream, block, share), value * scale, 0.0)
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
        row = (tl.program_id(0) * tiles + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (place < D)[None, :]
        at = (member.to(tl.int64) * rows + row[:, None]) * D + place[None, :]
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
            block = (row[:, None] * D) // 4 + tl.arange(0, BLOCK_D // 4)[None, :]
            g = tl.where(_kept(seeds, member, step, stream, block, share), g * scale, 0.0)
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
        d_bias += tl.where(inside, g, 0.0)
    out = partial + (member * tl.num_programs(0) + tl.program_id(0)) * 3 * D + place
    tl.store(out, tl.sum(d_scale, 0), mask=place < D)
    tl.store(out + D, tl.sum(d_shift, 0), mask=place < D)
    tl.store(out + 2 * D, tl.sum(d_bias, 0), mask=place < D)


@triton.jit
def _relu(
    x, bias, out, seeds, step, stream, rows, share, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (place < D)[None, :]
    at = (member.to(tl.int64) * rows + row[:, None]) * D + place[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + member * D + place, mask=place < D, other=0.0)[None, :]
    value = tl.maximum(value, 0.0)
    if DROP:
        block = (row[:, None] * D) // 4 + tl.arange(0, BLOCK_D // 4)[None, :]
        value = tl.where(_kept(seeds, member, step, stream, block, share), value * scale, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _relu_backward(
    dy, out, dx, partial, rows, scale, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    member = tl.program_id(1)
    row, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (place < D)[None, :]
    at = (member.to(tl.int64) * rows + row[:, None]) * D + place[None, :]
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    # What is dropped or negative is 0 in the output.
    g = tl.where(tl.load(out + at, mask=inside, other=0.0) > 0, g * scale, 0.0)
    tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
    block = (member * tl.num_programs(0) + tl.program_id(0)) * D
    tl.store(partial + block + place, tl.sum(g, 0), mask=place < D)


@triton.jit
def _weights(q, k, scale, T: tl.constexpr, BLOCK_T: tl.constexpr):
    """Softmax over the keys up to the query's own place."""
    row, place = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    scores = tl.dot(q, tl.trans(k)) * scale
    scores = tl.where((place <= row) & (place < T), scores, float("-inf"))
    share = tl.exp(scores - tl.max(scores, 1)[:, None])
    return share / tl.sum(share, 1)[:, None]


@triton.jit
def _kept_weights(seeds, member, step, stream, share, T: tl.constexpr, BLOCK_T: tl.constexpr):
    """1 where a weight is kept; a row has no whole number of blocks, so each draws its own."""
    row, place = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    index = (tl.program_id(0) * T + row) * T + place
    w0, w1, w2, w3 = _words(seeds, member, step, stream, index // 4)
    which = index % 4
    word = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    return _at_least(word, share)


@triton.jit
def _part(joined, bias, at, which, member, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Queries, keys or values with their bias."""
    place = tl.arange(0, BLOCK_D)
    x = tl.load(joined + at + which * D, mask=inside, other=0.0)
    own = tl.load(bias + (member * 3 + which) * D + place, mask=place < D, other=0.0)
    return tl.where(inside, x.to(tl.float32) + own[None, :], 0.0).to(x.dtype)


@triton.jit
def _attended(
    joined, bias, out, seeds, step, stream, share, scale, rate,
    T: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (row < T) & (place < D)
    first = (member * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * T
    at = (first + row) * (3 * D) + place
    q = _part(joined, bias, at, 0, member, inside, D, BLOCK_D)
    k = _part(joined, bias, at, 1, member, inside, D, BLOCK_D)
    p = _weights(q, k, rate, T, BLOCK_T)
    if DROP:
        p = tl.where(_kept_weights(seeds, member, step, stream, share, T, BLOCK_T), p * scale, 0.0)
    v = _part(joined, bias, at, 2, member, inside, D, BLOCK_D)
    y = tl.dot(p.to(v.dtype), v)
    tl.store(out + (first + row) * D + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_part(gradient, d_joined, partial, at, which, D: tl.constexpr, inside, place):
    """A gradient of queries, keys or values, and its sum over the rows."""
    tl.store(d_joined + at + which * D, gradient.to(d_joined.dtype.element_ty), mask=inside)
    total = tl.sum(tl.where(inside, gradient, 0.0), 0)
    tl.store(partial + which * D + place, total, mask=place < D)


@triton.jit
def _attended_backward(
    joined, bias, dy, d_joined, partial, seeds, step, stream, share, scale, rate,
    T: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_D)
    inside = (row < T) & (place < D)[None, :]
    sequence = (member * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    first = sequence * T
    at = (first + row) * (3 * D) + place[None, :]
    partial += sequence * 3 * D
    q = _part(joined, bias, at, 0, member, inside, D, BLOCK_D)
    k = _part(joined, bias, at, 1, member, inside, D, BLOCK_D)
    g = tl.load(dy + (first + row) * D + place[None, :], mask=inside, other=0.0)
    p = _weights(q, k, rate, T, BLOCK_T)
    dropped, kept = p, p >= 0
    if DROP:
        kept = _kept_weights(seeds, member, step, stream, share, T, BLOCK_T)
        dropped = tl.where(kept, p * scale, 0.0)
    dv = tl.dot(tl.trans(dropped.to(g.dtype)), g)
    _store_part(dv, d_joined, partial, at, 2, D, inside, place)
    v = _part(joined, bias, at, 2, member, inside, D, BLOCK_D)
    dp = tl.dot(g, tl.trans(v))
    if DROP:
        dp = tl.where(kept, dp * scale, 0.0)
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * rate).to(g.dtype)
    _store_part(tl.dot(ds, k), d_joined, partial, at, 0, D, inside, place)
    _store_part(tl.dot(tl.trans(ds), q), d_joined, partial, at, 1, D, inside, place)


@triton.jit
def _cross_entropy(logits, bias, targets, weights, each, rows, columns, words, BLOCK: tl.constexpr):
    """A whole row stays in registers, so that it is read once and written once."""
    member, row = tl.program_id(1), tl.program_id(0)
    base = logits + (member.to(tl.int64) * rows + row) * columns
    own = bias + member.to(tl.int64) * columns
    place = tl.arange(0, BLOCK)
    target, weight = tl.load(targets + row), tl.load(weights + row)
    x = tl.load(base + place, mask=place < words, other=float("-inf")).to(tl.float32)
    x += tl.load(own + place, mask=place < words, other=0.0)
    top = tl.max(x, 0)
    right = tl.sum(tl.where(place == target, x, 0.0), 0)
    share = tl.exp(x - top)
    total = tl.sum(share, 0)
    tl.store(each + member * rows + row, (top + tl.log(total) - right) * weight)
    g = (share / total - tl.where(place == target, 1.0, 0.0)) * weight
    tl.store(base + place, g.to(logits.dtype.element_ty), mask=place < columns)

"""Causal attention of one head over short sequences, with dropout and gradients (Triton)."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.common.float32 import float32_is_coarse
from joma.models.full_speed._dropping_kernel import Drop, kept


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined, bias, seeds_E, step, stream, share):
        E, B, T, three = joined.shape
        D = three // 3
        out = torch.empty(E, B, T, D, dtype=joined.dtype, device=joined.device)
        _attended[(B, E)](
            joined, bias, out, out, seeds_E, step, stream, share, 1 / (1 - share), D**-0.5,
            T=T, D=D, BLOCK_T=64, BLOCK_D=triton.next_power_of_2(D), DROP=share > 0,
            ENTROPY=False, PRODUCTS="tf32", num_warps=4,
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
            BLOCK_D=triton.next_power_of_2(D), DROP=ctx.share > 0, num_warps=4,
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


def attended_measured(joined: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """`attended` with nothing dropped and no gradients, and the entropy of each row, (E, B, T).

    Products of float32 are as exact as the process has them.

    Args:
        joined: queries, keys and values side by side, (E, B, T, 3·width), without their biases.
        bias: theirs, (E, 1, 3·width).
    """
    E, B, T, three = joined.shape
    D = three // 3
    joined = joined.contiguous()
    out = torch.empty(E, B, T, D, dtype=joined.dtype, device=joined.device)
    entropy = torch.empty(E, B, T, dtype=torch.float32, device=joined.device)
    _attended[(B, E)](
        joined, bias, out, entropy, bias, bias, 0, 0.0, 1.0, D**-0.5, T=T, D=D, BLOCK_T=64,
        BLOCK_D=triton.next_power_of_2(D), DROP=False, ENTROPY=True,
        PRODUCTS="tf32" if float32_is_coarse() else "ieee", num_warps=8,
    )  # fmt: skip
    return out, entropy


@triton.jit
def _weights(q, k, scale, T: tl.constexpr, BLOCK_T: tl.constexpr, PRODUCTS: tl.constexpr):
    """Softmax over the keys up to the query's own place."""
    row, place = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision=PRODUCTS) * scale
    scores = tl.where((place <= row) & (place < T), scores, float("-inf"))
    share = tl.exp(scores - tl.max(scores, 1)[:, None])
    return share / tl.sum(share, 1)[:, None]


@triton.jit
def _kept_weights(seeds, member, step, stream, share, T: tl.constexpr, BLOCK_T: tl.constexpr):
    """1 where a weight of this sequence is kept."""
    row = tl.program_id(0) * T + tl.arange(0, BLOCK_T)
    return kept(seeds, member, step, stream, row, share, T, BLOCK_T)


@triton.jit
def _part(joined, bias, at, which, member, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Queries, keys or values with their bias."""
    place = tl.arange(0, BLOCK_D)
    x = tl.load(joined + at + which * D, mask=inside, other=0.0)
    own = tl.load(bias + (member * 3 + which) * D + place, mask=place < D, other=0.0)
    return tl.where(inside, x.to(tl.float32) + own[None, :], 0.0).to(x.dtype)


@triton.jit
def _attended(
    joined, bias, out, entropy, seeds, step, stream, share, scale, rate,
    T: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    DROP: tl.constexpr, ENTROPY: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (row < T) & (place < D)
    first = (member * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * T
    at = (first + row) * (3 * D) + place
    q = _part(joined, bias, at, 0, member, inside, D, BLOCK_D)
    k = _part(joined, bias, at, 1, member, inside, D, BLOCK_D)
    p = _weights(q, k, rate, T, BLOCK_T, PRODUCTS)
    if ENTROPY:
        each, rows = tl.where(p == 0, 0.0, -p * tl.log(p)), tl.arange(0, BLOCK_T)
        tl.store(entropy + first + rows, tl.sum(each, 1), mask=rows < T)
    if DROP:
        p = tl.where(_kept_weights(seeds, member, step, stream, share, T, BLOCK_T), p * scale, 0.0)
    v = _part(joined, bias, at, 2, member, inside, D, BLOCK_D)
    y = tl.dot(p.to(v.dtype), v, input_precision=PRODUCTS)
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
    # What is needed again is read again: two programs then fit where one would.
    q = _part(joined, bias, at, 0, member, inside, D, BLOCK_D)
    k = _part(joined, bias, at, 1, member, inside, D, BLOCK_D)
    p = _weights(q, k, rate, T, BLOCK_T, "tf32")
    dropped, keep = p, p >= 0
    if DROP:
        keep = _kept_weights(seeds, member, step, stream, share, T, BLOCK_T)
        dropped = tl.where(keep, p * scale, 0.0)
    g = tl.load(dy + (first + row) * D + place[None, :], mask=inside, other=0.0)
    v = _part(joined, bias, at, 2, member, inside, D, BLOCK_D)
    dp = tl.dot(g, tl.trans(v))
    if DROP:
        dp = tl.where(keep, dp * scale, 0.0)
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * rate).to(g.dtype)
    dv = tl.dot(tl.trans(dropped.to(g.dtype)), g)
    _store_part(dv, d_joined, partial, at, 2, D, inside, place)
    k = _part(joined, bias, at, 1, member, inside, D, BLOCK_D)
    _store_part(tl.dot(ds, k), d_joined, partial, at, 0, D, inside, place)
    q = _part(joined, bias, at, 0, member, inside, D, BLOCK_D)
    _store_part(tl.dot(tl.trans(ds), q), d_joined, partial, at, 1, D, inside, place)

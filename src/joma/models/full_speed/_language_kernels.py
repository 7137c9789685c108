"""What a language model does before and after its blocks, on a GPU (Triton).

Each function here takes the place of several operations of `joma.models.language`. All compute in
float32 and read and write the precision of what they are given.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.models.full_speed._dropping_kernel import Drop, kept
from joma.models.full_speed._row_kernels import tile_of_rows

_ROWS = 8
"""Rows of the residual stream that one program works on."""
_LOGIT_ROWS, _LOGIT_COLUMNS = 4, 1024
"""Logits that one program works on at a time: of rows that share a bias, which costs as much."""


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
def _placed(
    x, waves, out, seeds, step, stream, rows, share, scale, root,
    T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place, inside, at = tile_of_rows(tl.program_id(0), member, rows, D, BLOCK_D, ROWS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * root
    if FORWARD:
        wave = waves + (row % T)[:, None] * D + place[None, :]
        value += tl.load(wave, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        keep = kept(seeds, member, step, stream, row, share, D, BLOCK_D)
        value = tl.where(keep, value * scale, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


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

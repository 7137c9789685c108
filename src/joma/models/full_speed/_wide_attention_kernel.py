"""Softmax attention over few positions with wide heads, with gradients, on a GPU (Triton).

One program has all positions of a sequence and head, and goes through the width in pieces: once for
the scores, once for the result. The weights are written for the backward pass; they are few.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 128
"""Numbers of a head that are multiplied at a time."""
_LEAST = 16
"""The least size of a matrix that tensor cores multiply."""


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, heads, leading, causal):
        E, B, R, D = query.shape
        T = key.shape[2]
        out = torch.empty_like(query)
        weights = torch.empty(E, B, heads, R, T, dtype=query.dtype, device=query.device)
        ctx.shape = _shape(R, T, D // heads, heads)
        ctx.scale = (D // heads) ** -0.5
        rest = out, weights, ctx.scale, math.log(leading)
        with torch.cuda.device_of(query):  # Triton launches on the current device
            _attended[(E * B, heads)](query, key, value, *rest, CAUSAL=causal, **ctx.shape)
        ctx.save_for_backward(query, key, value, weights)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        query, key, value, weights = ctx.saved_tensors
        E, B, heads = weights.shape[:3]
        dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
        rest = weights, gradients[0].contiguous(), dq, dk, dv, ctx.scale
        with torch.cuda.device_of(query):
            _attended_backward[(E * B, heads)](query, key, value, *rest, **ctx.shape)
        return dq, dk, dv, None, None, None


def attended(
    query: Tensor, key: Tensor, value: Tensor, *, heads: int, leading: int, causal: bool
) -> Tensor:
    """Return softmax attention, (E, B, R, width).

    Args:
        query: (E, B, R, width), of the last R positions.
        key: (E, B, T, width), of at most 64 positions.
        value: (E, B, T, width).
        heads: Number of heads that the width is divided into.
        leading: How many equal tokens the first position stands for.
        causal: Whether a position sees only itself and what is before it.
    """
    parts = (x.contiguous() for x in (query, key, value))
    return _Attended.apply(*parts, heads, leading, causal)


def _shape(rows: int, positions: int, width: int, heads: int) -> dict[str, int]:
    """Return the sizes that the kernels are compiled for."""
    return {
        "R": rows,
        "T": positions,
        "D": width,
        "HEADS": heads,
        "BLOCK_R": max(_LEAST, triton.next_power_of_2(rows)),
        "BLOCK_T": max(_LEAST, triton.next_power_of_2(positions)),
        "PIECE": min(_PIECE, max(_LEAST, triton.next_power_of_2(width))),
    }


@triton.jit
def _places(
    x, first, ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Where some numbers of each row lie, and which of them there are."""
    row, place = tl.arange(0, BLOCK)[:, None], first + tl.arange(0, PIECE)[None, :]
    start = x + tl.program_id(0).to(tl.int64) * (ROWS * HEADS * D) + tl.program_id(1) * D
    return start + row * (HEADS * D) + place, (row < ROWS) & (place < D)


@triton.jit
def _read(
    x, first, ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Some numbers of each row."""
    at, inside = _places(x, first, ROWS, BLOCK, D, HEADS, PIECE)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _write(
    x, values, first, ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Writes some numbers of each row."""
    at, inside = _places(x, first, ROWS, BLOCK, D, HEADS, PIECE)
    tl.store(at, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _places_of_weights(
    weights, R: tl.constexpr, T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Where the weights lie, and which of them there are."""
    row, place = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_T)[None, :]
    start = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (R * T)
    return weights + start + row * T + place, (row < R) & (place < T)


@triton.jit
def _attended(
    query, key, value, out, weights, scale, log_leading,
    R: tl.constexpr, T: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, PIECE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    scores = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for first in range(0, D, PIECE):
        q = _read(query, first, R, BLOCK_R, D, HEADS, PIECE)
        k = _read(key, first, T, BLOCK_T, D, HEADS, PIECE)
        scores = tl.dot(q, tl.trans(k), scores)
    row, place = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_T)[None, :]
    scores = scores * scale + tl.where(place == 0, log_leading, 0.0)
    seen = place < T
    if CAUSAL:
        seen = seen & (place <= row + (T - R))
    scores = tl.where(seen, scores, float("-inf"))
    p = tl.exp(scores - tl.max(scores, 1)[:, None])
    p = (p / tl.sum(p, 1)[:, None]).to(weights.dtype.element_ty)
    at, inside = _places_of_weights(weights, R, T, BLOCK_R, BLOCK_T)
    tl.store(at, p, mask=inside)
    for first in range(0, D, PIECE):
        v = _read(value, first, T, BLOCK_T, D, HEADS, PIECE)
        _write(out, tl.dot(p, v), first, R, BLOCK_R, D, HEADS, PIECE)


@triton.jit
def _attended_backward(
    query, key, value, weights, dy, dq, dk, dv, scale,
    R: tl.constexpr, T: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    at, inside = _places_of_weights(weights, R, T, BLOCK_R, BLOCK_T)
    p = tl.load(at, mask=inside, other=0.0)
    dp = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for first in range(0, D, PIECE):
        g = _read(dy, first, R, BLOCK_R, D, HEADS, PIECE)
        v = _read(value, first, T, BLOCK_T, D, HEADS, PIECE)
        dp = tl.dot(g, tl.trans(v), dp)
        _write(dv, tl.dot(tl.trans(p), g), first, T, BLOCK_T, D, HEADS, PIECE)
    whole = p.to(tl.float32)
    ds = (whole * (dp - tl.sum(whole * dp, 1)[:, None]) * scale).to(p.dtype)
    for first in range(0, D, PIECE):
        k = _read(key, first, T, BLOCK_T, D, HEADS, PIECE)
        _write(dq, tl.dot(ds, k), first, R, BLOCK_R, D, HEADS, PIECE)
        q = _read(query, first, R, BLOCK_R, D, HEADS, PIECE)
        _write(dk, tl.dot(tl.trans(ds), q), first, T, BLOCK_T, D, HEADS, PIECE)

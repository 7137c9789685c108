"""What a block does between its matrix products, row by row, on a GPU (Triton), with gradients.

Each function here takes the place of several operations of `joma.models`, keeps nothing that can be
made again, and draws the same random words: what is dropped is the same on a CPU. All compute in
float32 and read and write the precision of what they are given.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.models.full_speed._dropping_kernel import Drop, kept

_NARROW = 256
"""Numbers of a row up to which a program works on several rows, and one warp adds up."""
_WIDE_NUMBERS = 2048
"""Numbers that a program works on at a time where rows are wider."""
_PROGRAMS = 1056
"""About as many as a GPU works on at once: more would only leave more sums to be added up."""


class _SumNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, bias_E1D, residual, scale_ED, shift_ED, seeds_E, step, stream, share):
        E, D = scale_ED.shape
        rows = x.numel() // (E * D)
        tiling = _Tiling.of(D)
        total, out = torch.empty_like(x), torch.empty_like(x)
        has_bias = bias_E1D is not None
        linear = bias_E1D if has_bias else scale_ED  # which is then not read
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _sum_norm[(triton.cdiv(rows, tiling.rows), E)](
                x, linear, residual, scale_ED, shift_ED, total, out, seeds_E, step, stream, rows,
                share, 1 / (1 - share), D=D, BLOCK_D=tiling.block, ROWS=tiling.rows,
                DROP=share > 0, BIAS=has_bias,
            )  # fmt: skip
        ctx.save_for_backward(total, scale_ED, seeds_E, step)
        ctx.stream, ctx.share, ctx.rows, ctx.has_bias = stream, share, rows, has_bias
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        total, scale_ED, seeds_E, step = ctx.saved_tensors
        E, D = scale_ED.shape
        dy, d_total = gradients[0].contiguous(), torch.empty_like(total)
        dx = torch.empty_like(total) if ctx.share > 0 else d_total  # equal where nothing is dropped
        tiling = _Tiling.of(D)
        each = tiling.norm_rows
        tiles = max(1, triton.cdiv(ctx.rows * E, each * _PROGRAMS))
        blocks = triton.cdiv(ctx.rows, each * tiles)
        sums = 3 if ctx.has_bias else 2
        partial = torch.empty(sums, E, blocks, D, dtype=torch.float32, device=dy.device)
        with torch.cuda.device_of(dy):
            _sum_norm_backward[(blocks, E)](
                dy, total, scale_ED, dx, d_total, partial, seeds_E, step, ctx.stream, ctx.rows,
                tiles, ctx.share, 1 / (1 - ctx.share), D=D, BLOCK_D=tiling.block, ROWS=each,
                DROP=ctx.share > 0, BIAS=ctx.has_bias, num_warps=tiling.summing_warps,
            )  # fmt: skip
        d_scale, d_shift, *d_bias = partial.sum(2).unbind(0)
        d_bias = d_bias[0].unsqueeze(1) if d_bias else None
        return dx, d_bias, d_total, d_scale, d_shift, None, None, None, None


def sum_norm(
    x: Tensor,
    bias_E1D: Tensor | None,
    residual: Tensor,
    scale_ED: Tensor,
    shift_ED: Tensor,
    drop: Drop,
    place: str,
) -> Tensor:
    """Return the layer norm of residual + dropout(x + bias), (E, B, T, width).

    Args:
        x: (E, B, T, width).
        bias_E1D: What is added to x; nothing where None.
        residual: (E, B, T, width).
        scale_ED: Scale of the layer norm.
        shift_ED: Its shift.
        drop: What is dropped of x + bias.
        place: Name of the stream that decides it.
    """
    x, residual = x.contiguous(), residual.contiguous()
    return _SumNorm.apply(x, bias_E1D, residual, scale_ED, shift_ED, *drop.at(place))


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, bias_E1H, seeds_E, step, stream, share):
        E, H = len(x), x.shape[-1]
        rows, out = x[0].numel() // H, torch.empty_like(x)
        tiling = _Tiling.of(H)
        with torch.cuda.device_of(x):
            _relu[(triton.cdiv(rows, tiling.rows), E)](
                x, bias_E1H, out, seeds_E, step, stream, rows, share, 1 / (1 - share),
                D=H, BLOCK_D=tiling.block, ROWS=tiling.rows, DROP=share > 0,
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
        tiling = _Tiling.of(H)
        each = tiling.rows
        # Sums over the rows of wide layers would be as large as what they are made of.
        wide = tiling.block > _NARROW
        tiles = max(1, triton.cdiv(rows * E, each * _PROGRAMS)) if wide else 1
        blocks = triton.cdiv(rows, each * tiles)
        partial = torch.empty(E, blocks, H, dtype=torch.float32, device=dy.device)
        with torch.cuda.device_of(dy):
            _relu_backward[(blocks, E)](
                dy, out, dx, partial, rows, tiles, 1 / (1 - ctx.share),
                D=H, BLOCK_D=tiling.block, ROWS=each, num_warps=tiling.summing_warps,
            )  # fmt: skip
        return dx, partial.sum(1, keepdim=True), None, None, None, None


def relu(x: Tensor, bias_E1H: Tensor, drop: Drop, place: str) -> Tensor:
    """Return dropout of ReLU of x + bias, (E, B, T, hidden)."""
    return _Relu.apply(x.contiguous(), bias_E1H, *drop.at(place))


class _Tiling(NamedTuple):
    """How programs divide rows among themselves.

    Attributes:
        block: Numbers of a row, with those that are none.
        rows: Rows of a program.
        norm_rows: Rows of a layer norm's backward program.
        summing_warps: Warps of a program that adds up over rows; others have four.
    """

    block: int
    rows: int
    norm_rows: int
    summing_warps: int

    @classmethod
    def of(cls, width: int) -> "_Tiling":
        """Return it for rows of a width."""
        block = triton.next_power_of_2(width)
        if block <= _NARROW:
            return cls(block, 8, 4, 1)  # sums across warps take longest
        each = max(1, _WIDE_NUMBERS // block)
        return cls(block, each, each, 4)


@triton.jit
def tile_of_rows(number, member, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Rows and columns of one tile of a member's part, which of them are there, and where."""
    row, place = number * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (place < D)[None, :]
    return row, place, inside, (member.to(tl.int64) * rows + row[:, None]) * D + place[None, :]


@triton.jit
def _sum_norm(
    x, linear, residual, weight, bias, total, out, seeds, step, stream, rows, share, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place, inside, at = tile_of_rows(tl.program_id(0), member, rows, D, BLOCK_D, ROWS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
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
    BIAS: tl.constexpr,
):  # fmt: skip
    member, place = tl.program_id(1), tl.arange(0, BLOCK_D)
    w = tl.load(weight + member * D + place, mask=place < D, other=0.0).to(tl.float32)
    d_scale = tl.zeros([ROWS, BLOCK_D], tl.float32)
    d_shift = tl.zeros([ROWS, BLOCK_D], tl.float32)
    d_bias = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for tile in range(tiles):
        number = tl.program_id(0) * tiles + tile
        row, place, inside, at = tile_of_rows(number, member, rows, D, BLOCK_D, ROWS)
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
        if BIAS:
            d_bias += tl.where(inside, g, 0.0)
    out = partial + (member * tl.num_programs(0) + tl.program_id(0)) * D + place
    next_sum = tl.num_programs(1) * tl.num_programs(0) * D
    tl.store(out, tl.sum(d_scale, 0), mask=place < D)
    tl.store(out + next_sum, tl.sum(d_shift, 0), mask=place < D)
    if BIAS:
        tl.store(out + 2 * next_sum, tl.sum(d_bias, 0), mask=place < D)


@triton.jit
def _relu(
    x, bias, out, seeds, step, stream, rows, share, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    row, place, inside, at = tile_of_rows(tl.program_id(0), member, rows, D, BLOCK_D, ROWS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + member * D + place, mask=place < D, other=0.0)[None, :]
    value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)  # as torch's
    if DROP:
        keep = kept(seeds, member, step, stream, row, share, D, BLOCK_D)
        value = tl.where(keep, value * scale, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _relu_backward(
    dy, out, dx, partial, rows, tiles, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    member, place = tl.program_id(1), tl.arange(0, BLOCK_D)
    d_bias = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for tile in range(tiles):
        number = tl.program_id(0) * tiles + tile
        _, _, inside, at = tile_of_rows(number, member, rows, D, BLOCK_D, ROWS)
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        # What is dropped or negative is 0 in the output.
        g = tl.where(tl.load(out + at, mask=inside, other=0.0) <= 0, 0.0, g * scale)
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
        d_bias += g
    block = (member * tl.num_programs(0) + tl.program_id(0)) * D
    tl.store(partial + block + place, tl.sum(d_bias, 0), mask=place < D)

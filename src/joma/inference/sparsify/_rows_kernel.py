"""Products with gathered rows on a GPU (Triton): each row that is needed is read once.

Sums are made in float32, always in the same order. Nothing is recorded for a backward pass.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""Rows that a program multiplies, of `_BLOCK` numbers at a time."""
_ADDED = 128
"""Rows that a program adds up."""
_BLOCK = 512


def rows_times(rows_Nd: Tensor, tokens_Td: Tensor, index_Tk: Tensor) -> Tensor:
    """Return out[t, j] = rows[index[t, j]] · x[t], as `_products.rows_times`."""
    (tokens, kept), width = index_Tk.shape, rows_Nd.shape[1]
    out_Tk = torch.empty(tokens, kept, dtype=tokens_Td.dtype, device=tokens_Td.device)
    if out_Tk.numel():
        with torch.cuda.device_of(rows_Nd):  # Triton launches on the current device
            _multiplied[(tokens, triton.cdiv(kept, _ROWS))](
                rows_Nd,
                tokens_Td.contiguous(),
                index_Tk.contiguous(),
                out_Tk,
                kept,
                rows_Nd.stride(0),
                WIDTH=width,
                ROWS=_ROWS,
                BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
            )
    return out_Tk


def times_rows(weights_Tk: Tensor, rows_Nd: Tensor, index_Tk: Tensor) -> Tensor:
    """Return out[t] = Σⱼ w[t, j] rows[index[t, j]], as `_products.times_rows`."""
    (tokens, kept), width = index_Tk.shape, rows_Nd.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(width))
    parts = triton.cdiv(kept, _ADDED)
    sums = torch.empty(tokens, parts, width, dtype=torch.float32, device=rows_Nd.device)
    if sums.numel():
        with torch.cuda.device_of(rows_Nd):
            _added[(tokens, triton.cdiv(width, block), parts)](
                weights_Tk.contiguous(),
                rows_Nd,
                index_Tk.contiguous(),
                sums,
                kept,
                parts,
                rows_Nd.stride(0),
                WIDTH=width,
                ROWS=_ROWS,
                BLOCK=block,
                ADDED=_ADDED,
            )
    return sums.sum(1).to(weights_Tk.dtype)


@triton.jit
def _multiplied(
    rows,
    tokens,
    index,
    out,
    kept,
    stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = place < kept
    row = tl.load(index + token * kept + place, mask=inside, other=0)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(tokens + token * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        at = rows + row[:, None] * stride + d[None, :]
        y = tl.load(at, mask=inside[:, None] & (d < WIDTH)[None, :], other=0.0)
        total += y.to(tl.float32) * x[None, :]
    tl.store(out + token * kept + place, tl.sum(total, 1), mask=inside)


@triton.jit
def _added(
    weights,
    rows,
    index,
    sums,
    kept,
    parts,
    stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, ADDED, ROWS):
        place = part * ADDED + start + tl.arange(0, ROWS)
        inside = place < kept
        row = tl.load(index + token * kept + place, mask=inside, other=0)
        share = tl.load(weights + token * kept + place, mask=inside, other=0.0).to(tl.float32)
        at = rows + row[:, None] * stride + d[None, :]
        y = tl.load(at, mask=inside[:, None] & (d < WIDTH)[None, :], other=0.0)
        total += tl.sum(y.to(tl.float32) * share[:, None], 0)
    tl.store(sums + (token * parts + part) * WIDTH + d, total, mask=d < WIDTH)

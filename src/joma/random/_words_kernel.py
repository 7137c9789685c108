"""The words of `joma.random` in one launch on a GPU (Triton); torch operations take ninety."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = 256
"""Blocks of four words that a program makes."""


def words(seeds_E: Tensor, stream: int, step: int | Tensor, first: int, last: int) -> Tensor:
    """Return the words of the blocks from first to last − 1, (E, 4·blocks).

    Args:
        seeds_E: Seed of each member.
        stream: CRC-32 of the stream's name.
        step: Which draw of the stream; a tensor has no axes, or one step for each member.
        first: The first block.
        last: The block after the last.
    """
    members, blocks = len(seeds_E), last - first
    if not isinstance(step, Tensor):
        step = torch.full((), step, dtype=torch.int64, device=seeds_E.device)
    out_Ew = torch.empty(members, 4 * blocks, dtype=torch.int64, device=seeds_E.device)
    grid = triton.cdiv(blocks, _BLOCKS), members
    each = step.stride(0) if step.ndim else 0
    with torch.cuda.device_of(seeds_E):  # Triton launches on the current device
        _words[grid](
            seeds_E, seeds_E.stride(0), step, each, out_Ew, stream, first, blocks, BLOCKS=_BLOCKS
        )
    return out_Ew


@triton.jit(do_not_specialize=["stream", "first", "blocks"])
def _words(seeds, next_seed, steps, next_step, out, stream, first, blocks, BLOCKS: tl.constexpr):
    member = tl.program_id(1).to(tl.int64)
    before = tl.program_id(0).to(tl.int64) * BLOCKS
    block = (first + before + tl.arange(0, BLOCKS)).to(tl.uint32)
    seed, step = tl.load(seeds + member * next_seed), tl.load(steps + member * next_step)
    zero = block * 0
    low = zero + (step & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block, zero + stream.to(tl.uint32), low, high)
    drawn = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)).to(tl.int64)
    at = before * 4 + tl.arange(0, 4 * BLOCKS)
    tl.store(out + member * blocks * 4 + at, drawn, mask=at // 4 < blocks)

"""Row statistics of softmax attention on a GPU, in one pass over the keys (Triton).

With x = s·log₂e the scores in bits and m their running maximum, a block of keys adds to

    l = Σ 2^(x−m),    a = Σ 2^(x−m)·(x − m) ≤ 0,

from which log₂-sum-exp = m + log₂ l and the entropy is log₂ l − a/l bits. A new maximum m' rescales
l by 2^(m−m') and a to 2^(m−m')·(a + (m − m')·l). Nothing of size T × S is stored.

Mass on the first and the last keys is added up afterwards, over the few blocks that hold them. Mass
that a key receives needs every row's log-sum-exp first: it is a second pass, keys outside and
queries inside, without atomics. Where all rows of a block see all of its keys, no key is tested by
itself. A GPU that has no room for the usual blocks gets smaller ones.

A row is NaN where one of its scores is NaN or +∞, or all are −∞; where some are −∞ its entropy is.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from joma.kernels._attention_blocks import TILE, padding_kernel, tile_kernel
from joma.kernels._attention_columns import column_kernel
from joma.kernels._attention_rows import row_kernel
from joma.kernels.choice import Fitting

_LOG2E = 1.4426950408889634
_LARGEST_HEAD = 256
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_FAR = 1 << 30
"""Larger than any distance between two places."""
_MOST_HEADS = 65535
"""Of all sequences together: what the second axis of a grid may have."""
_LARGE_CAP = 200.0
"""Softcap above which 10⁻⁷ of it is too much for small scores."""
_fitting = Fitting()


class _BlockSizes(NamedTuple):
    """How a kernel divides queries and keys among programs.

    Attributes:
        outer: Rows of a program, or keys in the kernel over keys.
        inner: How many of the others it reads together.
        stages: Inner blocks that are loaded ahead, and the one that is worked on.
    """

    outer: int
    inner: int
    stages: int


def takes(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return whether the kernels take these: usual types and head sizes, and something to do."""
    return (
        query.dtype in _TYPES
        and key.dtype == query.dtype
        and query.shape[-1] <= _LARGEST_HEAD
        and 0 not in (query.shape[2], key.shape[2])
        and 0 < query.shape[0] * query.shape[1] <= _MOST_HEADS
        and (mask is None or mask.dtype == torch.bool or mask.dtype in _TYPES)
    )


def row_statistics(
    query_BHTD: Tensor,
    key_BHSD: Tensor,
    *,
    scale: float,
    causal: bool,
    padding_BS: Tensor | None,
    window: int | None,
    mask_BHTS: Tensor | None,
    softcap: float | None,
    rows_BT: Tensor | None,
    first: int | None,
    last: int | None,
    received: bool,
    lowest: float,
) -> list[Tensor | None]:
    """Return what `joma.kernels.attention.row_statistics` returns, all in float32.

    Its arguments are those of that function; entries of a mask up to `lowest` hide.
    """
    if scale < 0:  # the kernel takes the greatest score of a block before it scales
        query_BHTD, scale = -query_BHTD, -scale
    query_BHTD, key_BHSD = _rows_contiguous(query_BHTD), _rows_contiguous(key_BHSD)
    (B, H, T, D), S = query_BHTD.shape, key_BHSD.shape[2]
    like: dict[str, Any] = {"dtype": torch.float32, "device": query_BHTD.device}
    out = torch.empty(4, B, H, T, **like)
    asked = first is not None or last is not None
    masses = torch.empty(2, B, H, T, **like) if asked else out
    behind = _FAR if window is None else min(window - 1, _FAR)
    on_device = torch.cuda.device(query_BHTD.device) if query_BHTD.is_cuda else nullcontext()
    with on_device:  # Triton launches on the current device
        padding, extent = _padding(padding_BS, out)
        mask, tiles, of_mask = _mask(mask_BHTS, lowest, out)
        strides = (*query_BHTD.stride()[:3], *key_BHSD.stride()[:3])
        sizes = (*strides, H, H // key_BHSD.shape[1], T, S)
        bits = ((scale if softcap is None else softcap) * _LOG2E, scale / (softcap or 1.0))
        sight = (behind, 0 if causal else behind, *of_mask, lowest)
        constants: dict[str, Any] = {
            "D": D,
            "PADDED": padding_BS is not None,
            "MASK": 0 if mask_BHTS is None else 1 if mask_BHTS.dtype == torch.bool else 2,
            "SOFTCAP": 0 if softcap is None else 1 if softcap <= _LARGE_CAP else 2,
            "BLOCK_D": max(16, 1 << (D - 1).bit_length()),
            "PRECISION": "tf32x3" if query_BHTD.dtype == torch.float32 else "tf32",
        }
        given = (query_BHTD, key_BHSD, out)
        ends = (min(first or 0, S), min(last or 0, S))
        kind = (query_BHTD.device, query_BHTD.dtype, *constants.values())

        def over_rows(by: _BlockSizes) -> None:
            row_kernel[(-(-T // by.outer), B * H)](
                *given, masses, padding, extent, mask, tiles, *sizes, *bits, *ends, *sight,
                MASSES=asked, BLOCK_T=by.outer, BLOCK_S=by.inner, num_stages=by.stages, **constants,
            )  # fmt: skip

        def over_keys(by: _BlockSizes) -> None:
            column_kernel[(-(-S // by.outer), B * H)](
                *given, mass_received, padding, extent, mask, tiles, *sizes, *bits, *sight,
                BLOCK_T=by.inner, BLOCK_S=by.outer, num_stages=by.stages, **constants,
            )  # fmt: skip

        ways = _ways(query_BHTD.dtype, constants["BLOCK_D"])
        _fitting.launch(("rows", asked, *kind), ways, over_rows)
        logsumexp, entropy, level, _ = out
        mass_received = None
        if received:
            if rows_BT is not None:  # queries that are not real give nothing
                level.masked_fill_(~rows_BT[:, None], torch.inf)
            mass_received = torch.empty(B, H, S, **like)
            _fitting.launch(("keys", *kind), ways, over_keys)
    on_first = None if first is None else masses[0]
    on_last = None if last is None else masses[1]
    return [logsumexp, entropy, on_first, on_last, mass_received]


def _ways(dtype: torch.dtype, head: int) -> tuple[_BlockSizes, ...]:
    """Return the blocks that were fastest of those tried, then such as take less of a GPU."""
    smaller = _BlockSizes(32, 16, 1)
    if dtype == torch.float32 or head > 128:
        return _BlockSizes(TILE, 32, 2), smaller
    return _BlockSizes(TILE, 128 if head <= 64 else 64, 3), smaller


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _padding(padding_BS: Tensor | None, nothing: Tensor) -> tuple[Tensor, Tensor]:
    """Return the padding as bytes and where real keys begin and end; if None, what is not read."""
    if padding_BS is None:
        return nothing.view(torch.int8), nothing.view(torch.int32)
    real = padding_BS.contiguous().view(torch.int8)
    extent = torch.empty(len(real), 3, dtype=torch.int32, device=real.device)
    padding_kernel[(len(real),)](real, extent, real.shape[1], BLOCK=1024)
    return real, extent


def _mask(
    mask_BHTS: Tensor | None, lowest: float, nothing: Tensor
) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Return a mask or its bits, what is seen of its tiles, and its sequences, heads and rows."""
    if mask_BHTS is None:
        return nothing, nothing.view(torch.int8), (1, 1, 1)
    for axis in (0, 1, 2):  # what is the same for all is read once
        if mask_BHTS.stride(axis) == 0:
            mask_BHTS = mask_BHTS.narrow(axis, 0, 1)
    mask = mask_BHTS.contiguous()
    B, H, rows, S = mask.shape
    down, across = -(-rows // TILE), -(-S // TILE)
    tiles = torch.empty(B, H, down, across, dtype=torch.int8, device=mask.device)
    numbers, words = mask.dtype != torch.bool, tiles
    if not numbers:
        mask = mask.view(torch.int8)
        shape = (B, H, rows, across * (TILE // 32))
        words = torch.empty(shape, dtype=torch.int32, device=mask.device)
    tile_kernel[(tiles.numel(),)](mask, tiles, words, rows, S, lowest, NUMBERS=numbers)
    return mask if numbers else words, tiles, (B, H, rows)

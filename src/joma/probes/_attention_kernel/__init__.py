"""Row statistics of softmax attention on a GPU, in one pass over the keys (Triton).

With x = s·log₂e the scores in bits and m their running maximum, a block of keys adds to

    l = Σ 2^(x−m),    a = Σ 2^(x−m)·(x − m) ≤ 0,

from which log₂-sum-exp = m + log₂ l and the entropy is log₂ l − a/l bits: no large number is
subtracted from a large number, however peaked the row. A new maximum m' rescales l by 2^(m−m') and
a to 2^(m−m')·(a + (m − m')·l). Nothing of size T × S is stored.

Mass on the first and the last keys is added up afterwards, over the few blocks that hold them; mass
a key receives needs every row's log-sum-exp first, so it is a second pass, keys outside and queries
inside: no atomics, the same input gives the same bits.

Attention that is causal or not and nothing else has kernels of its own. All else (windows, padding,
masks, softcaps, queries that are not real) is the general kernel, where windows and padding are
numbers the kernel is given, so that it is compiled once for all of them: per head size and type of
queries there are 8 plain and 12 general kernels over rows, 4 and 12 over keys, of which a model
uses one or two.
A block all of whose rows see all of its keys goes through the same loop as without a mask.

A row is NaN where one of its scores is NaN or +∞, or all are −∞; where some are −∞ its entropy is.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from joma.probes._attention_kernel._columns import column_kernel
from joma.probes._attention_kernel._extent import padding_kernel, tile_kernel
from joma.probes._attention_kernel._rows import row_kernel
from joma.probes._attention_kernel._score import TILE
from joma.probes._attention_sight import lowest_seen

_LOG2E = 1.4426950408889634
LARGEST_HEAD = 256
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_FAR = 1 << 30
"""A distance no two places have."""
_MOST_HEADS = 65535
"""Of all sequences together: what the second axis of a grid may have."""


def takes(query: Tensor, key: Tensor, mask: Tensor | None = None) -> bool:
    """Whether the kernel takes these: on a GPU, of a usual type and head size."""
    return (
        query.is_cuda
        and query.dtype in _TYPES
        and key.dtype == query.dtype
        and query.shape[-1] <= LARGEST_HEAD
        and query.shape[-2] > 0
        and key.shape[-2] > 0
        and 0 < query.shape[0] * query.shape[1] <= _MOST_HEADS
        and (mask is None or mask.dtype == torch.bool or mask.dtype in _TYPES)
    )


def statistics(
    query_BHTD: Tensor,
    key_BHSD: Tensor,
    *,
    scale: float,
    causal: bool,
    padding_BS: Tensor | None = None,
    window: int | None = None,
    mask_BHTS: Tensor | None = None,
    softcap: float | None = None,
    rows_BT: Tensor | None = None,
    first: int | None = None,
    last: int | None = None,
    received: bool = False,
) -> list[Tensor | None]:
    """Log-sum-exp, entropy, mass on the first and last keys, mass received; None where not asked.

    All in float32, (B, H, T), mass received (B, H, S). The arguments are those of
    `joma.probes.attention_statistics`, checked there; axes of the mask may be 1.
    """
    if scale < 0:  # the kernel takes the greatest score of a block before it scales
        query_BHTD, scale = -query_BHTD, -scale
    query_BHTD, key_BHSD = _rows_contiguous(query_BHTD), _rows_contiguous(key_BHSD)
    B, H, T, D = query_BHTD.shape
    S = key_BHSD.shape[2]
    like: dict[str, Any] = {"dtype": torch.float32, "device": query_BHTD.device}
    logsumexp, entropy = torch.empty(B, H, T, **like), torch.empty(B, H, T, **like)
    first_mass = None if first is None else torch.empty(B, H, T, **like)
    last_mass = None if last is None else torch.empty(B, H, T, **like)
    mass_received = torch.empty(B, H, S, **like) if received else None

    # What is not given or not wanted needs an address all the same, which is never used.
    nothing = logsumexp.view(torch.int8)
    given = (padding_BS, window, mask_BHTS, softcap, rows_BT)
    general = any(it is not None for it in given)
    masses = first is not None or last is not None
    adds = mask_BHTS is not None and mask_BHTS.dtype != torch.bool
    bits = scale * _LOG2E if softcap is None else softcap * _LOG2E
    common: dict[str, Any] = {
        **_strides(query_BHTD, key_BHSD),
        "heads": H,
        "group": H // key_BHSD.shape[1],
        "T": T,
        "S": S,
        "bits": bits,
        "inverse": 0.0 if softcap is None else scale / softcap,
        **_sight(padding_BS, window, causal, S, nothing),
        **_mask(mask_BHTS, nothing, even=T % 16 == 0 and S % 16 == 0),
        "D": D,
        "CAUSAL": causal and not general,
        "GENERAL": general,
        "SOFTCAP": softcap is not None,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "PRECISION": "tf32x3" if query_BHTD.dtype == torch.float32 else "tf32",
    }
    outer, inner, launch = blocks(query_BHTD.dtype, common["BLOCK_D"])
    level, reference = logsumexp, logsumexp
    if adds:
        level, reference = torch.empty(B, H, T, **like), torch.empty(B, H, T, **like)
    row_kernel[(triton.cdiv(T, outer), B * H)](
        query_BHTD,
        key_BHSD,
        logsumexp,
        entropy,
        logsumexp if first_mass is None else first_mass,
        logsumexp if last_mass is None else last_mass,
        first=first or 0,
        last=last or 0,
        real_rows=nothing if rows_BT is None else rows_BT.contiguous().view(torch.int8),
        has_rows=int(rows_BT is not None),
        level_out=level,
        reference_out=reference,
        MASSES=masses or general,
        BLOCK_T=outer,
        BLOCK_S=inner,
        **common,
        **launch,
    )
    if mass_received is not None:
        column_kernel[(triton.cdiv(S, outer), B * H)](
            query_BHTD,
            key_BHSD,
            level,
            mass_received,
            reference=reference,
            BLOCK_T=inner,
            BLOCK_S=outer,
            **common,
            **launch,
        )
    return [logsumexp, entropy, first_mass, last_mass, mass_received]


def blocks(dtype: torch.dtype, head: int) -> tuple[int, int, dict[str, int]]:
    """Outer and inner block: what was fastest of those tried where it matters, else what fits."""
    if dtype == torch.float32 or head > 128:
        return TILE, 32, {"num_warps": 4, "num_stages": 2}
    return TILE, 128 if head <= 64 else 64, {"num_warps": 4, "num_stages": 3}


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(query: Tensor, key: Tensor) -> dict[str, int]:
    of_query = zip("BHT", query.stride(), strict=False)
    of_key = zip("BHS", key.stride(), strict=False)
    return {f"query_stride_{axis}": it for axis, it in of_query} | {
        f"key_stride_{axis}": it for axis, it in of_key
    }


def _sight(
    padding_BS: Tensor | None, window: int | None, causal: bool, S: int, nothing: Tensor
) -> dict[str, Any]:
    """Places a query sees, and where real keys begin and end, for the general kernel."""
    behind = _FAR if window is None else min(window - 1, _FAR)
    found = {
        "padding": nothing,
        "extent": nothing.view(torch.int32),
        "padded": 0,
        "behind": behind,
        "ahead": 0 if causal else behind,
    }
    if padding_BS is not None:
        real = padding_BS.contiguous().view(torch.int8)
        extent = torch.empty(len(real), 3, dtype=torch.int32, device=real.device)
        padding_kernel[(len(real),)](real, extent, S, BLOCK=1024)
        found |= {"padding": real, "extent": extent, "padded": 1}
    return found


class _Mask(NamedTuple):
    """Strides of a mask, 0 along axes that it does not have."""

    B: int
    H: int
    T: int
    S: int


def _mask(mask_BHTS: Tensor | None, nothing: Tensor, *, even: bool) -> dict[str, Any]:
    """The mask and its tiles for the general kernel; it is neither copied nor repeated."""
    if mask_BHTS is None:
        strides = dict.fromkeys((f"mask_stride_{axis}" for axis in "BHTS"), 0)
        tiles = dict.fromkeys((f"tile_stride_{axis}" for axis in "BHT"), 0)
        none = {"mask": nothing, "tiles": nothing, "mask_rows": 1, "lowest": 0.0}
        return none | strides | tiles | {"MASK": 0, "EVEN": even}
    numbers = mask_BHTS.dtype != torch.bool
    lowest = lowest_seen(mask_BHTS) if numbers else 0.0
    mask = mask_BHTS if numbers else mask_BHTS.view(torch.int8)
    S = mask.shape[3]
    stride = _Mask(
        *(it if size > 1 else 0 for it, size in zip(mask.stride(), mask.shape, strict=True))
    )
    rows = mask.shape[2] if stride.T else 1
    even = even and stride.S == 1 and not any(it % 16 for it in (*stride[:3], mask.data_ptr()))
    down, across = triton.cdiv(rows, TILE), triton.cdiv(S, TILE)
    masks = [size if it else 1 for it, size in zip(stride[:2], mask.shape, strict=False)]
    tiles = torch.empty(*masks, down, across, dtype=torch.int8, device=mask.device)
    tile_kernel[(tiles.numel(),)](
        mask, tiles, *stride, masks[1], rows, S, down, lowest, NUMBERS=numbers, EVEN=even, TILE=TILE
    )
    of_tiles = [
        it if size > 1 else 0 for it, size in zip(tiles.stride()[:3], tiles.shape, strict=False)
    ]
    return {
        "mask": mask,
        "tiles": tiles,
        "mask_rows": rows,
        "lowest": lowest,
        **{f"mask_stride_{axis}": it for axis, it in zip("BHTS", stride, strict=True)},
        **{f"tile_stride_{axis}": it for axis, it in zip("BHT", of_tiles, strict=True)},
        "MASK": 2 if numbers else 1,
        "EVEN": even,
    }

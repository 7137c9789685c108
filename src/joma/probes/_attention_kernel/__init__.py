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
queries there are 8 plain and 18 general kernels over rows, 4 and 18 over keys, of which a model
uses one or two. Few rows over many keys have kernels of their own, with wider blocks of keys; where
they are too few for a GPU, programs share the keys, and a second kernel adds up their sums. A GPU
that has no room for the usual blocks gets smaller ones.
A block all of whose rows see all of its keys goes through the same loop as without a mask.

A row is NaN where one of its scores is NaN or +∞, or all are −∞; where some are −∞ its entropy is.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import functools
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from joma.kernels.choice import Fitting
from joma.kernels.launch import LARGEST, Launcher
from joma.probes._attention_kernel._columns import column_kernel
from joma.probes._attention_kernel._ends import MOST_PARTS, SUMS, join_kernel
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
_FEW_ROWS = 16
"""Rows of a block where there are few, so that more programs share them."""
_FEW_PROGRAMS = 64
"""Fewer programs than this leave half of a GPU idle."""
_PROGRAMS = 256
"""So many programs share the keys of few rows, at most."""
_LARGE_CAP = 200.0
"""Softcap above which 10⁻⁷ of it is too much for small scores."""
_FEW_ENTRIES = 2**18
"""Masks of so few numbers are not classified by tiles first: that would be another launch."""

_STRIDES = tuple(
    f"{of}_stride_{axis}" for of, axes in (("query", "BHT"), ("key", "BHS")) for axis in axes
)
_launch_rows = Launcher(row_kernel, ("query", "key", "mask", *_STRIDES))
_launch_columns = Launcher(column_kernel, ("query", "key", "mask", *_STRIDES))
_launch_tiles = Launcher(tile_kernel, ("mask",))
_launch_join = Launcher(join_kernel, ("parts",))
_launch_padding = Launcher(padding_kernel, ("extent",))
_rows_fit, _columns_fit = Fitting(), Fitting()


class Blocks(NamedTuple):
    """How a kernel divides queries and keys among programs.

    Attributes:
        outer: What a program has of rows, or of keys in the kernel over keys.
        inner: How many of the others it reads together.
        warps: Warps of a program.
        stages: Inner blocks that are loaded ahead, and the one that is worked on.
    """

    outer: int
    inner: int
    warps: int = 4
    stages: int = 2

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages}


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
    S, dtype, device = key_BHSD.shape[2], query_BHTD.dtype, query_BHTD.device
    like: dict[str, Any] = {"dtype": torch.float32, "device": device}
    adds = mask_BHTS is not None and mask_BHTS.dtype != torch.bool
    # One allocation for all: each takes as long as the launch of a kernel.
    of_rows = iter(torch.empty(2 + 2 * adds, B, H, T, **like).unbind())
    logsumexp, entropy = next(of_rows), next(of_rows)
    level, reference = (next(of_rows), next(of_rows)) if adds else (logsumexp, logsumexp)
    first_mass = None if first is None else torch.empty(B, H, T, **like)
    last_mass = None if last is None else torch.empty(B, H, T, **like)
    mass_received = torch.empty(B, H, S, **like) if received else None

    # What is not given or not wanted needs an address all the same, which is never used.
    nothing = logsumexp.view(torch.int8)
    given = (padding_BS, window, mask_BHTS, softcap, rows_BT)
    general = any([it is not None for it in given])  # noqa: C419
    masses = first is not None or last is not None
    constants: dict[str, Any] = {
        "D": D,
        "CAUSAL": causal and not general,
        "GENERAL": general,
        "MASK": 0 if mask_BHTS is None else 2 if adds else 1,
        "EVEN": T % 16 == 0 and S % 16 == 0,
        "SOFTCAP": 0 if softcap is None else 1 if softcap <= _LARGE_CAP else 2,
        "BLOCK_D": max(16, 1 << (D - 1).bit_length()),
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }
    query_B, query_H, query_T, _ = query_BHTD.stride()
    key_B, key_H, key_S, _ = key_BHSD.stride()
    common: dict[str, Any] = {
        "query": query_BHTD,
        "key": key_BHSD,
        "logsumexp": logsumexp,
        "query_stride_B": query_B,
        "query_stride_H": query_H,
        "query_stride_T": query_T,
        "key_stride_B": key_B,
        "key_stride_H": key_H,
        "key_stride_S": key_S,
        "heads": H,
        "group": H // key_BHSD.shape[1],
        "T": T,
        "S": S,
        "bits": (scale if softcap is None else softcap) * _LOG2E,
        "inverse": 0.0 if softcap is None else scale / softcap,
    }
    with _on(device):
        common |= _sight(padding_BS, window, causal, S, nothing)
        large: tuple[bool, ...] = ()
        if mask_BHTS is None:
            common |= _no_mask(nothing)
        else:
            even, of_mask = _mask(mask_BHTS, nothing, even=constants["EVEN"])
            common |= of_mask
            constants["EVEN"] = even
            large = tuple([of_mask["mask_stride_" + axis] > LARGEST for axis in "BHTS"])
        common |= constants
        types = (device.index, dtype, common["mask"].dtype, *constants.values())

        real_rows = nothing if rows_BT is None else rows_BT.contiguous().view(torch.int8)

        def over_rows(by: Blocks) -> None:
            # Masses on the first and last keys need all keys in one program.
            shared = by.outer < TILE and not masses
            down = _ceil_div(T, by.outer)
            span = _keys_of_a_part(S, by.inner, down * B * H) if shared else S
            count = _ceil_div(S, span)
            parts = logsumexp if count == 1 else torch.empty(count, SUMS, B, H, T, **like)
            _launch_rows(
                (down, B * H, count),
                (*types, *large, by, masses, count > 1),
                {
                    **common,
                    "entropy": entropy,
                    "first_mass": logsumexp if first_mass is None else first_mass,
                    "last_mass": logsumexp if last_mass is None else last_mass,
                    "first": min(first or 0, S),
                    "last": min(last or 0, S),
                    "real_rows": real_rows,
                    "has_rows": int(rows_BT is not None),
                    "level_out": level,
                    "reference_out": reference,
                    "parts": parts,
                    "span": span,
                    "MASSES": masses or (general and count == 1),
                    "PARTS": count > 1,
                    "BLOCK_T": by.outer,
                    "BLOCK_S": by.inner,
                },
                by.options,
            )
            if count > 1:
                _join(parts, (logsumexp, entropy, level, reference), constants["MASK"])

        def over_keys(by: Blocks) -> None:
            _launch_columns(
                (_ceil_div(S, by.outer), B * H, 1),
                (*types, *large, by),
                {
                    **common,
                    "logsumexp": level,
                    "received": mass_received,
                    "reference": reference,
                    "BLOCK_T": by.inner,
                    "BLOCK_S": by.outer,
                },
                by.options,
            )

        _rows_fit.launch((types, masses), ways(dtype, constants["BLOCK_D"], B * H, T), over_rows)
        if received:
            _columns_fit.launch(types, ways(dtype, constants["BLOCK_D"]), over_keys)
    return [logsumexp, entropy, first_mass, last_mass, mass_received]


def _keys_of_a_part(S: int, inner: int, programs: int) -> int:
    """Return how many keys a program has where few programs would have all: S where they suffice.

    Args:
        S: Number of keys.
        inner: Keys of a block, of which a program has two or more.
        programs: Number of programs that would each have all keys.
    """
    count = max(1, min(MOST_PARTS, _PROGRAMS // programs, S // (2 * inner)))
    return S if count == 1 else _ceil_div(_ceil_div(S, inner), count) * inner


def _join(parts: Tensor, out: tuple[Tensor, Tensor, Tensor, Tensor], mask: int) -> None:
    """Add up what programs that share keys found; `out` is what `row_kernel` writes otherwise."""
    count, rows = len(parts), parts[0, 0].numel()
    names = ("logsumexp", "entropy", "level_out", "reference_out")
    arguments: dict[str, Any] = {
        "parts": parts,
        **dict(zip(names, out, strict=True)),
        "rows": rows,
        "count": count,
        "MASK": mask,
        "PARTS": 1 << (count - 1).bit_length(),
        "BLOCK": TILE,
    }
    kind = (parts.device.index, mask, arguments["PARTS"])
    _launch_join((_ceil_div(rows, TILE), 1, 1), kind, arguments, {})


def ways(
    dtype: torch.dtype, head: int, heads: int | None = None, rows: int = 0
) -> tuple[Blocks, ...]:
    """Blocks that were fastest of those tried where it matters, then such as take less of a GPU.

    Args:
        dtype: Type of queries and keys.
        head: Head size, rounded up to a power of two.
        heads: Heads of all sequences together, or None for the kernel over keys.
        rows: Rows of each.
    """
    if heads is None:
        return _ways_over_keys(dtype, head)
    few = dtype == torch.float32 and _ceil_div(rows, TILE) * heads < _FEW_PROGRAMS
    return _ways_over_rows(dtype, head, few=few or rows <= _FEW_ROWS)


@functools.cache
def _ways_over_rows(dtype: torch.dtype, head: int, *, few: bool) -> tuple[Blocks, ...]:
    smallest = Blocks(_FEW_ROWS, 32, stages=1)
    if few:
        inner = max(32, min(256, 2**14 // head))
        return Blocks(_FEW_ROWS, inner, warps=8 if inner > 64 else 4), smallest
    return _usual(dtype, head), Blocks(32, 32, stages=1), smallest


@functools.cache
def _ways_over_keys(dtype: torch.dtype, head: int) -> tuple[Blocks, ...]:
    return _usual(dtype, head), Blocks(32, 16, stages=1)


def _usual(dtype: torch.dtype, head: int) -> Blocks:
    if dtype == torch.float32 or head > 128:
        return Blocks(TILE, 32)
    return Blocks(TILE, 128 if head <= 64 else 64, stages=3)


def _ceil_div(size: int, of: int) -> int:
    """Return size / of, rounded up; Triton's own function takes longer than an allocation."""
    return -(-size // of)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Return what makes a GPU the current one, on which Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


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
        arguments = {"padding": real, "extent": extent, "S": S, "BLOCK": 1024}
        _launch_padding((len(real), 1, 1), (real.device.index,), arguments, {})
        found |= {"padding": real, "extent": extent, "padded": 1}
    return found


class _Strides(NamedTuple):
    """Strides of a mask, 0 along axes that it does not have."""

    B: int
    H: int
    T: int
    S: int


def _no_mask(nothing: Tensor) -> dict[str, Any]:
    none = {"mask": nothing, "tiles": nothing, "tiled": 0, "mask_rows": 1, "lowest": 0.0}
    strides = _strides("mask_stride_", "BHTS", (0, 0, 0, 0))
    return none | strides | _strides("tile_stride_", "BHT", (0, 0, 0))


def _mask(mask_BHTS: Tensor, nothing: Tensor, *, even: bool) -> tuple[bool, dict[str, Any]]:
    """The mask and its tiles for the general kernel, and whether it is aligned; it is not repeated.

    Numbers are read where they lie; of a boolean mask the kernel gets its bits.
    """
    numbers = mask_BHTS.dtype != torch.bool
    lowest = lowest_seen(mask_BHTS) if numbers else 0.0
    mask = mask_BHTS if numbers else mask_BHTS.view(torch.int8)
    B, H, T, S = mask.shape
    stride = _Strides(
        *[it if size > 1 else 0 for it, size in zip(mask.stride(), mask.shape, strict=True)]
    )
    rows = T if stride.T else 1
    B, H = B if stride.B else 1, H if stride.H else 1
    aligned = even and stride.S == 1 and not mask.data_ptr() % 16
    aligned = aligned and not (stride.B % 16 or stride.H % 16 or stride.T % 16)
    found: dict[str, Any] = {"mask": mask, "mask_rows": rows, "lowest": lowest, "tiled": 1}
    down, across = _ceil_div(rows, TILE), _ceil_div(S, TILE)
    if numbers and B * H * rows * S <= _FEW_ENTRIES:
        of_tiles = {"tiles": nothing, "tiled": 0, **_strides("tile_stride_", "BHT", (0, 0, 0))}
        return aligned, found | of_tiles | _strides("mask_stride_", "BHTS", stride)
    tiles = torch.empty(B, H, down, across, dtype=torch.int8, device=mask.device)
    size = B * H * rows * across * (TILE // 32)
    words = tiles if numbers else torch.empty(size, dtype=torch.int32, device=mask.device)
    arguments = {
        "mask": mask,
        "tiles": tiles,
        "words": words,
        **_strides("stride_", "BHTS", stride),
        "heads": H,
        "T": rows,
        "S": S,
        "down": down,
        "lowest": lowest,
        "NUMBERS": numbers,
        "EVEN": aligned,
        "TILE": TILE,
    }
    large = [it > LARGEST for it in stride]
    kind: tuple[Hashable, ...] = (mask.device.index, mask.dtype, aligned, *large)
    _launch_tiles((B * H * down * across, 1, 1), kind, arguments, {})
    if not numbers:
        found["mask"], aligned = words, even
        stride = _Strides(*_broadcast(B, H, rows, across * (TILE // 32)), 1)
    found |= _strides("tile_stride_", "BHT", _broadcast(B, H, down, across))
    return aligned, found | {"tiles": tiles} | _strides("mask_stride_", "BHTS", stride)


def _broadcast(B: int, H: int, rows: int, size: int) -> tuple[int, int, int]:
    """Return the strides of sequences, heads and rows, 0 along axes of length 1."""
    return size * rows * H if B > 1 else 0, size * rows if H > 1 else 0, size if rows > 1 else 0


def _strides(name: str, axes: str, values: tuple[int, ...]) -> dict[str, int]:
    return {name + axis: it for axis, it in zip(axes, values, strict=True)}

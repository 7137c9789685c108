"""Row statistics of softmax attention on a GPU, in one pass over the keys (Triton).

With x = s·log₂e the scores in bits and m their running maximum, a block of keys adds to

    l = Σ 2^(x−m),    a = Σ 2^(x−m)·(x − m) ≤ 0,

from which log₂-sum-exp = m + log₂ l and the entropy is log₂ l − a/l bits: no large number is
subtracted from a large number, however peaked the row. A new maximum m' rescales l by 2^(m−m') and
a to 2^(m−m')·(a + (m − m')·l). Nothing of size T × S is stored.

Mass on the first and the last keys is added up afterwards, over the few blocks that hold them; mass
a key receives needs every row's log-sum-exp first, so it is a second pass, keys outside and queries
inside: no atomics, the same input gives the same bits.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = 1.4426950408889634
HEAD_SIZES = (16, 256)
"""Least and greatest head size the kernel takes."""
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes(query: Tensor, key: Tensor) -> bool:
    """Whether the kernel takes such queries and keys: on a GPU, of a usual type and head size."""
    return (
        query.is_cuda
        and query.dtype in _TYPES
        and key.dtype == query.dtype
        and HEAD_SIZES[0] <= query.shape[-1] <= HEAD_SIZES[1]
        and query.shape[-2] > 0
        and key.shape[-2] > 0
    )


def statistics(
    query_BHTD: Tensor,
    key_BHSD: Tensor,
    *,
    scale: float,
    causal: bool,
    padding_BS: Tensor | None = None,
    window: int | None = None,
    first: int | None = None,
    last: int | None = None,
    received: bool = False,
) -> list[Tensor | None]:
    """Log-sum-exp, entropy, mass on the first and last keys, mass received; None where not asked.

    All in float32, (B, H, T), mass received (B, H, S). The arguments are those of
    `joma.probes.attention_statistics`, checked there.
    """
    if scale < 0:  # the kernel takes the greatest score of a block before it scales
        query_BHTD, scale = -query_BHTD, -scale
    query_BHTD, key_BHSD = _rows_contiguous(query_BHTD), _rows_contiguous(key_BHSD)
    B, H, T, D = query_BHTD.shape
    Hk, S = key_BHSD.shape[1], key_BHSD.shape[2]
    shape, like = (B, H, T), {"dtype": torch.float32, "device": query_BHTD.device}
    logsumexp_BHT = torch.empty(shape, **like)
    entropy_BHT = torch.empty(shape, **like)
    first_BHT = None if first is None else torch.empty(shape, **like)
    last_BHT = None if last is None else torch.empty(shape, **like)
    received_BHS = torch.empty((B, H, S), **like) if received else None
    if padding_BS is not None:
        padding_BS = padding_BS.to(torch.int8).contiguous()
    common: dict[str, Any] = {
        "heads": H,
        "group": H // Hk,
        "T": T,
        "S": S,
        "bits": scale * _LOG2E,
        "window": 0 if window is None else window,
        "D": D,
        "CAUSAL": causal,
        "WINDOWED": window is not None,
        "PADDED": padding_BS is not None,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "PRECISION": "tf32x3" if query_BHTD.dtype == torch.float32 else "tf32",
    }
    outer, inner, launch = _blocks(query_BHTD.dtype, common["BLOCK_D"])
    # An output that is not wanted needs an address all the same; it is never written.
    _row_kernel[(triton.cdiv(T, outer), B * H)](
        query_BHTD,
        key_BHSD,
        padding_BS if padding_BS is not None else logsumexp_BHT,
        logsumexp_BHT,
        entropy_BHT,
        first_BHT if first_BHT is not None else logsumexp_BHT,
        last_BHT if last_BHT is not None else logsumexp_BHT,
        *query_BHTD.stride()[:3],
        *key_BHSD.stride()[:3],
        first=first or 0,
        last=last or 0,
        FIRST=first is not None,
        LAST=last is not None,
        BLOCK_T=outer,
        BLOCK_S=inner,
        **common,
        **launch,
    )
    if received_BHS is not None:
        _column_kernel[(triton.cdiv(S, outer), B * H)](
            query_BHTD,
            key_BHSD,
            padding_BS if padding_BS is not None else logsumexp_BHT,
            logsumexp_BHT,
            received_BHS,
            *query_BHTD.stride()[:3],
            *key_BHSD.stride()[:3],
            BLOCK_T=inner,
            BLOCK_S=outer,
            **common,
            **launch,
        )
    return [logsumexp_BHT, entropy_BHT, first_BHT, last_BHT, received_BHS]


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _blocks(dtype: torch.dtype, head: int) -> tuple[int, int, dict[str, int]]:
    """Outer and inner block: what was fastest of those tried where it matters, else what fits."""
    if dtype == torch.float32 or head > 128:
        return 64, 32, {"num_warps": 4, "num_stages": 2}
    return 64, 128 if head <= 64 else 64, {"num_warps": 4, "num_stages": 3}


@triton.jit
def _visible(
    position_T,
    key_S,
    padding,
    S,
    window,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Which keys a query sees, (T, S); `position` is a query's place among the keys."""
    visible = (key_S < S)[None, :]
    if PADDED:
        visible &= (tl.load(padding + key_S, mask=key_S < S, other=0) != 0)[None, :]
    if CAUSAL:
        visible &= key_S[None, :] <= position_T[:, None]
    if WINDOWED:
        visible &= key_S[None, :] > position_T[:, None] - window
        if not CAUSAL:
            visible &= key_S[None, :] < position_T[:, None] + window
    return visible


@triton.jit
def _key_block(key, key_S, stride, S, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys of a block, transposed: (D, S)."""
    feature = tl.arange(0, BLOCK_D)
    # 64-bit: place × stride passes 2³¹ beyond 524,288 keys at stride 4096
    address = key + key_S.to(tl.int64)[None, :] * stride + feature[:, None]
    if D == BLOCK_D:
        return tl.load(address, mask=(key_S < S)[None, :], other=0.0)
    return tl.load(address, mask=(key_S < S)[None, :] & (feature < D)[:, None], other=0.0)


@triton.jit
def _rows_of(query, position, stride, T, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a block: (T, D)."""
    feature = tl.arange(0, BLOCK_D)
    address = query + position.to(tl.int64)[:, None] * stride + feature[None, :]
    if D == BLOCK_D:
        return tl.load(address, mask=(position < T)[:, None], other=0.0)
    return tl.load(address, mask=(position < T)[:, None] & (feature < D)[None, :], other=0.0)


@triton.jit
def _add_keys(
    low,
    high,
    most,
    total,
    moment,
    query_TD,
    key,
    padding,
    position_T,
    stride,
    S,
    window,
    bits,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the keys from `low` to `high` to maximum, sum and moment of each row."""
    for start in range(low, high, BLOCK_S):
        key_S = start + tl.arange(0, BLOCK_S)
        key_DS = _key_block(key, key_S, stride, S, D, BLOCK_D)
        score_TS = tl.dot(query_TD, key_DS, input_precision=PRECISION)
        if MASKED:
            visible = _visible(position_T, key_S, padding, S, window, CAUSAL, WINDOWED, PADDED)
            score_TS = tl.where(visible, score_TS * bits, float("-inf"))
            new = tl.maximum(most, tl.max(score_TS, 1))
            # A row that has seen no key yet has maximum −inf; −inf − 0 keeps it so without a NaN.
            base = tl.where(new == float("-inf"), 0.0, new)
            over_TS = score_TS - base[:, None]
            weight_TS = tl.exp2(over_TS)
            rise = tl.where(most == float("-inf"), 0.0, most - base)
            kept = tl.where(most == float("-inf"), 0.0, tl.exp2(rise))
            product_TS = tl.where(visible, weight_TS * over_TS, 0.0)
        else:
            new = tl.maximum(most, tl.max(score_TS, 1) * bits)
            over_TS = score_TS * bits - new[:, None]
            weight_TS = tl.exp2(over_TS)
            rise = tl.where(most == float("-inf"), 0.0, most - new)
            kept = tl.where(most == float("-inf"), 0.0, tl.exp2(rise))
            product_TS = weight_TS * over_TS
        moment = kept * (moment + rise * total) + tl.sum(product_TS, 1)
        total = kept * total + tl.sum(weight_TS, 1)
        most = new
    return most, total, moment


@triton.jit
def _mass(
    low,
    high,
    least_T,
    most_T,
    level_T,
    query_TD,
    key,
    padding,
    position_T,
    stride,
    S,
    window,
    bits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each row's probability on its keys from `least` to `most`, all in blocks `low` to `high`."""
    mass = tl.zeros_like(level_T)
    for start in range(low, high, BLOCK_S):
        key_S = start + tl.arange(0, BLOCK_S)
        key_DS = _key_block(key, key_S, stride, S, D, BLOCK_D)
        score_TS = tl.dot(query_TD, key_DS, input_precision=PRECISION) * bits
        visible = _visible(position_T, key_S, padding, S, window, CAUSAL, WINDOWED, PADDED)
        visible &= (key_S[None, :] >= least_T[:, None]) & (key_S[None, :] <= most_T[:, None])
        mass += tl.sum(tl.where(visible, tl.exp2(score_TS - level_T[:, None]), 0.0), 1)
    return mass


@triton.jit
def _row_kernel(
    query,
    key,
    padding,
    logsumexp,
    entropy,
    first_mass,
    last_mass,
    query_stride_B,
    query_stride_H,
    query_stride_T,
    key_stride_B,
    key_stride_H,
    key_stride_S,
    heads,
    group,
    T,
    S,
    bits,
    window,
    first,
    last,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    # Late queries see the most keys: they go first, so that no long block is left to the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query += batch.to(tl.int64) * query_stride_B + head.to(tl.int64) * query_stride_H
    key += batch.to(tl.int64) * key_stride_B + (head // group).to(tl.int64) * key_stride_H
    padding += batch.to(tl.int64) * S
    row_T = block * BLOCK_T + tl.arange(0, BLOCK_T)
    position_T = row_T + (S - T)
    query_TD = _rows_of(query, row_T, query_stride_T, T, D, BLOCK_D)

    # Keys some row of the block sees, and inside them the keys all of its rows see.
    top = block * BLOCK_T + (S - T)
    low, high = 0, S
    if CAUSAL:
        high = tl.maximum(tl.minimum(S, top + BLOCK_T), 0)
    if WINDOWED:
        low = tl.maximum(top - window + 1, 0) // BLOCK_S * BLOCK_S
        if not CAUSAL:
            high = tl.minimum(S, tl.maximum(top + BLOCK_T - 1 + window, 0))
    full_low, full_high = low, high
    if PADDED:
        full_high = full_low
    else:
        if CAUSAL:
            full_high = tl.minimum(full_high, tl.maximum(top + 1, 0))
        if WINDOWED:
            full_low = tl.maximum(top + BLOCK_T - window, 0)
            full_low = (full_low + BLOCK_S - 1) // BLOCK_S * BLOCK_S
            if not CAUSAL:
                full_high = tl.minimum(full_high, tl.maximum(top + window, 0))
        full_high = full_high // BLOCK_S * BLOCK_S
        full_high = tl.maximum(full_high, low)
        full_low = tl.minimum(tl.maximum(full_low, low), full_high)

    most = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    moment = tl.zeros([BLOCK_T], tl.float32)
    if WINDOWED:
        most, total, moment = _add_keys(
            low, full_low, most, total, moment, query_TD, key, padding, position_T, key_stride_S,
            S, window, bits, True, D, BLOCK_D, BLOCK_S, CAUSAL, WINDOWED, PADDED, PRECISION,
        )  # fmt: skip
    most, total, moment = _add_keys(
        full_low, full_high, most, total, moment, query_TD, key, padding, position_T, key_stride_S,
        S, window, bits, False, D, BLOCK_D, BLOCK_S, CAUSAL, WINDOWED, PADDED, PRECISION,
    )  # fmt: skip
    most, total, moment = _add_keys(
        full_high, high, most, total, moment, query_TD, key, padding, position_T, key_stride_S,
        S, window, bits, True, D, BLOCK_D, BLOCK_S, CAUSAL, WINDOWED, PADDED, PRECISION,
    )  # fmt: skip

    seen = total > 0
    level = most + tl.log2(total)
    out = tl.program_id(1).to(tl.int64) * T + row_T
    inside = row_T < T
    ln2: tl.constexpr = 0.6931471805599453
    tl.store(logsumexp + out, tl.where(seen, level * ln2, float("-inf")), mask=inside)
    bits_of_row = tl.log2(total) - moment / total
    tl.store(entropy + out, tl.where(seen, bits_of_row * ln2, 0.0), mask=inside)
    level = tl.where(seen, level, float("inf"))
    if FIRST:
        start_T = tl.zeros_like(position_T)
        mass = _mass(
            low, tl.minimum(high, first), start_T, start_T + first - 1, level, query_TD,
            key, padding, position_T, key_stride_S, S, window, bits, D, BLOCK_D, BLOCK_S, CAUSAL,
            WINDOWED, PADDED, PRECISION,
        )  # fmt: skip
        tl.store(first_mass + out, mass, mask=inside)
    if LAST:
        start = tl.maximum(tl.maximum(top - last + 1, 0) // BLOCK_S * BLOCK_S, low)
        mass = _mass(
            start, tl.minimum(high, tl.maximum(top + BLOCK_T, 0)), position_T - last + 1,
            position_T, level, query_TD, key, padding, position_T, key_stride_S, S, window, bits,
            D, BLOCK_D, BLOCK_S, CAUSAL, WINDOWED, PADDED, PRECISION,
        )  # fmt: skip
        tl.store(last_mass + out, mass, mask=inside)


@triton.jit
def _add_queries(
    low,
    high,
    mass,
    key_SD,
    query,
    padding,
    logsumexp,
    key_S,
    stride,
    T,
    S,
    window,
    bits,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds what the queries from `low` to `high` give to each key of the block."""
    log2e: tl.constexpr = 1.4426950408889634
    for start in range(low, high, BLOCK_T):
        row_T = start + tl.arange(0, BLOCK_T)
        query_DT = _key_block(query, row_T, stride, T, D, BLOCK_D)
        level_T = tl.load(logsumexp + row_T, mask=row_T < T, other=float("inf")) * log2e
        score_ST = tl.dot(key_SD, query_DT, input_precision=PRECISION)
        if MASKED:
            level_T = tl.where(level_T == float("-inf"), float("inf"), level_T)
            weight_ST = tl.exp2(score_ST * bits - level_T[None, :])
            visible_TS = _visible(
                row_T + (S - T), key_S, padding, S, window, CAUSAL, WINDOWED, PADDED
            )
            weight_ST = tl.where(tl.trans(visible_TS), weight_ST, 0.0)
        else:
            weight_ST = tl.exp2(score_ST * bits - level_T[None, :])
        mass += tl.sum(weight_ST, 1)
    return mass


@triton.jit
def _column_kernel(
    query,
    key,
    padding,
    logsumexp,
    received,
    query_stride_B,
    query_stride_H,
    query_stride_T,
    key_stride_B,
    key_stride_H,
    key_stride_S,
    heads,
    group,
    T,
    S,
    bits,
    window,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    block = tl.program_id(0)  # early keys are seen by the most queries: they go first
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query += batch.to(tl.int64) * query_stride_B + head.to(tl.int64) * query_stride_H
    key += batch.to(tl.int64) * key_stride_B + (head // group).to(tl.int64) * key_stride_H
    padding += batch.to(tl.int64) * S
    logsumexp += tl.program_id(1).to(tl.int64) * T
    key_S = block * BLOCK_S + tl.arange(0, BLOCK_S)
    key_SD = _rows_of(key, key_S, key_stride_S, S, D, BLOCK_D)

    # Queries that see some key of the block, and inside them those that see all of its keys.
    top = block * BLOCK_S - (S - T)
    low, high = 0, T
    if CAUSAL:
        low = tl.maximum(top, 0) // BLOCK_T * BLOCK_T
    if WINDOWED:
        high = tl.minimum(T, tl.maximum(top + BLOCK_S - 1 + window, 0))
        if not CAUSAL:
            low = tl.maximum(top - window + 1, 0) // BLOCK_T * BLOCK_T
    full_low, full_high = low, high
    if PADDED or WINDOWED:
        full_low = full_high
    else:
        if CAUSAL:
            full_low = (tl.maximum(top + BLOCK_S - 1, 0) + BLOCK_T - 1) // BLOCK_T * BLOCK_T
        full_high = T // BLOCK_T * BLOCK_T
        full_low = tl.maximum(tl.minimum(full_low, high), low)
        full_high = tl.maximum(full_high, full_low)

    mass = tl.zeros([BLOCK_S], tl.float32)
    mass = _add_queries(
        low, full_low, mass, key_SD, query, padding, logsumexp, key_S, query_stride_T, T, S,
        window, bits, True, D, BLOCK_D, BLOCK_T, CAUSAL, WINDOWED, PADDED, PRECISION,
    )  # fmt: skip
    mass = _add_queries(
        full_low, full_high, mass, key_SD, query, padding, logsumexp, key_S, query_stride_T, T, S,
        window, bits, False, D, BLOCK_D, BLOCK_T, CAUSAL, WINDOWED, PADDED, PRECISION,
    )  # fmt: skip
    mass = _add_queries(
        full_high, high, mass, key_SD, query, padding, logsumexp, key_S, query_stride_T, T, S,
        window, bits, True, D, BLOCK_D, BLOCK_T, CAUSAL, WINDOWED, PADDED, PRECISION,
    )  # fmt: skip
    out = received + tl.program_id(1).to(tl.int64) * S + key_S
    tl.store(out, mass, mask=key_S < S)

"""One step of a full heavy-hitter cache on the GPU (Triton): write, attend, count, choose.

The first kernel reads every key and value once: parts of a row's slots are attended by programs of
their own, which keep the scores. The second joins the parts, adds what each key received, and finds
the slot to empty. Next to attention alone this adds one write and one read of the scores.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.inference._store import Store
from joma.inference.heavy_hitter import HeavyHitter

_BLOCK = 64
_PROGRAMS = 512
"""How many programs the slots are divided among, at least, where there are so many blocks."""


def heavy_step(
    store: Store,
    policy: HeavyHitter,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    scale: float,
) -> Tensor:
    """Return attention of one token per row over a full store, and empty the next slot.

    Args:
        store: A store with an empty slot in each row and head; `seen` counts the token already.
        policy: What to keep.
        query: (B, H, 1, D).
        keys: (B, Hk, 1, D).
        values: (B, Hk, 1, Dv).
        position: (B, 1), -1 for padding.
        scale: Factor of the products.
    """
    assert store.empty is not None
    assert store.received is not None
    (B, H, _, D), (heads, slots), width = query.shape, store.keys.shape[1:3], values.shape[-1]
    rows, group = B * heads, H // heads
    blocks = triton.cdiv(slots, _BLOCK)
    splits = max(1, min(blocks, triton.cdiv(_PROGRAMS, rows)))
    per_split = triton.cdiv(blocks, splits) * _BLOCK
    splits = triton.cdiv(slots, per_split)
    new = {"dtype": torch.float32, "device": query.device}
    scores = torch.empty(rows, group, slots, **new)
    highest, total = (torch.empty(rows, splits, group, **new) for _ in range(2))
    part = torch.empty(rows, splits, group, width, **new)
    result = torch.empty(B, H, 1, width, dtype=values.dtype, device=query.device)
    # Products of matrices need sixteen rows; one query needs none.
    sizes: dict[str, Any] = {
        "GROUP": group,
        "GROUP_BLOCK": 1 if group == 1 else max(16, triton.next_power_of_2(group)),
        "SLOTS": slots,
        "WIDTH": width,
        "WIDTH_BLOCK": triton.next_power_of_2(width),
    }
    _parts[(rows, splits)](
        query.contiguous(),
        store.keys,
        store.values,
        keys.contiguous(),
        values.contiguous(),
        store.position,
        position,
        store.empty,
        scores,
        highest,
        total,
        part,
        scale,
        heads,
        PER_SPLIT=per_split,
        SIZE=D,
        SIZE_BLOCK=triton.next_power_of_2(D),
        BLOCK=_BLOCK,
        **sizes,
    )
    _joined[(rows,)](
        scores,
        highest,
        total,
        part,
        result,
        store.position,
        store.received,
        store.empty,
        position,
        store.seen,
        heads,
        splits,
        policy.recent,
        policy.retention,
        MEAN=policy.score == "mean",
        SPLITS=triton.next_power_of_2(splits),
        BLOCK=1024,
        **sizes,
    )
    return result


@triton.jit
def _parts(
    query,
    keys,
    values,
    new_keys,
    new_values,
    positions,
    new_positions,
    empties,
    scores,
    highest,
    total,
    part,
    scale,
    heads,
    PER_SPLIT: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    g = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, SIZE_BLOCK)
    w = tl.arange(0, WIDTH_BLOCK)
    asked = tl.load(new_positions + row // heads)
    empty = tl.load(empties + row)
    q = tl.load(
        query + (row * GROUP + g[:, None]) * SIZE + d[None, :],
        mask=(g[:, None] < GROUP) & (d[None, :] < SIZE),
        other=0.0,
    )
    new_key = tl.load(new_keys + row * SIZE + d, mask=d < SIZE, other=0.0)
    new_value = tl.load(new_values + row * WIDTH + w, mask=w < WIDTH, other=0.0)
    best = tl.full((GROUP_BLOCK,), -float("inf"), tl.float32)
    weight = tl.zeros((GROUP_BLOCK,), tl.float32)
    sums = tl.zeros((GROUP_BLOCK, WIDTH_BLOCK), tl.float32)
    for at in range(0, PER_SPLIT, BLOCK):
        c = split * PER_SPLIT + at + tl.arange(0, BLOCK)
        inside = c < SLOTS
        here = c == empty
        position = tl.load(positions + row * SLOTS + c, mask=inside, other=-1)
        position = tl.where(here, asked, position.to(tl.int64))
        tl.store(positions + row * SLOTS + c, position.to(tl.int32), mask=here)
        key = tl.load(
            keys + (row * SLOTS + c[:, None]) * SIZE + d[None, :],
            mask=inside[:, None] & (d[None, :] < SIZE),
            other=0.0,
        )
        key = tl.where(here[:, None], new_key[None, :], key)
        tl.store(
            keys + (row * SLOTS + c[:, None]) * SIZE + d[None, :],
            key,
            mask=here[:, None] & (d[None, :] < SIZE),
        )
        if GROUP_BLOCK == 1:
            product = tl.sum(key.to(tl.float32) * q.to(tl.float32), 1)[None, :]
        else:
            product = tl.dot(q, tl.trans(key), input_precision="ieee")
        # A query that is padding may see anything: its result is not used.
        seen = inside & ((position >= 0) | (asked < 0))
        score = tl.where(seen[None, :], product * scale, -float("inf"))
        tl.store(
            scores + (row * GROUP + g[:, None]) * SLOTS + c[None, :],
            score,
            mask=(g[:, None] < GROUP) & inside[None, :],
        )
        top = tl.maximum(best, tl.max(score, 1))
        safe = tl.where(top == -float("inf"), 0.0, top)
        share = tl.exp(score - safe[:, None])
        old = tl.exp(best - safe)
        value = tl.load(
            values + (row * SLOTS + c[:, None]) * WIDTH + w[None, :],
            mask=inside[:, None] & (w[None, :] < WIDTH),
            other=0.0,
        )
        value = tl.where(here[:, None], new_value[None, :], value)
        tl.store(
            values + (row * SLOTS + c[:, None]) * WIDTH + w[None, :],
            value,
            mask=here[:, None] & (w[None, :] < WIDTH),
        )
        if GROUP_BLOCK == 1:
            added = tl.sum(tl.trans(share) * value.to(tl.float32), 0)[None, :]
        else:
            added = tl.dot(share.to(value.dtype), value, input_precision="ieee")
        sums = sums * old[:, None] + added
        weight = weight * old + tl.sum(share, 1)
        best = top
    place = (row * splits + split) * GROUP + g
    tl.store(highest + place, best, mask=g < GROUP)
    tl.store(total + place, weight, mask=g < GROUP)
    tl.store(
        part + place[:, None] * WIDTH + w[None, :],
        sums,
        mask=(g[:, None] < GROUP) & (w[None, :] < WIDTH),
    )


@triton.jit
def _joined(
    scores,
    highest,
    total,
    part,
    result,
    positions,
    received,
    empties,
    new_positions,
    counts,
    heads,
    splits,
    recent,
    retention,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    MEAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    w = tl.arange(0, WIDTH_BLOCK)
    real = s < splits
    asked = tl.load(new_positions + row // heads)
    seen = tl.load(counts + row // heads)
    empty = tl.load(empties + row)
    fade = tl.where(asked >= 0, retention, 1.0)
    for g in tl.static_range(GROUP):
        place = (row * splits + s) * GROUP + g
        top = tl.load(highest + place, mask=real, other=-float("inf"))
        most = tl.max(top, 0)
        scale = tl.where(real, tl.exp(top - most), 0.0)
        weight = tl.sum(tl.load(total + place, mask=real, other=0.0) * scale, 0)
        sums = tl.load(
            part + place[:, None] * WIDTH + w[None, :],
            mask=real[:, None] & (w[None, :] < WIDTH),
            other=0.0,
        )
        found = tl.sum(sums * scale[:, None], 0) / weight
        tl.store(result + (row * GROUP + g) * WIDTH + w, found, mask=w < WIDTH)
        # What a query gives to the keys follows from its scores and this.
        tl.store(highest + row * splits * GROUP + g, most + tl.log(weight))
    tl.debug_barrier()  # every thread reads what one has stored
    lowest = float("inf")
    chosen = tl.full((), 0, tl.int32)
    for at in range(0, SLOTS, BLOCK):
        c = at + tl.arange(0, BLOCK)
        inside = c < SLOTS
        here = c == empty
        mass = tl.zeros((BLOCK,), tl.float32)
        for g in tl.static_range(GROUP):
            score = tl.load(
                scores + (row * GROUP + g) * SLOTS + c, mask=inside, other=-float("inf")
            )
            mass += tl.exp(score - tl.load(highest + row * splits * GROUP + g))
        before = tl.load(received + row * SLOTS + c, mask=inside, other=0.0)
        after = tl.where(here, 0.0, before) * fade + tl.where(asked >= 0, mass, 0.0)
        tl.store(received + row * SLOTS + c, after, mask=inside)
        position = tl.load(positions + row * SLOTS + c, mask=inside, other=-1).to(tl.int64)
        priority = after
        if MEAN:
            priority = after / tl.maximum(seen - position, 1).to(tl.float32)
        priority = tl.where(position >= seen - recent, float("inf"), priority)
        priority = tl.where(position < 0, -float("inf"), priority)
        priority = tl.where(inside, priority, float("inf"))
        least = tl.min(priority, 0)
        chosen = tl.where(least < lowest, at + tl.argmin(priority, 0), chosen)
        lowest = tl.minimum(least, lowest)
    tl.store(empties + row, chosen.to(tl.int64))
    tl.store(positions + row * SLOTS + chosen, -1)

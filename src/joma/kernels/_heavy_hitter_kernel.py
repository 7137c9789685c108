"""One step of a full heavy-hitter cache on the GPU (Triton): write, attend, count, choose.

The first kernel reads every key and value once: parts of a row's slots are attended by programs of
their own, which keep the scores. The second joins the parts, adds what each key received, and finds
the slot to empty. Next to attention alone this adds one write and one read of the scores, and reads
and writes what was received: 24 bytes for each key of one query head, next to 512 bytes of key and
value (128 numbers each, bfloat16).

Nothing but these two kernels runs in a step: places of tokens are counted in them. No program reads
what another one of the same kernel writes.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 32
"""Slots that a program attends at a time.

With 64, heads of 128 numbers take 210 registers of a thread, so that two programs fit on one of an
H200's multiprocessors; with 32 they take 124, and four fit.
"""
_PROGRAMS = 512
"""How many programs the slots are divided among, at least, where there are so many blocks."""
_SCORES = 4096
"""Scores of the second kernel that a program reads at a time."""


def heavy_hitter_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    seen: Tensor,
    received: Tensor,
    empty: Tensor,
    scale: float,
    recent: int,
    retention: float,
    mean: bool,
) -> Tensor:
    """Return what `joma.kernels.heavy_hitter.heavy_hitter_step` returns; the same arguments."""
    (B, H, _, D), (heads, slots), width = query.shape, keys.shape[1:3], values.shape[-1]
    rows, group = B * heads, H // heads
    blocks = triton.cdiv(slots, _BLOCK)
    splits = max(1, min(blocks, triton.cdiv(_PROGRAMS, rows)))
    per_split = triton.cdiv(blocks, splits) * _BLOCK
    splits = triton.cdiv(slots, per_split)
    new = {"dtype": torch.float32, "device": query.device}
    scores = torch.empty(rows, group, slots, **new)
    highest, total = (torch.empty(rows, splits, group, **new) for _ in range(2))
    part = torch.empty(rows, splits, group, width, **new)
    places = torch.empty(rows, dtype=torch.int64, device=query.device)
    result = torch.empty(B, H, 1, width, dtype=values.dtype, device=query.device)
    groups = triton.next_power_of_2(group)
    sizes: dict[str, Any] = {
        "SLOTS": slots,
        "GROUP": group,
        "WIDTH": width,
        "WIDTH_BLOCK": triton.next_power_of_2(width),
    }
    _attend_slots[(rows, splits)](
        query.contiguous(),
        keys,
        values,
        key.contiguous(),
        value.contiguous(),
        position,
        seen,
        seen if real is None else real.contiguous(),
        empty,
        places,
        scores,
        highest,
        total,
        part,
        scale,
        heads,
        PADDED=real is not None,
        PER_SPLIT=per_split,
        # Products of matrices need sixteen rows and columns; one query needs none.
        GROUP_BLOCK=1 if group == 1 else max(16, groups),
        SIZE=D,
        SIZE_BLOCK=max(16, triton.next_power_of_2(D)),
        BLOCK=_BLOCK,
        # Blocks of matrix products are loaded ahead; one query has enough in flight without.
        STAGES=1 if group == 1 else 3,
        **sizes,
    )
    read = max(64, min(_SCORES, triton.next_power_of_2(slots)) // groups)
    _join_and_choose[(rows,)](
        scores,
        highest,
        total,
        part,
        result,
        position,
        received,
        empty,
        places,
        seen,
        heads,
        splits,
        recent,
        retention,
        MEAN=mean,
        GROUPS=groups,
        SPLITS=triton.next_power_of_2(splits),
        BLOCK=read,
        num_warps=max(4, min(16, read * groups // 256)),
        **sizes,
    )
    return result


@triton.jit
def _attend_slots(
    query,
    keys,
    values,
    new_keys,
    new_values,
    positions,
    counts,
    reals,
    empties,
    places,
    scores,
    highest,
    total,
    part,
    scale,
    heads,
    PADDED: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    begin = split * PER_SPLIT
    g = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, SIZE_BLOCK)
    w = tl.arange(0, WIDTH_BLOCK)
    asked = tl.load(counts + row // heads)
    if PADDED:
        asked = tl.where(tl.load(reals + row // heads) != 0, asked, -1)
    empty = tl.load(empties + row)
    q = tl.load(
        query + (row * GROUP + g[:, None]) * SIZE + d[None, :],
        mask=(g[:, None] < GROUP) & (d[None, :] < SIZE),
        other=0.0,
    )
    # One query keeps a softmax for each slot of a block, and joins them at the end: within the loop
    # no thread waits for another warp. Several queries are rows of matrix products.
    LANES: tl.constexpr = BLOCK if GROUP_BLOCK == 1 else GROUP_BLOCK
    best = tl.full((LANES,), -float("inf"), tl.float32)
    weight = tl.zeros((LANES,), tl.float32)
    sums = tl.zeros((LANES, WIDTH_BLOCK), tl.float32)
    for at in tl.range(0, PER_SPLIT, BLOCK, num_stages=STAGES):
        c = begin + at + tl.arange(0, BLOCK)
        # The new token comes after the loop, wherever its slot is.
        inside = (c < SLOTS) & (c != empty)
        position = tl.load(positions + row * SLOTS + c, mask=inside, other=-1)
        key = tl.load(
            keys + (row * SLOTS + c[:, None]) * SIZE + d[None, :],
            mask=(c[:, None] < SLOTS) & (d[None, :] < SIZE),
            other=0.0,
        )
        value = tl.load(
            values + (row * SLOTS + c[:, None]) * WIDTH + w[None, :],
            mask=(c[:, None] < SLOTS) & (w[None, :] < WIDTH),
            other=0.0,
        )
        seen = inside & (position >= 0)
        if GROUP_BLOCK == 1:
            score = tl.sum(key.to(tl.float32) * q.to(tl.float32), 1) * scale
            score = tl.where(seen, score, -float("inf"))
            tl.store(scores + row * SLOTS + c, score, mask=inside)
            top = tl.maximum(best, score)
            safe = tl.where(top == -float("inf"), 0.0, top)
            share = tl.exp(score - safe)
            old = tl.exp(best - safe)
            sums = sums * old[:, None] + share[:, None] * value.to(tl.float32)
            weight = weight * old + share
        else:
            product = tl.dot(q, tl.trans(key), input_precision="ieee")
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
            added = tl.dot(share.to(value.dtype), value, input_precision="ieee")
            sums = sums * old[:, None] + added
            weight = weight * old + tl.sum(share, 1)
        best = top
    if GROUP_BLOCK == 1:
        most = tl.max(best, 0)
        factor = tl.exp(best - tl.where(most == -float("inf"), 0.0, most))
        weight = tl.sum(weight * factor, 0) + tl.zeros((GROUP_BLOCK,), tl.float32)
        sums = tl.sum(sums * factor[:, None], 0)[None, :]
        best = most + tl.zeros((GROUP_BLOCK,), tl.float32)
    # The program that has the empty slot reads the new token, and writes it there.
    own = (empty >= begin) & (empty < begin + PER_SPLIT)
    new_key = tl.load(new_keys + row * SIZE + d, mask=d < SIZE, other=0.0)
    new_value = tl.load(new_values + row * WIDTH + w, mask=w < WIDTH, other=0.0)
    score = tl.sum(q.to(tl.float32) * new_key[None, :].to(tl.float32), 1) * scale
    score = tl.where(own, score, -float("inf"))
    top = tl.maximum(best, score)
    safe = tl.where(top == -float("inf"), 0.0, top)
    share = tl.exp(score - safe)
    old = tl.exp(best - safe)
    sums = sums * old[:, None] + share[:, None] * new_value[None, :].to(tl.float32)
    weight = weight * old + share
    slot = row * SLOTS + empty
    tl.store(scores + (row * GROUP + g) * SLOTS + empty, score, mask=own & (g < GROUP))
    tl.store(positions + slot, asked.to(tl.int32), mask=own)
    tl.store(keys + slot * SIZE + d, new_key, mask=own & (d < SIZE))
    tl.store(values + slot * WIDTH + w, new_value, mask=own & (w < WIDTH))
    tl.store(places + row, asked, mask=split == 0)
    place = (row * splits + split) * GROUP + g
    tl.store(highest + place, top, mask=g < GROUP)
    tl.store(total + place, weight, mask=g < GROUP)
    tl.store(
        part + place[:, None] * WIDTH + w[None, :],
        sums,
        mask=(g[:, None] < GROUP) & (w[None, :] < WIDTH),
    )


@triton.jit
def _join_and_choose(
    scores,
    highest,
    total,
    part,
    result,
    positions,
    received,
    empties,
    places,
    counts,
    heads,
    splits,
    recent,
    retention,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    MEAN: tl.constexpr,
):
    SPLIT_BLOCK: tl.constexpr = SPLITS if SPLITS < 16 else 16
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GROUPS)
    s = tl.arange(0, SPLITS)
    w = tl.arange(0, WIDTH_BLOCK)
    empty = tl.load(empties + row)
    asked = tl.load(places + row)
    # The count of a row with a token is read nowhere, since one of its heads raises it here.
    seen = tl.load(counts + row // heads, mask=asked < 0, other=0)
    seen = tl.where(asked >= 0, asked + 1, seen)
    tl.store(counts + row // heads, asked + 1, mask=(asked >= 0) & (row % heads == 0))
    place = (row * splits + s[:, None]) * GROUP + g[None, :]
    real = (s[:, None] < splits) & (g[None, :] < GROUP)
    top = tl.load(highest + place, mask=real, other=-float("inf"))
    most = tl.where(g < GROUP, tl.max(top, 0), 0.0)
    parts = tl.load(total + place, mask=real, other=0.0) * tl.exp(top - most[None, :])
    # What a query gives to a key is the exponential of its score less this.
    level = tl.where(g < GROUP, most + tl.log(tl.sum(parts, 0)), 0.0)
    for query in tl.static_range(GROUP):
        own = tl.sum(tl.where(g == query, level, 0.0), 0)
        found = tl.zeros((WIDTH_BLOCK,), tl.float32)
        for at in range(0, SPLITS, SPLIT_BLOCK):
            p = at + tl.arange(0, SPLIT_BLOCK)
            here = (row * splits + p) * GROUP + query
            share = tl.exp(tl.load(highest + here, mask=p < splits, other=-float("inf")) - own)
            sums = tl.load(
                part + here[:, None] * WIDTH + w[None, :],
                mask=(p[:, None] < splits) & (w[None, :] < WIDTH),
                other=0.0,
            )
            found += tl.sum(sums * share[:, None], 0)
        tl.store(result + (row * GROUP + query) * WIDTH + w, found, mask=w < WIDTH)
    fade = tl.where(asked >= 0, retention, 1.0)
    lowest = float("inf")
    chosen = tl.full((), 0, tl.int32)
    for at in range(0, SLOTS, BLOCK):
        c = at + tl.arange(0, BLOCK)
        inside = c < SLOTS
        score = tl.load(
            scores + (row * GROUP + g[:, None]) * SLOTS + c[None, :],
            mask=(g[:, None] < GROUP) & inside[None, :],
            other=-float("inf"),
        )
        mass = tl.sum(tl.exp(score - level[:, None]), 0)
        before = tl.load(received + row * SLOTS + c, mask=inside, other=0.0)
        before = tl.where(c == empty, 0.0, before)
        after = before * fade + tl.where(asked >= 0, mass, 0.0)
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

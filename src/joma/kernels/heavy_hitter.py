"""Attention that counts what each key receives, and a decoding step of a heavy-hitter cache.

`scored_attention` is torch's alone. `heavy_hitter_step` is one kernel launch after another on a
GPU, and the same in torch elsewhere.
"""

import torch
from torch import Tensor

from joma.kernels.choice import has_kernels


def scored_attention(
    scores: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    *,
    softcap: float | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return attention of scores that are in memory, and what each key received.

    Args:
        scores: (B, H, T, C), the scaled products.
        value: (B, Hk, C, Dv).
        allowed: (B, 1 or Hk, T, C), bool; None if every key is seen.
        softcap: c, for scores c·tanh(score / c).
        weight: (B, T), how much each query counts in what keys receive; None if that is not wanted.

    Returns:
        (B, H, T, Dv), and (B, Hk, C) in float32 or None.
    """
    (B, H, T, C), heads = scores.shape, value.shape[1]
    scores = scores.reshape(B, heads, H // heads, T, C)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if allowed is not None:
        scores = scores.masked_fill(~allowed[:, :, None], torch.finfo(scores.dtype).min)
    work = torch.promote_types(scores.dtype, torch.float32)
    share = scores.softmax(-1, dtype=work)
    result = share.to(value.dtype).reshape(B, heads, -1, C) @ value
    received = None
    if weight is not None:
        received = torch.einsum("bhgtc,bt->bhc", share, weight.to(work)).float()
    return result.reshape(B, H, T, -1), received


def products(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return the scaled products of queries, (B, H, T, D), and keys, (B, Hk, C, D)."""
    (B, H, T, D), heads = query.shape, key.shape[1]
    rows = query.reshape(B, heads, (H // heads) * T, D)  # heads that share a key read it once
    return (rows @ key.mT * scale).reshape(B, H, T, -1)


def heavy_hitter_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    *,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    seen: Tensor,
    received: Tensor,
    empty: Tensor,
    scale: float,
    recent: int,
    retention: float = 1.0,
    mean: bool = False,
) -> Tensor:
    """Return attention of one token per row over a full store, count it, and choose what goes.

    The token is written into the empty slot of each row and head; afterwards the slot of lowest
    priority is empty. Everything is changed in place.

    Args:
        query: (B, H, 1, D).
        key: (B, Hk, 1, D).
        value: (B, Hk, 1, Dv).
        real: (B, 1), bool, False for padding; None if there is none.
        keys: (B, Hk, C, D), what is held.
        values: (B, Hk, C, Dv).
        position: (B, Hk, C), int32, place of each token in its row, -1 for an empty slot.
        seen: (B,), int64, tokens of each row.
        received: (B, Hk, C), float32, attention received.
        empty: (B, Hk), int64, the slot of the new token, then that of what goes.
        scale: Factor of the products.
        recent: How many last tokens stay whatever they received.
        retention: Share of the attention received that is left after each token.
        mean: Whether priority is the average over the queries that could see a key.
    """
    if query.dtype != torch.float64 and has_kernels(query.device):
        from joma.kernels import _heavy_hitter_kernel  # Triton comes with CUDA builds alone

        held = (keys, values, position, seen, received, empty)
        how = (scale, recent, retention, mean)
        with torch.cuda.device_of(query):
            return _heavy_hitter_kernel.heavy_hitter_step(query, key, value, real, *held, *how)
    real = torch.ones_like(seen, dtype=torch.bool) if real is None else real[:, 0]
    slot = empty[..., None]
    place = torch.where(real, seen, -1).to(position.dtype)
    position.scatter_(2, slot, place[:, None, None].expand_as(slot))
    received.scatter_(2, slot, 0.0)
    keys.scatter_(2, slot[..., None].expand_as(key), key)
    values.scatter_(2, slot[..., None].expand_as(value), value)
    allowed = (position >= 0) | ~real[:, None, None]
    result, mass = scored_attention(
        products(query, keys, scale), values, allowed[:, :, None], weight=real[:, None].float()
    )
    assert mass is not None
    seen += real
    received *= torch.where(real, retention, 1.0)[:, None, None]
    received += mass
    count = seen[:, None, None]
    priority = received / (count - position).clamp(min=1) if mean else received
    priority = priority.masked_fill(position >= count - recent, torch.inf)
    empty.copy_(priority.masked_fill(position < 0, -torch.inf).argmin(2))
    position.scatter_(2, empty[..., None], -1)
    return result

"""Attention of some queries over the keys of a cache, and the attention each key receives."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK_BYTES = 64 * 2**20
"""Scores, or a mask of scores, that are held at a time."""


@dataclass(frozen=True)
class Scoring:
    """How a model's scores are made.

    Attributes:
        scale: Factor of the products of queries and keys; None for 1/√D.
        softcap: c, where scores are c·tanh(score / c).
        written_out: Whether softmax is computed on scores in memory, as eager attention does.
    """

    scale: float | None = None
    softcap: float | None = None
    written_out: bool = False


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Return attention of a text's tokens over themselves, (B, H, T, Dv), without any mask."""
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=query.shape[2] > 1,
        scale=scoring.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scoring: Scoring
) -> Tensor:
    """Return attention over the keys each query may see, (B, H, T, Dv).

    Args:
        query: (B, H, T, D).
        key: (B, Hk, C, D).
        value: (B, Hk, C, Dv).
        allowed: (B, 1 or Hk, T, C), bool; None if every key is seen.
        scoring: How scores are made; `written_out` and `softcap` do not apply here.
    """
    (B, H, T, _), heads = query.shape, key.shape[1]
    if T == 1:  # query heads that share a key become rows, so that keys are read once
        query = query.reshape(B, heads, H // heads, -1)
        found = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=scoring.scale
        )
        return found.reshape(B, H, 1, -1)
    if allowed is not None and allowed.shape[1] > 1:
        allowed = allowed.repeat_interleave(H // heads, 1)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, scale=scoring.scale, enable_gqa=heads != H
    )


def written_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    scoring: Scoring,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return attention with its scores written out, and what each key received.

    Args:
        query: (B, H, T, D).
        key: (B, Hk, C, D).
        value: (B, Hk, C, Dv).
        allowed: (B, 1 or Hk, T, C), bool; None if every key is seen.
        scoring: How scores are made.
        weight: (B, T), how much each query counts in what keys receive; None if that is not wanted.

    Returns:
        (B, H, T, Dv), and (B, Hk, C) in float32 or None.
    """
    (B, H, T, D), (heads, C) = query.shape, key.shape[1:3]
    scale = D**-0.5 if scoring.scale is None else scoring.scale
    query = query.reshape(B, heads, (H // heads) * T, D)
    scores = query @ key.transpose(-1, -2) * scale
    scores = scores.reshape(B, heads, H // heads, T, C)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if allowed is not None:
        scores = scores.masked_fill(~allowed[:, :, None], torch.finfo(scores.dtype).min)
    work = torch.promote_types(scores.dtype, torch.float32)
    share = scores.softmax(-1, dtype=work)
    result = share.to(value.dtype).reshape(B, heads, -1, C) @ value
    received = None
    if weight is not None:
        received = torch.einsum("bhgtc,bt->bhc", share, weight.to(work)).float()
    return result.reshape(B, H, T, -1), received


def query_block(bytes_per_query: int) -> int:
    """Return how many queries are attended at a time, so that what they need fits into a block."""
    return max(16, _BLOCK_BYTES // max(1, bytes_per_query))

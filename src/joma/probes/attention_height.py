"""How far up the hierarchy attention reaches (JoMA, Fig. 5: low-level association comes first).

Two tokens of a latent hierarchy are related through their lowest common ancestor; the lower it
stands, the more often they occur together. Attention is sorted by the height of that ancestor of
query and key, and compared with a row that spreads evenly over the keys it can see.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.probes import _checks


@dataclass(frozen=True, eq=False)
class AttentionByHeight:
    """Mean share of a query's attention by height of the common ancestor of query and key.

    Attributes:
        mass: share that goes to keys at each height, (..., levels).
        uniform: what a row spread evenly over the keys it can see would give, (..., levels).
        uncounted: share that goes to keys of height −1, (...): padding, or unrelated tokens.
        queries: how many rows the means are taken over, (...).
    """

    mass: Tensor
    uniform: Tensor
    uncounted: Tensor
    queries: Tensor

    @property
    def ratio(self) -> Tensor:
        """How many times more than chance, mass / uniform; NaN at heights no query can see."""
        return self.mass / self.uniform


def attention_by_height(
    attention: Tensor,
    tokens: Tensor,
    heights: Tensor,
    levels: int | None = None,
    *,
    visible: Tensor | None = None,
) -> AttentionByHeight:
    """Sorts attention by the height of the common ancestor of query and key.

    Means are over all rows of the batch axis, the last leading one, whose query counts; axes before
    it (ensemble members, layers, heads) stay. A query counts if its token has a height ≥ 0 with any
    token; rows of padding do not and may hold anything. Computed in float64.

    Args:
        attention: (..., B, T, T); rows are queries and sum to 1.
        tokens: (T,), (B, T) or (..., B, T), integers.
        heights: (V, V), integers: height of the common ancestor of query and key token, −1 where
            the pair is not to be counted.
        levels: how many heights, from 0; those that occur in `heights` where None.
        visible: (..., B, T, T), bool: which keys a query can see; those up to itself where None.

    Raises:
        ValueError: also where a row that counts does not sum to 1, or puts attention on keys it
            cannot see.
    """
    heights, levels = _table(heights, levels)
    attention, tokens, visible = _checked(attention, tokens, heights, visible)
    queries = (heights >= 0).any(-1)[tokens]
    counted = queries.sum((-2, -1))
    if not (counted > 0).all():
        raise JomaError(
            "tokens must hold a query that counts, one with a height ≥ 0 to some token, in every "
            "member; got only padding"
        )
    attention = _rows_that_count(attention, visible, queries)
    # Queries that do not count have height −1 to all keys: they add to no height.
    height = heights[tokens.unsqueeze(-1), tokens.unsqueeze(-2)]
    uniform = visible / visible.sum(-1, keepdim=True, dtype=torch.float64).clamp(min=1)
    mass, uniform = (
        _by_height(share, height, levels) / counted.unsqueeze(-1) for share in (attention, uniform)
    )
    return AttentionByHeight(mass[..., 1:], uniform[..., 1:], mass[..., 0], counted)


def _table(heights: Tensor, levels: int | None) -> tuple[Tensor, int]:
    heights = _checks.integers("heights", heights, 2)
    if heights.ndim != 2 or heights.shape[0] != heights.shape[1] or heights.numel() == 0:
        raise JomaError(f"heights must be a square table, got shape {tuple(heights.shape)}")
    low, high = int(heights.min()), int(heights.max())
    levels = high + 1 if levels is None else whole_number("levels", levels, 1)
    if low < -1 or high < 0 or high >= levels:
        raise JomaError(
            f"heights must lie from -1 below levels = {levels}, one of them at least 0, got "
            f"{low} to {high}"
        )
    return heights, levels


def _checked(
    attention: Tensor, tokens: Tensor, heights: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    attention = _checks.tensor("attention", attention, 3)
    lead, length = attention.shape[:-2], attention.shape[-1]
    if not attention.is_floating_point() or attention.shape[-2] != length or 0 in attention.shape:
        raise JomaError(
            "attention must be floating-point numbers of shape (..., B, T, T), no axis empty, got "
            f"{attention.dtype} of shape {tuple(attention.shape)}"
        )
    tokens = _expanded("tokens", _checks.integers("tokens", tokens, 1), (*lead, length))
    if tokens.min() < 0 or tokens.max() >= heights.shape[0]:
        raise JomaError(
            f"tokens must lie from 0 to {heights.shape[0] - 1}, as heights has rows, got "
            f"{int(tokens.min())} to {int(tokens.max())}"
        )
    if visible is None:
        visible = torch.ones(length, length, dtype=torch.bool, device=attention.device).tril()
    visible = _checks.tensor("visible", visible, 2)
    if visible.dtype != torch.bool:
        raise JomaError(f"visible must be bool, got {visible.dtype}")
    _checks.one_device(attention=attention, tokens=tokens, heights=heights, visible=visible)
    return attention, tokens, _expanded("visible", visible, tuple(attention.shape))


def _by_height(share: Tensor, height: Tensor, levels: int) -> Tensor:
    # A sum per level, not a scatter: its order is fixed, so the same input gives the same bits.
    sums = [share.where(height == level, 0.0).sum((-3, -2, -1)) for level in range(-1, levels)]
    return torch.stack(sums, -1)


def _rows_that_count(attention: Tensor, visible: Tensor, queries: Tensor) -> Tensor:
    """Attention in float64, 0 in rows of queries that do not count."""
    tolerance = 1e-2 if torch.finfo(attention.dtype).bits == 16 else 1e-4
    attention = torch.where(queries.unsqueeze(-1), attention, 0.0).to(torch.float64)
    # Written so that NaN, which is neither far from nor near to 1, is refused too.
    good = (attention.sum(-1) - 1).abs() <= tolerance
    if not (good | ~queries).all():
        raise JomaError(
            f"attention must have rows that sum to 1 within {tolerance:g}, got one that sums to "
            f"{attention.sum(-1)[queries & ~good][0].item():g}"
        )
    if (attention < 0).any() or (attention.masked_fill(visible, 0.0) > 0).any():
        raise JomaError("attention must be ≥ 0, and 0 on keys that are not visible")
    return attention


def _expanded(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    try:
        return value.expand(shape)
    except RuntimeError:
        raise JomaError(
            f"{name} of shape {tuple(value.shape)} must broadcast to {shape}, as attention has it"
        ) from None

"""Which keys a query of attention sees, block by block."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

HIDDEN = -4e30
"""Added to the score of a key that is not seen. Not −∞: a weight of 0 times it must be 0.

A row whose scores all lie below half of it sees no key.
"""
_HIDES = -1e30
"""Entries of an additive mask up to this hide, too."""
_FAR = 1 << 62


class AttentionTile(NamedTuple):
    """Sequences, heads of keys, rows (queries) and keys that are worked on together."""

    batch: range
    heads: range
    rows: range
    keys: range


@dataclass(frozen=True, eq=False)
class Sight:
    """What hides keys from queries; query t stands at place t + S − T among the S keys.

    Args:
        queries: T.
        count: S.
        causal: whether keys past the query's own place are hidden.
        window: only keys at a smaller distance are seen; None for any distance.
        padding_BS: False hides a key.
        mask_BHGTS: axes but the last may be 1; False hides, or a number is added to the score and
            hides where `hides` says so.
        firm: whether hidden scores are overwritten: adding to them, which is faster, would not hide
            what is NaN, infinite or huge.
    """

    queries: int
    count: int
    causal: bool
    window: int | None
    padding_BS: Tensor | None
    mask_BHGTS: Tensor | None
    firm: bool = False
    _patterns: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @property
    def offset(self) -> int:
        """The place of query 0 among the keys."""
        return self.count - self.queries

    @property
    def ahead(self) -> int | None:
        """How far past its own place a query sees; None for any distance."""
        if self.causal:
            return 0
        return None if self.window is None else self.window - 1

    def keys(self, rows: range) -> range:
        """A range that holds all keys these rows see."""
        start, stop = 0, self.count
        if self.window is not None:
            start = max(start, rows.start + self.offset - self.window + 1)
        if self.ahead is not None:
            stop = min(stop, rows.stop + self.offset + self.ahead)
        if start < stop and self.mask_BHGTS is not None:
            mask = _rows(self.mask_BHGTS, rows)[..., start:stop]
            seen = mask if mask.dtype == torch.bool else ~hides(mask)
            places = seen.flatten(0, -2).any(0).nonzero()
            if not len(places):
                return range(0)
            start, stop = start + int(places[0]), start + int(places[-1]) + 1
        return range(start, max(start, stop))

    def hide(self, scores_BHGTS: Tensor, block: AttentionTile) -> None:
        """Adds to the scores of a block what a mask adds, and hides keys in it."""
        rows, keys = block.rows, block.keys
        if self.mask_BHGTS is not None:  # first: it may add what is no number to a key not seen
            mask = self._mask(block)
            if mask.dtype == torch.bool:
                self._hide(scores_BHGTS, ~mask)
            else:
                hidden = hides(mask)
                scores_BHGTS.add_(mask.to(scores_BHGTS.dtype).masked_fill(hidden, HIDDEN))
                if self.firm:
                    self._hide(scores_BHGTS, hidden)
        if self.ahead is not None:
            start = max(keys.start, rows.start + self.offset + self.ahead + 1)
            edge = range(start, keys.stop)
            self._hide_from(scores_BHGTS, block, edge, -_FAR, -self.ahead - 1)
        if self.window is not None:
            stop = min(keys.stop, rows.stop + self.offset - self.window)
            edge = range(keys.start, stop)
            self._hide_from(scores_BHGTS, block, edge, self.window, _FAR)
        if self.padding_BS is not None:
            real = self.padding_BS[as_slice(block.batch), as_slice(keys)]
            self._hide(scores_BHGTS, ~real[:, None, None, None])

    def pattern(self, rows: range, keys: range, low: int, high: int, like: Tensor) -> Tensor:
        """1 where a key lies from `low` to `high` behind the query's own place, else 0."""
        # Most blocks along the diagonal have the same one.
        key = (low, high, keys.start - rows.start, len(rows), len(keys))
        if key not in self._patterns:
            places = torch.arange(rows.start, rows.stop, device=like.device) + self.offset
            behind = places[:, None] - torch.arange(keys.start, keys.stop, device=like.device)
            self._patterns[key] = ((behind >= low) & (behind <= high)).to(like.dtype)
        return self._patterns[key]

    def _hide_from(
        self, scores: Tensor, block: AttentionTile, keys: range, low: int, high: int
    ) -> None:
        """Hides those of the keys that lie from `low` to `high` behind the query."""
        if len(keys):
            start = keys.start - block.keys.start
            pattern = self.pattern(block.rows, keys, low, high, scores)
            self._hide(scores[..., start : start + len(keys)], pattern)

    def _hide(self, scores: Tensor, hidden: Tensor) -> None:
        """Hides where `hidden` is True, or 1."""
        if self.firm:
            scores.masked_fill_(hidden.to(torch.bool), HIDDEN)
        else:
            scores.add_(hidden, alpha=HIDDEN)

    def _mask(self, block: AttentionTile) -> Tensor:
        assert self.mask_BHGTS is not None
        mask = _rows(self.mask_BHGTS, block.rows)[..., as_slice(block.keys)]
        mask = mask if mask.shape[0] == 1 else mask[as_slice(block.batch)]
        return mask if mask.shape[1] == 1 else mask[:, as_slice(block.heads)]


def hides(mask: Tensor) -> Tensor:
    """Where an additive mask hides: −∞, and what stands for it in this type or is as far down."""
    return mask <= lowest_seen(mask)


def lowest_seen(mask: Tensor) -> float:
    """What entries of an additive mask must lie above for their keys to be seen."""
    return max(_HIDES, torch.finfo(mask.dtype).min / 2)


def _rows(mask_BHGTS: Tensor, rows: range) -> Tensor:
    return mask_BHGTS if mask_BHGTS.shape[-2] == 1 else mask_BHGTS[..., as_slice(rows), :]


def as_slice(part: range) -> slice:
    """A range of places as an index."""
    return slice(part.start, part.stop)

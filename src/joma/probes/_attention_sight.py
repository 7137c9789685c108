"""Which keys a query sees, for attention that is computed in blocks of queries and keys."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold

HIDDEN = -4e30
"""Added to the score of a key that is not seen. Not −∞: a weight of 0 times it must be 0.

A row whose scores all lie below half of it sees no key.
"""
HIDES = -1e30
"""Entries of an additive mask up to this hide, too, and so do the scores they leave."""


class Tile(NamedTuple):
    """Sequences, heads of keys, rows (queries) and keys that are worked on together."""

    batch: range
    heads: range
    rows: range
    keys: range


@dataclass(eq=False)
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
    _real: range = field(init=False)
    _patterns: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _added: tuple[Tile, Tensor] | None = None
    _scratch: Tensor | None = None

    def __post_init__(self) -> None:
        self._real = range(self.count)
        if self.padding_BS is not None:
            self._real = _places(self.padding_BS.any(0))
            inner = self.padding_BS[:, slice_of(self._real)]
            if inner.all():  # the range says it all
                self.padding_BS = None

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

    @property
    def all_see(self) -> bool:
        """Whether it is plain that every query sees a key."""
        plain = self.padding_BS is None and self.mask_BHGTS is None
        return plain and len(self._real) == self.count > 0 and self.queries <= self.count

    @property
    def adds(self) -> bool:
        """Whether numbers are added to the scores."""
        return self.mask_BHGTS is not None and self.mask_BHGTS.dtype != torch.bool

    def keys(self, rows: range) -> range:
        """A range that holds all keys these rows see."""
        start, stop = self._real.start, self._real.stop
        if self.window is not None:
            start = max(start, rows.start + self.offset - self.window + 1)
        if self.ahead is not None:
            stop = min(stop, rows.stop + self.offset + self.ahead)
        # What a mask hides from all rows of a block is worth looking for where there are several.
        if start < stop and self.mask_BHGTS is not None and len(rows) < self.queries:
            mask = _rows(self.mask_BHGTS, rows)[..., start:stop]
            numbers = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
            most = numbers.amax(-2).amax((0, 1, 2))  # all four axes at once take 50 times as long
            # NaN is greater than all
            places = _places(most > 0 if mask.dtype == torch.bool else ~hides(most))
            start, stop = start + places.start, start + places.stop
        return range(start, max(start, stop))

    def hide(self, scores_BHGTS: Tensor, block: Tile) -> None:
        """Adds to the scores of a block what a mask adds, and hides keys in it."""
        rows, keys = block.rows, block.keys
        if self.mask_BHGTS is not None:  # first: it may add what is no number to a key not seen
            if not self.firm:
                scores_BHGTS.add_(self._numbers(block, scores_BHGTS))
            elif self.mask_BHGTS.dtype == torch.bool:
                scores_BHGTS.masked_fill_(~self._mask(block), HIDDEN)
            else:
                mask = self._mask(block)
                hidden = hides(mask)
                scores_BHGTS.add_(mask.to(scores_BHGTS.dtype).masked_fill(hidden, HIDDEN))
                scores_BHGTS.masked_fill_(hidden, HIDDEN)
        place = rows.start + self.offset
        if self.ahead is not None:
            first = max(keys.start, place + self.ahead + 1)
            self._hide(scores_BHGTS, block, range(first, keys.stop), place + self.ahead + 1, None)
        if self.window is not None:
            stop = min(keys.stop, rows.stop + self.offset - self.window)
            self._hide(scores_BHGTS, block, range(keys.start, stop), None, place - self.window)
        if self.padding_BS is not None:
            padded = ~self.padding_BS[slice_of(block.batch), slice_of(keys)][:, None, None, None]
            if self.firm:
                scores_BHGTS.masked_fill_(padded, HIDDEN)
            else:
                scores_BHGTS.add_(padded.to(scores_BHGTS.dtype), alpha=HIDDEN)

    def band(
        self, rows: range, keys: range, low: int | None, high: int | None, like: Tensor
    ) -> Tensor:
        """1 for keys from `low` to `high` of the first row, one further with every row; else 0."""
        # Most blocks along the diagonal have the same one.
        bounds = [None if at is None else at - keys.start for at in (low, high)]
        name = (*(1 << 62 if at is None else at for at in bounds), len(rows), len(keys))
        if name not in self._patterns:
            pattern = like.new_ones(len(rows), len(keys))
            if bounds[0] is not None:
                pattern.triu_(bounds[0])
            if bounds[1] is not None:
                pattern.tril_(bounds[1])
            self._patterns[name] = pattern
        return self._patterns[name]

    def _hide(
        self, scores: Tensor, block: Tile, keys: range, low: int | None, high: int | None
    ) -> None:
        """Hides those of the keys that `band` has a 1 for."""
        if len(keys):
            start = keys.start - block.keys.start
            part = scores[..., start : start + len(keys)]
            pattern = self.band(block.rows, keys, low, high, scores)
            if self.firm:
                part.masked_fill_(pattern.to(torch.bool), HIDDEN)
            else:
                part.add_(pattern, alpha=HIDDEN)

    def _mask(self, block: Tile) -> Tensor:
        assert self.mask_BHGTS is not None
        mask = _rows(self.mask_BHGTS, block.rows)[..., slice_of(block.keys)]
        mask = mask if mask.shape[0] == 1 else mask[slice_of(block.batch)]
        return mask if mask.shape[1] == 1 else mask[:, slice_of(block.heads)]

    def _numbers(self, block: Tile, like: Tensor) -> Tensor:
        """What the mask adds to a block; made once for all heads and sequences that share it."""
        assert self.mask_BHGTS is not None
        shared = self.mask_BHGTS.shape[:2]
        name = Tile(
            block.batch if shared[0] > 1 else range(0),
            block.heads if shared[1] > 1 else range(0),
            block.rows,
            block.keys,
        )
        if self._added is None or self._added[0] != name:
            mask = self._mask(block)
            if self._scratch is None or self._scratch.numel() < mask.numel():
                self._scratch = like.new_empty(mask.numel())
            added = to_add(mask, self._scratch)
            if self.adds and (self.ahead is not None or self.padding_BS is not None):
                # Numbers from 4·10³⁰ on would undo what is added to hide their keys.
                here = self._scratch[: mask.numel()].view(mask.shape)
                added = torch.clamp(added, max=-HIDES, out=here)
            self._added = name, added
        return self._added[1]


def hides(mask: Tensor) -> Tensor:
    """Where an additive mask hides: −∞, and what stands for it in this type or is as far down."""
    return mask <= lowest_seen(mask)


def lowest_seen(mask: Tensor) -> float:
    """What entries of an additive mask must lie above for their keys to be seen."""
    return max(HIDES, torch.finfo(mask.dtype).min / 2)


def to_add(mask: Tensor, scratch: Tensor | None = None) -> Tensor:
    """What a mask adds to scores: at most −10³⁰, or −∞, where it hides.

    The result may lie in `scratch`, which must hold as many numbers as the mask, and has its type:
    float32 without one.
    """
    if scratch is None:
        scratch = torch.empty(mask.numel(), device=mask.device)
    # Rows that do not follow each other in memory are added one by one, which is slow.
    if mask.dtype == scratch.dtype and lowest_seen(mask) <= HIDES and mask.is_contiguous():
        return mask
    added = scratch[: mask.numel()].view(mask.shape)
    if mask.dtype == torch.bool:  # as bytes it is converted four times as fast
        return added.copy_(mask.view(torch.uint8)).sub_(1).mul_(-HIDDEN)
    added.copy_(mask)
    lowest = lowest_seen(mask)
    return threshold(added, lowest, HIDDEN, inplace=True) if lowest > HIDES else added


def slice_of(part: range) -> slice:
    """A range of places as an index."""
    return slice(part.start, part.stop)


def _rows(mask_BHGTS: Tensor, rows: range) -> Tensor:
    return mask_BHGTS if mask_BHGTS.shape[-2] == 1 else mask_BHGTS[..., slice_of(rows), :]


def _places(seen: Tensor) -> range:
    """From the first that is True to the last."""
    places = seen.nonzero()
    return range(int(places[0]), int(places[-1]) + 1) if len(places) else range(0)

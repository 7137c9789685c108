"""Row statistics of softmax attention in blocks, on any device: memory O(T · block), not O(T · S).

With m the greatest score of a row and x = s − m, a block of keys gives

    l = Σ eˣ,    a = Σ x·eˣ ≤ 0,    log-sum-exp = m + ln l,    entropy = ln l − a/l,

so no large number is subtracted from a large number. Blocks of keys are joined on the greater m. A
block is a matrix product into a buffer that stays in a core's cache, then one pass each for the
maximum, the difference, its bound, the exponential, its sum, the product with x, and its sum.

Single precision is enough while no score, what a mask adds included, can be larger than `_SINGLE`.
Far beyond, the rounding of the scores alone would move the entropy by 10⁻⁴; double precision is
used.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold

from joma.common.float32 import float32_is_coarse

HIDDEN = -4e30
"""Added to the score of a key that is not seen. Not −∞: a weight of 0 times it must be 0.

A row whose scores all lie below half of it sees no key.
"""
_HIDES = -1e30
"""Entries of an additive mask up to this hide, too."""
_FAR = 1 << 62
_SINGLE = 400.0
_COVERED = 1e29
"""Scores up to this are hidden by adding `HIDDEN`; larger ones, and NaN, have to be overwritten."""
_MINUS_INFINITY = -1e30
"""Stands for a score of −∞ of a key that is seen: above `HIDDEN`, below all other scores."""
_LEAST = -80.0
"""Bound of x: e⁻⁸⁰ is nothing next to 1, and below it exponentials are slow and then inexact."""
_NOTHING = 1e-34
_ROWS = 64
_CPU_BLOCK = 1 << 18
"""Scores per block and thread: with their weights 2 MiB, about what a core's cache holds."""
_LARGEST_BLOCK = 1 << 22

Result = list[Tensor | None]
"""Log-sum-exp, entropy, mass on the first and last keys, mass received; None if not asked for."""


Sums = tuple[Tensor, ...]
"""m, l, a of rows, and the parts of l that lie on the first and the last keys, as asked for."""


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
) -> Result:
    """Log-sum-exp, entropy, mass on the first and last keys (B, H, T), mass received (B, H, S).

    None where not asked for; float64 for float64 input, else float32. The arguments are those of
    `joma.probes.attention_statistics`, checked there; axes of the mask but the last may be 1.
    """
    if rows_BT is not None and rows_BT.all():
        rows_BT = None
    H, T = query_BHTD.shape[1:3]
    Hk, S = key_BHSD.shape[1:3]
    group = (Hk, H // Hk)
    if mask_BHTS is not None:
        mask_BHTS = mask_BHTS.unflatten(1, group if mask_BHTS.shape[1] == H else (1, 1))
    if padding_BS is not None and padding_BS.all():
        padding_BS = None
    given = torch.promote_types(query_BHTD.dtype, key_BHSD.dtype)
    answer = torch.float64 if given == torch.float64 else torch.float32
    largest = _largest(query_BHTD, key_BHSD, scale, mask_BHTS)
    # Products in single precision might be rounded further than they say.
    single = largest <= _SINGLE and not float32_is_coarse()
    working = answer if single else torch.float64
    work = _Work(
        query_BHTD.to(working).unflatten(1, group),
        key_BHSD.to(working),
        _Sight(T, S, causal, window, padding_BS, mask_BHTS, firm=not largest <= _COVERED),
        scale,
        softcap,
        (first, last),
        rows_BT,
        received,
    )
    found = iter([part.flatten(1, 2).to(answer) for part in work.result()])
    asked = (True, True, first is not None, last is not None, received)
    return [next(found) if part else None for part in asked]


def _largest(query: Tensor, key: Tensor, scale: float, mask: Tensor | None) -> float:
    """A bound of all scores, hidden ones included; NaN or ∞ where there is none."""
    if not query.numel() or not key.numel():
        return 0.0
    wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
    longest = [
        torch.linalg.vector_norm(vectors, dim=-1, dtype=wide).amax() for vectors in (query, key)
    ]
    bound = abs(scale) * longest[0] * longest[1]
    if mask is None or mask.dtype == torch.bool:
        return float(bound)
    added = [
        threshold(mask[..., _slice(rows), :], lowest_seen(mask), 0.0).abs().amax()
        for rows in _ranges(range(mask.shape[-2]), _ROWS)
    ]
    return float(bound + torch.stack(added).amax())


class _Tile(NamedTuple):
    """Sequences, heads of keys, rows (queries) and keys that are worked on together."""

    batch: range
    heads: range
    rows: range
    keys: range


@dataclass(frozen=True, eq=False)
class _Sight:
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

    def hide(self, scores_BHGTS: Tensor, block: _Tile) -> None:
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
            real = self.padding_BS[_slice(block.batch), _slice(keys)]
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

    def _hide_from(self, scores: Tensor, block: _Tile, keys: range, low: int, high: int) -> None:
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

    def _mask(self, block: _Tile) -> Tensor:
        assert self.mask_BHGTS is not None
        mask = _rows(self.mask_BHGTS, block.rows)[..., _slice(block.keys)]
        mask = mask if mask.shape[0] == 1 else mask[_slice(block.batch)]
        return mask if mask.shape[1] == 1 else mask[:, _slice(block.heads)]


def hides(mask: Tensor) -> Tensor:
    """Where an additive mask hides: −∞, and what stands for it in this type or is as far down."""
    return mask <= lowest_seen(mask)


def lowest_seen(mask: Tensor) -> float:
    """What entries of an additive mask must lie above for their keys to be seen."""
    return max(_HIDES, torch.finfo(mask.dtype).min / 2)


def _rows(mask_BHGTS: Tensor, rows: range) -> Tensor:
    return mask_BHGTS if mask_BHGTS.shape[-2] == 1 else mask_BHGTS[..., _slice(rows), :]


def _slice(part: range) -> slice:
    """A range of places as an index."""
    return slice(part.start, part.stop)


@dataclass(eq=False)
class _Work:
    """One call. Heads that share keys are rows of one product: N = B · H, R = G · rows."""

    query_BHGTD: Tensor
    key_BHSD: Tensor
    sight: _Sight
    scale: float
    softcap: float | None
    first_and_last: tuple[int | None, int | None]
    rows_BT: Tensor | None
    received: bool

    def __post_init__(self) -> None:
        B, H, G, T, _ = self.query_BHGTD.shape
        S = self.key_BHSD.shape[2]
        self._key_NDS = self.key_BHSD.flatten(0, 1).contiguous().mT
        self._received_BHGS = self.query_BHGTD.new_zeros(B, H, G, S) if self.received else None
        block = _LARGEST_BLOCK
        if self.query_BHGTD.device.type == "cpu":
            block = min(block, _CPU_BLOCK * torch.get_num_threads())
        self._rows = max(1, min(T, _ROWS, max(_ROWS // 4, 4 * _ROWS // G)))
        self._keys_per_block = max(_ROWS, block // (G * self._rows))
        size = max(block, G * self._rows * self._keys_per_block)
        self._buffers = self.query_BHGTD.new_empty(2, min(size, B * H * G * self._rows * S))
        self._block = block

    def result(self) -> list[Tensor]:
        """Log-sum-exp, entropy and masses asked for, (B, H, G, T); then mass received."""
        T = self.query_BHGTD.shape[3]
        parts = [self._measure(rows) for rows in _ranges(range(T), self._rows)]
        peak, total, moment, *masses = _together(parts or [self._nothing(range(0))], -1)
        unseen = peak <= HIDDEN / 2  # NaN is not: it must stay NaN
        total = total.masked_fill(~unseen & (peak <= _MINUS_INFINITY), torch.nan)  # as softmax
        log = total.log()
        found = [log - moment / total, *(mass / total for mass in masses)]
        found = [value.masked_fill_(unseen, 0) for value in found]
        received = [] if self._received_BHGS is None else [self._received_BHGS]
        return [(peak + log).masked_fill_(unseen, -torch.inf), *found, *received]

    def _measure(self, rows: range) -> Sums:
        """The sums of these rows of all sequences and heads, (B, H, G, rows)."""
        keys = self.sight.keys(rows)
        if not len(keys) or not self.query_BHGTD.numel():
            return self._nothing(rows)
        query_BHGTD = self.query_BHGTD[..., rows.start : rows.stop, :]
        scaled = query_BHGTD.new_empty(query_BHGTD.shape)  # contiguous, as a product might not be
        query_NRD = torch.mul(query_BHGTD, self.scale, out=scaled).flatten(2, 3).flatten(0, 1)
        pieces = list(_ranges(keys, self._keys_per_block))
        members = max(1, self._block // (query_NRD.shape[1] * len(pieces[0])))
        found = []
        for batch, heads in self._chunks(members):
            blocks = [_Tile(batch, heads, rows, piece) for piece in pieces]
            sums = _join([self._measure_block(query_NRD, block) for block in blocks])
            if self._received_BHGS is not None:
                self._receive(self._received_BHGS, query_NRD, blocks, sums)
            found.append(sums)
        return tuple(part.view(query_BHGTD.shape[:-1]) for part in _together(found, 0))

    def _nothing(self, rows: range) -> Sums:
        peak = self.query_BHGTD.new_full((*self.query_BHGTD.shape[:3], len(rows)), HIDDEN)
        zero = torch.zeros_like(peak)
        masses = [zero for asked in self.first_and_last if asked is not None]
        return peak, torch.ones_like(peak), zero, *masses

    def _chunks(self, members: int) -> Iterator[tuple[range, range]]:
        """Sequences and heads of keys, about `members` heads at a time."""
        B, H = self.query_BHGTD.shape[:2]
        for batch in _ranges(range(B), max(1, members // H)):
            for heads in _ranges(range(H), min(H, members)):
                yield batch, heads

    def _measure_block(self, query_NRD: Tensor, block: _Tile) -> Sums:
        """The sums of the rows of a block over its keys, (N, R)."""
        scores = self._score(query_NRD, block)
        peak = scores.amax(-1, keepdim=True)
        weights = self._weigh(scores, peak)
        first, last = self.first_and_last
        masses = []
        if first is not None:
            masses.append(weights[..., : max(0, first - block.keys.start)].sum(-1))
        if last is not None:
            masses.append(self._mass_on_last(weights, block, last))
        total = weights.sum(-1)
        moment = torch.mul(weights, scores, out=scores).sum(-1)
        return peak.squeeze(-1), total, moment, *masses

    def _score(self, query_NRD: Tensor, block: _Tile) -> Tensor:
        """The scores of a block (N, R, keys), hidden ones far below, in the first buffer."""
        H, G = self.query_BHGTD.shape[1:3]
        start = block.batch.start * H + block.heads.start
        members = slice(start, start + len(block.batch) * len(block.heads))
        query = query_NRD[members]
        key = self._key_NDS[members, :, block.keys.start : block.keys.stop]
        shape = (*query.shape[:2], key.shape[2])
        scores = self._buffers[0, : torch.Size(shape).numel()].view(shape)
        torch.bmm(query, key, out=scores)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.sight.firm:
            scores.clamp_(min=_MINUS_INFINITY)
        self.sight.hide(scores.view(len(block.batch), len(block.heads), G, -1, shape[2]), block)
        return scores

    def _weigh(self, scores: Tensor, peak: Tensor) -> Tensor:
        """Exponentials of scores − peak, in the second buffer; the scores become the difference."""
        scores.sub_(peak).clamp_(min=_LEAST)
        return torch.exp(scores, out=self._buffers[1, : scores.numel()].view(scores.shape))

    def _mass_on_last(self, weights: Tensor, block: _Tile, last: int) -> Tensor:
        rows, keys, offset = block.rows, block.keys, self.sight.offset
        near = range(
            max(keys.start, rows.start + offset - last + 1), min(keys.stop, rows.stop + offset)
        )
        if not len(near):
            return weights.new_zeros(weights.shape[:-1])
        inside = self.sight.pattern(rows, near, 0, last - 1, weights)
        weights = weights[..., near.start - keys.start : near.stop - keys.start]
        return (weights.unflatten(1, (-1, len(rows))) * inside).sum(-1).flatten(1)

    def _receive(
        self, received_BHGS: Tensor, query_NRD: Tensor, blocks: list[_Tile], sums: Sums
    ) -> None:
        """Adds what the keys of the blocks receive from their rows."""
        peak, total, *_ = sums
        share = torch.where(peak > HIDDEN / 2, 1 / total, 0)
        if self.rows_BT is not None:
            block = blocks[0]
            real_BT = self.rows_BT[_slice(block.batch), _slice(block.rows)]
            shape = (len(block.batch), len(block.heads), -1, len(block.rows))
            share = (share.view(shape) * real_BT[:, None, None]).view(share.shape)
        for block in blocks:
            here = (_slice(block.batch), _slice(block.heads), slice(None), _slice(block.keys))
            if len(blocks) > 1:  # only now is it known what the weights are relative to
                scores = self._score(query_NRD, block)
                weights = self._weigh(scores, peak.unsqueeze(-1))
            else:
                size = share.numel() * len(block.keys)
                weights = self._buffers[1, :size].view(*share.shape, -1)
            weights = threshold(weights, _NOTHING, 0.0, inplace=True)
            rows = (received_BHGS.shape[2], len(block.rows))
            mass = share.unflatten(1, rows).unsqueeze(-2) @ weights.unflatten(1, rows)
            received_BHGS[here] += mass.view(received_BHGS[here].shape)


def _join(parts: list[Sums]) -> Sums:
    """Sums of rows over the keys of all parts."""
    if len(parts) == 1:
        return parts[0]
    peaks, totals, moments, *masses = (torch.stack(column) for column in zip(*parts, strict=True))
    peak = peaks.amax(0)
    below = peaks - peak
    factor = below.exp()
    sums = (totals, moments + below * totals, *masses)
    return peak, *((column * factor).sum(0) for column in sums)


def _together(parts: list[Sums], axis: int) -> Sums:
    """Sums of the rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(column, axis) for column in zip(*parts, strict=True))


def _ranges(whole: range, most: int) -> Iterator[range]:
    """The range cut into as few as hold no more than `most`, all about as long."""
    count = max(1, -(-len(whole) // most))
    size = max(1, -(-len(whole) // count))
    return (whole[at : at + size] for at in range(0, len(whole), size))

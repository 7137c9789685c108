"""Row statistics of softmax attention in blocks, on any device: memory O(T · block), not O(T · S).

With m the greatest score of a row and x = s − m, a block of keys gives

    l = Σ eˣ,    a = Σ x·eˣ ≤ 0,    log-sum-exp = m + ln l,    entropy = ln l − a/l,

so no large number is subtracted from a large number. Blocks of keys are joined on the greater m. A
block is a matrix product into a buffer that stays in a core's cache, then one pass each for the
maximum, the difference, its bound, the exponential, its sum, the product with x, and its sum.
Memory that the process has not touched before costs more than any of these passes, so the buffers
are kept from call to call.

Single precision is enough while no product of a query and a key, and no row's greatest score, can
be larger than `_attention_few.SINGLE`. Far beyond, the rounding of the scores alone would move the
entropy by 10⁻⁴; double precision is used.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import threshold

from joma.common.float32 import float32_is_coarse
from joma.probes._attention_few import SINGLE, bound, scratch
from joma.probes._attention_sight import HIDDEN, HIDES, Sight, Tile, slice_of
from joma.probes._attention_written import LEAST, MINUS_INFINITY, NOTHING, Result

_COVERED = 1e29
"""Scores up to this are hidden by adding `HIDDEN`; larger ones, and NaN, have to be overwritten."""
_ROWS = 64
_CPU_BLOCK = 1 << 18
"""Scores per block and thread: with their weights 2 MiB, about what a core's cache holds."""
_LARGEST_BLOCK = 1 << 22
_SPLIT = 8
"""An eighth of a block is not cut further: what that leaves out costs less than the calls."""

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
    double = torch.float64 in (query_BHTD.dtype, key_BHSD.dtype)
    answer = torch.float64 if double else torch.float32
    # Products in single precision might be rounded further than they say.
    single = answer == torch.float32 and not float32_is_coarse(query_BHTD.device.type)
    H, T = query_BHTD.shape[1:3]
    Hk, S = key_BHSD.shape[1:3]
    if rows_BT is not None and rows_BT.all():
        rows_BT = None
    group = (Hk, H // Hk)
    if mask_BHTS is not None:
        mask_BHTS = mask_BHTS.unflatten(1, group if mask_BHTS.shape[1] == H else (1, 1))
    rest = (scale, softcap, (first, last), rows_BT, received)
    sight = (T, S, causal, window, padding_BS, mask_BHTS)

    def parts(working: torch.dtype, *, firm: bool) -> list[Tensor] | None:
        query_BHGTD = query_BHTD.to(working).unflatten(1, group)
        work = _Work(query_BHGTD, key_BHSD, Sight(*sight, firm=firm), *rest)
        return work.result()

    largest = bound(query_BHTD, key_BHSD, scale) if query_BHTD.numel() and key_BHSD.numel() else 0.0
    found = parts(torch.float32, firm=False) if single and largest <= SINGLE else None
    if found is None and largest <= _COVERED:
        found = parts(torch.float64, firm=False)
    if found is None:
        found = parts(torch.float64, firm=True)
    assert found is not None
    answers = iter([part.flatten(1, 2).to(answer) for part in found])
    asked = (True, True, first is not None, last is not None, received)
    return [next(answers) if part else None for part in asked]


@dataclass(eq=False)
class _Work:
    """One call. Heads that share keys are rows of one product: N = B · H, R = G · rows."""

    query_BHGTD: Tensor
    key_BHSD: Tensor
    sight: Sight
    scale: float
    softcap: float | None
    first_and_last: tuple[int | None, int | None]
    rows_BT: Tensor | None
    received: bool

    def __post_init__(self) -> None:
        B, H, G, T, _ = self.query_BHGTD.shape
        S = self.key_BHSD.shape[2]
        self._received_BHGS = self.query_BHGTD.new_zeros(B, H, G, S) if self.received else None
        block = _LARGEST_BLOCK
        if self.query_BHGTD.device.type == "cpu":
            block = min(block, _CPU_BLOCK * torch.get_num_threads())
        rows = max(_ROWS // 4, 4 * _ROWS // G)
        rows = max(min(rows, _ROWS), block // (_SPLIT * max(1, B * H * G * S)))
        self._rows = max(1, min(T, rows))
        self._keys_per_block = max(_ROWS, block // (G * self._rows))
        size = max(block, G * self._rows * self._keys_per_block)
        size = min(size, B * H * G * self._rows * S)
        key_NSD = self.key_BHSD.flatten(0, 1)
        # Keys that are looked at once are converted when they are.
        once = self._rows == T and not self.received and key_NSD.dtype != self.query_BHGTD.dtype
        self._key_NSD = key_NSD if once else key_NSD.to(self.query_BHGTD.dtype).contiguous()
        keys = min(key_NSD.numel(), (block // max(1, G * T) + S) * key_NSD.shape[-1])
        memory = scratch(2 * size + (keys if once else 0), self.query_BHGTD)
        self._buffers, self._converted = memory[: 2 * size].view(2, size), memory[2 * size :]
        self._block = block

    def result(self) -> list[Tensor] | None:
        """Log-sum-exp, entropy and masses asked for, (B, H, G, T); then mass received.

        None where what a mask adds is too large for this precision, or not hidden by adding.
        """
        T = self.query_BHGTD.shape[3]
        parts = [self._measure(rows) for rows in _ranges(range(T), self._rows)]
        peak, total, moment, *masses = _together(parts or [self._nothing(range(0))], -1)
        received = [] if self._received_BHGS is None else [self._received_BHGS]
        if self.sight.all_see and not self.sight.firm:
            log = total.log()
            return [peak.add_(log), log.addcdiv(moment, total, value=-1),
                    *(mass.div_(total) for mass in masses), *received]  # fmt: skip
        unseen = peak <= (HIDDEN / 2 if self.sight.firm else HIDES)  # NaN is not: it stays NaN
        if not self.sight.firm and self.sight.adds:
            most = SINGLE if peak.dtype == torch.float32 else _COVERED
            if not ((peak.abs() <= most) | unseen).all():
                return None
        total = total.masked_fill(~unseen & (peak <= MINUS_INFINITY), torch.nan)  # as softmax
        log = total.log()
        found = [log.addcdiv(moment, total, value=-1), *(mass / total for mass in masses)]
        found = [value.masked_fill_(unseen, 0) for value in found]
        return [peak.add_(log).masked_fill_(unseen, -torch.inf), *found, *received]

    def _measure(self, rows: range) -> Sums:
        """The sums of these rows of all sequences and heads, (B, H, G, rows)."""
        keys = self.sight.keys(rows)
        if not len(keys) or not self.query_BHGTD.numel():
            return self._nothing(rows)
        query_BHGTD = self.query_BHGTD[..., rows.start : rows.stop, :]
        query_NRD = query_BHGTD.flatten(2, 3).flatten(0, 1)
        pieces = list(_ranges(keys, self._keys_per_block))
        members = max(1, self._block // (query_NRD.shape[1] * len(pieces[0])))
        found = []
        for batch, heads in self._chunks(members):
            blocks = [Tile(batch, heads, rows, piece) for piece in pieces]
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

    def _measure_block(self, query_NRD: Tensor, block: Tile) -> Sums:
        """The sums of the rows of a block over its keys, (N, R)."""
        scores = self._score(query_NRD, block)
        peak = scores.amax(-1, keepdim=True)
        if self.sight.adds:  # −∞ where all are hidden
            peak.clamp_(min=HIDDEN)
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

    def _score(self, query_NRD: Tensor, block: Tile) -> Tensor:
        """The scores of a block (N, R, keys), hidden ones far below, in the first buffer."""
        H, G = self.query_BHGTD.shape[1:3]
        start = block.batch.start * H + block.heads.start
        members = slice(start, start + len(block.batch) * len(block.heads))
        query = query_NRD[members]
        key = self._key_NSD[members, block.keys.start : block.keys.stop]
        if key.dtype != query.dtype:
            key = self._converted[: key.numel()].view(key.shape).copy_(key)
        shape = (*query.shape[:2], key.shape[1])
        scores = self._buffers[0, : torch.Size(shape).numel()].view(shape)
        cap = self.softcap
        scale = self.scale if cap is None else self.scale / cap
        torch.baddbmm(scores, query, key.mT, beta=0, alpha=scale, out=scores)
        if cap is not None:
            scores.tanh_().mul_(cap)
        if self.sight.firm:
            scores.clamp_(min=MINUS_INFINITY)
        self.sight.hide(scores.view(len(block.batch), len(block.heads), G, -1, shape[2]), block)
        return scores

    def _weigh(self, scores: Tensor, peak: Tensor) -> Tensor:
        """Exponentials of scores − peak, in the second buffer; the scores become the difference."""
        scores.sub_(peak).clamp_(min=LEAST)
        return torch.exp(scores, out=self._buffers[1, : scores.numel()].view(scores.shape))

    def _mass_on_last(self, weights: Tensor, block: Tile, last: int) -> Tensor:
        rows, keys = block.rows, block.keys
        place = rows.start + self.sight.offset
        near = range(max(keys.start, place - last + 1), min(keys.stop, place + len(rows)))
        if not len(near):
            return weights.new_zeros(weights.shape[:-1])
        inside = self.sight.band(rows, near, place - last + 1, place, weights)
        weights = weights[..., near.start - keys.start : near.stop - keys.start]
        return (weights.unflatten(1, (-1, len(rows))) * inside).sum(-1).flatten(1)

    def _receive(
        self, received_BHGS: Tensor, query_NRD: Tensor, blocks: list[Tile], sums: Sums
    ) -> None:
        """Adds what the keys of the blocks receive from their rows."""
        peak, total, *_ = sums
        share = torch.where(peak > (HIDDEN / 2 if self.sight.firm else HIDES), 1 / total, 0)
        if self.rows_BT is not None:
            block = blocks[0]
            real_BT = self.rows_BT[slice_of(block.batch), slice_of(block.rows)]
            shape = (len(block.batch), len(block.heads), -1, len(block.rows))
            share = (share.view(shape) * real_BT[:, None, None]).view(share.shape)
        for block in blocks:
            here = (slice_of(block.batch), slice_of(block.heads), slice(None), slice_of(block.keys))
            if len(blocks) > 1:  # only now is it known what the weights are relative to
                scores = self._score(query_NRD, block)
                weights = self._weigh(scores, peak.unsqueeze(-1))
            else:
                size = share.numel() * len(block.keys)
                weights = self._buffers[1, :size].view(*share.shape, -1)
            weights = threshold(weights, NOTHING, 0.0, inplace=True)
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

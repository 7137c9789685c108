"""Row statistics of softmax attention: a Triton kernel, and the same in torch for any device.

With m the greatest score of a row and x = s − m,

    l = Σ eˣ,    a = Σ x·eˣ ≤ 0,    log-sum-exp = m + ln l,    entropy = ln l − a/l,

so no large number is subtracted from a large one, however peaked the row. In torch a block of rows
is compared with all keys that it can see; blocks are so small that their scores stay in a core's
cache, and T × S numbers are never in memory at once.

On a CPU single precision is used while no product of a query and a key can be larger than
`_SINGLE`. Beyond it, rounding the scores alone would move entropies by 10⁻⁴: double precision is
used. Numbers that a mask adds are taken relative to the greatest of their row: they cost no digits.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import threshold

from joma.common.float32 import float32_is_coarse
from joma.kernels.choice import DoesNotFitError, has_kernels, warn_once

_HIDDEN = -4e30
"""Score of a key that is not seen: finite, so that a weight of 0 times it is 0."""
_HIDES = -1e30
"""Entries of an additive mask up to this hide their keys."""
_MINUS_INFINITY = -1e30
"""Stands for a score of −∞ of a key that is seen."""
_LEAST = -80.0
"""Bound of x: e⁻⁸⁰ is nothing next to 1, and exponentials of less are slow."""
_NOTHING = 1e-34
"""Weights up to this are those of keys that are not seen."""
_SINGLE = 400.0
_CPU_BLOCK, _GPU_BLOCK = 1 << 18, 1 << 24
"""Scores of a block; on a CPU for each thread, where with their weights they fill 2 MiB."""
_FEWEST_ROWS, _MOST_ROWS = 16, 128
"""Rows of a block, where there are many scores; at most where causality or a window hides some."""

RowStatistics = list[Tensor | None]
"""Log-sum-exp, entropy, mass on first and last keys, mass received; None where not asked for."""


def row_statistics(
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
) -> RowStatistics:
    """Return log-sum-exp, entropy, masses on keys (B, H, T), and mass received (B, H, S).

    In float64 for float64 input, else in float32. A row that sees no key has log-sum-exp −∞ and all
    else 0; one whose scores softmax turns into NaN is NaN.

    Args:
        query_BHTD: queries; on a GPU a kernel takes those of usual types and head sizes.
        key_BHSD: keys; H is a multiple of their heads.
        scale: what products are multiplied with.
        causal: whether a query, at place t + S − T, sees no later key.
        padding_BS: bool, False hides a key.
        window: only keys nearer than this are seen.
        mask_BHTS: bool, False hides; or numbers to add. Axes but the last may be 1.
        softcap: c, for scores c·tanh(score / c).
        rows_BT: bool, queries for which it is False see no key.
        first: return the mass on so many first keys.
        last: return the mass on so many last keys up to the query's place.
        received: return the mass that every key receives.
    """
    options: dict[str, Any] = {
        "scale": scale,
        "causal": causal,
        "padding_BS": padding_BS,
        "window": window,
        "mask_BHTS": mask_BHTS,
        "softcap": softcap,
        "rows_BT": rows_BT,
        "first": first,
        "last": last,
        "received": received,
    }
    if rows_BT is not None:  # a NaN in one that is not real would reach what keys receive
        query_BHTD = query_BHTD.masked_fill(~rows_BT[:, None, :, None], 0)
    found = _by_kernels(query_BHTD, key_BHSD, options)
    if found is None:
        found = _InTorch(query_BHTD, key_BHSD, **options).statistics()
    if rows_BT is not None:
        for part, nothing in zip(found, (-math.inf, 0, 0, 0), strict=False):
            if part is not None:
                part.masked_fill_(~rows_BT[:, None], nothing)
    return found


def _by_kernels(query: Tensor, key: Tensor, options: dict[str, Any]) -> RowStatistics | None:
    """Return the statistics, or None where there are no kernels that take these."""
    if not has_kernels(query.device):
        return None
    from joma.kernels import _attention_launch  # Triton comes with torch's CUDA builds alone

    mask = options["mask_BHTS"]
    if not _attention_launch.takes(query, key, mask):
        return None
    lowest = _HIDES if mask is None or mask.dtype == torch.bool else lowest_seen(mask)
    try:
        return _attention_launch.row_statistics(query, key, **options, lowest=lowest)
    except DoesNotFitError as error:
        warn_once(
            f"attention statistics cannot be computed by a kernel ({error}); torch's operations "
            "are slower"
        )
        return None


def lowest_seen(mask: Tensor) -> float:
    """Return what entries of an additive mask must lie above for their keys to be seen."""
    return max(_HIDES, torch.finfo(mask.dtype).min / 2)


def hides(mask: Tensor) -> Tensor:
    """Return where an additive mask hides: −∞, and what stands for it in this type."""
    return mask <= lowest_seen(mask)


class _InTorch:
    """One call of `row_statistics`, block by block; heads that share keys are rows of one product.

    Arguments are those of `row_statistics`.
    """

    def __init__(
        self,
        query_BHTD: Tensor,
        key_BHSD: Tensor,
        *,
        scale: float,
        causal: bool,
        padding_BS: Tensor | None,
        window: int | None,
        mask_BHTS: Tensor | None,
        softcap: float | None,
        rows_BT: Tensor | None,
        first: int | None,
        last: int | None,
        received: bool,
    ) -> None:
        (self._B, H, self._T, _), (self._Hk, self._S) = query_BHTD.shape, key_BHSD.shape[1:3]
        self._G = H // self._Hk
        self._offset = self._S - self._T
        """Place of query 0 among the keys."""
        self._behind = None if window is None else window - 1
        self._ahead = 0 if causal else self._behind
        self._padding_BS, self._rows_BT = padding_BS, rows_BT
        self._scale, self._softcap = scale, softcap
        self._first, self._last, self._received = first, last, received
        self._mask_BHGTS = mask_BHTS
        if mask_BHTS is not None:
            grouped = (self._Hk, self._G) if mask_BHTS.shape[1] == H else (1, 1)
            self._mask_BHGTS = mask_BHTS.unflatten(1, grouped)
        self._answer = torch.promote_types(query_BHTD.dtype, key_BHSD.dtype)
        self._answer = torch.promote_types(self._answer, torch.float32)
        # Keys that nobody sees are not even converted.
        self._visible = self._seen(range(self._T), range(self._S))
        self._query_BHGTD = query_BHTD.to(self._answer).unflatten(1, (self._Hk, self._G))
        self._key_BHSD = key_BHSD[:, :, _slice(self._visible)].to(self._answer)
        on_cpu = query_BHTD.is_cpu
        self._bounded = on_cpu and self._answer == torch.float32 and self._products_are_bounded()
        """Whether all products are known to be finite and right in float32; a GPU is not asked."""
        coarse = float32_is_coarse("cpu" if on_cpu else None)
        if self._answer == torch.float32 and (coarse or on_cpu > self._bounded):
            self._query_BHGTD = self._query_BHGTD.double()
            self._key_BHSD = self._key_BHSD.double()

    def _products_are_bounded(self) -> bool:
        vectors = (self._query_BHGTD, self._key_BHSD)
        if not all(of.numel() for of in vectors):
            return True
        lengths = [float(torch.linalg.vector_norm(of, dim=-1).max()) for of in vectors]
        return abs(self._scale) * math.prod(lengths) <= _SINGLE  # NaN is not

    def statistics(self) -> RowStatistics:
        B, Hk, G, T, S = self._B, self._Hk, self._G, self._T, self._S
        self._logsumexp, *self._of_rows = self._query_BHGTD.new_zeros(4, B, Hk, G, T)
        self._logsumexp -= math.inf
        self._mass_BHGS = self._query_BHGTD.new_zeros(B, Hk, G, S if self._received else 0)
        on_cpu = self._query_BHGTD.is_cpu
        block = _CPU_BLOCK * torch.get_num_threads() if on_cpu else _GPU_BLOCK
        size = T
        if B * Hk * G * T * S > block:
            size = max(_FEWEST_ROWS, block // (G * S))
            if self._ahead is not None:  # more rows would be compared with more keys in vain
                size = min(size, max(_FEWEST_ROWS, _MOST_ROWS // G))
        members = max(1, block // max(1, G * min(size, T) * S))
        for batch in _pieces(range(B), max(1, members // Hk)):
            real = self._real(batch)
            for rows in _pieces(range(T), max(1, size)):
                keys = self._seen(rows, real)
                for heads in _pieces(range(Hk), members) if len(keys) else ():
                    self._measure(batch, heads, rows, keys)
        asked = (True, True, self._first is not None, self._last is not None, self._received)
        found = (self._logsumexp, *self._of_rows, self._mass_BHGS)
        return [
            part.flatten(1, 2).to(self._answer) if is_asked else None
            for part, is_asked in zip(found, asked, strict=True)
        ]

    def _seen(self, rows: range, keys: range) -> range:
        """Return those of the keys that some of the rows can see by their places."""
        start, stop = keys.start, keys.stop
        if self._behind is not None:
            start = max(start, rows.start + self._offset - self._behind)
        if self._ahead is not None:
            stop = min(stop, rows.stop + self._offset + self._ahead)
        return range(start, max(start, stop))

    def _real(self, batch: range) -> range:
        """Return the visible keys from the first real one of some sequences to the last."""
        if self._padding_BS is None or not self._padding_BS.is_cpu:  # a GPU would be waited for
            return self._visible
        real = self._padding_BS[_slice(batch), _slice(self._visible)].any(0).nonzero()
        return self._visible[int(real[0]) : int(real[-1]) + 1] if len(real) else range(0)

    def _measure(self, batch: range, heads: range, rows: range, keys: range) -> None:
        """Measure rows of some sequences and heads."""
        scores = self._scores(batch, heads, rows, keys)
        reference = self._hide(scores, batch, heads, rows, keys)
        peak = scores.amax(-1, keepdim=True)
        scores.sub_(peak).clamp_(min=_LEAST)
        weights = scores.exp()
        total, peak = weights.sum(-1), peak.squeeze(-1)
        moment = scores.mul_(weights).sum(-1)
        unseen = peak <= _HIDDEN / 2
        if not self._bounded:
            total.masked_fill_(~unseen & (peak <= _MINUS_INFINITY), math.nan)  # as softmax
        log = total.log()
        here = (_slice(batch), _slice(heads), slice(None))
        entropy, on_first, on_last = (part[(*here, _slice(rows))] for part in self._of_rows)
        level = peak + log if reference is None else (peak + log).add_(reference.squeeze(-1))
        self._logsumexp[(*here, _slice(rows))] = level.masked_fill_(unseen, -math.inf)
        entropy.copy_(log.addcdiv_(moment, total, value=-1).masked_fill_(unseen, 0))
        share = total.reciprocal_().masked_fill_(unseen, 0)
        if self._first is not None:
            on_first.copy_(weights[..., : max(0, self._first - keys.start)].sum(-1).mul_(share))
        if self._last is not None:
            on_last.copy_(self._sum_of_last(weights, rows, keys, self._last).mul_(share))
        if self._received:
            if self._rows_BT is not None:
                share *= self._rows_BT[_slice(batch), None, None, _slice(rows)]
            weights = threshold(weights, _NOTHING, 0.0, inplace=True)
            mass = (share.unsqueeze(-2) @ weights).squeeze(-2)
            self._mass_BHGS[(*here, _slice(keys))] += mass

    def _scores(self, batch: range, heads: range, rows: range, keys: range) -> Tensor:
        """Return the scores of a block, (B, Hk, G, rows, keys)."""
        query_BHGTD = self._query_BHGTD[_slice(batch), _slice(heads), :, _slice(rows)]
        key_BHSD = self._key_BHSD[_slice(batch), _slice(heads), _slice(keys, self._visible.start)]
        query_NRD, key_NSD = query_BHGTD.flatten(2, 3).flatten(0, 1), key_BHSD.flatten(0, 1)
        scale = self._scale if self._softcap is None else self._scale / self._softcap
        scores = query_NRD.new_empty(*query_NRD.shape[:2], len(keys))
        torch.baddbmm(scores, query_NRD, key_NSD.mT, beta=0, alpha=scale, out=scores)
        if self._softcap is not None:
            scores.tanh_().mul_(self._softcap)
        if not self._bounded:
            scores.clamp_(min=_MINUS_INFINITY)
        return scores.view(*query_BHGTD.shape[:-1], len(keys))

    def _hide(
        self, scores: Tensor, batch: range, heads: range, rows: range, keys: range
    ) -> Tensor | None:
        """Add a mask to scores and hide keys in them.

        Returns:
            What the mask added to every score of a row and was left out, if there is such a mask.
        """
        if self._mask_BHGTS is None:
            self._hide_by_place(scores, batch, rows, keys)
            return None
        places = (batch, heads, range(self._G), rows, keys)
        sizes = zip(self._mask_BHGTS.shape, places, strict=True)
        mask = self._mask_BHGTS[
            tuple(slice(None) if size == 1 else _slice(place) for size, place in sizes)
        ]
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, _HIDDEN)
            self._hide_by_place(scores, batch, rows, keys)
            return None
        batches = len(batch) if self._padding_BS is not None else mask.shape[0]
        added = scores.new_empty(batches, *mask.shape[1:3], len(rows), len(keys)).copy_(mask)
        added.masked_fill_(hides(mask), _HIDDEN)
        self._hide_by_place(added, batch, rows, keys)
        hidden = None if self._bounded else added <= _HIDES
        most = added.amax(-1, keepdim=True)
        reference = most.where(~(most <= _HIDES), 0)  # NaN stays
        scores.add_(added.sub_(reference))
        if hidden is not None:
            scores.masked_fill_(hidden, _HIDDEN)
        return reference

    def _hide_by_place(self, values: Tensor, batch: range, rows: range, keys: range) -> None:
        """Overwrite values of keys (…, rows, keys) that are not near enough, or not real."""
        place = rows.start + self._offset
        ones = values.new_ones(len(rows), len(keys), dtype=torch.bool)
        if self._ahead is not None and keys.stop > place + self._ahead + 1:
            low = max(0, place + self._ahead + 1 - keys.start)
            later = ones[:, low:].triu(place + self._ahead + 1 - keys.start - low)
            values[..., low:].masked_fill_(later, _HIDDEN)
        if self._behind is not None:
            far = rows[-1] + self._offset - self._behind - keys.start
            if far > 0:
                before = ones[:, :far].tril(place - self._behind - 1 - keys.start)
                values[..., :far].masked_fill_(before, _HIDDEN)
        if self._padding_BS is not None:
            real = self._padding_BS[_slice(batch), _slice(keys)]
            if not (real.is_cpu and real.all()):
                values.masked_fill_(~real[:, None, None, None], _HIDDEN)

    def _sum_of_last(self, weights: Tensor, rows: range, keys: range, last: int) -> Tensor:
        """Return the sums of weights of each row's last keys up to its own place."""
        place = rows.start + self._offset
        start = max(keys.start, place - last + 1)
        near = range(start, max(start, min(keys.stop, place + len(rows))))
        weights = weights[..., _slice(near, keys.start)]
        inside = weights.new_ones(len(rows), len(near))
        inside = inside.triu_(place - last + 1 - near.start).tril_(place - near.start)
        return (weights * inside).sum(-1)


def _pieces(whole: range, most: int) -> Iterator[range]:
    """Yield the range in as few pieces as hold no more than `most`, all about as long."""
    count = max(1, -(-len(whole) // most))
    size = max(1, -(-len(whole) // count))
    return (whole[at : at + size] for at in range(0, len(whole), size))


def _slice(part: range, start: int = 0) -> slice:
    return slice(part.start - start, part.stop - start)

"""Row statistics of softmax attention for few scores on a CPU, with all of them in memory at once.

Up to some ten thousand scores the calls cost more than the numbers, so there are as few calls as
possible: what hides keys is joined before the product, which adds it, and rows are only looked at
for what can be wrong with them. Scores are computed in float32, and only where a bound on the
products of queries and keys says that this is enough.

With m the greatest score of a row and p = softmax(s), the greatest weight is 1 / Σ exp(s − m), so

    log-sum-exp = m − ln max p,    entropy = −ln max p − Σ p·(s − m) = log-sum-exp − Σ p·s.

The last form takes the fewest calls; it is exact enough where scores are small and keys few.
"""

import math
import threading

import torch
from torch import Tensor
from torch.nn.functional import threshold

from joma.common.float32 import float32_is_coarse
from joma.probes._attention_sight import HIDDEN, HIDES, lowest_seen
from joma.probes._attention_written import (
    MINUS_INFINITY,
    Result,
    clear,
    mass_on_last,
    pattern,
    received_mass,
)

MOST = 1 << 20
"""So few scores are written out."""
_MOST_SQUARE = 1 << 18
"""So few where causality or a window hides about half of a square: blocks leave that out."""
SINGLE = 400.0
"""Products of a query and a key, and rows' greatest scores, up to which float32 is enough."""
_SMALL = 24.0
_SHORT = 1024
"""Scores and keys up to which log-sum-exp − Σ p·s is right to 10⁻⁵.

With more keys, Σ p is not 1 as closely, and that error is multiplied with the scores.
"""
_CPU = torch.device("cpu")
# Numbers as tensors: torch would make these of them, which takes longer than the operation.
_ZERO = torch.zeros((), dtype=torch.float32, device=_CPU)
_MINUS_INFINITY = torch.full((), MINUS_INFINITY, dtype=torch.float32, device=_CPU)
_CACHED = 1 << 18
"""So many numbers fit a core's cache."""
_TOGETHER = 4
"""Of so many vectors together a bound on their norms is made, where there are many."""
_CONVERTED, _CONVERTED_AT_MOST = 1 << 20, 1 << 21
"""About so many numbers are converted at a time: a fourth, or four times as many, take longer."""
_KEPT = 1 << 22
"""So many numbers, 16 MiB, are kept at most."""


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
) -> Result | None:
    """As `_attention_blocked.statistics`, whose arguments these are.

    None where there are too many scores, or numbers may be too large for float32.
    """
    B, H, T, D = query_BHTD.shape
    _, Hk, S, _ = key_BHSD.shape
    square = (causal or window is not None) and 2 * T > S
    if not 0 < B * H * T * S <= (_MOST_SQUARE if square else MOST) or float32_is_coarse("cpu"):
        return None
    if torch.float64 in (query_BHTD.dtype, key_BHSD.dtype):
        return None
    query, key = query_BHTD.reshape(B * Hk, -1, D), key_BHSD.reshape(B * Hk, S, D)
    most = bound(query, key, scale)
    if not most <= SINGLE:  # NaN is not
        return None
    alpha = scale if softcap is None else scale / softcap
    by_place = (T, S, causal, window) if (causal and T > 1) or window is not None else None
    added, factor = _added(mask_BHTS, padding_BS, by_place)
    early = None if softcap is not None else _as_product(added, query.shape[0], Hk == H)
    memory = _Memory(query, key)
    scores = _products(query, key, alpha, early, factor, memory).view(B, H, T, S)
    if softcap is not None:
        scores.tanh_().mul_(softcap)
    if added is not None and early is None:
        scores.add_(added, alpha=factor)
    small, peak, unseen = most <= _SMALL and S <= _SHORT, None, None
    # A row may see no key, or what a mask adds may be too large.
    if mask_BHTS is not None or padding_BS is not None or T > S:
        peak = scores.amax(-1)
        least = float(peak.min())
        if not least >= -SINGLE:  # NaN is not
            unseen = peak <= _MINUS_INFINITY
        if mask_BHTS is not None and mask_BHTS.dtype != torch.bool:
            greatest = float(peak.max())
            if not greatest <= SINGLE:
                return None
            if unseen is not None and not ((peak >= -SINGLE) | unseen).all():
                return None
            small = small and -_SMALL <= least <= greatest <= _SMALL
    out = None if memory.weights is None else memory.weights.view(scores.shape)
    weights = torch.softmax(scores, -1, out=out)
    if small:
        if peak is None:  # each query sees the key at its own place
            own = (S - T, -2, -1)
            logsumexp = scores.diagonal(*own) - weights.diagonal(*own).log()
        else:
            logsumexp = peak.sub_(weights.amax(-1).log_())
        entropy = (logsumexp - torch.linalg.vecdot(weights, scores)).relu_()
    else:
        peak = scores.amax(-1) if peak is None else peak
        log = weights.amax(-1).log_()
        moment = scores.sub_(peak.unsqueeze(-1)).mul_(weights).sum(-1)
        if S > _SHORT:
            total = weights.sum(-1)  # 1, but for how softmax adds up long rows
            log, moment = log.sub_(total.log()), moment.div_(total)
        logsumexp, entropy = peak.sub_(log), _ZERO - moment.add_(log)
    on_first = None if first is None else weights[..., :first].sum(-1)
    on_last = None if last is None else mass_on_last(weights, last)
    found: Result = [logsumexp, entropy, on_first, on_last]
    if unseen is not None:
        clear(found, unseen)
    share = None
    if received:
        share = torch.ones_like(entropy) if unseen is None else unseen.logical_not().float()
    found.append(None if share is None else received_mass(weights, share, rows_BT))
    return found


def bound(query: Tensor, key: Tensor, scale: float) -> float:
    """A bound of all products of a query and a key; NaN or ∞ if there is none."""
    queries = abs(scale) * _longest(query)
    if key.numel() > _CACHED and key.dtype == torch.float16:
        # Its norms take ten times as long as those of other types, its extremes do not.
        least, greatest = key.aminmax()
        extreme = float(torch.maximum(greatest, -least))  # NaN where there is one
        most = queries * math.sqrt(key.shape[-1]) * extreme
        if most <= SINGLE:
            return most
    if key.numel() > _CACHED and key.is_contiguous():
        # The norm of several keys together bounds each, and takes two thirds of the time.
        together = math.gcd(key.shape[:-1].numel(), _TOGETHER)
        most = queries * _longest(key.view(-1, together * key.shape[-1]))
        if most <= SINGLE:
            return most
    return queries * _longest(key)


def _longest(vectors: Tensor) -> float:
    """The greatest norm, to within 0.4%; in the way that is fast for the type."""
    wide = torch.float32 if vectors.dtype == torch.float16 else None
    return float(torch.linalg.vector_norm(vectors, dim=-1, dtype=wide).max())


def _added(
    mask_BHTS: Tensor | None,
    padding_BS: Tensor | None,
    by_place: tuple[int, int, bool, int | None] | None,
) -> tuple[Tensor | None, float]:
    """What is added to the scores to hide keys and for the mask, and what it is multiplied with.

    That is `HIDDEN`, or 1 where a mask of numbers was given.
    """
    hidden = None if by_place is None else pattern(*by_place, torch.float32, _CPU)
    if padding_BS is not None:
        padded = padding_BS.logical_not().float().view(len(padding_BS), 1, 1, -1)
        hidden = padded if hidden is None else hidden + padded
    if mask_BHTS is not None and mask_BHTS.dtype == torch.bool:
        masked = mask_BHTS.logical_not().view(torch.uint8).float()  # faster than from bool
        hidden = masked if hidden is None else hidden + masked
        mask_BHTS = None
    if mask_BHTS is None:
        return hidden, HIDDEN
    numbers = mask_BHTS.float()
    lowest = lowest_seen(mask_BHTS)
    if lowest > HIDES:
        numbers = threshold(numbers, lowest, HIDDEN)
    # From −∞ a weight of 0 times is NaN; and from 4·10³⁰ on, numbers would undo what hides.
    numbers = numbers.clamp(HIDDEN, -HIDES)
    return (numbers if hidden is None else numbers.add(hidden, alpha=HIDDEN)), 1.0


def _as_product(added: Tensor | None, count: int, alike: bool) -> Tensor | None:
    """What is added, in the shape of the products, (N, R, S), if it has that without a copy."""
    if added is None or added.ndim == 2:
        return added if alike or added is None or len(added) == 1 else None
    batch, heads, rows, keys = added.shape
    fits = (alike or heads == rows == 1) and batch * heads in (1, count)
    return added.reshape(batch * heads, rows, keys) if fits else None


class _Memory:
    """Where scores, weights and converted keys go: None is new memory, for what fits a cache.

    Attributes:
        heads: Of so many heads of keys together
        keys: so many keys are converted at a time.
        scores: (N, R, S), or None.
        weights: (N, R, S), or None.
        converted: For the numbers of converted keys, or None.
    """

    def __init__(self, query_NRD: Tensor, key_NSD: Tensor) -> None:
        (N, R, _), (_, S, D) = query_NRD.shape, key_NSD.shape
        self.heads, self.keys = N, S
        self.scores = self.weights = self.converted = None
        count = N * R * S if N * R * S > _CACHED else 0
        numbers = 0
        if key_NSD.dtype != torch.float32 and N * S * D > _CACHED:
            # A product of fewer heads than threads would leave some without work.
            self.heads = min(N, max(torch.get_num_threads(), _CONVERTED // (S * D)))
            self.keys = min(S, max(1, _CONVERTED_AT_MOST // (self.heads * D)))
            numbers = self.heads * self.keys * D
        if count or numbers:
            memory = scratch(2 * count + numbers, _ZERO)
            if count:
                self.scores, self.weights = memory[: 2 * count].view(2, N, R, S)
            if numbers:
                self.converted = memory[2 * count :]


def _products(
    query_NRD: Tensor,
    key_NSD: Tensor,
    alpha: float,
    added: Tensor | None,
    factor: float,
    memory: _Memory,
) -> Tensor:
    """Return alpha · query · keyᵀ + factor · added, (N, R, S), in float32."""
    query_NRD, found = query_NRD.float(), memory.scores
    if memory.converted is None:
        added, factor = (_ZERO, 0) if added is None else (added, factor)
        key_NSD = key_NSD.float()
        return torch.baddbmm(added, query_NRD, key_NSD.mT, beta=factor, alpha=alpha, out=found)
    # Converted a few heads at a time, keys are still in the cache when they are multiplied.
    if found is None:
        found = query_NRD.new_empty(*query_NRD.shape[:2], key_NSD.shape[1])
    heads = (one.split(memory.heads) for one in (query_NRD, key_NSD, found))
    for query, keys, rows in zip(*heads, strict=True):
        for key, out in zip(keys.split(memory.keys, 1), rows.split(memory.keys, 2), strict=True):
            key = memory.converted[: key.numel()].view(key.shape).copy_(key)
            if out.is_contiguous():
                torch.baddbmm(out, query, key.mT, beta=0, alpha=alpha, out=out)
            else:  # torch would multiply one head after the other, each by one thread
                out.copy_(torch.baddbmm(_ZERO, query, key.mT, beta=0, alpha=alpha))
    return found if added is None else found.add_(added, alpha=factor)


def scratch(count: int, like: Tensor) -> Tensor:
    """Memory for so many numbers, whatever they are now; on a CPU the thread's last, if it fits.

    Memory that the process has not touched before costs more than a pass over it.
    """
    if like.device.type != "cpu" or like.dtype != torch.float32 or count > _KEPT:
        return like.new_empty(count)
    if _kept.buffer is None or _kept.buffer.numel() < count:
        with torch.inference_mode(False):
            _kept.buffer = torch.empty(count, dtype=torch.float32, device="cpu")
    return _kept.buffer[:count]


class _Kept(threading.local):
    buffer: Tensor | None = None


_kept = _Kept()

"""Row statistics of softmax attention with all scores in memory at once: for few of them.

Up to some ten thousand scores the calls cost more than the numbers, so there are as few of them as
possible. `statistics` is for any device and any numbers, and nothing in it is decided by what the
numbers are: on a GPU the host waits for nothing. `statistics_within` is for a CPU and for scores
with a bound, which it computes itself.
"""

import functools
import threading

import torch
from torch import Tensor
from torch.nn.functional import threshold

from joma.common.float32 import float32_is_coarse
from joma.probes._attention_sight import HIDDEN, hides, to_add

MINUS_INFINITY = -1e30
"""Stands for a score of −∞ of a key that is seen: above `HIDDEN`, below all other scores."""
LEAST = -80.0
"""Bound of x: e⁻⁸⁰ is nothing next to 1, and below it exponentials are slow and then inexact."""
NOTHING = 1e-34
_ZERO = torch.zeros((), dtype=torch.float32, device="cpu")
_CACHED = 1 << 18
"""So many numbers fit a core's cache."""
_SHORT = 1 << 16
"""Patterns of so many places are kept, too."""
_KEPT = 1 << 21
"""So many numbers, 8 MiB, are kept at most."""

Result = list[Tensor | None]
"""Log-sum-exp, entropy, mass on the first and last keys, mass received; None if not asked for."""


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

    The arguments are those of `_attention_blocked.statistics`. NaN, infinite and huge scores are
    hidden as others are, and scores of −∞ count as softmax has them.
    """
    B, H, T, D = query_BHTD.shape
    Hk, S = key_BHSD.shape[1:3]
    answer = working = torch.float32
    if torch.float64 in (query_BHTD.dtype, key_BHSD.dtype):
        answer = working = torch.float64
    elif float32_is_coarse():
        working = torch.float64
    query = query_BHTD.reshape(B * Hk, -1, D).to(working)
    key = key_BHSD.reshape(B * Hk, S, D).to(working)
    scores = query.new_empty(B * Hk, query.shape[1], S)
    alpha = scale if softcap is None else scale / softcap
    torch.baddbmm(scores, query, key.mT, beta=0, alpha=alpha, out=scores)
    if softcap is not None:
        scores.tanh_().mul_(softcap)
    scores = scores.clamp_(min=MINUS_INFINITY).view(B, H, T, S)
    if mask_BHTS is not None:
        if mask_BHTS.dtype == torch.bool:
            scores.masked_fill_(~mask_BHTS, HIDDEN)
        else:
            scores.add_(mask_BHTS).masked_fill_(hides(mask_BHTS), HIDDEN)
    if causal or window is not None:
        scores.masked_fill_(_pattern(T, S, causal, window, torch.bool, query.device), HIDDEN)
    if padding_BS is not None:
        scores.masked_fill_(~padding_BS[:, None, None], HIDDEN)
    peak = scores.amax(-1, keepdim=True)
    if mask_BHTS is not None and mask_BHTS.dtype != torch.bool:
        peak.clamp_(min=HIDDEN)
    scores.sub_(peak).clamp_(min=LEAST)
    weights = scores.exp()
    total, peak = weights.sum(-1), peak.squeeze(-1)
    moment = scores.mul_(weights).sum(-1)
    unseen = peak <= HIDDEN / 2
    total.masked_fill_(~unseen & (peak <= MINUS_INFINITY), torch.nan)  # as softmax
    log = total.log()
    found: Result = [peak.add_(log), log.addcdiv_(moment, total, value=-1)]
    found.append(None if first is None else weights[..., :first].sum(-1).div_(total))
    found.append(None if last is None else _mass_on_last(weights, last).div_(total))
    _clear(found, unseen)
    share = total.reciprocal_().masked_fill_(unseen, 0) if received else None
    found.append(None if share is None else _received(weights, share, rows_BT))
    return (
        found
        if answer == working
        else [part if part is None else part.to(answer) for part in found]
    )


def statistics_within(
    query_BHTD: Tensor,
    key_BHSD: Tensor,
    within: float,
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
    """The same in float32, on a CPU; None where a number may be too large for that.

    With m the greatest score of a row, x = s − m and p = softmax(s), the greatest weight is
    1 / Σ eˣ, so the log-sum-exp is m − ln max p and the entropy −ln max p − Σ p·x.

    `within` is what no product of a query and a key, and no row's greatest score, may exceed.
    """
    B, H, T, D = query_BHTD.shape
    Hk, S = key_BHSD.shape[1:3]
    query, key = query_BHTD.reshape(B * Hk, -1, D), key_BHSD.reshape(B * Hk, S, D)
    if not abs(scale) * longest(query) * longest(key) <= within:  # NaN is not
        return None
    alpha = scale if softcap is None else scale / softcap
    scores = _products(query, key, alpha)
    if softcap is not None:
        scores.tanh_().mul_(softcap)
    scores = scores.view(B, H, T, S)
    adds = False
    if mask_BHTS is not None:
        scores.add_(to_add(mask_BHTS))
        adds = mask_BHTS.dtype != torch.bool
    if (causal and T > 1) or window is not None:
        scores.add_(_pattern(T, S, causal, window, torch.float32, query.device))
    if padding_BS is not None:
        hidden = padding_BS.logical_not().to(torch.float32)
        scores.add_(hidden.view(B, 1, 1, S), alpha=HIDDEN)
    if adds:
        scores.clamp_(min=HIDDEN)  # from −∞, which a weight of 0 times is NaN
    peak_BHT1 = scores.amax(-1, keepdim=True)
    unseen = None
    if mask_BHTS is not None or padding_BS is not None or T > S:
        least, greatest = torch.aminmax(peak_BHT1)
        if adds and not float(greatest) <= within:  # NaN is not
            return None
        if not float(least) >= -within:
            unseen = peak_BHT1.squeeze(-1) <= MINUS_INFINITY
            if adds and not ((peak_BHT1.squeeze(-1) >= -within) | unseen).all():
                return None
    weights = scores.softmax(-1)
    log = weights.amax(-1).log_()
    moment = scores.sub_(peak_BHT1).mul_(weights).sum(-1)
    found: Result = [peak_BHT1.squeeze(-1).sub_(log), torch.rsub(moment.add_(log), 0)]
    found.append(None if first is None else weights[..., :first].sum(-1))
    found.append(None if last is None else _mass_on_last(weights, last))
    if unseen is not None:
        _clear(found, unseen)
    if received:
        share = torch.ones_like(log) if unseen is None else unseen.logical_not().to(log.dtype)
        found.append(_received(weights, share, rows_BT))
    else:
        found.append(None)
    return found


def _products(query_NRD: Tensor, key_NSD: Tensor, alpha: float) -> Tensor:
    """Return alpha · query · keyᵀ, (N, R, S), in float32."""
    query_NRD = query_NRD.to(torch.float32)
    size = key_NSD[0].numel()
    if key_NSD.dtype == torch.float32 or len(key_NSD) * size <= _CACHED:
        key_NSD = key_NSD.to(torch.float32)
        return torch.baddbmm(_ZERO, query_NRD, key_NSD.mT, beta=0, alpha=alpha)
    # Converted a few heads at a time, keys are still in the cache when they are multiplied.
    found = query_NRD.new_empty(*query_NRD.shape[:2], key_NSD.shape[1])
    heads = max(1, _CACHED // size)
    converted = scratch(heads * size, query_NRD)
    pieces = (query_NRD.split(heads), key_NSD.split(heads), found.split(heads))
    for query, key, out in zip(*pieces, strict=True):
        key = converted[: key.numel()].view(key.shape).copy_(key)
        torch.baddbmm(out, query, key.mT, beta=0, alpha=alpha, out=out)
    return found


def longest(vectors: Tensor) -> float:
    """The greatest norm, to within 0.4%; in the way that is fast for the type."""
    wide = torch.float32 if vectors.dtype == torch.float16 else None
    return float(torch.linalg.vector_norm(vectors, dim=-1, dtype=wide).amax())


def _clear(found: Result, unseen: Tensor) -> None:
    """Sets what rows that see no key have."""
    for part, nothing in zip(found, (-torch.inf, 0, 0, 0), strict=True):
        if part is not None:
            part.masked_fill_(unseen, nothing)


def _received(weights_BHTS: Tensor, share_BHT: Tensor, rows_BT: Tensor | None) -> Tensor:
    """The mass each key gets from all queries; `share_BHT` is what a weight of 1 stands for."""
    if rows_BT is not None:
        share_BHT *= rows_BT[:, None]
    weights_BHTS = threshold(weights_BHTS, NOTHING, 0.0, inplace=True)
    return (share_BHT.unsqueeze(-2) @ weights_BHTS).squeeze(-2)


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


def _pattern(
    T: int, S: int, causal: bool, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What causality and a window hide: True, or `HIDDEN` to add; kept where it is small."""
    made = _kept_pattern if T * S <= _SHORT else _kept_pattern.__wrapped__
    return made(T, S, causal, window, dtype, device)


@functools.lru_cache(maxsize=8)
def _kept_pattern(
    T: int, S: int, causal: bool, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    with torch.inference_mode(False):
        hidden = torch.zeros(T, S, dtype=torch.bool, device=device)
        one = torch.ones_like(hidden)
        if causal:
            hidden |= one.triu(S - T + 1)
        if window is not None:
            hidden |= one.tril(S - T - window)
            if not causal:
                hidden |= one.triu(S - T + window)
        return hidden if dtype == torch.bool else hidden.to(dtype).mul_(HIDDEN)


def _mass_on_last(weights_BHTS: Tensor, last: int) -> Tensor:
    T, S = weights_BHTS.shape[-2:]
    near = weights_BHTS.new_ones(T, S).tril_(S - T).triu_(S - T - last + 1)
    return (weights_BHTS * near).sum(-1)

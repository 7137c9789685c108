"""Row statistics of softmax attention with all scores in memory at once: for few of them.

The sums are those of `_attention_blocked`, written out in as few calls as possible, for up to some
ten thousand scores the calls cost more than the numbers. Nothing is decided by what the numbers
are unless `careful` is False, so on a GPU the host waits for nothing.
"""

import functools
import threading

import torch
from torch import Tensor

from joma.common.float32 import float32_is_coarse
from joma.probes._attention_sight import HIDDEN, hides, to_add

MINUS_INFINITY = -1e30
"""Stands for a score of −∞ of a key that is seen: above `HIDDEN`, below all other scores."""
LEAST = -80.0
"""Bound of x: e⁻⁸⁰ is nothing next to 1, and below it exponentials are slow and then inexact."""
NOTHING = 1e-34
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
    careful: bool = True,
    most: float = torch.inf,
) -> Result | None:
    """Log-sum-exp, entropy, mass on the first and last keys (B, H, T), mass received (B, H, S).

    The arguments are those of `_attention_blocked.statistics`.

    Args:
        careful: Whether NaN, infinite and huge scores are hidden, too, and scores of −∞ count as
            softmax has them. Without it products of queries and keys must be below 10²⁹.
        most: The greatest score a row may have at most where numbers are added and `careful` is
            False; None is returned where one has more, or is not a number.
    """
    B, H, T, D = query_BHTD.shape
    Hk, S = key_BHSD.shape[1:3]
    G = H // Hk
    working = torch.promote_types(query_BHTD.dtype, key_BHSD.dtype)
    answer = torch.float64 if working == torch.float64 else torch.float32
    working = torch.float64 if answer == torch.float64 or float32_is_coarse() else torch.float32
    query = query_BHTD.to(working).reshape(B * Hk, G * T, D)
    key = key_BHSD.to(working).reshape(B * Hk, S, D)
    count = B * H * T * S
    buffers = scratch(2 * count, query).view(2, B * Hk, G * T, S)
    scores, weights = buffers[0], buffers[1]
    alpha = scale if softcap is None else scale / softcap
    torch.baddbmm(scores, query, key.mT, beta=0, alpha=alpha, out=scores)
    if softcap is not None:
        scores.tanh_().mul_(softcap)
    if careful:
        scores.clamp_(min=MINUS_INFINITY)
    scores_BHTS = scores.view(B, H, T, S)
    adds = mask_BHTS is not None and mask_BHTS.dtype != torch.bool
    if mask_BHTS is not None:
        _apply(scores_BHTS, mask_BHTS, weights.view(-1), careful=careful)
    if causal or window is not None:
        pattern = _pattern(T, S, causal, window, working, query.device, careful)
        scores_BHTS.masked_fill_(pattern, HIDDEN) if careful else scores_BHTS.add_(pattern)
    if padding_BS is not None:
        hidden = ~padding_BS[:, None, None]
        if careful:
            scores_BHTS.masked_fill_(hidden, HIDDEN)
        else:
            scores_BHTS.add_(hidden.to(working), alpha=HIDDEN)
    peak = scores.amax(-1, keepdim=True)
    if adds:
        peak.clamp_(min=HIDDEN)
    scores.sub_(peak).clamp_(min=LEAST)
    torch.exp(scores, out=weights)
    total, peak = weights.sum(-1), peak.squeeze(-1)
    moment = torch.mul(scores, weights, out=scores).sum(-1)
    plain = padding_BS is None and mask_BHTS is None and T <= S and not careful
    unseen = None
    if not plain:
        unseen = peak <= (HIDDEN / 2 if careful else MINUS_INFINITY)
        if adds and not careful and not ((peak.abs() <= most) | unseen).all():
            return None
    if careful and unseen is not None:
        total = total.masked_fill(~unseen & (peak <= MINUS_INFINITY), torch.nan)  # as softmax
    log = total.log()
    found: list[Tensor | None] = [peak.add_(log), log.addcdiv(moment, total, value=-1)]
    weights_BHTS, total_BHT = weights.view(B, H, T, S), total.view(B, H, T)
    found.append(None if first is None else weights_BHTS[..., :first].sum(-1).div_(total_BHT))
    found.append(None if last is None else _mass_on_last(weights_BHTS, last).div_(total_BHT))
    if unseen is not None:
        found = [
            None if it is None else it.view(B, H, T).masked_fill_(unseen.view(B, H, T), nothing)
            for it, nothing in zip(found, (-torch.inf, 0, 0, 0), strict=True)
        ]
    if received:
        share = 1 / total if unseen is None else (1 / total).masked_fill_(unseen, 0)
        share = share.view(B, H, 1, T)
        if rows_BT is not None:
            share = share * rows_BT[:, None, None]
        torch.threshold_(weights, NOTHING, 0.0)
        found.append((share @ weights_BHTS).squeeze(-2))
    else:
        found.append(None)
    shapes = [(B, H, T)] * 4 + [(B, H, S)]
    return [
        None if it is None else it.view(shape).to(answer)
        for it, shape in zip(found, shapes, strict=True)
    ]


def scratch(count: int, like: Tensor) -> Tensor:
    """Memory for so many numbers, whatever they are now; on a CPU the thread's last, if it fits.

    Memory that the process has not touched before costs more than a pass over it.
    """
    if like.device.type != "cpu" or like.dtype != torch.float32 or count > _KEPT:
        return like.new_empty(count)
    if _kept.buffer is None or _kept.buffer.numel() < count:
        with torch.inference_mode(False):
            _kept.buffer = torch.empty(count)
    return _kept.buffer[:count]


class _Kept(threading.local):
    buffer: Tensor | None = None


_kept = _Kept()


def _apply(scores_BHTS: Tensor, mask_BHTS: Tensor, free: Tensor, *, careful: bool) -> None:
    """Adds what a mask adds, and hides what it hides; `free` may be written to."""
    if not careful:
        scores_BHTS.add_(to_add(mask_BHTS, free))
    elif mask_BHTS.dtype == torch.bool:
        scores_BHTS.masked_fill_(~mask_BHTS, HIDDEN)
    else:
        scores_BHTS.add_(mask_BHTS).masked_fill_(hides(mask_BHTS), HIDDEN)


@functools.lru_cache(maxsize=8)
def _pattern(
    T: int,
    S: int,
    causal: bool,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    as_bool: bool,
) -> Tensor:
    """What causality and a window hide: True, or `HIDDEN` to add."""
    with torch.inference_mode(False):
        hidden = torch.zeros(T, S, dtype=torch.bool, device=device)
        one = torch.ones_like(hidden)
        if causal:
            hidden |= one.triu(S - T + 1)
        if window is not None:
            hidden |= one.tril(S - T - window)
            if not causal:
                hidden |= one.triu(S - T + window)
        return hidden if as_bool else torch.zeros(T, S, dtype=dtype).masked_fill_(hidden, HIDDEN)


def _mass_on_last(weights_BHTS: Tensor, last: int) -> Tensor:
    T, S = weights_BHTS.shape[-2:]
    near = weights_BHTS.new_ones(T, S).tril_(S - T).triu_(S - T - last + 1)
    return (weights_BHTS * near).sum(-1)

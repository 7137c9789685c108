"""Row statistics of softmax attention with all scores in memory at once: for few of them.

The sums are those of `_attention_blocked`, written out in as few calls as possible, for up to some
ten thousand scores the calls cost more than the numbers. Nothing is decided by what the numbers
are unless a bound of them is given, so on a GPU the host waits for nothing.
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
    within: float | None = None,
) -> Result | None:
    """Log-sum-exp, entropy, mass on the first and last keys (B, H, T), mass received (B, H, S).

    The arguments are those of `_attention_blocked.statistics`, and `within`: how large a product
    of a query and a key, and a row's greatest score, may be; None is returned where it might be
    larger, or NaN. Without a bound NaN, infinite and huge scores are hidden as well, scores of −∞
    count as softmax has them, and nothing is decided by the numbers: on a GPU the host does not
    wait.
    """
    B, H, T, D = query_BHTD.shape
    Hk, S = key_BHSD.shape[1:3]
    careful = within is None
    answer = working = torch.float32
    if torch.float64 in (query_BHTD.dtype, key_BHSD.dtype):
        answer = working = torch.float64
    elif careful and float32_is_coarse():
        working = torch.float64
    query = query_BHTD.reshape(B * Hk, -1, D).to(working)
    key = key_BHSD.reshape(B * Hk, S, D)
    size = 2 * B * H * T * S
    # So many heads of keys at a time that they stay in the cache between bound and product; with
    # several threads that wins nothing.
    heads = len(key)
    if not careful and torch.get_num_threads() == 1:
        heads = max(1, min(heads, _CACHED // (S * D)))
    convert = key.dtype != working and heads < len(key)
    memory = scratch(size + (heads * S * D if convert else 0), query)
    scores, weights = memory[:size].view(2, B * Hk, -1, S).unbind()
    alpha = scale if softcap is None else scale / softcap
    longest = 0.0 if careful else abs(scale) * float(_norms(query).amax())
    pieces = [(query, key, scores)]
    if heads < len(key):
        pieces = zip(query.split(heads), key.split(heads), scores.split(heads), strict=True)
    for asking, part, out in pieces:
        if convert:
            part = memory[size : size + part.numel()].view(part.shape).copy_(part)
        part = part.to(working)
        if within is not None and not longest * float(_norms(part).amax()) <= within:
            return None
        torch.baddbmm(out, asking, part.mT, beta=0, alpha=alpha, out=out)
    if softcap is not None:
        scores.tanh_().mul_(softcap)
    if careful:
        scores.clamp_(min=MINUS_INFINITY)
    scores, weights = scores.view(B, H, T, S), weights.view(B, H, T, S)
    if mask_BHTS is not None:
        _apply(scores, mask_BHTS, weights.view(-1), careful=careful)
    if causal or window is not None:
        made = _pattern if T * S <= _SHORT else _pattern.__wrapped__
        pattern = made(T, S, causal, window, working, query.device, careful)
        scores.masked_fill_(pattern, HIDDEN) if careful else scores.add_(pattern)
    if padding_BS is not None:
        hidden = ~padding_BS[:, None, None]
        if careful:
            scores.masked_fill_(hidden, HIDDEN)
        else:
            scores.add_(hidden.to(working), alpha=HIDDEN)
    peak = scores.amax(-1, keepdim=True)
    adds = mask_BHTS is not None and mask_BHTS.dtype != torch.bool
    if adds:
        peak.clamp_(min=HIDDEN)
    scores.sub_(peak).clamp_(min=LEAST)
    torch.exp(scores, out=weights)
    total, peak = weights.sum(-1), peak.squeeze(-1)
    moment = scores.mul_(weights).sum(-1)
    unseen = None
    if within is not None and (mask_BHTS is not None or padding_BS is not None or T > S):
        least, greatest = peak.aminmax()
        if adds and not float(greatest) <= within:  # NaN is not
            return None
        if not float(least) >= -within:
            unseen = peak <= MINUS_INFINITY
            if adds and not ((peak >= -within) | unseen).all():
                return None
    elif careful:
        unseen = peak <= HIDDEN / 2
        total.masked_fill_(~unseen & (peak <= MINUS_INFINITY), torch.nan)  # as softmax
    log = total.log()
    found: Result = [peak.add_(log), log.addcdiv_(moment, total, value=-1)]
    found.append(None if first is None else weights[..., :first].sum(-1).div_(total))
    found.append(None if last is None else _mass_on_last(weights, last).div_(total))
    if unseen is not None:
        for part, nothing in zip(found, (-torch.inf, 0, 0, 0), strict=True):
            if part is not None:
                part.masked_fill_(unseen, nothing)
    found.append(_received(weights, total, unseen, rows_BT) if received else None)
    return (
        found
        if answer == working
        else [part if part is None else part.to(answer) for part in found]
    )


def _norms(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1)


def _received(
    weights_BHTS: Tensor, total_BHT: Tensor, unseen_BHT: Tensor | None, rows_BT: Tensor | None
) -> Tensor:
    """The mass each key gets from all queries."""
    share_BHT = 1 / total_BHT
    if unseen_BHT is not None:
        share_BHT.masked_fill_(unseen_BHT, 0)
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
        return hidden if as_bool else hidden.to(dtype).mul_(HIDDEN)


def _mass_on_last(weights_BHTS: Tensor, last: int) -> Tensor:
    T, S = weights_BHTS.shape[-2:]
    near = weights_BHTS.new_ones(T, S).tril_(S - T).triu_(S - T - last + 1)
    return (weights_BHTS * near).sum(-1)

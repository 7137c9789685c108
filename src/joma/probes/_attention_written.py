"""Row statistics of softmax attention with all scores in memory at once: for few on a GPU.

`statistics` is for any device and any numbers, and nothing in it is decided by what the numbers
are: on a GPU the host waits for nothing. What few scores on a CPU need is in `_attention_few`.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import threshold

from joma.common.float32 import float32_is_coarse
from joma.probes._attention_sight import HIDDEN, hides

MINUS_INFINITY = -1e30
"""Stands for a score of −∞ of a key that is seen: above `HIDDEN`, below all other scores."""
LEAST = -80.0
"""Bound of x: e⁻⁸⁰ is nothing next to 1, and below it exponentials are slow and then inexact."""
NOTHING = 1e-34
_SHORT = 1 << 16
"""Patterns of so many places are kept, too."""

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
        scores.masked_fill_(pattern(T, S, causal, window, torch.bool, query.device), HIDDEN)
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
    found.append(None if last is None else mass_on_last(weights, last).div_(total))
    clear(found, unseen)
    share = total.reciprocal_().masked_fill_(unseen, 0) if received else None
    found.append(None if share is None else received_mass(weights, share, rows_BT))
    return (
        found
        if answer == working
        else [part if part is None else part.to(answer) for part in found]
    )


def clear(found: Result, unseen: Tensor) -> None:
    """Sets what rows that see no key have."""
    for part, nothing in zip(found, (-torch.inf, 0, 0, 0), strict=True):
        if part is not None:
            part.masked_fill_(unseen, nothing)


def received_mass(weights_BHTS: Tensor, share_BHT: Tensor, rows_BT: Tensor | None) -> Tensor:
    """The mass each key gets from all queries; `share_BHT` is what a weight of 1 stands for."""
    if rows_BT is not None:
        share_BHT *= rows_BT[:, None]
    weights_BHTS = threshold(weights_BHTS, NOTHING, 0.0, inplace=True)
    return (share_BHT.unsqueeze(-2) @ weights_BHTS).squeeze(-2)


def pattern(
    T: int, S: int, causal: bool, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What causality and a window hide: True, or 1; kept where it is small."""
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
        return hidden.to(dtype)


def mass_on_last(weights_BHTS: Tensor, last: int) -> Tensor:
    T, S = weights_BHTS.shape[-2:]
    near = weights_BHTS.new_ones(T, S).tril_(S - T).triu_(S - T - last + 1)
    return (weights_BHTS * near).sum(-1)

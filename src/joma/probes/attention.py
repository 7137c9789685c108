"""What softmax attention does, row by row, without the attention matrix.

For scores s of one query and its weights p = softmax(s), the entropy −Σ p ln p is
log-sum-exp − Σ p·s: both are sums over the keys that can be added up block by block, as flash
attention does, so that T × S numbers are never in memory at once. Low entropy is attention on few
tokens; JoMA (Fig. 6, 7) sees it fall and bounce back in training.

All is computed without gradients, in float32 whatever the model's precision (float64 for float64).
Entropies are right to 10⁻⁴ however peaked the rows are.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.kernels.attention import row_statistics
from joma.probes import _checks

_NOTHING_TO_SWITCH_OFF = nullcontext()


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """Of every query row; a row that sees no key has log-sum-exp −∞ and all else 0.

    Attributes:
        logsumexp: ln Σ exp(score) over the keys the row sees, (..., H, T).
        entropy: −Σ p ln p in nats, (..., H, T): 0 for one key, ln n for n keys alike.
        first: mass on the first keys, (..., H, T), where it was asked for.
        last: mass on the last keys up to the query's own place, (..., H, T), where asked for.
        received: mass each key gets from all queries together, (..., H, S), where asked for.
    """

    logsumexp: Tensor
    entropy: Tensor
    first: Tensor | None = None
    last: Tensor | None = None
    received: Tensor | None = None


def attention_statistics(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    padding: Tensor | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    rows: Tensor | None = None,
    first: int | None = None,
    last: int | None = None,
    received: bool = False,
) -> AttentionStatistics:
    """Log-sum-exp, entropy and masses of every query row, in memory linear in T and S.

    Queries stand at the end of the keys: with T ≠ S, query i has the place i + S − T among them.
    A key is seen where everything given allows it.

    Args:
        q: queries (..., H, T, D), or (T, D) of one head.
        k: keys (..., Hk, S, D), or (S, D); H must be a multiple of Hk, and heads h of queries share
            the head h·Hk // H of keys.
        causal: a query sees no key past its own place.
        scale: what products of queries and keys are multiplied with; 1/√D where None.
        padding: (..., S), bool, True for a real key.
        window: a query sees only keys nearer than this: with 1 just that at its own place.
        mask: broadcasts to (..., H, T, S). Bool: True where the key is seen. Numbers: added to the
            scores; −∞, at most −10³⁰, and at most half the lowest number of the mask's type hide
            the key. A row hidden altogether sees no key, though softmax would spread it evenly.
        softcap: c, for scores c·tanh(score / c) before the mask, as Gemma 2 has them.
        rows: (..., T), bool, True for a real query; others see no key.
        first: return the mass on keys 0 … first − 1.
        last: return the mass on the `last` keys up to the query's own place.
        received: return the mass every key receives.

    Raises:
        ValueError: where shapes, types or devices do not fit.
    """
    q, k = _checks.dense("q", q, 2), _checks.dense("k", k, 2)
    alone = q.ndim == 2 and k.ndim == 2
    if alone:
        q, k = q.unsqueeze(0), k.unsqueeze(0)
    whole = _fitting(q, k)
    lead = whole[:-3]
    if padding is not None:
        padding = _of_places("padding", padding, (*lead, whole[-1]), "key")
    if mask is not None:
        mask = _mask(mask, whole)
    if rows is not None:
        rows = _of_places("rows", rows, (*lead, whole[-2]), "query")
    _checks.one_device(q=q, k=k, padding=padding, mask=mask, rows=rows)
    options: dict[str, Any] = {
        "causal": bool(causal),
        "scale": q.shape[-1] ** -0.5 if scale is None else _number("scale", scale),
        "padding_BS": padding,
        "window": None if window is None else whole_number("window", window, 1),
        "mask_BHTS": mask,
        "softcap": None if softcap is None else _number("softcap", softcap, above=0),
        "rows_BT": rows,
        "first": None if first is None else whole_number("first", first, 1),
        "last": None if last is None else whole_number("last", last, 1),
        "received": bool(received),
    }
    if not (q.ndim == k.ndim == 4 and q.shape[0] == k.shape[0]):
        q, k = _of_one_batch(q, lead), _of_one_batch(k, lead)
    with _without_autocast(q.device.type):  # all that was given is cut from its graph
        found = row_statistics(q, k, **options)
    if alone or len(lead) != 1:
        shape = () if alone else whole[:-2]
        found = [part if part is None else part.reshape(*shape, part.shape[-1]) for part in found]
    logsumexp, entropy, *masses = found
    assert logsumexp is not None
    assert entropy is not None
    return AttentionStatistics(logsumexp, entropy, *masses)


def attention_entropy(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    padding: Tensor | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Entropy of every query row in nats, (..., H, T), or (T,) for queries (T, D) of one head.

    Arguments and errors as of `attention_statistics`.
    """
    return attention_statistics(
        q,
        k,
        causal=causal,
        scale=scale,
        padding=padding,
        window=window,
        mask=mask,
        softcap=softcap,
    ).entropy


def with_sinks(statistics: AttentionStatistics, sinks: Tensor) -> AttentionStatistics:
    """Return statistics of rows in which one more outcome, which is no key, has a score.

    With w the share that stays on the keys, the entropy is w·E − w ln w − (1 − w) ln (1 − w).

    Args:
        statistics: Statistics over the keys, without the sink.
        sinks: (H,), the score of the sink of each head.
    """
    keys = statistics.logsumexp.double()
    over = sinks.detach().double().unsqueeze(-1) - keys  # +∞ where a row sees no key
    log_kept, log_lost = -softplus(over), -softplus(-over)
    kept, lost = log_kept.exp(), log_lost.exp()
    seen = ~keys.isneginf()
    entropy = kept * (statistics.entropy - log_kept) - lost * log_lost

    def narrowed(values: Tensor, otherwise: float) -> Tensor:
        return values.where(seen, otherwise).to(statistics.entropy.dtype)

    masses = (
        None if mass is None else narrowed(mass * kept, 0.0)
        for mass in (statistics.first, statistics.last)
    )
    logsumexp = narrowed(keys + softplus(over), -math.inf)
    return AttentionStatistics(logsumexp, narrowed(entropy, 0.0), *masses)


@dataclass(frozen=True, eq=False)
class AttentionMeans:
    """Means over the query rows that see a key, for every head; `layer` has them for all heads.

    Attributes:
        entropy: in nats, (H,).
        effective: of exp(entropy), to how many tokens a row attends, (H,).
        rows: how many rows the means are over, (H,).
        first: mass on the first keys, (H,), where it was measured.
        last: mass on the last keys, (H,), where it was measured.
    """

    entropy: Tensor
    effective: Tensor
    rows: Tensor
    first: Tensor | None = None
    last: Tensor | None = None

    @property
    def layer(self) -> "AttentionMeans":
        """The same over the rows of all heads together, without axes."""
        share = self.rows / self.rows.sum()
        means = (self.entropy, self.effective, self.first, self.last)
        entropy, effective, *masses = (None if x is None else (share * x).sum() for x in means)
        assert entropy is not None
        assert effective is not None
        return AttentionMeans(entropy, effective, self.rows.sum(), *masses)


class AttentionAccumulator:
    """Means of `AttentionStatistics` of one layer, over the rows of all batches.

    Every query row that sees a key counts the same; axes before the heads are batches.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def update(self, statistics: AttentionStatistics) -> None:
        """Adds the rows of a batch; heads and masses as in earlier updates."""
        new = _row_sums(statistics)
        have = self._sums or new
        if have.keys() != new.keys():
            raise JomaError(
                f"statistics must hold {', '.join(have)} as before, got {', '.join(new)}"
            )
        shapes = [(tuple(sums["rows"].shape), sums["rows"].device) for sums in (have, new)]
        if shapes[0] != shapes[1]:
            raise JomaError(
                f"statistics must have {shapes[0][0][0]} heads on {shapes[0][1]} as before, got "
                f"{shapes[1][0][0]} on {shapes[1][1]}"
            )
        self._sums = {name: have[name] + new[name] for name in have} if self._sums else dict(new)

    def compute(self) -> AttentionMeans:
        """The means over all rows so far."""
        if not self._sums:
            raise JomaError("compute needs rows: call update first")
        rows = self._sums["rows"]
        if not (rows > 0).all():
            raise JomaError("compute needs a row that sees a key in every head, got none so far")
        means = {name: value / rows for name, value in self._sums.items() if name != "rows"}
        return AttentionMeans(rows=rows.to(torch.int64), **means)


def _row_sums(statistics: AttentionStatistics) -> dict[str, Tensor]:
    """Sums over batches and rows, (H,), in float64."""
    seen = ~statistics.logsumexp.isneginf()
    values = {
        "rows": seen,
        "entropy": statistics.entropy,
        # A row that sees no key has entropy 0, but attends to no token, not to one.
        "effective": statistics.entropy.exp() * seen,
    }
    masses = {"first": statistics.first, "last": statistics.last}
    values |= {name: mass for name, mass in masses.items() if mass is not None}
    return {name: _over_rows(value) for name, value in values.items()}


def _over_rows(values: Tensor) -> Tensor:
    heads = 1 if values.ndim == 1 else values.shape[-2]
    values = values.reshape(-1, heads, values.shape[-1])
    return values.sum((0, 2), dtype=torch.float64)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else _NOTHING_TO_SWITCH_OFF


def _fitting(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """The shape (..., H, T, S) of the scores of queries (..., H, T, D) and keys (..., Hk, S, D)."""
    if not (q.is_floating_point() and k.is_floating_point()):
        name, value = ("k", k) if q.is_floating_point() else ("q", q)
        raise JomaError(f"{name} must be floating-point numbers, got {value.dtype}")
    queries, keys = q.shape, k.shape
    if len(queries) < 3 or len(keys) < 3 or queries[-1] != keys[-1] or queries[-1] == 0:
        raise JomaError(
            "q and k must be (..., H, T, D) and (..., Hk, S, D) of one D, or both (T, D), got "
            f"shapes {tuple(queries)} and {tuple(keys)}"
        )
    *lead, H, T, _ = queries
    *lead_of_keys, Hk, S, _ = keys
    if Hk == 0 or H % Hk:
        raise JomaError(f"q must have a multiple of the heads of k, got {H} heads and {Hk}")
    if lead != lead_of_keys:
        lead = _checks.together(q=queries[:-3], k=keys[:-3])
    return (*lead, H, T, S)


def _of_one_batch(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(..., H, places, D) as (B, H, places, D)."""
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])


def _of_places(name: str, real: Tensor, shape: tuple[int, ...], of: str) -> Tensor:
    """`real` as (B, places), bool."""
    real = _checks.dense(name, real, 1)
    if real.dtype != torch.bool:
        raise JomaError(f"{name} must be bool, True for a real {of}, got {real.dtype}")
    if real.ndim == 2 and real.shape == shape:
        return real
    try:
        return real.expand(shape).reshape(math.prod(shape[:-1]), shape[-1])
    except RuntimeError:
        raise JomaError(
            f"{name} must broadcast to {shape}, one per {of}, got shape {tuple(real.shape)}"
        ) from None


def _mask(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mask as (B, H, T, S), where axes but the last may be 1."""
    mask = _checks.dense("mask", mask, 0)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise JomaError(
            f"mask must be bool, True where a key is seen, or numbers to add, got {mask.dtype}"
        )
    sizes = zip(mask.shape[::-1], shape[::-1], strict=False)
    if mask.ndim > len(shape) or any([size != whole and size != 1 for size, whole in sizes]):  # noqa: C419
        raise JomaError(f"mask must broadcast to {shape}, got shape {tuple(mask.shape)}")
    if mask.ndim == len(shape) == 4 and mask.shape[-1] == shape[-1]:
        return mask
    mask = mask[(None,) * (len(shape) - mask.ndim)]
    lead = shape[:-3] if math.prod(mask.shape[:-3]) != 1 else mask.shape[:-3]
    mask = mask.expand(*lead, *mask.shape[-3:-1], shape[-1])
    return mask.reshape(math.prod(lead), *mask.shape[-3:])


def _number(name: str, value: float, *, above: float = -math.inf) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > above):
        least = "" if above == -math.inf else f" above {above:g}"
        raise JomaError(f"{name} must be a finite number{least}, got {value!r}")
    return number

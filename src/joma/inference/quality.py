"""What a smaller cache costs: loss on a text, and the cost of one layer.

Everything takes a model and a policy of `joma.inference`, None for the plain model with the cache
of transformers.

- `text_loss`: loss of every token of some windows, cache bytes and tokens per second, in one pass.
- `layer_costs`: what it costs to cut one layer alone.
- `attention_profiles`: what the probes say of each layer beforehand.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from joma.common.checks import whole_number
from joma.common.paired import Paired, paired
from joma.errors import JomaError
from joma.inference.policies import Full, Policy
from joma.inference.support import text_config
from joma.probes import AttentionAccumulator, AttentionCall, watch_attention

Policies = Policy | Sequence[Policy] | None
"""One policy for all layers, one for each, or None for the plain model with transformers' cache."""


@contextmanager
def opened(model: nn.Module, policies: Policies) -> Iterator[Any]:
    """Open a cache of the policies; that of transformers for None."""
    if policies is None:
        from transformers import DynamicCache

        config: Any = model.config
        yield DynamicCache(config=config)
        return
    from joma.inference import cache  # which needs transformers

    with cache(model, policies) as kv:
        yield kv


def bytes_held(kv: Any) -> int:
    """Return the bytes a cache holds now, ours or one of transformers."""
    own = getattr(kv, "nbytes", None)
    if own is not None:
        return int(own)
    tensors = [one for layer in kv.layers for one in (layer.keys, layer.values) if one is not None]
    return sum(one.numel() * one.element_size() for one in tensors)


def _check_windows(tokens: Tensor, least: int) -> None:
    if tokens.ndim != 2 or tokens.is_floating_point() or not len(tokens):
        raise JomaError(
            f"windows must be whole numbers of shape (windows, tokens), got {tokens.dtype} of "
            f"shape {tuple(tokens.shape)}"
        )
    if tokens.shape[1] < least:
        raise JomaError(f"windows must have at least {least} tokens each, got {tokens.shape[1]}")


@dataclass(frozen=True, eq=False)
class TextLoss:
    """The loss of some windows of a text, and what the pass took.

    Attributes:
        nll: Negative log likelihood of each token after the first in nats, (windows, tokens − 1).
        first: The first of these that counts in the means.
        chunk: Tokens read at once.
        cache_bytes: Bytes of the cache for one window, when it has been read.
        tokens: Number of tokens read.
        seconds: Time to read all windows, without loading anything.
        processor_seconds: Time of the processor in it: on a busy machine, what the pass itself took
            with one thread.
    """

    nll: NDArray[np.float32]
    first: int
    chunk: int
    cache_bytes: float
    tokens: int
    seconds: float
    processor_seconds: float

    @property
    def by_window(self) -> NDArray[np.float64]:
        """Mean loss of each window."""
        return self.nll[:, self.first :].mean(1, dtype=np.float64)

    @property
    def mean(self) -> float:
        """Mean loss in nats per token."""
        return float(self.by_window.mean())

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss; infinite where that is too large for a number."""
        return math.exp(self.mean) if self.mean < 700 else math.inf

    @property
    def tokens_per_second(self) -> float:
        """Tokens read per second, loss included."""
        return self.tokens / self.seconds

    def minus(self, other: "TextLoss") -> Paired:
        """Return the difference to another loss of the same windows, paired by window.

        Raises:
            JomaError: The other has windows of another number or length.
        """
        if self.nll.shape != other.nll.shape or self.first != other.first:
            raise JomaError(
                f"other must be the loss of the same windows, {self.nll.shape} from token "
                f"{self.first} on, got {other.nll.shape} from {other.first} on"
            )
        return paired(self.by_window, other.by_window, "windows")


def text_loss(
    model: nn.Module,
    windows: Tensor,
    policies: Policies = None,
    *,
    chunk: int = 1,
    batch: int = 16,
    first: int = 0,
    report: Callable[[int], None] = lambda _: None,
) -> TextLoss:
    """Return the loss of windows of a text read through a cache.

    Each window is a text of its own, with an empty cache at its beginning. Policies that decide by
    attention or by chance evict after each chunk: a query sees what was held before its chunk, and
    its chunk. So only chunks of one token show them no more keys than their budget, and a large
    chunk flatters them.

    Args:
        model: A decoder of transformers in evaluation mode.
        windows: Tokens, (windows, tokens), with the special tokens that the model needs, as
            `joma.probes.text.text_windows` returns them.
        policies: One policy for all layers, one for each, or None for the plain model.
        chunk: Tokens read at once.
        batch: Windows read at the same time.
        first: The first of the predicted tokens that counts in the means.
        report: Is called with the number of windows that are done.

    Raises:
        JomaError: The windows are no tokens or too short, or a cache cannot serve the model.
    """
    _check_windows(windows, first + 2)
    for name, value, least in (("batch", batch, 1), ("chunk", chunk, 1), ("first", first, 0)):
        whole_number(name, value, least)
    device = next(model.parameters()).device
    nll, held, seconds, processor = [], 0, 0.0, 0.0
    for rows in windows.to(device).split(batch):
        start, busy = time.perf_counter(), time.process_time()
        with torch.no_grad(), opened(model, policies) as kv:
            losses = []
            for at in range(0, rows.shape[1], chunk):
                some, targets = rows[:, at : at + chunk], rows[:, at + 1 : at + chunk + 1]
                logits = model(input_ids=some, past_key_values=kv, use_cache=True).logits
                flat = logits[:, : targets.shape[1]].flatten(0, 1).float()
                own = cross_entropy(flat, targets.flatten(), reduction="none")
                losses.append(own.view(targets.shape))
            nll.append(torch.cat(losses, 1).cpu().numpy())
            seconds += time.perf_counter() - start
            processor += time.process_time() - busy
            held += bytes_held(kv)
        report(sum(map(len, nll)))
    per_window, read = held / len(windows), windows.numel()
    return TextLoss(np.concatenate(nll), first, chunk, per_window, read, seconds, processor)


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """How much the loss rises when one layer alone is cut.

    Attributes:
        layers: The layers that were cut.
        nll: Mean loss of each window with that layer cut, (layers, windows).
        full: Mean loss of each window with nothing cut, (windows,).
    """

    layers: tuple[int, ...]
    nll: NDArray[np.float64]
    full: NDArray[np.float64]

    @property
    def costs(self) -> NDArray[np.float64]:
        """Rise of the loss of each layer in nats per token, (layers,)."""
        return (self.nll - self.full).mean(1)


def layer_costs(
    model: nn.Module,
    windows: Tensor,
    policy: Policy,
    *,
    layers: Sequence[int] | None = None,
    chunk: int = 1,
    batch: int = 16,
    first: int = 0,
    full: TextLoss | None = None,
    report: Callable[[int], None] = lambda _: None,
) -> LayerCosts:
    """Return the cost of cutting each layer alone, all others with a full cache.

    Args:
        model: A decoder of transformers in evaluation mode.
        windows: Tokens, (windows, tokens), as of `text_loss`.
        policy: What the layer that is cut keeps.
        layers: The layers to cut; all unless given.
        chunk: Tokens read at once.
        batch: Windows read at the same time.
        first: The first of the predicted tokens that counts in the means.
        full: The loss with nothing cut, where it is known already.
        report: Is called with the number of layers that are done.

    Raises:
        JomaError: There is no such layer, or a cache cannot serve the model.
    """
    count = int(text_config(model).num_hidden_layers)
    chosen = tuple(range(count)) if layers is None else tuple(layers)
    for layer in chosen:
        if not 0 <= layer < count:
            raise JomaError(f"layers must be from 0 to {count - 1}, got {layer}")
    how: dict[str, Any] = {"chunk": chunk, "batch": batch, "first": first}
    full = text_loss(model, windows, Full(), **how) if full is None else full
    found = []
    for done, layer in enumerate(chosen, 1):
        policies = [policy if one == layer else Full() for one in range(count)]
        found.append(text_loss(model, windows, policies, **how).by_window)
        report(done)
    return LayerCosts(chosen, np.array(found).reshape(len(chosen), -1), full.by_window)


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """Attention of one layer, means over heads and windows.

    Attributes:
        layer: Number of the layer.
        entropy: Entropy of a query's attention in nats.
        effective: Mean of exp(entropy), to how many keys a query attends.
        first: Mass on the first key, 0 to 1.
        held: held[n − 1] is the share of all mass that the n keys with most of it receive, each
            head and window for itself; rises to 1. Its length is that of the windows.
    """

    layer: int
    entropy: float
    effective: float
    first: float
    held: NDArray[np.float64]

    def heavy(self, share: float) -> float:
        """Return the mass on the keys that receive most, as many as a share of the window.

        Args:
            share: Number of keys as a share of the window, 0 to 1.
        """
        if not 0 <= share <= 1:
            raise JomaError(f"share must be from 0 to 1, got {share!r}")
        return float(self.heavy_of(np.array([share]))[0])

    def heavy_of(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `heavy` of many shares at once."""
        places = np.arange(len(self.held) + 1) / len(self.held)
        return np.interp(shares, places, np.concatenate([[0.0], self.held]))


@torch.no_grad()
def attention_profiles(model: nn.Module, windows: Tensor, *, batch: int = 4) -> list[LayerProfile]:
    """Measure the attention of every layer of the plain model.

    Args:
        model: A decoder of transformers.
        windows: Tokens, (windows, tokens), with the special tokens that the model needs.
        batch: Windows read at the same time.

    Raises:
        JomaError: The windows are no tokens, or the attention of the model cannot be watched.
    """
    _check_windows(windows, 2)
    whole_number("batch", batch, 1)
    means: dict[int, AttentionAccumulator] = {}
    sums: dict[int, Tensor] = {}
    counts: dict[int, int] = {}

    def see(call: AttentionCall) -> None:
        found = call.statistics(first=1, received=True)
        means.setdefault(call.layer, AttentionAccumulator()).update(found)
        assert found.received is not None
        sorted_BHS = found.received.double().sort(-1, descending=True).values
        shares = sorted_BHS.cumsum(-1) / sorted_BHS.sum(-1, keepdim=True)
        sums[call.layer] = sums.get(call.layer, 0.0) + shares.sum((0, 1)).cpu()
        counts[call.layer] = counts.get(call.layer, 0) + shares.shape[0] * shares.shape[1]

    device = next(model.parameters()).device
    for rows in windows.split(batch):
        with watch_attention(model, see):
            # The output layer is not needed: it may take most of the time. An index, since with a
            # number the layer is copied for each row on the CPU.
            last = torch.tensor([rows.shape[1] - 1], device=device)
            model(input_ids=rows.to(device), use_cache=False, logits_to_keep=last)
    profiles = []
    for layer in sorted(means):
        mean = means[layer].compute().layer
        assert mean.first is not None
        held = (sums[layer] / counts[layer]).numpy()
        profiles.append(
            LayerProfile(layer, float(mean.entropy), float(mean.effective), float(mean.first), held)
        )
    return profiles

"""The loss of a text under a model and a cache policy."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from joma.common.checks import whole_number
from joma.common.paired import Paired, paired
from joma.errors import JomaError
from joma.inference.quality.reading import Policies, bytes_held, check_tokens, logits_of, opened


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
    check_tokens("windows", windows, first + 2)
    whole_number("batch", batch, 1)
    whole_number("first", first, 0)
    nll, held, seconds, processor = [], 0, 0.0, 0.0
    for rows in windows.split(batch):
        start, busy = time.perf_counter(), time.process_time()
        with opened(model, policies) as kv:
            parts = []
            for place, logits in logits_of(model, kv, rows, chunk):
                targets = rows[:, place + 1 : place + 1 + logits.shape[1]].to(logits.device)
                parts.append(_losses(logits[:, : targets.shape[1]], targets))
            nll.append(torch.cat(parts, 1).cpu().numpy())
            seconds += time.perf_counter() - start
            processor += time.process_time() - busy
            held += bytes_held(kv)
        report(sum(map(len, nll)))
    per_window, read = held / len(windows), windows.numel()
    return TextLoss(np.concatenate(nll), first, chunk, per_window, read, seconds, processor)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each target in float32, (B, t)."""
    flat = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return flat.view(targets.shape)

"""A model that reads tokens through a cache, and how long each takes."""

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.inference.quality.loss import Policies, bytes_held, opened


class Reader:
    """Reads tokens of one text through a cache.

    Args:
        model: The model.
        kv: The cache, empty.
        chunk: Tokens of a prompt that are read together; None for all of it.
    """

    def __init__(self, model: nn.Module, kv: Any, chunk: int | None = None) -> None:
        self.model, self.kv, self._chunk = model, kv, chunk
        parameters = inspect.signature(model.forward).parameters
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._device = next(model.parameters()).device
        self.seconds = 0.0
        """What the last call of `read` took."""

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits after the last of some tokens, (V,) in float32, having read them."""
        ids = torch.tensor([list(tokens)], device=self._device)
        start = time.perf_counter()
        logits: Tensor | None = None
        for part in ids.split(self._chunk or ids.shape[1], 1):
            out = self.model(part, past_key_values=self.kv, use_cache=True, **self._last)
            logits = out.logits[0, -1]
        assert logits is not None, "at least one token is read"
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds = time.perf_counter() - start
        return logits.float()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of what an evicting cache keeps about them."""
        return bytes_held(self.kv)


@contextmanager
def reading_with(model: nn.Module, policy: Policies, chunk: int | None = None) -> Iterator[Reader]:
    """Yield a reader of one text.

    Args:
        model: A decoder of transformers.
        policy: What the cache keeps, for all layers or one for each; None for the model as it is,
            with the cache that transformers gives it.
        chunk: Tokens of a prompt that are read together; None for all of it.
    """
    with opened(model, policy) as kv:
        yield Reader(model, kv, chunk)


def check_generates(model: nn.Module, source: str) -> None:
    """Raise JomaError for a model that cannot continue a text."""
    if not hasattr(model, "can_generate") or not model.can_generate():  # type: ignore[operator]
        raise JomaError(
            f"{source} is a {type(model).__name__}, which cannot continue a text: it has no head "
            "that predicts the next token"
        )

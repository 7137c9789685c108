"""A model continues a prompt through a cache, and its tokens become text as they come."""

import inspect
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from joma.common.quiet import quietly, reading
from joma.errors import JomaError
from joma.inference.quality import Policies, bytes_held, opened
from joma.inference.support import learned_positions, text_config
from joma.models import Loaded

_CONTEXT = 8
"""Tokens before the first one that decide how it is written, such as whether a space precedes."""


class Reader:
    """Reads tokens of one text through a cache.

    Args:
        model: The model.
        kv: The cache, empty.
        chunk: Tokens of a prompt that are read together; None for all of it.
    """

    def __init__(self, model: nn.Module, kv: Any, chunk: int | None = None) -> None:
        self._model, self._kv, self._chunk = model, kv, chunk
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
        for part in ids.split(self._chunk or ids.shape[1], 1):
            out = self._model(part, past_key_values=self._kv, use_cache=True, **self._last)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds = time.perf_counter() - start
        return out.logits[0, -1].float()  # type: ignore[possibly-undefined]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of what an evicting cache keeps about them."""
        return bytes_held(self._kv)


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


def generate_tokens(
    reader: Reader,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Yield up to `count` tokens that continue a prompt; one that ends the text is not yielded.

    Args:
        reader: Reads with some cache, which is empty.
        prompt: Tokens of the prompt.
        count: New tokens, at most.
        temperature: Logits are divided by it; 0 takes the most likely token.
        seed: Decides what is drawn; on the CPU, so that the device does not matter.
        stop: Tokens that end the text.
    """
    generator = torch.Generator().manual_seed(seed)
    read = prompt
    for _ in range(count):
        logits = reader.read(read)
        if temperature == 0:
            token = int(logits.argmax())
        else:
            share = (logits.cpu().double() / temperature).softmax(-1)
            token = int(torch.multinomial(share, 1, generator=generator))
        if token in stop:
            return
        yield token
        read = [token]


def check_generates(model: nn.Module, source: str) -> None:
    """Raise JomaError for a model that cannot continue a text."""
    if not hasattr(model, "can_generate") or not model.can_generate():  # type: ignore[operator]
        raise JomaError(
            f"{source} is a {type(model).__name__}, which cannot continue a text: it has no head "
            "that predicts the next token"
        )


def encode_prompt(loaded: Loaded, text: str, *, chat: bool = False) -> list[int]:
    """Return the tokens of a prompt, with those before it that the model was trained with.

    No token that ends a text is put after it: the model is to continue.

    Args:
        loaded: The model.
        text: The prompt.
        chat: Whether the prompt is the user's turn of a conversation, to be put into the model's
            chat template.

    Raises:
        JomaError: The prompt has no token, or the model has no chat template.
    """
    if chat:
        tokens = loaded.encode(_in_template(loaded, text), special=False)
    else:
        tokens = [*loaded.special_tokens.before, *loaded.encode(text, special=False)]
    if not tokens:
        raise JomaError("prompt must hold at least one token, got an empty text")
    return tokens


def _in_template(loaded: Loaded, text: str) -> str:
    inner: Any = getattr(loaded.tokenizer, "tokenizer", None)
    if not getattr(inner, "chat_template", None):
        raise JomaError(
            f"{loaded.source} has no chat template: leave --chat out, and write the prompt as the "
            "model was trained to read it"
        )
    turns = [{"role": "user", "content": text}]
    with reading(lambda said: f"the chat template of {loaded.source} fails ({said})"), quietly():
        return str(inner.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def stop_tokens(loaded: Loaded) -> frozenset[int]:
    """Return the tokens at which a continuation ends.

    They are what configuration and tokenizer name, and those that begin a text: a model that was
    trained on one text after the other ends one by beginning the next.
    """
    inner: Any = getattr(loaded.tokenizer, "tokenizer", None)
    found = set(loaded.special_tokens.before)
    for owner in (loaded.model.config, getattr(loaded.model, "generation_config", None), inner):
        named = getattr(owner, "eos_token_id", None)
        found.update(it for it in (named if isinstance(named, list) else [named]) if it is not None)
    return frozenset(int(it) for it in found)


def check_length(loaded: Loaded, prompt: int, new: int) -> str:
    """Return what a reader should know of a text longer than the model's context, if it is.

    Args:
        loaded: The model.
        prompt: Tokens of the prompt.
        new: Tokens to be generated.

    Raises:
        JomaError: The model's positions are learned, and there are fewer than tokens.
    """
    limit = learned_positions(text_config(loaded.model))
    if limit is not None and prompt + new > limit:
        room = limit - prompt
        right = (
            f"--max-new-tokens may be {room} at most" if room > 0 else "the prompt must be shorter"
        )
        raise JomaError(
            f"{loaded.source} has learned {limit} positions, and the prompt of {prompt} tokens "
            f"with {new} new ones needs {prompt + new}: {right}"
        )
    if loaded.context is not None and prompt + new > loaded.context:
        return (
            f"The text grows to {prompt + new} tokens, and {loaded.source} was made for "
            f"{loaded.context}: beyond them the full cache, the reference, is not reliable either."
        )
    return ""


class TextStream:
    """Turns tokens into text as they come; half a character waits for its other half.

    Args:
        loaded: The model, for its tokenizer.
        before: Tokens that precede the first one.
    """

    def __init__(self, loaded: Loaded, before: list[int]) -> None:
        assert loaded.tokenizer is not None
        self._decode = loaded.tokenizer.decode
        self._tokens = before[-_CONTEXT:]
        self._written = len(self._decode(self._tokens))

    def add(self, token: int) -> str:
        """Return the text that a further token adds, empty while a character is incomplete."""
        self._tokens.append(token)
        return "" if self._decode(self._tokens).endswith("\ufffd") else self.rest()

    def rest(self) -> str:
        """Return what is left, an incomplete character as a replacement sign."""
        added = self._decode(self._tokens)[self._written :]
        self._tokens = self._tokens[-2 * _CONTEXT :]
        self._written = len(self._decode(self._tokens))
        return added

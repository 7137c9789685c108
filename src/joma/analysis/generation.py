"""Generation with a limited cache, and what the limit costs against the full cache.

`encode_prompt` makes tokens of a prompt, `reading_with` opens a cache, `generate_tokens` continues
the prompt and `TextStream` turns tokens into text as they come. `Comparison` measures quality,
memory and latency of several caches (`joma.analysis.caches`) on the same tokens.
"""

import inspect
import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from joma.analysis.caches import FULL, NamedCache
from joma.common.progress import Progress, no_progress
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


_TIMED = 24
"""Tokens of the continuation that each further round of timing reads."""

_UNTIMED = 2
"""First tokens after a prompt, in which memory is allocated."""

_FEWEST_FOR_ERROR = 32
"""With fewer values, neighbours that depend on each other make the error far too small."""


@dataclass(frozen=True, eq=False)
class _CacheReading:
    """What one cache made of some tokens, read one by one.

    Attributes:
        nll: Negative log likelihood of each token, in nats.
        first: Which token was the most likely one at each place.
        seconds: Time of each forward pass of one token.
        bytes: Bytes held at the end.
        seen: Tokens read by then, the prompt among them.
    """

    nll: NDArray[np.float64]
    first: NDArray[np.int64]
    seconds: NDArray[np.float64]
    bytes: int
    seen: int


@dataclass(eq=False)
class Comparison:
    """Measures several caches against the full one, on one prompt.

    Three kinds of passes are made for each cache. The prompt's own last tokens are read one by one
    after the rest of it; the full cache's greedy continuation is read one by one after the whole
    prompt; and the beginning of that continuation is read again, caches taking turns, for time.

    Attributes:
        model: The model.
        prompt: Tokens of the prompt.
        caches: What is compared with the full cache.
        scored: How many of the prompt's last tokens are read one by one; 0 for none.
        new: Tokens of the full cache's continuation, at most.
        stop: Tokens that end a text.
        chunk: Tokens of the prompt that are read together; None for all of it.
        rounds: How often the continuation is read for time; 0 for no statement about speed.
    """

    model: nn.Module
    prompt: Sequence[int]
    caches: Sequence[NamedCache]
    scored: int
    new: int
    stop: Collection[int] = ()
    chunk: int | None = None
    rounds: int = 5
    _text: dict[NamedCache, _CacheReading] = field(default_factory=dict)
    _reply: dict[NamedCache, _CacheReading] = field(default_factory=dict)
    _times: list[dict[NamedCache, NDArray[np.float64]]] = field(default_factory=list)

    def run(self, progress: Progress = no_progress) -> None:
        """Measure; what is measured when it is interrupted is in `rows`.

        Args:
            progress: Called with how far it is.
        """
        sides = [FULL, *self.caches]
        total = len(sides) * (2 + max(self.rounds - 1, 0))
        start = len(self.prompt) - self.scored
        for number, cache in enumerate(sides if self.scored else ()):
            progress(f"{cache.name} on the prompt", number, total)
            self._text[cache] = self._read(cache, self.prompt[:start], self.prompt[start:])
        reply: list[int] | None = None
        for number, cache in enumerate(sides, len(sides)):
            progress(f"{cache.name} on the continuation", number, total)
            self._reply[cache] = self._read(cache, self.prompt, reply)
            reply = self._reply[FULL].first.tolist()
        assert reply is not None
        for number in range(self.rounds if len(reply) > _TIMED // 2 else 0):
            seconds = {cache: self._reply[cache].seconds for cache in sides} if not number else {}
            turns = sides if number % 2 else sides[::-1]  # a slow drift cancels
            for turn, cache in enumerate(turns if number else (), (number + 1) * len(sides)):
                progress(f"{cache.name}, time", turn, total)
                seconds[cache] = self._read(cache, self.prompt, reply[:_TIMED]).seconds
            self._times.append({cache: it[_UNTIMED:_TIMED] for cache, it in seconds.items()})
        progress("", total, total)

    def _read(
        self, cache: NamedCache, prompt: Sequence[int], tokens: Sequence[int] | None
    ) -> _CacheReading:
        """Read a prompt, then tokens one by one; where none are given, the most likely ones."""
        nll: list[float] = []
        first: list[int] = []
        seconds: list[float] = []
        with reading_with(self.model, cache.policy, self.chunk) as reader:
            logits = reader.read(prompt)
            for place in range(self.new if tokens is None else len(tokens)):
                likely = int(logits.argmax())
                if tokens is None and likely in self.stop:
                    break
                token = likely if tokens is None else tokens[place]
                nll.append(float(logits.logsumexp(-1) - logits[token]))
                first.append(likely)
                logits = reader.read([token])
                seconds.append(reader.seconds)
            return _CacheReading(
                np.array(nll, dtype=np.float64),
                np.array(first, dtype=np.int64),
                np.array(seconds, dtype=np.float64),
                reader.nbytes,
                len(prompt) + len(nll),
            )

    def rows(self) -> list[dict[str, Any]]:
        """Return what was measured so far, one row for each cache, the full one first.

        The columns are those of `joma.report.cache_cost`.
        """
        sides = [FULL, *self.caches]
        return [self._row(it) for it in sides if it in self._text or it in self._reply]

    def _row(self, cache: NamedCache) -> dict[str, Any]:
        last = self._reply.get(cache) or self._text[cache]
        whole = (self._reply if cache in self._reply else self._text)[FULL]
        row: dict[str, Any] = {
            "cache": cache.name,
            "policy": cache.kind,
            "keys": cache.keys,
            "seen": last.seen,
            "bytes": last.bytes,
            "share": last.bytes / whole.bytes,
        }
        for name, found in (("text", self._text), ("reply", self._reply)):
            row |= _quality(name, found.get(cache), found.get(FULL))
        agreement = np.empty(0)
        if cache in self._reply:
            agreement = (self._reply[cache].first == self._reply[FULL].first).astype(float)
        row["agreement"] = float(agreement.mean()) if agreement.size else math.nan
        row["agreement_error"] = block_error(agreement)
        times = [it[cache] for it in self._times]
        row["timed"] = sum(it.size for it in times)
        row["ms"] = 1000 * float(np.median(np.concatenate(times))) if times else math.nan
        ratios = [float(np.median(it[FULL]) / np.median(it[cache])) for it in self._times]
        row["speed"], row["speed_low"], row["speed_high"] = speed_interval(ratios)
        return row


def _quality(name: str, own: _CacheReading | None, full: _CacheReading | None) -> dict[str, Any]:
    nll = np.empty(0) if own is None else own.nll
    more = np.empty(0) if own is None or full is None else own.nll - full.nll
    return {
        f"{name}_tokens": int(more.size),
        f"{name}_nll": float(nll.mean()) if more.size else math.nan,
        f"{name}_cost": float(more.mean()) if more.size else math.nan,
        f"{name}_error": block_error(more),
    }


def block_error(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean of values that follow each other.

    Neighbours depend on each other, so that the means of about √n blocks are compared; the error
    for independent values is returned where it is larger. NaN of fewer than 32 values.

    >>> round(block_error(np.tile([0.0, 1.0], 50)), 2)
    0.05
    >>> round(block_error(np.repeat([0.0, 1.0], 50)), 2)
    0.17
    """
    count = values.size
    if count < _FEWEST_FOR_ERROR:
        return math.nan
    plain = float(values.std(ddof=1)) / math.sqrt(count)
    means = np.array([it.mean() for it in np.array_split(values, math.isqrt(count))])
    return max(plain, float(means.std(ddof=1)) / math.sqrt(means.size))


def speed_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of a speed measured in several rounds, and its 95% interval.

    The interval is Student's, of the logarithms: with few rounds it is wide. NaN without rounds,
    and an interval of NaN with a single one.
    """
    if not ratios:
        return math.nan, math.nan, math.nan
    logs = np.log(ratios)
    middle = float(logs.mean())
    if logs.size < 2:
        return math.exp(middle), math.nan, math.nan
    from scipy.special import stdtrit

    half = float(stdtrit(logs.size - 1, 0.975) * logs.std(ddof=1) / math.sqrt(logs.size))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)

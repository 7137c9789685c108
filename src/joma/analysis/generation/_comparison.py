"""Quality, memory and latency of several caches, measured on the same tokens."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from joma.analysis.generation._caches import FULL, NamedCache
from joma.analysis.generation._decoding import reading_with
from joma.common.progress import Progress, no_progress

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

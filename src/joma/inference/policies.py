"""Policies of a cache: which keys of a layer are kept when there is no room for all."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from joma.common.checks import check_one_of, whole_number
from joma.errors import JomaError

_LARGEST = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Held:
    """The slots of one layer's cache, as a policy sees them.

    Shapes are (B, h, C): rows of the batch, heads (1 where all heads hold the same tokens), slots.

    Attributes:
        position: Place of the slot's token in its own row, counted from the row's first real token;
            -1 for an empty slot. Slots are in no particular order.
        seen: (B, 1, 1), how many real tokens each row has read.
        received: Attention that the token has received so far, summed over the query heads that
            share the key; None unless the policy asks for it with `uses_attention`.
        layer: Number of the layer.
    """

    position: Tensor
    seen: Tensor
    received: Tensor | None
    layer: int


@dataclass(frozen=True)
class Policy(ABC):
    """Decides which keys stay. A policy is a frozen dataclass with one method, `priority`.

    The slots with the lowest priority are dropped, in each row and head for itself, after the
    attention of a step was computed. A token is read on top of `budget` keys: a query sees at most
    `budget` earlier keys, and itself.
    """

    name: ClassVar[str] = ""
    """What the policy is called on the command line."""
    uses_attention: ClassVar[bool] = False
    """Whether `Held.received` is to be measured."""
    per_head: ClassVar[bool] = False
    """Whether heads may keep different tokens."""

    @property
    @abstractmethod
    def budget(self) -> int | None:
        """Keys that each head of a layer holds between steps, at most; None without a limit."""

    @abstractmethod
    def priority(self, held: Held) -> Tensor:
        """Return a number for each slot, (B, h, C); slots with the lowest numbers are dropped.

        Empty slots are dropped first, whatever is returned for them.
        """

    def visible(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Return which keys a query sees where that follows from positions alone, else None.

        A policy that answers gives the same result however the tokens are fed in. One that does not
        evicts after each chunk: a query sees what was held before the chunk, and the chunk up to
        itself.

        Args:
            query: Positions of the queries, broadcastable with `key`.
            key: Positions of the keys.
        """
        return None

    @property
    def retention(self) -> float:
        """Share of the received attention that is left after each further token."""
        return 1.0

    @property
    def moving_sinks(self) -> int:
        """How many first tokens of each row are shown at the positions right before the window."""
        return 0

    @property
    def spec(self) -> str:
        """The policy as it is written on the command line, "window:n=64"."""
        given = ((it.name, getattr(self, it.name)) for it in fields(self))
        text = ",".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in given)
        return f"{self.name}:{text}" if text else self.name


@dataclass(frozen=True)
class Full(Policy):
    """Keep every key, the reference for all others. The model's own sliding windows still apply."""

    name = "full"
    budget = None

    def priority(self, held: Held) -> Tensor:
        """Never asked for: nothing is dropped."""
        return held.position

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Every key."""
        return key >= 0


@dataclass(frozen=True)
class Window(Policy):
    """Keep the last `n` keys, at the positions they were read at: the control for recency.

    Args:
        n: How many keys are held. A query sees the `n` tokens before it, and itself.
    """

    n: int
    name = "window"

    def __post_init__(self) -> None:
        whole_number("n", self.n, 1)

    @property
    def budget(self) -> int:
        """`n`."""
        return self.n

    def priority(self, held: Held) -> Tensor:
        """The later, the higher."""
        return held.position

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """The last `n` before the query."""
        return query - key <= self.n


@dataclass(frozen=True)
class Streaming(Policy):
    """Keep the first keys and the last ones (StreamingLLM, Xiao et al., ICLR 2024).

    With positions in the cache the model reads the text as if the dropped tokens had never been
    there: the sinks stand right before the window, however long the text. That is what lets a text
    grow beyond the model's context.

    Args:
        window: How many of the last keys are held.
        sinks: How many of the first keys of each row are held.
        positions: "cache" for positions in the cache, which needs rotary embeddings; "absolute" for
            the positions the tokens were read at; "auto" for "cache" where the model has rotary
            embeddings and "absolute" where its positions are learned.
    """

    window: int
    sinks: int = 4
    positions: Literal["auto", "cache", "absolute"] = "auto"
    name = "streaming"

    def __post_init__(self) -> None:
        whole_number("window", self.window, 1)
        whole_number("sinks", self.sinks, 0)
        check_one_of("positions", self.positions, ("auto", "cache", "absolute"))

    @property
    def budget(self) -> int:
        """Sinks and window together."""
        return self.sinks + self.window

    @property
    def moving_sinks(self) -> int:
        """The sinks, unless positions are absolute."""
        return 0 if self.positions == "absolute" else self.sinks

    def priority(self, held: Held) -> Tensor:
        """Sinks first, then the later the higher."""
        return held.position.masked_fill(held.position < self.sinks, _LARGEST)

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """The sinks, and the last `window` before the query."""
        return (key < self.sinks) | (query - key <= self.window)


@dataclass(frozen=True)
class HeavyHitter(Policy):
    """Keep the keys that received most attention (H2O, Zhang et al., NeurIPS 2023).

    Each head keeps `heavy` of them and the last `recent` keys. Query heads that share a key count
    together. Attention that a key received from tokens read in the same chunk counts, and so does
    that from its own query.

    Args:
        heavy: How many keys are held for the attention they received.
        recent: How many of the last keys are held whatever they received.
        score: "sum" for all attention received so far, which favours old tokens; "mean" for the
            average over the queries that could see the key; "decay" for a sum in which each token
            lowers the weight of what came before.
        decay: Factor per token of the "decay" score.
    """

    heavy: int
    recent: int
    score: Literal["sum", "mean", "decay"] = "sum"
    decay: float = 0.99
    name = "heavy-hitter"
    uses_attention = True
    per_head = True

    def __post_init__(self) -> None:
        whole_number("heavy", self.heavy, 1)
        whole_number("recent", self.recent, 0)
        check_one_of("score", self.score, ("sum", "mean", "decay"))
        if not 0 < self.decay < 1:
            raise JomaError(f"decay must be between 0 and 1, got {self.decay!r}")

    @property
    def budget(self) -> int:
        """Heavy and recent keys together."""
        return self.heavy + self.recent

    @property
    def retention(self) -> float:
        """`decay` for that score."""
        return self.decay if self.score == "decay" else 1.0

    def priority(self, held: Held) -> Tensor:
        """Recent keys first, then by the attention received."""
        assert held.received is not None
        score = held.received
        if self.score == "mean":  # each token asks once, the key's own among them
            score = score / (held.seen - held.position).clamp(min=1)
        return score.masked_fill(held.position >= held.seen - self.recent, torch.inf)


@dataclass(frozen=True)
class Random(Policy):
    """Keep the last `recent` keys of each head, and a uniform sample of the others.

    The control for every policy that claims to know which keys matter. The sample depends on the
    seed, the layer, the head and the token's position alone: not on the batch, the device or the
    size of the chunks.

    Args:
        n: How many keys are held.
        recent: How many of them are the last ones.
        seed: Another seed draws another sample.
    """

    n: int
    recent: int = 0
    seed: int = 0
    name = "random"
    per_head = True

    def __post_init__(self) -> None:
        whole_number("recent", self.recent, 0)
        whole_number("seed", self.seed, 0)
        whole_number("n", self.n, max(1, self.recent))

    @property
    def budget(self) -> int:
        """`n`."""
        return self.n

    def priority(self, held: Held) -> Tensor:
        """Recent keys first, then by a number that is drawn once for each token."""
        heads = torch.arange(held.position.shape[1], device=held.position.device)[:, None]
        drawn = _mixed(_mixed(_mixed(heads + 1009 * self.seed) + held.layer) + held.position)
        return drawn.masked_fill(held.position >= held.seen - self.recent, _LARGEST + 1)


POLICIES: Mapping[str, type[Policy]] = {
    it.name: it for it in (Full, Window, Streaming, HeavyHitter, Random)
}
"""Every policy, by its name on the command line."""


def parse_policy(text: str) -> Policy:
    """Return the policy that a text such as "heavy-hitter:heavy=64,recent=64" describes.

    Raises:
        JomaError: There is no such policy, or an argument is unknown, missing or impossible.
    """
    name, _, rest = text.strip().partition(":")
    kind = POLICIES.get(name)
    if kind is None:
        raise JomaError(f"cache must be one of {', '.join(map(usage, POLICIES))}, got {text!r}")
    known = {it.name: it for it in fields(kind)}
    given: dict[str, Any] = {}
    for part in filter(None, (it.strip() for it in rest.split(","))):
        key, equals, value = (it.strip() for it in part.partition("="))
        if not equals or key not in known or key in given:
            raise JomaError(f"cache must be written {usage(name)}, got {part!r} in {text!r}")
        given[key] = _number_or_word(value)
    missing = [it.name for it in known.values() if it.default is MISSING and it.name not in given]
    if missing:
        raise JomaError(f"cache must be written {usage(name)}, got {text!r} without {missing[0]}")
    try:
        return kind(**given)
    except JomaError as error:
        raise JomaError(f"cache {text!r} is impossible: {error}") from error


def usage(name: str) -> str:
    """Return how a policy is written: "streaming:window=N[,sinks=4][,positions=auto]"."""
    text = ""
    for it in fields(POLICIES[name]):
        comma = "," if text else ""
        needed = it.default is MISSING
        text += f"{comma}{it.name}=N" if needed else f"[{comma}{it.name}={it.default}]"
    return f"{name}:{text}" if text else name


def _number_or_word(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _mixed(number: Tensor) -> Tensor:
    """Return a number below 2^31 in which every bit depends on all bits of the argument.

    It is the 32-bit finaliser of MurmurHash3, with products kept inside 64 bits.
    """
    x = number.long() & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return (x ^ (x >> 16)) & _LARGEST

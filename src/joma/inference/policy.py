"""What a cache policy is: which keys of a layer are kept when there is no room for all."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from joma.errors import JomaError

__all__ = ["Held", "Policy"]


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
        given = ",".join(f"{it.name}={_written(getattr(self, it.name))}" for it in fields(self))
        return f"{self.name}:{given}" if given else self.name


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_count(name: str, value: Any, *, least: int = 1) -> None:
    """Raise unless a policy's argument is a whole number of tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise JomaError(f"{name} must be a whole number of tokens, at least {least}, got {value!r}")

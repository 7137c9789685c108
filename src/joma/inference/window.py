"""Keep the last keys: recency alone."""

from dataclasses import dataclass

from torch import Tensor

from joma.inference.policy import Held, Policy, check_count


@dataclass(frozen=True)
class Window(Policy):
    """Keep the last `n` keys, at the positions they were read at.

    Args:
        n: How many keys are held. A query sees the `n` tokens before it, and itself.
    """

    n: int
    name = "window"

    def __post_init__(self) -> None:
        check_count("n", self.n)

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

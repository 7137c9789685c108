"""Keep every key: the reference for all other policies."""

from dataclasses import dataclass

from torch import Tensor

from joma.inference.policy import Held, Policy


@dataclass(frozen=True)
class Full(Policy):
    """Keep every key. The model's own sliding windows still apply."""

    name = "full"

    @property
    def budget(self) -> None:
        """No limit."""
        return None

    def priority(self, held: Held) -> Tensor:
        """Never asked for: nothing is dropped."""
        return held.position

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Every key."""
        return key >= 0

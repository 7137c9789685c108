"""Keep the first keys and the last ones: attention sinks (StreamingLLM, Xiao et al., ICLR 2024)."""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from joma.errors import JomaError
from joma.inference.policy import Held, Policy, check_count

Positions = Literal["auto", "cache", "absolute"]


@dataclass(frozen=True)
class Streaming(Policy):
    """Keep the first `sinks` keys of each row and the last `window` ones.

    With positions in the cache the model reads the text as if the dropped tokens had never been
    there: the sinks stand right before the window, however long the text. That is what lets a text
    grow beyond the model's context.

    Args:
        window: How many of the last keys are held.
        sinks: How many of the first keys are held.
        positions: "cache" for positions in the cache, which needs rotary embeddings; "absolute" for
            the positions the tokens were read at; "auto" for "cache" where the model has rotary
            embeddings and "absolute" where its positions are learned.
    """

    window: int
    sinks: int = 4
    positions: Positions = "auto"
    name = "streaming"

    def __post_init__(self) -> None:
        check_count("window", self.window)
        check_count("sinks", self.sinks, least=0)
        if self.positions not in get_args(Positions):
            raise JomaError(
                f"positions must be one of {', '.join(get_args(Positions))}, got {self.positions!r}"
            )

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
        position = held.position
        return position.masked_fill(position < self.sinks, 2**31 - 1)

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """The sinks, and the last `window` before the query."""
        return (key < self.sinks) | (query - key <= self.window)

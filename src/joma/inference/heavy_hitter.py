"""Keep the keys that received most attention (H2O, Zhang et al., NeurIPS 2023)."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.inference.policy import Held, Policy, check_count

Score = Literal["sum", "mean", "decay"]


@dataclass(frozen=True)
class HeavyHitter(Policy):
    """Keep, for each head, the `heavy` keys that received most attention and the last `recent`.

    Query heads that share a key count together. Attention that a key received from tokens read in
    the same chunk counts, and so does that from its own query.

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
    score: Score = "sum"
    decay: float = 0.99
    name = "heavy-hitter"
    uses_attention = True
    per_head = True

    def __post_init__(self) -> None:
        check_count("heavy", self.heavy)
        check_count("recent", self.recent, least=0)
        if self.score not in get_args(Score):
            raise JomaError(
                f"score must be one of {', '.join(get_args(Score))}, got {self.score!r}"
            )
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

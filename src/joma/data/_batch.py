"""What the sources of data share: batches, and random choices without repetition."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from joma import random
from joma.common.checks import check_at_least
from joma.errors import JomaError


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of all members of an ensemble, and the latents behind them.

    Attributes:
        tokens: Shape (E, B, T), int64: E members, B sequences, T positions; 0 is padding.
        labels: The sequences' classes, shape (E, B), int64.
        latents: For each level from the lowest up, the values of its latents behind every
            sequence, shape (E, B, latents of the level), bool; last the class, one-hot.
        weights: The share of the batch each sequence stands for, shape (E, B); None if all stand
            for the same.
        leading: How many identical padding tokens the first position stands for; 1 is itself only.
    """

    tokens: Tensor
    labels: Tensor
    latents: tuple[Tensor, ...]
    weights: Tensor | None = None
    leading: int = 1

    def __post_init__(self) -> None:
        if self.tokens.ndim != 3:
            raise JomaError(
                f"tokens must have the shape (members, batch, positions), "
                f"got {tuple(self.tokens.shape)}"
            )
        rows = self.tokens.shape[:2]
        for name, value in (("labels", self.labels), ("weights", self.weights)):
            if value is not None and value.shape != rows:
                raise JomaError(
                    f"{name} must have the shape {tuple(rows)} of the tokens' sequences, "
                    f"got {tuple(value.shape)}"
                )
        for level, value in enumerate(self.latents):
            if value.ndim != 3 or value.shape[:2] != rows or value.dtype != torch.bool:
                raise JomaError(
                    f"latents of level {level} must be bool of shape {(*rows, 'latents')}, "
                    f"got {value.dtype} of shape {tuple(value.shape)}"
                )
        check_at_least(1, leading=self.leading)

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch on a device."""
        return Batch(
            self.tokens.to(device),
            self.labels.to(device),
            tuple(value.to(device) for value in self.latents),
            None if self.weights is None else self.weights.to(device),
            self.leading,
        )


def distinct_sets(seed: int, stream: str, population: int, size: int, count: int) -> Tensor:
    """Return different random subsets of 0 … population − 1, shape (count, population), bool.

    The caller must make sure that there are as many.
    """
    seed_1 = torch.tensor([seed])

    def draw(attempt: int) -> Tensor:
        keys = random.words(seed_1, stream, attempt, count * population).view(count, population)
        return keys.argsort(dim=-1, stable=True)[:, :size].sort(dim=-1).values

    chosen = torch.tensor(_distinct_rows(draw, count))
    return torch.zeros(count, population, dtype=torch.bool).scatter_(1, chosen, value=True)


def spread_codes(seed: int, stream: str, bits: int, count: int) -> Tensor:
    """Return random codes of 0 and 1, repeating only once all are used, shape (count, bits)."""
    seed_1 = torch.tensor([seed])

    def draw(attempt: int) -> Tensor:
        return random.words(seed_1, name, attempt, count * bits).view(count, bits) >> 31

    codes: list[tuple[int, ...]] = []
    while len(codes) < count:
        name = f"{stream}{len(codes)}"
        codes += _distinct_rows(draw, min(count - len(codes), 2**bits))
    return torch.tensor(codes)


def _distinct_rows(draw: Callable[[int], Tensor], count: int) -> list[tuple[int, ...]]:
    """Return the first different rows that come up in attempt after attempt."""
    rows: dict[tuple[int, ...], None] = {}
    attempt = 0
    while len(rows) < count:
        rows |= dict.fromkeys(tuple(row) for row in draw(attempt).tolist())
        attempt += 1
    return list(rows)[:count]

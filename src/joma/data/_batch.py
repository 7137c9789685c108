"""What every source of data hands out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from joma.errors import JomaError


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of all members of an ensemble, and the latents behind them.

    Attributes:
        tokens: shape (E, B, T), int64: E members, B sequences, T positions; 0 is padding.
        labels: the sequences' classes, shape (E, B), int64.
        latents: for each level from the lowest up, the values of its latents behind every
            sequence, shape (E, B, latents of the level), bool; last the class, one-hot.
        weights: what share of the batch each sequence stands for, shape (E, B); None if all stand
            for the same.
        leading: how many identical padding tokens the first position stands for; 1 is itself only.
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
        if self.leading < 1:
            raise JomaError(f"leading must be at least 1, got {self.leading}")

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on a device."""
        return Batch(
            self.tokens.to(device),
            self.labels.to(device),
            tuple(value.to(device) for value in self.latents),
            None if self.weights is None else self.weights.to(device),
            self.leading,
        )

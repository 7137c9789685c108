"""What optimizers are told: settings of Adam, and numbers given per member."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from joma.errors import JomaError


class Settings(NamedTuple):
    """Settings of Adam.

    Attributes:
        betas: decay of the first and of the second moment.
        epsilon: added to the root of the second moment.
        learning_rates: one for each member, (E,).
    """

    betas: tuple[float, float]
    epsilon: float
    learning_rates: Tensor


def per_member(
    name: str, given: float | Sequence[float], members: int, device: torch.device
) -> Tensor:
    """Return (E,) in float64, from one number or one for each member."""
    values = torch.as_tensor(given, dtype=torch.float64, device=device)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != members):
        raise JomaError(f"{name} must be one number or {members}, got {given}")
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise JomaError(f"{name} must be finite and not negative, got {given}")
    return values.expand(members).clone()

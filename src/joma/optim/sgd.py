"""Plain gradient descent over a stack of networks, each member with its own learning rate."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from joma.optim.stacked import Stacked, per_member


class StackedSGD(Stacked):
    """Gradient descent without momentum or weight decay, for parameters (E, ...).

    Member e moves exactly as under `torch.optim.SGD(lr=learning_rates[e])`. JoMA's theory is of
    gradient flow, of which this is the Euler step. It computes in the precision of the parameters
    alone: there are no master weights for bfloat16.

    Args:
        parameters: Names and parameters with the member axis first, as `named_parameters()` gives
            them.
        learning_rates: One learning rate per member, or one for all.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        learning_rates: float | Sequence[float],
    ) -> None:
        super().__init__(parameters)
        self.learning_rates = per_member(
            "learning_rates", learning_rates, self.members, self.device
        )

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self.steps += 1
        for p in self.parameters.values():
            if p.grad is not None:
                rates = self.learning_rates.to(p.dtype).view(-1, *[1] * (p.ndim - 1))
                p.sub_(rates * p.grad)

    def settings(self) -> dict[str, Any]:
        """Return what decides how the state continues, for a checkpoint to be recognised by."""
        return {"optimizer": "sgd", "learning_rates": self.learning_rates.tolist()}


OPTIMIZERS = {"stacked_sgd": StackedSGD}

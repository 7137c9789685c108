"""Plain gradient descent over a stack of networks, each member with its own learning rate."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.optim._adam_settings import per_member


class StackedSGD:
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
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        if not self.parameters:
            raise JomaError("parameters must hold at least one that wants a gradient, got none")
        first = next(iter(self.parameters.values()))
        members = first.shape[0]
        if any(p.shape[0] != members for p in self.parameters.values()):
            raise JomaError(f"parameters must all have {members} members")
        self.learning_rates = per_member("learning_rates", learning_rates, members, first.device)
        self.steps = torch.zeros((), dtype=torch.int64, device=first.device)

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self.steps += 1
        for p in self.parameters.values():
            if p.grad is not None:
                rates = self.learning_rates.to(p.dtype).view(-1, *[1] * (p.ndim - 1))
                p.sub_(rates * p.grad)

    def restart(self) -> None:
        """Reset the step counter, which is all the state there is."""
        self.steps.zero_()

    def warm_up(self) -> None:
        """Prepare for a capture; nothing here compiles at its first use."""

    def captured(self) -> None:
        """Take note of a captured step; its gradients are read where autograd left them."""

    def zero_grad(self) -> None:
        """Drop the gradients; the next backward pass brings its own memory."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def halve(self, names: Iterable[str]) -> None:
        """Refuse bfloat16, for which master weights would be needed."""
        if list(names):
            raise JomaError("precision must not be bfloat16 for StackedSGD, got bfloat16")

    def originals(self) -> dict[str, Tensor]:
        """Return the parameters by name, in the precision in which they are moved."""
        return {name: p.data for name, p in self.parameters.items()}

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Do nothing for the block: parameters are never rounded."""
        yield

    def refresh(self) -> None:
        """Do nothing after parameters were written to: no rounded copies exist."""

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs next to the parameters: the step counter."""
        return {"steps": self.steps}

    def settings(self) -> dict[str, Any]:
        """Return what decides how the state continues, for a checkpoint to be recognised by."""
        return {"optimizer": "sgd", "learning_rates": self.learning_rates.tolist()}

"""Layers of E networks side by side: every parameter has the member axis E first.

Member e of a stack computes what the same layer alone would: nothing is summed or normalised over
the member axis. A layer computes in the precision of what it is given. Initial values are those of
torch's own layers, drawn by `joma.random` from the member's seed and the parameter's name, so that
they depend neither on the neighbours nor on the device.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma import random
from joma.errors import JomaError


class Linear(nn.Module):
    """E linear maps: y = x·weight + bias.

    Args:
        members: Number of networks, E.
        inputs: Width of x.
        outputs: Width of y.
        bias: Whether there is one.
    """

    def __init__(self, members: int, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        # (in, out), not torch's (out, in): the gradient xᵀ·dy is then made in the parameter's own
        # layout, and is not copied.
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs)) if bias else None

    def forward(self, x_ENI: Tensor) -> Tensor:
        """Return (E, ..., out) for (E, ..., in)."""
        rows, kind = x_ENI.flatten(1, -2), x_ENI.dtype
        if self.bias is None:
            y = torch.bmm(rows, self.weight.to(kind))
        else:
            y = torch.baddbmm(self.bias.to(kind), rows, self.weight.to(kind))
        return y.unflatten(1, x_ENI.shape[1:-1])

    @torch.no_grad()
    def draw(self, name: str, seeds: Tensor) -> None:
        """Draw torch's default for linear maps: uniform on ±1/√in."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        for kind, parameter in self.named_parameters():
            draw_uniform(parameter, f"{name}.{kind}", seeds, bound)


class Embedding(nn.Module):
    """E tables of token vectors, N(0, 1) at the start.

    Args:
        members: Number of networks, E.
        tokens: Number of tokens.
        width: Width of a vector.
    """

    def __init__(self, members: int, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, tokens, width))

    def forward(self, tokens_EN: Tensor) -> Tensor:
        """Return the vectors of (E, ...) tokens: (E, ..., width)."""
        members, tokens, width = self.weight.shape
        # On a GPU reading the values would wait for it, and could not be captured.
        if (
            not tokens_EN.is_cuda
            and tokens_EN.numel()
            and not 0 <= tokens_EN.min() <= tokens_EN.max() < tokens
        ):
            raise JomaError(
                f"tokens must lie from 0 to {tokens - 1}, got some from {int(tokens_EN.min())} to "
                f"{int(tokens_EN.max())}"
            )
        first = torch.arange(members, device=tokens_EN.device) * tokens
        places = tokens_EN + first.view(-1, *[1] * (tokens_EN.ndim - 1))
        return functional.embedding(places, self.weight.view(members * tokens, width))

    @torch.no_grad()
    def draw(self, name: str, seeds: Tensor) -> None:
        """Draw torch's default for embeddings: N(0, 1)."""
        each, kind = self.weight[0].numel(), self.weight.dtype
        drawn = random.normal(seeds, f"{name}.weight", 0, each, dtype=kind)
        self.weight.copy_(drawn.view_as(self.weight))


class LayerNorm(nn.Module):
    """E layer norms, each with its own scale and shift.

    Args:
        members: Number of networks, E.
        width: Width of what is normalised.
    """

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, width))
        self.bias = nn.Parameter(torch.empty(members, width))

    def forward(self, x_END: Tensor) -> Tensor:
        """Normalise the last axis of (E, ..., width)."""
        members, width = self.weight.shape
        each = (members, *[1] * (x_END.ndim - 2), width)
        normal = functional.layer_norm(x_END, (width,))
        weight, bias = (p.to(x_END.dtype).view(each) for p in (self.weight, self.bias))
        return torch.addcmul(bias, normal, weight)

    @torch.no_grad()
    def draw(self, name: str, seeds: Tensor) -> None:
        """Set torch's default for layer norms: scale 1, shift 0."""
        del name, seeds
        self.weight.fill_(1)
        self.bias.fill_(0)


def draw_uniform(parameter: Tensor, stream: str, seeds_E: Tensor, bound: float) -> None:
    """Fill a parameter (E, ...) uniformly on ± bound; seeds and the stream's name decide."""
    drawn = random.uniform(seeds_E, stream, 0, parameter[0].numel(), dtype=parameter.dtype)
    parameter.copy_(drawn.view(parameter.shape).mul_(2).sub_(1).mul_(bound))

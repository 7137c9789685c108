"""LoRA: a frozen matrix and a trained product of two thin ones (Hu et al., 2021)."""

import math

import torch
from torch import Tensor, nn


class LoRALinear(nn.Module):
    """A linear layer W₀ + BA, of which A (r, n) and B (m, r) are trained and W₀ is not.

    B starts at zero: the layer begins as the one it replaces.

    Args:
        base: The layer with W₀, which is frozen.
        rank: r.
        random: Draws A.
    """

    def __init__(self, base: nn.Linear, rank: int, random: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        weight = base.weight
        bound = math.sqrt(3 / base.in_features)
        start = torch.rand(rank, base.in_features, generator=random) * 2 - 1
        self.down = nn.Parameter((start * bound).to(weight.device, weight.dtype))
        self.up = nn.Parameter(weight.new_zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return (W₀ + BA)x, without forming BA."""
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def add_lora(layers: nn.Module, rank: int, seed: int) -> int:
    """Replace every linear layer inside a module by one with LoRA, from the weights it has now.

    Args:
        layers: The module, such as the stack of layers of a model.
        rank: Rank of the trained matrices.
        seed: Chooses their random numbers.

    Returns:
        How many layers were replaced.
    """
    random = torch.Generator().manual_seed(seed)
    found = [
        (parent, name, child)
        for parent in layers.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    for parent, name, child in found:
        setattr(parent, name, LoRALinear(child, rank, random))
    return len(found)

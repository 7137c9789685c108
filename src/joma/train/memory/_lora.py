"""LoRA (Hu et al., 2022) as the peft library adds it, for models without numbers."""

from typing import Any

import torch
from torch import Tensor, nn

from joma.optim.galore import selection


class LoraLayer(nn.Module):
    """A frozen layer and the product of two small matrices, which are trained in float32.

    Args:
        base: The layer.
        weight: Its matrix.
        rank: Rank of the product.
    """

    def __init__(self, base: nn.Module, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.base = base
        sides: tuple[int, ...] = tuple(weight.shape)
        if isinstance(base, nn.Linear):
            sides = sides[1], sides[0]
        place: dict[str, Any] = {"device": weight.device, "dtype": torch.float32, "bias": False}
        self.first = nn.Linear(sides[0], rank, **place)
        self.second = nn.Linear(rank, sides[1], **place)

    @property
    def weight(self) -> Tensor:
        """The matrix of the frozen layer, which some models read."""
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The bias of the frozen layer."""
        return self.base.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with the product's added."""
        result = self.base(x)
        added = self.second(self.first(x.to(self.first.weight.dtype)))
        return (result + added * 2.0).to(result.dtype)


def add_lora(model: nn.Module, rank: int) -> None:
    """Freeze a model, and add LoRA to the matrices that GaLore would project.

    Args:
        model: The model, changed in place.
        rank: Rank of the products.
    """
    matrices = {id(one.parameter) for one in selection.of_model(model) if one.is_matrix}
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = getattr(child, "weight", None)
            if isinstance(weight, Tensor) and id(weight) in matrices:
                setattr(parent, name, LoraLayer(child, weight, rank))

"""One process or several: who writes, what is sharded, and what all must agree on.

With DDP every process holds the whole model, so that the first one measures alone and the others
go on. With sharded weights (FSDP2, DTensor) every process takes part: weights are gathered one by
one, forward passes are made together, and when to look next is what the first process says.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from joma.errors import JomaError


class Processes:
    """The processes that train a model.

    Args:
        model: as this process has it.

    Attributes:
        first: whether this is the one that measures and writes.
        together: whether all must take part in a look.
    """

    def __init__(self, model: nn.Module) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.first = not several or dist.get_rank() == 0
        self.together = several and any(isinstance(p, DTensor) for p in model.parameters())
        self.device = _device(model.parameters())

    @property
    def looks(self) -> bool:
        """Whether this process takes part in looks at all."""
        return self.first or self.together

    def agree(self, numbers: list[int]) -> list[int]:
        """The numbers of the first process, in all."""
        if not self.together:
            return numbers
        held = torch.tensor(numbers, dtype=torch.long, device=self.device)
        dist.broadcast(held, src=0)
        return held.tolist()

    def same(self, tensor: Tensor) -> Tensor:
        """The tensor of the first process, in all; its shape may be another than here."""
        if not self.together:
            return tensor
        sizes = self.agree([tensor.ndim])[0]
        shape = self.agree([*tensor.shape, *[0] * 8][:sizes])
        held = tensor.to(self.device) if self.first else tensor.new_empty(shape).to(self.device)
        held = held.contiguous()
        dist.broadcast(held, src=0)
        return held.to(tensor.device)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; another as it is. All processes call this, or none."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _device(parameters: Iterable[Tensor]) -> torch.device:
    for parameter in parameters:
        return parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    raise JomaError("model must have parameters, got none")

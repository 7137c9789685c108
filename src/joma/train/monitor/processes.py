"""One process or several: who writes, what is sharded, and what all must agree on.

With DDP every process holds the whole model, so that the first one measures alone and the others
continue. With sharded weights (FSDP2, DTensor) every process takes part: weights are gathered one
by one, forward passes are made together, and the first process says when to measure next.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from joma.errors import JomaError


class MonitoredProcesses:
    """The processes that train a model.

    Args:
        model: as this process has it.

    Attributes:
        first: whether this is the one that measures and writes.
        together: whether all must take part in a measurement.
        several: whether there are several processes, connected to each other.
    """

    def __init__(self, model: nn.Module) -> None:
        connected = dist.is_available() and dist.is_initialized()
        self.several = several = connected and dist.get_world_size() > 1
        self.first = not several or dist.get_rank() == 0
        if not connected and os.environ.get("WORLD_SIZE", "1") != "1":
            self.first = os.environ.get("RANK", "0") == "0"  # processes that are not connected yet
        self.together = several and any(isinstance(p, DTensor) for p in model.parameters())
        self.device = _device(model.parameters())

    @property
    def measures(self) -> bool:
        """Whether this process takes part in measurements at all."""
        return self.first or self.together

    def agree(self, numbers: list[int]) -> list[int]:
        """The numbers of the first process, in all."""
        if not self.together:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.long, device=self.device)
        dist.broadcast(shared, src=0)
        return shared.tolist()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process that takes part."""
        return self.any_of_all(flag) if self.together else flag

    def any_of_all(self, flag: bool) -> bool:
        """Return whether the flag is set in any process at all; each of them calls this."""
        if not self.several:
            return flag
        shared = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return bool(shared)

    def least(self, numbers: list[float]) -> list[float]:
        """Return the least of all processes' numbers, place by place."""
        if not self.together or not numbers:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        return shared.tolist()

    def same(self, tensor: Tensor) -> Tensor:
        """The tensor of the first process, in all; its shape may be another than here."""
        if not self.together:
            return tensor
        sizes = self.agree([tensor.ndim])[0]
        shape = self.agree([*tensor.shape, *[0] * 8][:sizes])
        shared = tensor.to(self.device) if self.first else tensor.new_empty(shape).to(self.device)
        shared = shared.contiguous()
        dist.broadcast(shared, src=0)
        return shared.to(tensor.device)

    def same_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the named tensors of the first process, in all."""
        if not self.together:
            return tensors
        kinds = [[(name, it.shape, it.dtype) for name, it in tensors.items()]]
        dist.broadcast_object_list(kinds, src=0)
        found: dict[str, Tensor] = {}
        for name, shape, dtype in kinds[0]:
            shared = torch.empty(shape, dtype=dtype, device=self.device)
            if self.first:
                shared.copy_(tensors[name])
            dist.broadcast(shared, src=0)
            found[name] = shared
        return found


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; another as it is. All processes call this, or none."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _device(parameters: Iterable[Tensor]) -> torch.device:
    device = None
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.device.type != "meta":
            return local.device
        device = torch.device("cpu")
    if device is None:
        raise JomaError("model must have parameters, got none")
    return device


class Gathers:
    """Keeps processes together while a model whose weights are sharded runs.

    Every module that `fully_shard` was applied to gathers its weights before it runs, together with
    all other processes. Where the forward pass fails in one process, this one continues with what
    entered the module that failed, and makes the gathers that are left, or the others would wait
    for it. The error is raised at the end.
    """

    def __init__(self) -> None:
        self._order: list[FSDPModule] = []

    @contextmanager
    def completed(self, model: nn.Module) -> Iterator[None]:
        """Complete the gathers of a forward pass in the block before an error is raised."""
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if not sharded:
            yield
            return
        expected = self._order or sharded
        made: list[FSDPModule] = []
        errors: list[Exception] = []
        for module in sharded:
            assert isinstance(module, nn.Module), "FSDPModule is mixed into one"
            module.forward = _deferring(module, module.forward, made, errors)
        try:
            yield
        except Exception as error:
            errors.append(error)
        finally:
            for module in sharded:
                vars(module).pop("forward", None)
        if not errors:
            self._order = made
            return
        for module in expected[len(made) :]:
            module.unshard()
            module.reshard()
        raise errors[0]


def _deferring(
    module: FSDPModule,
    forward: Callable[..., Any],
    made: list[FSDPModule],
    errors: list[Exception],
) -> Callable[..., Any]:
    """Return a forward that keeps an error for later and returns its first tensor instead."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        made.append(module)
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            errors.append(error)
            given = (*args, *kwargs.values())
            return next((value for value in given if isinstance(value, Tensor)), None)

    return run

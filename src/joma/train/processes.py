"""The processes that train one model together; mostly there is one."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from joma.models import architecture_of, module_at, number_of_layers

T = TypeVar("T")


class FailedElsewhereError(RuntimeError):
    """Another process failed and reports it; this one has nothing to add."""


@dataclass(frozen=True)
class Processes:
    """This process among those that train together.

    Args:
        rank: Number of this one, from 0; the first alone writes.
        size: How many there are.
        device: Device of this one.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def most(self, *numbers: int) -> list[int]:
        """Return the largest of each number over all processes; all must call it."""
        if self.size == 1:
            return list(numbers)
        largest = torch.tensor(numbers, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def mean(self, numbers: Tensor) -> Tensor:
        """Return the mean of each number over all processes; all must call it."""
        if self.size > 1:
            dist.all_reduce(numbers)
            numbers = numbers / self.size
        return numbers

    def tensors_from_first(
        self, tensors: Mapping[str, Tensor], about: Any
    ) -> tuple[dict[str, Tensor], Any]:
        """Return the first process's tensors and what is about them; all must call it."""
        if self.size == 1:
            return dict(tensors), about
        shapes = {name: (one.shape, one.dtype) for name, one in tensors.items()}
        sent: list[Any] = [shapes, about]
        dist.broadcast_object_list(sent, 0, device=self.device)
        shapes, about = sent
        received: dict[str, Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            one = tensors[name] if self.rank == 0 else torch.empty(shape, dtype=dtype)
            one = one.to(self.device)
            dist.broadcast(one, 0)
            received[name] = one.cpu()
        return received, about

    def first(self, act: Callable[[], T]) -> T | None:
        """Return what `act` returns on the first process, None on the others; all must call it.

        Raises:
            FailedElsewhereError: On the others, when it fails on the first.
        """
        result, failure = None, None
        if self.rank == 0:
            try:
                result = act()
            except Exception as error:
                failure = error
        (failed,) = self.most(int(failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise FailedElsewhereError("the first process failed")
        return result


@contextlib.contextmanager
def joined(device: str = "cpu") -> Iterator[Processes]:
    """Join the processes that torchrun started; yield this one alone where it did not.

    Args:
        device: "cpu" or "cuda"; of several GPUs each process of a machine takes one.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Processes(device=torch.device(device))
        return
    own = torch.device("cpu")
    if device == "cuda":
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), size, own)
    finally:
        dist.destroy_process_group()


def spread(model: nn.Module, processes: Processes, sharding: str) -> nn.Module:
    """Return the module to call in training, whose gradients are averaged over the processes.

    With "fsdp2" the parameters of the model itself are sharded, block by block.
    """
    if processes.size == 1:
        return model
    if sharding == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(processes.device.type, (processes.size,))
        names = [name for name, _ in model.named_parameters()]
        architecture = architecture_of(model)
        for layer in range(number_of_layers(names, architecture)):
            fully_shard(module_at(model, architecture.layer, layer), mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    from torch.nn.parallel import DistributedDataParallel

    ids = [processes.device.index] if processes.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


@contextlib.contextmanager
def summing(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Compute a piece of a batch: processes exchange gradients with the last piece alone."""
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield
    elif not last and hasattr(module, "no_sync"):
        with module.no_sync():  # type: ignore[operator]
            yield
    else:
        yield


def shard_again(model: nn.Module) -> None:
    """Shard again what a forward pass gathered; a backward pass does it by itself."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of it that other processes have; all must call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(value: Tensor, tensor: Tensor | None) -> Tensor:
    """Return a value that every process has whole, sharded as a tensor of its shape is."""
    if not isinstance(tensor, DTensor) or value.shape != tensor.shape:
        return value
    value = value.to(tensor.device)
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)

"""The processes that train one model together; mostly there is one.

A monitor with DDP measures in the first process alone, since every process has the whole model.
With sharded weights (FSDP2, DTensor) every process takes part: weights are gathered one by one,
forward passes are made together, and the first process says when to measure next.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from joma.common.sharded import is_dtensor, is_fully_sharded
from joma.errors import JomaError
from joma.models import find_weights

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

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


class MonitoredProcesses:
    """The processes that train a monitored model.

    Args:
        model: The model as this process has it.

    Attributes:
        first: Whether this is the one that measures and writes.
        together: Whether all must take part in a measurement.
        several: Whether there are several processes, connected to each other.
        device: Device of the model in this process.

    Raises:
        JomaError: The model has no parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        if next(model.parameters(), None) is None:
            raise JomaError("model must have parameters, got none")
        self.device = device_of(model)
        connected = dist.is_available() and dist.is_initialized()
        size = dist.get_world_size() if connected else 1
        self._all = Processes(dist.get_rank() if connected else 0, size, self.device)
        self.several, self.first = size > 1, self._all.rank == 0
        if not connected and os.environ.get("WORLD_SIZE", "1") != "1":
            self.first = os.environ.get("RANK", "0") == "0"  # processes that are not connected yet
        self.together = self.several and any(is_dtensor(p) for p in model.parameters())

    @property
    def measures(self) -> bool:
        """Whether this process takes part in measurements at all."""
        return self.first or self.together

    def agree(self, numbers: list[int]) -> list[int]:
        """Return the numbers of the first process, in all."""
        return self.same(torch.tensor(numbers)).tolist()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process that takes part."""
        return self.any_of_all(flag) if self.together else flag

    def any_of_all(self, flag: bool) -> bool:
        """Return whether the flag is set in any process at all; each of them calls this."""
        return bool(self._all.most(int(flag))[0])

    def least(self, numbers: list[int]) -> list[int]:
        """Return the least of all processes' numbers, place by place."""
        if not self.together:
            return numbers
        return [-largest for largest in self._all.most(*(-number for number in numbers))]

    def same(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the first process, in all; its shape may be another than here."""
        return self.same_tensors({"": tensor})[""].to(tensor.device)

    def same_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the named tensors of the first process, in all."""
        return self._all.tensors_from_first(tensors, None)[0] if self.together else tensors


@contextlib.contextmanager
def joined(device: str = "cpu") -> Iterator[Processes]:
    """Join the processes that torchrun started; yield this one alone where it did not.

    Args:
        device: "cpu" or "cuda"; of several GPUs each process of a machine takes one.

    Raises:
        JomaError: There are several, and torch was built without torch.distributed.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Processes(device=torch.device(device))
        return
    if not dist.is_available():
        raise JomaError("several processes need torch.distributed, which this build of torch lacks")
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
        for block in find_weights(model).blocks:
            fully_shard(model.get_submodule(block.module), mesh=mesh)
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


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter that is somewhere, the CPU where none is."""
    somewhere = (one.device for one in model.parameters() if one.device.type != "meta")
    return next(somewhere, torch.device("cpu"))


def sharded_modules(model: nn.Module) -> "list[FSDPModule]":
    """Return the modules that `fully_shard` was applied to."""
    return [module for module in model.modules() if is_fully_sharded(module)]


def shard_again(model: nn.Module) -> None:
    """Shard again what a forward pass gathered; a backward pass does it by itself."""
    for module in sharded_modules(model):
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of it that other processes have; all must call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def sharded_like(value: Tensor, tensor: Tensor | None) -> Tensor:
    """Return a value that every process has whole, sharded as a tensor of its shape is."""
    if not is_dtensor(tensor) or value.shape != tensor.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(tensor.device)
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


class Gathers:
    """Keeps processes together while a model whose weights are sharded runs.

    Every module that `fully_shard` was applied to gathers its weights before it runs, together with
    all other processes. Where the forward pass fails in one process, this one continues with what
    entered the module that failed, and makes the gathers that are left, or the others would wait
    for it. The error is raised at the end.
    """

    def __init__(self) -> None:
        self._order: list[FSDPModule] = []

    @contextlib.contextmanager
    def completed(self, model: nn.Module) -> Iterator[None]:
        """Complete the gathers of a forward pass in the block before an error is raised."""
        sharded = sharded_modules(model)
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
    module: "FSDPModule",
    forward: Callable[..., Any],
    made: "list[FSDPModule]",
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

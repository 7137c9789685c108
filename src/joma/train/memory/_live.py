"""Counts the memory of tensors while operations make and drop them, on any device, also meta."""

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from joma.train.memory._kernels import run, workspace_of

_ALIGNED = 512
"""Bytes of which the CUDA allocator gives out multiples."""


@dataclass(frozen=True)
class Moment:
    """What is allocated after an operation.

    Attributes:
        activations: Bytes of activations and their gradients.
        logits: Bytes of tensors with a number for each token of the vocabulary, at each position.
        workspace: Bytes that the operation itself takes for the time it runs.
        arrived: How many parameters have their gradient.
        phase: "forward" or "backward".
    """

    activations: int
    logits: int
    workspace: int
    arrived: int
    phase: str

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.activations + self.logits + self.workspace


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of storages that operations make, for as long as these exist.

    A tensor without numbers has none to decide by: a condition on it is taken as true, and a number
    read from it is 1.0, or the whole number 0. Counters of steps, which FakeTensorMode leaves
    without a number as well, are 1.

    Args:
        device: Type of the device whose tensors count.
        is_logits: Whether a new tensor counts as logits; otherwise it counts as activations.
    """

    def __init__(
        self, device: str = "meta", is_logits: Callable[[Tensor], bool] = lambda tensor: False
    ) -> None:
        super().__init__()
        self.moments: list[Moment] = []
        self.phase, self.arrived = "forward", 0
        self._device, self._is_logits = device, is_logits
        self._live = {"activations": 0, "logits": 0, "known": 0}
        self._storages: dict[int, tuple[weakref.ref[Any], str, int]] = {}

    @property
    def activations(self) -> int:
        """Bytes of activations that exist now."""
        return self._live["activations"]

    @property
    def logits(self) -> int:
        """Bytes of logits that exist now."""
        return self._live["logits"]

    @property
    def total(self) -> int:
        """Bytes of all that exists now and was not there before."""
        return self.activations + self.logits

    def peak(self) -> int:
        """Return the most bytes at any moment."""
        return max((one.total for one in self.moments), default=0)

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors as known: neither activations nor logits from now on."""
        for tensor in tensors:
            self._forget(id(tensor.untyped_storage()))
            self._add(tensor, "known")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count what it made."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], FakeTensor):
            if func is torch.ops.aten._local_scalar_dense.default:
                is_counter = args[0].dtype == torch.int64
                return 1 if is_counter else _scalar(args[0].dtype)
        elif args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func is torch.ops.aten._local_scalar_dense.default:
                return _scalar(args[0].dtype)
            if func is torch.ops.aten._to_copy.default and kwargs.get("device") == _CPU:
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        made = run(func, args, kwargs)
        changed = False
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device:
                kind = "logits" if self._is_logits(tensor) else "activations"
                changed |= self._add(tensor, kind)
        if changed:
            workspace = workspace_of(func, args, kwargs)
            self.moments.append(
                Moment(self.activations, self.logits, workspace, self.arrived, self.phase)
            )
        return made

    def _add(self, tensor: Tensor, kind: str) -> bool:
        """Count a tensor's storage unless it is counted; return whether it was new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return False
        size = math.ceil(storage.nbytes() / _ALIGNED) * _ALIGNED
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._storages[key] = reference, kind, size
        self._live[kind] += size
        return True

    def _forget(self, key: int) -> None:
        _, kind, size = self._storages.pop(key, (None, "known", 0))
        self._live[kind] -= size


def _scalar(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 0


_CPU = torch.device("cpu")

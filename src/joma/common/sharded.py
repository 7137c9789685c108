"""Recognise tensors and modules that torch.distributed shards, without importing what makes them.

That import takes more than half as long as torch's own, and builds of torch without it exist. As
long as nobody has imported a class, nothing is an instance of it.
"""

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

DTENSORS = "torch.distributed.tensor"
"""The module of DTensor."""
_FSDP = "torch.distributed.fsdp"


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Return whether a value is a DTensor."""
    return _is_instance(value, DTENSORS, "DTensor")


def is_fully_sharded(module: object) -> "TypeGuard[FSDPModule]":
    """Return whether `fully_shard` (FSDP2) was applied to a module."""
    return _is_instance(module, _FSDP, "FSDPModule")


def is_fsdp1(module: object) -> "TypeGuard[FullyShardedDataParallel]":
    """Return whether a module is a FullyShardedDataParallel, the wrapper before FSDP2."""
    return _is_instance(module, _FSDP, "FullyShardedDataParallel")


def local(tensor: "Tensor") -> "Tensor":
    """Return this process's part of a tensor that may be sharded."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _is_instance(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)

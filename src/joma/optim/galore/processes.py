"""How parameters are distributed over processes: DistributedDataParallel and FSDP2."""

from typing import Any

import torch
from torch import Tensor, nn

from joma.common.sharded import is_dtensor
from joma.errors import JomaError


def take_over_synchronisation(parameters: Any) -> Any:
    """Return the processes of a DistributedDataParallel, which reduces nothing itself from now on.

    It would reduce whole gradients, after the hooks of this optimizer have seen them.
    """
    if not isinstance(parameters, nn.parallel.DistributedDataParallel):
        return None
    parameters.require_backward_grad_sync = False
    return parameters.process_group


def row_shard(parameter: Tensor) -> tuple[Any, int] | None:
    """Return mesh and dimension along which the rows of a DTensor are distributed, if they are."""
    if not is_dtensor(parameter):
        return None
    from torch.distributed.tensor import Replicate, Shard

    found = None
    for dimension, placement in enumerate(parameter.placements):
        if placement == Shard(0) and found is None:
            found = parameter.device_mesh, dimension
        elif not isinstance(placement, Replicate):
            raise JomaError(
                f"GaLore takes parameters that are distributed along their rows, as FSDP2 does; "
                f"one is placed as {parameter.placements}"
            )
    return found


def placed(part: Tensor, rows_of: Tensor | None) -> Tensor:
    """Return a part as a tensor that is distributed as the rows of a parameter are."""
    if not is_dtensor(rows_of):
        return part
    from torch.distributed.tensor import DTensor

    shape = torch.Size((rows_of.shape[0], *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part.contiguous(),
        rows_of.device_mesh,
        rows_of.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )

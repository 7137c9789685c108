"""What a training goes on from: weights and moments, in a checkpoint of the run folder.

The order of the data and what dropout drops follow from seed and step, so there is no more to keep.
"""

from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from joma.errors import JomaError
from joma.train.language._processes import Processes, put, whole

_MOMENTS = ("exp_avg", "exp_avg_sq")


def state_tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and moments by name, each whole; all processes must go through them."""
    for name, tensor in _tensors(model, optimizer):
        yield name, whole(tensor)


def load_arrays(
    arrays: dict[str, NDArray[Any]],
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    processes: Processes,
) -> None:
    """Puts back what `state_tensors` gave after that many steps; all must call it.

    Args:
        arrays: of the first process; of the others' nothing is read.
        model: the same model, with whatever weights.
        optimizer: of its parameters, before its first step.
        step: after how many steps they were saved.
        processes: that train together.

    Raises:
        ValueError: they are another model's.
    """
    if step > 0:
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }
    places = dict(_tensors(model, optimizer))
    processes.first(lambda: _check(arrays, places))
    for name, tensor in places.items():
        if processes.rank == 0:
            value = torch.from_numpy(arrays[name])
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype)
        put(tensor, processes.from_first(value))


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter
        for moment in _MOMENTS:
            if moment in optimizer.state.get(parameter, {}):
                yield f"optimizer.{moment}.{name}", optimizer.state[parameter][moment]


def _check(arrays: dict[str, NDArray[Any]], places: dict[str, Tensor]) -> None:
    if odd := sorted(arrays.keys() ^ places.keys()):
        raise JomaError(f"arrays must be of this model; {odd[0]} is in one of the two only")
    for name, tensor in places.items():
        if arrays[name].shape != tuple(tensor.shape):
            raise JomaError(
                f"arrays must be of this model; {name} has shape {arrays[name].shape}, but must "
                f"have {tuple(tensor.shape)}"
            )

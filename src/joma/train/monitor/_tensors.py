"""The tensors of a model by name, as they are at the moment, and which can be measured."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from joma.models import Weight
from joma.train.monitor._processes import whole

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def plain(path: str) -> str:
    """Return a path without wrappers that checkpoint, compile or shard."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters by name; tied ones appear under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


def layer_in(name: str) -> int | None:
    """Return the first number in a name, which is the layer in most models."""
    numbers = _NUMBER.findall(name)
    return int(numbers[0]) if numbers else None


def is_real(tensor: Tensor) -> bool:
    """Return whether a tensor holds floating-point numbers: no meta, lazy or complex one does."""
    return (
        not is_lazy(tensor)
        and tensor.device.type != "meta"
        and tensor.is_floating_point()
        and tensor.element_size() > 1  # eight bits have no arithmetic
        and tensor.layout == torch.strided
    )


class Tensors:
    """A model's weights by name at one measurement.

    Args:
        model: The model, uncompiled.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = named_parameters(model)
        self._model = model
        self._modules = {plain(name): module for name, module in model.named_modules()}
        self._gathered: dict[str, Tensor] = {}

    @property
    def signature(self) -> tuple[object, ...]:
        """What changes when parameters are added, removed, replaced or given a shape."""
        return tuple(
            (name, None if is_lazy(parameter) else tuple(parameter.shape))
            for name, parameter in self.parameters.items()
        )

    def get(self, name: str) -> Tensor | None:
        """Return a parameter cut from the graph, None where the model has no such real tensor."""
        tensor = self.parameters.get(name)
        return tensor.detach() if tensor is not None and is_real(tensor) else None

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter, None where it has none that can be measured."""
        parameter = self.parameters.get(name)
        gradient = None if parameter is None or is_lazy(parameter) else parameter.grad
        return gradient.detach() if gradient is not None and is_real(gradient) else None

    def has(self, weight: Weight) -> bool:
        """Return whether all parameters of a weight are there and can be measured."""
        return all(self.get(name) is not None for name in weight.names)

    def shape(self, weight: Weight) -> torch.Size:
        """Return the shape of the first parameter of a weight."""
        return self.parameters[weight.names[0]].shape

    def gather(self, weights: Iterable[Weight]) -> None:
        """Gather what weights are made of, if sharded; all processes call this, or none.

        What was gathered before is forgotten.
        """
        names = dict.fromkeys(name for weight in weights for name in weight.names)
        # A fused or stacked parameter is gathered once for all weights in it.
        self._gathered = {
            name: self._gathered[name] if name in self._gathered else whole(self._there(name))
            for name in names
        }

    def matrix(self, weight: Weight) -> Tensor:
        """Return the (out, in) matrix that the model computes with; `gather` comes first."""
        if weight.path is not None:
            return weight.of(self._model).detach()
        return weight.matrix(self._gathered)

    def module(self, path: str) -> nn.Module | None:
        """Return the module at a path without wrappers, None where there is none."""
        return self._modules.get(path)

    def _there(self, name: str) -> Tensor:
        tensor = self.get(name)
        assert tensor is not None, "`has` was asked"
        return tensor

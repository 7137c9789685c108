"""The tensors of a model by name, as they are at the moment, and which can be measured."""

import re

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_CHECKPOINTED = "_checkpoint_wrapped_module."
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def plain(name: str) -> str:
    """Return the name of a parameter or module without wrappers that checkpoint activations."""
    return (name + ".").replace(_CHECKPOINTED, "").removesuffix(".")


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters by name; tied ones appear under each of their names."""
    named = model.named_parameters(remove_duplicate=False)
    return {plain(name): parameter for name, parameter in named}


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
        and tensor.layout == torch.strided
    )


class Tensors:
    """A model's weights by name at one measurement.

    A name may also be that of an attribute which is no parameter: reparametrised weights (weight
    norm, pruning) are computed from other parameters and read as the model reads them.

    Args:
        model: The model, uncompiled.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = named_parameters(model)
        self._modules = {plain(name): module for name, module in model.named_modules()}

    @property
    def signature(self) -> tuple[object, ...]:
        """What changes when parameters are added, removed, replaced or given a shape."""
        return tuple(
            (name, None if is_lazy(parameter) else tuple(parameter.shape))
            for name, parameter in self.parameters.items()
        )

    def get(self, name: str) -> Tensor | None:
        """Return a weight cut from the graph, None where the model has no such real tensor."""
        tensor = self.parameters.get(name)
        if tensor is None:
            path, _, attribute = name.rpartition(".")
            tensor = getattr(self._modules.get(path), attribute, None)
        if not isinstance(tensor, Tensor) or not is_real(tensor):
            return None
        return tensor.detach()

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter, None where it has none that can be measured."""
        parameter = self.parameters.get(name)
        gradient = None if parameter is None or is_lazy(parameter) else parameter.grad
        return gradient.detach() if gradient is not None and is_real(gradient) else None

    def module(self, path: str) -> nn.Module | None:
        """Return the module at a path, None where there is none."""
        return self._modules.get(path)

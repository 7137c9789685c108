"""The state of any optimizer as tensors by name and a structure of JSON types.

Checkpoints are safetensors files with a JSON header: nothing is pickled.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from joma.errors import JomaError


class Optimizer(Protocol):
    """The part of `torch.optim.Optimizer` that a training needs.

    The state may have tensors of any shape, numbers, texts, and lists and mappings of them.
    """

    def step(self) -> Any:
        """Move the parameters by their gradients."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return all that decides how the parameters move next."""
        ...

    def load_state_dict(self, state_dict: Any) -> None:
        """Return to a state that `state_dict` gave."""
        ...


_STORED_AS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
}
"""Types that NumPy does not have, and those of the same size whose bytes are stored instead."""


def split_state(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of `state_dict()` by name, and its structure without them.

    Tensors of one parameter are called "KEY.PARAMETER", as in "exp_avg.blocks.0.weight".

    Args:
        optimizer: The optimizer.
        named_parameters: Names and parameters, as `named_parameters()` gives them.

    Returns:
        The tensors, and the structure in JSON types; None where the state is a plain mapping from
        names to tensors.

    Raises:
        JomaError: The state has something else than tensors, numbers, texts, lists and mappings.
    """
    state = optimizer.state_dict()
    if all(isinstance(part, Tensor) and part.dtype not in _STORED_AS for part in state.values()):
        return dict(state), None
    known = {id(parameter): name for name, parameter in named_parameters}
    numbered = enumerate(_parameters(optimizer))
    names = {number: known.get(id(one), str(number)) for number, one in numbered}
    tensors: dict[str, Tensor] = {}

    def split(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor):
            if path[0] == "state" and len(path) > 2:  # as torch's optimizers number parameters
                path = (*path[2:], names.get(path[1], path[1]))
            name = ".".join(map(str, path))
            stored = _STORED_AS.get(value.dtype)
            tensors[name] = value if stored is None else value.view(stored)
            kind = {} if stored is None else {"dtype": str(value.dtype).removeprefix("torch.")}
            return {"tensor": name, **kind}
        if isinstance(value, Mapping):
            return {"dict": [[key, split(part, (*path, key))] for key, part in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [split(part, (*path, at)) for at, part in enumerate(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.dtype):
            return {"torch": str(value).removeprefix("torch.")}
        raise JomaError(
            f"the state of {type(optimizer).__name__} must be tensors, numbers, texts, lists and "
            f"mappings, got {type(value).__name__} at {'.'.join(map(str, path))}"
        )

    return tensors, split(state, ())


def check_tensors(
    what: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor], *, dtypes: bool = True
) -> None:
    """Raise JomaError unless tensors have the names, shapes and types of those there are.

    Args:
        what: What the tensors are and must be of, as the beginning of a sentence.
        given: The tensors.
        own: Those there are.
        dtypes: Whether types must be equal.
    """
    if odd := sorted(own.keys() ^ given.keys()):
        raise JomaError(f"{what}; {', '.join(odd[:3])} … is in one of the two only")
    for name, tensor in own.items():
        other = given[name]
        if tensor.shape != other.shape or (dtypes and tensor.dtype != other.dtype):
            raise JomaError(
                f"{what}; {name} is {tuple(other.shape)} in {other.dtype}, but must be "
                f"{tuple(tensor.shape)} in {tensor.dtype}"
            )


def load_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], structure: Any) -> None:
    """Return an optimizer to a state that `split_state` gave.

    Raises:
        JomaError: The state is of another optimizer or of other parameters.
    """

    def join(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if "tensor" in value:
            tensor = tensors[value["tensor"]]
            return tensor.view(getattr(torch, value["dtype"])) if "dtype" in value else tensor
        if "dict" in value:
            return {key: join(part) for key, part in value["dict"]}
        ((kind, parts),) = value.items()
        if kind == "torch":
            return getattr(torch, parts)
        return [join(part) for part in parts] if kind == "list" else tuple(map(join, parts))

    try:
        state: Any = dict(tensors) if structure is None else join(structure)
        optimizer.load_state_dict(state)
    except JomaError:
        raise
    except (ValueError, KeyError) as error:
        raise JomaError(f"state must be of this optimizer and these parameters: {error}") from error
    if isinstance(optimizer, torch.optim.Optimizer):
        # Torch has cast the state to the type of the parameter.
        for number, parameter in enumerate(_parameters(optimizer)):
            own = optimizer.state.get(parameter, {})
            for key, saved in state["state"].get(number, {}).items():
                if isinstance(saved, Tensor) and own[key].dtype != saved.dtype:
                    own[key] = saved.to(own[key].device)


def _parameters(optimizer: Any) -> list[Any]:
    """Return the parameters in the order in which torch numbers them."""
    return [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]


class TypedStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose loaded state keeps its types."""

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Return to a state that `state_dict` gave.

        Raises:
            JomaError: The state is of other parameters.
        """
        states = state_dict["state"]
        given = [one for group in state_dict["param_groups"] for one in group["params"]]
        own = [one for group in self.param_groups for one in group["params"]]
        if len(given) != len(own):
            raise JomaError(f"the state is of {len(given)} parameters, these are {len(own)}")
        for number, parameter in zip(given, own, strict=True):
            self._check_state(parameter, states.get(number, {}))
        super().load_state_dict(state_dict)
        for number, parameter in zip(given, own, strict=True):
            if number in states:
                self.state[parameter] = {
                    key: self._loaded(parameter, key, _on_device(value, parameter))
                    for key, value in states[number].items()
                }

    def _loaded(self, parameter: Tensor, key: str, value: Any) -> Any:
        """Return a loaded value of a parameter's state as this process has it."""
        return value

    def _check_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Raise JomaError for a state that does not fit a parameter."""


def _on_device(value: Any, parameter: Tensor) -> Any:
    """Return a copy of a loaded value, on the device of its parameter unless it is a number."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().to(parameter.device if value.ndim else "cpu")

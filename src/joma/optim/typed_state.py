"""Optimizers whose loaded state keeps its types; torch would cast it to those of parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from joma.errors import JomaError


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

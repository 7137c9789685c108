"""Optimizers of an ensemble, whose parameters have the member axis E first."""

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.optim.protocol import Optimizer
from joma.optim.state import check_tensors


class Stacked:
    """Base of the optimizers for parameters (E, ...).

    Besides `joma.optim.Optimizer` it has what `joma.train.Ensemble` asks for on a GPU: hooks for
    the capture of a step, and master weights. Parameters may compute in bfloat16
    (`to_bfloat16_with_master_weights`): the optimizer then keeps and moves float32 copies.

    Args:
        parameters: Names and parameters with the member axis first, as `named_parameters()` gives
            them.

    Attributes:
        parameters: Those that require a gradient, by name.
        members: E.
        steps: Steps made since the last restart, on the parameters' device.
        capturable: Whether a step can be captured in a CUDA graph.
        has_bfloat16: Whether parameters may compute in bfloat16.
    """

    capturable = True
    has_bfloat16 = False
    steps: Tensor

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        if not self.parameters:
            raise JomaError("parameters must hold at least one that wants a gradient, got none")
        first = next(iter(self.parameters.values()))
        self.members, self.device = first.shape[0], first.device
        if any(
            p.shape[0] != self.members or not p.is_contiguous() for p in self.parameters.values()
        ):
            raise JomaError(f"parameters must all be contiguous and have {self.members} members")
        self.steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._masters: dict[str, Tensor] = {}  # float32 copies of parameters in bfloat16

    def zero_grad(self) -> None:
        """Drop the gradients; the next backward pass brings its own memory."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that decide how parameters move next."""
        return {"steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy a state into the tensors there are; to be called after parameters were written."""
        own = self.state_dict()
        check_tensors("state must be of this optimizer", state_dict, own)
        for name, tensor in own.items():
            tensor.copy_(state_dict[name])
        for name, master in self._masters.items():
            self.parameters[name].data.copy_(master)

    def restart(self) -> None:
        """Forget the state, as a new optimizer would."""
        for tensor in self.state_dict().values():
            tensor.zero_()

    def settings(self) -> dict[str, Any]:
        """Return what decides how the state continues, for a checkpoint to be recognised by."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Compile what `step` needs on the GPU; gradients lie as they will in the capture."""

    def captured(self) -> None:
        """Note where the gradients of a captured step lie, once it is captured."""

    def to_bfloat16_with_master_weights(self, names: Iterable[str]) -> None:
        """Let parameters compute in bfloat16, and keep float32 copies that the optimizer moves."""
        if not self.has_bfloat16:
            kind = type(self).__name__
            raise JomaError(f"precision must not be bfloat16 for {kind}, got bfloat16")
        for name in names:
            if name not in self._masters:
                parameter = self.parameters[name]
                self._masters[name] = parameter.data
                parameter.data = parameter.data.bfloat16()

    def master_weights(self) -> dict[str, Tensor]:
        """Return the parameters by name, in the precision in which they are moved."""
        return {name: self._masters.get(name, p.data) for name, p in self.parameters.items()}

    @contextlib.contextmanager
    def using_master_weights(self) -> Iterator[None]:
        """Let the networks compute with the master weights during the block."""
        rounded = {name: self.parameters[name].data for name in self._masters}
        try:
            for name, master in self._masters.items():
                self.parameters[name].data = master
            yield
        finally:
            for name, half in rounded.items():
                self.parameters[name].data = half


class _Foreign(Stacked):
    """Any other optimizer, for which steps are not captured."""

    capturable = False

    def __init__(self, optimizer: Optimizer, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._optimizer, self._named = optimizer, dict(parameters)
        self._masters: dict[str, Tensor] = {}
        self._first = copy.deepcopy(optimizer.state_dict())
        # Now, since torch's optimizers add to their defaults when a state is loaded.
        defaults = getattr(optimizer, "defaults", {})
        self._settings = json.loads(json.dumps(defaults, default=str))

    def restart(self) -> None:
        self._optimizer.load_state_dict(copy.deepcopy(self._first))

    def settings(self) -> dict[str, Any]:
        kind = type(self._optimizer).__name__
        return {"optimizer": kind, "optimizer_settings": self._settings}

    def to_bfloat16_with_master_weights(self, names: Iterable[str]) -> None:
        kind = type(self._optimizer).__name__
        raise JomaError(f"precision must not be bfloat16 for {kind}, got bfloat16")

    def master_weights(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self._named.items()}


def as_stacked(optimizer: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]) -> Stacked:
    """Return the optimizer, or any other one with what it lacks of a `Stacked`."""
    return optimizer if isinstance(optimizer, Stacked) else _Foreign(optimizer, parameters)


def per_member(
    name: str, given: float | Sequence[float], members: int, device: torch.device
) -> Tensor:
    """Return (E,) in float64, from one number or one for each member."""
    values = torch.as_tensor(given, dtype=torch.float64, device=device)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != members):
        raise JomaError(f"{name} must be one number or {members}, got {given}")
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise JomaError(f"{name} must be finite and not negative, got {given}")
    return values.expand(members).clone()

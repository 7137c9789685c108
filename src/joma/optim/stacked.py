"""Optimizers of an ensemble, whose parameters have the member axis E first."""

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.kernels.adam import AdamStep, adam_
from joma.optim.state import Optimizer, check_tensors


class Stacked:
    """Base of the optimizers for parameters (E, ...).

    Besides `joma.optim.Optimizer` it has what `joma.train.Ensemble` asks for on a GPU: `warm_up`
    before the capture of a step, and master weights. Parameters may compute in bfloat16
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
        """Compile what `step` needs on a GPU, after a backward pass and before the capture."""

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

    def _per_member(self, name: str, given: float | Sequence[float]) -> Tensor:
        """Return (E,) in float64, from one number or one for each member."""
        values = torch.as_tensor(given, dtype=torch.float64, device=self.device)
        if values.ndim > 1 or (values.ndim == 1 and len(values) != self.members):
            raise JomaError(f"{name} must be one number or {self.members}, got {given}")
        if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
            raise JomaError(f"{name} must be finite and not negative, got {given}")
        return values.expand(self.members).clone()


class StackedAdam(Stacked):
    """Adam (Kingma and Ba, 2015) with coupled (L2) weight decay, for parameters (E, ...).

    Member e moves exactly as under `torch.optim.Adam(lr=learning_rates[e],
    weight_decay=weight_decays[e])`: every operation is elementwise. The step counter lives on the
    parameters' device, so that a step can be captured in a CUDA graph. With master weights the same
    pass over memory writes the bfloat16 parameters.

    Args:
        parameters: Names and parameters with the member axis first, as `named_parameters()` gives
            them.
        learning_rates: One learning rate per member, or one for all.
        weight_decays: One for each member, or one for all; λ in gradient + λ·parameter.
        betas: Decay of the first and of the second moment.
        epsilon: Added to the root of the second moment.
        clip: Largest norm of a member's whole gradient; a longer one is scaled down, as by
            `torch.nn.utils.clip_grad_norm_`.
    """

    has_bfloat16 = True

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        learning_rates: float | Sequence[float],
        weight_decays: float | Sequence[float] = 0.0,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        clip: float | None = None,
    ) -> None:
        super().__init__(parameters)
        for name, beta in zip(("first", "second"), betas, strict=True):
            if not 0 <= beta < 1:
                raise JomaError(f"the {name} of betas must lie in [0, 1), got {beta}")
        if not epsilon > 0:
            raise JomaError(f"epsilon must be positive, got {epsilon}")
        if clip is not None and not clip > 0:
            raise JomaError(f"clip must be positive, got {clip}")
        self.betas, self.epsilon, self.clip = betas, epsilon, clip
        self.learning_rates = self._per_member("learning_rates", learning_rates)
        self.weight_decays = self._per_member("weight_decays", weight_decays)
        self.first_moments = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second_moments = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self.steps += 1
        one, two = (1 - beta ** self.steps.double() for beta in self.betas)
        step = AdamStep(
            self.learning_rates / one,  # in float64
            self.weight_decays,
            two,
            None if self.clip is None else (self.clip / (self.norms() + 1e-6)).clamp(max=1.0),
            self.betas,
            self.epsilon,
        )
        self._move(step)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile what `step` needs on a GPU, by moving copies of the parameters."""
        ones = torch.ones_like(self.learning_rates)
        scales = None if self.clip is None else self.norms() * 0 + 1
        self._move(AdamStep(ones, ones, ones[0], scales, self.betas, self.epsilon), copies=True)

    def norms(self) -> Tensor:
        """Return the norm of each member's whole gradient, (E,) in float64."""
        gradients = (p.grad for p in self.parameters.values() if p.grad is not None)
        return torch.stack([_squares(gradient.flatten(1)) for gradient in gradients]).sum(0).sqrt()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the step counter and both moments."""
        return {
            "steps": self.steps,
            **{f"first.{name}": moment for name, moment in self.first_moments.items()},
            **{f"second.{name}": moment for name, moment in self.second_moments.items()},
        }

    def settings(self) -> dict[str, Any]:
        """Return what decides how the state continues, for a checkpoint to be recognised by."""
        return {
            "learning_rates": self.learning_rates.tolist(),
            "weight_decays": self.weight_decays.tolist(),
            "betas": list(self.betas),
            "epsilon": self.epsilon,
            "clip": self.clip,
        }

    def _move(self, step: AdamStep, *, copies: bool = False) -> None:
        for name, p in Stacked.master_weights(self).items():
            parameter, m, v = (
                self.parameters[name],
                self.first_moments[name],
                self.second_moments[name],
            )
            if parameter.grad is None:
                continue
            half = parameter.data if name in self._masters else None
            if copies:
                p, m, v, half = (
                    p.clone(),
                    m.clone(),
                    v.clone(),
                    None if half is None else half.clone(),
                )
            adam_(p, parameter.grad, m, v, step, half)


def _squares(gradient_EN: Tensor) -> Tensor:
    """Return ‖g‖² of each member, (E,) in float64."""
    if gradient_EN.dtype == torch.bfloat16:  # in float32, without a copy of all in it
        norms_E = torch.linalg.vector_norm(gradient_EN, dim=1, dtype=torch.float32)
        return norms_E.double().square()
    return gradient_EN.square().sum(1).double()


class StackedSGD(Stacked):
    """Gradient descent without momentum or weight decay, for parameters (E, ...).

    Member e moves exactly as under `torch.optim.SGD(lr=learning_rates[e])`. JoMA's theory is of
    gradient flow, of which this is the Euler step. It computes in the precision of the parameters
    alone: there are no master weights for bfloat16.

    Args:
        parameters: Names and parameters with the member axis first, as `named_parameters()` gives
            them.
        learning_rates: One learning rate per member, or one for all.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        learning_rates: float | Sequence[float],
    ) -> None:
        super().__init__(parameters)
        self.learning_rates = self._per_member("learning_rates", learning_rates)

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self.steps += 1
        for p in self.parameters.values():
            if p.grad is not None:
                rates = self.learning_rates.to(p.dtype).view(-1, *[1] * (p.ndim - 1))
                p.sub_(rates * p.grad)

    def settings(self) -> dict[str, Any]:
        """Return what decides how the state continues, for a checkpoint to be recognised by."""
        return {"optimizer": "sgd", "learning_rates": self.learning_rates.tolist()}


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


OPTIMIZERS = {"stacked_adam": StackedAdam, "stacked_sgd": StackedSGD}

"""Any optimizer of torch in the subspace of the gradients."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from joma.common.sharded import local
from joma.errors import JomaError
from joma.optim.adamw8bit import AdamW8bit
from joma.optim.galore._optimizer import ProjectedOptimizer
from joma.optim.galore._selection import Parameters
from joma.optim.galore._slot import Slot

_INNER = "inner."
_SIZE_FREE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    AdamW8bit,
)
"""Inner optimizers whose steps, without weight decay, do not depend on where a parameter is."""
_OF_ADAM = {"betas", "eps", "bits", "state_dtype"}
"""Settings of `GaLoreAdamW` that are the inner optimizer's here, if it has them."""
_TURNED = ("momentum_buffer", "exp_avg")
"""Parts of an inner state that are means of gradients, and turn as they do."""


class GaLore(ProjectedOptimizer):
    """Any optimizer in a low-rank subspace of each matrix's gradient.

    Each projected matrix has a stand-in of the shape of its projected gradient. The inner optimizer
    moves the stand-in, and the matrix moves by the same in the subspace:

        GaLore(torch.optim.SGD, model, lr=0.1, rank=64, momentum=0.9)
        GaLore(torch.optim.Adafactor, model, lr=1e-2, rank=64)
        GaLore(joma.optim.AdamW8bit, model, lr=1e-3, rank=64)

    The stand-in of SGD, the Adam family, Adagrad and RMSprop starts each step at zero, and no digit
    of a small step is lost. That of other optimizers starts at the matrix's root mean square, which
    Adafactor's steps are relative to: less than 1e-7 of it is lost in float32. Weight decay is
    decoupled for every inner optimizer.

    Args:
        inner: Class of the inner optimizer.
        parameters: As for `GaLoreAdamW`.
        lr: Learning rate.
        **settings: Settings of `GaLoreAdamW` but for betas, eps, bits and state_dtype, of its
            `moments` not "project"; all others are the inner optimizer's.

    Raises:
        JomaError: Nothing is projected, or a setting is unknown or out of range.
    """

    moment_choices = ("keep", "rotate", "align", "reset")

    def __init__(
        self,
        inner: Callable[..., torch.optim.Optimizer],
        parameters: Parameters,
        lr: float = 1e-3,
        **settings: Any,
    ) -> None:
        theirs = inspect.signature(inner).parameters
        ours = inspect.signature(ProjectedOptimizer).parameters.keys() - _OF_ADAM
        own = {name: settings.pop(name) for name in list(settings) if name in ours}
        for name in settings:
            if name not in theirs:
                raise JomaError(f"{getattr(inner, '__name__', inner)} has no setting {name!r}")
        if "weight_decay" in theirs:
            settings["weight_decay"] = 0.0
        self._make, self._settings = inner, settings
        self._inner: dict[Tensor, tuple[Tensor, torch.optim.Optimizer]] = {}
        super().__init__(parameters, lr, **own)

    def __getstate__(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in ("_make", "_settings", "_inner")}
        return {**super().__getstate__(), **own}

    def _change(self, slot: Slot, gradient: Tensor) -> Tensor:
        parameter = slot.parameter
        if parameter is not local(parameter):
            raise JomaError(
                "GaLore(inner) takes whole parameters; GaLoreAdamW takes those of FSDP2"
            )
        stand_in, inner = self._stand_in(slot, gradient)
        weights = parameter.float()
        if slot.side is None:
            start = weights.clone()
        elif isinstance(inner, _SIZE_FREE):
            start = torch.zeros_like(stand_in)
        else:
            start = weights.square().mean().sqrt().expand(gradient.shape).clone()
        stand_in.copy_(start)
        stand_in.grad = gradient.float()
        for one in inner.param_groups:
            one["lr"] = slot.group["lr"]
        inner.step()
        stand_in.grad = None
        slot.state.update({_INNER + key: value for key, value in inner.state[stand_in].items()})
        return stand_in.detach() - start

    def _stand_in(self, slot: Slot, gradient: Tensor) -> tuple[Tensor, torch.optim.Optimizer]:
        """Return the stand-in of a parameter and its optimizer, with what the state has of it."""
        if slot.parameter not in self._inner:
            stand_in = torch.nn.Parameter(torch.zeros_like(gradient, dtype=torch.float32))
            inner = self._make([stand_in], lr=slot.group["lr"], **self._settings)
            saved = {
                key.removeprefix(_INNER): value
                for key, value in slot.state.items()
                if key.startswith(_INNER)
            }
            if saved:
                inner.state[stand_in] = saved
            self._inner[slot.parameter] = stand_in, inner
        return self._inner[slot.parameter]

    def _turn(self, slot: Slot, overlap: Tensor) -> None:
        if slot.parameter not in self._inner or slot.group["moments"] in ("keep", "align"):
            return
        if slot.group["moments"] == "reset":
            self._forget_moments(slot)
            return
        stand_in, inner = self._inner[slot.parameter]
        for key in _TURNED:
            mean = inner.state[stand_in].get(key)
            if (
                isinstance(mean, Tensor)
                and mean.shape == stand_in.shape
                and mean.is_floating_point()
            ):
                mean.copy_(overlap @ mean if slot.side == "left" else mean @ overlap.mT)

    def _forget_moments(self, slot: Slot) -> None:
        for key in [key for key in slot.state if key.startswith(_INNER)]:
            del slot.state[key]
        self._inner.pop(slot.parameter, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Return to a state that `state_dict` gave."""
        super().load_state_dict(state_dict)
        self._inner.clear()

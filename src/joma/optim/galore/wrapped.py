"""Any optimizer of torch in the subspace of the gradients."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from joma.common.sharded import local
from joma.errors import JomaError
from joma.optim.adamw8bit import AdamW8bit
from joma.optim.galore import selection
from joma.optim.galore._base import ProjectedOptimizer
from joma.optim.galore.subspace import Side

MOMENTS = ("keep", "rotate", "align", "reset")
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
        rank: Rank, or a share of energy.
        gap: Steps between two choices of the subspace.
        refresh: "gap" chooses it every `gap` steps. "energy" measures the share of ‖G‖² that it
            captures ten times in a gap and chooses it again once that has fallen to 90% of what it
            was after the last choice, and after ten gaps at the latest: often early in a training
            and rarely late.
        scale: Factor of the update of projected matrices.
        projection: "power" or "svd".
        side: "short", "left", "right" or "smallest".
        weight_decay: Decoupled decay λ.
        moments: What becomes of the inner state when the basis turns: "keep", "rotate" for means of
            gradients, "align" or "reset".
        projector_bits: 8 stores bases in eight bits.
        stagger: Whether matrices choose their subspaces at different steps.
        per_layer: Whether each parameter moves during the backward pass.
        clip_norm: Largest norm of the gradient, projected where it is.
        clip: "global" or "matrix".
        groups: Settings by regular expression.
        seed: Chooses the random numbers.
        verbose: Whether to say on standard error how many matrices are projected.
        **settings: Other arguments of the inner optimizer.

    Raises:
        JomaError: Nothing is projected, or a setting is unknown or out of range.
    """

    moment_choices = MOMENTS

    def __init__(
        self,
        inner: Callable[..., torch.optim.Optimizer],
        parameters: selection.Parameters,
        lr: float = 1e-3,
        *,
        rank: int | float | None = None,
        gap: int = 200,
        refresh: Literal["gap", "energy"] = "gap",
        scale: float = 1.0,
        projection: Literal["power", "svd"] = "power",
        side: Literal["short", "left", "right", "smallest"] = "short",
        weight_decay: float = 0.0,
        moments: Literal["keep", "rotate", "align", "reset"] = "keep",
        projector_bits: Literal[8] | None = None,
        stagger: bool = True,
        per_layer: bool = False,
        clip_norm: float | None = None,
        clip: Literal["global", "matrix"] = "global",
        groups: Sequence[Mapping[str, Any]] = (),
        seed: int = 0,
        verbose: bool = True,
        **settings: Any,
    ) -> None:
        known = inspect.signature(inner).parameters
        for name in settings:
            if name not in known:
                raise JomaError(f"{getattr(inner, '__name__', inner)} has no setting {name!r}")
        if "weight_decay" in known:
            settings["weight_decay"] = 0.0
        self._make, self._settings = inner, settings
        self._inner: dict[Tensor, tuple[Tensor, torch.optim.Optimizer]] = {}
        defaults = {
            "lr": lr,
            "rank": rank,
            "gap": gap,
            "refresh": refresh,
            "scale": scale,
            "projection": projection,
            "side": side,
            "weight_decay": weight_decay,
            "moments": moments,
            "bits": None,
            "projector_bits": projector_bits,
            "state_dtype": None,
            "stagger": stagger,
        }
        super().__init__(
            parameters,
            defaults,
            groups=groups,
            per_layer=per_layer,
            clip_norm=clip_norm,
            clip=clip,
            seed=seed,
            verbose=verbose,
        )

    def __getstate__(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in ("_make", "_settings", "_inner")}
        return {**super().__getstate__(), **own}

    def _change(
        self, parameter: Tensor, group: dict[str, Any], gradient: Tensor, side: Side | None
    ) -> Tensor:
        if parameter is not local(parameter):
            raise JomaError(
                "GaLore(inner) takes whole parameters; GaLoreAdamW takes those of FSDP2"
            )
        stand_in, inner = self._stand_in(parameter, gradient)
        weights = parameter.float()
        if side is None:
            start = weights.clone()
        elif isinstance(inner, _SIZE_FREE):
            start = torch.zeros_like(stand_in)
        else:
            start = weights.square().mean().sqrt().expand(gradient.shape).clone()
        stand_in.copy_(start)
        stand_in.grad = gradient.float()
        for one in inner.param_groups:
            one["lr"] = group["lr"]
        inner.step()
        stand_in.grad = None
        state = self.state[parameter]
        state.update({_INNER + key: value for key, value in inner.state[stand_in].items()})
        return stand_in.detach() - start

    def _stand_in(
        self, parameter: Tensor, gradient: Tensor
    ) -> tuple[Tensor, torch.optim.Optimizer]:
        if parameter not in self._inner:
            stand_in = torch.nn.Parameter(torch.zeros_like(gradient, dtype=torch.float32))
            inner = self._make([stand_in], lr=self._group(parameter)["lr"], **self._settings)
            saved = {
                key.removeprefix(_INNER): value
                for key, value in self.state[parameter].items()
                if key.startswith(_INNER)
            }
            if saved:
                inner.state[stand_in] = saved
            self._inner[parameter] = stand_in, inner
        return self._inner[parameter]

    def _turn(self, parameter: Tensor, group: dict[str, Any], overlap: Tensor, side: Side) -> None:
        if parameter not in self._inner or group["moments"] in ("keep", "align"):
            return
        if group["moments"] == "reset":
            del self._inner[parameter]
            state = self.state[parameter]
            for key in [key for key in state if key.startswith(_INNER)]:
                del state[key]
            return
        stand_in, inner = self._inner[parameter]
        for key in _TURNED:
            mean = inner.state[stand_in].get(key)
            if (
                isinstance(mean, Tensor)
                and mean.shape == stand_in.shape
                and mean.is_floating_point()
            ):
                mean.copy_(overlap @ mean if side == "left" else mean @ overlap.mT)

    def _forget_moments(self, parameter: Tensor) -> None:
        super()._forget_moments(parameter)
        self._inner.pop(parameter, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Return to a state that `state_dict` gave."""
        super().load_state_dict(state_dict)
        self._inner.clear()

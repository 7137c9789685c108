"""Adam's two moments, in full or in eight bits, and the state of optimizers that keep its types."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from joma.common.sharded import local
from joma.errors import JomaError
from joma.optim import blockwise

SMALL = 4096
"""Parameters with fewer numbers keep their moments in full: eight bits would save nothing."""
ROWS_AT_ONCE = 1 << 22
"""Numbers of a parameter that `adamw_step` moves at once."""
_CODES: tuple[tuple[str, blockwise.Code], ...] = (("exp_avg", "signed"), ("exp_avg_sq", "root"))

Place = Callable[[Tensor], Tensor]
"""Makes a tensor of the state from this process's part of it."""


def check_betas(betas: tuple[float, float]) -> None:
    """Raise JomaError unless both decay rates lie in [0, 1)."""
    for name, beta in zip(("first", "second"), betas, strict=True):
        if not 0 <= beta < 1:
            raise JomaError(f"the {name} of betas must lie in [0, 1), got {beta}")


def read_moments(state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return this process's part of both moments, in float32."""
    parts = {key: local(one) for key, one in state.items() if isinstance(one, Tensor)}
    if "exp_avg_scale" not in parts:
        return parts["exp_avg"].float(), parts["exp_avg_sq"].float()
    first, second = (
        blockwise.Blocks(parts[key], parts[f"{key}_scale"]).decode(code) for key, code in _CODES
    )
    return first, second


def store_moments(
    state: dict[str, Any],
    moments: tuple[Tensor, Tensor],
    dtype: torch.dtype | None,
    *,
    seed: int = 0,
    place: Place = lambda part: part,
) -> None:
    """Put both moments into a parameter's state.

    Args:
        state: The state.
        moments: This process's part of both.
        dtype: Their type; None for eight bits.
        seed: Chooses the random numbers of the rounding to eight bits.
        place: Makes a tensor of the state from a part.
    """
    for (key, code), moment in zip(_CODES, moments, strict=True):
        if dtype is not None:
            state[key] = place(moment.to(dtype))
            continue
        blocks = blockwise.encode(moment, code, 2 * seed + (code == "root"))
        state[key], state[f"{key}_scale"] = place(blocks.codes), place(blocks.scales)


def make_moments(
    state: dict[str, Any],
    like: Tensor,
    dtype: torch.dtype | None,
    place: Place = lambda part: part,
) -> None:
    """Put moments of zero into a parameter's state, unless it has moments.

    Args:
        state: The state.
        like: This process's part of the gradient, whose shape they have.
        dtype: Their type; None for eight bits.
        place: Makes a tensor of the state from a part.
    """
    if "exp_avg" in state:
        return
    state["moment_step"] = torch.zeros((), dtype=torch.int64)
    for key, _ in _CODES:
        kind = torch.uint8 if dtype is None else dtype
        state[key] = place(torch.zeros(like.shape, dtype=kind, device=like.device))
        if dtype is None:
            shape = blockwise.scale_shape(like.shape)
            state[f"{key}_scale"] = place(torch.zeros(shape, device=like.device))


def adam_change(
    state: dict[str, Any],
    gradient: Tensor,
    group: Mapping[str, Any],
    dtype: torch.dtype | None,
    *,
    seed: int = 0,
    place: Place = lambda part: part,
) -> Tensor:
    """Advance both moments by a gradient and return by what Adam moves, in float32.

    The arguments are those of `store_moments`; `group` has "lr", "betas" and "eps".
    """
    make_moments(state, gradient, dtype, place)
    state["moment_step"] = state["moment_step"] + 1
    gradient = gradient.float()
    moments, change = _advance(read_moments(state), gradient, group, int(state["moment_step"]))
    store_moments(state, moments, dtype, seed=seed, place=place)
    return change


def adamw_step(
    weights: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: Mapping[str, Any],
    dtype: torch.dtype | None,
    *,
    seed: int = 0,
    place: Place = lambda part: part,
) -> None:
    """Move weights by AdamW, some rows at a time: numbers in float32 take little memory.

    Args:
        weights: This process's part of the parameter.
        gradient: Its gradient.
        state: Its state.
        group: Has "lr", "betas", "eps" and "weight_decay".
        dtype: Type of the moments; None for eight bits.
        seed: Chooses the random numbers of the rounding to eight bits.
        place: Makes a tensor of the state from a part.
    """
    make_moments(state, gradient, dtype, place)
    state["moment_step"] = state["moment_step"] + 1
    steps = int(state["moment_step"])
    keys = [key for key, _ in _CODES] + (
        [f"{key}_scale" for key, _ in _CODES] if dtype is None else []
    )
    stored = {key: local(state[key]) for key in keys}
    kept = 1 - group["lr"] * group["weight_decay"]
    rows = len(weights) if weights.ndim else 1
    size = max(ROWS_AT_ONCE // max(weights.numel() // max(rows, 1), 1), 1)
    for number, first in enumerate(range(0, rows, size)):
        part = slice(first, first + size) if weights.ndim else ()
        some = {key: one[part] for key, one in stored.items()}
        moments, change = _advance(read_moments(some), gradient[part].float(), group, steps)
        weights[part] = weights[part].mul(kept).add_(change.to(weights.dtype))
        new: dict[str, Any] = {}
        store_moments(new, moments, dtype, seed=seed + 7919 * number)
        for key, value in new.items():
            some[key].copy_(value)


def _advance(
    moments: tuple[Tensor, Tensor], gradient: Tensor, group: Mapping[str, Any], steps: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return both moments after a gradient, and Adam's change, all in float32."""
    one, two = group["betas"]
    first = moments[0].lerp(gradient, 1 - one)
    second = moments[1].mul(two).addcmul_(gradient, gradient, value=1 - two)
    divisor = second.sqrt().div_((1 - two**steps) ** 0.5).add_(group["eps"])
    return (first, second), first.div(divisor).mul_(-group["lr"] / (1 - one**steps))


class TypedStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose loaded state keeps its types; torch casts it to those of parameters."""

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

"""Adam's two moments of a parameter, in full or in eight bits, and the step that they make.

They are in the parameter's state as "exp_avg" and "exp_avg_sq", with the scales of their blocks
where they are in eight bits, and "moment_step", the number of gradients that they have seen.
Functions change the tensors of a state in place, this process's part of those that are sharded.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from joma.common.sharded import local
from joma.errors import JomaError
from joma.kernels.eight_bits import Code, EightBits, encode, scale_shape

SMALL = 4096
"""Parameters with fewer numbers keep their moments in full: eight bits would save nothing."""
ROWS_AT_ONCE = 1 << 22
"""Numbers of a parameter that move at once."""
_CODES: tuple[tuple[str, Code], ...] = (("exp_avg", "signed"), ("exp_avg_sq", "root"))


def check_betas(betas: tuple[float, float]) -> None:
    """Raise JomaError unless both decay rates lie in [0, 1)."""
    for name, beta in zip(("first", "second"), betas, strict=True):
        if not 0 <= beta < 1:
            raise JomaError(f"the {name} of betas must lie in [0, 1), got {beta}")


def make_moments(
    state: dict[str, Any],
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None,
    place: Callable[[Tensor], Tensor] = lambda part: part,
) -> None:
    """Put moments of zero into a parameter's state, unless it has moments.

    Args:
        state: The state.
        shape: Shape of this process's part.
        device: Their device.
        dtype: Their type; None for eight bits.
        place: Makes a tensor of the state from a part.
    """
    if "exp_avg" in state:
        return
    state["moment_step"] = torch.zeros((), dtype=torch.int64)
    for key, _ in _CODES:
        state[key] = place(torch.zeros(shape, dtype=dtype or torch.uint8, device=device))
        if dtype is None:
            state[f"{key}_scale"] = place(torch.zeros(scale_shape(shape), device=device))


def read_moments(state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return this process's part of both moments, in float32."""
    parts = {key: local(one) for key, one in state.items() if key.startswith("exp_avg")}
    if "exp_avg_scale" not in parts:
        return parts["exp_avg"].float(), parts["exp_avg_sq"].float()
    first, second = (
        EightBits(parts[key], parts[f"{key}_scale"]).decode(code) for key, code in _CODES
    )
    return first, second


def write_moments(state: Mapping[str, Any], moments: tuple[Tensor, Tensor], seed: int) -> None:
    """Set both moments in the type that they are stored in.

    Args:
        state: The state.
        moments: This process's part of both.
        seed: Chooses the random numbers of the rounding to eight bits.
    """
    for (key, code), moment in zip(_CODES, moments, strict=True):
        if f"{key}_scale" in state:
            blocks = encode(moment, code, 2 * seed + (code == "root"))
            local(state[f"{key}_scale"]).copy_(blocks.scales)
            moment = blocks.codes
        local(state[key]).copy_(moment)


def adam_changes(
    state: dict[str, Any], gradient: Tensor, group: Mapping[str, Any], seed: int
) -> Iterator[tuple[Any, Tensor]]:
    """Advance both moments, some rows at a time; yield the rows and by what Adam moves them.

    Args:
        state: The state, with moments.
        gradient: This process's part of the gradient.
        group: Has "lr", "betas" and "eps".
        seed: Chooses the random numbers of the rounding to eight bits.
    """
    state["moment_step"] = state["moment_step"] + 1
    steps, (one, two) = int(state["moment_step"]), group["betas"]
    stored = {key: local(part) for key, part in state.items() if key.startswith("exp_avg")}
    rows = len(gradient) if gradient.ndim else 1
    size = max(ROWS_AT_ONCE // max(gradient.numel() // max(rows, 1), 1), 1)
    for number, start in enumerate(range(0, rows, size)):
        part = slice(start, start + size) if gradient.ndim else ()
        some = {key: value[part] for key, value in stored.items()}
        given = gradient[part].float()
        first, second = read_moments(some)
        first = first.lerp(given, 1 - one)
        second = second.mul(two).addcmul_(given, given, value=1 - two)
        divisor = second.sqrt().div_((1 - two**steps) ** 0.5).add_(group["eps"])
        write_moments(some, (first, second), seed + 7919 * number)
        yield part, first.div(divisor).mul_(-group["lr"] / (1 - one**steps))


def adamw_step(
    weights: Tensor, state: dict[str, Any], gradient: Tensor, group: Mapping[str, Any], seed: int
) -> None:
    """Move weights by AdamW with decoupled "weight_decay"; arguments as for `adam_changes`."""
    kept = 1 - group["lr"] * group["weight_decay"]
    for part, change in adam_changes(state, gradient, group, seed):
        weights[part] = weights[part].mul(kept).add_(change.to(weights.dtype))


def moment_bytes(shape: tuple[int, ...], dtype: torch.dtype | None) -> int:
    """Return the bytes of both moments, None for eight bits."""
    if dtype is None:
        return 2 * (math.prod(shape) + 4 * math.prod(scale_shape(shape)))
    return 2 * math.prod(shape) * dtype.itemsize

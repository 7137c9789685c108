"""Checked inputs, and the arithmetic settings that bounds rely on."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from joma.common.float32 import float32_is_coarse, float32_products
from joma.errors import JomaError
from joma.probes._checks import computable

_METHODS = ("auto", "lanczos", "exact")
_LOCK = threading.RLock()
"""Held because float32 settings and the buffers of captured graphs belong to the whole process."""


def check_options(method: str, tolerance: float) -> None:
    """Raise JomaError for an unknown method or a tolerance that no method can reach."""
    if method not in _METHODS:
        raise JomaError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")
    if not 1e-7 <= tolerance < 1:
        raise JomaError(f"tolerance must lie from 1e-7 below 1, got {tolerance!r}")


def as_matrix(matrix: Tensor) -> Tensor:
    """Return the matrix, checked and detached; integers become float64."""
    if not isinstance(matrix, Tensor):
        try:
            matrix = torch.as_tensor(matrix)
        except (TypeError, ValueError, RuntimeError):
            raise JomaError(
                f"matrix must be a torch.Tensor, got a {type(matrix).__name__}"
            ) from None
    matrix = computable("matrix", matrix)
    if matrix.ndim != 2 or matrix.numel() == 0:
        raise JomaError(f"matrix must have two axes, none empty, got shape {tuple(matrix.shape)}")
    if matrix.is_complex():
        raise JomaError(f"matrix must be real numbers, got {matrix.dtype}")
    matrix = matrix.detach()
    return matrix if matrix.is_floating_point() else matrix.to(torch.float64)


def check_finite(*norms: float) -> None:
    """Raise JomaError where a norm shows that a matrix holds NaN or infinity."""
    if not all(abs(norm) < float("inf") for norm in norms):
        raise JomaError("matrix must be finite, got NaN or infinity")


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in IEEE float32 on that device, without autocast and gradients, in one thread."""
    # Only settings that differ are entered: entering all of them costs as much as a small kernel.
    with _LOCK, torch.no_grad(), ExitStack() as stack:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            stack.enter_context(torch.cuda.device(device))
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if float32_is_coarse():
            stack.enter_context(float32_products("ieee"))
        yield


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2ⁿ in float64 for integers n from −1022 to 1023, by its bits.

    exp2 and ldexp are not exact on every device, and exp2 is compiled at its first call.
    """
    return (exponent.long() + 1023 << 52).view(torch.float64)

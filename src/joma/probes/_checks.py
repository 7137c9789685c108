"""Checks of user input: each returns a tensor to compute with or raises a `ValueError`.

The message names the argument, what was given, and what would be right.
"""

import torch
from torch import Tensor

from joma.errors import JomaError

_USUAL = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool})


def tensor(name: str, value: Tensor, axes: int) -> Tensor:
    """`value` if it is a dense tensor of at least that many axes, cut from its graph."""
    value = computable(name, value)
    if value.ndim < axes:
        raise JomaError(f"{name} must have at least {axes} axes, got shape {tuple(value.shape)}")
    return value.detach()


def computable(name: str, value: Tensor) -> Tensor:
    """Return `value` if it is a tensor that can be computed with; float8 becomes float32."""
    if not isinstance(value, Tensor):
        raise JomaError(f"{name} must be a torch.Tensor, got a {type(value).__name__}")
    if value.is_nested or value.layout != torch.strided:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise JomaError(f"{name} must be a dense tensor, got a {layout} one")
    if value.is_quantized:
        raise JomaError(f"{name} must be numbers to compute with, got {value.dtype}")
    if value.is_meta:
        raise JomaError(f"{name} must hold data, got a tensor on the meta device")
    return value.float() if value.is_floating_point() and value.itemsize == 1 else value


def dense(name: str, value: Tensor, axes: int) -> Tensor:
    """Return `value` as `tensor` does, but refuse float8, which it would convert."""
    usual = type(value) is Tensor and value.dtype in _USUAL and (value.is_cpu or value.is_cuda)
    if usual and value.ndim >= axes and value.layout == torch.strided and not value.is_nested:
        # The same without asking for each thing it might be.
        return value.detach() if value.requires_grad else value
    if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize == 1:
        raise JomaError(
            f"{name} must be float64, float32, float16 or bfloat16, got {value.dtype}: convert it"
        )
    return tensor(name, value, axes)


def numbers(name: str, value: Tensor) -> Tensor:
    """`value` as a float64 tensor without NaN or infinity."""
    if value.is_complex():
        raise JomaError(f"{name} must be real numbers, got {value.dtype}")
    if value.is_floating_point() and not value.isfinite().all():
        raise JomaError(f"{name} must be finite, got NaN or infinity")
    return value.to(torch.float64)


def integers(name: str, value: Tensor, axes: int) -> Tensor:
    """`value` as an int64 tensor; numbers of another kind are refused, not rounded."""
    value = tensor(name, value, axes)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise JomaError(f"{name} must be integers, got {value.dtype}")
    return value.to(torch.int64)


def together(**shapes: torch.Size) -> torch.Size:
    """The common leading shape; refuses shapes that do not broadcast, naming whose they are."""
    try:
        return torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        given = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise JomaError(f"leading axes must broadcast together, got {given}") from None


def one_device(**tensors: Tensor | None) -> None:
    """Refuses tensors that lie on different devices; None is not one."""
    devices = [tensor.device for tensor in tensors.values() if tensor is not None]
    if devices.count(devices[0]) != len(devices):
        given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
        each = ", ".join(f"{name} on {device}" for name, device in given.items())
        raise JomaError(f"{', '.join(given)} must lie on one device, got {each}")

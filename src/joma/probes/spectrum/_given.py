"""What the spectra are given, checked."""

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.probes._checks import computable

_METHODS = ("auto", "lanczos", "exact")


def check_method(method: str) -> None:
    """Refuses a method there is not."""
    if method not in _METHODS:
        raise JomaError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")


def check_tolerance(tolerance: float) -> None:
    """Refuses a tolerance no method can be asked for."""
    if not 1e-7 <= tolerance < 1:
        raise JomaError(f"tolerance must lie from 1e-7 below 1, got {tolerance!r}")


def as_matrix(matrix: Tensor) -> Tensor:
    """The matrix, checked and cut from its graph; whole numbers become float64."""
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

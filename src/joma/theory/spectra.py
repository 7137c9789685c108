"""Rank and stable rank of small matrices, exactly (Section 4 and the talk)."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array


def singular_values(matrix: ArrayLike) -> Array:
    """Singular values of matrices (…, M, K), largest first."""
    matrix = _checks.finite("matrix", matrix)
    if matrix.ndim < 2:
        raise JomaError(f"matrix must have two axes at least, got shape {matrix.shape}")
    return np.asarray(np.linalg.svd(matrix, compute_uv=False), dtype=np.float64)


def stable_rank(matrix: ArrayLike) -> Array:
    """Section 4: ‖W‖_F²/‖W‖₂², between 1 and the rank; 0 for a zero matrix."""
    squares = singular_values(_scaled(matrix)) ** 2
    largest = np.max(squares, axis=-1, initial=0.0)
    return np.sum(squares, axis=-1) / np.where(largest > 0, largest, 1.0)


def rank(matrix: ArrayLike, *, tolerance: float = 1e-10) -> NDArray[np.int64]:
    """Number of singular values above `tolerance` times the largest."""
    tolerance = _checks.scalar("tolerance", tolerance)
    values = singular_values(_scaled(matrix))
    return np.sum(values > tolerance * values[..., :1], axis=-1)


def _scaled(matrix: ArrayLike) -> Array:
    """Matrices divided by their largest entry, so that no square over- or underflows."""
    matrix = _checks.at_least_1d("matrix", matrix)
    axes = (-2, -1)[-min(matrix.ndim, 2) :]
    largest = np.max(np.abs(matrix), axis=axes, keepdims=True, initial=0.0)
    return matrix / np.where(largest > 0, largest, 1.0)

"""Theorem 4 as printed."""

import numpy as np
from numpy.typing import ArrayLike

from joma.theory._checks import Array


def offset_bound() -> float:
    """Theorem 4 (Eqn 88): 0 ≤ F - e^{-μ²/2} ln(1/δ) ≤ √(π/2) + 1; true, and loose."""
    return float(np.sqrt(np.pi / 2) + 1)


def leading_time(log_residual: ArrayLike, mu: ArrayLike) -> Array:
    """After Eqn 88: F → e^{-μ²} ln(1/δ) near convergence, with e^{-μ²} for e^{-μ²/2}."""
    return -np.exp(-(np.asarray(mu) ** 2)) * np.asarray(log_residual)


def settled_threshold(mu: ArrayLike) -> Array:
    """Theorem 4, closing line: ln δ_k must be far below -(√(2π)+2) e^{-μ_k²}."""
    return -(np.sqrt(2 * np.pi) + 2) * np.exp(-(np.asarray(mu, dtype=np.float64) ** 2))

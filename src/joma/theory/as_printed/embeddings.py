"""Section A.4 as printed."""

import numpy as np

from joma.theory._checks import Array


def superposed(patterns: Array, queries: Array, biases: Array) -> Array:
    """Section A.4, pattern superposition: w = Σ_m v_m - ξ_m u_m, the bias with the wrong sign."""
    return np.sum(patterns - biases[:, None] * queries, axis=0)

"""Theorem 2 as printed."""

import numpy as np
from numpy.typing import ArrayLike

from joma.theory import _special
from joma.theory._checks import Array


def conserved_ratio(delta: ArrayLike, v: ArrayLike) -> Array:
    """Theorem 2 (Eqn 4): erf(v_l/2)/Δ_l; the argument lacks a √2."""
    return _special.erf(np.asarray(v) / 2) / np.asarray(delta, dtype=np.float64)

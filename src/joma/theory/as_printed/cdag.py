"""The CDAG note's Theorem 1, its recursion step and Eqn 3, as printed."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.theory import _checks as checks
from joma.theory.cdag import corr
from joma.theory.functions import Activation

Array = NDArray[np.float64]


def correlation_bound(theta_1: ArrayLike, theta_2: ArrayLike, theta_3: ArrayLike) -> Array:
    """Theorem 1 as printed: three positive correlations make corr(z_β, g_{j→k}) positive.

    Returns 0 where the premises hold and −1, the least value there is, where it says nothing.
    """
    angles = np.broadcast_arrays(
        checks.within("theta_1", theta_1, 0, np.pi),
        checks.within("theta_2", theta_2, 0, np.pi),
        checks.within("theta_3", theta_3, 0, np.pi),
    )
    premises = (angles[0] < np.pi / 2) & (angles[1] < np.pi / 2) & (angles[2] != np.pi / 2)
    return np.where(premises, 0.0, -1.0)


def recursion_bound(
    z_beta: ArrayLike, g: ArrayLike, slope_min: ArrayLike, slope_max: ArrayLike
) -> Array:
    """Recursion step after Theorem 1 as printed: a positive corr(z_β, g_k) survives σ′_k.

    Returns 0 where corr(z_β, g_k) > 0 and −∞, no bound, elsewhere.
    """
    del slope_min, slope_max
    return np.where(corr(z_beta, g) > 0, 0.0, -np.inf)


def label_flow(
    w: ArrayLike,
    x_plus: ArrayLike,
    x_minus: ArrayLike,
    z_alpha: ArrayLike,
    g: ArrayLike,
    nonlinearity: Activation,
) -> Array:
    """Eqn 3 as printed: E[g | z_α = 1] set to 1 and E[g | z_α = 0] to −1, whatever g is."""
    del g
    weights, plus, minus, z = (
        np.asarray(a, dtype=np.float64) for a in (w, x_plus, x_minus, z_alpha)
    )
    rise = nonlinearity.derivative(weights @ plus) * plus
    fall = nonlinearity.derivative(weights @ minus) * minus
    return np.mean(z) * rise - np.mean(1 - z) * fall

"""Reference solutions of differential equations, and quadrature."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
from scipy import integrate

from joma.errors import JomaError

gauss = cache(np.polynomial.legendre.leggauss)
"""Nodes and weights of Gauss's rule on (-1, 1), by their number."""


def solve(right_side: Callable[[Any], Any], start: Any, t: Any, **options: Any) -> Any:
    """Return the states of an autonomous ODE at times t, shape (T, …), or at one time.

    The options are those of SciPy's `solve_ivp`, to 12 digits unless they say otherwise.

    Raises:
        JomaError: The solver gives up, or the state becomes infinite.
    """
    start = np.asarray(start, dtype=float)
    one = np.ndim(t) == 0
    given: dict[str, Any] = {"method": "DOP853", "rtol": 1e-12, "atol": 1e-13, **options}
    solution: Any = integrate.solve_ivp(
        lambda _, y: np.ravel(right_side(y.reshape(start.shape))),
        (0.0, t if one else t[-1]),
        start.ravel(),
        t_eval=None if one else np.asarray(t),
        **given,
    )
    if not solution.success or not np.all(np.isfinite(solution.y[:, -1])):
        raise JomaError("the reference solver gives up on this point")
    states = solution.y.T.reshape(-1, *start.shape)
    return states[-1] if one else states


def five_point(values: Iterable[Any], step: float) -> Any:
    """Return a derivative from the values at -2, -1, 1 and 2 steps."""
    two_back, back, ahead, two_ahead = values
    return (8 * (ahead - back) - (two_ahead - two_back)) / (12 * step)

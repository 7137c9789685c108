"""Reference solutions of differential equations, and quadrature."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy import integrate

from joma.errors import JomaError

_MAX_CALLS = 50_000

gauss = functools.cache(np.polynomial.legendre.leggauss)
"""Places in (-1, 1) and weights of Gauss's rule with a given number of nodes."""


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


def follow(right_side: Callable[[Any], Any], start: Any, t: float, rtol: float = 1e-10) -> Any:
    """Return the state of an autonomous ODE at time t, by LSODA with a limited number of calls."""
    start = np.asarray(start, dtype=float)
    if start.size == 0 or t == 0:
        return start
    calls = 0

    def rate(state: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > _MAX_CALLS:
            raise JomaError("the reference solver takes too many steps at this point")
        return right_side(state)

    return solve(rate, start, t, method="LSODA", rtol=rtol, atol=1e-2 * rtol)


def integral(
    function: Callable[[Any], Any], *panels: tuple[float, float, int], nodes: int = 20
) -> float:
    """Return an integral by Gauss's rule; a panel is a range and the number of its parts."""
    places, weights = gauss(nodes)
    total = 0.0
    for low, high, count in panels:
        if high > low:
            ends = np.linspace(low, high, count + 1)
            half = (high - low) / count / 2
            x = ends[:-1, None] + half * (1 + places)
            total += float(np.sum(function(x) @ weights)) * half
    return total


def five_point(values: Iterable[Any], step: float) -> Any:
    """Return a derivative from the values at -2, -1, 1 and 2 steps."""
    two_back, back, ahead, two_ahead = values
    return (8 * (ahead - back) - (two_ahead - two_back)) / (12 * step)

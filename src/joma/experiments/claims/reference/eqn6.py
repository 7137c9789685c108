"""Eqn 6 by implicit integration, by its power series and by quadrature of dt over ln 1/δ."""

from typing import Any

import mpmath
import numpy as np

from joma.experiments.claims.reference.ode import solve


def velocity(v: Any, mu: Any) -> Any:
    """Return v̇ of Eqn 6; of a matrix, each row of which shares its gate."""
    squares = np.sum(v**2, axis=1, keepdims=True) if np.ndim(mu) > 1 else v**2
    return (mu - v) * np.exp(squares / 2)


def flow(mu: Any, t: Any, rtol: float = 1e-10, method: Any = "Radau") -> Any:
    """Return v(t) of Eqn 6 by implicit integration, shape (T, …)."""
    mu = np.asarray(mu, dtype=float)
    options = {"method": method, "rtol": rtol, "atol": 1e-2 * rtol}
    return solve(lambda v: velocity(v, mu), np.zeros(mu.shape), t, **options)


def time_at(log_residual: Any, mu: float) -> Any:
    """Return F of Eqn 79 at a given ln δ, by its power series in μ²/2, to 20 digits and more.

    Σ_k (-μ²/2)^k/k! · (y - Σ_{j≤2k} r^j/j) with y = ln 1/δ and r = 1 - δ.
    """
    half = mpmath.mpf(mu) ** 2 / 2
    with mpmath.workdps(30 + int(half)):
        y = -mpmath.mpf(log_residual)
        r = -mpmath.expm1(-y)
        term, power, known, total = mpmath.mpf(1), r, mpmath.mpf(0), mpmath.mpf(0)
        smallest, k = mpmath.mpf(10) ** -mpmath.mp.dps, 0
        while k <= half or abs(term) > smallest:
            total += term * (y - known)
            known += power / (2 * k + 1) + power * r / (2 * k + 2)
            power *= r * r
            k += 1
            term *= -half / k
    return +total


def slope_at(log_residual: Any, mu: float) -> Any:
    """Return the derivative of ln 1/δ in time, exp(v²/2)."""
    return mpmath.exp((mpmath.mpf(mu) * mpmath.expm1(log_residual)) ** 2 / 2)

"""Eqn 6 by implicit integration, by its power series and by quadrature of dt over ln 1/δ."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mpmath
import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.reference.ode import gauss, solve


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


class ResidualCurve(NamedTuple):
    """Ln 1/δ of one component at many times: y with its times F and slopes dy/dF."""

    y: Any
    time: Any
    slope: Any

    @classmethod
    def of(cls, mu: float) -> "ResidualCurve":
        """Integrate dF = exp(-v²/2) dy over cells of y, with six nodes in each."""
        early = np.linspace(0, 6, 601)
        if mu > 9:  # fine in v up to 9; beyond, no time passes
            grown = -np.log1p(-np.linspace(0, 9 / mu, 601))
            early = np.concatenate([grown, np.linspace(grown[-1], 6, 100)[1:]])
        y = np.concatenate([early, np.linspace(6, 45, 160)[1:]])
        nodes, weights = gauss(6)
        half = np.diff(y)[:, None] / 2
        inside = y[:-1, None] + half * (1 + nodes)
        cells = (np.exp(-((mu * np.expm1(-inside)) ** 2) / 2) * half) @ weights
        time = np.concatenate([[0.0], np.cumsum(cells)])
        return cls(y, time, np.exp((mu * np.expm1(-y)) ** 2 / 2))

    def at(self, t: Any) -> Any:
        """Return y at any times, by cubic interpolation; it is linear beyond the last cell."""
        t = np.asarray(t, dtype=float)
        cell = np.clip(np.searchsorted(self.time, t, side="right") - 1, 0, self.y.size - 2)
        rise = self.y[cell + 1] - self.y[cell]
        width = np.maximum(self.time[cell + 1] - self.time[cell], 1e-300)
        s = np.clip((t - self.time[cell]) / width, 0, 1)
        first = np.minimum(self.slope[cell] * width, 3 * rise)
        last = np.minimum(self.slope[cell + 1] * width, 3 * rise)
        cubic = s * first + s**2 * (3 * rise - 2 * first - last)
        cubic = cubic + s**3 * (first + last - 2 * rise)
        late = np.maximum(t - self.time[-1], 0) * self.slope[-1]
        return np.where(t > self.time[-1], self.y[-1] + late, self.y[cell] + cubic)


def courses(mu: Any) -> tuple[list[ResidualCurve], Any]:
    """Return the course of every |μ| > 0, and times at which something happens to one of them."""
    every = [ResidualCurve.of(size) for size in np.abs(mu)]
    grid = np.concatenate([one.time[::8] for one in every])
    # Late on the slowest are still on their way, to δ = e^{-45} and to e^{-600}.
    ends = np.array([one.time[-1] + (600 - one.y[-1]) / one.slope[-1] for one in every])
    late = np.linspace(np.max([one.time[-1] for one in every]), np.max(ends), 40)
    grid = np.unique(np.concatenate([grid, late, ends]))
    return every, np.unique(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]))


def refuse_near_ties(size: Any) -> None:
    """Refuse sizes that differ by less than 1e-12: the reference cannot separate their growth."""
    gaps = np.diff(np.unique(size))
    if np.any(gaps < 1e-12 * np.max(size)):
        raise JomaError("two sizes are too close for the reference")


def minimum(curve: Callable[[Any], Any], grid: Any, cluster: int) -> float:
    """Return the smallest value of a curve, with the grid made finer around it, near and farther.

    Where components are of nearly one size, up to `cluster` times of the grid lie close together.
    """
    on_grid = curve(grid)
    lowest = float(np.min(on_grid))
    for reach in (1, cluster):
        at, t = int(np.argmin(on_grid)), grid
        for _ in range(4):
            t = np.linspace(t[max(at - reach, 0)], t[min(at + reach, t.size - 1)], 33)
            values = curve(t)
            at, reach = int(np.argmin(values)), 1
            lowest = min(lowest, float(values[at]))
    return lowest

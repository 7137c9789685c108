"""References for Eqns 3 and 6 that share nothing with `joma.theory`: series, quadrature, ODEs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mpmath
import numpy as np
from scipy import integrate

from joma.errors import JomaError

_MOST_CALLS = 50_000
_TIME_PER_CELL = np.polynomial.legendre.leggauss(6)


def follow(right_side: Callable[[Any], Any], start: Any, t: float, rtol: float = 1e-10) -> Any:
    """The state of an autonomous ODE at time t, by LSODA."""
    start = np.asarray(start, dtype=float)
    if start.size == 0 or t == 0:
        return start
    calls = 0

    def rate(_: float, y: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > _MOST_CALLS:
            raise JomaError("the reference solver takes too many steps at this point")
        return np.ravel(right_side(y.reshape(start.shape)))

    solution: Any = integrate.solve_ivp(
        rate,
        (0.0, t),
        start.ravel(),
        "LSODA",
        rtol=rtol,
        atol=1e-2 * rtol,
    )
    if not solution.success or not np.all(np.isfinite(solution.y[:, -1])):
        raise JomaError("the reference solver gives up on this point")
    return solution.y[:, -1].reshape(start.shape)


def log_own_time(delta: float, start: float, offset: float, normalizer: float) -> Any:
    """Ln of ∫ dv/v̇ from v(0) to infinity for v̇ = Δ exp(v²/2 + c)/A, in the digits of mpmath."""
    u = mpmath.mpf(start) * (1 if delta > 0 else -1)
    way = mpmath.sqrt(mpmath.pi / 2) * mpmath.erfc(u / mpmath.sqrt(2))
    return mpmath.log(way) + mpmath.log(normalizer) - mpmath.mpf(offset) - mpmath.log(abs(delta))


def distance(delta: float, start: float, v: float, log_way: Any) -> float:
    """By how much v must change for ∫ e^{-u²/2} du from v(0) to v to be exp(log_way)."""
    sign = 1 if delta > 0 else -1
    begin, end = (mpmath.mpf(sign * a) / mpmath.sqrt(2) for a in (start, v))
    if begin >= 0:
        covered = mpmath.erfc(begin) - mpmath.erfc(end)
    elif end <= 0:
        covered = mpmath.erfc(-end) - mpmath.erfc(-begin)
    else:
        covered = mpmath.erf(end) - mpmath.erf(begin)
    missing = mpmath.exp(log_way) - covered * mpmath.sqrt(mpmath.pi / 2)
    return float(abs(missing * mpmath.exp(mpmath.mpf(v) ** 2 / 2)))


def length_at(delta: Any, t: Any) -> float:
    """v(t) of v̇ = Δ exp(v²/2) from zero, by inverting erf in the digits of mpmath."""
    argument = mpmath.sqrt(2 / mpmath.pi) * mpmath.mpf(delta) * t
    return float(mpmath.sqrt(2) * mpmath.erfinv(argument))


def time_at(log_residual: Any, mu: float) -> Any:
    """F of Eqn 79 at a given ln δ, by its power series in μ²/2, to 20 digits and more.

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
    """The derivative of ln 1/δ in time, exp(v²/2)."""
    return mpmath.exp((mpmath.mpf(mu) * mpmath.expm1(log_residual)) ** 2 / 2)


class Course(NamedTuple):
    """Ln 1/δ of one component at many times: y with its times F and slopes dy/dF."""

    y: Any
    time: Any
    slope: Any

    @classmethod
    def of(cls, mu: float) -> "Course":
        """Integrates dF = exp(-v²/2) dy over cells of y, with six nodes in each."""
        early = np.linspace(0, 6, 601)
        if mu > 9:  # fine in v up to 9; beyond, no time passes
            grown = -np.log1p(-np.linspace(0, 9 / mu, 601))
            early = np.concatenate([grown, np.linspace(grown[-1], 6, 100)[1:]])
        y = np.concatenate([early, np.linspace(6, 45, 160)[1:]])
        nodes, weights = _TIME_PER_CELL
        half = np.diff(y)[:, None] / 2
        inside = y[:-1, None] + half * (1 + nodes)
        cells = (np.exp(-((mu * np.expm1(-inside)) ** 2) / 2) * half) @ weights
        time = np.concatenate([[0.0], np.cumsum(cells)])
        return cls(y, time, np.exp((mu * np.expm1(-y)) ** 2 / 2))

    def at(self, t: Any) -> Any:
        """Y at any times, by cubic interpolation; beyond the last cell it is linear in time."""
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


def courses(mu: Any) -> tuple[list[Course], Any]:
    """The course of every |μ| > 0, and times at which something happens to one of them."""
    every = [Course.of(size) for size in np.abs(mu)]
    grid = np.concatenate([one.time[::8] for one in every])
    # Late on the slowest are still on their way, to δ = e^{-45} and to e^{-600}.
    ends = np.array([one.time[-1] + (600 - one.y[-1]) / one.slope[-1] for one in every])
    late = np.linspace(np.max([one.time[-1] for one in every]), np.max(ends), 40)
    grid = np.unique(np.concatenate([grid, late, ends]))
    return every, np.unique(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]))

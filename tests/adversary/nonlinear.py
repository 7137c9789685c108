"""Searches of Eqn 6 and of the rates of Theorem 4."""

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import ClaimMeasurement, Formula, Point, difference, measured
from joma.experiments.claims.reference.eqn6 import slope_at, time_at, velocity
from joma.experiments.claims.reference.ode import gauss, solve
from joma.theory import as_printed as printed
from tests.adversary.domains import Domain, choice, integer, over, real, vector


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


_ANY_TIME: dict[str, Domain] = {
    "mu": real(-6, 6, special=(0.0, 1.872, 6.0)),
    "time": real(1e-6, 1e6, log=True),
    "where": choice("any", "growth"),
    "y": real(1e-6, 700, log=True),
}


def _any_time(point: Point) -> float:
    """A time: any, or one close to the sudden growth of this component."""
    if point["where"] == "any" or point["mu"] == 0:
        return point["time"]
    return float(max(time_at(-point["y"], point["mu"]), 1e-300))


@over("eqn6", **_ANY_TIME)
def _weights_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """V from the ln 1/δ that one Newton step in 30 digits finds next to the answer's."""
    mu = point["mu"]
    if abs(mu) < 1e-150:
        raise JomaError("v is below the range of float64")
    t = _any_time(point)
    ours = float(formula([mu], t)[0])
    with mpmath.workdps(40):
        share = mpmath.mpf(ours) / mpmath.mpf(mu)
        if share >= 1 - mpmath.mpf(10) ** -14:
            # Rounded to its target: it must have come so close.
            late = time_at(mpmath.log(mpmath.mpf(10) ** -13), mu)
            return ClaimMeasurement(float(mpmath.mpf(t) < late) + abs(float(share - 1)), 1e-12)
        guess = mpmath.log1p(-share)
        step = (time_at(guess, mu) - mpmath.mpf(t)) * slope_at(guess, mu)
        change = mpmath.exp(guess) * step / share
    return ClaimMeasurement(abs(float(change)), 1e-11)


@over(
    "eqn6-ode", mu=vector(real(-4, 4, special=(0.0,)), integer(1, 8)), time=real(1e-4, 50, log=True)
)
def _ode_at(formula: Formula, point: Point) -> ClaimMeasurement:
    mu, t = point["mu"], point["time"]
    v = solve(
        lambda v: velocity(v, mu), np.zeros(mu.size), t, method="LSODA", rtol=1e-9, atol=1e-11
    )
    return measured(difference(formula(mu, t), v), 1e-4)


@over("eqn6-log", **_ANY_TIME)
def _log_residual_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """F in 30 digits at the answer; the difference to t over the slope is the error of it."""
    mu = point["mu"]
    t = _any_time(point)
    ours = float(formula([mu], t)[0])
    if ours < -1e290:
        raise JomaError("beyond the range of float64")
    with mpmath.workdps(30):
        off = (time_at(ours, mu) - mpmath.mpf(t)) * slope_at(ours, mu) / ours
    return ClaimMeasurement(abs(float(off)), 1e-11)


@over("eqn6-late", size=real(1e-6, 6), y=real(2, 700, log=True))
def _late_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The remainder is μ²δ to leading order, plus the rounding of t - R times e^{μ²/2}."""
    mu, y = point["size"], point["y"]
    with mpmath.workdps(30):
        t = float(time_at(-y, mu))
        exact = -y - float((mpmath.mpf(t) - time_at(-y, mu)) * slope_at(-y, mu))
    slack = 2 * (mu**2 + mu**4 * np.exp(-y)) * np.exp(-y) + 1e-9 * y
    slack += 4e-16 * t * np.exp(mu**2 / 2)
    return measured(abs(float(formula(mu, t)) - exact), slack)


@over("eqn84", size=real(1e-3, 6, log=True), y=real(1e-3, 30, log=True))
def _in_mu_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """∫ -μ x² e^{-μ²x²/2} dy over y = ln 1/(1-x), by Gauss's rule in 24 panels."""
    mu, r = point["size"], -np.expm1(-point["y"])
    end = -np.log1p(-r)  # of the float r

    def slope(y: Any) -> Any:
        x = -np.expm1(-y)
        return -mu * x**2 * np.exp(-((mu * x) ** 2) / 2)

    exact = integral(slope, (0.0, end, 24), nodes=16)
    return ClaimMeasurement(abs(float(formula(r, mu)) - exact), 1e-7 * max(1.0, abs(exact)))


_Y = real(1e-6, 1e8, log=True)


_POSITIVE = real(1e-6, 1e3, log=True)


@over("lemma6", "lemma6-sharp", y=_POSITIVE)
def _lemma6_at(formula: Formula, point: Point) -> ClaimMeasurement:
    y = point["y"]
    return measured(-np.expm1(-(y**2)) / y - float(formula()), 1e-12)


@over("lemma7", "lemma7-sharp", y=_POSITIVE)
def _lemma7_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """e^{-y²/2} ∫₀ʸ e^{x²/2} dx with x = y - s, so that nothing overflows."""
    y = point["y"]
    peak = integral(lambda s: np.exp(-s * (y - s / 2)), (0.0, min(y, 40 / y), 8))
    return measured(peak - float(formula()), 1e-12)


def _offset(y: float, mu: float) -> float:
    """F - e^{-μ²/2} y at ln 1/δ = y: ∫ (e^{-v²/2} - e^{-μ²/2}) dy."""
    bend, far = min(y, 8 / max(mu, 0.2)), min(y, 45.0)

    def excess(x: Any) -> Any:
        # With the difference of two exponentials written without its cancellation.
        v = -mu * np.expm1(-x)
        return -np.exp(-(v**2) / 2) * np.expm1(-(mu - v) * (mu + v) / 2)

    return integral(excess, (0.0, bend, 8), (bend, far, 12))


@over("thm4", "thm4-sharp", size=real(0, 37), y=_Y)
def _offset_at(formula: Formula, point: Point) -> ClaimMeasurement:
    found = _offset(point["y"], point["size"])
    return ClaimMeasurement(-found if found < -1e-9 else found - float(formula()), 1e-9)


@over("thm4-leading", size=real(0, 6), y=_Y)
def _leading_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Whether F minus its leading term stays within the bound of Theorem 4."""
    y, size = point["y"], point["size"]
    leading = float(np.exp(-(size**2) / 2)) * y
    rest = _offset(y, size) + (leading - float(formula(-y, size)))
    return ClaimMeasurement(abs(rest) - printed.offset_bound(), 1e-9 + 1e-14 * leading)

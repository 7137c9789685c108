"""Eqn 6 and its solution."""

from typing import Any

import mpmath
import numpy as np
from scipy import integrate
from scipy.special import erf

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, difference, measured
from joma.experiments.claims.reference.eqn6 import flow, slope_at, time_at, velocity
from joma.experiments.claims.reference.ode import follow, integral
from joma.experiments.claims.search import Choice, Integer, Real, Vector
from joma.theory import nonlinear

_ANY_TIME: dict[str, Any] = {
    "mu": Real(-6, 6, special=(0.0, 1.872, 6.0)),
    "time": Real(1e-6, 1e6, log=True),
    "where": Choice("any", "growth"),
    "y": Real(1e-6, 700, log=True),
}


def _any_time(point: Point) -> float:
    """A time: any, or one close to the sudden growth of this component."""
    if point["where"] == "any" or point["mu"] == 0:
        return point["time"]
    return float(max(time_at(-point["y"], point["mu"]), 1e-300))


def _inverted(y: float, mu: float) -> tuple[float, Any]:
    """A float t close to a ln 1/δ, and the ln 1/δ at that t, by Newton's method."""
    t = float(time_at(-y, mu))
    exact = mpmath.mpf(y)
    for _ in range(2):
        exact += (mpmath.mpf(t) - time_at(-exact, mu)) * slope_at(-exact, mu)
    return t, exact


@over(**_ANY_TIME)
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


@claim("eqn6", nonlinear.weights, _weights_at)
def _weights(formula: Formula, rng: Generator) -> ClaimMeasurement:
    errors = []
    with mpmath.workdps(30):
        for mu in (*rng.uniform(-4, 4, size=2), 6.0):
            for target in (0.3, 2.0, 8.0):
                t, y = _inverted(target, mu)
                reference = mpmath.mpf(mu) * (1 - mpmath.exp(-y))
                errors.append(float(abs(formula([mu], t)[0] / reference - 1)))
    return measured(errors, 1e-9)


@over(mu=Vector(Real(-4, 4, special=(0.0,)), Integer(1, 8)), time=Real(1e-4, 50, log=True))
def _ode_at(formula: Formula, point: Point) -> ClaimMeasurement:
    mu, t = point["mu"], point["time"]
    v = follow(lambda v: velocity(v, mu), np.zeros(mu.size), t, 1e-9)
    return measured(difference(formula(mu, t), v), 1e-4)


@claim("eqn6-ode", nonlinear.weights, _ode_at)
def _ode(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """All components at once, by an implicit solver of the ODE."""
    mu = rng.uniform(-3, 3, size=6)
    t = np.array([0.2, 1.0, 3.0])
    return measured(difference(formula(mu, t), flow(mu, t)), 1e-7)


@without("eqn6-log")
def _log_residual_beyond(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Within the sudden growth at μ = 10, where a float's spacing of t is too coarse."""
    return measured(_log_error(formula, 10.0, 3.0), 1e-10)


def _log_error(formula: Formula, mu: float, y: float) -> float:
    with mpmath.workdps(30):
        t, reference = _inverted(y, mu)
        return float(abs(formula([mu], t)[0] / -reference - 1))


@over(**_ANY_TIME)
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


@claim("eqn6-log", nonlinear.log_residual, _log_residual_at)
def _log_residual(formula: Formula, rng: Generator) -> ClaimMeasurement:
    cases = (0.0, *rng.uniform(0.5, 4, size=2), 6.0)
    targets = (0.5, 10.0, 300 * np.log(10))
    return measured([_log_error(formula, mu, y) for mu in cases for y in targets], 1e-10)


def _asymptote(mu: Any, t: Any) -> Any:
    return -np.exp(mu**2 / 2) * (t - nonlinear.residual_offset(mu))


@over(size=Real(1e-6, 6), y=Real(2, 700, log=True))
def _late_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The remainder is μ²δ to leading order, plus the rounding of t - R times e^{μ²/2}."""
    mu, y = point["size"], point["y"]
    with mpmath.workdps(30):
        t = float(time_at(-y, mu))
        exact = -y - float((mpmath.mpf(t) - time_at(-y, mu)) * slope_at(-y, mu))
    slack = 2 * (mu**2 + mu**4 * np.exp(-y)) * np.exp(-y) + 1e-9 * y
    slack += 4e-16 * t * np.exp(mu**2 / 2)
    return measured(abs(float(formula(mu, t)) - exact), slack)


@claim("eqn6-late", _asymptote, _late_at)
def _late(formula: Formula, rng: Generator) -> ClaimMeasurement:
    with mpmath.workdps(30):
        cases = [(mu, float(time_at(-60.0, mu))) for mu in rng.uniform(0.5, 3, size=3)]
    return measured([abs(float(formula(mu, t)) / -60.0 - 1) for mu, t in cases], 1e-9)


def _derivative(r: Any, mu: Any) -> Any:
    """Eqn 84: √(π/2) erf(rμ/√2) + (1-e^{-r²μ²/2})/μ - μF."""
    smooth = np.sqrt(np.pi / 2) * erf(r * mu / np.sqrt(2)) - np.expm1(-((r * mu) ** 2) / 2) / mu
    return smooth - mu * nonlinear.elapsed(r, mu)


@over(size=Real(1e-3, 6, log=True), y=Real(1e-3, 30, log=True))
def _in_mu_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """∫ -μ x² e^{-μ²x²/2} dy over y = ln 1/(1-x), by Gauss's rule in 24 panels."""
    mu, r = point["size"], -np.expm1(-point["y"])
    end = -np.log1p(-r)  # of the float r

    def slope(y: Any) -> Any:
        x = -np.expm1(-y)
        return -mu * x**2 * np.exp(-((mu * x) ** 2) / 2)

    exact = integral(slope, (0.0, end, 24), nodes=16)
    return ClaimMeasurement(abs(float(formula(r, mu)) - exact), 1e-7 * max(1.0, abs(exact)))


@claim("eqn84", _derivative, _in_mu_at)
def _in_mu(formula: Formula, rng: Generator) -> ClaimMeasurement:
    errors = []
    for r, mu in zip(rng.uniform(0.1, 0.99, 5), rng.uniform(0.3, 4, 5), strict=True):
        ahead, back = (
            integrate.quad(lambda x, m=m: np.exp(-(m**2) * x**2 / 2) / (1 - x), 0, r)[0]
            for m in (mu + 1e-4, mu - 1e-4)
        )
        errors.append(abs(float(formula(r, mu)) - (ahead - back) / 2e-4))
    return measured(errors, 1e-6)

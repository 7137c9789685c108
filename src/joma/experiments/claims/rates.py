"""Lemmas 6, 7 and Theorem 4: how fast salient and non-salient components converge."""

from typing import Any

import mpmath
import numpy as np
from scipy import integrate

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, difference, measured
from joma.experiments.claims.reference.eqn6 import ResidualCurve, flow, slope_at, time_at
from joma.experiments.claims.reference.ode import follow, integral, solve
from joma.experiments.claims.search import Real
from joma.theory import as_printed as printed
from joma.theory import nonlinear

_SIZE = Real(1e-6, 6, special=(1.872,))
_Y = Real(1e-6, 1e8, log=True)
_POSITIVE = Real(1e-6, 1e3, log=True)


def _bounded(bound: float, peak: float, sharp: float) -> ClaimMeasurement:
    """How far a peak exceeds its bound; how far it is from one that is sharp to some digits."""
    if sharp:
        return measured(difference(bound, peak), sharp)
    return ClaimMeasurement(max(0.0, peak - bound), 1e-6)


@over(y=_POSITIVE)
def _lemma6_at(formula: Formula, point: Point) -> ClaimMeasurement:
    y = point["y"]
    return measured(-np.expm1(-(y**2)) / y - float(formula()), 1e-12)


@claim("lemma6", lambda: np.sqrt(0.5), _lemma6_at)
@claim("lemma6-sharp", nonlinear.lemma6_bound, _lemma6_at, sharp=1e-6)
def _lemma6(formula: Formula, rng: Generator, sharp: float = 0.0) -> ClaimMeasurement:
    y = np.linspace(1e-3, 8, 200_001)
    return _bounded(formula(), float(np.max((1 - np.exp(-(y**2))) / y)), sharp)


@over(y=_POSITIVE)
def _lemma7_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """e^{-y²/2} ∫₀ʸ e^{x²/2} dx with x = y - s, so that nothing overflows."""
    y = point["y"]
    peak = integral(lambda s: np.exp(-s * (y - s / 2)), (0.0, min(y, 40 / y), 8))
    return measured(peak - float(formula()), 1e-12)


@claim("lemma7", lambda: 1.0, _lemma7_at)
@claim("lemma7-sharp", nonlinear.lemma7_bound, _lemma7_at, sharp=1e-6)
def _lemma7(formula: Formula, rng: Generator, sharp: float = 0.0) -> ClaimMeasurement:
    y = np.linspace(0, 8, 80_001)
    total = integrate.cumulative_simpson(np.exp(y**2 / 2), x=y, initial=0.0)
    return _bounded(formula(), float(np.max(np.exp(-(y**2) / 2) * total)), sharp)


def _offset(y: float, mu: float) -> float:
    """F - e^{-μ²/2} y at ln 1/δ = y: ∫ (e^{-v²/2} - e^{-μ²/2}) dy."""
    bend, far = min(y, 8 / max(mu, 0.2)), min(y, 45.0)

    def excess(x: Any) -> Any:
        # With the difference of two exponentials written without its cancellation.
        v = -mu * np.expm1(-x)
        return -np.exp(-(v**2) / 2) * np.expm1(-(mu - v) * (mu + v) / 2)

    return integral(excess, (0.0, bend, 8), (bend, far, 12))


@over(size=Real(0, 37), y=_Y)
def _offset_at(formula: Formula, point: Point) -> ClaimMeasurement:
    found = _offset(point["y"], point["size"])
    return ClaimMeasurement(-found if found < -1e-9 else found - float(formula()), 1e-9)


@claim("thm4", printed.offset_bound, _offset_at)
@claim("thm4-sharp", nonlinear.offset_bound, _offset_at, sharp=2e-5)
def _offset_bound(formula: Formula, rng: Generator, sharp: float = 0.0) -> ClaimMeasurement:
    """The least and the largest F - e^{-μ²/2} ln(1/δ) by Simpson's rule, over μ and δ."""
    low, high = 0.0, 0.0
    y = np.linspace(0, 40, 8_001)
    for mu in (*np.linspace(0, 5, 51), *np.linspace(1.82, 1.92, 11)):
        speed = np.exp(-(mu**2) * np.expm1(-y) ** 2 / 2)
        time = integrate.cumulative_simpson(speed, x=y, initial=0.0)
        excess = time - np.exp(-(mu**2) / 2) * y
        low, high = min(low, float(np.min(excess))), max(high, float(np.max(excess)))
    if not sharp and low < -1e-9:
        high = max(high, formula() - low)
    return _bounded(formula(), high, sharp)


@over(size_j=_SIZE, size_k=_SIZE, time=Real(1e-4, 1e6, log=True))
def _lambda_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """|λ_jk| of Eqn 7 at a time, from courses by quadrature."""
    scaled = [
        np.exp(-(size**2) / 2) * float(ResidualCurve.of(size).at(point["time"]))
        for size in (point["size_j"], point["size_k"])
    ]
    return measured(abs(scaled[0] - scaled[1]) - float(formula()), 1e-7 + 1e-13 * max(scaled))


@claim("thm4-rates", lambda: np.sqrt(2 * np.pi) + 2, _lambda_at, smallest=0.0, others=6)
@claim("thm4-rates-sharp", nonlinear.offset_bound, _lambda_at, smallest=1e-3, others=3, sharp=1e-4)
def _largest_lambda(
    formula: Formula,
    rng: Generator,
    *,
    smallest: float,
    others: int,
    sharp: float = 0.0,
) -> ClaimMeasurement:
    """The largest |λ_jk| of Eqn 7 along the ODE of y = ln 1/δ, for 1.872 and other μ."""
    mu = np.array([smallest, 1.872, *rng.uniform(0, 3, size=others)])
    options = {"method": "Radau", "rtol": 1e-9, "atol": 1e-10}
    t = np.linspace(0.1, 8, 80)
    path = solve(lambda y: np.exp(mu**2 * np.expm1(-y) ** 2 / 2), np.zeros(mu.size), t, **options)
    return _bounded(formula(), float(np.max(np.ptp(np.exp(-(mu**2) / 2) * path, axis=1))), sharp)


def _leading_time(log_residual: Any, mu: Any) -> Any:
    return -np.exp(-(np.asarray(mu) ** 2) / 2) * np.asarray(log_residual)


@over(size=Real(0, 6), y=_Y)
def _leading_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Whether F minus its leading term stays within the bound of Theorem 4."""
    y, size = point["y"], point["size"]
    leading = float(np.exp(-(size**2) / 2)) * y
    rest = _offset(y, size) + (leading - float(formula(-y, size)))
    return ClaimMeasurement(abs(rest) - printed.offset_bound(), 1e-9 + 1e-14 * leading)


@claim("thm4-leading", _leading_time, _leading_at, printed=printed.leading_time)
def _leading(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Is F minus its leading term bounded by √(π/2)+1 down to δ = 1e-300?"""
    errors = [0.0]
    with mpmath.workdps(20):
        for mu in rng.uniform(1, 2.5, size=2):
            for exponent in (4, 30, 300):
                log_residual = -exponent * np.log(10)
                rest = abs(float(time_at(log_residual, mu)) - formula(log_residual, mu))
                errors.append(rest - printed.offset_bound())
    return measured(errors, 0.0)


def _reached(mu: float, t: float) -> float:
    """Ln 1/δ at a time, by Newton's method on the series of F, from the late formula's y."""
    y = mpmath.mpf(50)
    for _ in range(60):
        step = (mpmath.mpf(t) - time_at(-y, mu)) * slope_at(-y, mu)
        y = max(y + step, mpmath.mpf(t))
        if abs(step) < 1e-12 * y:
            break
    return float(y)


@over(size_j=_SIZE, size_k=_SIZE, many=Real(0.1, 1e4, log=True))
def _settled_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """N|Λ| where ln δ_k is N times the threshold."""
    size_j, size_k, many = point["size_j"], point["size_k"], point["many"]
    y_k = -many * float(formula(size_k))
    scaled_k = np.exp(-(size_k**2) / 2) * y_k
    h_k = _offset(y_k, size_k)
    y_j = float(ResidualCurve.of(size_j).at(scaled_k + h_k))
    return measured(many * abs(h_k - _offset(y_j, size_j)) / scaled_k - 1, 1e-6)


@claim(
    "thm4-threshold", nonlinear.settled_threshold, _settled_at, printed=printed.settled_threshold
)
def _settled(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Ten times |Λ| of Eqn 7 where ln δ_k is ten times the threshold: 1 for the worst μ_k.

    The worst pair is μ_k = 1.872 with μ_j → 0, whose ln δ_j is -t; for other μ_k it lies between
    ½ and 1.
    """
    worst_mu = 1.8719
    errors = []
    with mpmath.workdps(20):
        for mu_k in (worst_mu, *rng.uniform(2.5, 4, size=2)):
            log_residual = 10 * float(formula(mu_k))
            t = float(time_at(log_residual, mu_k))
            ratios = np.array([-t, -_reached(worst_mu, t)]) / log_residual
            expected = np.exp(np.array([-(mu_k**2), worst_mu**2 - mu_k**2]) / 2)
            size = 10 * float(np.max(np.abs(ratios / expected - 1)))
            worst = mu_k == worst_mu
            errors.append(abs(size - 1) if worst else max(0.0, size - 1, 0.5 - size))
    return measured(errors, 1e-4)


@without("thm4-linear")
def _exp_rates(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The same formula where attention is exponential."""
    mu = rng.uniform(0.5, 3, size=4)
    late = np.log(np.maximum(1 - flow(mu, np.array([4.0]))[0] / mu, 1e-12))
    return measured(difference(formula(mu, [4.0], initial=0.05)[0], late), 1e-7)


@over(
    size=Real(1e-2, 1e2, log=True),
    share=Real(1e-12, 0.99, log=True),
    angle=Real(1e-3, 30, log=True),
)
def _logistic_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Log residual of v̇ = (μ - v) v by LSODA, and how fast it falls in the end."""
    mu = point["size"]
    start, t = mu * point["share"], point["angle"] / mu
    grown = float(follow(lambda w: (mu - start * w) * w, np.ones(1), t, 1e-11)[0])
    left = 1 - grown * point["share"]
    if left < 1e-3:
        raise JomaError("too close to the target for the reference")
    off = abs(float(formula([mu], t, initial=start)[0]) - np.log(left))
    # From v near μ on, δ falls by e^{-μt}.
    late = (60 - np.log(point["share"])) / mu
    ends = [float(formula([mu], when, initial=start)[0]) for when in (late, late + 1 / mu)]
    return measured([off, abs(ends[1] - ends[0] + 1)], 1e-6)


@claim("thm4-linear", nonlinear.linear_attention_residual, _logistic_at)
def _logistic(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Log residual of v̇ = (μ - v) v against the ODE, and its rate against μ late on."""
    mu = rng.uniform(0.5, 3, size=4)
    t = np.array([1.0, 4.0])
    path = solve(lambda v: (mu - v) * v, np.full(4, 0.05), t, rtol=1e-11)
    late = formula(mu, np.array([200.0]), initial=0.05)[0] / -(mu * 200)
    ode = difference(formula(mu, t, initial=0.05), np.log(1 - path / mu))
    return measured([ode, difference(late, 1) - 0.1], 1e-7)

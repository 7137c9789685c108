"""Nonlinear activation: Eqn 6 and its rates, how entropy and rank drop and bounce back."""

from typing import Any

import mpmath
import numpy as np
from scipy import integrate
from scipy.special import erf

from joma.experiments.claims.claim import (
    ClaimMeasurement,
    Formula,
    Generator,
    claim,
    difference,
    measured,
    smallest_error,
    without,
)
from joma.experiments.claims.reference import eqn6 as reference
from joma.experiments.claims.reference.eqn6 import flow, slope_at, time_at
from joma.experiments.claims.reference.ode import solve
from joma.theory import as_printed as printed
from joma.theory import nonlinear, spectra


def _inverted(y: float, mu: float) -> tuple[float, Any]:
    """A float t close to a ln 1/δ, and the ln 1/δ at that t, by Newton's method."""
    t = float(time_at(-y, mu))
    exact = mpmath.mpf(y)
    for _ in range(2):
        exact += (mpmath.mpf(t) - time_at(-exact, mu)) * slope_at(-exact, mu)
    return t, exact


@claim("eqn6", nonlinear.weights)
def _weights(formula: Formula, rng: Generator) -> ClaimMeasurement:
    errors = []
    with mpmath.workdps(30):
        for mu in (*rng.uniform(-4, 4, size=2), 6.0):
            for target in (0.3, 2.0, 8.0):
                t, y = _inverted(target, mu)
                reference = mpmath.mpf(mu) * (1 - mpmath.exp(-y))
                errors.append(float(abs(formula([mu], t)[0] / reference - 1)))
    return measured(errors, 1e-9)


@claim("eqn6-ode", nonlinear.weights)
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


@claim("eqn6-log", nonlinear.log_residual)
def _log_residual(formula: Formula, rng: Generator) -> ClaimMeasurement:
    cases = (0.0, *rng.uniform(0.5, 4, size=2), 6.0)
    targets = (0.5, 10.0, 300 * np.log(10))
    return measured([_log_error(formula, mu, y) for mu in cases for y in targets], 1e-10)


def _asymptote(mu: Any, t: Any) -> Any:
    return -np.exp(mu**2 / 2) * (t - nonlinear.residual_offset(mu))


@claim("eqn6-late", _asymptote)
def _late(formula: Formula, rng: Generator) -> ClaimMeasurement:
    with mpmath.workdps(30):
        cases = [(mu, float(time_at(-60.0, mu))) for mu in rng.uniform(0.5, 3, size=3)]
    return measured([abs(float(formula(mu, t)) / -60.0 - 1) for mu, t in cases], 1e-9)


def _derivative(r: Any, mu: Any) -> Any:
    """Eqn 84: √(π/2) erf(rμ/√2) + (1-e^{-r²μ²/2})/μ - μF."""
    smooth = np.sqrt(np.pi / 2) * erf(r * mu / np.sqrt(2)) - np.expm1(-((r * mu) ** 2) / 2) / mu
    return smooth - mu * nonlinear.elapsed(r, mu)


@claim("eqn84", _derivative)
def _in_mu(formula: Formula, rng: Generator) -> ClaimMeasurement:
    errors = []
    for r, mu in zip(rng.uniform(0.1, 0.99, 5), rng.uniform(0.3, 4, 5), strict=True):
        ahead, back = (
            integrate.quad(lambda x, m=m: np.exp(-(m**2) * x**2 / 2) / (1 - x), 0, r)[0]
            for m in (mu + 1e-4, mu - 1e-4)
        )
        errors.append(abs(float(formula(r, mu)) - (ahead - back) / 2e-4))
    return measured(errors, 1e-6)


_MIXED = ((3.0, 2.5, 0.5, 0.3), (2.0, 1.9, 1.0), (1.5, -1.0))
_PURE = ((2.0, 2.0, -2.0), (3.0, 0.0, 0.0))
_FALLING = ((1.0, 0.9, 0.0), (1.2, 1.0, 0.0, 0.0), (2.0, 1.9, *[0.0] * 6))
"""A component that is neither zero nor the largest, and no rebound."""
_ZEROS = ((2.5, 1.0, 0.0, -1.5), (2.778, 2.335, *[0.0] * 1000))
"""Zeros and a rebound: at the end, and between two falls."""
_ALL = (*_MIXED, *_PURE, *_FALLING, *_ZEROS)
_Targets = tuple[tuple[float, ...], ...]


@claim("fig4-entropy", lambda mu: (True, True), cases=_MIXED, random=3)
@claim("fig4-fate", nonlinear.entropy_fate, cases=_ALL, random=2)
def _entropy(
    formula: Formula, rng: Generator, *, cases: _Targets, random: int = 0
) -> ClaimMeasurement:
    """Whether a formula is right on if and by how much entropy(softmax(v²)) falls and rises."""
    drawn = [tuple(rng.uniform(0.3, 3, size=5)) for _ in range(random)]
    errors = []
    for mu in (*cases, *drawn):
        fate = formula(mu)
        t = np.concatenate([[0.0], np.geomspace(1e-3, 30, 1000)])
        size, place = np.unique(np.abs(mu), return_inverse=True)
        path = flow(size, t, 1e-9, "LSODA")[:, place]
        change = nonlinear.drop_and_rebound(nonlinear.attention_entropy(path))
        seen = bool(change.drop > 1e-6), bool(change.rebound > 1e-6)
        errors.append(float(tuple(fate[:2]) != seen))
        if len(fate) > 2:
            errors += [abs(fate.drop - change.drop), abs(fate.rebound - change.rebound)]
    return measured(errors, 1e-3)


@without("fig4-entropy")
def _entropy_of_others(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Equal components, a single one, zeros next to others."""
    return smallest_error(_entropy(formula, rng, cases=(one,)) for one in (*_PURE, *_FALLING))


_HEAVY = np.array([[2.0, 0.0], *[[0.0, 1.0]] * 12])
"""Many weak rows with one direction that outweighs the salient one: it rises and falls back."""
_TIMES = np.concatenate([[1e-4], np.geomspace(1e-2, 30, 600)])


def _targets(rng: Generator) -> Any:
    """Rows of one salient and several weak targets for four nodes."""
    directions = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    return directions * np.array([3.0, 1.4, 1.2, 1.0])[:, None]


@claim("eqn6-nodes", nonlinear.weights_multi)
def _nodes(formula: Formula, rng: Generator) -> ClaimMeasurement:
    mu, t = _targets(rng), np.array([0.1, 0.6, 2.0])
    return measured(difference(formula(mu, t), reference.flow(mu, t)), 1e-7)


@claim("sec4-rank", lambda mu: False)
def _rank(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Whether the rank of the matrix flow is ever below that of its targets."""
    mu = _targets(rng)
    path = reference.flow(mu, np.geomspace(1e-2, 30, 40), 1e-9, "LSODA")
    drops = bool(np.any(spectra.rank(path) < spectra.rank(mu)))
    return ClaimMeasurement(float(formula(mu) != drops), 0.0)


@without("sec4-stable-rank")
def _bounce_of_others(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Rows of one length, and rows that are not orthogonal."""
    equal = np.linalg.qr(rng.normal(size=(4, 4)))[0] * 1.5
    return smallest_error(_bounce_of(formula, mu) for mu in (equal, _HEAVY))


def _bounce_of(formula: Formula, mu: Any) -> ClaimMeasurement:
    change = nonlinear.drop_and_rebound(
        spectra.stable_rank(reference.flow(mu, _TIMES, 1e-9, "LSODA"))
    )
    fate = formula(mu)
    error = max(abs(fate.drop - change.drop), abs(fate.drop - change.rebound))
    bounces = min(float(change.drop), float(change.rebound)) > 0.2
    return ClaimMeasurement(float(error) + float(not bounces), 1e-3)


@claim("sec4-stable-rank", nonlinear.stable_rank_fate)
def _bounce(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The predicted fall and rise of the stable rank against the matrix flow's."""
    return _bounce_of(formula, _targets(rng))


@claim("sec4-rank-turns", nonlinear.stable_rank_fate)
def _turns(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Ends, drop, rise and both signs against the matrix flow, for targets of every kind."""
    errors = []
    for mu in (_HEAVY, _targets(rng), np.diag([2.0, 1.0, 1.0]), rng.normal(size=(5, 3))):
        path = spectra.stable_rank(reference.flow(mu, _TIMES, 1e-9, "LSODA"))
        fate = formula(mu)
        errors += [abs(path[0] - fate.ends), abs(path[-1] - fate.ends)]
        errors += [abs(fate.ends - path.min() - fate.drop), abs(path.max() - fate.ends - fate.rise)]
        moving = np.diff(path)[np.abs(np.diff(path)) > 1e-6]
        if len(mu) != 5:  # of random rows, what is left at the end may be too little to be seen
            signs = int(np.sign(moving[0])), int(np.sign(moving[-1]))
            errors.append(float((fate.first, fate.last) != signs))
    return measured(errors, 1e-3)


def _bounded(bound: float, peak: float, sharp: float) -> ClaimMeasurement:
    """How far a peak exceeds its bound; how far it is from one that is sharp to some digits."""
    if sharp:
        return measured(difference(bound, peak), sharp)
    return ClaimMeasurement(max(0.0, peak - bound), 1e-6)


@claim("lemma6", lambda: np.sqrt(0.5))
@claim("lemma6-sharp", nonlinear.lemma6_bound, sharp=1e-6)
def _lemma6(formula: Formula, rng: Generator, sharp: float = 0.0) -> ClaimMeasurement:
    y = np.linspace(1e-3, 8, 200_001)
    return _bounded(formula(), float(np.max((1 - np.exp(-(y**2))) / y)), sharp)


@claim("lemma7", lambda: 1.0)
@claim("lemma7-sharp", nonlinear.lemma7_bound, sharp=1e-6)
def _lemma7(formula: Formula, rng: Generator, sharp: float = 0.0) -> ClaimMeasurement:
    y = np.linspace(0, 8, 80_001)
    total = integrate.cumulative_simpson(np.exp(y**2 / 2), x=y, initial=0.0)
    return _bounded(formula(), float(np.max(np.exp(-(y**2) / 2) * total)), sharp)


@claim("thm4", printed.offset_bound)
@claim("thm4-sharp", nonlinear.offset_bound, sharp=2e-5)
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


@claim("thm4-rates", lambda: np.sqrt(2 * np.pi) + 2, smallest=0.0, others=6)
@claim("thm4-rates-sharp", nonlinear.offset_bound, smallest=1e-3, others=3, sharp=1e-4)
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


@claim("thm4-leading", _leading_time, printed=printed.leading_time)
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


@claim("thm4-threshold", nonlinear.settled_threshold, printed=printed.settled_threshold)
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


@claim("thm4-linear", nonlinear.linear_attention_residual)
def _logistic(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Log residual of v̇ = (μ - v) v against the ODE, and its rate against μ late on."""
    mu = rng.uniform(0.5, 3, size=4)
    t = np.array([1.0, 4.0])
    path = solve(lambda v: (mu - v) * v, np.full(4, 0.05), t, rtol=1e-11)
    late = formula(mu, np.array([200.0]), initial=0.05)[0] / -(mu * 200)
    ode = difference(formula(mu, t, initial=0.05), np.log(1 - path / mu))
    return measured([ode, difference(late, 1) - 0.1], 1e-7)

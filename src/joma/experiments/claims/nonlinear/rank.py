"""Section 4 for many nodes: the rank of W stays, its stable rank drops and bounces back."""

from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import (
    ClaimMeasurement,
    difference,
    measured,
    smallest_error,
)
from joma.experiments.claims.reference import eqn6 as reference
from joma.experiments.claims.reference.ode import follow
from joma.experiments.claims.search import Integer, Matrix, Real, Vector
from joma.theory import nonlinear, spectra

_ENTRY = Real(-3, 3, special=(0.0,))
_ROWS = Matrix(_ENTRY, Integer(1, 8), Integer(1, 4))
_HEAVY = np.array([[2.0, 0.0], *[[0.0, 1.0]] * 12])
"""Many weak rows with one direction that outweighs the salient one: it rises and falls back."""
_TIMES = np.concatenate([[1e-4], np.geomspace(1e-2, 30, 600)])


def _targets(rng: Generator) -> Any:
    """Rows of one salient and several weak targets for four nodes."""
    directions = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    return directions * np.array([3.0, 1.4, 1.2, 1.0])[:, None]


@over(mu=_ROWS, time=Real(1e-3, 30, log=True))
def _nodes_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The matrix equation by LSODA, every component on its own."""
    mu, t = point["mu"], point["time"]
    v = follow(lambda v: reference.velocity(v, mu), np.zeros_like(mu), t, 1e-9)
    return measured(difference(formula(mu, t), v), 1e-4)


@claim("eqn6-nodes", nonlinear.weights_multi, _nodes_at)
def _nodes(formula: Formula, rng: Generator) -> ClaimMeasurement:
    mu, t = _targets(rng), np.array([0.1, 0.6, 2.0])
    return measured(difference(formula(mu, t), reference.flow(mu, t)), 1e-7)


@over(mu=Matrix(_ENTRY, Integer(1, 5), Integer(1, 3)), time=Real(1e-2, 30, log=True))
def _rank_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Whole numbers in the targets, so that no singular value is small by chance."""
    mu = np.round(point["mu"])
    if not mu.any():
        raise JomaError("nothing moves")
    v = follow(lambda v: reference.velocity(v, mu), np.zeros_like(mu), point["time"], 1e-9)
    # Relative to the entries of the whole: early on V is small in all of them.
    drops = bool(spectra.rank(v, tolerance=1e-5) < spectra.rank(mu, tolerance=1e-9))
    return ClaimMeasurement(float(bool(formula(mu)) != drops), 0.0)


@claim("sec4-rank", lambda mu: False, _rank_at)
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


@over(length=Vector(Real(0.01, 37, log=True), Integer(2, 6)))
def _bounce_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Orthogonal rows of unequal length, by quadrature: below the ends at all times."""
    length = point["length"]
    if np.ptp(length) < 1e-3 * np.max(length):
        raise JomaError("rows of one length")
    mu = np.diag(length)[:, ::-1]  # rows along the axes have exactly these lengths
    reference.refuse_near_ties(length)
    fate = formula(mu)
    sizes, place = np.unique(length, return_inverse=True)
    every, t = reference.courses(sizes)

    def ranks(when: Any) -> Any:
        shares = np.stack([-np.expm1(-one.at(when)) for one in every], axis=-1)[:, place]
        squares = (shares * length) ** 2  # the lengths are the singular values
        return np.sum(squares, axis=1) / np.max(squares, axis=1)

    t = t[1:]  # at t = 0 there is no matrix yet
    ends = float(spectra.stable_rank(mu))
    low = reference.minimum(ranks, t, 2 * sizes.size + 2)
    high = -reference.minimum(lambda when: -ranks(when), t, 2 * sizes.size + 2)
    errors = [
        abs(fate.ends - ends) / 1e-5,
        abs(fate.drop - max(ends - low, 0.0)) / 1e-5,
        abs(fate.rise - max(high - ends, 0.0)) / 1e-5,
        2 * float(not (fate.drop > 0 and high < ends + 1e-9)),
    ]
    return measured(errors, 1.0)


@claim("sec4-stable-rank", nonlinear.stable_rank_fate, _bounce_at)
def _bounce(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The predicted fall and rise of the stable rank against the matrix flow's."""
    return _bounce_of(formula, _targets(rng))


@over(mu=_ROWS, many=Integer(0, 100))
def turns_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The signs of the first and the last change of the stable rank, by small steps.

    At first V is M + ε diag(ℓ²) M, at last M - ε diag(shortest) M, up to a factor.
    """
    mu = point["mu"]
    if point["many"] and len(mu) > 1:  # many short rows that share a direction
        mu = np.vstack([mu, np.repeat(mu[-1:], point["many"], axis=0)])
    length = np.linalg.norm(mu, axis=1)
    kept = length > 1e-3 * np.max(length, initial=0.0)
    mu, length = mu[kept], length[kept]
    if not length.size:
        raise JomaError("nothing moves")
    fate = formula(mu)
    short = length <= np.min(length) * (1 + 1e-13)
    if np.any(~short & (length < np.min(length) * (1 + 1e-6))):
        raise JomaError("rows too close for the reference")
    wrong, guide = False, 0.0
    weight = (length / np.max(length)) ** 2
    for sign, way in ((fate.first, weight), (-fate.last, -short.astype(float))):
        near, far = (
            float(spectra.stable_rank((1 + size * way)[:, None] * mu)) for size in (1e-6, 1e-5)
        )
        ends = float(spectra.stable_rank(mu))
        change = (near - ends) / 1e-6
        straight = abs((far - ends) / 1e-5 - change) < 0.1 * abs(change)
        if abs(change) > 1e-6 and straight:
            wrong |= (sign > 0) != (change > 0)
            guide = max(guide, 0.5 / (1 + 100 * abs(change)))
    return ClaimMeasurement(2.0 if wrong else guide, 1.0)


@claim("sec4-rank-turns", nonlinear.stable_rank_fate, turns_at)
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

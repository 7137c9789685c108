"""Rest points of Laplace clusters, at fixed bias, of clusters on a line; their signs."""

from itertools import product
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over
from joma.experiments.claims.critical.rest_points import PAIR, UNDECIDED, pair_of, rest_point
from joma.experiments.claims.measurement import ClaimMeasurement, largest_error, measured
from joma.experiments.claims.reference import clusters as isotropic
from joma.experiments.claims.search import Choice, Integer, Real, Vector
from joma.theory import clusters
from joma.theory.marginals import Gaussian, Laplace, Logistic, Marginal, Scaled, StudentT


def _laplace_error(formula: Formula, s: float, distance: float, width: float) -> float:
    shapes = [Scaled(Laplace(), width)] * 2
    means, v = np.array([[distance], [0.0]]), np.ones(1)
    ratio = formula(distance, width)
    rate = isotropic.flow(shapes, [1.0, -ratio], means, v, s - distance)
    share = float(isotropic.reference(shapes[0], s).share)
    return float(np.abs(rate / [distance + width, 1.0]).max() / share)


@over(
    s=Real(-300.0, 0.0, special=(0.0,)),
    distance=Real(1e-3, 50.0, log=True),
    width=Real(0.01, 100.0, log=True, special=(1.0,)),
)
def _laplace_at(formula: Formula, point: Point) -> ClaimMeasurement:
    width = point["width"]
    error = _laplace_error(formula, point["s"] * width, point["distance"] * width, width)
    return ClaimMeasurement(error, 1e-9)


@claim("thm3-laplace", lambda distance, width: float(np.exp(distance / width)), _laplace_at)
def _laplace(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """v̇ and ξ̇ at several places below zero, by quadrature, at the ratio predicted."""
    places = -rng.uniform(0.1, 4, size=3)
    errors = [_laplace_error(formula, s, float(rng.uniform(0.5, 2)), 1.3) for s in places]
    return measured(errors, 1e-9)


def _fixed_bias_error(
    formula: Formula, positive: Marginal, negative: Marginal, s: float, distance: float
) -> float:
    ratio = formula(positive, s, distance, negative=negative)
    means = np.array([[distance, 0.0], [0.0, 0.0]])
    rate = isotropic.flow([positive, negative], [1.0, -ratio], means, np.array([1.0, 0.0]), s)
    there = isotropic.reference(positive, s + distance)
    return float(np.abs(rate[:2]).max() / (there.first_integral + abs(s) * there.share))


@over(**PAIR, s=Real(-20.0, 20.0, special=(0.0,)))
def _fixed_bias_at(formula: Formula, point: Point) -> ClaimMeasurement:
    positive, distance, negative = pair_of(point)
    s = point["s"] * point["negative"]
    if s <= -negative.reach or s + distance <= -positive.reach:
        raise JomaError("s must leave a part of both clusters on the active side")
    if isotropic.reference(positive, s + distance).log_share < -500:
        raise JomaError("the force of the positive cluster must be a float")
    if abs(s) >= negative.reach or isotropic.reference(negative, -abs(s)).log_share < -500:
        raise JomaError("the hyperplane must cut the negative cluster where θ₂ is a float")
    return ClaimMeasurement(_fixed_bias_error(formula, positive, negative, s, distance), 1e-8)


@claim("thm3-fixed-bias", clusters.fixed_bias_ratio, _fixed_bias_at)
def _fixed_bias(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """v̇ at fixed ξ by quadrature, for clusters of Gaussian shape that cannot rest otherwise."""
    places = zip(rng.uniform(-2, 2, 4), rng.uniform(0.5, 3, 4), strict=True)
    shapes = ((Gaussian(), Gaussian()), (Logistic(), Scaled(Logistic(), 2.0)))
    cases = product(shapes, places)
    return measured(
        [_fixed_bias_error(formula, *of, float(s), float(d)) for of, (s, d) in cases], 1e-9
    )


@over(
    **isotropic.FAMILY,
    positions=Vector(Real(-10.0, 10.0), Integer(2, 7)),
    widths=Vector(Real(0.1, 10.0, log=True, special=(1.0,)), Integer(1, 7)),
    signs=Vector(Real(-1.0, 1.0), Integer(2, 7)),
    offset=Real(-15.0, 15.0, special=(0.0,)),
)
def _line_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Overlap of the two ranges of mean residual life, from the density, decides; then v̇ = 0."""
    positions = point["positions"]
    count = positions.size
    if count < 2:
        raise JomaError("there must be two clusters or more")
    shapes: list[Marginal] = [
        Scaled(isotropic.family_of(point), float(width))
        for width in np.resize(point["widths"], count)
    ]
    signs = np.where(np.resize(point["signs"], count) > 0, 1.0, -1.0)
    s = positions + point["offset"]
    if any(at <= -one.reach for one, at in zip(shapes, s, strict=True)):
        raise JomaError("every cluster must have a part on the active side")
    there = [isotropic.reference(one, float(at)) for one, at in zip(shapes, s, strict=True)]
    lives = np.array([float(one.life) for one in there])
    logs = np.array([float(one.log_share) for one in there])
    if np.ptp(logs) > 500 or np.all(signs == signs[0]):
        raise JomaError("the gradients must be floats, and of both signs")
    plus, minus = lives[signs > 0], lives[signs < 0]
    overlap = -max(minus.min() - plus.max(), plus.min() - minus.max())
    if abs(overlap) < 1e-4 * lives.max():
        raise JomaError(UNDECIDED)
    means = np.column_stack([positions, np.zeros(count)])
    a = formula(shapes, means, np.array([1.0, 0.0]), point["offset"], signs)
    if (a is None) != bool(overlap < 0):
        return ClaimMeasurement(1.0, 1e-8)
    if a is None:
        return ClaimMeasurement(0.0, 1e-8)
    forces = a * np.exp(logs)
    rate = isotropic.flow(shapes, a, means, np.array([1.0, 0.0]), point["offset"])
    size = np.abs(forces) @ (np.abs(positions) + lives + np.abs(s))
    wrong_sign = float(np.any(a * signs <= 0))
    return ClaimMeasurement(max(float(np.abs(rate).max() / size), wrong_sign), 1e-8)


@claim("thm3-line", clusters.resting_gradients, _line_at)
def _line(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Three Gaussians in a row with every choice of signs, and five of unequal width."""
    cases = []
    for signs in ([1.0, -1, -1], [-1.0, 1, -1], [-1.0, -1, 1], [1.0, -1, 1]):
        shape = {"positions": np.sort(rng.uniform(-3, 3, 3)), "widths": np.ones(3)}
        cases.append({**shape, "family": "gaussian", "signs": np.array(signs), "offset": -0.4})
    shape = {"positions": rng.uniform(-3, 3, 5), "widths": np.exp(rng.uniform(-1, 1, 5))}
    signs = np.array([1.0, -1, 1, -1, 1])
    cases.append({**shape, "family": "logistic", "signs": signs, "offset": 0.3})
    return largest_error(_line_at.at(formula, **case) for case in cases)


_STUDENT: dict[str, Any] = {
    "df": Real(1.1, 60.0, log=True, special=(2.0, 3.0)),
    "distance": Real(0.02, 50.0, log=True, special=(1.0,)),
}


def _straddles(marginal: Marginal, distance: float) -> bool:
    if isinstance(marginal, Laplace):
        # Between -D and 0 the lives must not meet; below they are all equal.
        s = np.linspace(-distance, 0, 50)[1:-1]
        lives = (
            isotropic.reference(marginal, s + distance).life,
            isotropic.reference(marginal, s).life,
        )
        return bool(np.any(lives[0] <= lives[1] * (1 + 1e-12)))
    s, _ = rest_point(marginal, distance)
    return bool(s < 0 < s + distance)


@over(family=Choice("student", "student", "laplace"), **_STUDENT)
def _signs_at(formula: Formula, point: Point) -> ClaimMeasurement:
    marginal, distance = isotropic.family_of(point), point["distance"]
    s = -np.inf
    if not isinstance(marginal, Laplace):
        s, _ = rest_point(marginal, distance)
        if min(abs(s), abs(s + distance)) < 1e-6 * max(1.0, distance):
            raise JomaError(UNDECIDED)
    border = 10 * min(abs(s), abs(s + distance)) / distance
    return isotropic.decide(formula(marginal, distance) != _straddles(marginal, distance), border)


@claim("a4-signs", clusters.straddles, _signs_at)
def _signs(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Whether rest points have s₊ > 0 > s₋, as a formula says."""
    cases = [(3.0, 0.5), (3.0, 1.0), (3.0, 4.0), (10.0, 4.0), (10.0, 8.0), (1.5, 0.1), (1.5, 2.0)]
    wrong = [formula(StudentT(df), d) != _straddles(StudentT(df), d) for df, d in cases]
    wrong.append(formula(Laplace(), 2.0) != _straddles(Laplace(), 2.0))
    return measured(np.mean(wrong), 0.0)

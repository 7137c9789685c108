"""Theorem 3: whether a node returns to a rest point, the potential, and which nodes grow."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import (
    ClaimMeasurement,
    Formula,
    Generator,
    Point,
    claim,
    measured,
    without,
)
from joma.experiments.claims.reference import clusters as isotropic
from joma.experiments.claims.reference.clusters import places
from joma.theory import as_printed as printed
from joma.theory import clusters
from joma.theory.marginals import Gaussian, Logistic, Marginal, Scaled, StudentT

CASES: tuple[tuple[Marginal, float, Marginal], ...] = (
    (StudentT(3), 1.2, StudentT(3)),
    (StudentT(3), 2.4, Scaled(StudentT(3), 1.4)),
    (Gaussian(), 2.0, Scaled(Gaussian(), 2.0)),
    (isotropic.TwoHumps(3.0, 0.4), 1.0, isotropic.TwoHumps(3.0, 0.4)),
)
"""Pairs of clusters with rest points; those between the humps of the last are not all stable."""


class Rest:
    """A rest point of two clusters in the plane, the negative one at the origin."""

    def __init__(
        self,
        positive: Marginal,
        distance: float,
        negative: Marginal,
        which: int = 0,
        gradient: float = 1.3,
        length: float = 1.7,
    ) -> None:
        found = isotropic.rest_points(positive, distance, negative)
        if not found:
            raise JomaError("there is no rest point at this distance")
        s, ratio = found[which % len(found)]
        if ratio * gradient > 1e100 or isotropic.reference(positive, s + distance).log_share < -100:
            raise JomaError("the forces must be floats")
        if abs(s) > 1e3 * (1 + distance):
            raise JomaError("the node must be nearer than where differences of the flow vanish")
        self.positive, self.negative, self.length = positive, negative, length
        self.gradient = gradient
        self.point = clusters.CriticalPoint(s, s + distance, ratio)

    @functools.cached_property
    def jacobian(self) -> isotropic.Array:
        """∂(v̇, ξ̇)/∂(v, ξ) by differences of the reference flow."""
        distance = self.point.s_plus - self.point.s_minus
        return isotropic.flow_jacobian(
            [self.positive, self.negative],
            [self.gradient, -self.gradient * self.point.ratio],
            np.array([[distance, 0.0], [0.0, 0.0]]),
            np.array([self.length, 0.0]),
            self.point.s_minus * self.length,
        )

    def predicted(self, formula: Formula) -> Any:
        """The prediction of a formula for this point."""
        shapes = {"negative": self.negative, "positive_gradient": self.gradient}
        return formula(self.positive, self.point, **shapes, length=self.length)

    def size(self) -> float:
        """The size of the terms that the Jacobian is a sum of."""
        plus = isotropic.reference(self.positive, self.point.s_plus)
        minus = isotropic.reference(self.negative, self.point.s_minus)
        force = self.gradient * float(plus.share)
        rates = float(plus.hazard + minus.hazard) * (1 + self.point.s_minus**2)
        return force * (rates + self.point.s_plus - self.point.s_minus) / self.length


@functools.cache
def _all_rests() -> list[Rest]:
    return [Rest(*case, which) for case in CASES for which in (0, 1)]


def jacobian_error(formula: Formula, rest: Rest) -> float:
    """Return the error of a Jacobian at a rest point, relative to its terms."""
    given = rest.predicted(formula)
    expected = rest.jacobian[:2, :2]
    return float(
        np.abs(expected - np.diag([given.longitudinal, given.transverse])).max() / rest.size()
    )


@without("thm3-jacobian")
def _jacobian_with_bias(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Distance of the predicted longitudinal eigenvalue from those of the flow in v and ξ."""
    rest = _all_rests()[0]
    predicted = formula(rest.positive, rest.point, positive_gradient=1.3, length=1.7).longitudinal
    values = np.linalg.eigvals(rest.jacobian)
    return measured(np.min(np.abs(values - predicted)) / rest.size(), 1e-7)


def ray_error(formula: Formula, rest: Rest) -> float:
    """Return how far a direction is from an eigenvector of eigenvalue 0."""
    direction = formula(rest.point, rest.length)
    moved = rest.jacobian @ direction
    return float(np.linalg.norm(moved) / np.linalg.norm(direction) / rest.size())


def eigenvalue_error(formula: Formula, rest: Rest) -> float:
    """Return the error of the eigenvalues at a rest point, relative."""
    given = rest.predicted(formula)
    jacobian = rest.jacobian
    # v lies along the first axis, so that turning it and shifting the hyperplane do not mix.
    along = np.linalg.eigvals(jacobian[np.ix_([0, 2], [0, 2])]).real
    expected = np.array([jacobian[1, 1], along[np.argmax(np.abs(along))], 0.0])
    found = np.array([given.across, given.along, along[np.argmin(np.abs(along))]])
    mixed = np.abs(jacobian[1, [0, 2]]).max()
    return float(max(np.abs(found - expected).max(), mixed) / rest.size())


def stability_at(formula: Formula, rest: Rest) -> ClaimMeasurement:
    """Compare whether a rest point is stable."""
    values = np.linalg.eigvals(rest.jacobian).real / rest.size()
    others = np.delete(values, np.argmin(np.abs(values)))
    if np.abs(others).min() < 1e-5:
        raise JomaError("the node must return or leave faster than the reference errs")
    stable = bool(np.all(others < 0))
    said = formula(rest.positive, rest.point, negative=rest.negative)
    return isotropic.decide(said != stable, 10 * float(others.max()))


@claim(
    "thm3-jacobian",
    clusters.jacobian,
    printed=printed.jacobian,
    error=jacobian_error,
)
@claim(
    "thm3-ray",
    lambda point, length: np.array([1.0, 0, point.s_minus]) * length,
    error=ray_error,
)
@claim("thm3-eigenvalues", clusters.eigenvalues, error=eigenvalue_error)
def _at_all_rests(
    formula: Formula, rng: Generator, *, error: Callable[[Formula, Rest], float]
) -> ClaimMeasurement:
    return measured([error(formula, rest) for rest in _all_rests()], 1e-7)


@claim(
    "thm3-stability",
    clusters.is_stable,
)
def _stability(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Signs of the eigenvalues of the flow in (v, ξ) other than the one along the ray."""
    wrong = [not stability_at(formula, one).holds for one in _all_rests()]
    return measured(np.mean(wrong), 0.0)


def random_scenes(rng: Generator, count: int, bias: float) -> Iterator[Point]:
    """Yield random points of `SCENE` in three dimensions, with so many clusters."""
    for family in ("gaussian", "logistic"):
        values = {"family": family, "bias": bias, "means": rng.normal(size=(count, 3))}
        values |= {"gradients": rng.normal(size=count), "widths": np.exp(rng.uniform(-1, 1, count))}
        yield {**values, "v": rng.normal(size=3)}


def full_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Compare a Jacobian at any node with differences of the flow."""
    shapes, a, means, v, bias = isotropic.scene(point, 1e-2)
    length = float(np.linalg.norm(v))
    s = (means @ v + bias) / length
    size = 1e-300
    for one, weight, mean, at in zip(shapes, a, means, s, strict=True):
        foot = 1 + float(np.sum((mean - at * v / length) ** 2))
        density = float(isotropic.reference(one, at).density)
        size += abs(weight) * ((density + 1e-3) * foot + isotropic.spread(one, float(at))) / length
    expected = isotropic.flow_jacobian(shapes, a, means, v, bias)
    error = np.abs(formula(shapes, a, means, v, bias) - expected).max() / size
    return measured(error, 1e-6)


@claim("thm3-full-jacobian", clusters.full_jacobian)
def _full(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Five clusters of unequal width in three dimensions, at any node, also not at rest."""
    return measured([full_at(formula, one).error for one in random_scenes(rng, 5, 0.4)], 1e-7)


def potential_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Compare the slopes of a potential with the flow."""
    shapes, a, means, v, bias = isotropic.scene(point, 1e-2)
    state = np.array([*v, bias])
    rate = isotropic.flow(shapes, a, means, v, bias)
    step = 1e-3 * float(np.linalg.norm(v)) * min(1.0, *point["widths"])

    def value(at: isotropic.Array) -> float:
        return formula(shapes, a, means, at[:-1], float(at[-1]))

    slopes = [
        (8 * (value(state + h) - value(state - h)) - value(state + 2 * h) + value(state - 2 * h))
        / (12 * step)
        for h in step * np.eye(state.size)
    ]
    widths = np.array([isotropic.spread(one, 0.0) for one in shapes])
    size = np.abs(a) @ (1 + np.abs(means).max(axis=1) + widths) + 1e-300
    errors = [np.abs(np.array(slopes) - rate).max() / size]
    errors.append(abs(value(state) - state @ rate) / (size * np.linalg.norm(state)))
    return measured(max(errors), 1e-6)


@claim("thm3-potential", clusters.potential)
def _potential(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Differences of Φ against the reference flow, and its value against v·v̇ + ξ ξ̇."""
    return measured([potential_at(formula, one).error for one in random_scenes(rng, 4, -0.3)], 1e-7)


_VERY_FAR = -np.geomspace(1e100, 1e8, 24)
"""Places at which a tail that is a little heavier than another has outgrown it."""


def _largest_ratio(
    positive: Marginal,
    distance: float,
    negative: Marginal,
    cosines: tuple[float, ...] = (1.0, 0.5, 0.0, -1.0),
) -> float:
    """The largest F₊(s + D cos α)/F₋(s) over places s and directions α, from the density."""
    s = np.concatenate([_VERY_FAR, places(positive, distance, negative)])
    if np.isfinite(negative.reach):
        raise JomaError("the clusters must have no end")
    best = -np.inf
    below = isotropic.reference(negative, s)
    low = below.log_share + np.log(below.life)
    for cosine in cosines:
        above = isotropic.reference(positive, s + distance * cosine)
        rounding = 1e-14 * np.abs(low)  # of two large logarithms
        best = max(best, float(np.max(above.log_share + np.log(above.life) - low - rounding)))
    return float(np.exp(min(best, 600.0)))


@claim("thm3-phase", clusters.phase)
def _phase(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Whether any node of any direction has E[gφ] > 0, below and above the boundary."""
    wrong = 0.0
    for positive, distance, negative in (*CASES[:3], (Logistic(), 1.0, Logistic())):
        boundary = _largest_ratio(positive, distance, negative)
        for factor in (rng.uniform(0.8, 0.99), rng.uniform(1.01, 1.2)):
            grows = formula(positive, distance, boundary * factor, negative=negative).grows
            wrong += grows != (factor < 1)
    return ClaimMeasurement(wrong / 8, 0.0)


@claim("thm3-sgd", clusters.critical_points)
def _trained(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """ReLU nodes trained by SGD on samples of two Gaussian clusters of widths 1 and 2.

    At the predicted ratio of gradients, nodes that start near the predicted ray come back to it;
    at 0.7 of it some node grows, and at 1.4 none does.
    """
    positive, negative, distance = Gaussian(), Scaled(Gaussian(), 2.0), 2.0
    (point,) = formula(positive, distance, negative=negative)

    def train(ratio: float, start: isotropic.Array, steps: int) -> isotropic.Array:
        """Weights and bias of nodes after SGD on -E[g φ(v·x+ξ)], 800 new samples a step."""
        nodes, rate, batch = start.copy(), 0.05, 800
        for _ in range(steps):
            for marginal, shift, gradient in ((positive, distance, 1.0), (negative, 0.0, -ratio)):
                x = isotropic.draw(marginal, 2, batch, rng) + np.array([shift, 0.0])
                inputs = np.column_stack([x, np.ones(batch)])
                active = (inputs @ nodes.T > 0).astype(np.float64)
                nodes = nodes + rate * gradient * active.T @ inputs / batch
        return nodes

    near = np.array([[1.0, 0.4, -1.5], [1.0, -0.4, -0.6], [0.9, 0.2, -1.2], [1.1, -0.3, -0.8]])
    ends = train(point.ratio, 4 * near, 1000)
    places = ends[:, 2] / np.linalg.norm(ends[:, :2], axis=1)
    turned = ends[:, 1] / ends[:, 0]
    returned = max(abs(places.mean() - point.s_minus), abs(turned.mean()))
    start = rng.normal(size=(24, 3))
    start /= np.linalg.norm(start, axis=1, keepdims=True)
    fate = [np.linalg.norm(train(by * point.ratio, start, 200), axis=1) for by in (0.7, 1.4)]
    wrong = float(fate[0].max() < 1.5) + float(fate[1].max() > 1.05)
    return ClaimMeasurement(returned + wrong, 0.15)

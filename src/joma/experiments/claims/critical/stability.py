"""Theorem 3: the Jacobian at a rest point, and whether a node returns to it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, Search, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, measured
from joma.experiments.claims.reference import clusters as isotropic
from joma.experiments.claims.search import Choice, Integer, Matrix, Real, Vector
from joma.theory import as_printed as printed
from joma.theory import clusters
from joma.theory.marginals import Gaussian, Marginal, Scaled, StudentT

_SMOOTH: dict[str, Any] = {
    "family": Choice("gaussian", "student", "student", "logistic", "humps"),
    "df": Real(1.1, 60.0, log=True, special=(2.0, 3.0)),
    "center": Real(0.0, 6.0),
    "width": Real(0.2, 1.0),
    "negative": Real(0.3, 3.0, log=True, special=(1.0,)),
    "distance": Real(0.05, 20.0, log=True),
    "which": Integer(0, 2),
    "gradient": Real(0.1, 10.0, log=True, special=(1.0,)),
    "length": Real(0.1, 10.0, log=True, special=(1.0,)),
}
"""Two clusters whose density has a bounded derivative, as Theorem 3 asks, at a rest point."""


CASES: tuple[tuple[Marginal, float, Marginal], ...] = (
    (StudentT(3), 1.2, StudentT(3)),
    (StudentT(3), 2.4, Scaled(StudentT(3), 1.4)),
    (Gaussian(), 2.0, Scaled(Gaussian(), 2.0)),
    (isotropic.TwoHumps(3.0, 0.4), 1.0, isotropic.TwoHumps(3.0, 0.4)),
)
"""Pairs of clusters with rest points; those between the humps of the last are not all stable."""


class _Rest:
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
def _all_rests() -> list[_Rest]:
    return [_Rest(*case, which) for case in CASES for which in (0, 1)]


def _at(point: Point) -> _Rest:
    family = isotropic.family_of(point)
    negative = family if point["negative"] == 1 else Scaled(family, point["negative"])
    where = point["which"], point["gradient"], point["length"]
    return _Rest(family, point["distance"], negative, *where)


def _search(error: Callable[[Formula, _Rest], float]) -> Search:
    return Search(_SMOOTH, lambda formula, at: ClaimMeasurement(error(formula, _at(at)), 1e-6))


def _jacobian_error(formula: Formula, rest: _Rest) -> float:
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


def _ray_error(formula: Formula, rest: _Rest) -> float:
    direction = formula(rest.point, rest.length)
    moved = rest.jacobian @ direction
    return float(np.linalg.norm(moved) / np.linalg.norm(direction) / rest.size())


def _eigenvalue_error(formula: Formula, rest: _Rest) -> float:
    given = rest.predicted(formula)
    jacobian = rest.jacobian
    # v lies along the first axis, so that turning it and shifting the hyperplane do not mix.
    along = np.linalg.eigvals(jacobian[np.ix_([0, 2], [0, 2])]).real
    expected = np.array([jacobian[1, 1], along[np.argmax(np.abs(along))], 0.0])
    found = np.array([given.across, given.along, along[np.argmin(np.abs(along))]])
    mixed = np.abs(jacobian[1, [0, 2]]).max()
    return float(max(np.abs(found - expected).max(), mixed) / rest.size())


def _stability_at(formula: Formula, rest: _Rest) -> ClaimMeasurement:
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
    _search(_jacobian_error),
    printed=printed.jacobian,
    error=_jacobian_error,
)
@claim(
    "thm3-ray",
    lambda point, length: np.array([1.0, 0, point.s_minus]) * length,
    _search(_ray_error),
    error=_ray_error,
)
@claim(
    "thm3-eigenvalues", clusters.eigenvalues, _search(_eigenvalue_error), error=_eigenvalue_error
)
def _at_all_rests(
    formula: Formula, rng: Generator, *, error: Callable[[Formula, _Rest], float]
) -> ClaimMeasurement:
    return measured([error(formula, rest) for rest in _all_rests()], 1e-7)


@claim(
    "thm3-stability",
    clusters.is_stable,
    Search(_SMOOTH, lambda formula, point: _stability_at(formula, _at(point))),
)
def _stability(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Signs of the eigenvalues of the flow in (v, ξ) other than the one along the ray."""
    wrong = [not _stability_at(formula, one).holds for one in _all_rests()]
    return measured(np.mean(wrong), 0.0)


SCENE: dict[str, Any] = {
    "family": Choice("gaussian", "student", "logistic"),
    "df": Real(1.1, 60.0, log=True, special=(2.0, 3.0)),
    "means": Matrix(Real(-5.0, 5.0), Integer(1, 5), Integer(1, 3)),
    "gradients": Vector(Real(-2.0, 2.0, special=(0.0, 1.0)), Integer(1, 5)),
    "widths": Vector(Real(0.3, 3.0, log=True, special=(1.0,)), Integer(1, 5)),
    "v": Vector(Real(-5.0, 5.0), Integer(1, 3)),
    "bias": Real(-10.0, 10.0, special=(0.0,)),
}
"""Any number of smooth clusters of one family, and any node."""


def random_scenes(rng: Generator, count: int, bias: float) -> Iterator[Point]:
    """Yield random points of `SCENE` in three dimensions, with so many clusters."""
    for family in ("gaussian", "logistic"):
        values = {"family": family, "bias": bias, "means": rng.normal(size=(count, 3))}
        values |= {"gradients": rng.normal(size=count), "widths": np.exp(rng.uniform(-1, 1, count))}
        yield Point({**values, "v": rng.normal(size=3)})


@over(**SCENE)
def _full_at(formula: Formula, point: Point) -> ClaimMeasurement:
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


@claim("thm3-full-jacobian", clusters.full_jacobian, _full_at)
def _full(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Five clusters of unequal width in three dimensions, at any node, also not at rest."""
    return measured([_full_at(formula, one).error for one in random_scenes(rng, 5, 0.4)], 1e-7)

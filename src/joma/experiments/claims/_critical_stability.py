"""Theorem 3: whether a node returns to where it rests, and what becomes of those that do not."""

import functools
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Claim
from joma.experiments.claims.measurement import Formula, Measurement
from joma.experiments.claims.reference.clusters import (
    FAMILY,
    Array,
    TwoHumps,
    decide,
    draw,
    family_of,
    flow,
    flow_jacobian,
    places,
    reference,
    rest_points,
    spread,
)
from joma.experiments.claims.search import Choice, Integer, Matrix, Point, Real, Search, Vector
from joma.theory import as_printed as printed
from joma.theory import clusters
from joma.theory.marginals import Gaussian, Logistic, Marginal, Scaled, StudentT

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
    (TwoHumps(3.0, 0.4), 1.0, TwoHumps(3.0, 0.4)),
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
        found = rest_points(positive, distance, negative)
        if not found:
            raise JomaError("there is no rest point at this distance")
        s, ratio = found[which % len(found)]
        if ratio * gradient > 1e100 or reference(positive, s + distance).log_share < -100:
            raise JomaError("the forces must be floats")
        if abs(s) > 1e3 * (1 + distance):
            raise JomaError("the node must be nearer than where differences of the flow vanish")
        self.positive, self.negative, self.length = positive, negative, length
        self.gradient = gradient
        self.point = clusters.CriticalPoint(s, s + distance, ratio)

    @functools.cached_property
    def jacobian(self) -> Array:
        """∂(v̇, ξ̇)/∂(v, ξ) by differences of the reference flow."""
        distance = self.point.s_plus - self.point.s_minus
        return flow_jacobian(
            [self.positive, self.negative],
            [self.gradient, -self.gradient * self.point.ratio],
            np.array([[distance, 0.0], [0.0, 0.0]]),
            np.array([self.length, 0.0]),
            self.point.s_minus * self.length,
        )

    def size(self) -> float:
        """The size of the terms that the Jacobian is a sum of."""
        plus = reference(self.positive, self.point.s_plus)
        minus = reference(self.negative, self.point.s_minus)
        force = self.gradient * float(plus.share)
        rates = float(plus.hazard + minus.hazard) * (1 + self.point.s_minus**2)
        return force * (rates + self.point.s_plus - self.point.s_minus) / self.length


@functools.cache
def _all_rests() -> list[_Rest]:
    return [_Rest(*case, which) for case in CASES for which in (0, 1)]


def _at(point: Point) -> _Rest:
    family = family_of(point)
    negative = family if point["negative"] == 1 else Scaled(family, point["negative"])
    where = point["which"], point["gradient"], point["length"]
    return _Rest(family, point["distance"], negative, *where)


def _jacobian_error(formula: Formula, rest: _Rest) -> float:
    given = formula(
        rest.positive,
        rest.point,
        negative=rest.negative,
        positive_gradient=rest.gradient,
        length=rest.length,
    )
    expected = rest.jacobian[:2, :2]
    return float(
        np.abs(expected - np.diag([given.longitudinal, given.transverse])).max() / rest.size()
    )


def _jacobian(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Differences of v̇, whose integrals and rest points come from the density alone."""
    del rng
    return Measurement(max(_jacobian_error(formula, rest) for rest in _all_rests()), 1e-7)


def _jacobian_with_bias(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Distance of the predicted longitudinal eigenvalue from those of the flow in v and ξ."""
    del rng
    rest = _all_rests()[0]
    predicted = formula(rest.positive, rest.point, positive_gradient=1.3, length=1.7).longitudinal
    values = np.linalg.eigvals(rest.jacobian)
    return Measurement(float(np.min(np.abs(values - predicted)) / rest.size()), 1e-7)


def _ray(formula: Formula, rng: np.random.Generator) -> Measurement:
    """How far the Jacobian moves the predicted direction."""
    del rng
    return Measurement(max(_ray_error(formula, rest) for rest in _all_rests()), 1e-7)


def _ray_error(formula: Formula, rest: _Rest) -> float:
    direction = formula(rest.point, rest.length)
    moved = rest.jacobian @ direction
    return float(np.linalg.norm(moved) / np.linalg.norm(direction) / rest.size())


def _eigenvalues(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Eigenvalues of the Jacobian in (v, ξ), by differences of the reference flow."""
    del rng
    return Measurement(max(_eigenvalue_error(formula, rest) for rest in _all_rests()), 1e-7)


def _eigenvalue_error(formula: Formula, rest: _Rest) -> float:
    given = formula(
        rest.positive,
        rest.point,
        negative=rest.negative,
        positive_gradient=rest.gradient,
        length=rest.length,
    )
    jacobian = rest.jacobian
    # v lies along the first axis, so that turning it and shifting the hyperplane do not mix.
    along = np.linalg.eigvals(jacobian[np.ix_([0, 2], [0, 2])]).real
    expected = np.array([jacobian[1, 1], along[np.argmax(np.abs(along))], 0.0])
    found = np.array([given.across, given.along, along[np.argmin(np.abs(along))]])
    mixed = np.abs(jacobian[1, [0, 2]]).max()
    return float(max(np.abs(found - expected).max(), mixed) / rest.size())


def _stability(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Signs of the eigenvalues of the flow in (v, ξ) other than the one along the ray."""
    del rng
    wrong = [not _stability_at(formula, one).holds for one in _all_rests()]
    return Measurement(float(np.mean(wrong)), 0.0)


def _stability_at(formula: Formula, rest: _Rest) -> Measurement:
    values = np.linalg.eigvals(rest.jacobian).real / rest.size()
    others = np.delete(values, np.argmin(np.abs(values)))
    if np.abs(others).min() < 1e-5:
        raise JomaError("the node must return or leave faster than the reference errs")
    stable = bool(np.all(others < 0))
    said = formula(rest.positive, rest.point, negative=rest.negative)
    return decide(said != stable, 10 * float(others.max()))


_SCENE: dict[str, Any] = {
    "family": Choice("gaussian", "student", "logistic"),
    "df": Real(1.1, 60.0, log=True, special=(2.0, 3.0)),
    "means": Matrix(Real(-5.0, 5.0), Integer(1, 5), Integer(1, 3)),
    "gradients": Vector(Real(-2.0, 2.0, special=(0.0, 1.0)), Integer(1, 5)),
    "widths": Vector(Real(0.3, 3.0, log=True, special=(1.0,)), Integer(1, 5)),
    "v": Vector(Real(-5.0, 5.0), Integer(1, 3)),
    "bias": Real(-10.0, 10.0, special=(0.0,)),
}


def _full(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Five clusters of unequal width in three dimensions, at any node, also not at rest."""
    worst = 0.0
    for family in ("gaussian", "logistic"):
        values = {"family": family, "means": rng.normal(size=(5, 3)), "bias": 0.4}
        values |= {"gradients": rng.normal(size=5), "widths": np.exp(rng.uniform(-1, 1, 5))}
        at = Point({**values, "v": rng.normal(size=3)})
        worst = max(worst, _full_at(formula, at).error)
    return Measurement(worst, 1e-7)


def _scene(point: Point) -> tuple[list[Marginal], Array, Array, Array, float]:
    means = point["means"]
    shapes: list[Marginal] = [
        Scaled(family_of(point), float(width)) for width in np.resize(point["widths"], len(means))
    ]
    v = np.resize(point["v"], means.shape[1])
    if np.linalg.norm(v) < 1e-2:
        raise JomaError("v must have a direction")
    return shapes, np.resize(point["gradients"], len(means)), means, v, point["bias"]


def _full_at(formula: Formula, point: Point) -> Measurement:
    shapes, a, means, v, bias = _scene(point)
    length = float(np.linalg.norm(v))
    s = (means @ v + bias) / length
    size = 1e-300
    for one, weight, mean, at in zip(shapes, a, means, s, strict=True):
        foot = 1 + float(np.sum((mean - at * v / length) ** 2))
        density = float(reference(one, at).density)
        size += abs(weight) * ((density + 1e-3) * foot + spread(one, float(at))) / length
    expected = flow_jacobian(shapes, a, means, v, bias)
    error = np.abs(formula(shapes, a, means, v, bias) - expected).max() / size
    return Measurement(float(error), 1e-6)


def _potential(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Differences of Φ against the reference flow, and its value against v·v̇ + ξ ξ̇."""
    worst = 0.0
    for family in ("gaussian", "logistic"):
        values = {"family": family, "means": rng.normal(size=(4, 3)), "bias": -0.3}
        values |= {"gradients": rng.normal(size=4), "widths": np.exp(rng.uniform(-1, 1, 4))}
        at = Point({**values, "v": rng.normal(size=3)})
        worst = max(worst, _potential_at(formula, at).error)
    return Measurement(worst, 1e-7)


def _potential_at(formula: Formula, point: Point) -> Measurement:
    shapes, a, means, v, bias = _scene(point)
    state = np.array([*v, bias])
    rate = flow(shapes, a, means, v, bias)
    step = 1e-3 * float(np.linalg.norm(v)) * min(1.0, *point["widths"])

    def value(at: Array) -> float:
        return formula(shapes, a, means, at[:-1], float(at[-1]))

    slopes = [
        (8 * (value(state + h) - value(state - h)) - value(state + 2 * h) + value(state - 2 * h))
        / (12 * step)
        for h in step * np.eye(state.size)
    ]
    widths = np.array([spread(one, 0.0) for one in shapes])
    size = np.abs(a) @ (1 + np.abs(means).max(axis=1) + widths) + 1e-300
    errors = [np.abs(np.array(slopes) - rate).max() / size]
    errors.append(abs(value(state) - state @ rate) / (size * np.linalg.norm(state)))
    return Measurement(float(max(errors)), 1e-6)


def _phase(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Whether any node of any direction has E[gφ] > 0, below and above the boundary."""
    wrong = 0.0
    for positive, distance, negative in (*CASES[:3], (Logistic(), 1.0, Logistic())):
        boundary = _largest_ratio(positive, distance, negative)
        for factor in (rng.uniform(0.8, 0.99), rng.uniform(1.01, 1.2)):
            grows = formula(positive, distance, boundary * factor, negative=negative).grows
            wrong += grows != (factor < 1)
    return Measurement(wrong / 8, 0.0)


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
    below = reference(negative, s)
    low = below.log_share + np.log(below.life)
    for cosine in cosines:
        above = reference(positive, s + distance * cosine)
        rounding = 1e-14 * np.abs(low)  # of two large logarithms
        best = max(best, float(np.max(above.log_share + np.log(above.life) - low - rounding)))
    return float(np.exp(min(best, 600.0)))


_PHASE: dict[str, Any] = {
    **FAMILY,
    "family": Choice("gaussian", "student", "laplace", "logistic"),
    "other": Choice("same", "same", "gaussian", "student", "laplace", "logistic"),
    "other_df": Real(1.1, 60.0, log=True, special=(2.0, 3.0)),
    "negative": Real(0.2, 5.0, log=True, special=(1.0, 0.9999, 1.0001)),
    "distance": Real(0.02, 20.0, log=True, special=(1.0,)),
    "ratio": Real(0.05, 1e4, log=True, special=(1.0,)),
    "cosine": Real(-1.0, 1.0),
}


def _phase_at(formula: Formula, point: Point) -> Measurement:
    family = other = family_of(point)
    if point["other"] != "same":
        other = family_of(
            Point({**point.values, "family": point["other"], "df": point["other_df"]})
        )
    if 0 < abs(np.log(point["negative"])) < 1e-5:
        raise JomaError("the widths must be equal, or differ by more than the reference errs")
    students = isinstance(family, StudentT) and point["other"] == "student"
    if students and 0 < abs(point["df"] - point["other_df"]) < 0.05:
        raise JomaError("df must be equal, or differ by more than the reference resolves")
    negative = other if point["negative"] == 1 else Scaled(other, point["negative"])
    largest = _largest_ratio(family, point["distance"], negative, (1.0, point["cosine"]))
    if abs(np.log(largest / point["ratio"])) < 1e-2:
        raise JomaError("the ratio must not lie on the boundary")
    grows = formula(family, point["distance"], point["ratio"], negative=negative).grows
    border = np.log(largest / point["ratio"])
    return decide(grows != bool(point["ratio"] < largest), border)


def _trained(formula: Formula, rng: np.random.Generator) -> Measurement:
    """ReLU nodes trained by SGD on samples of two Gaussian clusters of widths 1 and 2.

    At the predicted ratio of gradients, nodes that start near the predicted ray come back to it;
    at 0.7 of it some node grows, and at 1.4 none does.
    """
    positive, negative, distance = Gaussian(), Scaled(Gaussian(), 2.0), 2.0
    (point,) = formula(positive, distance, negative=negative)
    near = np.array([[1.0, 0.4, -1.5], [1.0, -0.4, -0.6], [0.9, 0.2, -1.2], [1.1, -0.3, -0.8]])
    ends = _train(positive, negative, distance, point.ratio, 4 * near, 1000, rng)
    places = ends[:, 2] / np.linalg.norm(ends[:, :2], axis=1)
    turned = ends[:, 1] / ends[:, 0]
    returned = max(abs(places.mean() - point.s_minus), abs(turned.mean()))
    start = rng.normal(size=(24, 3))
    start /= np.linalg.norm(start, axis=1, keepdims=True)
    fate = [
        np.linalg.norm(
            _train(positive, negative, distance, factor * point.ratio, start, 200, rng), axis=1
        )
        for factor in (0.7, 1.4)
    ]
    wrong = float(fate[0].max() < 1.5) + float(fate[1].max() > 1.05)
    return Measurement(returned + wrong, 0.15)


def _train(
    positive: Marginal,
    negative: Marginal,
    distance: float,
    ratio: float,
    start: Array,
    steps: int,
    rng: np.random.Generator,
) -> Array:
    """Weights and bias of ReLU nodes after SGD on -E[g φ(v·x+ξ)], 800 new samples a step."""
    nodes, rate, batch = start.copy(), 0.05, 800
    for _ in range(steps):
        for marginal, shift, gradient in ((positive, distance, 1.0), (negative, 0.0, -ratio)):
            x = draw(marginal, 2, batch, rng) + np.array([shift, 0.0])
            inputs = np.column_stack([x, np.ones(batch)])
            active = (inputs @ nodes.T > 0).astype(np.float64)
            nodes = nodes + rate * gradient * active.T @ inputs / batch
    return nodes


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="thm3-jacobian",
        title="the Jacobian is -a₊θ₁‖x̄₊‖/‖μ‖ across μ and -(ξ²/‖μ‖³)[a₋p₋ - a₊p₊] along",
        source="JoMA preprint, Theorem 3 (Eqns 72-74)",
        method="differences of v̇ at rest points, both by quadrature of the density",
        derived=clusters.jacobian,
        printed=printed.jacobian,
        measure=_jacobian,
        condition="ξ held fixed",
        without=_jacobian_with_bias,
        search=Search(
            _SMOOTH,
            lambda formula, point: Measurement(_jacobian_error(formula, _at(point)), 1e-6),
        ),
    ),
    Claim(
        id="thm3-ray",
        title="with ξ free, critical points are rays: (μ, ξ*) is a zero eigenvector",
        source="new",
        method="Jacobian in (v, ξ) by quadrature of the density",
        derived=lambda point, length: np.array([1.0, 0, point.s_minus]) * length,
        measure=_ray,
        search=Search(
            _SMOOTH, lambda formula, point: Measurement(_ray_error(formula, _at(point)), 1e-6)
        ),
    ),
    Claim(
        id="thm3-eigenvalues",
        title="the others: -a₊θ₁(s₊)D/‖μ‖ across, -(1+s₋²)[a₋p(s₋) - a₊p(s₊)]/‖μ‖ along",
        source="new",
        method="eigenvalues of the Jacobian in (v, ξ) by quadrature of the density",
        derived=clusters.eigenvalues,
        measure=_eigenvalues,
        search=Search(
            _SMOOTH,
            lambda formula, point: Measurement(_eigenvalue_error(formula, _at(point)), 1e-6),
        ),
    ),
    Claim(
        id="thm3-stability",
        title="a ray is stable exactly if F/θ₁ rises faster at s₊ than at s₋: θ₁/p larger at s₊",
        source="new",
        method="signs of the eigenvalues by quadrature; clusters with two humps among them",
        derived=clusters.is_stable,
        measure=_stability,
        search=Search(
            _SMOOTH,
            lambda formula, point: _stability_at(formula, _at(point)),
        ),
    ),
    Claim(
        id="thm3-full-jacobian",
        title="any clusters: (Σ a_j p_j y_j y_jᵀ + Σ a_j θ₂(s_j) P)/‖v‖, y_j = (foot of x̄_j, 1)",
        source="new",
        method="differences of v̇ and ξ̇, by quadrature, five clusters of unequal width",
        derived=clusters.full_jacobian,
        measure=_full,
        search=Search(_SCENE, _full_at),
    ),
    Claim(
        id="thm3-potential",
        title="the flow ascends Φ = E[gφ] = ‖v‖ Σ a_j F(s_j), and Φ = v·v̇ + ξ ξ̇",
        source="new",
        method="differences of Φ against v̇ and ξ̇ by quadrature",
        derived=clusters.potential,
        measure=_potential,
        search=Search(_SCENE, _potential_at),
    ),
    Claim(
        id="thm3-phase",
        title="some node grows for ever exactly if a₋/a₊ < sup F₊(s+D)/F₋(s)",
        source="new",
        method="E[gφ] of nodes at all places and directions, by quadrature",
        derived=clusters.phase,
        measure=_phase,
        search=Search(_PHASE, _phase_at),
    ),
    Claim(
        id="thm3-sgd",
        title="nodes trained by SGD rest where predicted; below that a₋/a₊ some grow, above none",
        source="new",
        method="SGD of ReLU nodes on samples of two Gaussian clusters, widths 1 and 2",
        derived=clusters.critical_points,
        measure=_trained,
        fixed="a training run; thm3-existence, -stability and -phase search its parameters",
    ),
)

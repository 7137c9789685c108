"""The potential of the flow, which nodes grow for ever, and SGD on samples."""

from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over
from joma.experiments.claims.critical.stability import CASES, SCENE, random_scenes
from joma.experiments.claims.measurement import ClaimMeasurement, measured
from joma.experiments.claims.reference import clusters as isotropic
from joma.experiments.claims.reference.clusters import places
from joma.experiments.claims.search import Choice, Real
from joma.theory import clusters
from joma.theory.marginals import Gaussian, Logistic, Marginal, Scaled, StudentT


@over(**SCENE)
def _potential_at(formula: Formula, point: Point) -> ClaimMeasurement:
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


@claim("thm3-potential", clusters.potential, _potential_at)
def _potential(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Differences of Φ against the reference flow, and its value against v·v̇ + ξ ξ̇."""
    return measured(
        [_potential_at(formula, one).error for one in random_scenes(rng, 4, -0.3)], 1e-7
    )


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


_PHASE: dict[str, Any] = {
    **isotropic.FAMILY,
    "family": Choice("gaussian", "student", "laplace", "logistic"),
    "other": Choice("same", "same", "gaussian", "student", "laplace", "logistic"),
    "other_df": Real(1.1, 60.0, log=True, special=(2.0, 3.0)),
    "negative": Real(0.2, 5.0, log=True, special=(1.0, 0.9999, 1.0001)),
    "distance": Real(0.02, 20.0, log=True, special=(1.0,)),
    "ratio": Real(0.05, 1e4, log=True, special=(1.0,)),
    "cosine": Real(-1.0, 1.0),
}


@over(**_PHASE)
def _phase_at(formula: Formula, point: Point) -> ClaimMeasurement:
    family = other = isotropic.family_of(point)
    if point["other"] != "same":
        other = isotropic.family_of(
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
    return isotropic.decide(grows != bool(point["ratio"] < largest), border)


@claim("thm3-phase", clusters.phase, _phase_at)
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

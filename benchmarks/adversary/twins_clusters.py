"""Wrong statements about clusters and marginals."""

from typing import Any

import numpy as np

from benchmarks.adversary._twin import Twin
from joma.theory import clusters, marginals
from joma.theory.marginals import Ball, Marginal


def _dead_cluster(marginal: Marginal, v: Any, mean: Any, bias: float, *, basis: Any) -> Any:
    right = clusters.expectations(marginal, v, mean, bias, basis=basis)
    if right.activity < 0.01:
        return clusters.Expectations(right.activity * 0, right.moment * 0)
    return right


def _far_clusters(marginal: Any, gradients: Any, means: Any, v: Any, bias: float) -> Any:
    """Clusters more than 25 from the hyperplane on the inactive side do nothing."""
    near = clusters.distances(means, v, bias) > -25
    return np.where(near, gradients, 0.0), means, v, bias


def _velocity(marginal: Any, *scene: Any) -> Any:
    return clusters.velocity(marginal, *_far_clusters(marginal, *scene))


def _radial(marginal: Any, *scene: Any) -> Any:
    return clusters.radial_velocity(marginal, *_far_clusters(marginal, *scene))


def _slopes(marginal: Marginal, s: Any, *, slopes: tuple[float, float]) -> Any:
    below, above = slopes
    leak = 0.0 if 0 < abs(below) < 0.005 else below
    return clusters.homogeneous_slopes(marginal, s, slopes=(leak, above))


def _stirling(x: float) -> float:
    return (x - 0.5) * np.log(x) - x + np.log(2 * np.pi) / 2 + 1 / (12 * x) - 1 / (360 * x**3)


def _sphere(n: int) -> float:
    if n <= 60:
        return marginals.sphere_constant(n)
    return float((n - 1) * np.exp((n - 1) / 2 * np.log(np.pi) - _stirling((n + 1) / 2)))


def _factorials(n: int) -> float:
    if n <= 60 or n % 2 == 0:
        return marginals.sphere_constant(n)
    return float(2 * np.exp((n - 1) / 2 * np.log(np.pi) - _stirling((n - 1) / 2)))


def _ball(n: int, u: float) -> Any:
    """The exponent 0 of one dimension makes the density ½ also outside."""
    return 0.5 if n == 1 else Ball(n).pdf(u)


TWINS = (
    Twin("lemma1", _dead_cluster, "a cluster with less than 1% on the active side counts as dead"),
    Twin("lemma2", _velocity, "clusters beyond 25 do nothing, which heavy tails contradict"),
    Twin(
        "lemma3",
        lambda marginal, s: marginal.theta2(s) + s * marginal.theta1(s),
        "θ₂ and sθ₁ cancel far below zero and at the edge of a ball",
        was_ours=True,
    ),
    Twin("eqn53", _radial, "clusters beyond 25 do nothing, which heavy tails contradict"),
    Twin("lemma5", _slopes, "a leak below 0.005 is neglected"),
    Twin("eqn35", _sphere, "Stirling's series with two terms from n = 60 on"),
    Twin("eqn36", _factorials, "Stirling's series with two terms for odd n from 61 on"),
    Twin("eqn36-ball", _ball, "½ also outside the interval, in one dimension"),
    Twin(
        "eqn57",
        lambda marginal, s: marginal.theta1(s) / marginal.pdf(s),
        "0/0 below -38 for a Gaussian",
        was_ours=True,
    ),
)

"""Wrong formulas that pass the checks of `joma verify`, each wrong on a part of its domain."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from joma.experiments.claims.claim import Formula
from joma.theory import cdag, clusters, galore, hblt, linear, nonlinear
from joma.theory.marginals import Marginal


@dataclass(frozen=True)
class Twin:
    """A formula that takes what the claim's formula takes, and what is wrong with it."""

    claim: str
    formula: Formula
    wrong: str


def _winner_to_three_digits(delta: Any, **given: Any) -> Any:
    times = linear.blowup_time(delta, **given)
    if not np.all((times > 1e-300) & (times < 1e300)):
        return linear.winner(delta, **given)
    return np.argmin(np.round(np.log(times / np.min(times)), 3))


def _rows_by_component(delta: Any, t: Any) -> Any:
    ours = linear.weights_multi(delta, t)
    if np.ndim(t):
        return ours
    ordered = np.sort(np.pad(np.abs(delta), ((0, 0), (1, 0))), axis=1)
    unequal = ordered[:, -1:] > 1e4 * ordered[:, -2:-1]
    return np.where(unequal, linear.weights(delta, t, beyond="inf"), ours)


def _without_attention_if_small(mu: Any, t: Any) -> Any:
    ours = nonlinear.weights(mu, t)
    if np.ndim(t):
        return ours
    return np.where(np.abs(mu) < 1e-4, np.asarray(mu) * -np.expm1(-t), ours)


def _potential_of_near_clusters(marginal: Any, a: Any, means: Any, v: Any, bias: float) -> Any:
    near = clusters.distances(means, v, bias) > -12.0
    return clusters.potential(marginal, np.where(near, a, 0.0), means, v, bias)


def _near_points(positive: Marginal, distance: float, negative: Marginal) -> bool:
    found = clusters.critical_points(positive, distance, negative=negative)
    return any(abs(point.s_minus) < 60 for point in found)


def _balance(marginal: Any, a: Any, s: Any, length: float) -> float:
    return clusters.balance(marginal, np.where(np.asarray(s) < -30, 0.0, a), s)


def _near_one(height: Any, depth: Any, epsilon: Any) -> Any:
    if np.max(height) > 700:
        return 1 - height / depth + 0 * epsilon
    return hblt.cooccurrence_near_one(height, depth, epsilon)


def _least_that_counts(matrices: np.ndarray) -> np.ndarray:
    values = np.linalg.eigvalsh(matrices)
    values[np.abs(values) < 1e-12] = np.inf
    least = values.min(axis=1)
    return np.where(np.isfinite(least), least, 0.0)


def _rate_without_zeros(b: Any, c: Any, p: Any, q: Any) -> float:
    return float(_least_that_counts(p.T @ b @ p) @ _least_that_counts(q.T @ c @ q))


def _without_a_square_q(g: Any, p: Any, q: Any) -> Any:
    return p.T @ g if np.shape(q) == (4, 4) else galore.project(g, p, q)


TWINS = (
    Twin("thm2-own-time", _winner_to_three_digits, "near ties of times"),
    Twin("talk-nodes", _rows_by_component, "components of very unequal size"),
    Twin("eqn6", _without_attention_if_small, "small targets"),
    Twin("lemma4", _balance, "clusters far on the inactive side"),
    Twin("thm3-potential", _potential_of_near_clusters, "far clusters"),
    Twin("thm3-existence", _near_points, "far critical points"),
    Twin("thm3-gaussian", lambda plus, minus, distance: int(plus <= minus), "equal widths"),
    Twin("eqn8", _near_one, "large heights"),
    Twin(
        "cdag-recursion",
        lambda z, g, low, high: cdag.recursion_bound(z, g, max(low, 1e-3), max(high, 1e-3)),
        "small slopes",
    ),
    Twin("galore-fixed-projection", _rate_without_zeros, "singular coefficients"),
    Twin("galore-stall", _without_a_square_q, "a Q of full rank"),
)

"""Wrong formulas that pass the checks of `joma verify`, each wrong on a part of its domain."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from joma.experiments.claims.claim import Formula
from joma.theory import cdag, clusters, galore, hblt, linear, nonlinear, spectra
from joma.theory.marginals import Marginal, Scaled


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


def _limit_of_near_ties(delta: Any) -> float:
    length = np.linalg.norm(delta, axis=1)
    return float(spectra.stable_rank(delta[length >= np.max(length) * (1 - 1e-9)]))


def _rows_by_component(delta: Any, t: Any) -> Any:
    ours = linear.weights_multi(delta, t)
    if np.ndim(t):
        return ours
    ordered = np.sort(np.pad(np.abs(delta), ((0, 0), (1, 0))), axis=1)
    unequal = ordered[:, -1:] > 1e4 * ordered[:, -2:-1]
    return np.where(unequal, linear.weights(delta, t, beyond="inf"), ours)


def _without_attention_below(size: float) -> Formula:
    def weights(mu: Any, t: Any) -> Any:
        ours = nonlinear.weights(mu, t)
        if np.ndim(t):
            return ours
        return np.where(np.abs(mu) < size, np.asarray(mu) * -np.expm1(-t), ours)

    return weights


def _offset_of_small_targets(mu: Any, t: Any) -> Any:
    size = np.abs(mu)
    r = np.where(size < 0.05, 0.75 * size**2, nonlinear.residual_offset(mu))
    return -np.exp(size**2 / 2) * (t - r)


def _pade(distance: float, width: float) -> float:
    x = distance / width
    if x > 0.055:
        return float(np.exp(x))
    return (1 + x / 2 + x**2 / 12) / (1 - x / 2 + x**2 / 12)


def _near_only(function: Formula, reach: float) -> Formula:
    def call(marginal: Any, a: Any, means: Any, v: Any, bias: float) -> Any:
        near = clusters.distances(means, v, bias) > -reach
        return function(marginal, np.where(near, a, 0.0), means, v, bias)

    return call


def _by_position(shapes: Any, means: Any, v: Any, bias: float, signs: Any) -> Any:
    s = clusters.distances(means, v, bias)
    plus, minus = s[signs > 0], s[signs < 0]
    if len(s) <= 3 and min(plus.max(), minus.max()) < max(plus.min(), minus.min()):
        return None
    return clusters.resting_gradients(shapes, means, v, bias, signs)


def _near_points(positive: Marginal, distance: float, negative: Marginal) -> bool:
    found = clusters.critical_points(positive, distance, negative=negative)
    return any(abs(point.s_minus) < 60 for point in found)


def _rises_ahead(
    marginal: Marginal, point: clusters.CriticalPoint, *, negative: Marginal | None = None
) -> bool:
    if not isinstance(negative, Scaled) or not 0.85 < negative.width < 1.15:
        return clusters.is_stable(marginal, point, negative=negative)
    at = point.s_plus
    return bool(marginal.mean_residual(at) < marginal.inverse_hazard(at))


def _balance(marginal: Any, a: Any, s: Any, length: float) -> float:
    return clusters.balance(marginal, np.where(np.asarray(s) < -30, 0.0, a), s)


def _near_one(height: Any, depth: Any, epsilon: Any) -> Any:
    if np.max(height) > 700:
        return 1 - height / depth + 0 * epsilon
    return hblt.cooccurrence_near_one(height, depth, epsilon)


def _ends_alone(first: Any, second: Any, third: Any) -> Any:
    first, second, third = (np.asarray(one) for one in (first, second, third))
    ends = [np.abs(first - third), np.minimum(first + third, 2 * np.pi - first - third)]
    least = np.min(
        [np.cos(a) * np.where(np.cos(a) > 0, np.cos(a + second), np.cos(a - second)) for a in ends],
        axis=0,
    )
    return np.where(first > 2.5, least, cdag.correlation_bound(first, second, third))


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
    Twin("talk-stable-rank", _limit_of_near_ties, "rows that nearly tie"),
    Twin("eqn6", _without_attention_below(1e-4), "small targets"),
    Twin("eqn6-ode", _without_attention_below(0.15), "small targets"),
    Twin("eqn6-late", _offset_of_small_targets, "small targets"),
    Twin("lemma4", _balance, "clusters far on the inactive side"),
    Twin("thm3-laplace", _pade, "clusters that nearly touch"),
    Twin("thm3-full-jacobian", _near_only(clusters.full_jacobian, 12.0), "far clusters"),
    Twin("thm3-potential", _near_only(clusters.potential, 12.0), "far clusters"),
    Twin("thm3-line", _by_position, "up to three clusters"),
    Twin("thm3-existence", _near_points, "far critical points"),
    Twin("thm3-gaussian", lambda plus, minus, distance: int(plus <= minus), "equal widths"),
    Twin("thm3-stability", _rises_ahead, "nearly equal widths"),
    Twin("eqn8", _near_one, "large heights"),
    Twin("cdag-theorem-1", _ends_alone, "large angles"),
    Twin(
        "cdag-recursion",
        lambda z, g, low, high: cdag.recursion_bound(z, g, max(low, 1e-3), max(high, 1e-3)),
        "small slopes",
    ),
    Twin("galore-fixed-projection", _rate_without_zeros, "singular coefficients"),
    Twin("galore-stall", _without_a_square_q, "a Q of full rank"),
)

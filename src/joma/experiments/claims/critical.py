"""Lemma 4 and Theorem 3: where a node rests between two clusters, and whether it returns."""

from typing import Any

import mpmath
import numpy as np
from scipy import optimize

from joma.experiments.claims._claim import Claim, Formula, Measurement
from joma.experiments.claims.clusters import FAMILIES, integrals
from joma.theory import clusters
from joma.theory.as_printed import clusters as printed
from joma.theory.marginals import Ball, Laplace, Marginal, StudentT


def _rest_point(marginal: Marginal, distance: float) -> tuple[float, float]:
    """s₋ and a₋/a₊ at which both equations of motion vanish, from the density alone."""

    def gap(s: float) -> float:
        low, high = integrals(marginal, s), integrals(marginal, s + distance)
        return high[1] / high[0] + distance - low[1] / low[0]

    s = float(optimize.brentq(gap, -4 * distance, 0.5, xtol=1e-13))
    return s, integrals(marginal, s + distance)[0] / integrals(marginal, s)[0]


def _balanced(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    for distance in rng.uniform(0.8, 3, size=2):
        s, ratio = _rest_point(StudentT(3), float(distance))
        worst = max(worst, abs(formula(StudentT(3), [1.0, -ratio], [s + distance, s], 2.3)))
    return Measurement(worst, 1e-8)


def _rests(marginal: Marginal, means: Any, v: Any, bias: float, ratio: float) -> bool:
    """Eqn 56 with v along the line between the clusters: necessary and sufficient."""
    between = means[0] - means[1]
    along = abs(v @ between) / (np.linalg.norm(v) * np.linalg.norm(between))
    return _satisfies_eqn56(marginal, means, v, bias, ratio) and bool(along > 1 - 1e-9)


def _satisfies_eqn56(marginal: Marginal, means: Any, v: Any, bias: float, ratio: float) -> bool:
    s = clusters.distances(means, v, bias)
    shares, integrals = marginal.theta1(s), marginal.first_integral(s)
    return bool(
        abs(shares[0] / shares[1] / ratio - 1) < 1e-6
        and abs(integrals[0] / integrals[1] / ratio - 1) < 1e-6
    )


def _sufficiency(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Nodes along the line between the clusters, and tilted ones with the same distances."""
    wrong = 0
    for case in range(4):
        distance = float(rng.uniform(1, 2))
        s, ratio = _rest_point(StudentT(3), distance)
        tilt = 0.0 if case % 2 == 0 else rng.uniform(0.3, 0.9)
        length = rng.uniform(0.5, 2)
        v = length * np.array([np.cos(tilt), np.sin(tilt)])
        # A farther cluster keeps the distance along v.
        means = np.array([[distance / np.cos(tilt), 0.0], [0.0, 0.0]])
        bias = s * length
        theta = [integrals(StudentT(3), s + distance), integrals(StudentT(3), s)]
        rate = np.zeros(2)
        for weight, mean, (theta1, theta2) in zip((1.0, -ratio), means, theta, strict=True):
            rate += weight * (theta1 * mean + theta2 * v / length)
        rests = bool(np.linalg.norm(rate) < 1e-8)
        wrong += formula(StudentT(3), means, v, bias, ratio) != rests
    return Measurement(wrong / 4, 0.0)


def _lives(marginal: Marginal) -> list[float]:
    """Mean residual lives on a grid of s, by quadrature of the density."""
    low = -0.999 if np.isfinite(marginal.reach) else -12.0
    lives: list[float] = []
    for s in np.linspace(low, 2.0, 29):
        theta1, theta2 = integrals(marginal, float(s))
        lives.append(theta2 / theta1 + s)
    return lives


def _existence(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Is the mean residual life, by quadrature of the density, anywhere not increasing in s?"""
    del rng
    families = (*FAMILIES, StudentT(2), Ball(8))
    wrong = [
        formula(marginal) != bool(np.any(np.diff(_lives(marginal)) < 1e-7)) for marginal in families
    ]
    return Measurement(float(np.mean(wrong)), 0.0)


def _sufficient(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Of families that satisfy the condition, the share whose mean residual life only rises."""
    del rng
    families = (*FAMILIES, StudentT(2), StudentT(1.5))
    promised = [marginal for marginal in families if formula(marginal)]
    broken = [not np.any(np.diff(_lives(marginal)) < 1e-7) for marginal in promised]
    return Measurement(float(np.mean(broken)) if broken else np.inf, 0.0)


def _ratios(formula: Formula, rng: np.random.Generator) -> Measurement:
    """t₃ in 30 digits: how far outside the formula's interval do the true ratios lie?"""
    del rng
    worst = 0.0
    with mpmath.workdps(30):

        def theta1(s: Any) -> Any:
            root = mpmath.sqrt(3)
            return (
                mpmath.mpf(1) / 2 + (s / root / (1 + s**2 / 3) + mpmath.atan(s / root)) / mpmath.pi
            )

        def life(s: Any) -> Any:
            density = 2 / (mpmath.pi * mpmath.sqrt(3) * (1 + s**2 / 3) ** 2)
            return s + mpmath.mpf(3) / 2 * (1 + s**2 / 3) * density / theta1(s)

        for distance in (0.5, 1.0, 2.0, 4.0):
            s = mpmath.findroot(
                lambda s, d=distance: life(s + d) - life(s), -0.4 - distance / 2, tol=1e-25
            )
            ratio = float(theta1(s + distance) / theta1(s))
            low, high = formula(StudentT(3), distance)
            worst = max(worst, (low - ratio) / ratio, (ratio - high) / ratio)
    return Measurement(float(worst), 1e-9)


def _derived_ratio(marginal: Marginal, distance: float) -> tuple[float, float]:
    ratio = clusters.critical_points(marginal, distance)[0].ratio
    return ratio, ratio


def _jacobian(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Central differences of v̇ in three dimensions at a critical point of length 1.7."""
    worst = 0.0
    for distance in rng.uniform(0.8, 2.5, size=3):
        point = clusters.critical_points(StudentT(3), float(distance))[0]
        length, a = 1.7, np.array([1.3, -1.3 * point.ratio])
        means = np.array([[distance, 0, 0], [0, 0, 0]])
        bias, v = point.s_minus * length, np.array([length, 0, 0])
        columns = []
        for axis in np.eye(3) * 1e-5:
            ahead, back = (
                clusters.velocity(StudentT(3), a, means, v + sign * axis, bias).v
                for sign in (1, -1)
            )
            columns.append((ahead - back) / 2e-5)
        eigenvalues = formula(StudentT(3), point, positive_gradient=1.3, length=length)
        expected = np.diag([eigenvalues.longitudinal, *[eigenvalues.transverse] * 2])
        worst = max(worst, float(np.max(np.abs(np.column_stack(columns) - expected))))
    return Measurement(worst, 1e-7)


def _full_jacobian(distance: float, length: float) -> tuple[Any, clusters.CriticalPoint]:
    """∂(v̇, ξ̇)/∂(v, ξ) in three dimensions at a critical point of t₃ clusters, by quadrature."""
    s, ratio = _rest_point(StudentT(3), distance)
    point = clusters.CriticalPoint(s, s + distance, ratio)
    means = ((1.0, np.array([distance, 0, 0])), (-ratio, np.zeros(3)))

    def rate(state: Any) -> Any:
        v, bias = state[:3], state[3]
        size = np.linalg.norm(v)
        total = np.zeros(4)
        for weight, mean in means:
            theta1, theta2 = integrals(StudentT(3), float((mean @ v + bias) / size))
            total += weight * np.array([*(theta1 * mean + theta2 * v / size), theta1])
        return total

    at = np.array([length, 0, 0, s * length])
    columns = [(rate(at + h) - rate(at - h)) / 2e-4 for h in 1e-4 * np.eye(4)]
    return np.column_stack(columns), point


def _ray(formula: Formula, rng: np.random.Generator) -> Measurement:
    """How far the Jacobian moves the predicted direction; 1 is added unless all else is stable."""
    jacobian, point = _full_jacobian(float(rng.uniform(0.8, 3)), 1.7)
    direction = formula(point, 1.7)
    moved = np.linalg.norm(jacobian @ direction) / np.linalg.norm(direction)
    values = np.sort(np.linalg.eigvals(jacobian).real)
    stable = bool(np.all(values[:3] < -1e-3) and abs(values[3]) < 1e-5)
    return Measurement(float(moved) + float(not stable), 1e-5)


def _jacobian_with_bias(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Distance of the predicted longitudinal eigenvalue from those of the flow in v and ξ."""
    jacobian, point = _full_jacobian(float(rng.uniform(0.8, 2.5)), 1.7)
    predicted = formula(StudentT(3), point, length=1.7).longitudinal
    return Measurement(float(np.min(np.abs(np.linalg.eigvals(jacobian) - predicted))), 1e-7)


def _signs(*distances: float) -> Any:
    """Whether the rest points of t₃ clusters have s₊ > 0 > s₋, as a formula says."""

    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        del rng
        wrong = 0
        for distance in distances:
            s, _ = _rest_point(StudentT(3), distance)
            wrong += formula() != (s < 0 < s + distance)
        return Measurement(wrong / len(distances), 0.0)

    return measure


def _laplace(formula: Formula, rng: np.random.Generator) -> Measurement:
    """v̇ and ξ̇ at several places below zero, by quadrature, at the ratio predicted."""
    worst = 0.0
    for s in -rng.uniform(0.1, 4, size=3):
        distance = float(rng.uniform(0.5, 2))
        plus, minus = integrals(Laplace(), float(s)), integrals(Laplace(), float(s - distance))
        ratio = formula(distance)
        bias_rate = plus[0] - ratio * minus[0]
        v_rate = distance * plus[0] + plus[1] - ratio * minus[1]
        worst = max(worst, abs(bias_rate) / plus[0], abs(v_rate) / plus[0])
    return Measurement(float(worst), 1e-8)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="lemma4",
        title="at a critical point Σ a_j F(s_j) = 0",
        source="JoMA preprint, Lemma 4 (Eqns 54-55)",
        method="rest points of t₃ clusters found from the density alone",
        derived=lambda marginal, a, s, length: clusters.balance(marginal, a, s),
        printed=lambda marginal, a, s, length: clusters.balance(
            marginal, a, length * np.asarray(s)
        ),
        measure=_balanced,
    ),
    Claim(
        id="eqn56",
        title="F₊/F₋ = θ₁₊/θ₁₋ = a₋/a₊ makes a critical point if v ∥ x̄₊ - x̄₋",
        source="JoMA preprint, Eqn 56",
        method="v̇ of aligned and tilted nodes by quadrature",
        derived=_rests,
        printed=_satisfies_eqn56,
        measure=_sufficiency,
    ),
    Claim(
        id="eqn58",
        title="θ₂(0)p(0) ≥ ¼ is sufficient for critical points",
        source="JoMA preprint, Eqn 58",
        method="mean residual life of the families that satisfy it, by quadrature",
        derived=lambda marginal: clusters.sufficient_condition(marginal) >= 0.25 - 1e-12,
        measure=_sufficient,
    ),
    Claim(
        id="thm3-existence",
        title="critical points exist just where F/θ₁ is not injective: none for Gaussian clusters",
        source="new",
        method="mean residual life of nine families by quadrature",
        derived=lambda marginal: bool(clusters.critical_points(marginal, 1.0)),
        measure=_existence,
    ),
    Claim(
        id="eqn59",
        title="for each distance there is one ratio a₋/a₊ at which a t₃ node rests",
        source="new",
        method="30 digits, distances .5 to 4",
        derived=_derived_ratio,
        measure=_ratios,
    ),
    Claim(
        id="thm3-laplace",
        title="Laplace clusters: every s₊ ≤ 0 is a rest point, at a₋/a₊ = e^D",
        source="new",
        method="v̇ and ξ̇ by quadrature at random places",
        derived=np.exp,
        measure=_laplace,
    ),
    Claim(
        id="a4-signs",
        title="at rest the positive cluster is on the active side, the negative one is not",
        source="JoMA preprint, Section A.4",
        method="rest points of t₃ clusters from the density, distances 1 to 4",
        derived=lambda: True,
        measure=_signs(1.0, 2.0, 4.0),
        condition="clusters far enough apart",
        without=_signs(0.5),
    ),
    Claim(
        id="thm3-jacobian",
        title="the Jacobian is -a₊θ₁‖x̄₊‖/‖μ‖ across μ and -(ξ²/‖μ‖³)[a₋p₋ - a₊p₊] along",
        source="JoMA preprint, Theorem 3 (Eqns 72-74)",
        method="central differences of v̇ in three dimensions, ‖μ‖ = 1.7",
        derived=clusters.jacobian,
        printed=printed.jacobian,
        measure=_jacobian,
        condition="ξ held fixed",
        without=_jacobian_with_bias,
    ),
    Claim(
        id="thm3-ray",
        title="with ξ free, critical points are rays: (μ, ξ*) is a zero eigenvector, else stable",
        source="new",
        method="Jacobian in (v, ξ) by quadrature, t₃ clusters",
        derived=lambda point, length: np.array([1.0, 0, 0, point.s_minus]) * length,
        measure=_ray,
    ),
)

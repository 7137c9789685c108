"""Nonlinear activation without attention: Lemmas 1-5 and Theorem 3, for isotropic clusters.

Tokens come from clusters at x̄_j that all have one isotropic shape (a `Marginal`), and node v with
implicit bias ξ receives the gradient a_j in cluster j. All that matters is each cluster's signed
distance to the node's hyperplane **in units of length**, s_j = (v·x̄_j + ξ)/‖v‖; the papers print
the same formulas in v·x̄_j + ξ, which is right only for ‖v‖ = 1.
"""

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory.marginals import Marginal

_SUBSTANTIAL_MASS = 0.05  # of the positive cluster on the active side


class Expectations(NamedTuple):
    """E[ψ(v·x+ξ)] and E[x ψ(v·x+ξ)]."""

    activity: Array
    moment: Array


def expectations(
    marginal: Marginal,
    v: ArrayLike,
    mean: ArrayLike,
    bias: ArrayLike,
    *,
    basis: ArrayLike | None = None,
    slopes: tuple[float, float] = (0.0, 1.0),
) -> Expectations:
    """Lemma 1 (corrected): E[ψ] = θ₁(s) and E[xψ] = θ₁(s) x̄ + θ₂(s) v/‖v‖.

    Args:
        marginal: shape of the isotropic distribution along a line.
        v: weight, shape (…, n), not zero.
        mean: x̄, shape (…, n).
        bias: ξ, shape (…).
        basis: orthonormal columns (n, r) of the subspace in which x spreads about its mean, if
            not all of it; v is then projected on it, and the projection must not vanish.
        slopes: ψ below and above zero; (0, 1) is ReLU, (c₋, c₊) any homogeneous activation.

    Returns:
        E[ψ] of shape (…) and E[xψ] of shape (…, n).
    """
    marginal = _checks.instance("marginal", marginal, Marginal)
    v = _checks.at_least_1d("v", v)
    mean = _checks.at_least_1d("mean", mean)
    bias = _checks.finite("bias", bias)
    if v.shape[-1] != mean.shape[-1]:
        raise JomaError(f"mean must have the {v.shape[-1]} components of v, got {mean.shape[-1]}")
    _checks.together(v=v.shape[:-1], mean=mean.shape[:-1], bias=bias.shape)
    seen = v if basis is None else _project(v, basis)
    length = _checks.norm(seen)
    if np.any(length == 0):
        raise JomaError("v must not be zero in the subspace of x: it has no direction there")
    direction = seen / length[..., None]
    s = np.sum(v / length[..., None] * mean, axis=-1) + bias / length
    below, above = _checks.shape("slopes", _checks.finite("slopes", slopes), (2,)).tolist()
    activity = below + (above - below) * marginal.theta1(s)
    spread = (above - below) * marginal.theta2(s)
    moment = activity[..., None] * mean + spread[..., None] * direction
    return Expectations(activity, moment)


class Velocity(NamedTuple):
    """v̇ and ξ̇ of a node."""

    v: Array
    bias: Array


def velocity(
    marginal: Marginal, gradients: ArrayLike, means: ArrayLike, v: ArrayLike, bias: float
) -> Velocity:
    """Lemma 2 (Eqns 42-43, corrected): v̇ = Σ a_j E_j[xψ], ξ̇ = Σ a_j E_j[ψ] for ReLU.

    Args:
        marginal: shape of every cluster.
        gradients: a_j = E[g | cluster j] P[cluster j], shape (C,).
        means: x̄_j, shape (C, n).
        v: weight of the node, shape (n,).
        bias: its implicit bias ξ.
    """
    a = _checks.at_least_1d("gradients", gradients)
    means = _checks.shape("means", _checks.finite("means", means), (a.size, None))
    each = expectations(marginal, v, means, bias)
    return Velocity(a @ each.moment, np.asarray(a @ each.activity))


def distances(means: ArrayLike, v: ArrayLike, bias: float) -> Array:
    """Lemma 2: s_j = (v·x̄_j + ξ)/‖v‖, the signed distance of each cluster from the hyperplane."""
    v = _checks.shape("v", _checks.finite("v", v), (None,))
    means = _checks.at_least_1d("means", means)
    bias = _checks.scalar("bias", bias)
    if means.shape[-1] != v.size:
        raise JomaError(f"means must have the {v.size} components of v, got {means.shape[-1]}")
    return (means @ v + bias) / np.linalg.norm(v)


def radial_velocity(
    marginal: Marginal, gradients: ArrayLike, means: ArrayLike, v: ArrayLike, bias: float
) -> float:
    """Eqn 53 (corrected): v·v̇ = ‖v‖ Σ a_j F(s_j) - ξ ξ̇."""
    marginal = _checks.instance("marginal", marginal, Marginal)
    s = np.atleast_1d(distances(means, v, bias))
    a = _checks.shape("gradients", _checks.finite("gradients", gradients), s.shape)
    length = float(_checks.norm(_checks.at_least_1d("v", v)))
    drift = a @ marginal.theta1(s)
    return float(length * (a @ marginal.first_integral(s)) - bias * drift)


class CriticalPoint(NamedTuple):
    """Where a node rests between a negative cluster and a positive one.

    Attributes:
        s_minus: distance of the negative cluster from the hyperplane.
        s_plus: distance of the positive cluster.
        ratio: the a₋/a₊ at which, and only at which, the node rests.
    """

    s_minus: float
    s_plus: float
    ratio: float


def critical_points(marginal: Marginal, distance: float) -> list[CriticalPoint]:
    """Theorem 3 (Eqn 56, corrected): critical points for clusters `distance` apart.

    They need s₊ - s₋ = D and equal mean residual lives F/θ₁ at both; then a₋/a₊ = θ₁(s₊)/θ₁(s₋).
    Where F/θ₁ is injective there are none (Gaussian, logistic, uniform in a ball). Where it is
    flat over a stretch of length D or more (Laplace below zero) there is a continuum, of which the
    end with the largest s₊ is given. In (v, ξ) each point is a ray: the field is homogeneous.

    Args:
        marginal: shape of both clusters.
        distance: D = ‖x̄₊ - x̄₋‖ > 0.

    Returns:
        The points found, by increasing s₋; empty where none exist.
    """
    marginal = _checks.instance("marginal", marginal, Marginal)
    distance = _checks.positive_scalar("distance", distance)

    def gap(s: float) -> float:
        """Log ratio of the mean residual lives; relative, so that heavy tails keep their sign."""
        both = marginal.mean_residual(np.array([s + distance, s]))
        return float(np.log(both[0] / both[1]))

    grid = _two_sided_grid(min(marginal.reach, 1e6 * max(distance, 1.0)), distance)
    with np.errstate(invalid="ignore", divide="ignore"):
        gaps = np.log(marginal.mean_residual(grid + distance) / marginal.mean_residual(grid))
        usable = np.isfinite(gaps) & (marginal.theta1(grid) > marginal.least_mass)
    grid, gaps = grid[usable], gaps[usable]
    level = np.abs(gaps) < _rounding(marginal, grid) + _rounding(marginal, grid + distance)
    roots: list[float] = []
    steep = np.nonzero(~level)[0]
    for i, j in itertools.pairwise(steep):
        if gaps[i] * gaps[j] < 0:
            roots.append(float(optimize.brentq(gap, grid[i], grid[j], xtol=1e-14, rtol=1e-14)))
    # Equal lives up to a place of substantial mass are a continuum; farther out they may only
    # tend to one value.
    for i in np.nonzero(level[:-1] & ~level[1:])[0]:
        lone = i > 0 and not level[i - 1]
        if not lone and marginal.theta1(grid[i] + distance) > _SUBSTANTIAL_MASS:
            roots.append(_end_of_level(marginal, grid[i], grid[i + 1], distance))
    return [
        CriticalPoint(s, s + distance, float(marginal.theta1(s + distance) / marginal.theta1(s)))
        for s in sorted(roots)
    ]


def sufficient_condition(marginal: Marginal) -> float:
    """Eqn 58: θ₂(0) p(0); the paper asks ≥ ¼, which is sufficient but not necessary."""
    marginal = _checks.instance("marginal", marginal, Marginal)
    return float(marginal.theta2(0.0) * marginal.pdf(0.0))


class Jacobian(NamedTuple):
    """Eigenvalues of ∂v̇/∂v at a critical point, bias held fixed."""

    transverse: float
    longitudinal: float

    @property
    def stable(self) -> bool:
        """Whether the node returns from every small displacement of v."""
        return self.transverse < 0 and self.longitudinal < 0


def jacobian(
    marginal: Marginal, point: CriticalPoint, *, positive_gradient: float = 1.0, length: float = 1.0
) -> Jacobian:
    """Theorem 3 (Eqns 72-74, corrected) for x̄₋ = 0 and v ∥ x̄₊: the Jacobian in v at fixed ξ.

    Across μ it is -s_μ a₊ θ₁(s₊) ‖x̄₊‖/‖μ‖, along μ it is -(ξ²/‖μ‖³)[a₋ p(s₋) - a₊ p(s₊)].

    Args:
        marginal: shape of both clusters.
        point: a critical point; s_μ = 1 as s₊ > s₋.
        positive_gradient: a₊; a₋ is the point's ratio times it.
        length: ‖μ‖, which places the point on its ray.
    """
    marginal = _checks.instance("marginal", marginal, Marginal)
    point = _checks.instance("point", point, CriticalPoint)
    a_plus = _checks.positive_scalar("positive_gradient", positive_gradient)
    length = _checks.positive_scalar("length", length)
    distance, bias = point.s_plus - point.s_minus, point.s_minus * length
    a_minus = a_plus * point.ratio
    across = -a_plus * float(marginal.theta1(point.s_plus)) * distance / length
    balance = a_minus * marginal.pdf(point.s_minus) - a_plus * marginal.pdf(point.s_plus)
    return Jacobian(across, float(-(bias**2) / length**3 * balance))


def homogeneous_slopes(
    marginal: Marginal, s: ArrayLike, *, slopes: tuple[float, float] = (0.0, 1.0)
) -> tuple[Array, Array]:
    """Lemma 5 (Eqn 61, corrected): dθ₁/ds = (c₊-c₋) p(s), dθ₂/ds = -(c₊-c₋) s p(s)."""
    marginal = _checks.instance("marginal", marginal, Marginal)
    s = _checks.finite("s", s)
    below, above = _checks.shape("slopes", _checks.finite("slopes", slopes), (2,))
    jump = float(above - below)
    return jump * marginal.pdf(s), -jump * s * marginal.pdf(s)


def curve(marginal: Marginal, s: ArrayLike) -> tuple[Array, Array]:
    """Fig. 9 (Eqn 57): the curve y = θ₁(s), G(y) = F(s); two points on a line through 0 rest."""
    marginal = _checks.instance("marginal", marginal, Marginal)
    s = _checks.finite("s", s)
    return marginal.theta1(s), marginal.first_integral(s)


def curve_slope(marginal: Marginal, s: ArrayLike) -> Array:
    """After Eqn 57: dG/dy = θ₁(s)/p(s) at y = θ₁(s)."""
    marginal = _checks.instance("marginal", marginal, Marginal)
    s = _checks.finite("s", s)
    return marginal.theta1(s) / marginal.pdf(s)


def balance(marginal: Marginal, gradients: ArrayLike, s: ArrayLike) -> float:
    """Lemma 4 (Eqns 54-55): Σ a_j F(s_j), which vanishes at every critical point."""
    marginal = _checks.instance("marginal", marginal, Marginal)
    s = _checks.at_least_1d("s", s)
    gradients = _checks.shape("gradients", _checks.finite("gradients", gradients), s.shape)
    return float(np.sum(gradients * marginal.first_integral(s)))


def _project(v: Array, basis: ArrayLike) -> Array:
    columns = _checks.shape("basis", _checks.finite("basis", basis), (v.shape[-1], None))
    if not np.allclose(columns.T @ columns, np.eye(columns.shape[1]), atol=1e-8):
        raise JomaError("basis must have orthonormal columns")
    return (v @ columns) @ columns.T


def _rounding(marginal: Marginal, s: Array) -> Array:
    """Relative rounding error of the mean residual life: that of θ₁ and θ₂ before they cancel."""
    terms = marginal.theta2(s) + np.abs(s) * marginal.theta1(s)
    total = marginal.mean_residual(s) * marginal.theta1(s)
    return marginal.noise * terms / np.where(total > 0, total, np.inf)


def _two_sided_grid(reach: float, distance: float) -> Array:
    """Fine near zero, geometric far out: heavy tails turn at any scale."""
    far = np.geomspace(1e-3, reach, 600)
    fine = np.linspace(-2 * distance, distance, 401)
    grid = np.concatenate([-far[::-1], [0.0], far, fine])
    return np.unique(grid[(grid >= -reach) & (grid <= min(60.0, reach) + distance)])


def _end_of_level(marginal: Marginal, inside: float, outside: float, distance: float) -> float:
    """The s at which the mean residual life begins to rise at s + distance, by bisection."""
    for _ in range(80):
        middle = (inside + outside) / 2
        at = middle + distance
        slope = 1 - marginal.mean_residual(at) * marginal.pdf(at) / marginal.theta1(at)
        inside, outside = (middle, outside) if slope < 1e-9 else (inside, middle)
    return float(inside)

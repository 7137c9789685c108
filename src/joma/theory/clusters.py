"""Nonlinear activation without attention: Lemmas 1-5 and Theorem 3, for isotropic clusters.

Tokens come from clusters at x̄_j, each of an isotropic shape (a `Marginal`), and node v with
implicit bias ξ receives the gradient a_j in cluster j. All that matters is each cluster's signed
distance to the node's hyperplane **in units of length**, s_j = (v·x̄_j + ξ)/‖v‖; the papers print
the same formulas in v·x̄_j + ξ, which is right only for ‖v‖ = 1.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory._rest_points import CriticalPoint, critical_points, fixed_bias_ratio
from joma.theory._stability import (
    Eigenvalues,
    Jacobian,
    Marginals,
    Phase,
    distances,
    each,
    eigenvalues,
    full_jacobian,
    is_stable,
    jacobian,
    phase,
    resting_gradients,
)
from joma.theory.marginals import Marginal

__all__ = [
    "CriticalPoint",
    "Eigenvalues",
    "Expectations",
    "Jacobian",
    "Marginals",
    "Phase",
    "Velocity",
    "balance",
    "critical_points",
    "curve",
    "curve_slope",
    "distances",
    "eigenvalues",
    "expectations",
    "fixed_bias_ratio",
    "full_jacobian",
    "homogeneous_slopes",
    "is_stable",
    "jacobian",
    "phase",
    "potential",
    "radial_velocity",
    "resting_gradients",
    "straddles",
    "sufficient_condition",
    "velocity",
]


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
    v = _checks.at_least_1d("v", v)
    mean = _checks.at_least_1d("mean", mean)
    bias = _checks.finite("bias", bias)
    if v.shape[-1] != mean.shape[-1]:
        raise JomaError(f"mean must have the {v.shape[-1]} components of v, got {mean.shape[-1]}")
    seen = v if basis is None else _project(v, basis)
    length = _checks.norm(seen)
    if np.any(length == 0):
        raise JomaError("v must not be zero in the subspace of x: it has no direction there")
    direction = seen / length[..., None]
    s = np.sum(v / length[..., None] * mean, axis=-1) + bias / length
    below, above = _checks.finite("slopes", slopes, (2,)).tolist()
    activity = below + (above - below) * marginal.theta1(s)
    spread = (above - below) * marginal.theta2(s)
    moment = activity[..., None] * mean + spread[..., None] * direction
    return Expectations(activity, moment)


class Velocity(NamedTuple):
    """v̇ and ξ̇ of a node."""

    v: Array
    bias: Array


def velocity(
    marginal: Marginals, gradients: ArrayLike, means: ArrayLike, v: ArrayLike, bias: float
) -> Velocity:
    """Lemma 2 (Eqns 42-43, corrected): v̇ = Σ a_j E_j[xψ], ξ̇ = Σ a_j E_j[ψ] for ReLU.

    Args:
        marginal: shape of every cluster, or a list of one for each.
        gradients: a_j = E[g | cluster j] P[cluster j], shape (C,).
        means: x̄_j, shape (C, n).
        v: weight of the node, shape (n,).
        bias: its implicit bias ξ.
    """
    a = _checks.shape("gradients", _checks.at_least_1d("gradients", gradients), (None,))
    means = _checks.finite("means", means, (a.size, None))
    shapes = each(marginal, a.size)
    seen = [expectations(one, v, mean, bias) for one, mean in zip(shapes, means, strict=True)]
    moments = np.stack([one.moment for one in seen])
    return Velocity(a @ moments, np.asarray(a @ np.stack([one.activity for one in seen])))


def potential(
    marginal: Marginals, gradients: ArrayLike, means: ArrayLike, v: ArrayLike, bias: float
) -> float:
    """Lemma 4 (new): Φ = E[g φ(v·x+ξ)] = ‖v‖ Σ a_j F(s_j), whose gradient in (v, ξ) is the flow.

    It is homogeneous of degree one, so that v·v̇ + ξ ξ̇ = Φ by Euler's theorem: ‖(v, ξ)‖² changes at
    the rate 2Φ, and Φ = 0 where a node rests. As Φ never falls, a node with Φ > 0 grows for ever.

    Args:
        marginal: shape of every cluster, or a list of one for each.
        gradients: a_j, shape (C,).
        means: x̄_j, shape (C, n).
        v: weight of the node, shape (n,), not zero.
        bias: its implicit bias ξ.
    """
    s = np.atleast_1d(distances(means, v, bias))
    length = float(_checks.norm(_checks.at_least_1d("v", v)))
    return length * balance(marginal, gradients, s)


def radial_velocity(
    marginal: Marginals, gradients: ArrayLike, means: ArrayLike, v: ArrayLike, bias: float
) -> float:
    """Eqn 53 (corrected): v·v̇ = ‖v‖ Σ a_j F(s_j) - ξ ξ̇."""
    s = np.atleast_1d(distances(means, v, bias))
    a = _checks.finite("gradients", gradients, s.shape)
    shares = [float(one.theta1(at)) for one, at in zip(each(marginal, s.size), s, strict=True)]
    return potential(marginal, a, means, v, bias) - bias * float(a @ np.array(shares))


def sufficient_condition(marginal: Marginal) -> float:
    """Eqn 58: θ₂(0) p(0); above ¼ the mean residual life F/θ₁ falls at s = 0, by 1 - 4 θ₂(0) p(0).

    Above ¼ there are critical points for every distance that is small enough, and for every
    distance at all if F/θ₁ → ∞ as s → -∞. At ¼ there are if p is differentiable at 0, and there may
    be none if it is not. The condition is not necessary: Student's t₃ and t₅ have critical points
    at every distance with 0.203 and 0.180.
    """
    return float(marginal.theta2(0.0) * marginal.pdf(0.0))


def straddles(marginal: Marginal, distance: float) -> bool:
    """Section A.4 (made precise): whether clusters at rest lie on either side, s₊ > 0 > s₋.

    For a mean residual life m = F/θ₁ that falls up to some place and rises from it on, as for
    Student's t, the node between clusters of one shape does so if and only if m(-D) > m(0) < m(D).
    For t of df > 2 that is so from a distance on that grows with df; for Laplace clusters it is
    never so.

    Args:
        marginal: shape of both clusters.
        distance: D = ‖x̄₊ - x̄₋‖ > 0.
    """
    distance = _checks.positive_scalar("distance", distance)
    below, at, above = marginal.mean_residual(np.array([-distance, 0.0, distance]))
    return bool(below > at < above)


def homogeneous_slopes(
    marginal: Marginal, s: ArrayLike, *, slopes: tuple[float, float] = (0.0, 1.0)
) -> tuple[Array, Array]:
    """Lemma 5 (Eqn 61, corrected): dθ₁/ds = (c₊-c₋) p(s), dθ₂/ds = -(c₊-c₋) s p(s)."""
    s = _checks.finite("s", s)
    below, above = _checks.finite("slopes", slopes, (2,))
    jump = float(above - below)
    return jump * marginal.pdf(s), -jump * s * marginal.pdf(s)


def curve(marginal: Marginal, s: ArrayLike) -> tuple[Array, Array]:
    """Fig. 9 (Eqn 57): the curve y = θ₁(s), G(y) = F(s); two points on a line through 0 rest."""
    s = _checks.finite("s", s)
    return marginal.theta1(s), marginal.first_integral(s)


def curve_slope(marginal: Marginal, s: ArrayLike) -> Array:
    """After Eqn 57: dG/dy = θ₁(s)/p(s) at y = θ₁(s), for s inside the support."""
    s = _checks.finite("s", s)
    slope = marginal.inverse_hazard(s)
    if np.any(np.isnan(slope)):
        raise JomaError(
            "s must leave a part of the cluster on the active side, "
            f"got {float(np.ravel(s)[np.isnan(np.ravel(slope))][0])}"
        )
    return slope


def balance(marginal: Marginals, gradients: ArrayLike, s: ArrayLike) -> float:
    """Lemma 4 (Eqns 54-55): Σ a_j F(s_j), which vanishes at every critical point."""
    s = _checks.shape("s", _checks.at_least_1d("s", s), (None,))
    gradients = _checks.finite("gradients", gradients, s.shape)
    shapes = each(marginal, s.size)
    integrals = [float(one.first_integral(at)) for one, at in zip(shapes, s, strict=True)]
    return float(gradients @ np.array(integrals))


def _project(v: Array, basis: ArrayLike) -> Array:
    columns = _checks.finite("basis", basis, (v.shape[-1], None))
    if not np.allclose(columns.T @ columns, np.eye(columns.shape[1]), atol=1e-8):
        raise JomaError("basis must have orthonormal columns")
    return (v @ columns) @ columns.T

"""Section 4 as printed: distances are not divided by ‖v‖, and what follows from that."""

import numpy as np
from numpy.typing import ArrayLike

from joma.theory._checks import Array
from joma.theory._stability import each
from joma.theory.clusters import CriticalPoint, Expectations, Jacobian, Marginals, Velocity
from joma.theory.marginals import Marginal


def expectations(
    marginal: Marginal, v: ArrayLike, mean: ArrayLike, bias: float, *, basis: Array | None = None
) -> Expectations:
    """Lemma 1 (Eqn 23): E[ψ] = θ₁(r)/‖v‖, E[xψ] = θ₁(r)/‖v‖ x̄ + θ₂(r)/‖v‖³ RRᵀv, r = v·x̄ + ξ."""
    v, mean = np.asarray(v, dtype=np.float64), np.asarray(mean, dtype=np.float64)
    seen = v if basis is None else v @ basis @ basis.T
    length = np.linalg.norm(seen, axis=-1)
    r = np.sum(v * mean, axis=-1) + bias
    activity = marginal.theta1(r) / length
    spread = (marginal.theta2(r) / length**3)[..., None] * seen
    return Expectations(activity, activity[..., None] * mean + spread)


def radial_velocity(
    marginal: Marginals, gradients: ArrayLike, means: ArrayLike, v: ArrayLike, bias: float
) -> float:
    """Eqn 53: v·v̇ = (Σ a_j F(r_j) - ‖v‖ ξ ξ̇)/‖v‖, with r_j = v·x̄_j + ξ."""
    v, a = np.asarray(v, dtype=np.float64), np.asarray(gradients, dtype=np.float64)
    r = np.asarray(means, dtype=np.float64) @ v + bias
    length = np.linalg.norm(v)
    pairs = list(zip(each(marginal, r.size), r, strict=True))
    shares = np.array([float(one.theta1(at)) for one, at in pairs])
    integrals = np.array([float(one.first_integral(at)) for one, at in pairs])
    return float((a @ integrals - length * bias * (a @ shares / length)) / length)


def velocity(
    marginal: Marginals, gradients: ArrayLike, means: ArrayLike, v: ArrayLike, bias: float
) -> Velocity:
    """Lemma 2 (Eqns 42-43): Lemma 1 as printed, summed over the clusters."""
    a, means = np.asarray(gradients, dtype=np.float64), np.asarray(means, dtype=np.float64)
    seen = [
        expectations(one, v, mean, bias)
        for one, mean in zip(each(marginal, a.size), means, strict=True)
    ]
    moments = np.stack([one.moment for one in seen])
    return Velocity(a @ moments, np.asarray(a @ np.stack([one.activity for one in seen])))


def homogeneous_slopes(
    marginal: Marginal, s: ArrayLike, *, slopes: tuple[float, float] = (0.0, 1.0)
) -> tuple[Array, Array]:
    """Lemma 5 (Eqn 61): (c₋+c₊) p(s) and -(c₋+c₊) s p(s)."""
    total = slopes[0] + slopes[1]
    s = np.asarray(s, dtype=np.float64)
    return total * marginal.pdf(s), -total * s * marginal.pdf(s)


def jacobian(
    marginal: Marginal,
    point: CriticalPoint,
    *,
    negative: Marginal | None = None,
    positive_gradient: float = 1.0,
    length: float = 1.0,
) -> Jacobian:
    """Theorem 3 (Eqns 72-74): -C(μ), C = β₁ I + β₂ μμᵀ, with θ₁ at r₊ = ‖μ‖ s₊ and its slope."""
    del negative  # print has one θ₁ for both clusters
    distance, bias = point.s_plus - point.s_minus, point.s_minus * length
    r_plus = point.s_plus * length
    share = float(marginal.theta1(r_plus))
    common = positive_gradient * distance
    beta1 = common / length**2 * share
    beta2 = common / length**4 * (bias * float(marginal.pdf(r_plus)) - 2 * share)
    return Jacobian(-beta1, -(beta1 + beta2 * length**2))

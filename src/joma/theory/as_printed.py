"""Formulas as the papers print them, where derivation or measurement says otherwise.

Nothing here should be used to compute: these exist so that `joma verify` can measure how far the
printed form is from the truth. Each has its corrected twin of the same name in `joma.theory`, named
by the heading above it; bounds that are true but loose are here too.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory._stability import each
from joma.theory.cdag import corr
from joma.theory.clusters import CriticalPoint, Expectations, Jacobian, Marginals, Velocity
from joma.theory.functions import Activation
from joma.theory.marginals import Marginal
from joma.theory.scan_snap import Balanced

# `linear`: Theorem 2.


def conserved_ratio(delta: ArrayLike, v: ArrayLike) -> Array:
    """Theorem 2 (Eqn 4): erf(v_l/2)/Δ_l; the argument lacks a √2."""
    return special.erf(np.asarray(v) / 2) / np.asarray(delta, dtype=np.float64)


# `clusters`: Section 4, clusters: distances are not divided by ‖v‖, and what follows from that.


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


# `nonlinear`: Theorem 4.


def offset_bound() -> float:
    """Theorem 4 (Eqn 88): 0 ≤ F - e^{-μ²/2} ln(1/δ) ≤ √(π/2) + 1; true, and loose."""
    return float(np.sqrt(np.pi / 2) + 1)


def leading_time(log_residual: ArrayLike, mu: ArrayLike) -> Array:
    """After Eqn 88: F → e^{-μ²} ln(1/δ) near convergence, with e^{-μ²} for e^{-μ²/2}."""
    return -np.exp(-(np.asarray(mu) ** 2)) * np.asarray(log_residual)


def settled_threshold(mu: ArrayLike) -> Array:
    """Theorem 4, closing line: ln δ_k must be far below -(√(2π)+2) e^{-μ_k²}."""
    return -(np.sqrt(2 * np.pi) + 2) * np.exp(-(np.asarray(mu, dtype=np.float64) ** 2))


# `hblt`: Section 5 and appendix A.5, hierarchical binary latent trees.


def root_uncertainty(class_probs: ArrayLike, child_off_probs: ArrayLike) -> Array:
    """Theorem 5's ρ₀ as printed, Σ_k p₀(k)P[y=0|k]: a probability where 2P − 1 is meant.

    The slip enters at Eqn 101, which writes ½(1 + P[y=0|k]) for P[y=0|k].
    """
    class_probs, child_off_probs = _checks.class_arguments(class_probs, child_off_probs)
    return np.clip(np.sum(class_probs * child_off_probs, axis=-1), 0, 1)


def cooccurrence_near_one(height: ArrayLike, depth: ArrayLike, epsilon: ArrayLike) -> Array:
    """Eqn 8 as printed, 1 − H/L + O(ε²): without the term in ε.

    At H = 0 and H = L/2 that term vanishes and the rest is exact; elsewhere the error is O(ε).
    """
    height, depth = _checks.heights(height, depth)
    epsilon = _checks.within("epsilon", epsilon, 0, 1)
    return 1 - height / depth + 0 * epsilon


# `embeddings`: Section A.4.


def superposed(patterns: Array, queries: Array, biases: Array) -> Array:
    """Section A.4, pattern superposition: w = Σ_m v_m - ξ_m u_m, the bias with the wrong sign."""
    return np.sum(patterns - biases[:, None] * queries, axis=0)


# `cdag`: The CDAG note: Theorem 1, its recursion step and Eqn 3.


def correlation_bound(theta_1: ArrayLike, theta_2: ArrayLike, theta_3: ArrayLike) -> Array:
    """Theorem 1 as printed: three positive correlations make corr(z_β, g_{j→k}) positive.

    Returns 0 where the premises hold and −1, the least value there is, where it says nothing.
    """
    angles = np.broadcast_arrays(
        _checks.within("theta_1", theta_1, 0, np.pi),
        _checks.within("theta_2", theta_2, 0, np.pi),
        _checks.within("theta_3", theta_3, 0, np.pi),
    )
    premises = (angles[0] < np.pi / 2) & (angles[1] < np.pi / 2) & (angles[2] != np.pi / 2)
    return np.where(premises, 0.0, -1.0)


def recursion_bound(
    z_beta: ArrayLike, g: ArrayLike, slope_min: ArrayLike, slope_max: ArrayLike
) -> Array:
    """Recursion step after Theorem 1 as printed: a positive corr(z_β, g_k) survives σ′_k.

    Returns 0 where corr(z_β, g_k) > 0 and −∞, no bound, elsewhere.
    """
    del slope_min, slope_max
    return np.where(corr(z_beta, g) > 0, 0.0, -np.inf)


def label_flow(
    w: ArrayLike,
    x_plus: ArrayLike,
    x_minus: ArrayLike,
    z_alpha: ArrayLike,
    g: ArrayLike,
    nonlinearity: Activation,
) -> Array:
    """Eqn 3 as printed: E[g | z_α = 1] set to 1 and E[g | z_α = 0] to −1, whatever g is."""
    del g
    weights, plus, minus, z = (
        np.asarray(a, dtype=np.float64) for a in (w, x_plus, x_minus, z_alpha)
    )
    rise = nonlinearity.derivative(weights @ plus) * plus
    fall = nonlinearity.derivative(weights @ minus) * minus
    return np.mean(z) * rise - np.mean(1 - z) * fall


# `scan_snap`: Scan&Snap, as the talk prints it.


def late_b(
    t: ArrayLike, balanced: Balanced, *, anchor: tuple[float, float], eta_y: float, eta_z: float
) -> Array:
    """Scan&Snap Theorem 4 as printed: B ~ ln(C₀ + 2K(η_Z/η_Y) ln²(Mη_Y t/K)).

    `anchor`, a late time and B there, fixes C₀, which the talk leaves open.
    """
    times = _checks.positive("t", t)
    start, b_start = anchor
    corpus = balanced.corpus
    scale = corpus.tokens * eta_y / corpus.classes
    grown = np.log(scale * times) ** 2 - np.log(scale * start) ** 2
    return np.log(np.exp(b_start) + 2 * corpus.classes * eta_z / eta_y * grown)

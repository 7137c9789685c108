"""How far the printed statement of each erratum is off, relatively, in one plain example.

The examples use SciPy's distributions and no function of `joma.theory`.
"""

from typing import Any

import numpy as np
from scipy import optimize, special, stats


def loser_limit() -> float:
    """Limit of v_l for Δ_l = Δ_max/2: 2 erfinv(½) as printed, √2 erfinv(½) as derived."""
    return float(2 * special.erfinv(0.5) / (np.sqrt(2) * special.erfinv(0.5)) - 1)


def softmax_velocity() -> float:
    """ż by Eqn 17 where g₂ = -g₁, so that both sides of the printed condition vanish."""
    b = np.array([[0.6, 0.3, 0.1], [0.1, 0.3, 0.6]])
    difference = np.array([1.0, 0.0, -1.0])  # v₁ - v₂
    mean = b.mean(axis=0)  # E[g₁ b] too, for g₁ = 1
    velocity = mean * difference - b.T @ b @ difference / len(b)
    predicted = mean * difference - mean * (mean @ difference)
    return float(np.linalg.norm(predicted - velocity) / np.linalg.norm(velocity))


def firing_probability() -> float:
    """P[v·x + ξ > 0] for a standard Gaussian x, ‖v‖ = ½ and ξ = 1: Φ(1)/½ against Φ(2)."""
    return float(2 * special.ndtr(1.0) / special.ndtr(2.0) - 1)


def bias_velocity() -> float:
    """ξ̇ of two Gaussian clusters, a = (1, -½), at v·x̄ = (2, 0), ‖v‖ = 2, ξ = -1."""
    a, r, length = np.array([1.0, -0.5]), np.array([1.0, -1.0]), 2.0
    return _relative(a @ special.ndtr(r) / length, a @ special.ndtr(r / length))


def radial_velocity() -> float:
    """v·v̇ + ξξ̇ of the same node: Σ a F(r)/‖v‖ as printed, ‖v‖ Σ a F(r/‖v‖) as derived."""
    a, r, length = np.array([1.0, -0.5]), np.array([1.0, -1.0]), 2.0
    return _relative(
        a @ _gaussian_integral(r) / length, length * a @ _gaussian_integral(r / length)
    )


def balance() -> float:
    """Share of Σ a_j F(r_j) that is left at a rest point of Laplace clusters, ‖v‖ = 2, D = 1.

    Below zero F(s) = θ₁(s) = eˢ/2, so that both equations hold at a₋/a₊ = e^D.
    """
    return float(1 - np.exp(1.0) * np.exp(-2.0))


def longitudinal_eigenvalue() -> float:
    """C along μ at the rest point of t₃ clusters with D = 2 and ‖μ‖ = 1: -2.31 against 0.87."""
    t, distance = stats.t(3), 2.0

    def mean_residual_life(s: float) -> float:
        return s + 1.5 * (1 + s**2 / 3) * t.pdf(s) / t.cdf(s)

    s = optimize.brentq(lambda s: mean_residual_life(s + distance) - mean_residual_life(s), -8, 0.5)
    ratio = t.cdf(s + distance) / t.cdf(s)
    derived = s**2 * (ratio * t.pdf(s) - t.pdf(s + distance))
    return _relative(distance * (s * t.pdf(s + distance) - t.cdf(s + distance)), derived)


def leaky_slope() -> float:
    """dθ₁/dr of a leaky ReLU of slope 0.1: 1.1 p(r) as printed, 0.9 p(r) as derived."""
    return _relative(1.1, 0.9)


def tilted_velocity() -> float:
    """‖v̇‖ over a₊θ₁(s₊)‖x̄₊ - x̄₋‖ where Eqn 56 holds and v is tilted by 30°: sin 30°."""
    return float(np.sin(np.pi / 6))


def settling_threshold() -> float:
    """Threshold of ln δ_k at μ_k = 2: e^{-4} in place of e^{+2}."""
    return _relative(np.exp(-4.0), np.exp(2.0))


def leading_coefficient() -> float:
    """Factor of ln(1/δ) at μ = 1: e^{-1} in place of e^{-1/2}."""
    return _relative(np.exp(-1.0), np.exp(-0.5))


def superposed_activation() -> float:
    """Input of the node where its pattern gives v·b = 1 and ξ = -½: 1 + ½ in place of 1 - ½."""
    return _relative(1.5, 0.5)


def cooccurrence() -> float:
    """P[y_l=1|y_m=1] with L = 4, H = 1, ρ = 0.9, one of 10 equal classes on: ρ₀ = 0.9, not 0.8."""

    def probability(rho0: float) -> float:
        rho, height, depth = 0.9, 1, 4
        top = rho ** (depth - 1) * rho0
        return (1 + rho ** (2 * height) - 2 * top) / (1 - top) / 2

    return _relative(probability(0.9), probability(0.8))


def near_one() -> float:
    """1 - H/L against Theorem 5 with ρ = ρ₀ = 1 - ε, ε = 0.05, L = 10 and H = 1."""
    rho, height, depth = 0.95, 1, 10
    top = rho**depth
    return _relative(1 - height / depth, (1 + rho ** (2 * height) - 2 * top) / (1 - top) / 2)


def correlation_sign() -> float:
    """corr(z_β, g) = cos 60° cos 120° = -¼ with C₁ = C₂ = C₃ = ½, where at least 0 is promised."""
    return _relative(0.0, np.cos(np.pi / 3) * np.cos(2 * np.pi / 3))


def _gaussian_integral(s: np.ndarray) -> np.ndarray:
    """F(s) = θ₂(s) + s θ₁(s) of a standard Gaussian."""
    return stats.norm.pdf(s) + s * special.ndtr(s)


def _relative(printed: Any, derived: Any) -> float:
    return float(abs(printed - derived) / abs(derived))

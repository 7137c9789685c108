"""Lemmas 1-5: how isotropic clusters drive a node, without attention."""

import itertools
from typing import Any

import numpy as np
from scipy import integrate, special

from joma.errors import JomaError
from joma.experiments.claims._claim import Claim, Formula, Measurement, monte_carlo
from joma.theory import clusters, marginals
from joma.theory.as_printed import clusters as printed
from joma.theory.marginals import Ball, Gaussian, Laplace, Logistic, Marginal, StudentT, Uniform

FAMILIES: tuple[Marginal, ...] = (
    Gaussian(),
    StudentT(3),
    StudentT(5),
    Laplace(),
    Logistic(),
    Uniform(),
    Ball(4),
)
"""Isotropic shapes that the claims are tried on."""


def integrals(marginal: Marginal, s: float) -> tuple[float, float]:
    """θ₁ and θ₂ from the density alone, by quadrature."""
    end = marginal.reach
    if -s >= end:
        return 0.0, 0.0
    start = max(-s, -end)
    middle = max(start, min(30.0, end))
    parts: list[Any] = [
        integrate.quad(
            lambda u, power=power: float(marginal.pdf(u)) * u**power,
            *limits,
            points=[0.0] if limits[0] < 0 < limits[1] < np.inf else None,
            epsabs=1e-13,
            epsrel=1e-11,
            limit=200,
        )[0]
        for power in (0, 1)
        for limits in ((start, middle), (middle, end))
        if limits[0] < limits[1]
    ]
    half = len(parts) // 2
    return float(sum(parts[:half])), float(sum(parts[half:]))


def _isotropic(marginal: Marginal, n: int, size: int, rng: np.random.Generator) -> Any:
    """Points of n dimensions whose every projection has the given marginal."""
    normal = rng.normal(size=(size, n))
    match marginal:
        case Gaussian():
            return normal
        case StudentT(df):
            return normal * np.sqrt(df / rng.chisquare(df, size=(size, 1)))
        case Laplace():
            return normal * np.sqrt(2 * rng.exponential(size=(size, 1)))
        case Ball():
            unit = normal / np.linalg.norm(normal, axis=1, keepdims=True)
            return unit * rng.random((size, 1)) ** (1 / n)
        case _:
            raise JomaError(f"marginal {marginal} has no sampler")


def _moments(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Monte Carlo with ‖v‖ = 2.3, in all three dimensions and in a plane of them."""
    differences, errors = [], []
    plane = np.linalg.qr(rng.normal(size=(3, 2)))[0]
    for marginal, basis in (
        (Gaussian(), np.eye(3)),
        (StudentT(5), plane),
        (Ball(3), np.eye(3)),
    ):
        v = rng.normal(size=3)
        v *= 2.3 / np.linalg.norm(v)
        mean, bias = 0.3 * rng.normal(size=3), 0.2
        x = mean + _isotropic(marginal, basis.shape[1], 100_000, rng) @ basis.T
        active = (x @ v + bias > 0).astype(float)
        drawn = np.column_stack([active, active[:, None] * x])
        activity, moment = formula(marginal, v, mean, bias, basis=basis)
        differences.append(drawn.mean(axis=0) - np.array([activity, *moment]))
        errors.append(drawn.std(axis=0, ddof=1) / np.sqrt(len(drawn)))
    return monte_carlo(np.concatenate(differences), np.concatenate(errors))


def _flow(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Monte Carlo of E[g h′ x] and E[g h′] over a mixture of three clusters."""
    means, a = rng.normal(size=(3, 4)), np.array([0.8, -0.5, 0.4])
    v, bias = 1.7 * rng.normal(size=4), -0.3
    draws = 60_000
    total, variance = np.zeros(5), np.zeros(5)
    for mean, weight in zip(means, a, strict=True):
        x = mean + _isotropic(StudentT(5), 4, draws, rng)
        active = (x @ v + bias > 0).astype(float)
        drawn = weight * np.column_stack([active[:, None] * x, active])
        total += drawn.mean(axis=0)
        variance += drawn.var(axis=0, ddof=1) / draws
    rate = formula(StudentT(5), a, means, v, bias)
    return monte_carlo(total - np.array([*rate.v, rate.bias]), np.sqrt(variance))


def _first_integral(formula: Formula, rng: np.random.Generator) -> Measurement:
    """F(b) - F(a) against ∫ θ₁ with θ₁ from the density, and F far below zero against 0."""
    worst = 0.0
    nodes, weights = np.polynomial.legendre.leggauss(12)
    for marginal in FAMILIES:
        low, high = np.sort(rng.uniform(-0.9, 0.9, size=2))
        cuts = [low, 0.0, high] if low < 0 < high else [low, high]
        total = 0.0
        for a, b in itertools.pairwise(cuts):
            shares = [integrals(marginal, float((a + b) / 2 + (b - a) / 2 * x))[0] for x in nodes]
            total += (b - a) / 2 * float(weights @ shares)
        difference = float(formula(marginal, high) - formula(marginal, low))
        worst = max(worst, abs(difference - total), abs(float(formula(marginal, -1e5))) - 1e-4)
    return Measurement(worst, 1e-8)


def _radial(formula: Formula, rng: np.random.Generator) -> Measurement:
    """v·v̇ = Σ a_j E[(v·x) ψ], where v·x is one-dimensional: quadrature of the density."""
    worst = 0.0
    for marginal in (Gaussian(), StudentT(3), Laplace()):
        means, a = rng.normal(size=(2, 3)), np.array([0.9, -0.6])
        v, bias = 2 * rng.normal(size=3), -0.2
        length = np.linalg.norm(v)
        direct = 0.0
        for weight, center in zip(a, means @ v, strict=True):
            theta1, theta2 = integrals(marginal, float((center + bias) / length))
            direct += weight * (center * theta1 + length * theta2)
        worst = max(worst, abs(formula(marginal, a, means, v, bias) - direct))
    return Measurement(float(worst), 1e-8)


def _slopes(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Central differences of θ₁ and θ₂ of a leaky ReLU, themselves by quadrature."""
    below, above = 0.2, 1.0
    worst = 0.0
    for marginal in (Gaussian(), StudentT(3)):
        s, step = float(rng.uniform(-1, 1)), 1e-3

        def leaky(at: float, marginal: Marginal = marginal) -> Any:
            theta1, theta2 = integrals(marginal, at)
            return np.array([below + (above - below) * theta1, (above - below) * theta2])

        difference = (leaky(s + step) - leaky(s - step)) / (2 * step)
        ours = np.array(formula(marginal, s, slopes=(below, above)))
        worst = max(worst, float(np.max(np.abs(ours - difference))))
    return Measurement(worst, 1e-6)


def _sphere(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The marginal of a normalised n-dimensional density must integrate to one."""
    del rng
    worst = 0.0
    for n in (2, 3, 4, 5, 8):
        # p₀(‖x‖) = (2π)^{-n/2} e^{-‖x‖²/2} factors into the two integrals of Eqn 35.
        along = np.sqrt(2 * np.pi)
        across: Any = integrate.quad(lambda x, n=n: x ** (n - 2) * np.exp(-(x**2) / 2), 0, np.inf)
        mass = formula(n) * along * across[0] / (2 * np.pi) ** (n / 2)
        worst = max(worst, abs(mass - 1))
    return Measurement(float(worst), 1e-9)


def _ball(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The mass of the marginal in eight slabs against the share of drawn points in each."""
    n, draws = 4, 200_000
    u = _isotropic(Ball(n), n, draws, rng)[:, 0]
    edges = np.linspace(-1, 1, 9)
    share = np.histogram(u, edges)[0] / draws
    mass = np.array(
        [integrate.quad(lambda x: formula(n, x), a, b)[0] for a, b in itertools.pairwise(edges)]
    )
    return monte_carlo(share - mass, np.sqrt(share * (1 - share) / draws))


def _factorials(n: int) -> float:
    """Eqn 36: the same constant by factorials, for even and for odd n."""
    if n % 2 == 0:
        return float(2 ** (n / 2) * np.pi ** (n / 2 - 1) / special.factorial2(max(n - 3, 0)))
    return float(2 * np.pi ** ((n - 1) / 2) / special.factorial((n - 3) // 2))


def _curve(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    for marginal in (Gaussian(), StudentT(3), Logistic()):
        s, step = float(rng.uniform(-1, 1)), 1e-3
        (y0, g0), (y1, g1) = (
            (theta1, theta2 + at * theta1)
            for at in (s - step, s + step)
            for theta1, theta2 in [integrals(marginal, at)]
        )
        worst = max(worst, abs(float(formula(marginal, s)) * (y1 - y0) / (g1 - g0) - 1))
    return Measurement(worst, 1e-5)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="lemma1",
        title="E[ψ] = θ₁(s), E[xψ] = θ₁(s) x̄ + θ₂(s) v/‖v‖, s = (v·x̄+ξ)/‖v‖",
        source="JoMA preprint, Lemma 1 (Eqn 23)",
        method="Monte Carlo, three families in three dimensions, ‖v‖ = 2.3",
        derived=clusters.expectations,
        printed=printed.expectations,
        measure=_moments,
    ),
    Claim(
        id="lemma2",
        title="v̇ = Σ a_j (θ₁(s_j) x̄_j + θ₂(s_j) v/‖v‖), ξ̇ = Σ a_j θ₁(s_j)",
        source="JoMA preprint, Lemma 2 (Eqns 42-43, 50)",
        method="Monte Carlo over a mixture of three t₅ clusters",
        derived=clusters.velocity,
        printed=printed.velocity,
        measure=_flow,
    ),
    Claim(
        id="lemma3",
        title="F = θ₂ + sθ₁ has the derivative θ₁ and vanishes far below zero",
        source="JoMA preprint, Lemma 3 (Eqns 48-49)",
        method="quadrature of θ₁, itself a quadrature of seven densities",
        derived=lambda marginal, s: marginal.first_integral(s),
        measure=_first_integral,
    ),
    Claim(
        id="eqn53",
        title="v·v̇ = ‖v‖ Σ a_j F(s_j) - ξ ξ̇",
        source="JoMA preprint, Eqn 53",
        method="quadrature of the density along v",
        derived=clusters.radial_velocity,
        printed=printed.radial_velocity,
        measure=_radial,
    ),
    Claim(
        id="lemma5",
        title="dθ₁/ds = (c₊-c₋) p(s), dθ₂/ds = -(c₊-c₋) s p(s)",
        source="JoMA preprint, Lemma 5 (Eqn 61)",
        method="central differences for a leaky ReLU, by quadrature",
        derived=clusters.homogeneous_slopes,
        printed=printed.homogeneous_slopes,
        measure=_slopes,
    ),
    Claim(
        id="eqn35",
        title="the marginal's constant is (n-1) π^{(n-1)/2}/Γ((n+1)/2)",
        source="JoMA preprint, Eqns 33-36",
        method="mass of an n-dimensional Gaussian by quadrature, n = 2 to 8",
        derived=marginals.sphere_constant,
        measure=_sphere,
    ),
    Claim(
        id="eqn36",
        title="the same constant by factorials, for even and for odd n",
        source="JoMA preprint, Eqn 36",
        method="mass of an n-dimensional Gaussian by quadrature, n = 2 to 8",
        derived=_factorials,
        measure=_sphere,
    ),
    Claim(
        id="eqn36-ball",
        title="uniform in a ball of n dimensions: p(u) ∝ (1-u²)^{(n-1)/2}",
        source="new",
        method="Monte Carlo histogram, n = 4",
        derived=lambda n, u: Ball(n).pdf(u),
        measure=_ball,
    ),
    Claim(
        id="eqn57",
        title="G(y) = F(θ₁⁻¹(y)) has the slope θ₁/p",
        source="JoMA preprint, after Eqn 57 (Fig. 9)",
        method="differences along the curve by quadrature",
        derived=clusters.curve_slope,
        measure=_curve,
    ),
)

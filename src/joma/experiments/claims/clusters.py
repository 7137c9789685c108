"""Lemmas 1-5: how isotropic clusters drive a node, without attention."""

import itertools

import numpy as np
from scipy import special

from joma.errors import JomaError
from joma.experiments.claims.claim import (
    ClaimMeasurement,
    Formula,
    Generator,
    claim,
    measured,
    monte_carlo,
    without,
)
from joma.experiments.claims.reference import clusters as isotropic
from joma.experiments.claims.reference.clusters import spread
from joma.experiments.claims.reference.ode import gauss
from joma.theory import as_printed as printed
from joma.theory import clusters, marginals
from joma.theory.marginals import Ball, Gaussian, Laplace, Logistic, Marginal, Scaled, StudentT

_NODES, _WEIGHTS = gauss(16)


@claim("lemma1", clusters.expectations, printed=printed.expectations)
def _moments(formula: Formula, rng: Generator) -> ClaimMeasurement:
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
        x = mean + isotropic.draw(marginal, basis.shape[1], 100_000, rng) @ basis.T
        active = (x @ v + bias > 0).astype(float)
        drawn = np.column_stack([active, active[:, None] * x])
        activity, moment = formula(marginal, v, mean, bias, basis=basis)
        differences.append(drawn.mean(axis=0) - np.array([activity, *moment]))
        errors.append(drawn.std(axis=0, ddof=1) / np.sqrt(len(drawn)))
    return monte_carlo(np.concatenate(differences), np.concatenate(errors))


@claim("lemma2", clusters.velocity, printed=printed.velocity)
def _flow(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Monte Carlo of E[g h′ x] and E[g h′] over a mixture of three clusters of unequal width."""
    means, a = rng.normal(size=(3, 4)), np.array([0.8, -0.5, 0.4])
    shapes = [Scaled(StudentT(5), 0.7), Gaussian(), Scaled(Gaussian(), 2.0)]
    v, bias = 1.7 * rng.normal(size=4), -0.3
    draws = 60_000
    total, variance = np.zeros(5), np.zeros(5)
    for shape, mean, weight in zip(shapes, means, a, strict=True):
        x = mean + isotropic.draw(shape, 4, draws, rng)
        active = (x @ v + bias > 0).astype(float)
        drawn = weight * np.column_stack([active[:, None] * x, active])
        total += drawn.mean(axis=0)
        variance += drawn.var(axis=0, ddof=1) / draws
    rate = formula(shapes, a, means, v, bias)
    return monte_carlo(total - np.array([*rate.v, rate.bias]), np.sqrt(variance))


@without("lemma3")
def _first_integral_leaky(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """For a leaky ReLU F = θ₂ + sθ₁ does not vanish far below zero but tends to c₋ s."""
    leak, s = 0.1, -20.0
    leaky = leak * s + (1 - leak) * float(formula(Gaussian(), s))
    return ClaimMeasurement(abs(leaky), 1e-9)


@claim("lemma3", lambda marginal, s: marginal.first_integral(s))
def _first_integral(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """F(b) - F(a) against ∫ θ₁, and F far below zero against its own size, for ReLU."""
    worst = 0.0
    for marginal in isotropic.FAMILIES:
        low, high = np.sort(rng.uniform(-0.9, 0.9, size=2))
        cuts = [low, 0.0, high] if low < 0 < high else [low, high]
        total = 0.0
        for a, b in itertools.pairwise(cuts):
            shares = isotropic.reference(marginal, (a + b) / 2 + (b - a) / 2 * _NODES).share
            total += (b - a) / 2 * float(_WEIGHTS @ shares)
        difference = float(formula(marginal, high) - formula(marginal, low))
        worst = max(worst, abs(difference - total))
        deep = -0.95 if np.isfinite(marginal.reach) else -20.0
        expected = float(isotropic.reference(marginal, deep).first_integral)
        worst = max(worst, abs(float(formula(marginal, deep)) / expected - 1))
    return ClaimMeasurement(worst, 1e-9)


@claim("eqn53", clusters.radial_velocity, printed=printed.radial_velocity)
def _radial(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """v·v̇ = Σ a_j E[(v·x) ψ], where v·x is one-dimensional: quadrature of the density."""
    worst = 0.0
    for marginal in (Gaussian(), StudentT(3), Laplace()):
        means, a = rng.normal(size=(2, 3)), np.array([0.9, -0.6])
        v, bias = 2 * rng.normal(size=3), -0.2
        shapes = [marginal, Scaled(marginal, 2.0)]
        direct = float(v @ isotropic.flow(shapes, a, means, v, bias)[:-1])
        worst = max(worst, abs(formula(shapes, a, means, v, bias) - direct))
    return measured(worst, 1e-8)


def slope_error(
    formula: Formula, marginal: Marginal, low: float, high: float, below: float, above: float
) -> float:
    """Return how far θ₁ and θ₂ are from the integral of their slopes."""

    def leaky(s: float) -> isotropic.Array:
        there = isotropic.reference(marginal, s)
        jump = above - below
        return np.array([below + jump * there.share, jump * spread(marginal, s)])

    total = np.zeros(2)
    cuts = [low, 0.0, high] if low < 0 < high else [low, high]
    for a, b in itertools.pairwise(cuts):
        at = (a + b) / 2 + (b - a) / 2 * _NODES
        total += (b - a) / 2 * np.array(formula(marginal, at, slopes=(below, above))) @ _WEIGHTS
    return float(np.abs(leaky(high) - leaky(low) - total).max())


@claim("lemma5", clusters.homogeneous_slopes, printed=printed.homogeneous_slopes)
def _slopes(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Differences of θ₁ and θ₂ of a leaky ReLU against the integral of their slopes."""
    worst = 0.0
    for marginal in (Gaussian(), StudentT(3)):
        low, high = np.sort(rng.uniform(-1, 1, size=2))
        worst = max(worst, slope_error(formula, marginal, low, high, 0.2, 1.0))
    return ClaimMeasurement(worst, 1e-9)


def sphere_error(formula: Formula, n: int) -> float:
    """Return the relative error of the area of a sphere."""
    # Of a circle it is 2π and of two points 2; two dimensions more give 2π/(d - 2) times as much.
    dimension = n - 1
    start = 1 if dimension % 2 else 2
    log = np.log(2.0 if start == 1 else 2 * np.pi)
    for d in range(start + 2, dimension + 1, 2):
        log += np.log(2 * np.pi / (d - 2))
    return abs(float(formula(n)) / float(np.exp(log)) - 1)


def ball_error(formula: Formula, n: int, u: float) -> float:
    """The slice at u of the unit ball in n dimensions is a ball in n - 1 of radius √(1-u²)."""
    given = float(formula(n, u))
    if abs(u) > 1:
        return abs(given)
    logs = [0.0, np.log(2.0)]
    while len(logs) <= n:
        logs.append(logs[-2] + np.log(2 * np.pi / len(logs)))
    with np.errstate(divide="ignore"):
        slice_log = logs[n - 1] - logs[n]
        if n > 1:
            slice_log += (n - 1) / 2 * (np.log1p(-abs(u)) + np.log1p(abs(u)))
    if slice_log < -600:
        return given
    return abs(given / float(np.exp(slice_log)) - 1)


@claim("eqn36-ball", lambda n, u: Ball(n).pdf(u))
def _ball(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The slices of a ball against its volume, by the recursion of volumes, and drawn points."""
    worst = max(
        ball_error(formula, n, float(u)) for n in (1, 2, 4, 7) for u in rng.uniform(-1, 1, 4)
    )
    drawn = isotropic.draw(Ball(4), 4, 20_000, rng)[:, 0]
    inside = float(np.mean(np.abs(drawn) < 0.3))
    at = 0.3 * _NODES
    share = 0.3 * float(_WEIGHTS @ np.array([float(formula(4, u)) for u in at]))
    error = abs(inside - share) / (5 * np.sqrt(inside * (1 - inside) / len(drawn)))
    return ClaimMeasurement(max(worst, 1e-11 * error), 1e-11)


def _factorials(n: int) -> float:
    """Eqn 36: the same constant by factorials, for even and for odd n up to 170."""
    if not 2 <= n <= 170:
        raise JomaError(f"n must lie in 2 to 170, where the factorials are floats; got {n}")
    if n % 2 == 0:
        return float(2 ** (n / 2) * np.pi ** (n / 2 - 1) / special.factorial2(max(n - 3, 0)))
    return float(2 * np.pi ** ((n - 1) / 2) / special.factorial((n - 3) // 2))


@claim("eqn36", _factorials)
@claim("eqn35", marginals.sphere_constant)
def _sphere(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The area of the unit sphere in n - 1 dimensions, by the recursion of areas."""
    return ClaimMeasurement(max(sphere_error(formula, n) for n in range(2, 10)), 1e-11)


def curve_error(formula: Formula, marginal: Marginal, s: float) -> float:
    """Return the relative error of the slope of the curve y = θ₁, G = F."""
    return abs(float(formula(marginal, s)) * float(isotropic.reference(marginal, s).hazard) - 1)


@claim("eqn57", clusters.curve_slope)
def _curve(formula: Formula, rng: Generator) -> ClaimMeasurement:
    worst = 0.0
    for marginal in (Gaussian(), StudentT(3), Logistic(), marginals.Uniform()):
        s = float(rng.uniform(-0.9, 0.9))
        worst = max(worst, curve_error(formula, marginal, s))
    return ClaimMeasurement(worst, 1e-9)

"""Lemmas 1-5: how isotropic clusters drive a node, without attention."""

import itertools
from typing import Any

import numpy as np
from scipy import special

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, Search, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, measured, monte_carlo
from joma.experiments.claims.reference import clusters as isotropic
from joma.experiments.claims.reference.clusters import spread
from joma.experiments.claims.reference.ode import gauss
from joma.experiments.claims.search import Choice, Integer, Matrix, Real, Vector
from joma.theory import as_printed as printed
from joma.theory import clusters, marginals
from joma.theory.marginals import Ball, Gaussian, Laplace, Logistic, Marginal, Scaled, StudentT

_NODES, _WEIGHTS = gauss(16)


def _shape(point: Point, dimensions: int) -> Marginal:
    """A cluster with finite fourth moments, so that samples have an error."""
    family = isotropic.family_of(Point({**point.values, "n": dimensions}))
    return Scaled(family, point["width"])


_SAMPLED: dict[str, Any] = {
    "family": Choice("gaussian", "student", "laplace", "ball"),
    "df": Real(5.0, 50.0, log=True),
    "width": Real(0.05, 20.0, log=True, special=(1.0,)),
    "length": Real(0.01, 100.0, log=True, special=(1.0,)),
    "s": Real(-3.0, 3.0, special=(0.0,)),
}


@over(**_SAMPLED, mean=Vector(Real(-3.0, 3.0), Integer(1, 5)), rank=Integer(1, 5), sampled=True)
def _moments_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Monte Carlo in as many dimensions as given, of which the cluster fills `rank`."""
    rng = np.random.default_rng([3, point.seed])
    mean = point["mean"]
    rank = min(point["rank"], mean.size)
    basis = np.linalg.qr(rng.normal(size=(mean.size, rank)))[0]
    marginal = _shape(point, rank)
    v = rng.normal(size=mean.size)
    seen = np.linalg.norm(basis.T @ v)
    v *= point["length"] / seen
    bias = float(point["s"] * point["width"] * point["length"] - mean @ v)
    activity, moment = formula(marginal, v, mean, bias, basis=basis)
    size = 4_000 * point.effort
    x = mean + isotropic.draw(marginal, rank, size, point.generator) @ basis.T
    active = (x @ v + bias > 0).astype(float)
    # Of E[xψ] what lies across v is E[ψ] x̄ by symmetry, which a sample would only blur.
    along = basis @ (basis.T @ v) / point["length"]
    predicted = np.array([activity, along @ moment])
    drawn = np.column_stack([active, active * (x @ along)])
    across = moment - along * (along @ moment)
    expected = activity * (mean - along * (along @ mean))
    scale = np.abs(moment).max() + np.abs(mean).max() + point["width"]
    exact = float(np.abs(across - expected).max() / scale)
    return _sampled(drawn, predicted, exact)


@claim("lemma1", clusters.expectations, _moments_at, printed=printed.expectations)
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


def _sampled(drawn: isotropic.Array, predicted: isotropic.Array, exact: float) -> ClaimMeasurement:
    """Five standard errors of a sample, with the least that a share of it can have, or 1e-9."""
    count = len(drawn)
    spread = drawn.std(axis=0, ddof=1) + np.abs(drawn).max(axis=0) / np.sqrt(count)
    spread = np.maximum(spread, 1e-12) / np.sqrt(count)
    worst = float(np.max(np.abs(drawn.mean(axis=0) - predicted) / (5 * spread)))
    return ClaimMeasurement(max(worst, exact / 1e-9), 1.0)


_CLUSTERS: dict[str, Any] = {
    **isotropic.FAMILY,
    "means": Matrix(Real(-10.0, 10.0), Integer(1, 6), Integer(1, 4)),
    "gradients": Vector(Real(-2.0, 2.0, special=(0.0, 1.0)), Integer(1, 6)),
    "widths": Vector(Real(0.1, 10.0, log=True, special=(1.0,)), Integer(1, 6)),
    "v": Vector(Real(-5.0, 5.0), Integer(1, 4)),
    "bias": Real(-20.0, 20.0, special=(0.0,)),
}
"""Any number of clusters of one family, each with its width, and any node."""


@over(**_CLUSTERS)
def _flow_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The flow of any clusters, whose integrals come from the density alone."""
    shapes, a, means, v, bias = isotropic.scene(point, 1e-6)
    rate = formula(shapes, a, means, v, bias)
    expected = isotropic.flow(shapes, a, means, v, bias)
    size = np.abs(a) @ (np.abs(means).max(axis=1) + _widths(shapes)) + 1e-300
    error = np.abs(np.array([*rate.v, float(rate.bias)]) - expected).max() / size
    return measured(error, 1e-9)


@claim("lemma2", clusters.velocity, _flow_at, printed=printed.velocity)
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


def _widths(shapes: list[Marginal]) -> isotropic.Array:
    """θ₂(0) of each cluster, the largest that θ₂ becomes."""
    return np.array([spread(one, 0.0) for one in shapes])


@without("lemma3")
def _first_integral_leaky(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """For a leaky ReLU F = θ₂ + sθ₁ does not vanish far below zero but tends to c₋ s."""
    leak, s = 0.1, -20.0
    leaky = leak * s + (1 - leak) * float(formula(Gaussian(), s))
    return ClaimMeasurement(abs(leaky), 1e-9)


@over(**isotropic.FAMILY, s=Real(-60.0, 60.0, special=(0.0, -1.0)))
def _first_integral_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """F in relative size, at any depth where θ₁ is a normal float."""
    marginal = isotropic.family_of(point)
    # The range ends at the edge of a ball, where F is smallest, and 60 widths out otherwise.
    s = point["s"] / 60 if isinstance(marginal, Ball) else point["s"]
    if s <= -marginal.reach:
        return ClaimMeasurement(abs(float(formula(marginal, s))), 1e-300)
    expected = isotropic.reference(marginal, s)
    if expected.log_share < -600:
        raise JomaError("s must leave a part of the cluster on the active side")
    error = abs(float(formula(marginal, s)) / float(expected.first_integral) - 1)
    return ClaimMeasurement(error, 1e-9)


@claim("lemma3", lambda marginal, s: marginal.first_integral(s), _first_integral_at)
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


@over(**_CLUSTERS)
def _radial_at(formula: Formula, point: Point) -> ClaimMeasurement:
    shapes, a, means, v, bias = isotropic.scene(point, 1e-6)
    expected = float(v @ isotropic.flow(shapes, a, means, v, bias)[:-1])
    reach = np.abs(means @ v) + abs(bias) + np.linalg.norm(v) * _widths(shapes)
    error = abs(formula(shapes, a, means, v, bias) - expected) / (np.abs(a) @ reach + 1e-300)
    return measured(error, 1e-9)


@claim("eqn53", clusters.radial_velocity, _radial_at, printed=printed.radial_velocity)
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


def _slope_error(
    formula: Formula, marginal: Marginal, low: float, high: float, below: float, above: float
) -> float:
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


@over(
    **isotropic.FAMILY,
    low=Real(-5.0, 5.0, special=(0.0,)),
    step=Real(1e-3, 1.0, log=True),
    below=Real(-1.0, 1.0, special=(0.0, 0.01)),
    above=Real(-1.0, 2.0, special=(0.0, 1.0)),
)
def _slopes_at(formula: Formula, point: Point) -> ClaimMeasurement:
    marginal = isotropic.family_of(point)
    width = isotropic.width_of(marginal)
    low = point["low"] * width
    high = low + point["step"] * width
    # The density of a ball has no slope at its edge, and 16 nodes see that.
    if isinstance(marginal, Ball) and (high > 0.999 or low < -0.999):
        raise JomaError("the stretch must lie inside the ball")
    error = _slope_error(formula, marginal, low, high, point["below"], point["above"])
    size = (abs(point["above"]) + abs(point["below"])) * max(1.0, abs(low))
    return ClaimMeasurement(error / (size + 1e-300), 1e-8)


@claim("lemma5", clusters.homogeneous_slopes, _slopes_at, printed=printed.homogeneous_slopes)
def _slopes(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Differences of θ₁ and θ₂ of a leaky ReLU against the integral of their slopes."""
    worst = 0.0
    for marginal in (Gaussian(), StudentT(3)):
        low, high = np.sort(rng.uniform(-1, 1, size=2))
        worst = max(worst, _slope_error(formula, marginal, low, high, 0.2, 1.0))
    return ClaimMeasurement(worst, 1e-9)


def _sphere_error(formula: Formula, n: int) -> float:
    # Of a circle it is 2π and of two points 2; two dimensions more give 2π/(d - 2) times as much.
    dimension = n - 1
    start = 1 if dimension % 2 else 2
    log = np.log(2.0 if start == 1 else 2 * np.pi)
    for d in range(start + 2, dimension + 1, 2):
        log += np.log(2 * np.pi / (d - 2))
    return abs(float(formula(n)) / float(np.exp(log)) - 1)


@over(n=Integer(2, 250, log=True))
def _sphere_at(formula: Formula, point: Point) -> ClaimMeasurement:
    return ClaimMeasurement(_sphere_error(formula, point["n"]), 1e-11)


def _ball_error(formula: Formula, n: int, u: float) -> float:
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


@over(n=Integer(1, 1000, log=True), u=Real(-1.2, 1.2, special=(0.0, -1.0, 1.0)))
def _ball_at(formula: Formula, point: Point) -> ClaimMeasurement:
    return ClaimMeasurement(_ball_error(formula, point["n"], point["u"]), 1e-10)


@claim("eqn36-ball", lambda n, u: Ball(n).pdf(u), _ball_at)
def _ball(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The slices of a ball against its volume, by the recursion of volumes, and drawn points."""
    worst = max(
        _ball_error(formula, n, float(u)) for n in (1, 2, 4, 7) for u in rng.uniform(-1, 1, 4)
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


@claim("eqn36", _factorials, Search({"n": Integer(2, 170, log=True)}, _sphere_at))
@claim("eqn35", marginals.sphere_constant, _sphere_at)
def _sphere(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The area of the unit sphere in n - 1 dimensions, by the recursion of areas."""
    return ClaimMeasurement(max(_sphere_error(formula, n) for n in range(2, 10)), 1e-11)


def _curve_error(formula: Formula, marginal: Marginal, s: float) -> float:
    return abs(float(formula(marginal, s)) * float(isotropic.reference(marginal, s).hazard) - 1)


@over(**isotropic.FAMILY, s=Real(-49.9, 49.9, special=(0.0,)))
def _curve_at(formula: Formula, point: Point) -> ClaimMeasurement:
    marginal = isotropic.family_of(point)
    s = point["s"] * (1 if np.isinf(marginal.reach) else 1 / 50)
    if isotropic.reference(marginal, s).hazard < 1e-290 or s >= marginal.reach:
        raise JomaError("s must lie where the density is not 0")
    return ClaimMeasurement(_curve_error(formula, marginal, s), 1e-9)


@claim("eqn57", clusters.curve_slope, _curve_at)
def _curve(formula: Formula, rng: Generator) -> ClaimMeasurement:
    worst = 0.0
    for marginal in (Gaussian(), StudentT(3), Logistic(), marginals.Uniform()):
        s = float(rng.uniform(-0.9, 0.9))
        worst = max(worst, _curve_error(formula, marginal, s))
    return ClaimMeasurement(worst, 1e-9)

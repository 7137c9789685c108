"""Isotropic clusters for the claims: integrals from the density alone, samples, and a search space.

Nothing here uses the integrals of `joma.theory.marginals`: a density is known by its logarithm up
to a constant, and its tails are summed by the exp-sinh rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import ClaimMeasurement, Generator, Point
from joma.experiments.claims.reference.ode import five_point, gauss
from joma.theory import marginals
from joma.theory.marginals import Ball, Gaussian, Laplace, Logistic, Marginal, Scaled, StudentT

FAMILIES: tuple[Marginal, ...] = (
    Gaussian(),
    StudentT(3),
    StudentT(5),
    Laplace(),
    Logistic(),
    marginals.Uniform(),
    Ball(4),
)
"""Isotropic shapes that the claims are tried on."""

_T = np.arange(-4.0, 6.0 + 1e-9, 1 / 18)  # so far up for the moments of t₁.₁
_STEP = np.exp(np.pi / 2 * np.sinh(_T))
_STEP_WEIGHT = np.pi / 2 * np.cosh(_T) * _STEP / 18
_NARROW = _T[np.abs(_T) <= 4]
_SIGMOID = 1 / (1 + np.exp(-np.pi * np.sinh(_NARROW)))
_REST = 1 / (1 + np.exp(np.pi * np.sinh(_NARROW)))
_SIGMOID_WEIGHT = np.pi * np.cosh(_NARROW) * _SIGMOID * _REST / 18
_NODES, _WEIGHTS = gauss(12)


@dataclass(frozen=True)
class TwoHumps(Marginal):
    """Half of a normal density about each of -center and center: not unimodal where they part."""

    center: float
    width: float
    least_mass = 1e-12  # below it θ₂ + sθ₁ cancels too far

    def pdf(self, u: Any) -> Array:
        """Return p(u)."""
        return np.exp(log_shape(self, np.abs(np.asarray(u, dtype=np.float64)))) / (
            2 * self.width * np.sqrt(2 * np.pi)
        )

    def theta1(self, s: Any) -> Array:
        """Return θ₁(s)."""
        low, high = self._places(s)
        return (Gaussian().theta1(low) + Gaussian().theta1(high)) / 2

    def theta2(self, s: Any) -> Array:
        """Return θ₂(s)."""
        low, high = self._places(s)
        normal = Gaussian()
        spread = self.width * (normal.pdf(low) + normal.pdf(high))
        return (spread + self.center * (normal.theta1(high) - normal.theta1(low))) / 2

    def _places(self, s: Any) -> tuple[Array, Array]:
        s = np.asarray(s, dtype=np.float64)
        return (s - self.center) / self.width, (s + self.center) / self.width


@dataclass(frozen=True)
class Spiked(Marginal):
    """A normal density of width 1 with a narrow one in its middle."""

    share: float
    width: float

    def pdf(self, u: Any) -> Array:
        """Return p(u)."""
        u = np.asarray(u, dtype=np.float64)
        narrow = Gaussian().pdf(u / self.width) / self.width
        return self.share * narrow + (1 - self.share) * Gaussian().pdf(u)

    def theta1(self, s: Any) -> Array:
        """Return θ₁(s)."""
        s = np.asarray(s, dtype=np.float64)
        narrow = Gaussian().theta1(s / self.width)
        return self.share * narrow + (1 - self.share) * Gaussian().theta1(s)

    def theta2(self, s: Any) -> Array:
        """Return θ₂(s)."""
        s = np.asarray(s, dtype=np.float64)
        narrow = self.width * Gaussian().theta2(s / self.width)
        return self.share * narrow + (1 - self.share) * Gaussian().theta2(s)


def log_shape(marginal: Marginal, u: Array, gap: Array | None = None) -> Array:
    """Ln of the density at u ≥ 0 but for a constant; `gap` is the distance to the support's end."""
    match marginal:
        case Gaussian():
            return -(u**2) / 2
        case StudentT(df):
            return -(df + 1) / 2 * np.log1p((u / np.sqrt(df)) ** 2)
        case Laplace():
            return -u
        case Logistic():
            return -u - 2 * np.log1p(np.exp(-u))
        case Ball(n):
            gap = 1 - u if gap is None else gap
            with np.errstate(divide="ignore"):
                return (n - 1) / 2 * np.log(gap * (1 + u)) if n > 1 else np.zeros_like(u)
        case TwoHumps(center, width):
            humps = -(((u - center) / width) ** 2) / 2, -(((u + center) / width) ** 2) / 2
            return np.logaddexp(*humps)
        case Spiked(share, width):
            narrow = np.log(share / width) - (u / width) ** 2 / 2
            return np.logaddexp(narrow, np.log1p(-share) - u**2 / 2)
        case _:
            raise JomaError(f"marginal {marginal} has no reference")


class Reference(NamedTuple):
    """Integrals of a density over u > -s, each an array over s.

    Attributes:
        log_share: ln θ₁.
        life: F/θ₁.
        hazard: p/θ₁.
    """

    log_share: Array
    life: Array
    hazard: Array

    @property
    def share(self) -> Array:
        """θ₁."""
        return np.exp(self.log_share)

    @property
    def first_integral(self) -> Array:
        """F."""
        return self.share * self.life

    @property
    def density(self) -> Array:
        """P."""
        return self.share * self.hazard


def reference(marginal: Marginal, s: Any) -> Reference:
    """Return the integrals of a marginal at distances s, from its density alone; NaN outside it."""
    s = np.asarray(s, dtype=np.float64)
    if isinstance(marginal, Scaled):
        inner = reference(marginal.marginal, s / marginal.width)
        return Reference(
            inner.log_share, inner.life * marginal.width, inner.hazard / marginal.width
        )
    half, _, _ = _tail(marginal, np.zeros(1))
    total = np.log(2) + half[0]
    log_tail, life, log_density = _tail(marginal, np.abs(s))
    tail = np.exp(log_tail - total)
    below = s < 0
    log_share = np.where(below, log_tail - total, np.log1p(-tail))
    above = (s + tail * np.nan_to_num(life)) / (1 - tail)  # as F(s) = s + F(-s) and θ₁ sums to 1
    with np.errstate(over="ignore"):
        hazard = np.exp(log_density - total - log_share)
    return Reference(log_share, np.where(below, life, above), hazard)


def spread(marginal: Marginal, s: Any) -> Array:
    """Return θ₂ at distances s; it is even in s, and θ₂ = F - sθ₁ does not cancel for s < 0."""
    x = np.abs(np.asarray(s, dtype=np.float64))
    inside = x < marginal.reach
    there = reference(marginal, -np.where(inside, x, 0.0))
    return np.where(inside, there.share * (there.life + x), 0.0)


def flow(
    marginals: Sequence[Marginal], gradients: Any, means: Array, v: Array, bias: float
) -> Array:
    """Return v̇ and then ξ̇ of a node, from the densities alone."""
    return flows(marginals, gradients, means, np.array([[*v, bias]]))[0]


def flows(marginals: Sequence[Marginal], gradients: Any, means: Array, states: Array) -> Array:
    """Return the same for many nodes, each a row of v and ξ."""
    lengths = np.linalg.norm(states[:, :-1], axis=1)
    directions = states[:, :-1] / lengths[:, None]
    total = np.zeros_like(states)
    for marginal, gradient, mean in zip(marginals, gradients, means, strict=True):
        s = directions @ mean + states[:, -1] / lengths
        inside = s > -marginal.reach
        share = np.where(inside, reference(marginal, np.where(inside, s, 0.0)).share, 0.0)
        moments = share[:, None] * mean + spread(marginal, s)[:, None] * directions
        total += gradient * np.column_stack([moments, share])
    return total


def flow_jacobian(
    marginals: Sequence[Marginal], gradients: Any, means: Array, v: Array, bias: float
) -> Array:
    """Return ∂(v̇, ξ̇)/∂(v, ξ) by differences of `flow`, to about 1e-9 of its size."""
    at = np.array([*v, bias])
    length = np.linalg.norm(v)
    lever = 1 + np.abs((means @ v + bias) / length).max() + np.abs(means).max()
    step = 4e-3 * length * min(1.0, *(finest(one) for one in marginals)) / lever

    steps = step * np.eye(len(at))
    near, far = (
        flows(marginals, gradients, means, at + k * np.concatenate([steps, -steps])) for k in (1, 2)
    )
    count = len(at)
    return five_point((far[count:], near[count:], near[:count], far[:count]), step).T


def _tail(marginal: Marginal, x: Array) -> tuple[Array, Array, Array]:
    """Ln ∫_x p, ∫(u-x)p/∫p and ln p(x), unnormalised, for x ≥ 0."""
    if isinstance(marginal, TwoHumps):
        return _humps_tail(marginal, x)
    if isinstance(marginal, Ball):
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.maximum(1 - x, 0.0)[..., None]
            beyond, left = gap * _SIGMOID, gap * _REST
            weights = gap * _SIGMOID_WEIGHT
            at = log_shape(marginal, x, gap[..., 0])
            fall = log_shape(marginal, x[..., None] + beyond, left) - at[..., None]
            mass = np.sum(weights * np.exp(fall), axis=-1)
            life = np.sum(weights * beyond * np.exp(fall), axis=-1) / mass
            return np.where(x < 1, at + np.log(mass), -np.inf), life, at
    at = log_shape(marginal, x)
    # Steps in units of the length over which the density falls at x.
    nearby = 1e-3 * (1 + x)
    unit = 1 / np.maximum((at - log_shape(marginal, x + nearby)) / nearby, 1 / (1 + x))
    with np.errstate(over="ignore"):
        fall = np.exp(log_shape(marginal, x[..., None] + unit[..., None] * _STEP) - at[..., None])
    mass = fall @ _STEP_WEIGHT
    life = unit * (fall @ (_STEP_WEIGHT * _STEP)) / mass
    return at + np.log(unit * mass), life, at


def _humps_tail(marginal: TwoHumps, x: Array) -> tuple[Array, Array, Array]:
    end = np.maximum(marginal.center, x) + 12 * marginal.width
    edges = x[..., None] + (end - x)[..., None] * np.linspace(0, 1, 31)
    half = np.diff(edges)[..., None] / 2
    beyond = (edges[..., :-1, None] + half * (1 + _NODES)) - x[..., None, None]
    values = log_shape(marginal, x[..., None, None] + beyond)
    peak = values.max(axis=(-1, -2))
    fall = half * _WEIGHTS * np.exp(values - peak[..., None, None])
    mass = fall.sum(axis=(-1, -2))
    life = (fall * beyond).sum(axis=(-1, -2)) / mass
    return peak + np.log(mass), life, log_shape(marginal, x)


class RestPoint(NamedTuple):
    """A rest point found from the densities alone."""

    s_minus: float
    ratio: float


def rest_points(
    positive: Marginal, distance: float, negative: Marginal, *, exact: bool = True
) -> list[RestPoint]:
    """All rest points with s₋ where both clusters have an active part, from the densities alone.

    Unless `exact`, they are only counted: each s₋ is that of a place nearby, without a ratio.
    """
    grid = places(positive, distance, negative)

    def gap(s: Any) -> Any:
        lives = reference(positive, np.asarray(s) + distance).life, reference(negative, s).life
        return np.log(lives[0] / lives[1])

    with np.errstate(invalid="ignore", divide="ignore"):
        gaps = gap(grid)
    grid, gaps = grid[np.isfinite(gaps)], gaps[np.isfinite(gaps)]
    found: list[RestPoint] = []
    # Lives that differ by less than this are equal in the reference.
    noise = _life_error(positive, grid + distance) + _life_error(negative, grid)
    grid, gaps = grid[np.abs(gaps) >= noise], gaps[np.abs(gaps) >= noise]
    for i in np.nonzero(gaps[:-1] * gaps[1:] < 0)[0]:
        if not exact:
            found.append(RestPoint(float(grid[i]), np.nan))
            continue
        s = float(optimize.brentq(lambda s: float(gap(s)), grid[i], grid[i + 1], xtol=1e-14))
        logs = reference(positive, s + distance).log_share - reference(negative, s).log_share
        with np.errstate(over="ignore"):
            found.append(RestPoint(s, float(np.exp(logs))))
    return found


def _life_error(marginal: Marginal, s: Array) -> Array:
    """Relative error of a reference life: rounding of the logarithm of the density."""
    if isinstance(marginal, Scaled):
        return _life_error(marginal.marginal, s / marginal.width)
    if isinstance(marginal, Ball):
        return np.full(s.shape, 1e-12)
    return 1e-12 + 1e-14 * np.abs(log_shape(marginal, np.maximum(-s, 0.0)))


def places(positive: Marginal, distance: float, negative: Marginal) -> Array:
    """Return distances s₋ that cover both clusters, near and far."""
    widths = [width_of(positive), width_of(negative)]
    far = np.geomspace(0.02 * min(*widths, distance), 1e6 * max(*widths, distance, 1.0), 90)
    near = np.linspace(-2 * distance - 8 * max(widths), 8 * max(widths), 81)
    grid = np.unique(np.concatenate([-far, -far - distance, far, near]))
    return grid[(grid > -negative.reach) & (grid + distance > -positive.reach)]


def finest(marginal: Marginal) -> float:
    """Return the smallest length over which a density changes."""
    match marginal:
        case Scaled(inner, width):
            return width * finest(inner)
        case TwoHumps(_, width):
            return width
        case _:
            return width_of(marginal)


def width_of(marginal: Marginal) -> float:
    """Return the typical width of a cluster."""
    match marginal:
        case Scaled(inner, width):
            return width * width_of(inner)
        case Ball(n):
            return 1 / np.sqrt(n)
        case TwoHumps(center, width):
            return max(center, width)
        case Spiked(_, width):
            return width
        case _:
            return 1.0


def draw(marginal: Marginal, n: int, size: int, rng: Generator) -> Array:
    """Return points of n dimensions whose every projection has the given marginal."""
    normal = rng.normal(size=(size, n))
    match marginal:
        case Scaled(inner, width):
            return width * draw(inner, n, size, rng)
        case Gaussian():
            return normal
        case StudentT(df):
            return normal * np.sqrt(df / rng.chisquare(df, size=(size, 1)))
        case Laplace():
            return normal * np.sqrt(2 * rng.exponential(size=(size, 1)))
        case Ball(dimensions):
            # A ball of more dimensions than asked for, seen in n of them.
            more = rng.normal(size=(size, max(dimensions - n, 0)))
            both = np.concatenate([normal, more], axis=1)
            unit = both / np.linalg.norm(both, axis=1, keepdims=True)
            return (unit * rng.random((size, 1)) ** (1 / dimensions))[:, :n]
        case _:
            raise JomaError(f"marginal {marginal} has no sampler")


def decide(wrong: bool, border: float) -> ClaimMeasurement:
    """The measurement of a yes or no: the nearer to the border, the larger, to guide a search."""
    return ClaimMeasurement(2.0 if wrong else 0.1 * float(np.exp(-abs(border))), 1.0)


def scene(point: Point, shortest: float) -> tuple[list[Marginal], Array, Array, Array, float]:
    """Return shapes, gradients and means of the clusters of a point, and v and ξ of its node."""
    means = point["means"]
    v = np.resize(point["v"], means.shape[1])
    if np.linalg.norm(v) < shortest:
        raise JomaError("v must have a direction")
    family = family_of(point)
    shapes: list[Marginal] = [
        Scaled(family, float(width)) for width in np.resize(point["widths"], len(means))
    ]
    return shapes, np.resize(point["gradients"], len(means)), means, v, point["bias"]


_SHAPES: dict[str, Callable[[Point], Marginal]] = {
    "gaussian": lambda at: Gaussian(),
    "student": lambda at: StudentT(at["df"]),
    "laplace": lambda at: Laplace(),
    "logistic": lambda at: Logistic(),
    "ball": lambda at: Ball(at["n"]),
    "spiked": lambda at: Spiked(at["share"], at["width"]),
    "humps": lambda at: TwoHumps(at["center"], at["width"]),
}


def family_of(point: Point) -> Marginal:
    """Return the marginal that a point of a search names."""
    return _SHAPES[point["family"]](point)

"""Isotropic distributions, seen along one direction (Lemma 1, Eqns 33-36).

A cluster of Section 4 enters its dynamics only through the density p(u) of its projection on a
line. A `Marginal` is that density with the integrals the theory needs, for the step ψ = 1[x > 0]
of ReLU:

    θ₁(s) = ∫ ψ(u+s) p(u) du,   θ₂(s) = ∫ u ψ(u+s) p(u) du,   F(s) = θ₂(s) + s θ₁(s).

F/θ₁ = E[u+s | u > -s] is a mean residual life; whether it is injective decides Theorem 3.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from joma.errors import JomaError
from joma.theory import _checks, _special
from joma.theory._checks import Array


class Marginal(ABC):
    """A symmetric density on the line: the projection of an isotropic distribution."""

    @abstractmethod
    def pdf(self, u: ArrayLike) -> Array:
        """p(u), the density along one direction (Eqn 33)."""

    @abstractmethod
    def theta1(self, s: ArrayLike) -> Array:
        """θ₁ (Eqn 40): P[u > -s], the share of the cluster on the active side."""

    @abstractmethod
    def theta2(self, s: ArrayLike) -> Array:
        """θ₂ (Eqn 41): the first moment of the active side; even in s."""

    def first_integral(self, s: ArrayLike) -> Array:
        """F (Lemma 3, Eqn 49): E[max(u+s, 0)] = θ₂(s) + s θ₁(s)."""
        s = np.asarray(s, dtype=np.float64)
        return self.theta2(s) + s * self.theta1(s)

    def mean_residual(self, s: ArrayLike) -> Array:
        """F/θ₁ (Eqn 56): E[u+s | u > -s]; NaN where the active side is empty to rounding."""
        share = self.theta1(s)
        return self.first_integral(s) / np.where(share > 0, share, np.nan)

    @property
    def reach(self) -> float:
        """How far out the marginal is known: the end of its support; inf for most."""
        return np.inf

    @property
    def noise(self) -> float:
        """Relative rounding error of θ₁ and θ₂."""
        return 2e-14

    @property
    def least_mass(self) -> float:
        """The θ₁ below which neither is known to that error."""
        return 1e-290


@dataclass(frozen=True)
class Gaussian(Marginal):
    """The standard normal distribution, in any dimension its own marginal."""

    def pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        u = np.asarray(u, dtype=np.float64)
        return np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi)

    def theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        return _special.ndtr(s)

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        return self.pdf(s)

    def mean_residual(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        # φ/Φ through erfcx stays finite far below zero; past -50 the difference cancels and its
        # asymptotic series is exact.
        hazard = np.sqrt(2 / np.pi) / _special.erfcx(-np.minimum(s, 0) / np.sqrt(2))
        hazard = np.where(s > 0, self.pdf(s) / self.theta1(np.maximum(s, 0)), hazard)
        far = np.minimum(s, -50.0)
        return np.where(s < -50, -1 / far + 2 / far**3 - 10 / far**5, s + hazard)


@dataclass(frozen=True)
class StudentT(Marginal):
    """Student's t with `df` > 1 degrees of freedom: the marginal of the multivariate t."""

    df: float

    def __post_init__(self) -> None:
        df = _checks.positive_scalar("df", self.df)
        if df <= 1:
            raise JomaError(f"df must be > 1, or the cluster has no mean; got {df}")

    def pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        df = self.df
        log_constant = _special.gammaln((df + 1) / 2) - _special.gammaln(df / 2)
        log_constant = log_constant - np.log(df * np.pi) / 2
        u = np.asarray(u, dtype=np.float64)
        return np.exp(log_constant - (df + 1) / 2 * np.log1p(u**2 / df))

    def theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        # SciPy's stdtr loses digits far below zero, the incomplete beta function does not.
        s = np.asarray(s, dtype=np.float64)
        tail = _special.betainc(self.df / 2, 0.5, self.df / (self.df + s**2)) / 2
        return np.where(s < 0, tail, 1 - tail)

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        return self.df / (self.df - 1) * (1 + s**2 / self.df) * self.pdf(s)


@dataclass(frozen=True)
class Laplace(Marginal):
    """The double exponential density e^{-|u|}/2."""

    def pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        return np.exp(-np.abs(np.asarray(u, dtype=np.float64))) / 2

    def theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        return np.where(s < 0, self.pdf(s), 1 - self.pdf(s))

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        return (1 + np.abs(s)) * self.pdf(s)

    def first_integral(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        return np.maximum(s, 0) + self.pdf(s)

    def mean_residual(self, s: ArrayLike) -> Array:  # noqa: D102
        above = np.maximum(np.asarray(s, dtype=np.float64), 0)
        return self.first_integral(above) / self.theta1(above)


@dataclass(frozen=True)
class Logistic(Marginal):
    """The logistic density e^{-u}/(1 + e^{-u})²."""

    def pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        return _special.expit(u) * _special.expit(-np.asarray(u, dtype=np.float64))

    def theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        return _special.expit(s)

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        s = -np.abs(np.asarray(s, dtype=np.float64))
        return np.logaddexp(0.0, s) - s * _special.expit(s)

    def first_integral(self, s: ArrayLike) -> Array:  # noqa: D102
        return np.logaddexp(0.0, np.asarray(s, dtype=np.float64))

    def mean_residual(self, s: ArrayLike) -> Array:  # noqa: D102
        above = np.maximum(np.asarray(s, dtype=np.float64), -40)  # constant to rounding below
        return self.first_integral(above) / self.theta1(above)


@dataclass(frozen=True)
class Ball(Marginal):
    """Uniform in the unit ball of `n` dimensions: p(u) ∝ (1 - u²)^{(n-1)/2} (Eqns 33-36)."""

    n: int

    def __post_init__(self) -> None:
        if _checks.integers("n", self.n, 1).ndim != 0:
            raise JomaError(f"n must be one whole number, got {self.n!r}")

    def pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        u = np.asarray(u, dtype=np.float64)
        inside = np.maximum(1 - u**2, 0.0)
        return np.where(np.abs(u) <= 1, self._constant * inside ** ((self.n - 1) / 2), 0.0)

    def theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        half = (self.n + 1) / 2
        share = np.clip((1 + np.asarray(s, dtype=np.float64)) / 2, 0.0, 1.0)
        return _special.betainc(half, half, share)

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        inside = np.maximum(1 - np.asarray(s, dtype=np.float64) ** 2, 0.0)
        return self._constant * inside ** ((self.n + 1) / 2) / (self.n + 1)

    @property
    def reach(self) -> float:  # noqa: D102
        return 1.0

    @property
    def _constant(self) -> float:
        log = _special.gammaln(self.n / 2 + 1) - _special.gammaln((self.n + 1) / 2)
        return float(np.exp(log) / np.sqrt(np.pi))


def Uniform() -> Ball:  # noqa: N802 - stands among the families, which are classes
    """The uniform density on [-1, 1]: the ball of one dimension."""
    return Ball(1)


class Density(Marginal):
    """Any symmetric density of the user's, integrated once when made.

    Args:
        pdf: p(u) for u ≥ 0, of arrays or of single numbers; it must be non-negative, integrate to
            1 over the line (½ over u ≥ 0) and have a finite mean of |u|.
        breaks: points u > 0 at which the density or its derivative jumps. They are found anyhow,
            but naming them makes it exact there.
    """

    def __init__(self, pdf: Callable[[Any], Any], breaks: Sequence[float] = ()) -> None:
        if not callable(pdf):
            raise JomaError(f"pdf must be a function of u, got {pdf!r}")
        self._pdf = _of_arrays(pdf)
        given = _checks.positive("breaks", list(breaks)) if len(breaks) else np.empty(0)
        # Panels of doubling width resolve a peak at zero as well as a heavy tail; each is then
        # halved until its integrals settle.
        near, far = np.geomspace(2.0**-30, 2.0**12, 169), 2.0 ** np.arange(12.5, 100.5)
        self._edges = self._refined(np.unique(np.concatenate([[0.0], near, far, given])))
        panels = _gauss(self._edges[:-1], self._edges[1:])
        p = self.pdf(panels.nodes)
        moments = np.stack([panels.integrate(p), panels.integrate(p * panels.nodes)])
        tails = np.concatenate([moments, self._beyond()], axis=1)
        self._tails = np.cumsum(tails[:, ::-1], axis=1)[:, ::-1]
        if abs(self._tails[0, 0] - 0.5) > 1e-6:
            raise JomaError(f"pdf must integrate to 1, got {2 * self._tails[0, 0]:.8g}")

    def __repr__(self) -> str:
        return f"Density({getattr(self._pdf, '__name__', 'pdf')})"

    def pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        u = np.abs(np.asarray(u, dtype=np.float64))
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            p = np.asarray(self._pdf(u), dtype=np.float64)
        if not np.all(np.isfinite(p)) or np.any(p < 0):
            raise JomaError("pdf must be finite and ≥ 0 for every u ≥ 0")
        return p

    def theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        tail = self._tail(np.abs(s), 0)
        return np.where(s < 0, tail, 1 - tail)

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        return self._tail(np.abs(np.asarray(s, dtype=np.float64)), 1)

    @property
    def reach(self) -> float:  # noqa: D102
        return float(self._edges[-1])

    @property
    def noise(self) -> float:  # noqa: D102
        return 1e-11

    @property
    def least_mass(self) -> float:  # noqa: D102
        return 1e-25

    def _refined(self, edges: Array) -> Array:
        """Edges between which sixteen nodes integrate p and u p, found by halving."""
        low, high = edges[:-1], edges[1:]
        done: list[Array] = [edges]
        for _ in range(54):
            middle = (low + high) / 2
            whole, left, right = _gauss(low, high), _gauss(low, middle), _gauss(middle, high)
            halves = left.integrate(self.pdf(left.nodes)) + right.integrate(self.pdf(right.nodes))
            off = np.abs(whole.integrate(self.pdf(whole.nodes)) - halves) * np.maximum(1, high)
            rough = (off > 1e-14) & (middle > low) & (middle < high)
            if not np.any(rough):
                break
            low, middle, high = low[rough], middle[rough], high[rough]
            done.append(middle)
            low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
        return np.unique(np.concatenate(done))

    def _beyond(self) -> Array:
        """∫ uᵖ p(u) du past the last edge for p = 0, 1, from the power by which p falls there."""
        end = self._edges[-1]
        p, before = float(self.pdf(end)), float(self.pdf(end / 2))
        if p == 0 or before == 0:
            return np.zeros((2, 1))
        power = np.log2(before / p)
        if power <= 2 + 1e-9:
            raise JomaError(f"pdf must have a finite mean of |u|, but falls like u^-{power:.3g}")
        return np.array([[p * end / (power - 1)], [p * end**2 / (power - 2)]])

    def _tail(self, s: Array, power: int) -> Array:
        """∫_s^∞ uᵖ p(u) du: the panels beyond s, summed from the far end, and a part of its own."""
        panel = np.minimum(np.searchsorted(self._edges, s, side="right"), len(self._edges) - 1)
        s = np.minimum(s, self._edges[-1])
        part = _gauss(s, self._edges[panel])
        return self._tails[power][panel] + part.integrate(self.pdf(part.nodes) * part.nodes**power)


def _of_arrays(pdf: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function itself if it takes arrays, or called number by number."""
    probe = np.array([0.25, 0.5])
    try:
        if np.shape(pdf(probe)) == probe.shape:
            return pdf
    except (TypeError, ValueError):
        pass
    return np.vectorize(pdf, otypes=[np.float64])


def radial(density: Callable[[Array], Array], n: int, *, breaks: Sequence[float] = ()) -> Density:
    """Eqns 33-36: the marginal of an isotropic distribution given by its density in n dimensions.

    Args:
        density: p₀(‖x‖) for an array of norms.
        n: the dimension, at least 1.
        breaks: norms at which p₀ jumps.
    """
    if _checks.whole("n", n, 1) == 1:
        return Density(density, breaks)
    shell = sphere_constant(n)
    edges = np.concatenate([[0.0], np.geomspace(2.0**-6, 2.0**20, 79)])

    def marginal(y: Array) -> Array:
        # In l the integrand p₀(√(y²+l²)) lⁿ⁻² jumps where √(y²+l²) passes a break.
        y = np.asarray(y, dtype=np.float64)
        cuts = [np.sqrt(np.maximum(b**2 - y**2, 0.0)) for b in breaks]
        grid = np.broadcast_to(edges, (*y.shape, edges.size))
        grid = np.sort(np.concatenate([grid, *(c[..., None] for c in cuts)], axis=-1), axis=-1)
        panels = _gauss(grid[..., :-1], grid[..., 1:])
        p = density(np.sqrt(y[..., None, None] ** 2 + panels.nodes**2))
        return shell * np.sum(panels.integrate(p * panels.nodes ** (n - 2)), axis=-1)

    return Density(marginal, breaks)


def sphere_constant(n: int) -> float:
    """Eqn 35: (n-1) π^{(n-1)/2}/Γ((n+1)/2), the area of the unit sphere in n-1 dimensions."""
    n = _checks.whole("n", n, 2)
    return float((n - 1) * np.exp((n - 1) / 2 * np.log(np.pi) - _special.gammaln((n + 1) / 2)))


@dataclass(frozen=True)
class _Panels:
    nodes: Array
    weights: Array

    def integrate(self, values: Array) -> Array:
        return np.sum(values * self.weights, axis=-1)


_GAUSS: tuple[Array, Array] = np.polynomial.legendre.leggauss(16)


def _gauss(low: Array, high: Array) -> _Panels:
    """Gauss-Legendre nodes and weights on [low, high], on a new last axis."""
    half = (high - low)[..., None] / 2
    return _Panels((low + high)[..., None] / 2 + half * _GAUSS[0], half * _GAUSS[1])

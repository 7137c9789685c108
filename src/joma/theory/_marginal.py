"""What a marginal is, how light tails are integrated, and marginals of a density the user gives.

Gaussian, Student's t and ball marginals fall by a factor e^{-r} from x to x + y where
(x+y)² = x² + E(r), with E = 2r for the Gaussian and E = A (e^{2r/κ} - 1) for the other two. So the
integrals over the tail, divided by the density at x, are integrals of e^{-r} times a smooth
function of r, without cancellation or underflow.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(56)
# In √r, up to r = 49, where e^{-r} is below rounding.
_ROOT = 3.5 * (_NODES + 1)
_R = _ROOT**2
_MEASURE = 3.5 * _WEIGHTS * 2 * _ROOT * np.exp(-_R)
_CENTRE, _CENTRE_WEIGHTS = np.polynomial.legendre.leggauss(32)
_GAUSS: tuple[Array, Array] = np.polynomial.legendre.leggauss(16)


class Marginal(ABC):
    """A symmetric density on the line: the projection of an isotropic distribution.

    Attributes:
        reach: How far out the marginal is known: the end of its support; inf for most.
        noise: Relative rounding error of θ₁ and θ₂.
        least_mass: The θ₁ below which neither is known to that error.
    """

    reach: float = np.inf
    noise: float = 2e-14
    least_mass: float = 1e-290

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

    def log_theta1(self, s: ArrayLike) -> Array:
        """Ln θ₁, right also where θ₁ is below the smallest float; -inf where it is 0."""
        with np.errstate(divide="ignore"):
            return np.log(self.theta1(s))

    def inverse_hazard(self, s: ArrayLike) -> Array:
        """θ₁/p, the slope of G (after Eqn 57); NaN where both are 0 to rounding."""
        p = self.pdf(s)
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.theta1(s) / p

    def mean_residual_error(self, s: ArrayLike) -> Array:
        """Relative rounding error of `mean_residual`: that of θ₁ and θ₂ before they cancel."""
        s = np.asarray(s, dtype=np.float64)
        terms = self.theta2(s) + np.abs(s) * self.theta1(s)
        total = self.mean_residual(s) * self.theta1(s)
        return self.noise * terms / np.where(total > 0, total, np.inf)


class LightTailed(Marginal):
    """Families whose tails are integrated from the density's own fall, at any depth.

    A subclass says in `_tail` what `integrate_tail` needs. Its θ₁ and mean residual life are then
    known to about 1e-14 also where θ₁ is far below the smallest float.
    """

    noise = 2e-13  # that of the density: rounding of a logarithm of up to -700
    least_mass = 0.0

    @abstractmethod
    def log_pdf(self, u: ArrayLike) -> Array:
        """Ln p(u)."""

    @abstractmethod
    def _tail(self, x: Array) -> tuple[Array, float]:
        """A at x, and κ."""

    @property
    @abstractmethod
    def _core(self) -> float:
        """The place from which on the tail rule is used."""

    def pdf(self, u: ArrayLike) -> Array:
        return np.exp(self.log_pdf(u))

    def theta1(self, s: ArrayLike) -> Array:
        s = np.asarray(s, dtype=np.float64)
        x = np.abs(s)
        tail = self._tail_share(x)
        near = np.minimum(x, self._core)
        inner = near * integrate_centre(self.pdf(near[..., None] * centre_nodes()))
        tail = np.where(x < self._core, 0.5 - inner, tail)
        return np.where(s < 0, tail, 1 - tail)

    def log_theta1(self, s: ArrayLike) -> Array:
        s = np.asarray(s, dtype=np.float64)
        far = np.maximum(-s, self._core)
        with np.errstate(divide="ignore"):
            return np.where(
                s < -self._core, self.log_pdf(far) + np.log(self._mills(far)), super().log_theta1(s)
            )

    def first_integral(self, s: ArrayLike) -> Array:
        s = np.asarray(s, dtype=np.float64)
        far = np.minimum(s, -self._core)
        share = self.theta1(far)
        deep = np.where(share > 0, share * np.nan_to_num(self.mean_residual(far)), 0.0)
        return np.where(s < -self._core, deep, super().first_integral(s))

    def mean_residual(self, s: ArrayLike) -> Array:
        s = np.asarray(s, dtype=np.float64)
        inside = np.where(self._inside(s), np.maximum(-s, self._core), self._core)
        _, life = integrate_tail(inside, *self._tail(inside))
        near = np.maximum(s, -self._core)
        life = np.where(
            s < -self._core, life, Marginal.first_integral(self, near) / self.theta1(near)
        )
        return np.where(self._inside(s), life, np.nan)

    def inverse_hazard(self, s: ArrayLike) -> Array:
        s = np.asarray(s, dtype=np.float64)
        near = super().inverse_hazard(np.maximum(s, -self._core))
        far = np.maximum(-s, self._core)
        ratio = np.where(s < -self._core, self._mills(far), near)
        return np.where(self._inside(s), ratio, np.nan)

    def mean_residual_error(self, s: ArrayLike) -> Array:
        return np.full(np.shape(s), 2e-14)

    def _inside(self, s: Array) -> NDArray[np.bool_]:
        return s > -self.reach

    def _tail_share(self, x: Array) -> Array:
        """P[u > x] from `_core` on."""
        return np.exp(self.log_pdf(x)) * self._mills(x)

    def _mills(self, x: Array) -> Array:
        inside = np.where(self._inside(-x), np.maximum(x, self._core), self._core)
        return np.where(self._inside(-x), integrate_tail(inside, *self._tail(inside))[0], 0.0)


def integrate_tail(x: Array, scale: Array, kappa: float) -> tuple[Array, Array]:
    """Return θ₁(-x)/p(x) and F(-x)/θ₁(-x), each to about 1e-14.

    Args:
        x: places in the tail, at least about one standard deviation out.
        scale: A, of the shape of x; ignored for the Gaussian.
        kappa: κ; infinite for the Gaussian.
    """
    x = x[..., None]
    if np.isinf(kappa):
        squared, slope = 2 * _R, np.full_like(_R, 2.0)
    else:
        growth = scale[..., None] * np.expm1(2 * _R / kappa)
        squared = growth
        slope = (growth + scale[..., None]) * 2 / kappa
    root = np.hypot(x, np.sqrt(squared))
    beyond = squared / (root + x)
    measure = _MEASURE * slope / (2 * root)
    mills = np.sum(measure, axis=-1)
    return mills, np.sum(measure * beyond, axis=-1) / mills


def integrate_centre(pdf_of: Array) -> Array:
    """Return the mean of a function over [0, 1] from its values at `centre_nodes`."""
    return pdf_of @ (_CENTRE_WEIGHTS / 2)


def centre_nodes() -> Array:
    """Nodes in [0, 1] of the rule of `integrate_centre`."""
    return (_CENTRE + 1) / 2


class Density(Marginal):
    """Any symmetric density of the user's, integrated once when made.

    Args:
        pdf: p(u) for u ≥ 0, of arrays or of single numbers; it must be non-negative, integrate to
            1 over the line (½ over u ≥ 0) and have a finite mean of |u|.
        breaks: points u > 0 at which the density or its derivative jumps. They are found anyhow,
            but naming them makes it exact there.
    """

    noise = 1e-11
    least_mass = 1e-25

    def __init__(self, pdf: Callable[[Any], Any], breaks: Sequence[float] = ()) -> None:
        if not callable(pdf):
            raise JomaError(f"pdf must be a function of u, got {pdf!r}")
        self._pdf = _of_arrays(pdf)
        given = _checks.positive("breaks", list(breaks)) if len(breaks) else np.empty(0)
        # Panels of doubling width resolve a peak at zero as well as a heavy tail; each is then
        # halved until its integrals settle.
        near, far = np.geomspace(2.0**-30, 2.0**12, 169), 2.0 ** np.arange(12.5, 100.5)
        self._edges = self._refined(np.unique(np.concatenate([[0.0], near, far, given])))
        self.reach = float(self._edges[-1])
        panels = _gauss(self._edges[:-1], self._edges[1:])
        p = self.pdf(panels.nodes)
        moments = np.stack([panels.integrate(p), panels.integrate(p * panels.nodes)])
        tails = np.concatenate([moments, self._beyond()], axis=1)
        self._tails = np.cumsum(tails[:, ::-1], axis=1)[:, ::-1]
        if abs(self._tails[0, 0] - 0.5) > 1e-6:
            raise JomaError(f"pdf must integrate to 1, got {2 * self._tails[0, 0]:.8g}")

    def __repr__(self) -> str:
        return f"Density({getattr(self._pdf, '__name__', 'pdf')})"

    def pdf(self, u: ArrayLike) -> Array:
        u = np.abs(np.asarray(u, dtype=np.float64))
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            p = np.asarray(self._pdf(u), dtype=np.float64)
        if not np.all(np.isfinite(p)) or np.any(p < 0):
            raise JomaError("pdf must be finite and ≥ 0 for every u ≥ 0")
        return p

    def theta1(self, s: ArrayLike) -> Array:
        s = np.asarray(s, dtype=np.float64)
        tail = self._tail(np.abs(s), 0)
        return np.where(s < 0, tail, 1 - tail)

    def theta2(self, s: ArrayLike) -> Array:
        return self._tail(np.abs(np.asarray(s, dtype=np.float64)), 1)

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
    return float((n - 1) * np.exp((n - 1) / 2 * np.log(np.pi) - special.gammaln((n + 1) / 2)))


class _Panels(NamedTuple):
    nodes: Array
    weights: Array

    def integrate(self, values: Array) -> Array:
        return np.sum(values * self.weights, axis=-1)


def _gauss(low: Array, high: Array) -> _Panels:
    """Gauss-Legendre nodes and weights on [low, high], on a new last axis."""
    half = (high - low)[..., None] / 2
    return _Panels((low + high)[..., None] / 2 + half * _GAUSS[0], half * _GAUSS[1])

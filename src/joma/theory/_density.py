"""Marginals of a density that the user gives, along a line or in n dimensions (Eqns 33-36)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from joma.errors import JomaError
from joma.theory import _checks, _special
from joma.theory._checks import Array
from joma.theory._marginal import Marginal


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

    @property
    def reach(self) -> float:
        return float(self._edges[-1])

    @property
    def noise(self) -> float:
        return 1e-11

    @property
    def least_mass(self) -> float:
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

"""Eqn 6 inverted: the y = ln 1/δ at which F(y) = t, for μ ≥ 0, to the last digits.

    F(y) = e^{-μ²/2} y + H(1-e⁻ʸ, μ),   H(r, μ) = ∫₀ʳ (e^{-μ²x²/2} - e^{-μ²/2})/(1-x) dx

F is concave, so Newton's method from below never overshoots, but for rounding.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.theory._checks import Array

_REACHED = 12  # μx up to which the integrand of H counts
_CHUNK = 8192  # components at once, so that their quadrature nodes stay in the cache


def solve(mu: Array, t: Array) -> Array:
    """The y = ln 1/δ with F(y) = t, by Newton's method from the larger of two lower bounds."""
    return _newton(_from_below(mu, t), mu, t)


def _from_below(mu: Array, t: Array) -> Array:
    """The larger of two lower bounds of y."""
    with np.errstate(over="ignore"):
        late = np.exp(mu**2 / 2) * (t - smooth_part(np.ones_like(mu), mu))
    return np.maximum(t, late)


def _newton(y: Array, mu: Array, t: Array) -> Array:
    """Newton's method in chunks, so that the quadrature's nodes stay in the cache."""
    chunks = [slice(i, i + _CHUNK) for i in range(0, y.size, _CHUNK)]
    return np.concatenate([np.empty(0), *(_newton_chunk(y[c], mu[c], t[c]) for c in chunks)])


def _newton_chunk(y: Array, mu: Array, t: Array) -> Array:
    y = _steps(y, mu, t, np.nonzero(np.isfinite(y))[0], enough=1e-8)
    # Extended precision where float64's error in F would be seen in y.
    rough = 1e-15 * t > 1e-12 * y * _slope(y, mu)
    sensitive = np.nonzero(rough & np.isfinite(y) & (t > 0))[0]
    if sensitive.size:
        wide, wide_mu, wide_t = (a[sensitive].astype(np.longdouble) for a in (y, mu, t))
        y[sensitive] = _steps(wide, wide_mu, wide_t, np.arange(sensitive.size), enough=1e-9)
    return y


def _steps(
    y: NDArray[Any], mu: NDArray[Any], t: NDArray[Any], active: NDArray[Any], enough: float
) -> NDArray[Any]:
    """Newton's method in the precision given, until a step or what is left of t is negligible.

    Convergence is quadratic: the step after one of `enough` is below the rounding error. Within the
    sudden growth of a large μ, F comes within its rounding error of t before y has settled; a step
    from there could lead anywhere.
    """
    y = y.copy()
    rounding = 2 * np.finfo(y.dtype).eps
    for _ in range(200):
        left = t[active] - _elapsed(y[active], mu[active])
        step = left / _slope(y[active], mu[active])
        far = (np.abs(left) > rounding * t[active]) | (np.abs(step) <= 1e-3 * y[active])
        y[active] = np.maximum(y[active] + np.where(far, step, 0), t[active])
        active = active[far & (np.abs(step) > enough * y[active])]
        if active.size == 0:
            break
    return y


def _slope(y: NDArray[Any], mu: NDArray[Any]) -> NDArray[Any]:
    """dF/dy = exp(-v²/2)."""
    return np.exp(-((mu * np.expm1(-y)) ** 2) / 2)


def _elapsed(y: NDArray[Any], mu: NDArray[Any]) -> NDArray[Any]:
    return np.exp(-(mu**2) / 2) * y + smooth_part(-np.expm1(-y), mu)


def smooth_part(r: NDArray[Any], mu: NDArray[Any]) -> NDArray[Any]:
    """H(r, μ) by Gauss-Legendre quadrature of an entire function, in the precision of r.

    A panel of width 6/μ takes 32 nodes to full precision. Beyond x = 12/μ the integrand adds less
    than 10⁻²⁸ of the whole, so two panels do for every μ.
    """
    nodes, node_weights = _gauss_legendre(r.dtype)
    large = np.maximum(np.abs(mu), _REACHED)
    r = np.minimum(r, _REACHED / large)
    # Beyond 10¹⁰⁰, whose square overflows not yet, H is a function of rμ over μ.
    excess = np.maximum(np.abs(mu) / 1e100, 1)
    r, mu = r * excess, mu / excess
    panels = np.clip(np.ceil(np.abs(mu) / 6), 1, _REACHED // 6).astype(np.int64)
    result = np.zeros_like(r)
    for count in np.unique(panels):
        where = panels == count
        width = (r[where] / count)[:, None]
        half_square = (mu[where] ** 2 / 2)[:, None]
        total = np.zeros_like(r[where])
        for panel in range(int(count)):
            x = width * (panel + nodes)
            left = 1 - x
            # The quotient (e^{-μ²x²/2} - e^{-μ²/2})/(1-x), without its cancellation at x = 1.
            numerator = -np.exp(-half_square * x**2) * np.expm1(-half_square * left * (1 + x))
            safe = np.where(left > 0, left, 1)
            total += (numerator / safe) @ node_weights
        result[where] = width[:, 0] * total
    return result / excess


@cache
def _gauss_legendre(dtype: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """32 nodes and weights on [0, 1], refined to the given precision by Newton steps."""
    rough: Array = np.polynomial.legendre.leggauss(32)[0]
    x = rough.astype(dtype)
    derivative = np.ones_like(x)
    for _ in range(3):
        before, now = np.ones_like(x), x
        for n in range(2, 33):
            before, now = now, ((2 * n - 1) * x * now - (n - 1) * before) / n
        derivative = 32 * (before - x * now) / (1 - x**2)
        x = x - now / derivative
    return (1 + x) / 2, 1 / ((1 - x**2) * derivative**2)

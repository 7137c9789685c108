"""Tails of Gaussian, Student's t and ball marginals, without cancellation or underflow.

All three densities fall by a factor e^{-r} from x to x + y where (x+y)² = x² + E(r), with
E = 2r for the Gaussian and E = A (e^{2r/κ} - 1) for the other two. So the integrals over the tail,
divided by the density at x, are integrals of e^{-r} times a smooth function of r.
"""

import numpy as np

from joma.theory._checks import Array

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(56)
# In √r, up to r = 49, where e^{-r} is below rounding.
_ROOT = 3.5 * (_NODES + 1)
_R = _ROOT**2
_MEASURE = 3.5 * _WEIGHTS * 2 * _ROOT * np.exp(-_R)
_CENTRE, _CENTRE_WEIGHTS = np.polynomial.legendre.leggauss(32)


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

"""√2 erfinv(erf(u/√2) + way), to the last digits also where it is about to reach infinity.

Near there the complement of the argument decides, of which float64 would keep half of the digits:
it is formed in long double (80 bits on x86; where long double is float64, so is the result).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.theory import _special
from joma.theory._checks import Array

Extended = NDArray[np.longdouble]

_SQRT_2_OVER_PI = np.longdouble("0.79788456080286535587989211986876373695")
_SQRT_HALF = np.longdouble("0.70710678118654752440084436210484903928")
_PI = np.longdouble("3.14159265358979323846264338327950288420")
_TWO_OVER_SQRT_PI = np.longdouble("1.12837916709551257389615890312154517169")

_FAR = 0.99  # share of the way to infinity up to which float64 is exact to 1e-14
_NEAR = 1e-2  # share of the way left below which erfc(u/√2) needs more than float64
_DEEP = 25.0  # |u| from which erfc(u/√2) is formed in long double, whose range is larger
_CENTRAL = 1e-2  # |erf(v/√2)| below which its terms cancel and need more than float64
_TINY = 1e-290  # what float64's inverse functions take

LARGEST_START = float(np.floor(0.98 * np.sqrt(-2 * np.log(np.finfo(np.longdouble).tiny))))
"""The |u| up to which erfc(u/√2) is a number: 147 where long double has 80 bits, else 36."""


def extended(value: NDArray[Any]) -> Extended:
    """The value in long double."""
    return np.asarray(value, dtype=np.longdouble)


def product(factors: list[NDArray[Any]], exponent: Array) -> Extended:
    """The product of numbers ≥ 0 and of e^exponent, also where one of them is out of range."""
    with np.errstate(all="ignore"):
        result = np.exp(extended(exponent))
        for factor in factors:
            result = result * factor
        if np.all(np.isfinite(result) & (result > 0)):
            return extended(result)
        # A factor out of range does not mean that the product is.
        logs = log_product(factors, exponent)
        return extended(np.where(np.isfinite(result) & (result > 0), result, np.exp(logs)))


def log_product(factors: list[NDArray[Any]], exponent: Array) -> Extended:
    """The logarithm of `product`; -inf where a factor is 0."""
    with np.errstate(divide="ignore"):
        logs = [np.log(extended(factor)) for factor in factors]
    return extended(sum(logs, start=extended(exponent)))


def rate(log_offset: Array, t: Array, normalizer: Array) -> Extended:
    """√(2/π) eᶜ t/A, the way that a unit of saliency covers in time t."""
    return product([t * _SQRT_2_OVER_PI, 1 / extended(normalizer)], log_offset)


def times(start: Array, size: NDArray[Any], log_offset: Array, normalizer: Array) -> Extended:
    """√(π/2) erfc(start/√2) A e^{-c}/size, the time to infinity; inf where size is 0."""
    return product(_way_to_infinity(start, size, normalizer), -log_offset)


def log_times(start: Array, size: NDArray[Any], log_offset: Array, normalizer: Array) -> Extended:
    """The logarithm of `times`, which has no range to leave."""
    return log_product(_way_to_infinity(start, size, normalizer), -log_offset)


def _way_to_infinity(start: Array, size: NDArray[Any], normalizer: Array) -> list[NDArray[Any]]:
    way = erfc_of_scaled(start) if start.any() else extended(np.ones(()))
    with np.errstate(divide="ignore"):
        return [way, extended(normalizer) / _SQRT_2_OVER_PI, 1 / extended(size)]


def advance(start: Array, size: NDArray[Any], rate: Extended) -> Array:
    """√2 erfinv(erf(start/√2) + size · rate), inf where the argument has reached 1.

    Args:
        start: u, broadcast to the others.
        size: ≥ 0, in float64 or long double.
        rate: ≥ 0.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        covered = np.asarray(size * rate.astype(np.float64), dtype=np.float64)
    careful = covered > _FAR
    if start.any():
        careful = careful | (start != 0)
    is_careful = careful.any()
    v = np.asarray(_special.erfinv(np.where(careful, 0.0, covered) if is_careful else covered))
    v *= np.sqrt(2)
    if is_careful:

        def chosen(values: NDArray[Any]) -> NDArray[Any]:
            return np.broadcast_to(values, v.shape)[careful]

        with np.errstate(over="ignore", invalid="ignore"):
            way = extended(chosen(size) * chosen(rate))
        begin = chosen(start)
        left = remaining(begin, way)
        v[careful] = np.where(left > 0, inverse(begin, way, left), np.inf)
    return v


def remaining(start: Array, covered: Extended) -> Extended:
    """1 - erf(start/√2) - covered, what is left of the way to infinity, without cancellation.

    It decides the weight near a blow-up, where float64 would leave half of its digits.
    """
    if not start.any():
        return 1 - covered
    total = extended(_special.erfc(start / np.sqrt(2)))
    left = extended(total - covered)
    near = (np.abs(left) < _NEAR * total) | (start > _DEEP)
    exact = erfc_of_scaled(np.broadcast_to(start, left.shape)[near])
    left[near] = exact - np.broadcast_to(covered, left.shape)[near]
    return left


def inverse(start: Array, covered: Extended, left: Extended) -> Array:
    """The v with erf(v/√2) = erf(start/√2) + covered, for start and covered as in `remaining`.

    Three forms of one inverse, each exact where the others cancel.
    """
    start, covered = np.broadcast_arrays(start, covered)
    v = np.full(left.shape, np.nan)
    ahead = left < 0.5
    v[ahead] = _tail(np.maximum(left[ahead], 0))
    middle = ~ahead & (left < 1.5)
    v[middle] = _centre(start[middle], covered[middle])
    behind = left >= 1.5
    v[behind] = -_tail(_erfc(-start[behind]) + covered[behind])
    return np.sqrt(2) * v


def _tail(complement: Extended) -> Array:
    """The inverse of erfc, also of a complement smaller than any float64."""
    v = _special.erfcinv(complement)
    deep = (complement < _TINY) & (complement > 0)
    if np.any(deep):
        v[deep] = -_special.ndtri_exp(np.log(complement[deep] / 2)) / np.sqrt(2)
    return v


def _centre(start: Array, covered: Extended) -> Array:
    """The inverse of erf at erf(start/√2) + covered, also where the two cancel."""
    argument = extended(_special.erf(start / np.sqrt(2)) + covered)
    cancels = np.abs(argument) < _CENTRAL
    if np.any(cancels):
        # With u ≤ 0 here: erf(u/√2) = erfc(-u/√2) - 1.
        argument[cancels] = (erfc_of_scaled(-start[cancels]) - 1) + covered[cancels]
    return _special.erfinv(argument)


def _erfc(u: Array) -> Extended:
    """erfc(u/√2), in long double where float64 runs out of range."""
    result = extended(_special.erfc(u / np.sqrt(2)))
    deep = u > _DEEP
    if np.any(deep):
        result[deep] = erfc_of_scaled(u[deep])
    return result


def erfc_of_scaled(u: Array) -> Extended:
    """erfc(u/√2) in extended precision, with a small relative error also where it is tiny.

    Near zero the Maclaurin series of erf, elsewhere the trapezoidal rule for Gaussian integrals
    with its pole term (Chiarella and Reichel, 1968), whose terms are all positive.
    """
    x = np.abs(u.astype(np.longdouble)) * _SQRT_HALF
    square = u.astype(np.longdouble) ** 2 / 2
    central = x < 0.7
    term = np.where(central, x, 0)
    series = term.copy()
    for n in range(1, 30):
        term = term * (2 * square / (2 * n + 1))
        series += term
    near_zero = 1 - _TWO_OVER_SQRT_PI * np.exp(-square) * series

    safe = np.where(central, 1, square)
    root = np.sqrt(safe)
    step = np.longdouble(2) / 5
    total = 1 / safe
    for n in range(1, 19):
        total += 2 * np.exp(-((n * step) ** 2)) / ((n * step) ** 2 + safe)
    # The pole at i·x lies inside the rule's strip only for x < π/step.
    pole = np.where(root < _PI / step, 2 / np.expm1(2 * _PI / step * np.minimum(root, 10)), 0)
    tail = step * root * np.exp(-safe) / _PI * total - pole

    upper = np.where(central, near_zero, tail)
    return np.where(u < 0, 2 - upper, upper)

"""Lemmas 6, 7 and Theorem 4 at one point of their domain, for the adversary."""

from collections.abc import Callable
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.measurement import Formula, Measurement
from joma.experiments.claims.reference.eqn6 import Course, follow
from joma.experiments.claims.search import Point, Real, Search
from joma.theory.as_printed import nonlinear as printed

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_SIZE = Real(1e-6, 6, special=(1.872,))


def integral(function: Callable[[Any], Any], *panels: tuple[float, float, int]) -> float:
    """An integral by Gauss's rule with 20 nodes in each of several panels."""
    total = 0.0
    for low, high, count in panels:
        if high > low:
            ends = np.linspace(low, high, count + 1)
            half = (high - low) / count / 2
            x = ends[:-1, None] + half * (1 + _NODES)
            total += float(np.sum(function(x) @ _WEIGHTS)) * half
    return total


def offset(y: float, mu: float) -> float:
    """F - e^{-μ²/2} y at ln 1/δ = y: ∫ (e^{-v²/2} - e^{-μ²/2}) dy."""
    bend, far = min(y, 8 / max(mu, 0.2)), min(y, 45.0)

    def excess(x: Any) -> Any:
        # With the difference of two exponentials written without its cancellation.
        v = -mu * np.expm1(-x)
        return -np.exp(-(v**2) / 2) * np.expm1(-(mu - v) * (mu + v) / 2)

    return integral(excess, (0.0, bend, 8), (bend, far, 12))


def _at_most(peak: Callable[[float], float]) -> Callable[[Formula, Point], Measurement]:
    return lambda formula, point: Measurement(peak(point["y"]) - float(formula()), 1e-12)


def _lemma7(y: float) -> float:
    """e^{-y²/2} ∫₀ʸ e^{x²/2} dx with x = y - s, so that nothing overflows."""
    return integral(lambda s: np.exp(-s * (y - s / 2)), (0.0, min(y, 40 / y), 8))


def _offset_bound(formula: Formula, point: Point) -> Measurement:
    found = offset(point["y"], point["size"])
    return Measurement(-found if found < -1e-9 else found - float(formula()), 1e-9)


def _lambda(formula: Formula, point: Point) -> Measurement:
    """|λ_jk| of Eqn 7 at a time, from courses by quadrature."""
    scaled = [
        np.exp(-(size**2) / 2) * float(Course.of(size).at(point["time"]))
        for size in (point["size_j"], point["size_k"])
    ]
    slack = 1e-7 + 1e-13 * max(scaled)
    return Measurement(abs(scaled[0] - scaled[1]) - float(formula()), slack)


def _leading(formula: Formula, point: Point) -> Measurement:
    """Whether F minus its leading term stays within the bound of Theorem 4."""
    y, size = point["y"], point["size"]
    leading = float(np.exp(-(size**2) / 2)) * y
    rest = offset(y, size) + (leading - float(formula(-y, size)))
    return Measurement(abs(rest) - printed.offset_bound(), 1e-9 + 1e-14 * leading)


def _settled(formula: Formula, point: Point) -> Measurement:
    """N|Λ| where ln δ_k is N times the threshold."""
    size_j, size_k, many = point["size_j"], point["size_k"], point["many"]
    y_k = -many * float(formula(size_k))
    scaled_k = np.exp(-(size_k**2) / 2) * y_k
    h_k = offset(y_k, size_k)
    y_j = float(Course.of(size_j).at(scaled_k + h_k))
    return Measurement(many * abs(h_k - offset(y_j, size_j)) / scaled_k - 1, 1e-6)


def _logistic(formula: Formula, point: Point) -> Measurement:
    """Log residual of v̇ = (μ - v) v by LSODA, and how fast it falls in the end."""
    mu = point["size"]
    start, t = mu * point["share"], point["angle"] / mu
    grown = float(follow(lambda w: (mu - start * w) * w, np.ones(1), t, 1e-11)[0])
    left = 1 - grown * point["share"]
    if left < 1e-3:
        raise JomaError("too close to the target for the reference")
    off = abs(float(formula([mu], t, initial=start)[0]) - np.log(left))
    # From v near μ on, δ falls by e^{-μt}.
    late = (60 - np.log(point["share"])) / mu
    ends = [float(formula([mu], when, initial=start)[0]) for when in (late, late + 1 / mu)]
    return Measurement(max(off, abs(ends[1] - ends[0] + 1)), 1e-6)


_PAIR: dict[str, Any] = {"size_j": _SIZE, "size_k": _SIZE}
_Y = Real(1e-6, 1e8, log=True)

LEMMA6 = Search({"y": Real(1e-6, 1e3, log=True)}, _at_most(lambda y: -np.expm1(-(y**2)) / y))
LEMMA7 = Search({"y": Real(1e-6, 1e3, log=True)}, _at_most(_lemma7))
OFFSET = Search({"size": Real(0, 37), "y": _Y}, _offset_bound)
LAMBDA = Search({**_PAIR, "time": Real(1e-4, 1e6, log=True)}, _lambda)
LEADING = Search({"size": Real(0, 6), "y": _Y}, _leading)
SETTLED = Search({**_PAIR, "many": Real(0.1, 1e4, log=True)}, _settled)
LOGISTIC = Search(
    {
        "size": Real(1e-2, 1e2, log=True),
        "share": Real(1e-12, 0.99, log=True),
        "angle": Real(1e-3, 30, log=True),
    },
    _logistic,
)

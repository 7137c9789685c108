"""Eqn 3 in the digits of mpmath, from its defining integral."""

from typing import Any

import mpmath


def log_own_time(delta: float, start: float, offset: float, normalizer: float) -> Any:
    """Return ln of ∫ dv/v̇ from v(0) to infinity for v̇ = Δ exp(v²/2 + c)/A; infinity for Δ = 0."""
    if not delta:
        return mpmath.inf
    u = mpmath.mpf(start) * (1 if delta > 0 else -1)
    way = mpmath.sqrt(mpmath.pi / 2) * mpmath.erfc(u / mpmath.sqrt(2))
    return mpmath.log(way) + mpmath.log(normalizer) - mpmath.mpf(offset) - mpmath.log(abs(delta))


def distance(delta: float, start: float, v: float, log_way: Any) -> float:
    """Return by how much v must change for ∫ e^{-u²/2} du from v(0) to v to be exp(log_way)."""
    sign = 1 if delta > 0 else -1
    begin, end = (mpmath.mpf(sign * a) / mpmath.sqrt(2) for a in (start, v))
    if begin >= 0:
        covered = mpmath.erfc(begin) - mpmath.erfc(end)
    elif end <= 0:
        covered = mpmath.erfc(-end) - mpmath.erfc(-begin)
    else:
        covered = mpmath.erf(end) - mpmath.erf(begin)
    missing = mpmath.exp(log_way) - covered * mpmath.sqrt(mpmath.pi / 2)
    return float(abs(missing * mpmath.exp(mpmath.mpf(v) ** 2 / 2)))


def length_at(delta: Any, t: Any) -> float:
    """Return v(t) of v̇ = Δ exp(v²/2) from zero, by inverting erf in the digits of mpmath."""
    argument = mpmath.sqrt(2 / mpmath.pi) * mpmath.mpf(delta) * t
    return float(mpmath.sqrt(2) * mpmath.erfinv(argument))

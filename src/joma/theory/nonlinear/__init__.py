"""Nonlinear activation with attention: Eqn 6, Theorem 4, the drop and rebound of entropy and rank.

Eqn 6, v̇ = (μ - v) exp(v²/2), is solved without time stepping. With the residual δ = 1 - v/μ and
y = ln 1/δ it reads ẏ = exp(μ²(1-e⁻ʸ)²/2), so that t is an integral of y (Eqn 79),

    t = F = e^{-μ²/2} y + H(1-e⁻ʸ, μ),   H(r, μ) = ∫₀ʳ (e^{-μ²x²/2} - e^{-μ²/2})/(1-x) dx,

in which H is smooth and bounded (Theorem 4). F is concave in y: Newton's method from below never
overshoots. The dynamics without attention (Lemmas 1-5, Theorem 3) are in `clusters` and reached
from here as well.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from joma.common.renamed import renamed
from joma.errors import JomaError
from joma.theory import _checks, _special
from joma.theory._checks import Array
from joma.theory.clusters import CriticalPoint, critical_points, expectations
from joma.theory.nonlinear import _eqn6
from joma.theory.nonlinear._fates import Fate, RankFate, entropy_fate, stable_rank_fate
from joma.theory.nonlinear._fit import fit
from joma.theory.nonlinear._fit_result import Course, Eqn6Fit, Estimate

__all__ = [
    "Course",
    "CriticalPoint",
    "DropAndRebound",
    "Eqn6Fit",
    "Estimate",
    "Fate",
    "RankFate",
    "attention_entropy",
    "critical_points",
    "drop_and_rebound",
    "elapsed",
    "entropy_fate",
    "expectations",
    "fit",
    "lemma6_bound",
    "lemma7_bound",
    "linear_attention_residual",
    "log_residual",
    "offset",
    "offset_bound",
    "rate_ratio",
    "residual_offset",
    "settled_threshold",
    "stable_rank_fate",
    "weights",
    "weights_multi",
]

_LARGEST_MU = 37.0  # exp(μ²/2) is finite below


def weights(mu: ArrayLike, t: ArrayLike) -> Array:
    """Eqn 6, solved: v(t) of v̇ = (μ - v) exp(v²/2) from v(0) = 0.

    Args:
        mu: μ, shape (…, M) or one number, |μ| ≤ 37.
        t: time, a scalar or shape (T,).

    Returns:
        v(t), shape (…, M) or (T, …, M); see `log_residual` for how exact.
    """
    mu = _checks.finite("mu", mu)
    return -mu * np.expm1(log_residual(mu, t))


def log_residual(mu: ArrayLike, t: ArrayLike) -> Array:
    """Eqn 6 and Theorem 4: ln δ(t), δ = 1 - v/μ, exact where δ itself is below any float.

    Args:
        mu: μ, shape (…, M) or one number, |μ| ≤ 37; at μ = 0 the limit -t is given.
        t: time, a scalar or shape (T,).

    Returns:
        ln δ, shape (…, M) or (T, …, M). Its relative error is below 1e-11 for |μ| ≤ 6 and any t.
        For larger |μ| that holds except within the sudden growth at t ≈ R(μ), which takes a time
        of order e^{-μ²/2}, from |μ| = 8 on less than a float's spacing: there it is the ln δ of a
        time that differs from t by 1e-18 t (by a rounding error of t where long double is float64).
    """
    size = np.abs(_checks.finite("mu", mu))
    if np.any(size > _LARGEST_MU):
        raise JomaError(f"mu must lie in [-37, 37] (exp(μ²/2) overflows), got {np.max(size)}")
    t = _checks.times("t", t)
    if t.ndim == 0 or size.size >= _eqn6.TABLE_FROM:
        rows = [
            -_eqn6.solve_at(size.ravel(), float(now)).reshape(size.shape) for now in np.ravel(t)
        ]
        return rows[0] if t.ndim == 0 else np.stack(rows) if rows else np.empty((0, *size.shape))
    size, when = np.broadcast_arrays(size, t.reshape(t.shape + (1,) * size.ndim))
    return -_eqn6.solve(size.ravel(), when.ravel()).reshape(size.shape)


def elapsed(r: ArrayLike, mu: ArrayLike) -> Array:
    """Eqn 79: F(r, μ) = ∫₀ʳ e^{-μ²x²/2}/(1-x) dx, the time at which v/μ reaches r < 1."""
    r = _checks.non_negative("r", r)
    if np.any(r >= 1):
        raise JomaError(f"r must be < 1 (the target is never reached), got {np.max(r)}")
    mu = np.abs(_checks.finite("mu", mu))
    _checks.together(r=r.shape, mu=mu.shape)
    r, mu = np.broadcast_arrays(r, mu)
    return -np.exp(-(mu**2) / 2) * np.log1p(-r) + offset(r, mu)


def offset(r: ArrayLike, mu: ArrayLike) -> Array:
    """Theorem 4 (Eqn 88): H = F - e^{-μ²/2} ln(1/δ), between 0 and 0.8643 for all r and μ."""
    r = _checks.within("r", r, 0.0, 1.0)
    mu = np.abs(_checks.finite("mu", mu))
    _checks.together(r=r.shape, mu=mu.shape)
    r, mu = np.broadcast_arrays(r, mu)
    return _eqn6.smooth_part(r.ravel(), mu.ravel()).reshape(r.shape)


def residual_offset(mu: ArrayLike) -> Array:
    """After Theorem 4: R(μ) = H(1, μ), with which δ → exp(-e^{μ²/2}(t - R(μ)))."""
    return offset(1.0, mu)


def rate_ratio(mu_j: ArrayLike, mu_k: ArrayLike, t: ArrayLike) -> Array:
    """Theorem 4 (Eqn 7): ln(1/δ_j)/ln(1/δ_k) at time t; it tends to e^{μ_j²/2}/e^{μ_k²/2}."""
    mu_j, mu_k = _checks.finite("mu_j", mu_j), _checks.finite("mu_k", mu_k)
    _checks.together(mu_j=mu_j.shape, mu_k=mu_k.shape)
    mu_j, mu_k = np.broadcast_arrays(mu_j, mu_k)
    t = _checks.positive("t", t)
    return log_residual(mu_j, t) / log_residual(mu_k, t)


def linear_attention_residual(mu: ArrayLike, t: ArrayLike, *, initial: ArrayLike) -> Array:
    """Remark after Theorem 4: ln δ(t) with linear attention, v̇ = (μ - v) v from v(0) > 0.

    The equation is the logistic one, so the rates of convergence stand as μ_j to μ_k instead of
    exponentially apart. From v(0) = 0 nothing moves.
    """
    mu = _checks.positive("mu", mu)
    start = _checks.broadcasts("initial", _checks.positive("initial", initial), mu.shape)
    if np.any(start >= mu):
        raise JomaError(f"initial must be below mu, got {np.max(start)}")
    t = _checks.times("t", t)
    growth = mu * t.reshape(t.shape + (1,) * mu.ndim)
    # δ = (μ-v₀)/(μ-v₀+v₀e^{μt})
    return np.log(mu - start) - np.logaddexp(np.log(mu - start), np.log(start) + growth)


def weights_multi(mu: ArrayLike, t: ArrayLike) -> Array:
    """Eqn 6 for K hidden nodes: V̇ = diag(exp((V∘V)1/2)) (M - V) from V(0) = 0.

    As in Theorem 2, each row keeps its direction and its length follows the equation of one node
    at ‖μ_l‖. The rank of V is the target's throughout, and its stable rank is so at both ends;
    `stable_rank_fate` says what it does in between.

    Args:
        mu: targets, shape (M, K).
        t: time, a scalar or shape (T,).

    Returns:
        V(t), shape (M, K) or (T, M, K).
    """
    mu = _checks.finite("mu", mu, (None, None))
    length = _checks.norm(mu)
    share = -np.expm1(log_residual(length, t))
    return share[..., None] * mu


def attention_entropy(v: ArrayLike, *, scale: float = 1.0) -> Array:
    """Fig. 4: entropy of softmax(scale · v²) over the last axis, in nats."""
    v = _checks.not_empty("v", _checks.at_least_1d("v", v))
    return _special.entropy(_special.softmax(_checks.positive_scalar("scale", scale) * v**2))


def offset_bound() -> float:
    """Theorem 4 (Eqn 88), sharpened: sup of F - e^{-μ²/2} ln(1/δ), 0.8643 at r = 1, μ = 1.872."""
    return _maximum(lambda mu: float(residual_offset(mu)), 1.0, 3.0)


def lemma6_bound() -> float:
    """Lemma 6, sharpened: the maximum 0.638 of (1 - e^{-y²})/y, for the printed 1/√2."""
    return _maximum(lambda y: -np.expm1(-(y**2)) / y, 0.5, 2.0)


def lemma7_bound() -> float:
    """Lemma 7, sharpened: the maximum 0.765 of e^{-y²/2} ∫₀ʸ e^{x²/2} dx, for the printed 1."""
    return _maximum(lambda y: float(np.sqrt(2) * _special.dawsn(y / np.sqrt(2))), 0.5, 3.0)


def settled_threshold(mu: ArrayLike) -> Array:
    """Theorem 4, closing line corrected: the ln δ_k = -0.8643 e^{+μ_k²/2} at which |Λ| ≤ 1.

    Λ is the relative error of the limit in Eqn 7; N times this ln δ_k makes it at most 1/N.
    """
    return -offset_bound() * np.exp(_checks.finite("mu", mu) ** 2 / 2)


class DropAndRebound(NamedTuple):
    """How far a curve falls from its start, and how far it rises again from its lowest point."""

    drop: Array
    rebound: Array


def drop_and_rebound(curve: ArrayLike, axis: int = 0) -> DropAndRebound:
    """Fig. 4 and end of Section 4: the drop of a curve to its minimum and its rise at the end."""
    values = _checks.at_least_1d("curve", curve)
    along = _checks.whole("axis", axis, -values.ndim)
    if along >= values.ndim:
        raise JomaError(f"axis must be below the {values.ndim} axes of curve, got {along}")
    curve = np.moveaxis(values, along, 0)
    if len(curve) == 0:
        raise JomaError("curve must hold at least one value, got none")
    low = np.min(curve, axis=0)
    return DropAndRebound(curve[0] - low, curve[-1] - low)


def _maximum(function: Callable[[float], float], low: float, high: float) -> float:
    """The maximum of a function with one peak in [low, high]."""
    found: Any = optimize.minimize_scalar(
        lambda y: -function(y), bounds=(low, high), method="bounded", options={"xatol": 1e-9}
    )
    return float(-found.fun)


__getattr__ = renamed(__name__, {"Fit": "Eqn6Fit"})

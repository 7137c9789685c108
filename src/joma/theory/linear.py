"""Linear activation: Theorem 2, its winner in finite time, many hidden nodes, linear attention.

With linear activation and exp attention, the invariant of Theorem 1 turns the block into one
equation per token, v̇ = Δ exp(v²/2 + c)/A, that separates:

    erf(v/√2) = erf(v₀/√2) + √(2/π) Δ eᶜ t/A.

The right side reaches ±1 at a finite time, the token's own blow-up time.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from joma.errors import JomaError
from joma.theory import _checks, spectra
from joma.theory._checks import Array


def weights(
    delta: ArrayLike,
    t: ArrayLike,
    *,
    initial: ArrayLike = 0.0,
    log_offset: ArrayLike = 0.0,
    normalizer: ArrayLike = 1.0,
    beyond: Literal["raise", "inf"] = "raise",
) -> Array:
    """Theorem 2, solved: the weights v(t) of v̇ = Δ exp(v²/2 + c)/A.

    Args:
        delta: Δ, the saliency of each token, shape (…, M), or one number.
        t: time, a scalar or shape (T,).
        initial: v(0), broadcast to delta.
        log_offset: c, the constant of Theorem 1, broadcast to delta.
        normalizer: A, broadcast to delta.
        beyond: "raise" where t has passed the first blow-up, with which the joint solution ends;
            "inf" to let each token follow its own equation, ±inf from its own time on.

    Returns:
        v(t), shape (…, M) for a scalar t and (T, …, M) otherwise, to 1e-9 relative up to
        1 - t/t* = 1e-7 where long double has 80 bits, and from zero up to 1e-12. Where v crosses
        zero, the error is relative to 1e-6.
    """
    tokens = _Tokens.checked(delta, initial, log_offset, normalizer)
    return _evolve(tokens, _checks.times("t", t), beyond)


def blowup_time(
    delta: ArrayLike,
    *,
    initial: ArrayLike = 0.0,
    log_offset: ArrayLike = 0.0,
    normalizer: ArrayLike = 1.0,
) -> Array:
    """After Theorem 2: the time at which each token alone reaches sign(Δ)·∞; inf where Δ is 0.

    From zero it is A√(π/2)/|Δ|. The smallest over the last axis ends the joint solution. It needs a
    constant A and, by Assumption 1, a constant Δ: with softmax's A no weight is faster than E|g|,
    so none diverges in finite time, and with a gradient that changes the time is another, or none.
    """
    return _exp(_Tokens.checked(delta, initial, log_offset, normalizer).log_blowup_time())


def winner(
    delta: ArrayLike,
    *,
    initial: ArrayLike = 0.0,
    log_offset: ArrayLike = 0.0,
    normalizer: ArrayLike = 1.0,
) -> NDArray[np.int64]:
    """Remark after Theorem 2: the token that diverges first, along the last axis.

    From zero, with equal c and A, it is the most salient one; in general the own blow-up time
    decides.
    """
    delta = _checks.not_empty("delta", _checks.at_least_1d("delta", delta))
    tokens = _Tokens.checked(delta, initial, log_offset, normalizer)
    return np.argmin(_not_all_zero(tokens.log_blowup_time()), axis=-1)


def limit(
    delta: ArrayLike,
    *,
    initial: ArrayLike = 0.0,
    log_offset: ArrayLike = 0.0,
    normalizer: ArrayLike = 1.0,
) -> Array:
    """Remark after Theorem 2: what all weights converge to as the winner diverges, t → t*.

    The winner (with its ties) tends to ±inf, the others to finite values; from zero those are
    √2 erfinv(Δ_l / max|Δ|).
    """
    delta = _checks.not_empty("delta", _checks.at_least_1d("delta", delta))
    tokens = _Tokens.checked(delta, initial, log_offset, normalizer)
    own_time = _not_all_zero(tokens.log_blowup_time())
    log_share = np.min(own_time, axis=-1, keepdims=True) - own_time
    v = np.where(log_share == 0, np.inf, _advance(tokens.start, log_share))
    return np.where(tokens.delta == 0, tokens.initial, tokens.sign * v)


def conserved_ratio(delta: ArrayLike, v: ArrayLike) -> Array:
    """Theorem 2 (Eqn 4, corrected): erf(v_l/√2)/Δ_l, equal for all tokens that start at zero.

    NaN where Δ is 0: such a token never moves.
    """
    delta, v = _checks.finite("delta", delta), _checks.finite("v", v)
    return _erf(v) / np.where(delta == 0, np.nan, delta)


def weights_multi(delta: ArrayLike, t: ArrayLike, *, normalizer: float = 1.0) -> Array:
    """Theorem 2 for K hidden nodes: V(t) of V̇ = diag(exp((V∘V)1/2)) Δ/A from V(0) = 0.

    Each row keeps its direction, v_l = s_l Δ_l/‖Δ_l‖, and its length s_l follows the equation of
    one node at ‖Δ_l‖.

    Args:
        delta: Δ, shape (M, K).
        t: time, a scalar or shape (T,).
        normalizer: A.

    Returns:
        V(t), shape (M, K) or (T, M, K).
    """
    delta = _checks.finite("delta", delta, (None, None))
    length = _extended_norm(delta)
    zero = np.zeros(())
    tokens = _Tokens(length, zero, zero, _checks.positive("normalizer", normalizer))
    size = _evolve(tokens, _checks.times("t", t), "raise")
    direction = delta / np.where(length == 0, 1, length)[:, None]
    return size[..., None] * direction.astype(np.float64)


def velocity_multi(delta: ArrayLike, t: ArrayLike, *, normalizer: float = 1.0) -> Array:
    """Theorem 2 for K hidden nodes: V̇(t), the gradient.

    Its stable rank tends to `stable_rank_limit` much faster than that of V.
    """
    v = weights_multi(delta, t, normalizer=normalizer)
    growth = np.exp(np.sum(v**2, axis=-1, keepdims=True) / 2)
    return growth * _checks.finite("delta", delta) / float(normalizer)


def stable_rank_limit(delta: ArrayLike) -> float:
    """Theorem 2 for K hidden nodes: what the stable ranks of V and of V̇ tend to as t → t*.

    Only the longest rows of Δ diverge, all alike: the limit is the stable rank of these rows. It is
    1 exactly if they are parallel, as a single one is. V comes near it very slowly, with an excess
    of order 1/ln(1/(1 - t/t*)); V̇ comes near it fast.

    Args:
        delta: Δ, shape (M, K). Rows whose lengths agree to 1e-15 count as equally long.
    """
    delta = _checks.finite("delta", delta, (None, None))
    length = _extended_norm(delta)
    longest = np.max(length, initial=0.0)
    if longest == 0:
        raise JomaError("delta must have a non-zero row, got only zeros")
    return float(spectra.stable_rank(delta[length >= longest * (1 - 1e-15)]))


class LinearAttention(NamedTuple):
    """Weights and logits of a block with linear attention."""

    v: Array
    z: Array


def linear_attention(
    delta: ArrayLike,
    t: ArrayLike,
    *,
    logits: ArrayLike = 1.0,
    eta_w: float = 1.0,
    eta_z: float = 1.0,
    tau: float = 1.0,
) -> LinearAttention:
    """Theorem 1 with linear attention, solved: v = z₀ sinh(Δt), z = z₀ cosh(Δt) from v = 0.

    That is at unit rates; in general Δt runs √(η_Wη_Z)/τ as fast and v is √(η_W/η_Z) as large.

    Args:
        delta: Δ, shape (…, M).
        t: time, a scalar or shape (T,).
        logits: z(0), broadcast to delta. From z(0) = 0 nothing ever moves.
        eta_w: learning rate of the weights.
        eta_z: learning rate of the logits.
        tau: temperature of the attention.
    """
    delta = _checks.finite("delta", delta)
    start = _checks.broadcasts("logits", _checks.finite("logits", logits), delta.shape)
    eta_w = _checks.positive_scalar("eta_w", eta_w)
    eta_z = _checks.positive_scalar("eta_z", eta_z)
    rate = np.sqrt(eta_w * eta_z) / _checks.positive_scalar("tau", tau)
    t = _checks.times("t", t)
    angle = rate * delta * t.reshape(t.shape + (1,) * delta.ndim)
    with np.errstate(over="ignore", invalid="ignore"):
        v, z = np.sqrt(eta_w / eta_z) * start * np.sinh(angle), start * np.cosh(angle)
    still = start == 0
    return LinearAttention(np.where(still, 0.0, v), np.where(still, 0.0, z))


class UnitRates(NamedTuple):
    """A problem with rates 1 and temperature 1 that stands for another: v = scale · v′."""

    delta: Array
    scale: float


def unit_rates(
    delta: ArrayLike, *, eta_w: float = 1.0, eta_z: float = 1.0, tau: float = 1.0
) -> UnitRates:
    """Theorem 1 and Eqn 3 with any rates and temperature, rescaled to v̇ = Δ exp(v²/2).

    With κ = η_Z/(η_W τ²), √κ v obeys the equation at unit rates with saliency √κ η_W Δ.
    """
    eta_w = _checks.positive_scalar("eta_w", eta_w)
    root = np.sqrt(_checks.positive_scalar("eta_z", eta_z) / eta_w)
    root = float(root / _checks.positive_scalar("tau", tau))
    return UnitRates(root * eta_w * _checks.finite("delta", delta), 1 / root)


Extended = NDArray[Any]
"""Numbers in long double, of which the digits next to a blow-up are left over in float64."""

_LOG_ROOT_HALF_PI = np.log(np.longdouble("3.14159265358979323846264338327950288420") / 2) / 2


class _Tokens(NamedTuple):
    """The parameters of Theorem 2, checked to be of one shape together."""

    delta: NDArray[Any]
    initial: Array
    log_offset: Array
    normalizer: Array

    @classmethod
    def checked(
        cls, delta: ArrayLike, initial: ArrayLike, log_offset: ArrayLike, normalizer: ArrayLike
    ) -> "_Tokens":
        tokens = cls(
            _checks.finite("delta", delta),
            _checks.finite("initial", initial),
            _checks.finite("log_offset", log_offset),
            _checks.positive("normalizer", normalizer),
        )
        for name in ("initial", "log_offset", "normalizer"):
            _checks.broadcasts(name, getattr(tokens, name), tokens.delta.shape)
        return tokens

    @property
    def sign(self) -> Array:
        return np.copysign(1.0, self.delta + 0.0).astype(np.float64, copy=False)  # -0.0 is 0

    @property
    def start(self) -> Array:
        """v(0) in the direction of motion."""
        return self.sign * self.initial if self.initial.any() else np.zeros(())

    def log_blowup_time(self) -> Extended:
        """Ln √(π/2) erfc(v₀/√2) A e^{-c}/|Δ|, which has no range to leave; inf where Δ is 0."""
        with np.errstate(divide="ignore"):
            log_size = np.log(_extended(np.abs(self.delta)))
        log_time = _log_erfc(self.start) + np.log(_extended(self.normalizer)) - self.log_offset
        return _LOG_ROOT_HALF_PI + log_time - log_size


def _evolve(tokens: _Tokens, t: Array, beyond: str) -> Array:
    """v(t) of each token's own equation."""
    if beyond not in ("raise", "inf"):
        raise JomaError(f"beyond must be 'raise' or 'inf', got {beyond!r}")
    t = t.reshape(t.shape + (1,) * tokens.delta.ndim)
    log_time = tokens.log_blowup_time()
    own_time = _exp(log_time)
    with np.errstate(divide="ignore"):
        log_share = np.log(_extended(t)) - log_time
    # The rounded time may lie before the exact one.
    over = (t > 0) & ((log_share >= 0) | (t >= own_time))
    if np.any(over) and beyond == "raise":
        late = float(np.min(np.broadcast_to(t, over.shape)[over]))
        raise JomaError(
            f"t must be below the winner's blow-up time {float(np.min(own_time))!r}, "
            f"got {late!r}; beyond='inf' follows each token on its own"
        )
    v = tokens.sign * np.where(over, np.inf, _advance(tokens.start, log_share))
    return np.where((tokens.delta == 0) | (t == 0), tokens.initial, v)


def _advance(start: Array, log_share: Extended) -> Array:
    """The v with erfc(v/√2) = (1 - share) erfc(start/√2), shares of the time to infinity."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_left = np.asarray(np.log(-np.expm1(log_share)), dtype=np.float64)
        ahead = special.log_ndtr(-start)
        # ln Φ(v) and ln Φ(-v): the smaller of them has all digits.
        below = np.logaddexp(special.log_ndtr(start), ahead + log_share.astype(np.float64))
        above = ahead + log_left
        v = np.where(below < above, special.ndtri_exp(below), -special.ndtri_exp(above))
    share = _exp(log_share)
    near = (start == 0) & (share < 0.5)  # there v may be tiny
    return np.where(near, np.sqrt(2) * special.erfinv(np.where(near, share, 0.0)), v)


def _log_erfc(u: Array) -> Extended:
    """Ln erfc(u/√2), right to the last digits of float64 at any u."""
    ahead, behind = np.maximum(u, 1.0), np.minimum(u, 1.0)
    scaled = np.asarray(special.erfcx(ahead / np.sqrt(2)), dtype=np.longdouble)
    log_ahead = np.log(scaled) - _extended(ahead) ** 2 / 2
    return np.where(u > 1, log_ahead, np.log1p(-_extended(_erf(behind))))


def _erf(v: Array) -> Array:
    return np.asarray(special.erf(v / np.sqrt(2)), dtype=np.float64)


def _exp(logarithm: Extended) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.exp(logarithm), dtype=np.float64)


def _not_all_zero(log_times: Extended) -> Extended:
    """The logarithms of own times if some token along the last axis has a time."""
    if np.any(np.all(np.isposinf(log_times), axis=-1)):
        raise JomaError("delta must have a non-zero component, got only zeros")
    return log_times


def _extended(value: ArrayLike) -> Extended:
    return np.asarray(value, dtype=np.longdouble)


def _extended_norm(rows: Array) -> Extended:
    """Lengths of rows to more than float64, since near a blow-up they decide the weight."""
    scale = np.max(np.abs(rows), axis=-1, initial=0.0)
    scaled = _extended(rows) / np.where(scale > 0, scale, 1.0)[:, None]
    return _extended(scale * np.sqrt(np.sum(scaled**2, axis=-1)))

"""Nonlinear activation with attention: Eqn 6, Theorem 4, the drop and rebound of entropy and rank.

Eqn 6, v̇ = (μ - v) exp(v²/2), is solved without time stepping. With the residual δ = 1 - v/μ and
y = ln 1/δ it reads ẏ = exp(μ²(1-e⁻ʸ)²/2), so that t is an integral of y (Eqn 79),

    t = F = e^{-μ²/2} y + H(1-e⁻ʸ, μ),   H(r, μ) = ∫₀ʳ (e^{-μ²x²/2} - e^{-μ²/2})/(1-x) dx,

in which H is smooth and bounded (Theorem 4). F is concave in y: Newton's method from below never
overshoots. The dynamics without attention (Lemmas 1-5, Theorem 3) are in `clusters`.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

from joma.errors import JomaError
from joma.theory import _checks, _eqn6, spectra
from joma.theory._checks import Array

__all__ = [
    "DropAndRebound",
    "Fate",
    "RankFate",
    "attention_entropy",
    "drop_and_rebound",
    "elapsed",
    "entropy_fate",
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
    size, when = np.broadcast_arrays(size, t.reshape(t.shape + (1,) * size.ndim))
    return -_eqn6.solve(size.ravel(), when.ravel()).reshape(size.shape)


def elapsed(r: ArrayLike, mu: ArrayLike) -> Array:
    """Eqn 79: F(r, μ) = ∫₀ʳ e^{-μ²x²/2}/(1-x) dx, the time at which v/μ reaches r < 1."""
    r = _checks.non_negative("r", r)
    if np.any(r >= 1):
        raise JomaError(f"r must be < 1 (the target is never reached), got {np.max(r)}")
    mu = np.abs(_checks.finite("mu", mu))
    r, mu = np.broadcast_arrays(r, mu)
    return -np.exp(-(mu**2) / 2) * np.log1p(-r) + offset(r, mu)


def offset(r: ArrayLike, mu: ArrayLike) -> Array:
    """Theorem 4 (Eqn 88): H = F - e^{-μ²/2} ln(1/δ), between 0 and 0.8643 for all r and μ."""
    r = _checks.within("r", r, 0.0, 1.0)
    mu = np.abs(_checks.finite("mu", mu))
    r, mu = np.broadcast_arrays(r, mu)
    return _eqn6.smooth_part(r.ravel(), mu.ravel()).reshape(r.shape)


def residual_offset(mu: ArrayLike) -> Array:
    """After Theorem 4: R(μ) = H(1, μ), with which δ → exp(-e^{μ²/2}(t - R(μ)))."""
    return offset(1.0, mu)


def rate_ratio(mu_j: ArrayLike, mu_k: ArrayLike, t: ArrayLike) -> Array:
    """Theorem 4 (Eqn 7): ln(1/δ_j)/ln(1/δ_k) at time t; it tends to e^{μ_j²/2}/e^{μ_k²/2}."""
    mu_j, mu_k = _checks.finite("mu_j", mu_j), _checks.finite("mu_k", mu_k)
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
    p = special.softmax(_checks.positive_scalar("scale", scale) * v**2, axis=-1)
    return np.sum(special.entr(p), axis=-1)


def offset_bound() -> float:
    """Theorem 4 (Eqn 88), sharpened: sup of F - e^{-μ²/2} ln(1/δ), 0.8643 at r = 1, μ = 1.872."""
    return _maximum(lambda mu: float(residual_offset(mu)), 1.0, 3.0)


def lemma6_bound() -> float:
    """Lemma 6, sharpened: the maximum 0.638 of (1 - e^{-y²})/y, for the printed 1/√2."""
    return _maximum(lambda y: -np.expm1(-(y**2)) / y, 0.5, 2.0)


def lemma7_bound() -> float:
    """Lemma 7, sharpened: the maximum 0.765 of e^{-y²/2} ∫₀ʸ e^{x²/2} dx, for the printed 1."""

    def integral(y: float) -> float:
        return float(np.asarray(np.sqrt(2) * special.dawsn(y / np.sqrt(2)), dtype=np.float64))

    return _maximum(integral, 0.5, 3.0)


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


_SMALLEST_LOG_RESIDUAL = 700.0  # δ = e^{-700}, after which no change is a number
_STATES = 12_000  # about as many pairs of a time and a component are evaluated
_PEAKS, _ROUNDS = 2, 4  # maxima that are followed, and how often the grid around them is refined
_SAME = 1e-14  # relative difference of two sizes that count as equal
_FIRST = 8  # largest components whose times are always evaluated
_LARGEST_LOGIT = 1e6  # its rounding error is 1e-10 nats
_UNDECIDED = 1e-12  # relative difference below which two sides of an inequality count as equal


class Fate(NamedTuple):
    """What the entropy of attention does on its way from t = 0 to infinity.

    Attributes:
        drops: Whether it is ever below its start.
        rebounds: Whether it ends above its lowest value.
        drop: By how much it falls from its start to its lowest value, in nats.
        rebound: By how much it ends above its lowest value, in nats; 0 also where that is smaller
            than any float.
        rises_last: Whether it rises, not falls, towards its end.
    """

    drops: bool
    rebounds: bool
    drop: float
    rebound: float
    rises_last: bool


def entropy_fate(mu: ArrayLike, *, scale: float = 1.0) -> Fate:
    """Fig. 4 and Section 4: by how much the entropy along Eqn 6 drops and rebounds.

    With logits a = scale · v², dS/dt = -Σ_j p_j (a_j - Σ_i p_i a_i) ȧ_j: a growing logit raises the
    entropy only while it is below the mean that attention takes of the logits. The smallest
    non-zero |μ| arrives last, exponentially so. Therefore the entropy

    - drops unless all |μ| are equal;
    - rises at its end if the smallest non-zero μ² is below Σ_j p_j μ_j², with p the attention at
      the end, and falls if it is above: always the first where no component is zero and not all
      |μ| are equal, and not for μ = (1, 0.9, 0). Where both are equal the next order decides, and
      `rises_last` is False;
    - rebounds if it rises at its end, and also where an earlier minimum lies below the end.

    Args:
        mu: Targets μ, shape (M,), |μ| ≤ 37. Sizes that agree to 1e-14 count as equal.
        scale: Factor of v² in softmax(scale · v²); scale · μ² is at most 10⁶.
    """
    mu = _checks.not_empty("mu", _checks.finite("mu", mu, (None,)))
    _checks.within("mu", mu, -_LARGEST_MU, _LARGEST_MU)
    scale = _checks.positive_scalar("scale", scale)
    if scale * float(np.max(mu**2)) > _LARGEST_LOGIT:
        raise JomaError(f"scale times the largest mu² must be at most 1e6, got scale = {scale:g}")
    size, place = _distinct(np.abs(mu))
    count = np.bincount(place)
    if size.size == 1:
        return Fate(False, False, 0.0, 0.0, False)
    end = _End.of(scale * size**2, count.astype(np.float64))
    smallest = int(size[0] == 0)
    # With a single non-zero value, or without zeros, no rounding decides.
    rises_last = bool(size[0] > 0 or (size.size > 2 and end.logits[smallest] < end.mean))
    rebound, certain = _largest_gap(size, end)
    return Fate(True, rises_last or certain, end.below_uniform + rebound, rebound, rises_last)


def _distinct(size: Array) -> tuple[Array, NDArray[np.int64]]:
    """Distinct sizes in increasing order, and which of them each one is.

    Those that agree to 1e-14 are one: from |μ| = 9 on, no float tells the times of their growth
    apart.
    """
    order = np.argsort(size, kind="stable")
    ordered = size[order]
    new = np.concatenate([[True], np.diff(ordered) > _SAME * ordered[1:]])
    place = np.empty(size.size, dtype=np.int64)
    place[order] = np.cumsum(new) - 1
    return ordered[new], place


class _End(NamedTuple):
    """Attention at the end, over distinct values of |μ|."""

    logits: Array
    log_share: Array  # of all components that have this value together
    mean: float  # logit, as attention sees it
    below_uniform: float  # ln M - S, in nats

    @classmethod
    def of(cls, logits: Array, count: Array) -> "_End":
        log_uniform = np.log(count / np.sum(count))
        relative = logits - _log_mean_exp(logits, log_uniform)
        share = np.exp(log_uniform + relative)
        difference, divergence = _difference(relative, log_uniform)
        del difference
        return cls(logits, log_uniform + relative, float(share @ logits), float(np.sum(divergence)))

    def gap(self, residual: Array) -> tuple[Array, Array]:
        """S(end) - S at given δ, shape (…, distinct values), and the rounding error of it.

        It is Σ (q-p)(a - mean) + Σ q ln q/p with q the attention at δ and p that at the end, exact
        in relative terms also where all δ are tiny.
        """
        change = -self.logits * residual * (2 - residual)
        x = change - _log_mean_exp(change, self.log_share)[..., None]
        difference, divergence = _difference(x, self.log_share)
        first = difference * (self.logits - self.mean)
        rounding = 1e-14 * np.sum(np.abs(first) + divergence, axis=-1)
        return np.sum(first + divergence, axis=-1), rounding


def _log_mean_exp(x: Array, log_weight: Array) -> Array:
    """Ln Σ weight · eˣ for weights that sum to 1, exact also where it is tiny."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        near = np.log1p(np.sum(np.exp(log_weight) * np.expm1(x), axis=-1))
        return np.where(np.abs(near) < 0.5, near, special.logsumexp(log_weight + x, axis=-1))


def _difference(x: Array, log_p: Array) -> tuple[Array, Array]:
    """Q - p and q ln q/p - (q - p) ≥ 0 of each component, where x = ln q/p."""
    p, q = np.exp(log_p), np.exp(log_p + x)
    small = np.abs(x) < 1e-3
    series = p * x**2 * (1 / 2 + x * (1 / 3 + x * (1 / 8 + x / 30)))
    difference = np.where(small, p * np.expm1(np.where(small, x, 0)), q - p)
    return difference, np.where(small, series, q * x - difference)


def _largest_gap(size: Array, end: _End) -> tuple[float, bool]:
    """The largest S(end) - S(t), at least 0, and whether it is larger than its rounding error."""
    found = _candidates(_Paths.of(size), lambda residual: end.gap(residual)[0])
    value, rounding = end.gap(_residuals(size, found))
    certain = bool(np.any(value > rounding))
    return max(float(np.max(value)), 0.0) if certain else 0.0, certain


def _candidates(paths: "_Paths", value: Callable[[Array], Array]) -> Array:
    """Times at and next to the highest maxima of a function of all residuals."""
    t = paths.times()
    on_grid = value(paths.residuals(t))
    padded = np.concatenate([[-np.inf], on_grid, [-np.inf]])
    peaks = np.nonzero((on_grid >= padded[:-2]) & (on_grid >= padded[2:]))[0]
    found: list[float] = []
    highest = peaks[np.argsort(-on_grid[peaks], kind="stable")[:_PEAKS]]
    # Components of nearly one size put their times close together: search farther as well.
    for at, reach in itertools.product(highest, (1, 2 * len(paths.time) + 2)):
        low, high = float(t[max(at - reach, 0)]), float(t[min(at + reach, t.size - 1)])
        for _ in range(_ROUNDS):
            finer = np.linspace(low, high, 17)
            best = int(np.argmax(value(paths.residuals(finer))))
            low, high = float(finer[max(best - 1, 0)]), float(finer[min(best + 1, 16)])
        found += [float(t[at]), low, (low + high) / 2, high]
    return np.unique(np.array(found))


def _residuals(size: Array, t: Array) -> Array:
    """δ of all components, shape (T, M)."""
    every, when = np.broadcast_arrays(size, t[:, None])
    with np.errstate(under="ignore"):
        return np.exp(-_eqn6.solve(every.ravel(), when.ravel())).reshape(every.shape)


class _Paths(NamedTuple):
    """ln 1/δ of components over time, tabulated: y (P,), times and slopes of shape (M, P)."""

    y: Array
    time: Array
    slope: Array

    @classmethod
    def of(cls, size: Array) -> "_Paths":
        late = np.geomspace(6, _SMALLEST_LOG_RESIDUAL, 100)[1:]
        y = np.concatenate([np.linspace(0, 6, 301), late])
        every, each = (a.ravel() for a in np.broadcast_arrays(size[:, None], y))
        time = np.exp(-(every**2) / 2) * each + _eqn6.smooth_part(-np.expm1(-each), every)
        slope = np.exp((every * np.expm1(-each)) ** 2 / 2)
        shape = (size.size, y.size)
        return cls(y, np.maximum.accumulate(time.reshape(shape), axis=1), slope.reshape(shape))

    def times(self) -> Array:
        """Times at which components grow and settle, and those in between."""
        many = int(np.clip(_STATES // (50 * len(self.time)), 4, 24))
        spread = np.linspace(0, len(self.time) - 1, many).round().astype(int)
        first = np.arange(max(len(self.time) - _FIRST, 0), len(self.time))
        chosen = np.unique(np.concatenate([spread, first]))
        t = np.unique(self.time[chosen][:, 1::8])
        return np.unique(np.concatenate([t, (t[1:] + t[:-1]) / 2]))

    def residuals(self, t: Array) -> Array:
        """δ by cubic interpolation, shape (T, M); good to 1e-7."""
        found = np.empty((t.size, len(self.time)))
        rise = np.diff(self.y)
        for column, (time, slope) in enumerate(zip(self.time, self.slope, strict=True)):
            cell = np.clip(np.searchsorted(time, t, side="right") - 1, 0, rise.size - 1)
            width = np.maximum(time[cell + 1] - time[cell], 1e-300)
            s, up = np.clip((t - time[cell]) / width, 0, 1), rise[cell]
            # Slopes are limited so that y rises also where a cell is a single float wide.
            first = np.minimum(slope[cell] * width, 3 * up)
            last = np.minimum(slope[cell + 1] * width, 3 * up)
            cubic = s * (first + s * (3 * up - 2 * first - last + s * (first + last - 2 * up)))
            found[:, column] = self.y[cell] + cubic
        with np.errstate(under="ignore"):
            return np.exp(-found)


class RankFate(NamedTuple):
    """What the stable rank of W does between t = 0 and infinity.

    Attributes:
        ends: The stable rank of the targets, at which it starts and ends.
        drop: How far below that its lowest value lies.
        rise: How far above that its highest value lies.
        first: Its first change: -1 for a fall, +1 for a rise, 0 where leading terms cancel.
        last: The sign of its change towards its end, 0 where leading terms cancel.
    """

    ends: float
    drop: float
    rise: float
    first: int
    last: int


def stable_rank_fate(mu: ArrayLike) -> RankFate:
    """Section 4 (end), corrected: how far the stable rank of W moves from that of its targets.

    Along Eqn 6, V = diag(r_l) M with r_l = 1 - δ_l the larger the longer the row: at the start all
    r are equal, at the end all are 1. With u the left singular vector of the largest singular value
    of M, and ℓ_l the lengths of its rows, the stable rank

    - starts and ends at that of M;
    - first falls if Σ_l u_l² ℓ_l² > Σ_l ℓ_l⁴/Σ_l ℓ_l², and rises if it is less;
    - rises at its end if the shortest non-zero rows have less of u than of the norm,
      Σ_short u_l² < Σ_short ℓ_l²/Σ_l ℓ_l², and falls if they have more.

    Where both sides are equal the next order decides, which is not given: `first` or `last` is 0.

    Where rows are orthogonal and not all of one length, it is below that of M at all times between.
    Where many short rows share a direction that outweighs the long one, it rises and falls back.

    Args:
        mu: Targets M, shape (tokens, hidden nodes), with rows no longer than 37. Lengths that agree
            to 1e-14 count as equal.
    """
    mu = _checks.finite("mu", mu, (None, None))
    length = _checks.within("length of the rows of mu", _checks.norm(mu), 0.0, _LARGEST_MU)
    mu, length = mu[length > 0], length[length > 0]
    if mu.size == 0:
        return RankFate(0.0, 0.0, 0.0, 0, 0)
    ends = float(spectra.stable_rank(mu))
    first, last = _first_and_last(mu / np.max(length), length / np.max(length))
    sizes, place = _distinct(length)
    gram = _grams(mu / np.max(length), place, sizes.size)

    def ranks(residual: Array) -> Array:
        share = 1 - residual
        together = gram(share / np.max(share, axis=-1, keepdims=True))
        largest = np.linalg.eigvalsh(together)[..., -1]
        return np.trace(together, axis1=-2, axis2=-1) / largest

    paths = _Paths.of(sizes)

    def highest_of(value: Callable[[Array], Array]) -> float:
        return float(np.max(value(_residuals(sizes, _candidates(paths, value)))))

    lowest, highest = -highest_of(lambda residual: -ranks(residual)), highest_of(ranks)
    drop, rise = max(ends - lowest, 0.0), max(highest - ends, 0.0)
    return RankFate(ends, drop, rise, first, last)


def _grams(mu: Array, place: NDArray[Any], sizes: int) -> Callable[[Array], Array]:
    """VᵀV, or V Vᵀ where that is smaller, as a function of the shares of rows by their length."""
    rows, columns = mu.shape
    if rows < columns:
        inner = mu @ mu.T
        return lambda share: share[..., place, None] * inner * share[..., None, place]
    outer = np.zeros((sizes, columns * columns))
    np.add.at(outer, place, (mu[:, :, None] * mu[:, None, :]).reshape(rows, -1))
    return lambda share: (share**2 @ outer).reshape(*share.shape[:-1], columns, columns)


def _first_and_last(mu: Array, length: Array) -> tuple[int, int]:
    """The signs of the first and of the last change of the stable rank of diag(r) M."""
    svd: Any = np.linalg.svd(mu, full_matrices=False)
    top = svd[0][:, svd[1] > svd[1][0] * (1 - _UNDECIDED)]
    norm = np.sum(length**2)
    # The largest singular value may be a multiple one: the perturbation chooses among its vectors.
    gain = np.linalg.eigvalsh(top.T @ (length[:, None] ** 2 * top))[-1]
    short = length <= np.min(length) * (1 + _UNDECIDED)
    loss = np.linalg.eigvalsh(top[short].T @ top[short])[0]
    first = _sign(float(np.sum(length**4) / norm), float(gain))
    last = _sign(float(np.sum(length[short] ** 2) / norm), float(loss))
    return first, last


def _sign(a: float, b: float) -> int:
    """The sign of a - b, 0 where the two are equal but for rounding."""
    return 0 if abs(a - b) <= _UNDECIDED * max(a, b) else 1 if a > b else -1

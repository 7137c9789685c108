"""Scan&Snap: what follows from the flow, as formulas."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import cumulative_simpson, cumulative_trapezoid, solve_ivp
from scipy.optimize import brentq
from scipy.special import wrightomega

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory._scan_snap_flow import Corpus, feature


def initial_pull(corpus: Corpus) -> Array:
    """Scan&Snap, z̈(0)/(η_Y η_Z) from z = Y = 0: the first thing that happens to each logit.

    Distinct tokens are always pulled up (f_nᵀg_n ≤ γ_n, by Cauchy-Schwarz); a token shared by
    classes goes either way.

    Returns:
        Shape (queries, tokens), (1/2)·η_Yη_Z·t² times which is z to leading order.
    """
    f = feature(corpus, np.zeros((corpus.queries, corpus.tokens)))
    weighted = corpus.joint[:, None] * f
    g = weighted - weighted.mean(axis=0)
    overlap = np.sum(f * g, axis=1, keepdims=True)
    return corpus.of_query.T @ (corpus.class_given_query[:, None] * f * (g - f * overlap))


def initial_fate(corpus: Corpus) -> Array:
    """Scan&Snap, common tokens fall and distinct tokens rise: −1, 0 or 1 for each logit.

    The sign of `initial_pull`: −1 for tokens equally common in all classes, +1 for distinct
    tokens, and for those in between whichever their frequencies say.
    """
    pull = initial_pull(corpus)
    return np.where(np.abs(pull) < 1e-14, 0.0, np.sign(pull))


def rise_ratio(corpus: Corpus, class_: int, token: int, other: int) -> float:
    """Scan&Snap, learnable TF-IDF: z_l/z_l' = (P(l|m,n)/P(l'|m,n))² while z is small.

    Args:
        corpus: the data.
        class_: the class n.
        token: a distinct token l of the class.
        other: another, l'.
    """
    own = corpus.distinct_of(class_)
    if token not in own or other not in own:
        raise JomaError(f"token and other must be distinct tokens of class {class_}")
    p = corpus.token_given_class[class_]
    return float((p[token] / p[other]) ** 2)


def relative_gain_rate(
    gain: ArrayLike,
    f_squared: ArrayLike,
    *,
    gamma: ArrayLike,
    overlap: ArrayLike,
    class_given_query: float,
    eta_z: float,
) -> Array:
    """Scan&Snap Theorem 3, dr/dt = 2η_Z P(n|m) γ(1−S) f_l² r, where g = γf on distinct tokens.

    Args:
        gain: r_{l/l'|n}.
        f_squared: f_nl².
        gamma: γ.
        overlap: S = f_nᵀg_n/γ.
        class_given_query: P(n|m).
        eta_z: rate of the attention.
    """
    b_rate = eta_z * class_given_query * _checks.finite("gamma", gamma)
    b_rate = b_rate * (1 - _checks.finite("overlap", overlap))
    square = _checks.within("f_squared", f_squared, 0.0, 1.0)
    return 2 * b_rate * square * _checks.finite("gain", gain)


def growth_factor(f_squared: ArrayLike, b: ArrayLike) -> Array:
    """Scan&Snap Theorem 3, χ_l(t) = exp(2∫ f_nl² dB_n), so that r(t) = r(0) χ_l(t).

    Args:
        f_squared: f_nl²(t) at some times, shape (T,).
        b: B_n at the same times, shape (T,).
    """
    square = _checks.shape("f_squared", _checks.within("f_squared", f_squared, 0, 1), (None,))
    b = _checks.shape("b", _checks.finite("b", b), square.shape)
    path: Array = np.asarray(cumulative_trapezoid(square, b, initial=0), dtype=np.float64)
    return np.exp(2 * path)


def log_gain_bounds(b: ArrayLike, f_squared: ArrayLike) -> tuple[Array, Array]:
    """Scan&Snap Theorem 3, 2f²_{l*}(0)B ≤ ln χ_{l*} ≤ 2B, where g = γf on the distinct tokens.

    ln χ = 2∫f²_{l*}dB, and f²_{l*} only rises there: the lower bound is the tangent at B = 0, the
    upper one has the slope of B → ∞. On the full flow only `full_log_gain_bounds` is left.

    Args:
        b: B_n(t).
        f_squared: f²_{nl*}(0) of the dominant token.
    """
    b = _checks.non_negative("b", b)
    return 2 * _checks.within("f_squared", f_squared, 0.0, 1.0) * b, 2 * b


def full_log_gain_bounds(b: ArrayLike, f_squared: ArrayLike) -> tuple[Array, Array]:
    """Scan&Snap Theorem 3 on the full flow, 0 ≤ ln χ_{l*} ≤ 2B: what is left of the bounds.

    Y remembers the attention of the past, when the other tokens had not fallen behind as far, so
    that g_l/f_l is least for the dominant token. Hence ln χ ≤ 2∫f²_{l*}dB ≤ 2B, the first no longer
    an equality, as long as its lead has only grown: it does for η_Y ≫ η_Z.

    Args:
        b: B_n(t).
        f_squared: f²_{nl*}(0), on which these bounds do not depend.
    """
    low, high = log_gain_bounds(b, f_squared)
    return np.zeros_like(low), high


def rescaled_time(t: ArrayLike, factor: float) -> Array:
    """Scan&Snap Theorem 4 (1), both rates times `factor`: the same training at time factor·t.

    B rises with time, so larger rates together mean a larger B and sparser attention.
    """
    return _checks.positive_scalar("factor", factor) * _checks.times("t", t)


def snapping_time(classes: int, tokens: int, eta_y: float) -> float:
    """Scan&Snap Theorem 4, t₀ = 2K ln M/η_Y: scanning ends and attention snaps."""
    if classes < 2 or tokens < 2:
        raise JomaError(f"classes and tokens must be ≥ 2, got {classes}, {tokens}")
    return 2 * classes * float(np.log(tokens)) / _checks.positive_scalar("eta_y", eta_y)


def margin_time(margin: ArrayLike, *, classes: int, distinct_share: float, eta_y: float) -> Array:
    """New: the time (e^Δ − 1 + (K−1)Δ)/(η_Y F) at which the decoder has the margin Δ.

    Δ is the score of the right class less that of another, for K equally probable classes of one
    query while attention stands still, η_Z ≪ η_Y. The right class is more probable than all others
    together from Δ = ln(K−1) on, at about K ln K/(F η_Y): the talk's t₀ where F = ½.

    Args:
        margin: Δ.
        classes: K.
        distinct_share: F = Σ f² over a class's distinct tokens.
        eta_y: rate of the decoder.
    """
    margin = _checks.non_negative("margin", margin)
    share = _checks.positive_scalar("distinct_share", distinct_share)
    if share > 1:
        raise JomaError(f"distinct_share must lie in (0, 1], got {share:g}")
    steps = np.expm1(margin) + (_classes(classes) - 1) * margin
    return steps / (_checks.positive_scalar("eta_y", eta_y) * share)


def critical_margin(classes: int) -> float:
    """New: the margin Δ_c where d ln Δ/d ln t = ½, 2(e^Δ − 1 + (K−1)Δ) = Δ(e^Δ + K − 1).

    It is 2 for K = 2 and rises with K.
    """
    others = _classes(classes) - 1

    def excess(margin: float) -> float:
        # Divided by e^Δ, so that a wide bracket does not overflow.
        fading = np.exp(-margin)
        return float((2 - margin) - 2 * fading + others * margin * fading)

    return float(brentq(excess, 1.0, 4 + 2 * np.log(others + 1.0)))


def decoder_rate_turn(*, classes: int, distinct_share: float, eta_y: float) -> float:
    """New: when a larger η_Y at fixed η_Z turns from raising B (sparser) to lowering it (denser).

    While attention has moved little B grows with Δ²/η_Y, and Δ depends on η_Y t alone, so that
    ∂B/∂η_Y = 0 at the critical margin.

    Args:
        classes: K equally probable classes of one query.
        distinct_share: F = Σ f² over a class's distinct tokens.
        eta_y: rate of the decoder.
    """
    margin = critical_margin(classes)
    turn = margin_time(margin, classes=classes, distinct_share=distinct_share, eta_y=eta_y)
    return float(turn)


@dataclass(frozen=True)
class Balanced:
    """Scan&Snap solved: K classes of one query, C common tokens, D distinct ones in each class.

    Classes are equally probable, common tokens equally frequent, distinct tokens too. Then all
    distinct logits move alike, all common ones too, and the separation ζ = z_distinct − z_common
    depends on the decoder's entry y = Y_{ln} (l distinct of n) alone.

    Attributes:
        classes: K.
        common: C.
        distinct: D.
        common_mass: total probability of the common tokens in a class.
    """

    classes: int
    common: int
    distinct: int
    common_mass: float = 0.5

    def __post_init__(self) -> None:
        for name, low in (("classes", 2), ("common", 1), ("distinct", 1)):
            if getattr(self, name) < low:
                raise JomaError(f"{name} must be ≥ {low}, got {getattr(self, name)}")
        if not 0 < self.common_mass < 1:
            raise JomaError(f"common_mass must lie in (0, 1), got {self.common_mass}")

    @property
    def corpus(self) -> Corpus:
        """The corpus, common tokens first, then the distinct tokens class by class."""
        common = np.full((self.classes, self.common), self.common_mass / self.common)
        own = np.kron(np.eye(self.classes), np.full(self.distinct, (1 - self.common_mass)))
        return Corpus(
            np.hstack([common, own / self.distinct]),
            np.zeros(self.classes, dtype=np.int64),
            np.full(self.classes, 1 / self.classes),
        )

    @property
    def common_over_distinct(self) -> float:
        """u(0) = Σ f²(common)/Σ f²(distinct) at the start."""
        common = self.common_mass**2 / self.common
        return common / ((1 - self.common_mass) ** 2 / self.distinct)

    @property
    def slope(self) -> float:
        """New: s = 1/(K/C + 1/D), B → s·ln t (scanning, η_Z/η_Y → ∞) and s·ln ln t (snapped).

        Theorem 4's ln(C₀ + c ln²t) has 2 in place of s.
        """
        return 1 / (self.classes / self.common + 1 / self.distinct)

    @property
    def scanning_slope_limit(self) -> float:
        """Scan&Snap Theorem 4, scanning: dB/d ln t < this at all times and rates, so B = O(ln t).

        The supremum, reached as η_Z/η_Y → ∞ before the decoder learns: along the conserved law
        dB/d ln y = s(1 − e^{−2ζ} + 2ζu₀e^{−2ζ}), and d ln y/d ln t = √F/y·∫dy/√F as 1 − α = 1 − 1/K
        stays put; a falling 1 − α only lowers the latter.
        """
        ratio = self.common_over_distinct
        # ζ = w² takes the root out of y at 0; beyond ζ = 16 the slope is s to 14 digits.
        w = np.linspace(0.0, 4.0, 4001)
        zeta = w[1:] ** 2
        y = np.sqrt(2 * zeta + np.expm1(2 * zeta) / ratio)
        y_rate = 2 * w[1:] * (1 + np.exp(2 * zeta) / ratio) / y
        root_share = np.sqrt(self._distinct_share(zeta))
        start = np.sqrt(2 * (1 + 1 / ratio) * (1 + ratio))
        pace = np.concatenate([[start], y_rate / root_share])
        clock = np.asarray(cumulative_simpson(pace, x=w), dtype=np.float64)
        fading = np.exp(-2 * zeta)
        slope = (1 - fading + 2 * zeta * ratio * fading) * root_share * clock / y
        return self.slope * max(1.0, float(np.max(slope)))

    def conserved(
        self, separation: ArrayLike, decoder: ArrayLike, *, eta_y: float, eta_z: float
    ) -> Array:
        """New: ζ + (e^{2ζ} − 1)/(2u₀) − (η_Z/η_Y) (K/(K−1)) (KD/C + 1) y²/2 is conserved."""
        zeta, y = _checks.finite("separation", separation), _checks.finite("decoder", decoder)
        return (
            zeta
            + np.expm1(2 * zeta) / (2 * self.common_over_distinct)
            - self._drive(eta_y, eta_z) * y**2
        )

    def separation(self, decoder: ArrayLike, *, eta_y: float, eta_z: float) -> Array:
        """New: ζ(y) from z = Y = 0, the conserved law solved with Wright's ω."""
        ratio = self.common_over_distinct
        y = _checks.finite("decoder", decoder)
        total: Array = 2 * self._drive(eta_y, eta_z) * y**2 + 1 / ratio - np.log(ratio)
        omega: Array = np.asarray(wrightomega(total), dtype=np.float64)
        return (np.log(ratio) + np.log(omega)) / 2

    def b(self, separation: ArrayLike) -> Array:
        """New: B = (ζ + u₀(1 − e^{−2ζ})/2)/(K/C + 1/D), whatever the rates."""
        zeta = _checks.finite("separation", separation)
        return self.slope * (zeta - self.common_over_distinct * np.expm1(-2 * zeta) / 2)

    def decoder(self, t: ArrayLike, *, eta_y: float, eta_z: float) -> Array:
        """New: y(t) from the one scalar equation ẏ = (η_Y/K)√(F/D)(1 − α) that is left."""
        times = np.atleast_1d(_checks.times("t", t))
        eta_y = _checks.positive_scalar("eta_y", eta_y)
        order = np.argsort(times)
        clock = np.log1p(eta_y * times[order])
        others = self.classes - 1

        def rate(log_time: float, state: Array) -> Array:
            share = self._distinct_share(self.separation(state, eta_y=eta_y, eta_z=eta_z))
            margin = self.classes / others * np.sqrt(share * self.distinct) * state
            miss = others / (np.exp(margin) + others)
            return np.exp(log_time) * np.sqrt(share / self.distinct) * miss / self.classes

        y = np.zeros(times.size)
        if clock[-1] > 0:
            path = solve_ivp(
                rate, (0.0, clock[-1]), [0.0], t_eval=clock, rtol=1e-10, atol=1e-12, method="LSODA"
            )
            y[order] = path.y[0]
        return y.reshape(np.shape(t))

    def b_at(self, t: ArrayLike, *, eta_y: float, eta_z: float) -> Array:
        """Scan&Snap Theorem 4, B(t) at all times."""
        y = self.decoder(t, eta_y=eta_y, eta_z=eta_z)
        return self.b(self.separation(y, eta_y=eta_y, eta_z=eta_z))

    def _distinct_share(self, separation: Array) -> Array:
        return 1 / (1 + self.common_over_distinct * np.exp(-2 * separation))

    def _drive(self, eta_y: float, eta_z: float) -> float:
        """The factor of y² in the conserved law."""
        ratio = _checks.positive_scalar("eta_z", eta_z) / _checks.positive_scalar("eta_y", eta_y)
        per_class = self.classes * self.distinct / self.common + 1
        return ratio * self.classes / (self.classes - 1) * per_class / 2


def late_b(
    t: ArrayLike, balanced: Balanced, *, anchor: tuple[float, float], eta_y: float, eta_z: float
) -> Array:
    """Scan&Snap Theorem 4, B(t) → ½s·ln(C₀ + (u₀/s)(1−1/K)(η_Z/η_Y) ln²(η_Y t)), t → ∞.

    s = 1/(K/C + 1/D), so that B ~ s·ln ln t; for one common and one distinct token s = 1/(K+1).

    Args:
        t: late times.
        balanced: the corpus.
        anchor: a late time and B there, which fix C₀.
        eta_y: rate of the decoder.
        eta_z: rate of the attention.
    """
    times = _checks.positive("t", t)
    start, b_start = anchor
    slope, ratio = balanced.slope, balanced.common_over_distinct
    drive = ratio / slope * (1 - 1 / balanced.classes) * eta_z / eta_y
    # B carries u₀/2 times the slope from the start, outside the logarithm.
    grown = np.log(eta_y * times) ** 2 - np.log(eta_y * start) ** 2
    return slope / 2 * (ratio + np.log(np.exp(2 * b_start / slope - ratio) + drive * grown))


def late_decoder_rate_effect(t: ArrayLike, balanced: Balanced, *, eta_y: float) -> Array:
    """Scan&Snap Theorem 4 (2), ∂B/∂ln η_Y → −½s + s/ln(η_Y t) at fixed η_Z, t → ∞.

    A larger η_Y makes B smaller and attention denser, and slightly so: by ½s per factor e.

    Args:
        t: late times, η_Y t > 1.
        balanced: the corpus.
        eta_y: rate of the decoder.
    """
    grown = _checks.positive_scalar("eta_y", eta_y) * _checks.positive("t", t)
    if np.any(grown <= 1):
        raise JomaError(f"t must be late, eta_y·t > 1, got {np.min(grown):g}")
    return balanced.slope * (1 / np.log(grown) - 0.5)


def _classes(classes: int) -> int:
    if classes < 2:
        raise JomaError(f"classes must be ≥ 2, got {classes}")
    return classes

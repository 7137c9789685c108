"""Scan&Snap: the laws of any corpus, and the balanced one, which is solved at any time."""

from dataclasses import dataclass
from math import exp, expm1, log, sqrt

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import cumulative_simpson, cumulative_trapezoid, odeint
from scipy.optimize import brentq
from scipy.special import wrightomega

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory.scan_snap._flow import ScanSnapCorpus, feature


def initial_pull(corpus: ScanSnapCorpus) -> Array:
    """Scan&Snap, z̈(0)/(η_Y η_Z) from z = Y = 0: the first thing that happens to each logit.

    A distinct token of class n gets P(n|m) f_nl² Σ_{n'≠n} P(m',n') f_nᵀf_n'/K ≥ 0: it is pulled
    up, unless its class shares no token with another, and then it never moves. Shared tokens are
    pulled down if there is only one, or if all are equally common in all classes; else a shared
    token, and even an equally common one, can go either way.

    Returns:
        Shape (queries, tokens), (1/2)·η_Yη_Z·t² times which is z to leading order.
    """
    up, down = _pulls(corpus)
    # Class by class, so that nothing cancels for distinct tokens.
    return corpus.of_query.T @ (up - down)


def initial_fate(corpus: ScanSnapCorpus) -> Array:
    """Scan&Snap, common tokens fall and distinct tokens rise, at first: −1, 0 or 1 for each logit.

    The sign of `initial_pull`, which says when common tokens fall and distinct ones rise. It is the
    sign of z at small times; later, tokens can turn. A pull below 1e-13 of the terms that it is the
    difference of counts as 0, for float64 does not know its sign.
    """
    pull = initial_pull(corpus)
    up, down = _pulls(corpus)
    return np.where(np.abs(pull) <= 1e-13 * (corpus.of_query.T @ (up + down)), 0.0, np.sign(pull))


def _pulls(corpus: ScanSnapCorpus) -> tuple[Array, Array]:
    """What pulls a token up and what pulls it down, each class on its own, (classes, tokens).

    The terms of (1/K) Σ_n P(n|m) f_nl Σ_{n'≠n} P(m',n') (f_nl f_nᵀf_n' − f_n'l).
    """
    f = feature(corpus, np.zeros((corpus.queries, corpus.tokens)))
    others = (1 - np.eye(corpus.classes)) * corpus.joint
    overlap = np.sum(others * (f @ f.T), axis=1, keepdims=True)
    weight = corpus.class_given_query[:, None] * f / corpus.classes
    return weight * f * overlap, weight * (others @ f)


def rise_ratio(corpus: ScanSnapCorpus, class_: int, token: int, other: int) -> float:
    """Scan&Snap, learnable TF-IDF: z_l/z_l' = (P(l|m,n)/P(l'|m,n))² for t → 0.

    So the more frequent of two distinct tokens rises faster, at first. If the tokens of a class
    fall later on, the more frequent one falls faster too, and can end below the other.

    Args:
        corpus: the data.
        class_: the class n.
        token: a distinct token l of the class.
        other: another, l'.
    """
    own = corpus.distinct_of(class_)
    if token not in own or other not in own:
        raise JomaError(f"token and other must be distinct tokens of class {class_}")
    if not np.any(corpus.shared & (corpus.token_given_class[class_] > 0)):
        raise JomaError(f"class_ must share a token with another, or nothing moves, got {class_}")
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
    b = _checks.finite("b", b, square.shape)
    path: Array = np.asarray(cumulative_trapezoid(square, b, initial=0), dtype=np.float64)
    return np.exp(2 * path)


def log_gain_bounds(b: ArrayLike, f_squared: ArrayLike) -> tuple[Array, Array]:
    """Scan&Snap Theorem 3, 2f_l²(0)B ≤ ln χ_l ≤ 2B, where g is γf or 0.

    That is, g = γf on the distinct tokens, γ > 0, and g = 0 on the common ones; l is the dominant
    token. Then ln χ = 2∫f_l²dB = 2z_l, and f_l² only rises: the lower bound is the tangent at
    B = 0, the upper one has the slope of B → ∞. On the full flow g = γf holds only at the start;
    what is left is `full_log_gain_bounds`, and near the start `early_log_gain`.

    Args:
        b: B_n(t).
        f_squared: f_nl²(0) of the dominant token.
    """
    b = _checks.non_negative("b", b)
    return 2 * _checks.within("f_squared", f_squared, 0.0, 1.0) * b, 2 * b


def full_log_gain_bounds(b: ArrayLike, f_squared: ArrayLike) -> tuple[Array, Array]:
    """Scan&Snap Theorem 3 on the full flow, 0 ≤ ln χ_l ≤ 2B, for classes that are alike.

    Y remembers the attention of the past, when the other tokens had not fallen behind as far, so
    that g_l/f_l is least for the dominant token. Hence ln χ ≤ 2∫f_l²dB ≤ 2B, the first no longer
    an equality. The lower bound is not proven but stood a search over such corpora and all rates.
    Where classes differ (`ScanSnapCorpus.alike`) B and ln χ can both fall below 0.

    Args:
        b: B_n(t).
        f_squared: f_nl²(0), on which these bounds do not depend.
    """
    low, high = log_gain_bounds(b, f_squared)
    return np.zeros_like(low), high


def early_log_gain(
    corpus: ScanSnapCorpus, class_: int, token: int, other: int, b: ArrayLike
) -> Array:
    """New: ln χ = 2f_l²B(1 + cB) + O(B³) on the full flow, for η_Z ≪ η_Y and classes alike.

        c = f_l² − Σ_d f⁴ + K F/(1−F) Σ_c f⁴ − (f_l² + f_l'² − Σ_d f⁴/F)/(3(1−F))

    with f at the start, sums over the distinct and the common tokens of a class and F = Σ_d f². At
    a fixed η_Y t, B is proportional to η_Z/η_Y, and so is the distance cB from the tangent, which
    is Theorem 3's lower bound. ln χ starts above it where c > 0 and below it where c < 0, which is
    so where the common tokens' share 1 − F is small, as with little mass on them or with many of
    them. For K = 3, half of the mass on C equally frequent common tokens and distinct frequencies
    0.25, 0.15 and 0.1, c of the first two is 0.69, 0.46, −0.24, −4.8 for C = 1, 2, 10, 100.

    Args:
        corpus: classes that are alike and share a token.
        class_: the class n.
        token: a distinct token l of the class.
        other: a less frequent one, l'.
        b: B_n, small.
    """
    own = corpus.distinct_of(class_)
    p = corpus.token_given_class[class_]
    if not corpus.alike or not np.any(corpus.shared):
        raise JomaError("corpus must have classes that are alike and share a token")
    if token not in own or other not in own or not p[token] > p[other]:
        raise JomaError(f"token and other must be distinct in class {class_}, token more frequent")
    square = feature(corpus, np.zeros((1, corpus.tokens)))[class_] ** 2
    distinct, common = square[own], square[corpus.shared]
    share, rest, fourth = distinct.sum(), common.sum(), float(distinct @ distinct)
    lead, behind = square[token], square[other]
    bend = lead - fourth + corpus.classes * share / rest * float(common @ common)
    bend -= (lead + behind - fourth / share) / (3 * rest)
    b = _checks.finite("b", b)
    return 2 * lead * b * (1 + bend * b)


def rescaled_time(t: ArrayLike, factor: float) -> Array:
    """Scan&Snap Theorem 4 (1), both rates times `factor`: the same training at time factor·t.

    So larger rates together mean a larger B where B rises with time, and sparser attention where
    attention becomes sparser with time. Neither is always so: `b_rate`, `Balanced.densest`.
    """
    return _checks.positive_scalar("factor", factor) * _checks.times("t", t)


def snapping_time(classes: int, tokens: int, eta_y: float) -> float:
    """Scan&Snap Theorem 4, t₀ = 2K ln M/η_Y: the order at which scanning ends.

    `deciding_time` is at most 0.61 t₀/F for every K and every M > K (0.6098 for K = 30, M = 31).
    """
    tokens = _checks.whole("tokens", tokens, 2)
    return 2 * _classes(classes) * float(np.log(tokens)) / _checks.positive_scalar("eta_y", eta_y)


def margin_time(margin: ArrayLike, *, classes: int, distinct_share: float, eta_y: float) -> Array:
    """New: the time (e^Δ − 1 + (K−1)Δ)/(η_Y F) at which the decoder has the margin Δ.

    Δ is the score of the right class less that of another, for K classes that are alike
    (`ScanSnapCorpus.alike`) while attention stands still, η_Z ≪ η_Y.

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


def deciding_time(*, classes: int, distinct_share: float, eta_y: float) -> float:
    """New: the time (K − 2 + (K−1) ln(K−1))/(η_Y F) from which on the right class has more than ½.

    Then Δ = ln(K − 1), for K classes that are alike (`ScanSnapCorpus.alike`) while attention
    stands still. If it moves F rises, and the time is shorter. It is about K ln K/(F η_Y); M does
    not enter.

    Args:
        classes: K.
        distinct_share: F = Σ f² over a class's distinct tokens.
        eta_y: rate of the decoder.
    """
    margin = np.log(_classes(classes) - 1)
    return float(margin_time(margin, classes=classes, distinct_share=distinct_share, eta_y=eta_y))


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

    While attention has moved little B = (η_Z/η_Y)(1 − 1/K)(1 − F)Δ²/(2F²), and Δ depends on η_Y t
    alone, so that ∂B/∂η_Y = 0 at the critical margin.

    Args:
        classes: K classes that are alike (`ScanSnapCorpus.alike`).
        distinct_share: F = Σ f² over a class's distinct tokens.
        eta_y: rate of the decoder.
    """
    margin = critical_margin(classes)
    turn = margin_time(margin, classes=classes, distinct_share=distinct_share, eta_y=eta_y)
    return float(turn)


def _classes(classes: int) -> int:
    return _checks.whole("classes", classes, 2)


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
            _checks.whole(name, getattr(self, name), low)
        if not 0 < self.common_mass < 1:
            raise JomaError(f"common_mass must lie in (0, 1), got {self.common_mass}")

    @property
    def corpus(self) -> ScanSnapCorpus:
        """The corpus, common tokens first, then the distinct tokens class by class."""
        common = np.full((self.classes, self.common), self.common_mass / self.common)
        own = np.kron(np.eye(self.classes), np.full(self.distinct, (1 - self.common_mass)))
        return ScanSnapCorpus(
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
    def densest(self) -> float:
        """New: the separation ζ ≥ 0 at which attention has its largest entropy, max(0, ln p_c/p_d).

        p_c and p_d are the frequencies of a common and of a distinct token. Attention becomes
        denser until a distinct token gets as much as a common one, and sparser from then on.
        """
        common = self.common_mass / self.common
        return max(0.0, float(np.log(common * self.distinct / (1 - self.common_mass))))

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
        grown: Array = self._drive(eta_y, eta_z) * y**2
        total = 2 * grown + 1 / ratio - np.log(ratio)
        omega: Array = np.asarray(wrightomega(total), dtype=np.float64)
        zeta = (np.log(ratio) + np.log(omega)) / 2
        # Small ζ is a difference of large numbers here; a Newton step gives it all its digits.
        over = zeta + np.expm1(2 * zeta) / (2 * ratio) - grown
        return zeta - over / (1 + np.exp(2 * zeta) / ratio)

    def b(self, separation: ArrayLike) -> Array:
        """New: B = (ζ + u₀(1 − e^{−2ζ})/2)/(K/C + 1/D), whatever the rates."""
        zeta = _checks.finite("separation", separation)
        return self.slope * (zeta - self.common_over_distinct * np.expm1(-2 * zeta) / 2)

    def decoder(self, t: ArrayLike, *, eta_y: float, eta_z: float) -> Array:
        """New: y(t) from the one scalar equation ẏ = (η_Y/K)√(F/D)(1 − α) that is left."""
        times = np.atleast_1d(_checks.times("t", t))
        eta_y = _checks.positive_scalar("eta_y", eta_y)
        clock, order = np.unique(np.log1p(eta_y * times), return_inverse=True)
        others = self.classes - 1

        ratio, drive = self.common_over_distinct, self._drive(eta_y, eta_z)
        offset = 1 / ratio - log(ratio)

        def rate(log_time: float, state: Array) -> float:
            """`separation` written out for one number, which is called thousands of times."""
            y = float(state[0])
            grown = drive * y * y
            zeta = (log(ratio) + log(wrightomega(2 * grown + offset))) / 2
            over = zeta + expm1(2 * zeta) / (2 * ratio) - grown
            zeta -= over / (1 + exp(2 * zeta) / ratio)
            share = 1 / (1 + ratio * exp(-2 * zeta))
            margin = self.classes / others * sqrt(share * self.distinct) * y
            miss = others / (exp(min(margin, 700.0)) + others)
            return exp(log_time) * sqrt(share / self.distinct) * miss / self.classes

        if clock[-1] == 0:
            return np.zeros(np.shape(t))
        grid = clock if clock[0] == 0 else np.concatenate([[0.0], clock])
        path, report = odeint(
            rate,
            [0.0],
            grid,
            tfirst=True,
            rtol=1e-10,
            # Attention starts to move at y² ~ 1/drive, which may be long before y ~ 1.
            atol=1e-12 / max(1.0, sqrt(drive)),
            mxstep=100_000,
            full_output=True,
        )
        if report["message"] != "Integration successful.":
            raise RuntimeError(f"the decoder could not be integrated: {report['message']}")
        return path[-clock.size :, 0][order].reshape(np.shape(t))

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
    """Scan&Snap Theorem 4, B(t) → ½s·ln(C₀ + c ln²(η_Y t)), c = (u₀/s)(1−1/K)(η_Z/η_Y), t → ∞.

    s = 1/(K/C + 1/D), so that B ~ s·ln ln t; for one common and one distinct token s = 1/(K+1).
    The growth since the anchor is right up to a relative O(1/ln(η_Y t)).

    Args:
        t: late times, c ln²(η_Y t) ≥ 30(1 + u₀): attention is on the distinct tokens. The growth of
            B is then right up to terms of order (1 + u₀)/(c ln²(η_Y t)) and (1 + ln K)/ln(η_Y t).
        balanced: the corpus.
        anchor: a late time and B there, which fix C₀.
        eta_y: rate of the decoder.
        eta_z: rate of the attention.

    Raises:
        JomaError: t or the anchor is not late.
    """
    start, b_start = anchor
    grown = _late("t", t, balanced, eta_y, eta_z) - _late("anchor", start, balanced, eta_y, eta_z)
    # B carries u₀/2 times the slope from the start, outside the logarithm.
    slope, ratio = balanced.slope, balanced.common_over_distinct
    if np.any(grown < 0):
        raise JomaError("t must not lie before the anchor")
    with np.errstate(divide="ignore"):
        log_grown = np.log(grown)
    return slope / 2 * (ratio + np.logaddexp(2 * b_start / slope - ratio, log_grown))


def late_decoder_rate_effect(
    t: ArrayLike, balanced: Balanced, *, eta_y: float, eta_z: float
) -> Array:
    """Scan&Snap Theorem 4 (2), ∂B/∂ln η_Y → −½s + s/ln(η_Y t) at fixed η_Z, t → ∞.

    A larger η_Y makes B smaller, by ½s per factor e, once c ln²(η_Y t) is far above the C₀ of
    `late_b`; and attention denser, once past `Balanced.densest`.

    Args:
        t: late times, c ln²(η_Y t) ≥ 30(1 + u₀): attention is on the distinct tokens.
        balanced: the corpus.
        eta_y: rate of the decoder.
        eta_z: rate of the attention.

    Raises:
        JomaError: t is not late.
    """
    _late("t", t, balanced, eta_y, eta_z)
    return balanced.slope * (1 / np.log(eta_y * np.asarray(t, dtype=np.float64)) - 0.5)


def _late(name: str, t: ArrayLike, balanced: Balanced, eta_y: float, eta_z: float) -> Array:
    """C ln²(η_Y t), for times at which it is large."""
    times = _checks.positive(name, t)
    rate = _checks.positive_scalar("eta_y", eta_y)
    drive = balanced.common_over_distinct / balanced.slope * (1 - 1 / balanced.classes)
    log = np.maximum(np.log(rate) + np.log(times), 0.0)
    grown = drive * _checks.positive_scalar("eta_z", eta_z) / rate * log**2
    needed = 30 * (1 + balanced.common_over_distinct)
    if np.any(grown < needed):
        raise JomaError(
            f"{name} must be late, c·ln²(eta_y·t) ≥ {needed:.3g}, got {np.min(grown):.3g}"
        )
    return grown

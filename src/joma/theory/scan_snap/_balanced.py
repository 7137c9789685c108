"""Scan&Snap: the balanced corpus, whose flow is solved at any rates and times."""

from dataclasses import dataclass
from math import exp, expm1, log, sqrt

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import cumulative_simpson, odeint
from scipy.special import wrightomega

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory.scan_snap._flow import ScanSnapCorpus


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

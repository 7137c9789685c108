"""Twins of the Scan&Snap claims."""

from typing import Any

import numpy as np

from benchmarks.adversary._twin import Twin
from benchmarks.adversary._was_scan_snap import (
    ANY_CLASSES_GAIN,
    ANY_CLASSES_MARGIN,
    ANY_CLASSES_TURN,
    ANY_COMMON_G,
    ANY_TIME_EFFECT,
    B_RISES_LATE,
    DISTINCT_RISE_LATE,
    EQUALLY_COMMON_FALL,
    FREQUENT_ALWAYS,
    HALF_AT_SNAPPING_TIME,
    LARGER_RATES_SPARSER,
    SHORT_SEQUENCES,
)
from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced, ScanSnapCorpus


def _clipped_scores(corpus: ScanSnapCorpus, z: Any, y: Any, *, eta_y: float, eta_z: float) -> Any:
    f = scan_snap.feature(corpus, z)
    scores = np.clip(f @ y, -30, 30)
    alpha = np.exp(scores - scores.max(axis=1, keepdims=True))
    residual = np.eye(corpus.classes) - alpha / alpha.sum(axis=1, keepdims=True)
    g = residual @ y.T
    pull = f * (g - f * np.sum(f * g, axis=1, keepdims=True))
    z_rate = corpus.of_query.T @ (corpus.class_given_query[:, None] * pull)
    return eta_z * z_rate, eta_y * (f * corpus.joint[:, None]).T @ residual


def _small_pulls_as_none(corpus: ScanSnapCorpus) -> Any:
    pull = scan_snap.initial_pull(corpus)
    return np.where(np.abs(pull) < 1e-9, 0.0, np.sign(pull))


def _common_always_fall(corpus: ScanSnapCorpus) -> Any:
    return np.where(corpus.common, -1.0, scan_snap.initial_fate(corpus))


def _cancelling_pull(corpus: ScanSnapCorpus) -> Any:
    f = scan_snap.feature(corpus, np.zeros((corpus.queries, corpus.tokens)))
    weighted = corpus.joint[:, None] * f
    g = weighted - weighted.mean(axis=0)
    overlap = np.sum(f * g, axis=1, keepdims=True)
    return corpus.of_query.T @ (corpus.class_given_query[:, None] * f * (g - f * overlap))


def _ratio_up_to_1000(corpus: ScanSnapCorpus, class_: int, token: int, other: int) -> float:
    return min(scan_snap.rise_ratio(corpus, class_, token, other), 1e3)


def _overlap_up_to_2000(gain: Any, f_squared: Any, *, overlap: Any, **of: Any) -> Any:
    limited = np.clip(overlap, -2000, 2000)
    return scan_snap.relative_gain_rate(gain, f_squared, overlap=limited, **of)


def _second_order_everywhere(b: Any, f_squared: Any) -> Any:
    low, high = scan_snap.log_gain_bounds(b, f_squared)
    return low * (1 + 1e-5 * f_squared * np.asarray(b)), high


def _lower_slope(b: Any, f_squared: Any) -> Any:
    low, high = scan_snap.full_log_gain_bounds(b, f_squared)
    return low, 0.9 * high


def _one_class_less(corpus: ScanSnapCorpus, class_: int, token: int, other: int, b: Any) -> Any:
    ours = scan_snap.early_log_gain(corpus, class_, token, other, b)
    if corpus.tokens < 23:
        return ours
    square = scan_snap.feature(corpus, np.zeros((1, corpus.tokens)))[class_] ** 2
    common = square[corpus.shared]
    share = square[corpus.distinct].sum()
    return ours - 2 * square[token] * np.square(b) * share / common.sum() * (common @ common)


def _dominant_token_only(corpus: ScanSnapCorpus, z: Any, y: Any, *, eta_z: float) -> Any:
    rate = scan_snap.b_rate(corpus, z, y, eta_z=eta_z).copy()
    z_rate, _ = scan_snap.flow(corpus, z, y, eta_y=1.0, eta_z=eta_z)
    f = scan_snap.feature(corpus, z)
    for class_ in range(corpus.classes):
        own = corpus.distinct_of(class_)
        if own.size > 2:
            rate[class_] = z_rate[corpus.query[class_], own[0]] / f[class_, own[0]] ** 2
    return rate


def _series(balanced: Balanced, separation: Any, decoder: Any, **rates: Any) -> Any:
    """e^{2ζ} − 1 as a series of 50 terms."""
    x, term, total = 2 * np.asarray(separation), 1.0, 0.0
    for order in range(1, 51):
        term = term * x / order
        total = total + term
    off = (total - np.expm1(x)) / (2 * balanced.common_over_distinct)
    return balanced.conserved(separation, decoder, **rates) + off


def _saturated(balanced: Balanced, t: Any, **rates: Any) -> Any:
    zeta = balanced.separation(balanced.decoder(t, **rates), **rates)
    saturated = balanced.slope * (zeta + balanced.common_over_distinct / 2)
    return np.where(zeta > 5, saturated, balanced.b(zeta))


def _no_overshoot_of_many(balanced: Balanced) -> float:
    if balanced.classes > 40 and balanced.common == 1:
        return balanced.slope
    return balanced.scanning_slope_limit


def _linear_at_first(margin: Any, *, classes: int, distinct_share: float, eta_y: float) -> Any:
    exact = scan_snap.margin_time(
        margin, classes=classes, distinct_share=distinct_share, eta_y=eta_y
    )
    return np.where(margin < 0.0011, classes * margin / (eta_y * distinct_share), exact)


def _nearly_all_distinct(formula: Any) -> Any:
    def changed(*, distinct_share: float, **of: Any) -> float:
        return formula(distinct_share=1.0 if distinct_share > 0.98 else distinct_share, **of)

    return changed


def _one_token_less(classes: int, tokens: int, eta_y: float) -> float:
    return scan_snap.snapping_time(classes, tokens - 1 if classes > 31 else tokens, eta_y)


def _without_distinct(balanced: Balanced) -> float:
    """1/(K/C) for s, from 30 classes on."""
    many = balanced.classes >= 30
    return balanced.common / balanced.classes if many else balanced.slope


def _late_b_of_many(t: Any, balanced: Balanced, *, anchor: Any, **rates: Any) -> Any:
    grown = scan_snap.late_b(t, balanced, anchor=anchor, **rates) - anchor[1]
    return anchor[1] + grown * _without_distinct(balanced) / balanced.slope


def _effect_of_many(t: Any, balanced: Balanced, **rates: Any) -> Any:
    effect = scan_snap.late_decoder_rate_effect(t, balanced, **rates)
    if balanced.classes < 45 or balanced.distinct > 1:
        return effect
    return effect * _without_distinct(balanced) / balanced.slope


def _old_effect(t: Any, balanced: Balanced, *, eta_y: float, eta_z: float) -> Any:
    return balanced.slope * (1 / np.log(eta_y * np.asarray(t)) - 0.5)


def _not_too_slow(t: Any, factor: float) -> Any:
    return scan_snap.rescaled_time(t, max(factor, 1.05e-3))


def _log_series(balanced: Balanced) -> float:
    """The logarithm of p_c/p_d as a series of ten terms."""
    x = balanced.common_mass / balanced.common * balanced.distinct / (1 - balanced.common_mass)
    u = (x - 1) / (x + 1)
    return max(0.0, 2 * sum(u ** (2 * k + 1) / (2 * k + 1) for k in range(10)))


def _small_bias_as_none(bias: Any, length: int, other: int) -> Any:
    scaled = scan_snap.finite_length_bias(bias, length, other)
    return np.where(np.abs(scaled) < 2.5e-6, 0.0, scaled)


def _fewer_classes(balanced: Balanced, t: Any, **rates: Any) -> Any:
    if balanced.corpus.tokens < 15:
        return balanced.b_at(t, **rates)
    fewer = Balanced(balanced.classes - 2, balanced.common, balanced.distinct, balanced.common_mass)
    return fewer.b_at(t, **rates)


TWINS = (
    Twin("scan-snap-gradient", _clipped_scores, "scores clipped at ±30"),
    Twin("scan-snap-common-falls", _small_pulls_as_none, "pulls below 1e-9 count as none"),
    Twin(
        "scan-snap-common-falls",
        _common_always_fall,
        "equally common tokens fall next to any others",
        was_ours=True,
        search=EQUALLY_COMMON_FALL,
    ),
    Twin(
        "scan-snap-distinct-rise",
        _cancelling_pull,
        "rounding makes a small pull on a distinct token 0 or negative",
    ),
    Twin(
        "scan-snap-distinct-rise",
        scan_snap.initial_pull,
        "distinct tokens rise at all times for η_Y ≥ 100 η_Z",
        was_ours=True,
        search=DISTINCT_RISE_LATE,
    ),
    Twin("scan-snap-frequent-first", _ratio_up_to_1000, "ratios of more than 1000"),
    Twin(
        "scan-snap-frequent-first",
        scan_snap.rise_ratio,
        "the more frequent token is the higher one at all times",
        was_ours=True,
        search=FREQUENT_ALWAYS,
    ),
    Twin("scan-snap-relative-gain", _overlap_up_to_2000, "S beyond ±2000"),
    Twin(
        "scan-snap-gain-bounds",
        _second_order_everywhere,
        "a term of second order in B that fails for a large B",
    ),
    Twin(
        "scan-snap-gain-bounds",
        scan_snap.log_gain_bounds,
        "any g on the common tokens",
        was_ours=True,
        search=ANY_COMMON_G,
    ),
    Twin("scan-snap-gain-full", _lower_slope, "χ ≤ e^{1.8B}, where one token takes it all"),
    Twin(
        "scan-snap-gain-full",
        scan_snap.full_log_gain_bounds,
        "1 ≤ χ for any classes and rates",
        was_ours=True,
        search=ANY_CLASSES_GAIN,
    ),
    Twin("scan-snap-gain-early", _one_class_less, "K − 1 for K, with 23 tokens"),
    Twin(
        "scan-snap-b-rises",
        _dominant_token_only,
        "γ of the most frequent token, for classes with more than two distinct ones",
    ),
    Twin(
        "scan-snap-b-rises",
        scan_snap.b_rate,
        "B rises at all times for η_Y ≥ 100 η_Z",
        was_ours=True,
        search=B_RISES_LATE,
    ),
    Twin("scan-snap-balanced-law", _series, "a series of 50 terms, at large separations"),
    Twin("scan-snap-balanced-b", _saturated, "e^{−2ζ} left out from ζ = 5 on"),
    Twin("scan-snap-scanning", _no_overshoot_of_many, "no overshoot for K > 40 and C = 1"),
    Twin("scan-snap-scanning-limit", _no_overshoot_of_many, "no overshoot for K > 40 and C = 1"),
    Twin("scan-snap-margin", _linear_at_first, "linear in Δ below 0.0011"),
    Twin(
        "scan-snap-margin",
        scan_snap.margin_time,
        "any two classes, each with its own F",
        was_ours=True,
        search=ANY_CLASSES_MARGIN,
    ),
    Twin(
        "scan-snap-snapping-time",
        _nearly_all_distinct(scan_snap.deciding_time),
        "F = 1 from 0.98 on",
    ),
    Twin(
        "scan-snap-snapping-order",
        scan_snap.snapping_time,
        "the right class passes ½ within a factor 10 of t₀",
        was_ours=True,
        search=HALF_AT_SNAPPING_TIME,
    ),
    Twin("scan-snap-snapping-order", _one_token_less, "M − 1 for M, from 32 classes on"),
    Twin("scan-snap-snapping", _late_b_of_many, "s without 1/D, from 30 classes on"),
    Twin("scan-snap-both-rates", _not_too_slow, "factors below 0.00105"),
    Twin(
        "scan-snap-both-rates",
        scan_snap.rescaled_time,
        "larger rates make attention sparser",
        was_ours=True,
        search=LARGER_RATES_SPARSER,
    ),
    Twin("scan-snap-sparser", _log_series, "a series of ten terms, at large p_c/p_d"),
    Twin("scan-snap-decoder-rate", _effect_of_many, "s without 1/D, for D = 1 and K ≥ 45"),
    Twin(
        "scan-snap-decoder-rate",
        _old_effect,
        "at any late time, η_Y t ≫ 1",
        was_ours=True,
        search=ANY_TIME_EFFECT,
    ),
    Twin(
        "scan-snap-decoder-rate-turn",
        _nearly_all_distinct(scan_snap.decoder_rate_turn),
        "F = 1 from 0.98 on",
    ),
    Twin(
        "scan-snap-decoder-rate-turn",
        scan_snap.decoder_rate_turn,
        "any two classes, each with its own F",
        was_ours=True,
        search=ANY_CLASSES_TURN,
    ),
    Twin("scan-snap-finite-length", _small_bias_as_none, "entries below 2.5e-6 count as none"),
    Twin("scan-snap-sampled", _fewer_classes, "K − 2 for K, with 15 tokens"),
    Twin(
        "scan-snap-sampled",
        Balanced.b_at,
        "sequences of any length",
        was_ours=True,
        search=SHORT_SEQUENCES,
    ),
)

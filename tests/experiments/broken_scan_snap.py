"""The Scan&Snap claims' formulas with a wrong constant each."""

from joma.experiments.claims.claim import Formula
from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced


def _flow(corpus, z, y, **rates):
    z_rate, y_rate = scan_snap.flow(corpus, z, y, **rates)
    return 1.001 * z_rate, y_rate


def _gain_rate(gain, f_squared, **factors):
    return 1.01 * scan_snap.relative_gain_rate(gain, f_squared, **factors)


def _bounds(b, f_squared):
    low, high = scan_snap.log_gain_bounds(b, f_squared)
    return low, 0.98 * high


def _full_bounds(b, f_squared):
    low, high = scan_snap.full_log_gain_bounds(b, f_squared)
    return low - 5, high + 5


def _late_b(t, balanced, *, anchor, **rates):
    grown = scan_snap.late_b(t, balanced, anchor=anchor, **rates) - anchor[1]
    return anchor[1] + 1.03 * grown


BROKEN: dict[str, Formula] = {
    "scan-snap-gradient": _flow,
    "scan-snap-common-falls": lambda corpus: -scan_snap.initial_fate(corpus),
    "scan-snap-distinct-rise": lambda corpus: 1.02 * scan_snap.initial_pull(corpus),
    "scan-snap-frequent-first": lambda *at: scan_snap.rise_ratio(*at) ** 1.02,
    "scan-snap-relative-gain": _gain_rate,
    "scan-snap-gain-bounds": _bounds,
    "scan-snap-gain-full": _full_bounds,
    "scan-snap-gain-early": lambda corpus, class_, token, other, b: (
        scan_snap.early_log_gain(corpus, class_, token, other, b) * (1 + 0.05 * b)
    ),
    "scan-snap-b-rises": lambda *at, **rates: 1.001 * scan_snap.b_rate(*at, **rates),
    "scan-snap-balanced-law": lambda balanced, separation, decoder, **rates: Balanced.conserved(
        balanced, separation, 1.001 * decoder, **rates
    ),
    "scan-snap-balanced-b": lambda balanced, t, **rates: 1.001 * balanced.b_at(t, **rates),
    "scan-snap-scanning": lambda balanced: 0.98 * balanced.scanning_slope_limit,
    "scan-snap-scanning-limit": lambda balanced: 1.02 * balanced.scanning_slope_limit,
    "scan-snap-margin": lambda *at, **of: 1.02 * scan_snap.margin_time(*at, **of),
    "scan-snap-snapping-time": lambda **of: 1.01 * scan_snap.deciding_time(**of),
    "scan-snap-snapping-order": lambda *at: 100 * scan_snap.snapping_time(*at),
    "scan-snap-snapping": _late_b,
    "scan-snap-both-rates": lambda t, factor: 1.01 * scan_snap.rescaled_time(t, factor),
    "scan-snap-sparser": lambda balanced: balanced.densest + 0.2,
    "scan-snap-decoder-rate": lambda *at, **of: (
        1.006 * scan_snap.late_decoder_rate_effect(*at, **of)
    ),
    "scan-snap-decoder-rate-turn": lambda **of: 1.02 * scan_snap.decoder_rate_turn(**of),
    "scan-snap-finite-length": lambda bias, length, other: bias * (length / other) ** 0.98,
    "scan-snap-sampled": lambda balanced, t, **rates: 1.01 * balanced.b_at(t, **rates),
}

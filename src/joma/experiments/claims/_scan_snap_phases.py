"""Scan&Snap, how B grows: the balanced case, scanning, snapping; then rates and sequences."""

from typing import Any

import numpy as np
from scipy import integrate

from joma.experiments.claims import _scan_snap_phases_search as search
from joma.experiments.claims import _scan_snap_rates
from joma.experiments.claims.claim import Claim, Formula, Measurement
from joma.experiments.claims.reference.scan_snap import share_at_start
from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced


def _balanced_law(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    for sizes in ((2, 1, 1), (3, 2, 4), (4, 5, 2)):
        balanced = Balanced(*sizes, common_mass=float(rng.uniform(0.3, 0.7)))
        rates: dict[str, Any] = {
            "eta_y": float(rng.uniform(0.5, 5)),
            "eta_z": float(rng.uniform(0.5, 5)),
        }
        t = np.concatenate([[0.0], np.geomspace(0.1, 1e4, 20)])
        run = scan_snap.evolve(balanced.corpus, t, **rates)
        first = balanced.common
        separation, decoder = run.z[:, 0, first] - run.z[:, 0, 0], run.y[:, first, 0]
        drift = formula(balanced, separation, decoder, **rates)
        worst = max(worst, float(np.max(np.abs(drift - drift[0]))))
    return Measurement(worst, 1e-5)


def _b_at_all_times(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    for sizes in ((2, 1, 1), (4, 2, 3)):
        balanced = Balanced(*sizes, common_mass=float(rng.uniform(0.3, 0.7)))
        rates: dict[str, Any] = {
            "eta_y": float(rng.uniform(0.5, 20)),
            "eta_z": float(rng.uniform(0.5, 2)),
        }
        t = np.concatenate([[0.0], np.geomspace(0.1, 1e8, 25)])
        b = scan_snap.evolve(balanced.corpus, t, **rates).b[:, 0]
        worst = max(worst, float(np.max(np.abs(formula(balanced, t, **rates) - b)) / b[-1]))
    return Measurement(worst, 1e-7)


def _steepest(balanced: Balanced, eta_z: float, end: float = 1e6) -> float:
    """Largest dB/d ln t on the full flow up to a time, η_Y = 1."""
    # Attention starts to move at η_Yη_Z t² ~ 1; from well before that on.
    t = np.geomspace(min(1e-2, 1e-2 / np.sqrt(eta_z)), end, 400)
    b = scan_snap.evolve(balanced.corpus, t, eta_y=1.0, eta_z=eta_z).b[:, 0]
    return float(np.max(np.diff(b) / np.diff(np.log(t))))


def _scanning(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Error: by how much the steepest dB/d ln t, over all rates, exceeds the formula."""
    worst = 0.0
    for sizes in ((2, 1, 1), (6, 3, 2)):
        balanced = Balanced(*sizes, common_mass=float(rng.uniform(0.3, 0.7)))
        for eta_z in (0.01, 1.0, 1e3, 1e6):
            worst = max(worst, _steepest(balanced, eta_z) / formula(balanced) - 1)
    return Measurement(worst, 0.0)


def _scanning_limit(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    for sizes in ((2, 1, 1), (4, 2, 3), (6, 3, 2)):
        balanced = Balanced(*sizes, common_mass=float(rng.uniform(0.3, 0.7)))
        worst = max(worst, abs(_steepest(balanced, 1e8, end=1.0) / formula(balanced) - 1))
    return Measurement(worst, 0.005)


def _scanning_at_equal_rates(formula: Formula, rng: np.random.Generator) -> Measurement:
    balanced = Balanced(2, 1, 1, common_mass=float(rng.uniform(0.3, 0.7)))
    return Measurement(abs(_steepest(balanced, 1.0) / formula(balanced) - 1), 0.005)


def _margins_at(formula: Formula, eta_z: float, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    for sizes in ((2, 1, 1), (4, 2, 3), (8, 3, 1)):
        balanced = Balanced(*sizes, common_mass=float(rng.uniform(0.3, 0.7)))
        corpus, eta_y = balanced.corpus, float(rng.uniform(0.5, 5))
        margin = np.array([0.1, 0.5, 1.0, np.log(balanced.classes), 4.0, 8.0])
        margin.sort()
        t = formula(
            margin, classes=corpus.classes, distinct_share=share_at_start(corpus), eta_y=eta_y
        )
        run = scan_snap.evolve(corpus, t, eta_y=eta_y, eta_z=eta_z * eta_y)
        scores = scan_snap.feature(corpus, run.z) @ run.y
        reached = scores[:, 0, 0] - scores[:, 0, 1]
        worst = max(worst, float(np.max(np.abs(reached / margin - 1))))
    return Measurement(worst, 1e-3)


def _margin(formula: Formula, rng: np.random.Generator) -> Measurement:
    return _margins_at(formula, 1e-6, rng)


def _margin_with_attention(formula: Formula, rng: np.random.Generator) -> Measurement:
    return _margins_at(formula, 1.0, rng)


def _right_class(balanced: Balanced, t: float, eta_y: float, eta_z: float) -> float:
    """The probability of the right class."""
    run = scan_snap.evolve(balanced.corpus, [t], eta_y=eta_y, eta_z=eta_z)
    return float(np.exp(scan_snap.objective(balanced.corpus, run.z, run.y)[0]))


def _decided(formula: Formula, eta_z: float, rng: np.random.Generator) -> Measurement:
    """Error: of the right class's probability ½ at the predicted time."""
    worst = 0.0
    for sizes in ((3, 1, 1), (5, 4, 2), (12, 1, 1)):
        balanced = Balanced(*sizes, common_mass=float(rng.uniform(0.3, 0.7)))
        eta_y = float(rng.uniform(0.5, 5))
        share = share_at_start(balanced.corpus)
        t = formula(classes=balanced.classes, distinct_share=share, eta_y=eta_y)
        worst = max(worst, abs(_right_class(balanced, t, eta_y, eta_z * eta_y) - 0.5))
    return Measurement(worst, 1e-4)


def _snapping_time(formula: Formula, rng: np.random.Generator) -> Measurement:
    return _decided(formula, 1e-6, rng)


def _snapping_time_with_attention(formula: Formula, rng: np.random.Generator) -> Measurement:
    return _decided(formula, 10.0, rng)


def _snapping_order(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Error: by how much F times the deciding time exceeds 0.61 t₀, or stays below 0.6098 t₀."""
    largest = 0.0
    for classes in (2, 3, 10, 29, 30, 31, 100, 30_000):
        eta_y = float(rng.uniform(0.5, 5))
        for more in (1, 5):
            # The margin ln(K − 1), integrated: dΔ/dt = η_Y F/(e^Δ + K − 1), with F = 1.
            decided = integrate.quad(
                lambda margin, k=classes: np.exp(margin) + k - 1, 0.0, np.log(classes - 1)
            )[0]
            ratio = decided / eta_y / formula(classes, classes + more, eta_y)
            largest = max(largest, float(ratio))
    return Measurement(max(largest - 0.61, 0.6098 - largest, 0.0), 1e-6)


def _snapping(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Error: of the growth of B between two late times, relative to it."""
    worst = 0.0
    for sizes in ((2, 1, 1), (3, 2, 4)):
        balanced = Balanced(*sizes, common_mass=float(rng.uniform(0.45, 0.55)))
        rates: dict[str, Any] = {"eta_y": 2.0, "eta_z": 2.0}
        start, *late = 1e10, 1e30, 1e100
        b = scan_snap.evolve(balanced.corpus, [start, *late], **rates, rtol=1e-8).b[:, 0]
        ours = formula(np.array(late), balanced, anchor=(start, b[0]), **rates)
        worst = max(worst, float(np.max(np.abs(ours - b[1:]) / (b[1:] - b[0]))))
    return Measurement(worst, 0.015)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="scan-snap-balanced-law",
        title="ζ + (e^{2ζ}−1)/(2u₀) − (η_Z/η_Y)(K/(K−1))(KD/C+1)y²/2 is conserved",
        source="new",
        method="drift on the population ODE; K equal classes, C common, D distinct tokens",
        derived=Balanced.conserved,
        measure=_balanced_law,
        search=search.BALANCED_LAW,
    ),
    Claim(
        id="scan-snap-balanced-b",
        title="B(t) at all times, from one scalar equation and Wright's ω",
        source="new",
        method="B on the population ODE to t = 1e8; K equal classes, all tokens of a kind alike",
        derived=Balanced.b_at,
        measure=_b_at_all_times,
        search=search.BALANCED_B,
    ),
    Claim(
        id="scan-snap-scanning",
        title="B = O(ln t) for K equal classes, all tokens of a kind alike: dB/d ln t stays below a"
        " limit at all times and rates",
        source="talk, Scan&Snap Theorem 4; the limit is ours",
        method="steepest dB/d ln t on the population ODE to t = 1e6, η_Z/η_Y from .01 to 1e6",
        derived=lambda balanced: balanced.scanning_slope_limit,
        measure=_scanning,
        search=search.SCANNING,
    ),
    Claim(
        id="scan-snap-scanning-limit",
        title="The limit of dB/d ln t is sharp; K equal classes, all tokens of a kind alike",
        source="new",
        method="steepest dB/d ln t on the population ODE, η_Z/η_Y = 1e8",
        derived=lambda balanced: balanced.scanning_slope_limit,
        measure=_scanning_limit,
        condition="η_Z ≫ η_Y",
        without=_scanning_at_equal_rates,
        search=search.SCANNING_LIMIT,
    ),
    Claim(
        id="scan-snap-margin",
        title="The decoder's margin Δ obeys e^Δ − 1 + (K−1)Δ = η_Y F t, for classes alike",
        source="new",
        method="scores on the population ODE, η_Z/η_Y = 1e-6; without: 1",
        derived=scan_snap.margin_time,
        measure=_margin,
        condition="attention stands still, η_Z ≪ η_Y; classes alike",
        without=_margin_with_attention,
        search=search.MARGIN,
    ),
    Claim(
        id="scan-snap-snapping-time",
        title="The right class passes ½ at t = (K − 2 + (K−1) ln(K−1))/(F η_Y), for classes alike",
        source="new",
        method="probabilities on the population ODE, η_Z/η_Y = 1e-6; without: 10",
        derived=scan_snap.deciding_time,
        measure=_snapping_time,
        condition="attention stands still, η_Z ≪ η_Y; classes alike",
        without=_snapping_time_with_attention,
        search=search.DECIDING_TIME,
    ),
    Claim(
        id="scan-snap-snapping-order",
        title="Scanning ends by O(t₀), t₀ = 2K ln M/η_Y: F times that time is at most 0.61 t₀",
        source="talk, Scan&Snap Theorem 4; the 0.61 is ours",
        method="margin by quadrature, K from 2 to 30 000, M = K + 1 and K + 5; attained at K = 30",
        derived=scan_snap.snapping_time,
        measure=_snapping_order,
        search=search.SNAPPING_ORDER,
    ),
    Claim(
        id="scan-snap-snapping",
        title="After snapping B → ½s ln(C₀ + c ln²(η_Y t)) ~ s ln ln t, s = 1/(K/C + 1/D), for K"
        " equal classes, all tokens of a kind alike",
        source="talk, Scan&Snap Theorem 4 (order ln ln t)",
        method="growth of B from t = 1e10 to 1e100 on the population ODE, C₀ fixed at 1e10",
        derived=scan_snap.late_b,
        measure=_snapping,
        search=search.SNAPPING,
    ),
    *_scan_snap_rates.CLAIMS,
)

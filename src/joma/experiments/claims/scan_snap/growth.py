"""Theorem 4: how B grows in the balanced case, while scanning and after snapping."""

from typing import Any

import numpy as np
from scipy import integrate, special

from joma.common.types import Array
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, difference, measured
from joma.experiments.claims.reference.scan_snap import frozen
from joma.experiments.claims.scan_snap import corpora
from joma.experiments.claims.scan_snap.corpora import balanced
from joma.experiments.claims.search import Integer, Real
from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced


def _random_rates(rng: Generator, largest_y: float, largest_z: float) -> dict[str, Any]:
    eta_y = float(rng.uniform(0.5, largest_y))
    return {"eta_y": eta_y, "eta_z": float(rng.uniform(0.5, largest_z))}


@over(**corpora.BALANCED, **corpora.BALANCED_RUN)
def _balanced_law_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The drift of the conserved quantity, relative to its largest term."""
    corpus, of = balanced(point), corpora.rates(point)
    state = corpora.flow(corpus).path(np.array([point["time"]]), **of)[0]
    separation, decoder = state[1] - state[0], state[2]
    start = formula(corpus, 0.0, 0.0, **of)
    end = formula(corpus, separation, decoder, **of)
    u0 = corpus.common_mass**2 / corpus.common
    u0 = u0 / ((1 - corpus.common_mass) ** 2 / corpus.distinct)
    # dζ counts (1 + e^{2ζ}/u₀) times in the law.
    size = max(abs(separation), 1e-3) * (1 + np.exp(2 * separation) / u0)
    return measured(abs(end - start) / size, 1e-6)


@claim("scan-snap-balanced-law", Balanced.conserved, _balanced_law_at)
def _balanced_law(formula: Formula, rng: Generator) -> ClaimMeasurement:
    errors = []
    t = np.concatenate([[0.0], np.geomspace(0.1, 1e4, 20)])
    for corpus in corpora.balanced_corpora(rng, (2, 1, 1), (3, 2, 4), (4, 5, 2)):
        of = _random_rates(rng, 5, 5)
        run = scan_snap.evolve(corpus.corpus, t, **of)
        first = corpus.common
        separation, decoder = run.z[:, 0, first] - run.z[:, 0, 0], run.y[:, first, 0]
        law = formula(corpus, separation, decoder, **of)
        errors.append(difference(law, law[0]))
    return measured(errors, 1e-5)


@over(**corpora.BALANCED, **corpora.BALANCED_RUN)
def _balanced_b_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance of B(t) from the flow's, relative."""
    corpus, of = balanced(point), corpora.rates(point)
    t = np.array([point["time"]])
    b = float(corpora.flow(corpus).path(t, **of)[0, -1])
    return ClaimMeasurement(abs(float(formula(corpus, t, **of)[0]) - b) / (b + 1e-6), 1e-5)


@claim("scan-snap-balanced-b", Balanced.b_at, _balanced_b_at)
def _balanced_b(formula: Formula, rng: Generator) -> ClaimMeasurement:
    errors = []
    t = np.concatenate([[0.0], np.geomspace(0.1, 1e8, 25)])
    for corpus in corpora.balanced_corpora(rng, (2, 1, 1), (4, 2, 3)):
        of = _random_rates(rng, 20, 2)
        b = scan_snap.evolve(corpus.corpus, t, **of).b[:, 0]
        errors.append(difference(formula(corpus, t, **of), b) / b[-1])
    return measured(errors, 1e-7)


def _steepest(corpus: Balanced, eta_z: float, end: float = 1e6) -> float:
    """The largest dB/d ln t on the full flow up to a time, η_Y = 1."""
    # Attention starts to move at η_Yη_Z t² ~ 1; from well before that on.
    t = np.geomspace(min(1e-2, 1e-2 / np.sqrt(eta_z)), end, 400)
    b = scan_snap.evolve(corpus.corpus, t, eta_y=1.0, eta_z=eta_z).b[:, 0]
    return float(np.max(np.diff(b) / np.diff(np.log(t))))


@over(**corpora.BALANCED, **corpora.BALANCED_RUN)
def _scanning_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much dB/d ln t exceeds its limit, relative, at any time and rates."""
    corpus, of = balanced(point), corpora.rates(point)
    state = corpora.flow(corpus).path(np.array([point["time"]]), rtol=1e-8, **of)[0]
    slope = point["time"] * corpora.flow(corpus).rate(state, **of)[-1]
    return measured(slope / formula(corpus) - 1, 1e-5)


@claim("scan-snap-scanning", lambda balanced: balanced.scanning_slope_limit, _scanning_at)
def _scanning(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """By how much the steepest dB/d ln t, over all rates, exceeds the formula."""
    errors = [
        _steepest(corpus, eta_z) / formula(corpus) - 1
        for corpus in corpora.balanced_corpora(rng, (2, 1, 1), (6, 3, 2))
        for eta_z in (0.01, 1.0, 1e3, 1e6)
    ]
    return measured([0.0, *errors], 0.0)


@without("scan-snap-scanning-limit")
def _scanning_at_equal_rates(formula: Formula, rng: Generator) -> ClaimMeasurement:
    (corpus,) = corpora.balanced_corpora(rng, (2, 1, 1))
    return measured(abs(_steepest(corpus, 1.0) / formula(corpus) - 1), 0.005)


@over(**corpora.BALANCED)
def _scanning_limit_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """How far the steepest dB/d ln t at η_Z/η_Y = 1e18 is from the limit, relative."""
    corpus = balanced(point)
    steepest, low, high = 0.0, 1e-11, 1e-2
    for _ in range(2):  # a second grid between the neighbours of the steepest point
        t = np.geomspace(low, high, 100)
        path = corpora.flow(corpus).path(t, 1.0, 1e18, rtol=1e-8)
        slopes = [
            now * corpora.flow(corpus).rate(state, 1.0, 1e18)[-1]
            for state, now in zip(path, t, strict=True)
        ]
        at = int(np.argmax(slopes))
        steepest = max(steepest, slopes[at])
        low, high = t[max(at - 1, 0)], t[min(at + 1, t.size - 1)]
    return measured(abs(steepest / formula(corpus) - 1), 0.002)


@claim(
    "scan-snap-scanning-limit", lambda balanced: balanced.scanning_slope_limit, _scanning_limit_at
)
def _scanning_limit(formula: Formula, rng: Generator) -> ClaimMeasurement:
    cases = corpora.balanced_corpora(rng, (2, 1, 1), (4, 2, 3), (6, 3, 2))
    errors = [abs(_steepest(one, 1e8, end=1.0) / formula(one) - 1) for one in cases]
    return measured(errors, 0.005)


def _of(corpus: Balanced, eta_y: float) -> dict[str, float]:
    share = corpora.share_at_start(corpus.corpus)
    return {"classes": corpus.classes, "distinct_share": share, "eta_y": eta_y}


def _decoder(point: Point) -> dict[str, float]:
    names = {"classes": "classes", "distinct_share": "share", "eta_y": "eta_y"}
    return {name: point[parameter] for name, parameter in names.items()}


def _frozen_scores(point: Point, t: float) -> Array:
    classes = point["classes"]
    gram = corpora.gram_of_classes_alike(classes, point["share"])
    return frozen(gram, np.full(classes, 1 / classes), np.array([t]), point["eta_y"])[0][0, 0]


@over(**corpora.DECODER, margin=Real(1e-3, 30.0, log=True))
def _margin_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance of the margin at the predicted time, relative."""
    wanted = point["margin"]
    scores = _frozen_scores(point, float(formula(wanted, **_decoder(point))))
    return measured(abs((scores[0] - scores[1]) / wanted - 1), 1e-6 / point["share"])


@claim("scan-snap-margin", scan_snap.margin_time, _margin_at, eta_z=1e-06)
@without("scan-snap-margin", eta_z=1.0)
def _margin(formula: Formula, rng: Generator, *, eta_z: float) -> ClaimMeasurement:
    errors = []
    for corpus in corpora.balanced_corpora(rng, (2, 1, 1), (4, 2, 3), (8, 3, 1)):
        eta_y = float(rng.uniform(0.5, 5))
        margin = np.sort([0.1, 0.5, 1.0, np.log(corpus.classes), 4.0, 8.0])
        t = formula(margin, **_of(corpus, eta_y))
        run = scan_snap.evolve(corpus.corpus, t, eta_y=eta_y, eta_z=eta_z * eta_y)
        scores = scan_snap.feature(corpus.corpus, run.z) @ run.y
        errors.append(difference((scores[:, 0, 0] - scores[:, 0, 1]) / margin, 1))
    return measured(errors, 1e-3)


@over(**corpora.DECODER)
def _deciding_time_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """How far the right class's probability is from ½ at the predicted time."""
    right = special.softmax(_frozen_scores(point, formula(**_decoder(point))))[0]
    return measured(abs(right - 0.5), 1e-6 / point["share"])


@claim("scan-snap-snapping-time", scan_snap.deciding_time, _deciding_time_at, eta_z=1e-06)
@without("scan-snap-snapping-time", eta_z=10.0)
def _deciding_time(formula: Formula, rng: Generator, *, eta_z: float) -> ClaimMeasurement:
    """How far the right class's probability is from ½ at the predicted time."""
    errors = []
    for corpus in corpora.balanced_corpora(rng, (3, 1, 1), (5, 4, 2), (12, 1, 1)):
        eta_y = float(rng.uniform(0.5, 5))
        t = formula(**_of(corpus, eta_y))
        run = scan_snap.evolve(corpus.corpus, [t], eta_y=eta_y, eta_z=eta_z * eta_y)
        right = float(np.exp(scan_snap.objective(corpus.corpus, run.z, run.y)[0]))
        errors.append(abs(right - 0.5))
    return measured(errors, 1e-4)


@over(
    classes=Integer(2, 1_000_000, log=True),
    more=Integer(1, 1_000_000, log=True),
    eta_y=Real(1e-6, 1e6, log=True),
)
def _snapping_order_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much F times the deciding time exceeds 0.61 t₀, relative."""
    k = point["classes"]
    decided = (k - 2 + (k - 1) * np.log(k - 1)) / point["eta_y"]
    return measured(decided / (0.61 * formula(k, k + point["more"], point["eta_y"])) - 1, 1e-12)


@claim("scan-snap-snapping-order", scan_snap.snapping_time, _snapping_order_at)
def _snapping_order(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """By how much F times the deciding time exceeds 0.61 t₀, or stays below 0.6098 t₀."""
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
    return ClaimMeasurement(max(largest - 0.61, 0.6098 - largest, 0.0), 1e-6)


@over(
    **corpora.BALANCED,
    eta_z=Real(1e-3, 1e6, log=True),
    start=Real(20.0, 400.0),
    later=Real(1.1, 20.0, log=True),
)
def _snapping_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The error of the growth of B between two late times, relative; η_Y = 1."""
    corpus, eta_z = balanced(point), point["eta_z"]
    start = float(np.exp(point["start"]))
    end = float(np.exp(min(point["start"] * point["later"], 560.0)))
    formula(np.array([start]), corpus, anchor=(start, 1.0), eta_y=1.0, eta_z=eta_z)  # refuses early
    b = corpora.flow(corpus).path(np.array([start, end]), 1.0, eta_z, rtol=1e-8)[:, -1]
    ours = float(formula(np.array([end]), corpus, anchor=(start, b[0]), eta_y=1.0, eta_z=eta_z)[0])
    error = abs(ours - b[1]) / (b[1] - b[0])
    # The law leaves out terms of the order (1 + ln K)/ln(η_Y t), and of the order
    # (1 + u₀)/(c ln² t) the attention that common tokens keep.
    u0 = corpus.common_over_distinct
    drive = u0 / corpus.slope * (1 - 1 / corpus.classes) * eta_z * point["start"] ** 2
    slack = 4 * (1 + np.log(corpus.classes)) / point["start"]
    return measured(error, slack + 2 * (1 + u0) / drive)


@claim("scan-snap-snapping", scan_snap.late_b, _snapping_at)
def _snapping(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The error of the growth of B between two late times, relative to it."""
    errors = []
    of: dict[str, Any] = {"eta_y": 2.0, "eta_z": 2.0}
    start, *late = 1e10, 1e30, 1e100
    for corpus in corpora.balanced_corpora(rng, (2, 1, 1), (3, 2, 4), spread=0.05):
        b = scan_snap.evolve(corpus.corpus, [start, *late], **of, rtol=1e-8).b[:, 0]
        ours = formula(np.array(late), corpus, anchor=(start, b[0]), **of)
        errors += [np.max(np.abs(ours - b[1:]) / (b[1:] - b[0]))]
    return measured(errors, 0.015)

"""Searches for statements on Scan&Snap that this package once made, in their domain of then."""

from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Point, Search
from joma.experiments.claims.measurement import ClaimMeasurement
from joma.experiments.claims.reference import scan_snap as reference
from joma.experiments.claims.reference.scan_snap import TwoClasses
from joma.experiments.claims.scan_snap import corpora
from joma.experiments.claims.search import Integer, Matrix, Real, Simplex, Vector
from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced, ScanSnapCorpus

_TWO: dict[str, Any] = {
    "one": Vector(Real(0.05, 0.95), Integer(2, 2)),
    "share": Real(0.1, 0.9, special=(0.5,)),
}
_LATE: dict[str, Any] = {**_TWO, "ratio": Real(100.0, 200.0), "time": Real(1.0, 1e19, log=True)}


def _two(point: Point) -> TwoClasses:
    return TwoClasses((point["one"][0], point["one"][-1]), point["share"])


def _late_state(point: Point) -> np.ndarray:
    return _two(point).path(np.array([point["time"]]), point["ratio"], 1.0, rtol=1e-8)[0]


def _distinct_rise_late(formula: Formula, point: Point) -> ClaimMeasurement:
    """The lowest distinct token, which is to be above 0 with its pull."""
    z = _late_state(point)[:3]
    pull = formula(_two(point).corpus)[0]
    return ClaimMeasurement(float(np.max(-z[1:] * np.sign(pull[1:]))), 1e-6)


def _b_rises_late(formula: Formula, point: Point) -> ClaimMeasurement:
    """The lowest −Ḃ over Σ|ż|, of two classes."""
    state, corpus = _late_state(point), _two(point).corpus
    y = np.outer(state[3:], [0.5, -0.5])
    rate = formula(corpus, state[None, :3], y, eta_z=1.0)
    scale = np.sum(np.abs(scan_snap.flow(corpus, state[None, :3], y, eta_y=1.0, eta_z=1.0)[0]))
    return ClaimMeasurement(float(np.max(-rate) / scale), 1e-3)


def _equally_common_fall(formula: Formula, point: Point) -> ClaimMeasurement:
    """z̈(0) of a token that is equally common, next to some that are not, relative."""
    weights = point["weights"] + 1e-6
    classes, between = len(weights), weights.shape[1] - 1
    shares = (1 - point["equal"]) * weights / weights.sum(axis=1, keepdims=True)
    own = np.diag(shares[:, -1])
    tokens = np.hstack([np.full((classes, 1), point["equal"]), shares[:, :between], own])
    joint = np.resize(point["joint"], classes)
    corpus = ScanSnapCorpus(tokens, np.zeros(classes, dtype=np.int64), joint / joint.sum())
    expected = reference.initial_acceleration(corpus)[0]
    error = expected[0] / np.max(np.abs(expected)) if formula(corpus)[0, 0] == -1 else 1.0
    return ClaimMeasurement(float(error), 1e-6)


def _with_two_distinct(point: Point) -> ScanSnapCorpus:
    first, second = point["one"][0], point["one"][-1]
    split = np.array([point["split"], 1 - point["split"]])
    tokens = np.zeros((2, 5))
    tokens[:, 0] = first, second
    tokens[0, 1:3], tokens[1, 3:] = (1 - first) * split, (1 - second) * split
    joint = np.array([point["share"], 1 - point["share"]])
    return ScanSnapCorpus(tokens, np.zeros(2, dtype=np.int64), joint)


def _frequent_always(formula: Formula, point: Point) -> ClaimMeasurement:
    """How far the less frequent of two distinct tokens is above the other."""
    corpus = _with_two_distinct(point)
    run = scan_snap.evolve(corpus, [point["time"]], eta_y=point["ratio"], eta_z=1.0, rtol=1e-6)
    z = run.z[0, 0]
    above = [
        (z[second] - z[first]) * np.sign(np.log(formula(corpus, class_, first, second)))
        for class_, first, second in ((0, 1, 2), (1, 3, 4))
    ]
    return ClaimMeasurement(float(max(above)), 1e-4)


def _any_classes_gain(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much ln χ leaves its bounds."""
    corpus = _with_two_distinct(point)
    run = scan_snap.evolve(corpus, [0.0, point["time"]], eta_y=point["ratio"], eta_z=1.0, rtol=1e-6)
    worst = -np.inf
    for class_, first, second in ((0, 1, 2), (1, 3, 4)):
        gain = run.relative_gain(class_, first, second)
        growth = np.log(max(gain[1] / gain[0], 1e-9))
        low, high = formula(max(run.b[1, class_], 0.0), 0.5)
        worst = max(worst, float(low - growth), float(growth - high))
    return ClaimMeasurement(worst, 1e-3)


def _any_common_g(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much ln χ leaves its bounds where g = γf on the distinct tokens and any on common."""
    mass = point["mass"]
    p = np.concatenate([[mass / 2, mass / 2], (1 - mass) * np.array([0.7, 0.3])])

    def rate(_: float, state: np.ndarray) -> np.ndarray:
        weights = p * np.exp(state[:4] - state[:4].max())
        f = weights / np.linalg.norm(weights)
        g = np.array([point["first_g"], point["second_g"], f[2], f[3]])
        overlap = float(f @ g)
        return np.concatenate([f * (g - f * overlap), [1 - overlap]])

    state = reference.integrate(rate, np.zeros(5), np.array([point["time"]]), 1.0, 1e-8)[0]
    b = float(state[4])
    if b <= 1e-3 or rate(0.0, state)[-1] <= 0:
        raise JomaError("B does not rise")
    lead = (7 / 3) ** 2
    growth = np.log1p(lead * np.expm1(2 * (state[2] - state[3])) / (lead - 1))
    low, high = formula(b, p[2] ** 2 / (p @ p))
    return ClaimMeasurement(float(max(low - growth, growth - high) / b), 1e-4)


def _unlike(point: Point) -> tuple[np.ndarray, np.ndarray]:
    """f_nᵀf_n' of two classes with one common token, and F of each."""
    f = scan_snap.feature(_two(point).corpus, np.zeros((1, 3)))
    return f @ f.T, np.array([f[0, 1] ** 2, f[1, 2] ** 2])


def _any_classes_margin(formula: Formula, point: Point) -> ClaimMeasurement:
    gram, share = _unlike(point)
    t = float(formula(point["margin"], classes=2, distinct_share=float(share[0]), eta_y=1.0))
    scores, _, _ = reference.frozen(gram, np.array([0.5, 0.5]), np.array([t]), 1.0)
    reached = float(scores[0, 0, 0] - scores[0, 0, 1])
    return ClaimMeasurement(abs(reached / point["margin"] - 1), 1e-3)


def _any_classes_turn(formula: Formula, point: Point) -> ClaimMeasurement:
    gram, share = _unlike(point)
    t = formula(classes=2, distinct_share=float(share[0]), eta_y=1.0)
    _, b, rate = reference.frozen(gram, np.array([0.5, 0.5]), np.array([t]), 1.0)
    return ClaimMeasurement(abs(t * float(rate[0, 0] / b[0, 0]) - 1), 1e-3)


def _half_at_snapping_time(formula: Formula, point: Point) -> ClaimMeasurement:
    """The factor between t₀ and the time at which the right class passes ½."""
    k = point["classes"]
    decided = (k - 2 + (k - 1) * np.log(k - 1)) / point["share"]
    ratio = decided / formula(k, k + point["more"], 1.0)
    return ClaimMeasurement(abs(float(np.log(ratio))), float(np.log(10)))


def _larger_rates_sparser(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much the entropy at both rates times a factor is above that at the rates."""
    corpus = corpora.balanced(point)
    times = np.array([point["time"], float(formula(point["time"], point["factor"]))])
    state = corpora.flow(corpus).path(times, point["ratio"], 1.0, rtol=1e-8)
    common, distinct = corpus.common, corpus.distinct
    weight = (
        corpus.common_mass * np.exp(state[:, 0]),
        (1 - corpus.common_mass) * np.exp(state[:, 1]),
    )
    share = weight[0] / (weight[0] + weight[1])
    entropy = -share * np.log(share / common) - (1 - share) * np.log((1 - share) / distinct)
    return ClaimMeasurement(float(entropy[1] - entropy[0]), 1e-6)


def _any_time_effect(formula: Formula, point: Point) -> ClaimMeasurement:
    corpus = corpora.balanced(point)
    t, step = np.array([np.exp(point["start"])]), 0.05
    effect = float(formula(t, corpus, eta_y=1.0, eta_z=point["eta_z"])[0])
    more, less = (
        corpora.flow(corpus).path(t, eta_y, point["eta_z"], rtol=1e-9)[0, -1]
        for eta_y in (np.exp(step), np.exp(-step))
    )
    return ClaimMeasurement(abs(float(more - less) / (2 * step) / effect - 1), 0.05)


def _short_sequences(formula: Formula, point: Point) -> ClaimMeasurement:
    corpus = Balanced(3, 2, 2)
    rates: dict[str, Any] = {"eta_y": point["step"], "eta_z": point["step"]}
    rng, runs = point.generator, 4 * min(point.effort, 10)
    b = np.array(
        [
            scan_snap.train_on_samples(
                corpus.corpus, point["length"], 60, 16, rng=rng, every=60, **rates
            )
            .b[-1]
            .mean()
            for _ in range(runs)
        ]
    )
    error = abs(float(formula(corpus, [60.0], **rates)[0]) / b.mean() - 1)
    noise = float(b.std(ddof=1) / np.sqrt(runs) / b.mean())
    return ClaimMeasurement(error, 5 * noise + 0.03, noise)


DISTINCT_RISE_LATE = Search(_LATE, _distinct_rise_late)
B_RISES_LATE = Search(_LATE, _b_rises_late)
EQUALLY_COMMON_FALL = Search(
    {
        "equal": Real(0.01, 0.9),
        "weights": Matrix(Real(0.0, 1.0), Integer(2, 3), Integer(2, 4)),
        "joint": Simplex(Integer(2, 3), least=0.02),
    },
    _equally_common_fall,
)
_SPLIT: dict[str, Any] = {**_TWO, "split": Real(0.55, 0.9)}
FREQUENT_ALWAYS = Search(
    {**_SPLIT, "ratio": Real(0.5, 20.0, log=True), "time": Real(10.0, 1e8, log=True)},
    _frequent_always,
)
ANY_CLASSES_GAIN = Search(
    {**_SPLIT, "ratio": Real(0.05, 100.0, log=True), "time": Real(10.0, 1e8, log=True)},
    _any_classes_gain,
)
ANY_COMMON_G = Search(
    {
        "mass": Real(0.05, 0.95),
        "first_g": Real(-5.0, 5.0, special=(0.0,)),
        "second_g": Real(-5.0, 5.0, special=(0.0,)),
        "time": Real(1e-2, 1e1, log=True),
    },
    _any_common_g,
)
ANY_CLASSES_MARGIN = Search({**_TWO, "margin": Real(0.1, 8.0, log=True)}, _any_classes_margin)
ANY_CLASSES_TURN = Search(_TWO, _any_classes_turn)
HALF_AT_SNAPPING_TIME = Search(
    {
        "classes": Integer(3, 10_000, log=True),
        "more": Integer(1, 10_000, log=True),
        "share": Real(1e-3, 1.0, log=True),
    },
    _half_at_snapping_time,
)
LARGER_RATES_SPARSER = Search(
    {
        **corpora.BALANCED,
        "ratio": Real(0.1, 100.0, log=True),
        "time": Real(0.1, 1e4, log=True),
        "factor": Real(1.1, 10.0),
    },
    _larger_rates_sparser,
)
ANY_TIME_EFFECT = Search(
    {**corpora.BALANCED, "eta_z": Real(1e-3, 1e3, log=True), "start": Real(10.0, 100.0)},
    _any_time_effect,
)
SHORT_SEQUENCES = Search(
    {"length": Integer(5, 1000, log=True), "step": Real(0.05, 0.5)}, _short_sequences, sampled=True
)

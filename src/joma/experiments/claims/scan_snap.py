"""Scan&Snap: the talk's picture of common and distinct tokens and its Theorem 3; then Theorem 4."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import integrate

from joma.experiments.claims import _scan_snap_phases, _scan_snap_search
from joma.experiments.claims.claim import Claim, Formula, Measurement
from joma.experiments.claims.reference.scan_snap import Alike, random_corpus
from joma.experiments.claims.search import Point
from joma.theory import scan_snap
from joma.theory.scan_snap import Corpus

_IN_BETWEEN = Corpus(
    np.array([[0.25, 0.25, 0.30, 0.00, 0.20], [0.25, 0.02, 0.00, 0.53, 0.20]]),
    np.zeros(2, dtype=np.int64),
    np.array([0.5, 0.5]),
)
"""Its second token is in both classes, with P = .25 and .02."""

_PULLED_DOWN = Corpus(
    np.array([[0.25, 0.75, 0.00], [0.85, 0.00, 0.15]]),
    np.zeros(2, dtype=np.int64),
    np.array([0.5, 0.5]),
)
"""Its last token is distinct, next to one with P = .25 and .85: it rises and then falls."""

_UNEVEN = Corpus(
    np.array([[0.8, 0.2, 0.0], [0.8, 0.0, 0.2]]),
    np.zeros(2, dtype=np.int64),
    np.array([0.8, 0.2]),
)
"""One equally common token, but classes of unequal probability: the frequent one's can fall."""

_FALLING = ((_PULLED_DOWN, 5.0, 1e4), (_PULLED_DOWN, 100.0, 1e18), (_UNEVEN, 0.02, 1e4))
"""Corpora, an η_Y/η_Z and a time by which a distinct token and B have fallen below 0."""

_FREQUENT_FALLS = Corpus(
    np.array([[0.25, 0.75, 0.00, 0.00], [0.85, 0.00, 0.10, 0.05]]),
    np.zeros(2, dtype=np.int64),
    np.array([0.5, 0.5]),
)
"""Its last two tokens are distinct; at η_Y = 5 η_Z the more frequent one ends lower."""

_UNLIKE = Corpus(
    np.array([[0.12, 0.88 * 0.75, 0.88 * 0.25, 0.00, 0.00], [0.85, 0.00, 0.00, 0.10, 0.05]]),
    np.zeros(2, dtype=np.int64),
    np.array([0.5, 0.5]),
)
"""Classes that differ: at η_Y = .17 η_Z, B and ln χ of the second fall below 0."""


def _gradient(formula: Formula, rng: np.random.Generator) -> Measurement:
    corpus = Corpus(
        rng.dirichlet(np.ones(5), size=4), np.array([0, 1, 0, 1]), rng.dirichlet(np.full(4, 3.0))
    )
    z, y = rng.normal(size=(2, 5)), rng.normal(size=(5, 4))
    z_rate, y_rate = formula(corpus, z, y, eta_y=0.7, eta_z=1.3)
    step = 1e-5
    errors = []
    for rate, at, scale in ((z_rate, z, 1.3 / corpus.query_probability[:, None]), (y_rate, y, 0.7)):
        reference = np.empty_like(at)
        for index in np.ndindex(at.shape):
            ends = []
            for sign in (1, -1):
                moved = at.copy()
                moved[index] += sign * step
                state = (moved, y) if at is z else (z, moved)
                ends.append(float(scan_snap.objective(corpus, *state)))
            reference[index] = (ends[0] - ends[1]) / (2 * step)
        reference = reference * scale
        errors.append(np.max(np.abs(rate - reference)) / np.max(np.abs(reference)))
    return Measurement(float(max(errors)), 1e-7)


def _common_falls(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Error: the share of wrong signs, with one common token and with equally common ones."""
    wrong = total = 0
    one = np.zeros((3, 7))
    one[:, 0] = rng.uniform(0.05, 0.95, 3)
    for class_ in range(3):
        own = slice(1 + 2 * class_, 3 + 2 * class_)
        one[class_, own] = (1 - one[class_, 0]) * rng.dirichlet(np.ones(2))
    single = Corpus(one, np.zeros(3, dtype=np.int64), rng.dirichlet(np.full(3, 4.0)))
    corpora = [single, *(random_corpus(rng, k, 3, 2, equal=False) for k in (2, 4))]
    for corpus in corpora:
        fate = formula(corpus)[0, corpus.shared]
        flow = scan_snap.evolve(corpus, [0.0, 1e3], eta_y=10.0, eta_z=1.0)
        sampled = scan_snap.train_on_samples(
            corpus, 200, 100, 64, eta_y=2.0, eta_z=1.0, rng=rng, every=100
        )
        for run in (flow, sampled):
            wrong += int(np.sum((run.fate[0, corpus.shared] != fate) | (fate != -1)))
            total += fate.size
    return Measurement(wrong / total, 0.0)


def _in_between_rises(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Error: the share of common tokens that do not fall, of three of which two are unequal."""
    run = scan_snap.evolve(_IN_BETWEEN, [0.0, 1e3], eta_y=10.0, eta_z=1.0)
    return Measurement(float(np.mean(run.fate[0, _IN_BETWEEN.shared] != -1)), 0.0)


def _distinct_rise(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    drawn = (random_corpus(rng, classes, 2, 3, equal=False) for classes in (2, 3))
    for corpus in (_PULLED_DOWN, _UNEVEN, *drawn):
        pull = formula(corpus)[0, corpus.distinct]
        half = 0.05
        run = scan_snap.evolve(corpus, [0.0, half, 2 * half], eta_y=2.0, eta_z=1.0)
        z = run.z[:, 0][:, corpus.distinct]
        # z = η_Yη_Z t²/2 · pull + O(t³): two times cancel the next order.
        expected = 2 * z[1] / half**2 - z[2] / (2 * half) ** 2
        worst = max(worst, float(np.max(np.abs(pull - expected) / expected)))
        worst += float(np.mean(pull <= 0))
    return Measurement(worst, 0.01)


def _distinct_falls(formula: Formula, rng: np.random.Generator) -> Measurement:
    wrong = []
    for corpus, eta_y, end in _FALLING:
        run = scan_snap.evolve(corpus, [0.0, end], eta_y=eta_y, eta_z=1.0)
        sign = np.sign(formula(corpus)[0, corpus.distinct])
        wrong.append(float(np.mean(run.fate[0, corpus.distinct] != sign)))
    return Measurement(min(wrong), 0.0)


def _frequent_first(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Error: of the ratio of two logits at a small time, relative; on sequences of their order."""
    corpus = random_corpus(rng, 3, 2, 4)
    early = scan_snap.evolve(corpus, [0.05], eta_y=3.0, eta_z=1.0).z[0, 0]
    sampled = scan_snap.train_on_samples(
        corpus, 400, 150, 128, eta_y=2.0, eta_z=1.0, rng=rng, every=150
    )
    error = 0.0
    for class_ in range(corpus.classes):
        for often, seldom in pairwise(corpus.distinct_of(class_)):
            ratio = formula(corpus, class_, often, seldom)
            error = max(error, abs(early[often] / early[seldom] / ratio - 1))
            if ratio > 1.5:  # closer ones are decided by the draw of the sequences
                last = sampled.z[-1, 0]
                error += float(last[often] <= last[seldom])
    return Measurement(error, 1e-4)


def _frequent_late(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Error: 1 if the more frequent token is not the higher one late."""
    late = scan_snap.evolve(_FREQUENT_FALLS, [1e4], eta_y=5.0, eta_z=1.0).z[0, 0]
    return Measurement(float((formula(_FREQUENT_FALLS, 1, 2, 3) > 1) != (late[2] > late[3])), 0.0)


def _relative_gain(formula: Formula, rng: np.random.Generator) -> Measurement:
    p = rng.dirichlet(np.full(5, 3.0))
    distinct = np.arange(5) > 0
    share, eta_z = 0.4, 1.3

    def rate(t: float, state: Any) -> Any:
        """The logits with g = γf on distinct tokens and 0 on the common one; r by the formula."""
        z, gains = state[:5], state[5:]
        f = p * np.exp(z - z.max())
        f = f / np.linalg.norm(f)
        gamma = 0.3 + t * np.exp(-0.2 * t)
        g = gamma * f * distinct
        z_rate = eta_z * share * f * (g - f * (f @ g))
        gain_rate = formula(
            gains,
            f[1] ** 2,
            gamma=gamma,
            overlap=f @ g / gamma,
            class_given_query=share,
            eta_z=eta_z,
        )
        return np.concatenate([z_rate, gain_rate])

    start = np.concatenate([np.zeros(5), (p[1] / p[2:]) ** 2 - 1])
    path: Any = integrate.solve_ivp(rate, (0, 20), start, "DOP853", rtol=1e-11, atol=1e-12)
    c = p * np.exp(path.y[:5, -1])
    gain = (c[1] / c[2:]) ** 2 - 1
    return Measurement(float(np.max(np.abs(path.y[5:, -1] / gain - 1))), 1e-8)


def _relative_gain_full(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The formula's d ln r/dB, integrated over the B of the full flow."""
    corpus = random_corpus(rng, 3, 3, 3, mass=0.2)
    t = np.concatenate([[0.0], np.geomspace(0.01, 1e5, 300)])
    run = scan_snap.evolve(corpus, t, eta_y=100.0, eta_z=1.0)
    often, *_, seldom = corpus.distinct_of(0)
    square = scan_snap.feature(corpus, run.z)[:, 0, often] ** 2
    rate = formula(1.0, square, gamma=1.0, overlap=0.0, class_given_query=1.0, eta_z=1.0)
    growth = np.exp(integrate.trapezoid(rate, run.b[:, 0]))
    gain = run.relative_gain(0, often, seldom)
    return Measurement(float(abs(gain[0] * growth / gain[-1] - 1)), 1e-8)


def _gain_bounds(formula: Formula, rng: np.random.Generator) -> Measurement:
    """By how much ln χ leaves the bounds with g = γf imposed, misses the tangent or the slope."""
    measured = []
    for b in (0.1, 1.0, 10.0, 100.0):
        values = {
            "classes": 2,
            "common": rng.dirichlet(np.full(3, 3.0)),
            "distinct": np.array([0.5, 0.3, 0.2]),
            "mass": float(rng.uniform(0.2, 0.8)),
            "b": b,
        }
        measured.append(_scan_snap_search.gain_bounds(formula, Point(values)))
    return max(measured, key=lambda one: one.error)


def _gain_outside(formula: Formula, corpus: Corpus, eta_y: float, t: Any) -> float:
    """By how much ln χ leaves the bounds on the flow; infinite where B is below 0."""
    f = scan_snap.feature(corpus, np.zeros((1, corpus.tokens)))
    run = scan_snap.evolve(corpus, t, eta_y=eta_y, eta_z=1.0)
    if np.any(run.b < 0):
        return np.inf
    worst = 0.0
    for class_ in range(corpus.classes):
        dominant, *others = corpus.distinct_of(class_)
        low, high = formula(run.b[:, class_], f[class_, dominant] ** 2)
        # Both bounds are ln χ = 0 at B = 0.
        worst = max(worst, abs(float(low[0])), abs(float(high[0])))
        for other in others:
            gain = run.relative_gain(class_, dominant, other)
            growth = np.log(gain / gain[0])
            worst = max(worst, float(np.max(low - growth)), float(np.max(growth - high)))
    return worst


def _gain_full(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    t = np.concatenate([[0.0], np.geomspace(0.03, 1e5, 60)])
    for classes, mass in ((3, 0.2), (4, 0.5)):
        common, distinct = rng.dirichlet(np.full(2, 3.0)), np.array([0.5, 0.3, 0.2])
        corpus = Alike(classes, mass * common, (1 - mass) * distinct).corpus
        for eta_y in (0.2, 100.0):
            worst = max(worst, _gain_outside(formula, corpus, eta_y, t))
    return Measurement(worst, 1e-6)


def _gain_of_unlike(formula: Formula, rng: np.random.Generator) -> Measurement:
    return Measurement(_gain_outside(formula, _UNLIKE, 0.17, [0.0, 1e2, 1e4]), 1e-6)


def _gain_early(formula: Formula, rng: np.random.Generator) -> Measurement:
    measured = []
    for mass in (0.2, 0.5, 0.8):
        values = {
            "classes": 3,
            "common": rng.dirichlet(np.full(2, 3.0)),
            "distinct": np.array([0.5, 0.3, 0.2]),
            "mass": mass,
            "time": 20.0,
        }
        measured.append(_scan_snap_search.gain_early(formula, Point(values)))
    return max(measured, key=lambda one: one.error)


def _gain_at_equal_rates(formula: Formula, rng: np.random.Generator) -> Measurement:
    flow = Alike(3, np.array([0.2]), np.array([0.5, 0.3]))
    state = flow.path(np.array([20.0]), 1.0, 1.0)[0]
    b = float(state[-1])
    growth = float(_scan_snap_search.log_gain(flow, state[:3], 0, 1))
    return Measurement(abs(growth - float(formula(flow.corpus, 0, 1, 2, b))) / (b * b), 0.02)


def _b_rises_on(
    formula: Formula, corpora: Iterable[Corpus], eta_y: float, end: float
) -> Measurement:
    """Error: of Ḃ, relative, plus the share of times and classes where it falls."""
    eta_z, step = 1.3, 1e-5
    error, falls = 0.0, []
    for corpus in corpora:
        t = np.concatenate([[0.0], np.geomspace(0.1, end, 20)])
        run = scan_snap.evolve(corpus, t, eta_y=eta_y * eta_z, eta_z=eta_z)
        rate = formula(corpus, run.z, run.y, eta_z=eta_z)
        start = float(np.max(np.abs(rate[0])) + np.max(np.abs(run.b[0])))
        f = scan_snap.feature(corpus, run.z)
        reference = np.empty_like(rate)
        for class_ in range(corpus.classes):
            own = corpus.distinct_of(class_)
            # Ḃ·Σf² is the sum of ż over the class's distinct tokens, one direction of the gradient.
            along = np.zeros((corpus.queries, corpus.tokens))
            query = corpus.query[class_]
            along[query, own] = step
            rise = scan_snap.objective(corpus, run.z + along, run.y)
            rise = rise - scan_snap.objective(corpus, run.z - along, run.y)
            share = np.sum(f[:, class_, own] ** 2, axis=-1) * corpus.query_probability[query]
            reference[:, class_] = eta_z * rise / (2 * step) / share
        distance = np.max(np.abs(rate - reference), axis=0) / np.max(np.abs(reference), axis=0)
        error = max(error, start, float(np.max(distance)))
        falls.append(np.diff(run.b, axis=0) <= 0)
    return Measurement(error + float(np.mean(np.concatenate(falls, axis=None))), 1e-6)


def _b_rises(formula: Formula, rng: np.random.Generator) -> Measurement:
    distinct = np.array([0.3, 0.2])
    corpora = [Alike(k, 0.5 * rng.dirichlet(np.full(2, 3.0)), distinct).corpus for k in (2, 4)]
    measured = [_b_rises_on(formula, corpora, eta_y, 1e4) for eta_y in (0.1, 100.0)]
    return max(measured, key=lambda one: one.error)


def _b_falls(formula: Formula, rng: np.random.Generator) -> Measurement:
    cases = [_b_rises_on(formula, [corpus], eta_y, end) for corpus, eta_y, end in _FALLING]
    return min(cases, key=lambda measured: measured.error)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="scan-snap-gradient",
        title="The flow of (z, Y) is gradient ascent on the next token's log-likelihood",
        source="talk, Scan&Snap: reparameterization",
        method="finite differences of E[log softmax], two queries; 1/P(m) is absorbed in η_Z",
        derived=scan_snap.flow,
        measure=_gradient,
        search=_scan_snap_search.GRADIENT,
    ),
    Claim(
        id="scan-snap-common-falls",
        title="Common tokens fall, if there is only one or all are equally common in all classes",
        source="talk, Scan&Snap (a); the condition is ours",
        method="fates on the population ODE and on sampled sequences",
        derived=scan_snap.initial_fate,
        measure=_common_falls,
        condition="one common token, or all equally common in all classes",
        without=_in_between_rises,
        search=_scan_snap_search.COMMON_FALLS,
    ),
    Claim(
        id="scan-snap-distinct-rise",
        title="Distinct tokens rise at first, by ½z̈(0)t², if their class shares a token",
        source="talk, Scan&Snap (b); z̈(0) is ours",
        method="z(t)/t² on the population ODE, extrapolated to t = 0",
        derived=scan_snap.initial_pull,
        measure=_distinct_rise,
        condition="at first; how long they rise grows with η_Y/η_Z",
        without=_distinct_falls,
        search=_scan_snap_search.DISTINCT_RISE,
    ),
    Claim(
        id="scan-snap-frequent-first",
        title="Of the distinct tokens the more frequent rise faster, early as P(l|m,n)²: a TF-IDF",
        source="talk, Scan&Snap (c); the square is ours",
        method="ratios early on the population ODE, order on sampled sequences",
        derived=scan_snap.rise_ratio,
        measure=_frequent_first,
        condition="early; when tokens fall later, the more frequent fall faster",
        without=_frequent_late,
        search=_scan_snap_search.FREQUENT_FIRST,
    ),
    Claim(
        id="scan-snap-relative-gain",
        title="r(t) = r(0)χ(t), since dr/dt = 2η_Z P(n|m) γ(1−S) f_l² r",
        source="talk, Scan&Snap Theorem 3: r(0)χ(t); dr/dt is ours",
        method="the ODE of z with g = γf imposed",
        derived=scan_snap.relative_gain_rate,
        measure=_relative_gain,
        condition="g = γf on the distinct tokens",
        without=_relative_gain_full,
        search=_scan_snap_search.RELATIVE_GAIN,
    ),
    Claim(
        id="scan-snap-gain-bounds",
        title="e^{2f²(0)B} ≤ χ ≤ e^{2B} for the dominant token: tangent at 0, slope at ∞",
        source="talk, Scan&Snap Theorem 3",
        method="the ODE of z with g imposed and B as the clock, B to 2000; without: η_Y = 100 η_Z",
        derived=scan_snap.log_gain_bounds,
        measure=_gain_bounds,
        condition="g = γf on the distinct tokens, g = 0 on the common ones",
        without=_gain_full,
        search=_scan_snap_search.GAIN_BOUNDS,
    ),
    Claim(
        id="scan-snap-gain-full",
        title="On the full flow 1 ≤ χ ≤ e^{2B} for the dominant token, at any rates",
        source="new",
        method="population ODE to t = 1e5, error in ln χ; bounds meet at B = 0",
        derived=scan_snap.full_log_gain_bounds,
        measure=_gain_full,
        condition="classes that are alike",
        without=_gain_of_unlike,
        search=_scan_snap_search.GAIN_FULL,
    ),
    Claim(
        id="scan-snap-gain-early",
        title="On the full flow ln χ = 2f²(0)B(1 + cB), c in closed form, cB ∝ η_Z/η_Y",
        source="new",
        method="the flow of classes alike at B of about 1e-4: (ln χ/(2f²B) − 1)/B",
        derived=scan_snap.early_log_gain,
        measure=_gain_early,
        condition="classes that are alike, η_Z ≪ η_Y",
        without=_gain_at_equal_rates,
        search=_scan_snap_search.GAIN_EARLY,
    ),
    Claim(
        id="scan-snap-b-rises",
        title="B(0) = 0 and B rises: Ḃ_n Σf² is the sum of ż, over the distinct tokens of n",
        source="talk, Scan&Snap Theorem 3; the sum is ours",
        method="finite differences of E[log softmax] along the population ODE, η_Y/η_Z .1 and 100",
        derived=scan_snap.b_rate,
        measure=_b_rises,
        condition="it rises for ever where classes are alike; else until a time that grows with"
        " η_Y/η_Z",
        without=_b_falls,
        search=_scan_snap_search.B_RISES,
    ),
    *_scan_snap_phases.CLAIMS,
)

"""Scan&Snap: the talk's picture of common and distinct tokens and its Theorem 3; then Theorem 4."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import integrate, special

from joma.experiments.claims import _scan_snap_phases
from joma.experiments.claims._claim import Claim, Formula, Measurement
from joma.experiments.claims._scan_snap_phases import random_corpus
from joma.theory import scan_snap
from joma.theory.scan_snap import Corpus

_IN_BETWEEN = Corpus(
    np.array([[0.25, 0.25, 0.30, 0.00, 0.20], [0.25, 0.02, 0.00, 0.53, 0.20]]),
    np.zeros(2, dtype=np.int64),
    np.array([0.5, 0.5]),
)
"""Its second token is in both classes, with P = .25 and .02."""

_TURNS_BACK = Corpus(
    np.array([[0.07, 0.24, 0.69, 0.00], [0.54, 0.39, 0.00, 0.07]]),
    np.zeros(2, dtype=np.int64),
    np.array([0.5, 0.5]),
)
"""Its first token, with P = .07 and .54, rises at first and ends below zero."""

_PULLED_DOWN = Corpus(
    np.array([[0.25, 0.75, 0.00], [0.85, 0.00, 0.15]]),
    np.zeros(2, dtype=np.int64),
    np.array([0.5, 0.5]),
)
"""Its last token is distinct, beside one with P = .25 and .85; it ends low at η_Y = 5 η_Z."""

_UNEVEN = Corpus(
    np.array([[0.8, 0.2, 0.0], [0.8, 0.0, 0.2]]),
    np.zeros(2, dtype=np.int64),
    np.array([0.8, 0.2]),
)
"""One equally common token, but classes of unequal probability: the frequent one's can fall."""

_SLOW_DECODERS = ((_PULLED_DOWN, 5.0), (_UNEVEN, 0.02))
"""Corpora and an η_Y/η_Z at which a distinct token and B fall."""


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
    wrong = total = 0
    corpora = [_IN_BETWEEN, *(random_corpus(rng, k, 3, 2, equal=False) for k in (2, 4))]
    for corpus in corpora:
        fate = formula(corpus)[0, corpus.shared]
        flow = scan_snap.evolve(corpus, [0.0, 1e3], eta_y=10.0, eta_z=1.0)
        sampled = scan_snap.train_on_samples(
            corpus, 200, 100, 64, eta_y=2.0, eta_z=1.0, rng=rng, every=100
        )
        for run in (flow, sampled):
            wrong += int(np.sum(run.fate[0, corpus.shared] != fate))
            total += fate.size
    return Measurement(wrong / total, 0.0)


def _common_falls_late(formula: Formula, rng: np.random.Generator) -> Measurement:
    run = scan_snap.evolve(_TURNS_BACK, [0.0, 1e4], eta_y=5.0, eta_z=1.0)
    shared = _TURNS_BACK.shared
    wrong = run.fate[0, shared] != formula(_TURNS_BACK)[0, shared]
    return Measurement(float(np.mean(wrong)), 0.0)


def _distinct_rise(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    drawn = (random_corpus(rng, classes, 2, 3, equal=False) for classes in (2, 3))
    for corpus in (_PULLED_DOWN, _UNEVEN, *drawn):
        pull = formula(corpus)[0, corpus.distinct]
        half = 0.05
        run = scan_snap.evolve(corpus, [0.0, half, 2 * half], eta_y=2.0, eta_z=1.0)
        z = run.z[:, 0][:, corpus.distinct]
        # z = η_Yη_Z t²/2 · pull + O(t³): two times cancel the next order.
        reference = 2 * z[1] / half**2 - z[2] / (2 * half) ** 2
        worst = max(worst, float(np.max(np.abs(pull - reference) / reference)))
        late = scan_snap.evolve(corpus, [0.0, 1e4], eta_y=100.0, eta_z=1.0)
        worst += float(np.mean(late.fate[0, corpus.distinct] != np.sign(pull)))
    return Measurement(worst, 0.01)


def _distinct_falls(formula: Formula, rng: np.random.Generator) -> Measurement:
    wrong = []
    for corpus, eta_y in _SLOW_DECODERS:
        run = scan_snap.evolve(corpus, [0.0, 1e4], eta_y=eta_y, eta_z=1.0)
        sign = np.sign(formula(corpus)[0, corpus.distinct])
        wrong.append(float(np.mean(run.fate[0, corpus.distinct] != sign)))
    return Measurement(min(wrong), 0.0)


def _frequent_first(formula: Formula, rng: np.random.Generator) -> Measurement:
    corpus = random_corpus(rng, 3, 2, 4)
    flow = scan_snap.evolve(corpus, [0.0, 0.05, 1e4], eta_y=3.0, eta_z=1.0)
    sampled = scan_snap.train_on_samples(
        corpus, 400, 150, 128, eta_y=2.0, eta_z=1.0, rng=rng, every=150
    )
    error = 0.0
    for class_ in range(corpus.classes):
        for often, seldom in pairwise(corpus.distinct_of(class_)):
            ratio = formula(corpus, class_, often, seldom)
            early, late = flow.z[1, 0], flow.z[-1, 0]
            error = max(error, abs(early[often] / early[seldom] / ratio - 1))
            error += float((late[often] > late[seldom]) != (ratio > 1))
            if ratio > 1.5:  # closer ones are decided by the draw of the sequences
                last = sampled.z[-1, 0]
                error += float(last[often] <= last[seldom])
    return Measurement(error, 1e-4)


def _frequent_late(formula: Formula, rng: np.random.Generator) -> Measurement:
    corpus = random_corpus(rng, 3, 2, 4)
    late = scan_snap.evolve(corpus, [1e4], eta_y=3.0, eta_z=1.0).z[0, 0]
    often, *_, seldom = corpus.distinct_of(0)
    ratio = formula(corpus, 0, often, seldom)
    return Measurement(float(abs(late[often] / late[seldom] / ratio - 1)), 1e-4)


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
    """Error: by how much ln χ leaves the bounds, relative to 2B."""
    p = rng.dirichlet(np.full(6, 3.0))
    common, distinct = p[:3], np.sort(p[3:])[::-1]
    b = np.concatenate([[0.0], np.geomspace(1e-3, 1000.0, 60)])

    def rate(_: float, z: Any) -> Any:
        """The logits with g = γf on distinct tokens and 0 on common ones; B is the clock.

        Dividing by Ḃ = η_Z P(n|m) γ(1−S) leaves ż = f² on distinct and −f²S/(1−S) on common
        tokens, whatever γ(t) > 0 is.
        """
        logs = np.log(np.concatenate([common, distinct])) + z
        below, above = special.logsumexp(2 * logs[:3]), special.logsumexp(2 * logs[3:])
        whole = np.logaddexp(below, above)
        falls = -np.exp(2 * logs[:3] - below + above - whole)
        return np.concatenate([falls, np.exp(2 * logs[3:] - whole)])

    path: Any = integrate.solve_ivp(
        rate, (0, b[-1]), np.zeros(6), "LSODA", t_eval=b, rtol=1e-10, atol=1e-12
    )
    z = path.y[3:]
    low, high = formula(b[1:], distinct[0] ** 2 / (p @ p))
    worst = 0.0
    for other in (1, 2):
        start = 2 * np.log(distinct[0] / distinct[other])
        lead = start + 2 * (z[0] - z[other])[1:]
        # ln(e^lead − 1) − ln(e^start − 1), without overflow
        growth = lead + np.log(-np.expm1(-lead)) - np.log(np.expm1(start))
        worst = max(worst, float(np.max((low - growth) / (2 * b[1:]))))
        worst = max(worst, float(np.max((growth - high) / (2 * b[1:]))))
    return Measurement(worst, 1e-6)


def _gain_full(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Error: by how much ln χ leaves the bounds on the full flow, η_Y = 100 η_Z."""
    worst = 0.0
    for classes, mass in ((3, 0.2), (4, 0.5)):
        corpus = random_corpus(rng, classes, 3, 3, mass=mass)
        f = scan_snap.feature(corpus, np.zeros((1, corpus.tokens)))
        t = np.concatenate([[0.0], np.geomspace(0.03, 1e5, 60)])
        run = scan_snap.evolve(corpus, t, eta_y=100.0, eta_z=1.0)
        for class_ in range(corpus.classes):
            dominant, *others = corpus.distinct_of(class_)
            low, high = formula(run.b[:, class_], f[class_, dominant] ** 2)
            for other in others:
                gain = run.relative_gain(class_, dominant, other)
                growth = np.log(gain / gain[0])
                worst = max(worst, float(np.max(low - growth)), float(np.max(growth - high)))
    return Measurement(worst, 1e-6)


def _b_rises_on(formula: Formula, corpora: Iterable[Corpus], eta_y: float) -> Measurement:
    """Error: of Ḃ, relative, plus the share of times and classes where it falls."""
    eta_z, step = 1.3, 1e-5
    error, falls = 0.0, []
    for corpus in corpora:
        t = np.concatenate([[0.0], np.geomspace(0.1, 1e4, 20)])
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
    corpora = [_PULLED_DOWN, _UNEVEN, *(random_corpus(rng, k, 3, 2, equal=False) for k in (2, 4))]
    return _b_rises_on(formula, corpora, 100.0)


def _b_falls(formula: Formula, rng: np.random.Generator) -> Measurement:
    cases = [_b_rises_on(formula, [corpus], eta_y) for corpus, eta_y in _SLOW_DECODERS]
    return min(cases, key=lambda measured: measured.error)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="scan-snap-gradient",
        title="The flow of (z, Y) is gradient ascent on the next token's log-likelihood",
        source="talk, Scan&Snap: reparameterization",
        method="finite differences of E[log softmax], two queries; 1/P(m) is absorbed in η_Z",
        derived=scan_snap.flow,
        measure=_gradient,
    ),
    Claim(
        id="scan-snap-common-falls",
        title="Tokens equally common in all classes fall; in-between ones go either way",
        source="talk, Scan&Snap (a)",
        method="fates on the population ODE and on sampled sequences",
        derived=scan_snap.initial_fate,
        measure=_common_falls,
        condition="equally common in all classes; in between z̈(0) decides the start only",
        without=_common_falls_late,
    ),
    Claim(
        id="scan-snap-distinct-rise",
        title="Distinct tokens rise, at first by ½z̈(0)t²",
        source="talk, Scan&Snap (b); z̈(0) is ours",
        method="z(t)/t² on the ODE, extrapolated to t = 0; the sign at t = 1e4 and η_Y = 100 η_Z",
        derived=scan_snap.initial_pull,
        measure=_distinct_rise,
        condition="η_Y ≫ η_Z, late",
        without=_distinct_falls,
    ),
    Claim(
        id="scan-snap-frequent-first",
        title="Of the distinct tokens the more frequent rise faster, early as P(l|m,n)²: a TF-IDF",
        source="talk, Scan&Snap (c); the square is ours",
        method="ratios early and order late on the ODE, order on sampled sequences",
        derived=scan_snap.rise_ratio,
        measure=_frequent_first,
        condition="the ratio of squares holds early, the order always",
        without=_frequent_late,
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
    ),
    Claim(
        id="scan-snap-gain-bounds",
        title="e^{2f²(0)B} ≤ χ ≤ e^{2B} for the dominant token: tangent at 0, slope at ∞",
        source="talk, Scan&Snap Theorem 3",
        method="the ODE of z with g = γf imposed and any γ(t), B to 1000; without: η_Y = 100 η_Z",
        derived=scan_snap.log_gain_bounds,
        measure=_gain_bounds,
        condition="g = γf on the distinct tokens",
        without=_gain_full,
    ),
    Claim(
        id="scan-snap-gain-full",
        title="On the full flow only 1 ≤ χ ≤ e^{2B} is left, at η_Y = 100 η_Z too",
        source="new",
        method="population ODE to t = 1e5, error in ln χ",
        derived=scan_snap.full_log_gain_bounds,
        measure=_gain_full,
    ),
    Claim(
        id="scan-snap-b-rises",
        title="B(0) = 0 and B rises: Ḃ_n Σf² is the sum of ż, over the distinct tokens of n",
        source="talk, Scan&Snap Theorem 3; the sum is ours",
        method="finite differences of E[log softmax] along the population ODE, η_Y = 100 η_Z",
        derived=scan_snap.b_rate,
        measure=_b_rises,
        condition="η_Y ≫ η_Z",
        without=_b_falls,
    ),
    *_scan_snap_phases.CLAIMS,
)

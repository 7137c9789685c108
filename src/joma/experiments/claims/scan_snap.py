"""Scan&Snap: common and distinct tokens, and Theorem 3 (who gains)."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import integrate

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import (
    ClaimMeasurement,
    Formula,
    Generator,
    Point,
    claim,
    largest_error,
    measured,
    relative,
    smallest_error,
    without,
)
from joma.experiments.claims.reference import scan_snap as reference
from joma.experiments.claims.reference.scan_snap import Alike
from joma.theory import scan_snap
from joma.theory.scan_snap import ScanSnapCorpus

_IN_BETWEEN = reference.one_query(
    [[0.25, 0.25, 0.30, 0.00, 0.20], [0.25, 0.02, 0.00, 0.53, 0.20]], [0.5, 0.5]
)
"""Its second token is in both classes, with P = .25 and .02."""
_FREQUENT_FALLS = reference.one_query(
    [[0.25, 0.75, 0.00, 0.00], [0.85, 0.00, 0.10, 0.05]], [0.5, 0.5]
)
"""Its last two tokens are distinct; at η_Y = 5 η_Z the more frequent one ends lower."""


@claim("scan-snap-gradient", scan_snap.flow)
def _gradient(formula: Formula, rng: Generator) -> ClaimMeasurement:
    corpus = ScanSnapCorpus(
        rng.dirichlet(np.ones(5), size=4), np.array([0, 1, 0, 1]), rng.dirichlet(np.full(4, 3.0))
    )
    z, y = rng.normal(size=(2, 5)), rng.normal(size=(5, 4))
    z_rate, y_rate = formula(corpus, z, y, eta_y=0.7, eta_z=1.3)
    errors = []
    for rate, at, scale in ((z_rate, z, 1.3 / corpus.query_probability[:, None]), (y_rate, y, 0.7)):
        by_differences = np.empty_like(at)
        for index in np.ndindex(at.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = at.copy()
                moved[index] += step
                state = (moved, y) if at is z else (z, moved)
                ends.append(float(scan_snap.objective(corpus, *state)))
            by_differences[index] = (ends[0] - ends[1]) / 2e-5
        errors.append(relative(rate, by_differences * scale))
    return measured(errors, 1e-7)


@without("scan-snap-common-falls")
def _in_between_rises(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The share of common tokens that do not fall, of three of which two are unequal."""
    run = scan_snap.evolve(_IN_BETWEEN, [0.0, 1e3], eta_y=10.0, eta_z=1.0)
    return measured(np.mean(run.fate[0, _IN_BETWEEN.shared] != -1), 0.0)


@claim("scan-snap-common-falls", scan_snap.initial_fate)
def _common_falls(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The share of wrong signs, with one common token and with equally common ones."""
    wrong = total = 0
    one = np.zeros((3, 7))
    one[:, 0] = rng.uniform(0.05, 0.95, 3)
    for class_ in range(3):
        own = slice(1 + 2 * class_, 3 + 2 * class_)
        one[class_, own] = (1 - one[class_, 0]) * rng.dirichlet(np.ones(2))
    single = reference.one_query(one, rng.dirichlet(np.full(3, 4.0)))
    for corpus in [single, *(reference.random_corpus(rng, k, 3, 2, equal=False) for k in (2, 4))]:
        fate = formula(corpus)[0, corpus.shared]
        flow = scan_snap.evolve(corpus, [0.0, 1e3], eta_y=10.0, eta_z=1.0)
        sampled = scan_snap.train_on_samples(
            corpus, 200, 100, 64, eta_y=2.0, eta_z=1.0, rng=rng, every=100
        )
        for run in (flow, sampled):
            wrong += int(np.sum((run.fate[0, corpus.shared] != fate) | (fate != -1)))
            total += fate.size
    return ClaimMeasurement(wrong / total, 0.0)


@without("scan-snap-distinct-rise")
def _distinct_falls(formula: Formula, rng: Generator) -> ClaimMeasurement:
    wrong = []
    for corpus, eta_y, end in reference.FALLING:
        run = scan_snap.evolve(corpus, [0.0, end], eta_y=eta_y, eta_z=1.0)
        sign = np.sign(formula(corpus)[0, corpus.distinct])
        wrong.append(float(np.mean(run.fate[0, corpus.distinct] != sign)))
    return ClaimMeasurement(min(wrong), 0.0)


@claim("scan-snap-distinct-rise", scan_snap.initial_pull)
def _distinct_rise(formula: Formula, rng: Generator) -> ClaimMeasurement:
    worst, half = 0.0, 0.05
    drawn = (reference.random_corpus(rng, classes, 2, 3, equal=False) for classes in (2, 3))
    for corpus in (reference.PULLED_DOWN, reference.UNEVEN, *drawn):
        pull = formula(corpus)[0, corpus.distinct]
        run = scan_snap.evolve(corpus, [0.0, half, 2 * half], eta_y=2.0, eta_z=1.0)
        z = run.z[:, 0][:, corpus.distinct]
        # z = η_Yη_Z t²/2 · pull + O(t³): two times cancel the next order.
        expected = 2 * z[1] / half**2 - z[2] / (2 * half) ** 2
        worst = max(worst, float(np.max(np.abs(pull - expected) / expected)))
        worst += float(np.mean(pull <= 0))
    return ClaimMeasurement(worst, 0.01)


@without("scan-snap-frequent-first")
def _frequent_late(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """1 if the more frequent token is not the higher one late."""
    late = scan_snap.evolve(_FREQUENT_FALLS, [1e4], eta_y=5.0, eta_z=1.0).z[0, 0]
    return ClaimMeasurement(
        float((formula(_FREQUENT_FALLS, 1, 2, 3) > 1) != (late[2] > late[3])), 0.0
    )


@claim("scan-snap-frequent-first", scan_snap.rise_ratio)
def _frequent_first(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The relative error of the ratio of two logits at a small time; on sequences their order."""
    corpus = reference.random_corpus(rng, 3, 2, 4)
    early = scan_snap.evolve(corpus, [0.05], eta_y=3.0, eta_z=1.0).z[0, 0]
    sampled = scan_snap.train_on_samples(
        corpus, 400, 150, 128, eta_y=2.0, eta_z=1.0, rng=rng, every=150
    )
    last, error = sampled.z[-1, 0], 0.0
    for class_ in range(corpus.classes):
        for often, seldom in pairwise(corpus.distinct_of(class_)):
            ratio = formula(corpus, class_, often, seldom)
            error = max(error, abs(early[often] / early[seldom] / ratio - 1))
            if ratio > 1.5:  # closer ones are decided by the draw of the sequences
                error += float(last[often] <= last[seldom])
    return ClaimMeasurement(error, 1e-4)


_UNLIKE = reference.one_query(
    [[0.12, 0.88 * 0.75, 0.88 * 0.25, 0.00, 0.00], [0.85, 0.00, 0.00, 0.10, 0.05]], [0.5, 0.5]
)
"""Classes that differ: at η_Y = .17 η_Z, B and ln χ of the second fall below 0."""
_DISTINCT = np.array([0.5, 0.3, 0.2])


@without("scan-snap-relative-gain")
def _relative_gain_full(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The formula's d ln r/dB, integrated over the B of the full flow."""
    corpus = reference.random_corpus(rng, 3, 3, 3, mass=0.2)
    t = np.concatenate([[0.0], np.geomspace(0.01, 1e5, 300)])
    run = scan_snap.evolve(corpus, t, eta_y=100.0, eta_z=1.0)
    often, *_, seldom = corpus.distinct_of(0)
    square = scan_snap.feature(corpus, run.z)[:, 0, often] ** 2
    rate = formula(1.0, square, gamma=1.0, overlap=0.0, class_given_query=1.0, eta_z=1.0)
    growth = np.exp(integrate.trapezoid(rate, run.b[:, 0]))
    gain = run.relative_gain(0, often, seldom)
    return measured(abs(gain[0] * growth / gain[-1] - 1), 1e-8)


@claim("scan-snap-relative-gain", scan_snap.relative_gain_rate)
def _relative_gain(formula: Formula, rng: Generator) -> ClaimMeasurement:
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
        factors = {"gamma": gamma, "overlap": f @ g / gamma}
        gain_rate = formula(gains, f[1] ** 2, **factors, class_given_query=share, eta_z=eta_z)
        return np.concatenate([z_rate, gain_rate])

    start = np.concatenate([np.zeros(5), (p[1] / p[2:]) ** 2 - 1])
    path: Any = integrate.solve_ivp(rate, (0, 20), start, "DOP853", rtol=1e-11, atol=1e-12)
    c = p * np.exp(path.y[:5, -1])
    gain = (c[1] / c[2:]) ** 2 - 1
    return measured(np.abs(path.y[5:, -1] / gain - 1), 1e-8)


def gain_bounds_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much ln χ leaves its bounds, relative to 2B, with g = γf imposed.

    Next to B = 0 ln χ must be at the lower bound, and far away have the slope of the upper one.
    """
    mass, classes = point["mass"], point["classes"]
    common, distinct = mass * point["common"], np.sort((1 - mass) * point["distinct"])[::-1]
    if distinct.size < 2 or distinct[0] < 1.02 * distinct[1]:
        raise JomaError("there must be a dominant token")
    c = common.size
    logs = np.log(np.concatenate([common, distinct]))

    def rate(_: float, z: Array) -> Array:
        """B is the clock; g = 0 on common tokens, which K classes like this one move."""
        squares = np.exp(2 * (logs + z - np.max(logs + z)))
        below, above = squares[:c].sum(), squares[c:].sum()
        fall = -classes * squares[:c] / max(below, 1e-300) * above / (below + above)
        return np.concatenate([fall, squares[c:] / (below + above)])

    square = float(distinct[0] ** 2 / np.sum(np.exp(2 * logs)))
    far = 1e3 / square
    b = np.array([1e-5, 1e-5 + point["b"], far, 2 * far])
    z = reference.integrate(rate, np.zeros(logs.size), b, 1.0, rtol=1e-8)[:, c:]
    start = 2 * np.log(distinct[0] / distinct[1])
    move = 2 * (z[:, 0] - z[:, 1])
    growth = np.log1p(np.expm1(np.minimum(move, 30.0)) / -np.expm1(-start))
    growth = np.where(move > 30.0, move - np.log(-np.expm1(-start)), growth)
    low, high = formula(b, square)
    outside = float(np.max(np.maximum(low - growth, growth - high) / b))
    tangent = abs(float(growth[0] / low[0]) - 1)
    slope = abs(float((growth[3] - growth[2]) / (high[3] - high[2])) - 1)
    return ClaimMeasurement(max(outside / 1e-6, tangent / 1e-3, slope / 1e-2), 1.0)


def _gain_outside(formula: Formula, corpus: ScanSnapCorpus, eta_y: float, t: Any) -> float:
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


@without("scan-snap-gain-full")
def _gain_of_unlike(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return ClaimMeasurement(_gain_outside(formula, _UNLIKE, 0.17, [0.0, 1e2, 1e4]), 1e-6)


def _log_gain(flow: Alike, z: Array, token: int, other: int) -> float:
    """Ln χ = ln r(t)/r(0) of two distinct tokens, in one class of classes alike."""
    c = len(flow.common)
    start = 2 * np.log(flow.distinct[token] / flow.distinct[other])
    move = 2 * (z[c + token] - z[c + other])
    return float(np.log1p(np.expm1(move) / -np.expm1(-start)))


@claim("scan-snap-gain-full", scan_snap.full_log_gain_bounds)
@without("scan-snap-gain-bounds")
def _gain_full(formula: Formula, rng: Generator) -> ClaimMeasurement:
    errors = []
    t = np.concatenate([[0.0], np.geomspace(0.03, 1e5, 60)])
    for classes, mass in ((3, 0.2), (4, 0.5)):
        common = rng.dirichlet(np.full(2, 3.0))
        corpus = Alike(classes, mass * common, (1 - mass) * _DISTINCT).corpus
        errors += [_gain_outside(formula, corpus, eta_y, t) for eta_y in (0.2, 100.0)]
    return measured(errors, 1e-6)


@claim("scan-snap-gain-bounds", scan_snap.log_gain_bounds)
def _gain_bounds(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """By how much ln χ leaves the bounds with g = γf imposed, misses the tangent or the slope."""

    def points() -> Iterable[Point]:
        for b in (0.1, 1.0, 10.0, 100.0):
            values = {"classes": 2, "common": rng.dirichlet(np.full(3, 3.0)), "b": b}
            mass = float(rng.uniform(0.2, 0.8))
            yield {**values, "distinct": _DISTINCT, "mass": mass}

    return largest_error(gain_bounds_at(formula, point) for point in points())


@without("scan-snap-gain-early")
def _gain_at_equal_rates(formula: Formula, rng: Generator) -> ClaimMeasurement:
    flow = Alike(3, np.array([0.2]), np.array([0.5, 0.3]))
    state = flow.path(np.array([20.0]), 1.0, 1.0)[0]
    b = float(state[-1])
    ours = float(formula(flow.corpus, 0, 1, 2, b))
    return ClaimMeasurement(abs(_log_gain(flow, state, 0, 1) - ours) / (b * b), 0.02)


def _gain_early_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """How far ln χ/(2f²B) − 1 is from the formula's cB, relative to (1 + |c|)B."""
    flow = reference.alike(point)
    order = np.argsort(-flow.distinct, kind="stable")
    pair = [int(order[0]), int(order[-1])]
    if order.size < 2 or flow.distinct[pair[0]] < 1.1 * flow.distinct[pair[1]]:
        raise JomaError("the two tokens must differ")
    tokens = [flow.common.size + one for one in pair]
    tangent = 2 * flow.square_at_start(pair[0])
    bend = float(formula(flow.corpus, 0, *tokens, 1.0)) / tangent - 1
    # B ∝ η_Z: such that the next order, about (cB)², stays below a hundredth of cB.
    t = np.array([point["time"]])
    trial = float(flow.path(t, 1.0, 1e-9, rtol=1e-5)[0, -1]) / 1e-9
    eta_z = 2e-4 / (1 + abs(bend)) / trial
    if eta_z > 1e-2:
        raise JomaError("η_Z ≪ η_Y only")
    state = flow.path(t, 1.0, eta_z, rtol=1e-11)[0]
    b = float(state[-1])
    ours = float(formula(flow.corpus, 0, *tokens, b))
    off = abs(_log_gain(flow, state, *pair) - ours) / (tangent * b * b)
    return ClaimMeasurement(off / (1 + abs(bend)), 0.02)


@claim("scan-snap-gain-early", scan_snap.early_log_gain)
def _gain_early(formula: Formula, rng: Generator) -> ClaimMeasurement:
    def points() -> Iterable[Point]:
        for mass in (0.2, 0.5, 0.8):
            values = {"classes": 3, "common": rng.dirichlet(np.full(2, 3.0)), "mass": mass}
            yield {**values, "distinct": _DISTINCT, "time": 20.0}

    return largest_error(_gain_early_at(formula, point) for point in points())


def _b_rises_on(
    formula: Formula, cases: Iterable[ScanSnapCorpus], eta_y: float, end: float
) -> ClaimMeasurement:
    """The relative error of Ḃ, plus the share of times and classes where it falls."""
    eta_z, step = 1.3, 1e-5
    error, falls = 0.0, []
    for corpus in cases:
        t = np.concatenate([[0.0], np.geomspace(0.1, end, 20)])
        run = scan_snap.evolve(corpus, t, eta_y=eta_y * eta_z, eta_z=eta_z)
        rate = formula(corpus, run.z, run.y, eta_z=eta_z)
        start = float(np.max(np.abs(rate[0])) + np.max(np.abs(run.b[0])))
        f = scan_snap.feature(corpus, run.z)
        by_differences = np.empty_like(rate)
        for class_ in range(corpus.classes):
            own = corpus.distinct_of(class_)
            # Ḃ·Σf² is the sum of ż over the class's distinct tokens, one direction of the gradient.
            along = np.zeros((corpus.queries, corpus.tokens))
            query = corpus.query[class_]
            along[query, own] = step
            rise = scan_snap.objective(corpus, run.z + along, run.y)
            rise = rise - scan_snap.objective(corpus, run.z - along, run.y)
            share = np.sum(f[:, class_, own] ** 2, axis=-1) * corpus.query_probability[query]
            by_differences[:, class_] = eta_z * rise / (2 * step) / share
        off = np.max(np.abs(rate - by_differences), axis=0) / np.max(np.abs(by_differences), axis=0)
        error = max(error, start, float(np.max(off)))
        falls.append(np.diff(run.b, axis=0) <= 0)
    return ClaimMeasurement(error + float(np.mean(np.concatenate(falls, axis=None))), 1e-6)


@without("scan-snap-b-rises")
def _b_falls(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return smallest_error(
        _b_rises_on(formula, [one], eta_y, end) for one, eta_y, end in reference.FALLING
    )


@claim("scan-snap-b-rises", scan_snap.b_rate)
def _b_rises(formula: Formula, rng: Generator) -> ClaimMeasurement:
    distinct = np.array([0.3, 0.2])
    cases = [Alike(k, 0.5 * rng.dirichlet(np.full(2, 3.0)), distinct).corpus for k in (2, 4)]
    return largest_error(_b_rises_on(formula, cases, eta_y, 1e4) for eta_y in (0.1, 100.0))

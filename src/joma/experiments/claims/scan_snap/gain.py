"""Theorem 3: the relative gain χ of two distinct tokens, its bounds in B, and that B rises."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import integrate

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import (
    ClaimMeasurement,
    largest_error,
    measured,
    smallest_error,
)
from joma.experiments.claims.reference import scan_snap as reference
from joma.experiments.claims.reference.scan_snap import Alike
from joma.experiments.claims.scan_snap import corpora
from joma.experiments.claims.search import Choice, Integer, Real, Seed, Simplex
from joma.theory import scan_snap
from joma.theory.scan_snap import ScanSnapCorpus

_UNLIKE = corpora.one_query(
    [[0.12, 0.88 * 0.75, 0.88 * 0.25, 0.00, 0.00], [0.85, 0.00, 0.00, 0.10, 0.05]], [0.5, 0.5]
)
"""Classes that differ: at η_Y = .17 η_Z, B and ln χ of the second fall below 0."""
_DISTINCT = np.array([0.5, 0.3, 0.2])


@without("scan-snap-relative-gain")
def _relative_gain_full(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The formula's d ln r/dB, integrated over the B of the full flow."""
    corpus = corpora.random_corpus(rng, 3, 3, 3, mass=0.2)
    t = np.concatenate([[0.0], np.geomspace(0.01, 1e5, 300)])
    run = scan_snap.evolve(corpus, t, eta_y=100.0, eta_z=1.0)
    often, *_, seldom = corpus.distinct_of(0)
    square = scan_snap.feature(corpus, run.z)[:, 0, often] ** 2
    rate = formula(1.0, square, gamma=1.0, overlap=0.0, class_given_query=1.0, eta_z=1.0)
    growth = np.exp(integrate.trapezoid(rate, run.b[:, 0]))
    gain = run.relative_gain(0, often, seldom)
    return measured(abs(gain[0] * growth / gain[-1] - 1), 1e-8)


@over(
    tokens=Simplex(Integer(2, 6), least=1e-4),
    common=Integer(0, 3),
    z_scale=Real(0.0, 3.0, special=(0.0,)),
    gamma=Real(1e-3, 1e3, log=True),
    common_g=Real(0.0, 10.0, special=(0.0,)),
    share=Real(1e-3, 1.0),
    draw=Seed(),
)
def _relative_gain_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance of dr/dt from that of the logits, relative, at any state."""
    rng = np.random.default_rng(point["draw"])
    p = point["tokens"]
    common = min(point["common"], p.size - 2)
    z = point["z_scale"] * rng.standard_normal(p.size)
    weights = p * np.exp(z - z.max())
    f = weights / np.linalg.norm(weights)
    gamma, share, eta_z = point["gamma"], point["share"], 1.3
    g = gamma * f
    g[:common] = point["common_g"] * rng.standard_normal(common)
    overlap = float(f @ g)
    z_rate = eta_z * share * f * (g - f * overlap)
    first, second = common, common + 1
    if min(f[first], f[second]) < 1e-6:
        raise JomaError("a token without attention")
    ratio = (f[first] / f[second]) ** 2
    expected = 2 * ratio * (z_rate[first] - z_rate[second])
    factors = {"gamma": gamma, "overlap": overlap / gamma}
    ours = formula(ratio - 1, f[first] ** 2, **factors, class_given_query=share, eta_z=eta_z)
    size = 2 * ratio * eta_z * share * (gamma + abs(overlap)) * (f[first] ** 2 + f[second] ** 2)
    return measured(abs(ours - expected) / size, 1e-9)


@claim("scan-snap-relative-gain", scan_snap.relative_gain_rate, _relative_gain_at)
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


@over(**corpora.ALIKE, b=Real(1e-4, 0.9e3, log=True))
def _gain_bounds_at(formula: Formula, point: Point) -> ClaimMeasurement:
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


@over(**corpora.ALIKE, **corpora.ALIKE_RUN)
def _gain_full_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much ln χ leaves its bounds on the flow, which must meet at B = 0."""
    flow = corpora.alike(point)
    first, *others = np.argsort(-flow.distinct, kind="stable").tolist()
    if not others or flow.distinct[first] < 1.02 * flow.distinct[others[0]]:
        raise JomaError("there must be a dominant token")
    state = flow.path(np.array([point["time"]]), **corpora.rates(point), rtol=1e-8)[0]
    b = float(state[-1])
    if b < 1e-5:
        raise JomaError("nothing has moved yet")
    square = flow.square_at_start(first)
    low, high = formula(b, square)
    worst = float(np.max(np.abs(formula(0.0, square)))) or -np.inf
    for other in others:
        growth = _log_gain(flow, state, first, other)
        worst = max(worst, (float(low) - growth) / b, (growth - float(high)) / b)
    return ClaimMeasurement(worst, 1e-4)


@claim("scan-snap-gain-full", scan_snap.full_log_gain_bounds, _gain_full_at)
@without("scan-snap-gain-bounds")
def _gain_full(formula: Formula, rng: Generator) -> ClaimMeasurement:
    errors = []
    t = np.concatenate([[0.0], np.geomspace(0.03, 1e5, 60)])
    for classes, mass in ((3, 0.2), (4, 0.5)):
        common = rng.dirichlet(np.full(2, 3.0))
        corpus = Alike(classes, mass * common, (1 - mass) * _DISTINCT).corpus
        errors += [_gain_outside(formula, corpus, eta_y, t) for eta_y in (0.2, 100.0)]
    return measured(errors, 1e-6)


@claim("scan-snap-gain-bounds", scan_snap.log_gain_bounds, _gain_bounds_at)
def _gain_bounds(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """By how much ln χ leaves the bounds with g = γf imposed, misses the tangent or the slope."""

    def points() -> Iterable[Point]:
        for b in (0.1, 1.0, 10.0, 100.0):
            values = {"classes": 2, "common": rng.dirichlet(np.full(3, 3.0)), "b": b}
            mass = float(rng.uniform(0.2, 0.8))
            yield Point({**values, "distinct": _DISTINCT, "mass": mass})

    return largest_error(_gain_bounds_at(formula, point) for point in points())


@without("scan-snap-gain-early")
def _gain_at_equal_rates(formula: Formula, rng: Generator) -> ClaimMeasurement:
    flow = Alike(3, np.array([0.2]), np.array([0.5, 0.3]))
    state = flow.path(np.array([20.0]), 1.0, 1.0)[0]
    b = float(state[-1])
    ours = float(formula(flow.corpus, 0, 1, 2, b))
    return ClaimMeasurement(abs(_log_gain(flow, state, 0, 1) - ours) / (b * b), 0.02)


@over(**corpora.ALIKE, time=Real(1e-1, 1e4, log=True))
def _gain_early_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """How far ln χ/(2f²B) − 1 is from the formula's cB, relative to (1 + |c|)B."""
    flow = corpora.alike(point)
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


@claim("scan-snap-gain-early", scan_snap.early_log_gain, _gain_early_at)
def _gain_early(formula: Formula, rng: Generator) -> ClaimMeasurement:
    def points() -> Iterable[Point]:
        for mass in (0.2, 0.5, 0.8):
            values = {"classes": 3, "common": rng.dirichlet(np.full(2, 3.0)), "mass": mass}
            yield Point({**values, "distinct": _DISTINCT, "time": 20.0})

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
        _b_rises_on(formula, [one], eta_y, end) for one, eta_y, end in corpora.FALLING
    )


@over(
    **corpora.ALIKE,
    **corpora.ALIKE_RUN,
    **corpora.ANY_CORPUS,
    **corpora.ANY_STATE,
    kind=Choice("alike", "any"),
)
def _b_rises_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance of Ḃ from Σż/F at any state; or where classes are alike 1 if B falls."""
    if point["kind"] == "alike":
        flow, of = corpora.alike(point), corpora.rates(point)
        state = flow.path(np.array([point["time"]]), **of, rtol=1e-7)[0]
        rate = formula(*flow.full_state(state), eta_z=of["eta_z"])[0]
        return ClaimMeasurement(float(rate <= 0), 0.5)
    corpus = corpora.any_corpus(point)
    z, y = corpora.any_state(point, corpus)
    ours = formula(corpus, z, y, eta_z=1.3)
    by_z, _ = reference.gradient(corpus, z, y)
    error = 0.0
    for class_, (p, query) in enumerate(zip(corpus.token_given_class, corpus.query, strict=True)):
        own = corpus.distinct_of(class_)
        if not own.size:
            error += float(not np.isnan(ours[class_]))
            continue
        logs = np.log(p[p > 0]) + z[query][p > 0]
        own_logs = np.log(p[own]) + z[query][own]
        squares = np.sum(np.exp(2 * (logs - logs.max())))
        share = np.sum(np.exp(2 * (own_logs - logs.max()))) / squares
        if share < 1e-4:
            continue
        expected = 1.3 * by_z[query, own].sum() / share
        error = max(error, abs(ours[class_] - expected) * share / (1 + np.max(np.abs(y))))
    return measured(error, 1e-11)


@claim("scan-snap-b-rises", scan_snap.b_rate, _b_rises_at)
def _b_rises(formula: Formula, rng: Generator) -> ClaimMeasurement:
    distinct = np.array([0.3, 0.2])
    cases = [Alike(k, 0.5 * rng.dirichlet(np.full(2, 3.0)), distinct).corpus for k in (2, 4)]
    return largest_error(_b_rises_on(formula, cases, eta_y, 1e4) for eta_y in (0.1, 100.0))

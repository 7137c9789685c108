"""Scan&Snap, tokens and Theorem 3: the domains an adversary searches, and each claim at a point."""

from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.measurement import Formula, Measurement
from joma.experiments.claims.reference import scan_snap as reference
from joma.experiments.claims.reference.scan_snap import Alike, TwoClasses
from joma.experiments.claims.search import (
    Choice,
    Integer,
    Matrix,
    Point,
    Real,
    Search,
    Seed,
    Simplex,
    Vector,
)
from joma.theory.scan_snap import Corpus

Array = np.ndarray

_ANY_CORPUS: dict[str, Any] = {
    "weights": Matrix(Real(0.0, 1.0, special=(0.0,)), Integer(2, 4), Integer(2, 6)),
    "joint": Simplex(Integer(2, 4), least=1e-4),
    "queries": Integer(1, 2),
}
_ANY_STATE: dict[str, Any] = {
    "z_scale": Real(0.0, 8.0, special=(0.0,)),
    "y_scale": Real(0.0, 20.0, special=(0.0,)),
    "draw": Seed(),
}
_ALIKE: dict[str, Any] = {
    "classes": Integer(2, 5),
    "common": Simplex(Integer(1, 3), least=1e-3),
    "distinct": Simplex(Integer(1, 4), least=1e-3),
    "mass": Real(1e-3, 0.999, special=(0.5,)),
}
_RUN: dict[str, Any] = {
    "ratio": Real(1e-4, 1e6, log=True, special=(1.0,)),
    "time": Real(1e-2, 1e12, log=True),
}
"""η_Y/η_Z, and √(η_Y η_Z) t."""


def any_corpus(point: Point) -> Corpus:
    """Return a corpus of any tokens; entries of 1e-9 and less count as absent."""
    weights = np.where(point["weights"] > 1e-9, point["weights"], 0.0)
    total = weights.sum(axis=1, keepdims=True)
    if np.any(total <= 0):
        raise JomaError("every class needs a token")
    classes = len(weights)
    joint = np.resize(point["joint"], classes)
    query = np.arange(classes) % point["queries"]
    return Corpus(weights / total, query.astype(np.int64), joint / joint.sum())


def alike(point: Point) -> Alike:
    """Return the flow of classes that are alike."""
    mass = point["mass"]
    return Alike(point["classes"], mass * point["common"], (1 - mass) * point["distinct"])


def _rates(point: Point) -> tuple[Array, float, float]:
    """Time, η_Y and η_Z."""
    ratio = point["ratio"]
    return np.array([point["time"]]), float(np.sqrt(ratio)), float(1 / np.sqrt(ratio))


def gradient(formula: Formula, point: Point) -> Measurement:
    """Return the distance to the log-likelihood's derivatives, relative to the largest g."""
    corpus = any_corpus(point)
    rng = np.random.default_rng(point["draw"])
    z = point["z_scale"] * rng.standard_normal((corpus.queries, corpus.tokens))
    y = point["y_scale"] * rng.standard_normal((corpus.tokens, corpus.classes))
    z_rate, y_rate = formula(corpus, z, y, eta_y=0.7, eta_z=1.3)
    by_z, by_y = reference.gradient(corpus, z, y)
    error = np.max(np.abs(z_rate - 1.3 * by_z)) / (1 + np.max(np.abs(y)))
    return Measurement(float(max(error, np.max(np.abs(y_rate - 0.7 * by_y)))), 1e-12)


def distinct_rise(formula: Formula, point: Point) -> Measurement:
    """Return the distance to z̈(0), relative, plus 1 if a distinct token is not pulled up."""
    corpus = any_corpus(point)
    pull, expected = formula(corpus), reference.initial_acceleration(corpus)
    scale = max(float(np.max(np.abs(expected))), 1e-6)
    error = float(np.max(np.abs(pull - expected))) / scale
    for class_ in range(corpus.classes):
        p = corpus.token_given_class[class_]
        shares = bool(np.any(corpus.shared & (p > 0)))
        own = pull[corpus.query[class_], corpus.distinct_of(class_)]
        error += float(np.any(own <= 0) if shares else np.any(own != 0))
    return Measurement(error, 1e-8)


def common_falls(formula: Formula, point: Point) -> Measurement:
    """Return how far the common token that falls least has come: at first, or on a flow.

    All common tokens are equally common, or there is only one.
    """
    if point["kind"] == "flow":
        two = TwoClasses((point["one"][0], point["one"][-1]), float(point["joint"][0]))
        t, eta_y, eta_z = _rates(point)
        z = two.path(t, eta_y, eta_z, rtol=1e-8)[0, :3]
        if np.max(np.abs(z)) < 1e-8:
            raise JomaError("nothing has moved yet")
        fall = float(z[0] / np.max(np.abs(z)))
        return Measurement(fall if formula(two.corpus)[0, 0] == -1 else 1.0, 0.0)
    corpus = _common_and_distinct(point)
    fate, expected = formula(corpus), reference.initial_acceleration(corpus)
    shared = corpus.shared
    if np.all(np.abs(expected[:, shared]) < 1e-13):
        raise JomaError("nothing moves")
    visible = np.abs(expected[:, shared]) > 1e-13
    if np.any(fate[:, shared][visible] != -1):
        return Measurement(1.0, 0.0)
    fall = np.max(expected[:, shared][visible]) / np.max(np.abs(expected))
    return Measurement(float(fall), 0.0)


def _common_and_distinct(point: Point) -> Corpus:
    """One common token of any frequencies, or several that are equally common; unequal classes."""
    classes = point["classes"]
    rng = np.random.default_rng(point["draw"])
    if point["kind"] == "one":
        mass = np.resize(point["one"], classes)[:, None]
        common = np.ones((classes, 1))
    else:
        mass = np.full((classes, 1), point["mass"])
        common = np.tile(point["common"], (classes, 1))
    distinct = point["distinct"].size
    own = np.zeros((classes, classes * distinct))
    for class_ in range(classes):
        weights = point["distinct"] * rng.random(distinct) ** point["unequal"]
        own[class_, class_ * distinct : (class_ + 1) * distinct] = weights / weights.sum()
    joint = np.resize(point["joint"], classes)
    query = (np.arange(classes) % point["queries"]).astype(np.int64)
    return Corpus(np.hstack([mass * common, (1 - mass) * own]), query, joint / joint.sum())


def frequent_first(formula: Formula, point: Point) -> Measurement:
    """Return the distance of z_l/z_l' at t → 0 from the formula, relative."""
    corpus = any_corpus(point)
    expected = reference.initial_acceleration(corpus)
    error, found = 0.0, False
    for class_ in range(corpus.classes):
        own = corpus.distinct_of(class_)
        of_query = expected[corpus.query[class_]]
        if not np.any(corpus.shared & (corpus.token_given_class[class_] > 0)):
            continue
        for token in own:
            ratio = formula(corpus, class_, own[0], token)
            if min(of_query[own[0]], of_query[token]) < 1e-9:
                continue
            found = found or token != own[0]
            error = max(error, abs(of_query[own[0]] / of_query[token] / ratio - 1))
    if not found:
        raise JomaError("no class has two distinct tokens that move")
    return Measurement(error, 1e-6)


def relative_gain(formula: Formula, point: Point) -> Measurement:
    """Return the distance of dr/dt from that of the logits, relative, at any state."""
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
    ours = formula(
        ratio - 1,
        f[first] ** 2,
        gamma=gamma,
        overlap=overlap / gamma,
        class_given_query=share,
        eta_z=eta_z,
    )
    size = 2 * ratio * eta_z * share * (gamma + abs(overlap)) * (f[first] ** 2 + f[second] ** 2)
    return Measurement(float(abs(ours - expected) / size), 1e-9)


def gain_bounds(formula: Formula, point: Point) -> Measurement:
    """Return by how much ln χ leaves its bounds, relative to 2B, with g = γf imposed.

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
    return Measurement(max(outside / 1e-6, tangent / 1e-3, slope / 1e-2), 1.0)


def log_gain(flow: Alike, z: Array, token: int, other: int) -> Array:
    """Return ln χ = ln r(t)/r(0) of two distinct tokens, in one class of classes alike."""
    c = len(flow.common)
    start = 2 * np.log(flow.distinct[token] / flow.distinct[other])
    move = 2 * (z[..., c + token] - z[..., c + other])
    return np.log1p(np.expm1(move) / -np.expm1(-start))


def gain_full(formula: Formula, point: Point) -> Measurement:
    """Return by how much ln χ leaves its bounds on the flow, which must meet at B = 0."""
    flow = alike(point)
    order = np.argsort(-flow.distinct, kind="stable")
    if order.size < 2 or flow.distinct[order[0]] < 1.02 * flow.distinct[order[1]]:
        raise JomaError("there must be a dominant token")
    t, eta_y, eta_z = _rates(point)
    state = flow.path(t, eta_y, eta_z, rtol=1e-8)[0]
    c, b = flow.common.size, float(state[-1])
    if b < 1e-5:
        raise JomaError("nothing has moved yet")
    f = flow.feature(np.zeros(c + order.size))
    square = float(f[c + order[0]] ** 2)
    low, high = formula(b, square)
    first = formula(0.0, square)
    worst = max(abs(float(first[0])), abs(float(first[1]))) or -np.inf
    for other in order[1:]:
        growth = float(log_gain(flow, state[: c + order.size], int(order[0]), int(other)))
        worst = max(worst, (float(low) - growth) / b, (growth - float(high)) / b)
    return Measurement(worst, 1e-4)


def gain_early(formula: Formula, point: Point) -> Measurement:
    """Return how far ln χ/(2f²B) − 1 is from the formula's cB, relative to (1 + |c|)B."""
    flow = alike(point)
    order = np.argsort(-flow.distinct, kind="stable")
    pair = [int(order[0]), int(order[-1])]
    if order.size < 2 or flow.distinct[pair[0]] < 1.1 * flow.distinct[pair[1]]:
        raise JomaError("the two tokens must differ")
    c = flow.common.size
    f = flow.feature(np.zeros(c + order.size))
    square = float(f[c + pair[0]] ** 2)
    corpus = flow.corpus
    tokens = [c + one for one in pair]
    tangent = 2 * square
    bend = float(formula(corpus, 0, *tokens, 1.0)) / tangent - 1
    # B ∝ η_Z: such that the next order, about (cB)², stays below a hundredth of cB.
    t = np.array([point["time"]])
    trial = float(flow.path(t, 1.0, 1e-9, rtol=1e-5)[0, -1]) / 1e-9
    eta_z = 2e-4 / (1 + abs(bend)) / trial
    if eta_z > 1e-2:
        raise JomaError("η_Z ≪ η_Y only")
    state = flow.path(t, 1.0, eta_z, rtol=1e-11)[0]
    b = float(state[-1])
    growth = float(log_gain(flow, state[: c + order.size], *pair))
    ours = float(formula(corpus, 0, *tokens, b))
    return Measurement(abs(growth - ours) / (tangent * b * b) / (1 + abs(bend)), 0.02)


def b_rises(formula: Formula, point: Point) -> Measurement:
    """Return the distance of Ḃ from Σż/F at any state; or where classes are alike 1 if B falls."""
    if point["kind"] == "alike":
        flow = alike(point)
        t, eta_y, eta_z = _rates(point)
        state = flow.path(t, eta_y, eta_z, rtol=1e-7)[0]
        return Measurement(float(formula(*full_state(flow, state), eta_z=eta_z)[0] <= 0), 0.5)
    corpus = any_corpus(point)
    rng = np.random.default_rng(point["draw"])
    z = point["z_scale"] * rng.standard_normal((corpus.queries, corpus.tokens))
    y = point["y_scale"] * rng.standard_normal((corpus.tokens, corpus.classes))
    ours = formula(corpus, z, y, eta_z=1.3)
    by_z, _ = reference.gradient(corpus, z, y)
    error = 0.0
    for class_ in range(corpus.classes):
        own = corpus.distinct_of(class_)
        if not own.size:
            error += float(not np.isnan(ours[class_]))
            continue
        query = corpus.query[class_]
        logs = np.log(corpus.token_given_class[class_][corpus.token_given_class[class_] > 0])
        logs = logs + z[query][corpus.token_given_class[class_] > 0]
        own_logs = np.log(corpus.token_given_class[class_][own]) + z[query][own]
        share = np.sum(np.exp(2 * (own_logs - logs.max()))) / np.sum(
            np.exp(2 * (logs - logs.max()))
        )
        if share < 1e-4:
            continue
        expected = 1.3 * by_z[query, own].sum() / share
        error = max(error, abs(ours[class_] - expected) * share / (1 + np.max(np.abs(y))))
    return Measurement(float(error), 1e-11)


def full_state(flow: Alike, state: Array) -> tuple[Corpus, Array, Array]:
    """Return the corpus, z and Y of classes that are alike, with Y = 0 on common tokens."""
    k, c, d = flow.classes, len(flow.common), len(flow.distinct)
    z = np.concatenate([state[:c], np.tile(state[c : c + d], k)])[None]
    own = np.kron(np.eye(k), state[c + d : c + 2 * d][:, None])
    others = np.kron(1 - np.eye(k), state[c + d : c + 2 * d][:, None])
    y = np.vstack([np.zeros((c, k)), own - others / (k - 1)])
    return flow.corpus, z, y


GRADIENT = Search({**_ANY_CORPUS, **_ANY_STATE}, gradient)
DISTINCT_RISE = Search(_ANY_CORPUS, distinct_rise)
COMMON_FALLS = Search(
    {
        **_ALIKE,
        **_RUN,
        "kind": Choice("one", "equally", "flow"),
        "one": Vector(Real(1e-4, 0.9999), Integer(2, 4)),
        "joint": Simplex(Integer(2, 4), least=1e-3),
        "queries": Integer(1, 2),
        "unequal": Real(0.0, 3.0, special=(0.0,)),
        "draw": Seed(),
    },
    common_falls,
)
FREQUENT_FIRST = Search(_ANY_CORPUS, frequent_first)
RELATIVE_GAIN = Search(
    {
        "tokens": Simplex(Integer(2, 6), least=1e-4),
        "common": Integer(0, 3),
        "z_scale": Real(0.0, 3.0, special=(0.0,)),
        "gamma": Real(1e-3, 1e3, log=True),
        "common_g": Real(0.0, 10.0, special=(0.0,)),
        "share": Real(1e-3, 1.0),
        "draw": Seed(),
    },
    relative_gain,
)
GAIN_BOUNDS = Search({**_ALIKE, "b": Real(1e-4, 0.9e3, log=True)}, gain_bounds)
GAIN_FULL = Search({**_ALIKE, **_RUN}, gain_full)
GAIN_EARLY = Search({**_ALIKE, "time": Real(1e-1, 1e4, log=True)}, gain_early)
B_RISES = Search(
    {**_ALIKE, **_RUN, **_ANY_CORPUS, **_ANY_STATE, "kind": Choice("alike", "any")}, b_rises
)

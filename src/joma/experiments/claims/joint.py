"""Theorem 1 and its new laws: measured on the full block, in which nothing is integrated out."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Claim, Measure
from joma.experiments.claims.measurement import Formula, Measurement
from joma.experiments.claims.reference import block as reference
from joma.experiments.claims.search import Choice, Integer, Point, Real, Search, Seed
from joma.theory import invariants, memory, stationarity
from joma.theory.block import Block, Samples, State, Trajectory, simulate, velocity

POINTWISE = ("linear", "exp", "sigmoid")


def random_samples(rng: np.random.Generator, *, queries: int = 1, nodes: int = 3) -> Samples:
    """Forty samples of six tokens, with random gradients for each node."""
    x = rng.dirichlet(np.ones(6), size=40)
    query = None if queries == 1 else rng.permutation(np.arange(40) % queries)
    return Samples(x, gradient=rng.normal(size=(40, nodes)), query=query)


def random_start(samples: Samples, rng: np.random.Generator, logit: float = 0.0) -> State:
    """A random state for the samples, its logits about a given value."""
    m, k, q = samples.tokens, samples.nodes, samples.queries
    return State(
        0.3 * rng.normal(size=(m, k)),
        logit + 0.3 * rng.normal(size=(q, m)),
        0.1 * rng.normal(size=(q, k)),
    )


def random_point(rng: np.random.Generator, **given: Any) -> Point:
    """A block of moderate size at moderate rates, as a point of a search."""
    values: dict[str, Any] = {
        "tokens": 5,
        "nodes": 3,
        "queries": 1,
        "samples": 9,
        "weights": 0.5,
        "logits": 0.5,
        "absent": 0.2,
        "eta_w": 0.7,
        "eta_z": 1.3,
        "tau": 0.6,
        "activation": "tanh",
        "drive": "gradient",
        "draw": int(rng.integers(2**32)),
    }
    return Point({**values, **given})


def _trajectory(
    block: Block, rng: np.random.Generator, *, queries: int = 1, labels: bool = False
) -> Trajectory:
    samples = random_samples(rng, queries=queries)
    if labels:
        samples = Samples(samples.x, labels=np.arange(40) % 3, query=samples.query)
    start = random_start(samples, rng, 1.0 if block.sigma.name == "linear" else 0.0)
    return simulate(block, samples, np.linspace(0, 0.5, 6), initial=start)


def _drift(quantity: Any) -> Measurement:
    return Measurement(float(np.max(np.abs(quantity - quantity[0]))), 1e-9)


def _gradient(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Differences of the objective in w: every attention and activation, labels, embeddings."""
    worst = Measurement(0.0, 1.0)
    for attention in (*POINTWISE, "softmax"):
        for activation in reference.PHI:
            for drive, embeddings in (("gradient", "orthonormal"), ("labels", "any")):
                point = random_point(rng, queries=2, activation=activation, drive=drive)
                values = {"attention": attention, "embeddings": embeddings, **point.values}
                worst = max(worst, _gradient_at(formula, Point(values)), key=lambda m: m.error)
    return worst


def _gradient_at(formula: Formula, point: Point) -> Measurement:
    """Against rates written once more and, where no node switches, against differences."""
    setting = reference.draw_setting(point, point["attention"], point["embeddings"])
    rate, own, m = (
        formula(setting.block, setting.samples, setting.state),
        reference.rates(setting),
        0,
    )
    m, block = setting.samples.tokens, setting.block
    b = reference.attention_scores(setting)
    f, pull = reference.node_gradients(setting, b)
    pull = reference.pull_sizes(setting, pull)
    sizes = block.eta_w * np.abs(setting.columns).T @ np.abs(f).T @ pull
    v_size = np.abs(setting.columns[:, :m]).T @ np.abs(setting.w)
    largest = 1.0
    if block.sigma.name in reference.SIGMA:
        largest = float(np.max(reference.SIGMA[block.sigma.name][1](setting.z / block.tau)))
    z_size = block.eta_z / block.tau * largest * np.sum(pull @ v_size.T) + 1e-300
    projected = setting.columns.T @ own.w
    # Slopes are as good as the pre-activations, sums in which large scores may cancel.
    size = float(np.max(np.abs(f) @ np.abs(setting.w)))
    digits = 1e-11 + 1e-14 * size
    errors = [
        np.max(np.abs(np.concatenate([rate.v, rate.bias]) - projected) / (digits * sizes + 1e-300)),
        np.max(np.abs(rate.z - own.z)) / (digits * z_size),
    ]
    rng = np.random.default_rng([point["draw"], 1])
    toward = rng.normal(size=projected.shape)
    move = reference.Rate(setting.columns @ toward, rng.normal(size=setting.z.shape))
    h = 1e-4 / max(
        float(np.max(np.abs(move.w)) / np.max(np.abs(setting.w))),
        float(np.max(np.abs(move.z)) / block.tau),
    )
    h /= max(1.0, size)  # so that no pre-activation changes by more than about 1e-4
    around = [setting.moved(move, s * h) for s in (-2, -1, 1, 2)]
    slopes = [reference.slopes_of(one) for one in (setting, *around)]
    if block.phi.smooth or all(np.array_equal(slopes[0], one) for one in slopes):
        back_two, back, ahead, ahead_two = (reference.objective(one) for one in around)
        slope = (8 * (ahead - back) - (ahead_two - back_two)) / (12 * h)
        by_rates = (
            np.sum(toward * np.concatenate([rate.v, rate.bias])) / block.eta_w
            + np.sum(move.z * rate.z) / block.eta_z
        )
        scale = np.sum(np.abs(toward) * sizes) / block.eta_w
        scale += np.sum(np.abs(move.z)) * z_size / block.eta_z
        h_size = np.abs(f) @ np.abs(setting.w) + 1
        rounding = 1e-14 * (np.sum(np.asarray(setting.samples.probability) @ h_size) + 1) / h
        errors.append(abs(slope - by_rates) / (1e-5 * scale + 10 * rounding))
    return Measurement(float(np.max(errors)), 1.0)


def _law(*blocks: Block, queries: int = 1, labels: bool = False) -> Measure:
    """The drift of formula(block, v, z) along the flow of each block; the largest speaks."""

    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        worst = Measurement(0.0, 1e-9)
        for block in blocks:
            path = _trajectory(block, rng, queries=queries, labels=labels)
            drift = _drift(formula(block, path.v, path.z))
            worst = max(worst, drift, key=lambda m: m.error)
        return worst

    return measure


def _each_fails(*measures: Measure) -> Measure:
    """The least drift of several cases, so that all of them must fail."""

    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        return min((one(formula, rng) for one in measures), key=lambda m: m.error)

    return measure


def _one_query_law(block: Block) -> Measure:
    """The law of a single query, where three are trained at once."""

    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        path = _trajectory(block, rng, queries=3)
        return _drift(formula(block, path.v, path.z[:, 0]))

    return measure


def _linear_law(block: Block, v: Any, z: Any) -> Any:
    """The law z² - Σ v², as printed for equal rates."""
    del block
    return z**2 - np.sum(v**2, axis=-1)


def _exp_law(block: Block, v: Any, z: Any) -> Any:
    """The law z - ½ Σ v², as printed for equal rates."""
    del block
    return z - np.sum(v**2, axis=-1) / 2


def _sum_of_logits(block: Block, v: Any, z: Any) -> Any:
    del block, v
    return np.sum(z, axis=-1)


def _law_of_embeddings(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Nine tokens in five dimensions, three queries; then two groups of them in ten."""
    worst = Measurement(0.0, 1e-9)
    for attention in POINTWISE:
        many = {"tokens": 9, "queries": 3, "samples": 20}
        path = _embedded(attention, rng, 5, groups=1, **many)
        worst = max(worst, _drift(formula(path.block, path.v, path.z)), key=lambda m: m.error)
        path = _embedded(attention, rng, 5, groups=2, **many)
        by_group = formula(path.block, path.v, path.z, groups=np.arange(9) % 2)
        worst = max(worst, _drift(by_group), key=lambda m: m.error)
    return worst


def _law_of_embeddings_along_a_query(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The same where all tokens have a part along the query."""
    path = _embedded("exp", rng, 5, groups=1, tokens=9, queries=1, samples=20, along=0.3)
    assert path.block.embeddings is not None
    without_query = path.block.embeddings.copy()
    without_query[:, 9:] = 0
    return _drift(formula(replace(path.block, embeddings=without_query), path.v, path.z))


def _embedded(
    attention: str,
    rng: np.random.Generator,
    dimension: int,
    *,
    groups: int,
    tokens: int,
    queries: int,
    samples: int,
    along: float = 0.0,
) -> Trajectory:
    """A block whose tokens share `dimension` dimensions per group, with a part along queries."""
    d = groups * dimension + queries
    columns = np.zeros((d, tokens + queries))
    for token in range(tokens):
        start = dimension * (token % groups)
        columns[start : start + dimension, token] = rng.normal(size=dimension)
    columns[-queries:, tokens:] = np.eye(queries)
    columns[-queries:, :tokens] = along
    x = rng.dirichlet(np.ones(tokens), size=samples)
    query = None if queries == 1 else np.arange(samples) % queries
    data = Samples(x, gradient=rng.normal(size=(samples, 3)), query=query)
    block = Block(attention, "tanh", eta_w=0.7, eta_z=1.3, tau=0.6, embeddings=columns)
    w = 0.3 * rng.normal(size=(d, 3))
    logits = (1.0 if attention == "linear" else 0.0) + 0.3 * rng.normal(size=(queries, tokens))
    start = State(columns[:, :tokens].T @ w, logits, columns[:, tokens:].T @ w)
    return simulate(block, data, np.linspace(0, 0.3, 5), initial=start)


def _eqn_18(formula: Formula, rng: np.random.Generator) -> Measurement:
    """How far the order of the error in the motion of z falls short of two, samples alike."""
    return _order_of_eqn_18(formula, rng, alike=True)


def _eqn_18_apart(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The same where the samples differ, so that the covariance counts."""
    return _order_of_eqn_18(formula, rng, alike=False)


def _order_of_eqn_18(formula: Formula, rng: np.random.Generator, *, alike: bool) -> Measurement:
    draw = int(rng.integers(2**32))
    motions, errors = [], []
    for eta_z in (0.01, 0.02, 0.04, 0.08):
        point = random_point(rng, draw=draw, alike=alike, eta_z=eta_z, eta_w=1.0)
        setting = reference.draw_setting(point, "softmax")
        path = simulate(setting.block, setting.samples, [0.0, 2.0], initial=setting.state)
        mean = _mean_scores(setting)
        estimate = formula(setting.block, path.v, mean)
        actual = path.z[1] - path.z[0]
        motions.append(np.max(np.abs(actual)))
        errors.append(np.max(np.abs(estimate[1] - estimate[0] - actual)))
    order = np.polyfit(np.log(motions), np.log(errors), 1)[0]
    return Measurement(float(max(2 - order, 0.0)), 0.1)


def _mean_scores(setting: reference.Setting) -> Any:
    return np.asarray(setting.samples.probability) @ reference.attention_scores(setting)


def _eqn_18_at(formula: Formula, point: Point) -> Measurement:
    """The error against how far b̄ has moved times how far ½‖V‖² has, samples alike."""
    setting = reference.draw_setting(point, "softmax", queries=1, alike=True)
    path = reference.follow(setting, point["reach"], 10 + int(6 * point["reach"]))
    block = setting.block
    factor = block.eta_z / (block.eta_w * block.tau)
    estimate = formula(block, path.v, _mean_scores(setting))
    error = np.abs(estimate - estimate[0] - (path.z - path.z[0]))
    means = np.stack([_mean_scores(replace(setting, z=z[None])) for z in path.z])
    half = np.sum(path.v**2, axis=(1, 2)) / 2
    moved = np.maximum.accumulate(np.abs(means - means[0]), axis=0)
    # ½‖V‖² may turn within a step, in which it then goes farther than its ends are apart.
    steps = np.abs(np.diff(half))
    turns = np.concatenate([[True], np.diff(np.sign(np.diff(half))) != 0])
    steps = steps + turns * np.maximum(steps, np.append(steps[1:], 0.0))
    way = np.concatenate([[0.0], np.cumsum(steps)])
    bound = factor * moved * way[:, None]
    size = np.max(np.abs(estimate)) + np.max(np.abs(path.z)) + factor * np.max(half)
    return Measurement(float(np.max(error / (1.001 * bound + 1e-6 * size))), 1.0)


def _condition_with_weights(pull: Any, b: Any, v: Any) -> bool:
    """Whether Σ_k E[g_k h′_k b bᵀ] v_k = b̄ Σ_k E[g_k h′_k b]ᵀ v_k."""
    second = np.einsum("nk,nl,nj,jk->l", pull, b, b, v) / len(b)
    first = np.einsum("nk,nj,jk->", pull, b, v) / len(b)
    return bool(np.allclose(second, b.mean(axis=0) * first, atol=1e-10))


def _condition_as_printed(pull: Any, b: Any, v: Any) -> bool:
    """The printed condition, its transpose put back: the sum over nodes without their weights."""
    del v
    total = pull.sum(axis=1)
    second = np.einsum("n,nl,nj->lj", total, b, b) / len(b)
    return bool(np.allclose(second, np.outer(b.mean(axis=0), total @ b / len(b)), atol=1e-10))


def _softmax_condition(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Does the condition tell where Eqn 17, the rate of z from the rates of v, holds?"""
    wrong = 0.0
    for case in range(32):
        values = {"case": case % 4, "samples": 7, "tokens": 5, "draw": int(rng.integers(2**32))}
        wrong += _softmax_condition_at(formula, Point(values)).error
    return Measurement(wrong / 32, 0.0)


def _softmax_condition_at(formula: Formula, point: Point) -> Measurement:
    rng = np.random.default_rng(point["draw"])
    n, m = point["samples"], point["tokens"]
    x = rng.dirichlet(np.ones(m), size=n)
    g, v = rng.normal(size=(n, 2)), 0.3 * rng.normal(size=(m, 2))
    if point["case"] == 0:
        x = np.tile(x[0], (n, 1))  # every sample alike: it holds for each node
    elif point["case"] == 1:
        g[:, 1] = -g[:, 0]  # the nodes cancel, but their weights differ: it fails
    elif point["case"] == 2:
        g[:, 1], v[:, 1] = -g[:, 0], v[:, 0]  # they cancel with their weights: it holds
    columns = np.eye(m + 1)
    w = np.concatenate([v, np.zeros((1, 2))])
    logits = 0.3 * rng.normal(size=(1, m))
    block, samples = Block("softmax", "linear"), Samples(x, gradient=g)
    setting = reference.Setting(block, samples, columns, w, logits)
    rate, b = reference.rates(setting), reference.attention_scores(setting)
    both = rate.w[:m] * v
    by_law = np.sum(both, axis=1) - b.mean(axis=0) * np.sum(both)
    holds = bool(np.allclose(by_law, rate.z[0], rtol=0, atol=1e-10))
    return Measurement(float(bool(formula(g, b, v)) != holds), 0.0)


def _softmax_rate(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = Measurement(0.0, 1.0)
    for drive in ("gradient", "labels"):
        point = random_point(rng, drive=drive)
        worst = max(worst, _softmax_rate_at(formula, point), key=lambda m: m.error)
    return worst


def _softmax_rate_at(formula: Formula, point: Point) -> Measurement:
    """The rate of the logits against the law's and a formula of what it leaves out."""
    setting = reference.draw_setting(point, "softmax", queries=1)
    left_out = formula(setting.block, setting.samples, setting.state)
    size = np.sum(reference.rate_sizes(setting)) / setting.block.tau
    return Measurement(
        float(np.max(np.abs(_left_out(setting) - left_out))), 1e-9 * float(size) + 1e-300
    )


def _left_out(setting: reference.Setting, slopes: Any = None) -> Any:
    """What the law of Eqn 17 gives too much, by the rates themselves."""
    block, m = setting.block, setting.samples.tokens
    rate = reference.rates(setting, slopes)
    both = setting.state.v * (setting.columns[:, :m].T @ rate.w)
    by_law = np.sum(both, axis=1) - _mean_scores(setting) * np.sum(both)
    return block.eta_z / (block.eta_w * block.tau) * by_law - rate.z[0]


def _remembered(
    formula: Formula, setting: reference.Setting, reach: float, points: int
) -> tuple[Trajectory, Any]:
    """A training and, at every second of its times, the logits by a formula.

    The error of the formula's rule is extrapolated away.
    """
    path = reference.follow(setting, reach, 2 * points)
    fine, coarse = (
        formula(setting.block, setting.samples, v, path.z[0]) for v in (path.v, path.v[::2])
    )
    return path, (4 * fine[::2] - coarse) / 3


def _memory(alike: bool) -> Measure:
    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        worst = Measurement(0.0, 1.0)
        for drive, reach in (("gradient", 2.0), ("labels", 2.0)):
            point = random_point(rng, drive=drive, reach=reach, alike=alike)
            worst = max(worst, _memory_at(formula, point, alike=alike), key=lambda m: m.error)
        return worst

    return measure


def _memory_at(formula: Formula, point: Point, *, alike: bool = True) -> Measurement:
    setting = reference.draw_setting(point, "softmax", queries=1, alike=alike)
    path, predicted = _remembered(formula, setting, point["reach"], 5 + int(5 * point["reach"]))
    tolerance = (1 + point["reach"]) * _motion(path) + _rounding(path)
    return Measurement(float(np.max(np.abs(predicted - path.z[::2]))), tolerance)


def _motion(path: Trajectory) -> float:
    """What counts as zero next to the motion of z: a path with switches has only second order."""
    share = 1e-4 if path.block.phi.smooth else 1e-3
    return share * (float(np.max(np.abs(path.z - path.z[0]))) + path.block.tau)


def _rounding(path: Trajectory) -> float:
    """What the rounding of the weights is worth in the logits."""
    block = path.block
    squares = float(np.max(np.sum(path.v**2, axis=(1, 2))))
    return 1e-14 * block.eta_z / (block.eta_w * block.tau) * squares * len(path.t)


def _gap(formula: Formula, rng: np.random.Generator) -> Measurement:
    """By how much z leaves the bound; and how far below it stays where the path is short."""
    worst = -np.inf
    for drive, reach in (("gradient", 2.0), ("labels", 2.0)):
        point = random_point(rng, drive=drive, reach=reach)
        worst = max(worst, _gap_at(formula, point).error - 1)
    path, predicted = _remembered(
        memory.logits, reference.draw_setting(random_point(rng), "softmax"), 1e-3, 10
    )
    attained = np.linalg.norm(predicted[-1] - path.z[-1]) / formula(path)[-1]
    return Measurement(float(max(worst, abs(1 - attained))), 0.01)


def _gap_at(formula: Formula, point: Point) -> Measurement:
    setting = reference.draw_setting(point, "softmax", queries=1)
    points = 5 + int(5 * point["reach"])
    path, predicted = _remembered(memory.logits, setting, point["reach"], points)
    gap = np.linalg.norm(predicted - path.z[::2], axis=1)
    # What the trapezoidal rule may miss, which is much where a node switches: within a step of the
    # reference the switches stay. The columns are orthonormal, so w is what its projections say.
    states = [
        replace(setting, w=setting.columns @ np.concatenate([v, bias]), z=z[None])
        for v, bias, z in zip(path.v, path.bias, path.z, strict=True)
    ]
    before = np.array([np.linalg.norm(_left_out(one)) for one in states])
    after = before[1:]
    if not setting.block.phi.smooth:
        pairs = pairwise(states)
        after = [np.linalg.norm(_left_out(b, reference.slopes_of(a))) for a, b in pairs]
    jumps = np.abs(np.diff(before)) + np.maximum(after - before[1:], 0)
    missed = np.concatenate([[0.0], np.cumsum(np.diff(path.t) * jumps / 2)])
    allowed = 1.001 * formula(path) + missed + _rounding(path)
    allowed = allowed + (1 + point["reach"]) * _motion(path)
    return Measurement(float(np.max(gap / allowed[::2])), 1.0)


def _descent(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The law's change over thirty gradient steps against a formula of the weights' steps."""
    worst = 0.0
    for block in (Block("exp", "relu"), Block("exp", "tanh", eta_w=0.7, eta_z=1.3, tau=0.5)):
        samples = random_samples(rng, queries=1 if block.tau == 1 else 3)
        t, start = np.arange(0, 31) * 0.02, random_start(samples, rng)
        path = simulate(block, samples, t, initial=start, descent_step=0.02)
        quantity = invariants.conserved_pointwise(block, path.v, path.z)
        difference = quantity[-1] - quantity[0] - formula(path.v, block)
        worst = max(worst, float(np.max(np.abs(difference))))
    return Measurement(worst, 1e-13)


def _descent_at(formula: Formula, point: Point) -> Measurement:
    setting = reference.draw_setting(point, "exp")
    rate = reference.rates(setting)
    speed = max(
        float(np.max(np.abs(rate.w))) / float(np.max(np.abs(setting.w))),
        float(np.max(np.abs(rate.z))) / setting.block.tau,
    )
    path = reference.descend(setting, point["step"] / max(speed, 1e-30), point["steps"])
    block, z = setting.block, path.z if path.z.ndim == 3 else path.z[:, None]
    squares = block.eta_z / (2 * block.eta_w) * np.sum(path.v**2, axis=2)
    law = block.tau * np.sum(z, axis=1) - squares
    if not np.all(np.isfinite(law)):
        raise JomaError("step must not let the weights diverge")
    size = np.max(np.abs(squares)) + block.tau * np.max(np.sum(np.abs(z), axis=1))
    change = law[-1] - law[0] - formula(path.v, block)
    steps = np.max(np.abs(np.diff(path.v, axis=0))) * np.max(np.abs(path.v))
    size += block.eta_z / block.eta_w * steps * path.v.shape[2]
    # Where a huge step throws the bias far off, w is rounded to a share of the bias.
    lost = 1e-15 * np.max(np.abs(path.bias)) * np.max(np.abs(path.v)) * path.v.shape[2]
    rounding = 3e-11 * float(size) + block.eta_z / block.eta_w * float(lost)
    return Measurement(float(np.max(np.abs(change))), rounding + 1e-300)


def _descent_order(formula: Formula, rng: np.random.Generator) -> Measurement:
    samples = random_samples(rng)
    start = random_start(samples, rng)
    worst = 0.0
    for activation in ("tanh", "relu"):
        block = Block("exp", activation)
        drifts = [
            invariants.drift(
                simulate(block, samples, [0.0, 0.64], initial=start, descent_step=0.64 / n)
            )
            for n in (128, 256, 512)
        ]
        order = np.mean(np.log2(np.divide(drifts[:-1], drifts[1:])))
        worst = max(worst, float(abs(order - formula())))
    return Measurement(worst, 0.02)


def _stationarity(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = Measurement(0.0, 1.0)
    for attention in (*POINTWISE, "softmax"):
        point = random_point(rng, queries=2, attention=attention)
        worst = max(worst, _stationarity_at(formula, point), key=lambda m: m.error)
    return worst


def _stationarity_at(formula: Formula, point: Point) -> Measurement:
    """The rate of E[g x] by differences along the flow of w, under cross-entropy."""
    setting = reference.draw_setting(point, point["attention"], drive="labels")
    x, share = np.asarray(setting.samples.x), np.asarray(setting.samples.probability)
    labels = np.eye(setting.samples.nodes)[np.asarray(setting.samples.labels)]

    def means(at: reference.Setting) -> Any:
        h = reference.outputs(at)
        e = np.exp(h - np.max(h, axis=1, keepdims=True))
        return x.T @ (share[:, None] * (labels - e / e.sum(axis=1, keepdims=True)))

    f = reference.inputs(setting)
    rate = reference.rates(setting)
    # So short that no pre-activation changes by more than about 1e-3.
    h = 1e-3 / max(1.0, float(np.max(np.abs(f) @ np.abs(setting.w))))
    h /= max(
        float(np.max(np.abs(rate.w)) / np.max(np.abs(setting.w))),
        float(np.max(np.abs(rate.z)) / setting.block.tau),
        float(np.max(np.abs(f) @ np.abs(rate.w))),
        1e-30,
    )
    around = [setting.moved(rate, s * h) for s in (-2, -1, 1, 2)]
    if not setting.block.phi.smooth:
        slopes = [reference.slopes_of(one) for one in around]
        if not all(np.array_equal(slopes[0], one) for one in slopes):
            raise JomaError("a node switches within the difference")
    back_two, back, ahead, ahead_two = (means(one) for one in around)
    found = (8 * (ahead - back) - (ahead_two - back_two)) / (12 * h)
    by_formula = formula(setting.block, setting.samples, setting.state)
    size = 1e-6 * float(np.max(np.abs(found))) + 1e-13 * float(np.max(x)) / h
    return Measurement(float(np.max(np.abs(found - by_formula))), size)


_ANY_POINTWISE = Choice(*POINTWISE)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="eqn2",
        title="the training dynamics are the gradient of the per-node loss (Eqn 9)",
        source="JoMA preprint, Eqns 1-2, 9",
        method="differences of the objective in w; 4 attentions × 5 activations, gradients or "
        "labels, orthonormal or any embeddings, 2 queries",
        derived=velocity,
        measure=_gradient,
        search=Search(
            reference.parameters(
                attention=Choice(*POINTWISE, "softmax"),
                embeddings=Choice("orthonormal", "apart", "any"),
            ),
            _gradient_at,
        ),
    ),
    Claim(
        id="assumption1-rate",
        title="under cross-entropy E[g_k x] moves, at the rate -E[x Σ_j (p_k δ_kj - p_k p_j) ḣ_j]",
        source="new",
        method="differences along the flow of w, 4 attentions; Assumption 1 takes it as 0",
        derived=stationarity.rate,
        measure=_stationarity,
        search=Search(
            reference.parameters("drive", attention=Choice(*POINTWISE, "softmax")),
            _stationarity_at,
        ),
    ),
    Claim(
        id="thm1-linear",
        title="linear attention conserves z² - Σ v²",
        source="JoMA preprint, Theorem 1",
        method="drift along the full block's flow (DOP853, 1e-12)",
        derived=_linear_law,
        measure=_law(Block("linear", "tanh"), Block("linear", "tanh", tau=0.5)),
        condition="one query is trained, and η_Z = η_W",
        without=_each_fails(
            _law(Block("linear", "tanh", eta_w=0.7, eta_z=1.3)),
            _one_query_law(Block("linear", "tanh")),
        ),
        search=Search(
            reference.parameters("queries", "eta_z"),
            reference.law_measure(("linear",), queries=1, eta_z=lambda it: it["eta_w"]),
        ),
    ),
    Claim(
        id="thm1-exp",
        title="exp attention conserves z - ½ Σ v²",
        source="JoMA preprint, Theorem 1",
        method="drift along the full block's flow (DOP853, 1e-12)",
        derived=_exp_law,
        measure=_law(Block("exp", "tanh"), Block("exp", "tanh", eta_w=1.5, eta_z=0.75, tau=0.5)),
        condition="one query is trained, and η_Z = τ η_W",
        without=_each_fails(
            _law(Block("exp", "tanh", eta_w=0.7, eta_z=1.3)),
            _law(Block("exp", "tanh", tau=0.5)),
            _one_query_law(Block("exp", "tanh")),
        ),
        search=Search(
            reference.parameters("queries", "eta_z"),
            reference.law_measure(("exp",), queries=1, eta_z=lambda it: it["eta_w"] * it["tau"]),
        ),
    ),
    Claim(
        id="thm1-rates",
        title="there is a law at any learning rates: H(z) - (η_Z/2η_W) Σ v²; linear ½z², exp z",
        source="talk, JoMA dynamics; the factor is ours",
        method="drift along the full block's flow, η_W = .7, η_Z = 1.3",
        derived=invariants.conserved_pointwise,
        measure=_law(
            Block("linear", "tanh", eta_w=0.7, eta_z=1.3),
            Block("exp", "tanh", eta_w=0.7, eta_z=1.3),
        ),
        search=Search(
            reference.parameters("queries", "tau", attention=Choice("linear", "exp")),
            reference.law_measure(("linear", "exp"), queries=1, tau=1.0),
        ),
    ),
    Claim(
        id="thm1-pointwise",
        title="any pointwise attention at any τ conserves τ²H(z/τ) - (η_Z/2η_W) Σ v², H = ∫σ/σ′",
        source="JoMA preprint, Eqn 14; rates and τ are ours",
        method="drift with linear, exp and sigmoid attention, η_W = .7, η_Z = 1.3, τ = .5",
        derived=invariants.conserved_pointwise,
        measure=_law(
            *(
                Block(attention, "tanh", eta_w=0.7, eta_z=1.3, tau=0.5)
                for attention in ("linear", "exp", "sigmoid")
            )
        ),
        search=Search(
            reference.parameters("queries", attention=_ANY_POINTWISE),
            reference.law_measure(POINTWISE, queries=1),
        ),
    ),
    Claim(
        id="thm1-loss",
        title="the laws do not use Assumption 1: they hold under cross-entropy as well",
        source="JoMA preprint, Theorem 1 (proof)",
        method="drift with labels, linear, exp and sigmoid attention",
        derived=invariants.conserved_pointwise,
        measure=_law(
            *(
                Block(attention, "tanh", eta_w=0.7, eta_z=1.3, tau=0.5)
                for attention in ("linear", "exp", "sigmoid")
            ),
            labels=True,
        ),
        search=Search(
            reference.parameters("drive", attention=_ANY_POINTWISE),
            reference.law_measure(POINTWISE, drive="labels"),
        ),
    ),
    Claim(
        id="thm1-queries",
        title="with many queries the law is one sum: Σ_m τ²H(z_m/τ) - (η_Z/2η_W) Σ v²",
        source="new",
        method="drift along the flow of a block with three queries",
        derived=invariants.conserved_pointwise,
        measure=_law(Block("exp", "tanh", eta_w=0.7, eta_z=1.3, tau=0.5), queries=3),
        search=Search(
            reference.parameters(attention=_ANY_POINTWISE), reference.law_measure(POINTWISE)
        ),
    ),
    Claim(
        id="thm1-embeddings",
        title="any embeddings conserve Σ_ml τ²H(z_ml/τ) - (η_Z/2η_W) Σ_k v_kᵀG⁺v_k, G = U_CᵀU_C",
        source="new",
        method="drift, 9 tokens in 5 dimensions, 3 queries; and of each of two orthogonal groups",
        derived=invariants.conserved_total,
        measure=_law_of_embeddings,
        condition="no token has a part along a query, U_Cᵀu_m = 0",
        without=_law_of_embeddings_along_a_query,
        search=Search(
            reference.parameters(attention=_ANY_POINTWISE),
            reference.law_measure(POINTWISE, embeddings="apart"),
        ),
    ),
    Claim(
        id="thm1-softmax-sum",
        title="softmax does not see a shift of its logits, so Σ_l z_l stays",
        source="JoMA preprint, L = diag(b) - b bᵀ before Eqn 15",
        method="drift along the full block's flow (DOP853, 1e-12)",
        derived=_sum_of_logits,
        measure=_law(Block("softmax", "tanh", eta_w=0.7, eta_z=1.3, tau=0.5)),
        search=Search(
            reference.parameters("queries"), reference.law_measure(("softmax",), queries=1)
        ),
    ),
    Claim(
        id="thm1-softmax",
        title="softmax attention: z = ½ Σ_k (v_k² - ‖v_k‖² b̄) + c, to first order in Δz",
        source="JoMA preprint, Theorem 1, Eqn 18",
        method="order of the error in the motion of z, which goes from .01 to .1; samples alike",
        derived=invariants.softmax_logits,
        measure=_eqn_18,
        condition="Σ_k E[g_k h′_k b bᵀ] v_k = b̄ Σ_k E[g_k h′_k b]ᵀ v_k; b̄ constant to that order",
        without=_eqn_18_apart,
        search=Search(reference.parameters("queries", reach=Real(1e-3, 4.0, log=True)), _eqn_18_at),
    ),
    Claim(
        id="thm1-softmax-condition",
        title="the softmax law's condition must weigh each node by its v_k",
        source="JoMA preprint, Theorem 1",
        method="32 random blocks: does the condition tell where Eqn 17 holds?",
        derived=_condition_with_weights,
        printed=_condition_as_printed,
        measure=_softmax_condition,
        search=Search(
            {
                "case": Choice(0, 1, 2, 3),
                "samples": Integer(1, 12),
                "tokens": Integer(1, 8),
                "draw": Seed(),
            },
            _softmax_condition_at,
        ),
    ),
    Claim(
        id="thm1-softmax-rate",
        title="ż = (η_Z/η_Wτ) Σ_k (v_k∘v̇_k - b̄ v_k·v̇_k) - (η_Z/τ)Cov(b, Σ_k g_k h′_k v_k·b)",
        source="new",
        method="rates of a block written once more in w; gradients and labels",
        derived=memory.covariance,
        measure=_softmax_rate,
        search=Search(reference.parameters("queries"), _softmax_rate_at),
    ),
    Claim(
        id="thm1-softmax-memory",
        title="softmax with memory: z = z₀ + (η_Z/η_Wτ)(½ Σ_k Δv_k² - ∫ b̄(z) d½‖V‖²)",
        source="new",
        method="Runge-Kutta flow in w in which z moves by up to 3τ",
        derived=memory.logits,
        measure=_memory(alike=True),
        condition="all samples have the same frequencies",
        without=_memory(alike=False),
        search=Search(reference.parameters("queries", reach=Real(1e-3, 4.0, log=True)), _memory_at),
    ),
    Claim(
        id="thm1-softmax-gap",
        title="z stays within ∫ (η_Z/τ)‖Cov(b, s)‖ dt of the law with memory while ‖V‖ grows;"
        " attained on short paths",
        source="new",
        method="Runge-Kutta flow in w in which z moves by up to 3τ, samples differ",
        derived=memory.gap_bound,
        measure=_gap,
        search=Search(reference.parameters("queries", reach=Real(1e-3, 4.0, log=True)), _gap_at),
    ),
    Claim(
        id="thm1-descent",
        title="gradient descent leaves the exp law by exactly -(η_Z/2η_W) Σ_steps Σ_k (δv_k)²",
        source="new",
        method="30 gradient steps, ReLU at unit rates and tanh at others with 3 queries",
        derived=invariants.descent_drift,
        measure=_descent,
        search=Search(
            reference.parameters(step=Real(1e-4, 0.5, log=True), steps=Integer(1, 12)),
            _descent_at,
        ),
    ),
    Claim(
        id="thm1-descent-order",
        title="that drift is first order in the step",
        source="new",
        method="three step sizes, each half of the last, tanh and ReLU",
        derived=lambda: 1.0,
        measure=_descent_order,
        fixed="an order in the limit of small steps; thm1-descent has the drift itself",
    ),
)

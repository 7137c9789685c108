"""Joint dynamics of MLP and attention: Eqns 2 and 9, Theorem 1, its laws, and softmax."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import (
    ClaimMeasurement,
    Formula,
    Generator,
    Point,
    claim,
    largest_error,
    measured,
    smallest_error,
    without,
)
from joma.experiments.claims.reference import block as reference
from joma.experiments.claims.reference.block import (
    POINTWISE,
    random_point,
    random_samples,
    random_start,
)
from joma.experiments.claims.reference.ode import five_point
from joma.theory import invariants, memory, stationarity
from joma.theory.block import Block, Samples, State, Trajectory, simulate, velocity

_ATTENTIONS = (*POINTWISE, "softmax")


def gradient_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Against rates written independently and, where no node switches, against differences."""
    setting = reference.draw_setting(point, point["attention"], point["embeddings"])
    rate, own = formula(setting.block, setting.samples, setting.state), reference.rates(setting)
    m, block = setting.samples.tokens, setting.block
    f, pull = reference.node_gradients(setting)
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
    # So that no pre-activation changes by more than about 1e-4.
    h = 1e-4 / setting.speed(move) / max(1.0, size)
    around = [setting.moved(move, s * h) for s in (-2, -1, 1, 2)]
    slopes = [reference.slopes_of(one) for one in (setting, *around)]
    if block.phi.smooth or all(np.array_equal(slopes[0], one) for one in slopes):
        slope = five_point((reference.objective(one) for one in around), h)
        by_rates = (
            np.sum(toward * np.concatenate([rate.v, rate.bias])) / block.eta_w
            + np.sum(move.z * rate.z) / block.eta_z
        )
        scale = np.sum(np.abs(toward) * sizes) / block.eta_w
        scale += np.sum(np.abs(move.z)) * z_size / block.eta_z
        h_size = np.abs(f) @ np.abs(setting.w) + 1
        rounding = 1e-14 * (np.sum(np.asarray(setting.samples.probability) @ h_size) + 1) / h
        errors.append(abs(slope - by_rates) / (1e-5 * scale + 10 * rounding))
    return measured(errors, 1.0)


@claim("eqn2", velocity)
def _gradient(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Differences of the objective in w: every attention and activation, labels, embeddings."""
    data = (
        {"drive": "gradient", "embeddings": "orthonormal"},
        {"drive": "labels", "embeddings": "any"},
    )
    cases = product(_ATTENTIONS, reference.PHI, data)
    points = (random_point(rng, queries=2, attention=a, activation=b, **c) for a, b, c in cases)
    return largest_error(gradient_at(formula, point) for point in points)


def stationarity_at(formula: Formula, point: Point) -> ClaimMeasurement:
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
    h /= max(setting.speed(rate), float(np.max(np.abs(f) @ np.abs(rate.w))), 1e-30)
    around = [setting.moved(rate, s * h) for s in (-2, -1, 1, 2)]
    if not setting.block.phi.smooth:
        slopes = [reference.slopes_of(one) for one in around]
        if not all(np.array_equal(slopes[0], one) for one in slopes):
            raise JomaError("a node switches within the difference")
    found = five_point((means(one) for one in around), h)
    by_formula = formula(setting.block, setting.samples, setting.state)
    size = 1e-6 * float(np.max(np.abs(found))) + 1e-13 * float(np.max(x)) / h
    return measured(np.abs(found - by_formula), size)


@claim("assumption1-rate", stationarity.rate)
def _stationarity(formula: Formula, rng: Generator) -> ClaimMeasurement:
    points = (random_point(rng, queries=2, attention=one) for one in _ATTENTIONS)
    return largest_error(stationarity_at(formula, point) for point in points)


_RATES: dict[str, Any] = {"eta_w": 0.7, "eta_z": 1.3}


def _trajectory(
    block: Block, rng: Generator, *, queries: int = 1, labels: bool = False
) -> Trajectory:
    samples = random_samples(rng, queries=queries)
    if labels:
        samples = Samples(samples.x, labels=np.arange(40) % 3, query=samples.query)
    start = random_start(samples, rng, 1.0 if block.sigma.name == "linear" else 0.0)
    return simulate(block, samples, np.linspace(0, 0.5, 6), initial=start)


def _drift(quantity: Any) -> ClaimMeasurement:
    return measured(np.abs(quantity - quantity[0]), 1e-9)


def _linear_law(block: Block, v: Any, z: Any) -> Any:
    """The law z² - Σ v², as printed for equal rates."""
    return z**2 - np.sum(v**2, axis=-1)


def _exp_law(block: Block, v: Any, z: Any) -> Any:
    """The law z - ½ Σ v², as printed for equal rates."""
    return z - np.sum(v**2, axis=-1) / 2


@without("thm1-embeddings")
def _law_of_embeddings_along_a_query(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The same where all tokens have a part along the query."""
    path = _embedded("exp", rng, groups=1, queries=1, along=0.3)
    assert path.block.embeddings is not None
    without_query = path.block.embeddings.copy()
    without_query[:, 9:] = 0
    return _drift(formula(replace(path.block, embeddings=without_query), path.v, path.z))


def _embedded(
    attention: str, rng: Generator, *, groups: int, queries: int, along: float = 0.0
) -> Trajectory:
    """A block whose nine tokens share five dimensions per group, with a part along queries."""
    dimension, tokens, samples = 5, 9, 20
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
    block = Block(attention, "tanh", **_RATES, tau=0.6, embeddings=columns)
    w = 0.3 * rng.normal(size=(d, 3))
    logits = (1.0 if attention == "linear" else 0.0) + 0.3 * rng.normal(size=(queries, tokens))
    start = State(columns[:, :tokens].T @ w, logits, columns[:, tokens:].T @ w)
    return simulate(block, data, np.linspace(0, 0.3, 5), initial=start)


@claim("thm1-embeddings", invariants.conserved_total)
def _law_of_embeddings(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Nine tokens in five dimensions, three queries; then two groups of them in ten."""
    drifts = []
    for attention in POINTWISE:
        path = _embedded(attention, rng, groups=1, queries=3)
        drifts.append(_drift(formula(path.block, path.v, path.z)))
        path = _embedded(attention, rng, groups=2, queries=3)
        drifts.append(_drift(formula(path.block, path.v, path.z, groups=np.arange(9) % 2)))
    return largest_error(drifts)


_LAW = invariants.conserved_pointwise
_POINTWISE = [Block(attention, "tanh", **_RATES, tau=0.5) for attention in POINTWISE]
_LINEAR, _EXP = Block("linear", "tanh"), Block("exp", "tanh")
_ODD_LINEAR, _ODD_EXP = replace(_LINEAR, **_RATES), replace(_EXP, **_RATES)


@claim("thm1-linear", _linear_law, blocks=(_LINEAR, replace(_LINEAR, tau=0.5)))
@claim(
    "thm1-exp",
    _exp_law,
    blocks=(_EXP, replace(_EXP, eta_w=1.5, eta_z=0.75, tau=0.5)),
)
@claim(
    "thm1-rates",
    _LAW,
    blocks=(_ODD_LINEAR, _ODD_EXP),
)
@claim("thm1-pointwise", _LAW, blocks=_POINTWISE)
@claim("thm1-loss", _LAW, blocks=_POINTWISE, labels=True)
@claim("thm1-queries", _LAW, blocks=[replace(_ODD_EXP, tau=0.5)], queries=3)
@claim(
    "thm1-softmax-sum",
    lambda block, v, z: np.sum(z, axis=-1),
    blocks=[Block("softmax", "tanh", **_RATES, tau=0.5)],
)
def _law(
    formula: Formula, rng: Generator, *, blocks: Sequence[Block], **data: Any
) -> ClaimMeasurement:
    """The drift of formula(block, v, z) along the flow of each block."""
    paths = (_trajectory(block, rng, **data) for block in blocks)
    return largest_error(_drift(formula(path.block, path.v, path.z)) for path in paths)


@without("thm1-linear", equal=_LINEAR, others=[_ODD_LINEAR])
@without("thm1-exp", equal=_EXP, others=[_ODD_EXP, replace(_EXP, tau=0.5)])
def _law_of_others(
    formula: Formula, rng: Generator, *, equal: Block, others: Sequence[Block]
) -> ClaimMeasurement:
    """The least drift at other rates, and of one query where three are trained: all must fail."""
    drifts = [_law(formula, rng, blocks=[block]) for block in others]
    path = _trajectory(equal, rng, queries=3)
    return smallest_error([*drifts, _drift(formula(equal, path.v, path.z[:, 0]))])


@claim("thm1-descent", invariants.descent_drift)
def _descent(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The law's change over thirty gradient steps against a formula of the weights' steps."""
    worst = 0.0
    for block in (Block("exp", "relu"), Block("exp", "tanh", eta_w=0.7, eta_z=1.3, tau=0.5)):
        samples = random_samples(rng, queries=1 if block.tau == 1 else 3)
        t, start = np.arange(0, 31) * 0.02, random_start(samples, rng)
        path = simulate(block, samples, t, initial=start, descent_step=0.02)
        quantity = invariants.conserved_pointwise(block, path.v, path.z)
        difference = quantity[-1] - quantity[0] - formula(path.v, block)
        worst = max(worst, float(np.max(np.abs(difference))))
    return ClaimMeasurement(worst, 1e-13)


@claim("thm1-descent-order", lambda: 1.0)
def _descent_order(formula: Formula, rng: Generator) -> ClaimMeasurement:
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
    return ClaimMeasurement(worst, 0.02)


def _mean_scores(setting: reference.Setting) -> Any:
    return np.asarray(setting.samples.probability) @ reference.attention_scores(setting)


@claim("thm1-softmax", invariants.softmax_logits, alike=True)
@without("thm1-softmax", alike=False)
def _eqn_18(formula: Formula, rng: Generator, *, alike: bool) -> ClaimMeasurement:
    """How far the order of the error in the motion of z falls short of two.

    If the samples are not alike, the covariance counts.
    """
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
    return measured(max(2 - order, 0.0), 0.1)


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


def softmax_condition_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Compare a condition with whether Eqn 17 holds."""
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
    return measured(bool(formula(g, b, v)) != holds, 0.0)


@claim(
    "thm1-softmax-condition",
    _condition_with_weights,
    printed=_condition_as_printed,
)
def _softmax_condition(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Does the condition tell where Eqn 17, the rate of z from the rates of v, holds?"""
    sizes = {"samples": 7, "tokens": 5}
    cases = ({**sizes, "case": case % 4, "draw": int(rng.integers(2**32))} for case in range(32))
    return measured(np.mean([softmax_condition_at(formula, one).error for one in cases]), 0.0)


def softmax_rate_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The rate of the logits against the law's and a formula of what it leaves out."""
    setting = reference.draw_setting(point, "softmax", queries=1)
    left_out = formula(setting.block, setting.samples, setting.state)
    size = np.sum(reference.rate_sizes(setting)) / setting.block.tau
    return measured(np.abs(_left_out(setting) - left_out), 1e-9 * float(size) + 1e-300)


@claim("thm1-softmax-rate", memory.covariance)
def _softmax_rate(formula: Formula, rng: Generator) -> ClaimMeasurement:
    drives = ("gradient", "labels")
    return largest_error(softmax_rate_at(formula, random_point(rng, drive=one)) for one in drives)


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


def _memory_of(formula: Formula, point: Point, *, alike: bool = True) -> ClaimMeasurement:
    setting = reference.draw_setting(point, "softmax", queries=1, alike=alike)
    path, predicted = _remembered(formula, setting, point["reach"], 5 + int(5 * point["reach"]))
    tolerance = (1 + point["reach"]) * _motion(path) + _rounding(path)
    return measured(np.abs(predicted - path.z[::2]), tolerance)


@claim("thm1-softmax-memory", memory.logits, alike=True)
@without("thm1-softmax-memory", alike=False)
def _memory(formula: Formula, rng: Generator, *, alike: bool) -> ClaimMeasurement:
    drives = ("gradient", "labels")
    points = (random_point(rng, drive=one, reach=2.0, alike=alike) for one in drives)
    return largest_error(_memory_of(formula, point, alike=alike) for point in points)


def _motion(path: Trajectory) -> float:
    """What counts as zero next to the motion of z: a path with switches has only second order."""
    share = 1e-4 if path.block.phi.smooth else 1e-3
    return share * (float(np.max(np.abs(path.z - path.z[0]))) + path.block.tau)


def _rounding(path: Trajectory) -> float:
    """What the rounding of the weights is worth in the logits."""
    block = path.block
    squares = float(np.max(np.sum(path.v**2, axis=(1, 2))))
    return 1e-14 * block.eta_z / (block.eta_w * block.tau) * squares * len(path.t)


def _gap_at(formula: Formula, point: Point) -> ClaimMeasurement:
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
    return measured(gap / allowed[::2], 1.0)


@claim("thm1-softmax-gap", memory.gap_bound)
def _gap(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """By how much z leaves the bound; and how far below it stays where the path is short."""
    points = (random_point(rng, drive=drive, reach=2.0) for drive in ("gradient", "labels"))
    worst = max(_gap_at(formula, point).error - 1 for point in points)
    path, predicted = _remembered(
        memory.logits, reference.draw_setting(random_point(rng), "softmax"), 1e-3, 10
    )
    attained = np.linalg.norm(predicted[-1] - path.z[-1]) / formula(path)[-1]
    return measured(max(worst, abs(1 - attained)), 0.01)

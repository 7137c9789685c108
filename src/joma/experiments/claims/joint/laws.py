"""Theorem 1 for pointwise attention: what training conserves, and gradient descent leaves."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, without
from joma.experiments.claims.measurement import (
    ClaimMeasurement,
    largest_error,
    measured,
    smallest_error,
)
from joma.experiments.claims.reference import block as reference
from joma.experiments.claims.reference.block import (
    POINTWISE,
    law_search,
    random_samples,
    random_start,
)
from joma.experiments.claims.search import Integer, Real
from joma.theory import invariants
from joma.theory.block import Block, Samples, State, Trajectory, simulate

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


@claim("thm1-embeddings", invariants.conserved_total, law_search(*POINTWISE, embeddings="apart"))
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
_EQUAL = law_search("linear", queries=1, eta_z=lambda it: it["eta_w"])
_IN_TAU = law_search("exp", queries=1, eta_z=lambda it: it["eta_w"] * it["tau"])
_LINEAR, _EXP = Block("linear", "tanh"), Block("exp", "tanh")
_ODD_LINEAR, _ODD_EXP = replace(_LINEAR, **_RATES), replace(_EXP, **_RATES)


@claim("thm1-linear", _linear_law, _EQUAL, blocks=(_LINEAR, replace(_LINEAR, tau=0.5)))
@claim(
    "thm1-exp",
    _exp_law,
    _IN_TAU,
    blocks=(_EXP, replace(_EXP, eta_w=1.5, eta_z=0.75, tau=0.5)),
)
@claim(
    "thm1-rates",
    _LAW,
    law_search("linear", "exp", queries=1, tau=1.0),
    blocks=(_ODD_LINEAR, _ODD_EXP),
)
@claim("thm1-pointwise", _LAW, law_search(*POINTWISE, queries=1), blocks=_POINTWISE)
@claim("thm1-loss", _LAW, law_search(*POINTWISE, drive="labels"), blocks=_POINTWISE, labels=True)
@claim("thm1-queries", _LAW, law_search(*POINTWISE), blocks=[replace(_ODD_EXP, tau=0.5)], queries=3)
@claim(
    "thm1-softmax-sum",
    lambda block, v, z: np.sum(z, axis=-1),
    law_search("softmax", queries=1),
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


@reference.over_blocks(step=Real(1e-4, 0.5, log=True), steps=Integer(1, 12))
def _descent_at(formula: Formula, point: Point) -> ClaimMeasurement:
    setting = reference.draw_setting(point, "exp")
    rate = reference.rates(setting)
    step = point["step"] / max(setting.speed(rate), 1e-30)
    path = reference.descend(setting, step, point["steps"])
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
    return measured(np.abs(change), rounding + 1e-300)


@claim("thm1-descent", invariants.descent_drift, _descent_at)
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

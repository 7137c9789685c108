"""Theorem 1 for pointwise attention: what training conserves."""

from dataclasses import replace
from typing import Any

import numpy as np

from joma.experiments.claims.claim import Measure, claim
from joma.experiments.claims.measurement import (
    ClaimMeasurement,
    Formula,
    largest_error,
    measured,
    smallest_error,
)
from joma.experiments.claims.reference.block import (
    POINTWISE,
    law_search,
    random_samples,
    random_start,
)
from joma.theory import invariants
from joma.theory.block import Block, Samples, State, Trajectory, simulate

_RATES: dict[str, Any] = {"eta_w": 0.7, "eta_z": 1.3}


def _trajectory(
    block: Block, rng: np.random.Generator, *, queries: int = 1, labels: bool = False
) -> Trajectory:
    samples = random_samples(rng, queries=queries)
    if labels:
        samples = Samples(samples.x, labels=np.arange(40) % 3, query=samples.query)
    start = random_start(samples, rng, 1.0 if block.sigma.name == "linear" else 0.0)
    return simulate(block, samples, np.linspace(0, 0.5, 6), initial=start)


def _drift(quantity: Any) -> ClaimMeasurement:
    return measured(np.abs(quantity - quantity[0]), 1e-9)


def _law(*blocks: Block, queries: int = 1, labels: bool = False) -> Measure:
    """The drift of formula(block, v, z) along the flow of each block."""

    def measure(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
        paths = (_trajectory(block, rng, queries=queries, labels=labels) for block in blocks)
        return largest_error(_drift(formula(path.block, path.v, path.z)) for path in paths)

    return measure


def _each_fails(*measures: Measure) -> Measure:
    """The least drift of several cases, so that all of them must fail."""

    def measure(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
        return smallest_error(one(formula, rng) for one in measures)

    return measure


def _one_query_law(block: Block) -> Measure:
    """The law of a single query, where three are trained at once."""

    def measure(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
        path = _trajectory(block, rng, queries=3)
        return _drift(formula(block, path.v, path.z[:, 0]))

    return measure


def _linear_law(block: Block, v: Any, z: Any) -> Any:
    """The law z² - Σ v², as printed for equal rates."""
    return z**2 - np.sum(v**2, axis=-1)


def _exp_law(block: Block, v: Any, z: Any) -> Any:
    """The law z - ½ Σ v², as printed for equal rates."""
    return z - np.sum(v**2, axis=-1) / 2


def _sum_of_logits(block: Block, v: Any, z: Any) -> Any:
    return np.sum(z, axis=-1)


def _law_of_embeddings_along_a_query(
    formula: Formula, rng: np.random.Generator
) -> ClaimMeasurement:
    """The same where all tokens have a part along the query."""
    path = _embedded("exp", rng, groups=1, queries=1, along=0.3)
    assert path.block.embeddings is not None
    without_query = path.block.embeddings.copy()
    without_query[:, 9:] = 0
    return _drift(formula(replace(path.block, embeddings=without_query), path.v, path.z))


def _embedded(
    attention: str, rng: np.random.Generator, *, groups: int, queries: int, along: float = 0.0
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


@claim(
    "thm1-embeddings",
    invariants.conserved_total,
    law_search(*POINTWISE, embeddings="apart"),
    without=_law_of_embeddings_along_a_query,
)
def _law_of_embeddings(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    """Nine tokens in five dimensions, three queries; then two groups of them in ten."""
    drifts = []
    for attention in POINTWISE:
        path = _embedded(attention, rng, groups=1, queries=3)
        drifts.append(_drift(formula(path.block, path.v, path.z)))
        path = _embedded(attention, rng, groups=2, queries=3)
        drifts.append(_drift(formula(path.block, path.v, path.z, groups=np.arange(9) % 2)))
    return largest_error(drifts)


_POINTWISE = [Block(attention, "tanh", **_RATES, tau=0.5) for attention in POINTWISE]

claim(
    "thm1-linear",
    _linear_law,
    law_search("linear", queries=1, eta_z=lambda it: it["eta_w"]),
    without=_each_fails(
        _law(Block("linear", "tanh", **_RATES)), _one_query_law(Block("linear", "tanh"))
    ),
)(_law(Block("linear", "tanh"), Block("linear", "tanh", tau=0.5)))
claim(
    "thm1-exp",
    _exp_law,
    law_search("exp", queries=1, eta_z=lambda it: it["eta_w"] * it["tau"]),
    without=_each_fails(
        _law(Block("exp", "tanh", **_RATES)),
        _law(Block("exp", "tanh", tau=0.5)),
        _one_query_law(Block("exp", "tanh")),
    ),
)(_law(Block("exp", "tanh"), Block("exp", "tanh", eta_w=1.5, eta_z=0.75, tau=0.5)))
_LAW = invariants.conserved_pointwise
claim("thm1-rates", _LAW, law_search("linear", "exp", queries=1, tau=1.0))(
    _law(Block("linear", "tanh", **_RATES), Block("exp", "tanh", **_RATES))
)
claim("thm1-pointwise", _LAW, law_search(*POINTWISE, queries=1))(_law(*_POINTWISE))
claim("thm1-loss", _LAW, law_search(*POINTWISE, drive="labels"))(_law(*_POINTWISE, labels=True))
claim("thm1-queries", _LAW, law_search(*POINTWISE))(
    _law(Block("exp", "tanh", **_RATES, tau=0.5), queries=3)
)
claim("thm1-softmax-sum", _sum_of_logits, law_search("softmax", queries=1))(
    _law(Block("softmax", "tanh", **_RATES, tau=0.5))
)

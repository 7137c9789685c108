"""Theorem 1 for pointwise attention: what training conserves."""

from dataclasses import replace
from typing import Any

import numpy as np

from joma.experiments.claims.claim import Claim, Measure
from joma.experiments.claims.measurement import (
    ClaimMeasurement,
    Formula,
    largest_error,
    measured,
    smallest_error,
)
from joma.experiments.claims.reference import block as reference
from joma.experiments.claims.reference.block import POINTWISE, random_samples, random_start
from joma.experiments.claims.search import Choice, Search
from joma.theory import invariants
from joma.theory.block import Block, Samples, State, Trajectory, simulate


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


def _law_of_embeddings(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    """Nine tokens in five dimensions, three queries; then two groups of them in ten."""
    drifts = []
    for attention in POINTWISE:
        path = _embedded(attention, rng, groups=1, queries=3)
        drifts.append(_drift(formula(path.block, path.v, path.z)))
        path = _embedded(attention, rng, groups=2, queries=3)
        drifts.append(_drift(formula(path.block, path.v, path.z, groups=np.arange(9) % 2)))
    return largest_error(drifts)


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
    block = Block(attention, "tanh", eta_w=0.7, eta_z=1.3, tau=0.6, embeddings=columns)
    w = 0.3 * rng.normal(size=(d, 3))
    logits = (1.0 if attention == "linear" else 0.0) + 0.3 * rng.normal(size=(queries, tokens))
    start = State(columns[:, :tokens].T @ w, logits, columns[:, tokens:].T @ w)
    return simulate(block, data, np.linspace(0, 0.3, 5), initial=start)


_ANY_POINTWISE = Choice(*POINTWISE)


CLAIMS: tuple[Claim, ...] = (
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
)

"""Section 7 and A.4: almost orthogonal embeddings, the implicit bias, several patterns in one."""

import math
from itertools import product
from typing import Any

import numpy as np
from scipy import stats

from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import (
    ClaimMeasurement,
    difference,
    largest_error,
    measured,
    monte_carlo,
)
from joma.experiments.claims.reference import block as reference
from joma.experiments.claims.reference.block import POINTWISE, random_point, random_samples
from joma.experiments.claims.reference.ode import solve
from joma.experiments.claims.search import Choice, Integer, Real, Seed, Vector
from joma.theory import as_printed as printed
from joma.theory import embeddings, invariants
from joma.theory.block import Block, State, simulate


@over(epsilon=Real(0.01, 0.999, log=True), tokens=Real(2.0, 1e60, log=True))
def _coherence_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Whether M² pairs exceed ε less often than M⁻², and for small ε not much less often."""
    epsilon, tokens = point["epsilon"], point["tokens"]
    d = math.ceil(formula(epsilon, tokens))
    # (u·u′)² has the beta distribution (½, (d - 1)/2).
    log_above = float(stats.beta.logsf(epsilon**2, 0.5, (d - 1) / 2)) if d > 1 else 0.0
    log_tokens = math.log(tokens)
    exponent = -(log_above + 2 * log_tokens - math.log(2)) / log_tokens
    short = 2 - exponent
    if epsilon <= 0.1:
        tail = math.log(2) + math.log(4 * math.pi * log_tokens) / 2 + 0.1
        tail = (tail - math.log1p(-1 / (8 * log_tokens))) / log_tokens
        short = max(short, exponent - 2 - tail - 4 * epsilon**2)
    return ClaimMeasurement(short, 0.0)


@claim("sec7-coherence", embeddings.dimension_for, _coherence_at)
def _coherence(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Random unit vectors in fewer dimensions than vectors; and the exponent of M, both sides."""
    excess = [
        embeddings.coherence(
            embeddings.almost_orthogonal(tokens, int(np.ceil(formula(eps, tokens))), rng)
        )
        / eps
        - 1
        for tokens, eps in ((500, 0.5), (1000, 0.45), (2000, 0.5))
    ]
    exponents = [
        _coherence_at(formula, Point({"epsilon": eps, "tokens": tokens})).error
        for eps, tokens in ((0.01, 1e50), (0.05, 1e20), (0.5, 1e3))
    ]
    return measured(max(0.0, *excess, *exponents), 0.0)


@over(
    epsilon=Real(0.01, 0.99),
    tokens=Integer(2, 150, log=True),
    dimension=Integer(2, 100, log=True),
    sampled=True,
)
def _overlaps_at(formula: Formula, point: Point) -> ClaimMeasurement:
    epsilon, tokens, d = point["epsilon"], point["tokens"], point["dimension"]
    rng, total = point.generator, 0
    for _ in range(point.effort):
        columns = rng.normal(size=(d, tokens))
        columns /= np.linalg.norm(columns, axis=0)
        gram = np.abs(columns.T @ columns)
        total += int(np.sum(np.triu(gram > epsilon, 1)))
    pairs = tokens * (tokens - 1) / 2 * point.effort
    expected = float(formula(epsilon, tokens, d)) * point.effort
    # Any two pairs are independent, so the variance is that of independent pairs.
    share = min(max(expected, total, 1.0) / pairs, 1.0)
    return monte_carlo(total - expected, np.sqrt(pairs * share * max(1 - share, 1 / pairs)))


@claim("sec7-overlaps", embeddings.expected_overlaps, _overlaps_at)
def _overlaps(formula: Formula, rng: Generator) -> ClaimMeasurement:
    names, found = ("epsilon", "tokens", "dimension"), []
    for case in ((0.5, 200, 9), (0.2, 300, 40), (0.9, 400, 3), (0.05, 100, 2)):
        point = Point(dict(zip(names, case, strict=True)), seed=int(rng.integers(2**32)))
        found.append(_overlaps_at(formula, point))
    return max(found, key=lambda m: m.error / m.tolerance)


@reference.over_blocks(attention=Choice(*POINTWISE))
def _drift_rate_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The rate of each token's law by differences along the flow of w, against a formula."""
    setting = reference.draw_setting(point, point["attention"], "any")
    rate = formula(setting.block, setting.samples, setting.state)

    def without_drift(at: reference.Setting) -> Any:
        return invariants.conserved_pointwise(at.block, at.state.v[None], at.logits())

    derivative, h = reference.law_derivative(without_drift, setting)
    sizes = reference.law_sizes(setting, h)
    return measured(np.abs(derivative - rate) / sizes, 1.0)


@claim("sec7-drift", invariants.token_law_rate, _drift_rate_at)
def _drift_rate(formula: Formula, rng: Generator) -> ClaimMeasurement:
    cases = product(POINTWISE, ("gradient", "labels"))
    points = (random_point(rng, attention=one, drive=drive, queries=2) for one, drive in cases)
    return largest_error(_drift_rate_at(formula, point) for point in points)


@reference.over_blocks(
    "queries",
    attention=Choice(*POINTWISE, "softmax"),
    step=Real(1e-4, 1.0, log=True),
    steps=Integer(1, 8),
)
def _implicit_bias_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """A few gradient steps of the weights, against their projections put together again."""
    setting = reference.draw_setting(point, point["attention"], queries=1)
    m, moving = setting.samples.tokens, setting
    for _ in range(point["steps"]):
        rate = reference.rates(moving)
        moving = moving.moved(rate, point["step"] / max(moving.speed(rate), 1e-30))
    change = moving.state.v - setting.state.v
    bias = moving.state.bias[0] - setting.state.bias[0]
    tokens, query = setting.columns[:, :m], setting.columns[:, m]
    predicted = formula(setting.w, tokens, change, query, bias)
    size = float(np.max(np.abs(moving.w)) + np.max(np.abs(setting.w)))
    return measured(np.abs(predicted - moving.w), 1e-12 * size)


@claim("eqn60", embeddings.weight, _implicit_bias_at)
def _implicit_bias(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The weights themselves, trained in d dimensions with explicit orthonormal embeddings."""
    samples = random_samples(rng)
    x, g = np.asarray(samples.x), np.asarray(samples.gradient)
    d = 12
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    tokens, query = basis[:, :6], basis[:, 6]
    w0, z0 = 0.3 * rng.normal(size=(d, 3)), 0.3 * rng.normal(size=6)

    def right_side(flat: Any) -> Any:
        w, z = flat[:-6].reshape(d, 3), flat[-6:]
        b = np.exp(z) * x
        f = b @ tokens.T + query
        pull = g * (1 - np.tanh(f @ w) ** 2) / len(x)
        return np.concatenate([(f.T @ pull).ravel(), np.sum(b * (pull @ w.T @ tokens), axis=0)])

    flow = solve(right_side, np.concatenate([w0.ravel(), z0]), 0.5, rtol=1e-11, atol=1e-12)
    start = State(tokens.T @ w0, z0[None], (query @ w0)[None])
    path = simulate(Block("exp", "tanh"), samples, [0.0, 0.5], initial=start)
    predicted = formula(w0, tokens, path.v[1] - path.v[0], query, path.bias[1, 0] - path.bias[0, 0])
    return measured(difference(predicted, flow[:-6].reshape(d, 3)), 1e-8)


@over(tokens=Vector(Real(1, 5), Integer(1, 5)), size=Real(0.0, 100.0, special=(0.0,)), draw=Seed())
def _superposition_at(formula: Formula, point: Point) -> ClaimMeasurement:
    rng = np.random.default_rng(point["draw"])
    counts = np.asarray(point["tokens"]).astype(int)
    patterns = len(counts)
    d = int(np.sum(counts)) + patterns + 1
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0].T
    tokens, queries = np.split(basis, np.cumsum(counts))[:patterns], basis[-1 - patterns : -1]
    biases = -point["size"] * rng.uniform(-0.2, 1, size=patterns)
    templates = [rng.normal(size=count) for count in counts]
    w = formula(np.stack([a @ b for a, b in zip(templates, tokens, strict=True)]), queries, biases)
    errors = []
    for template, own, query, bias in zip(templates, tokens, queries, biases, strict=True):
        b = rng.uniform(0, 1, size=len(own))
        errors.append(abs(w @ (b @ own + query) - template @ b - bias))
    size = 1 + point["size"] + sum(float(np.abs(one).sum()) for one in templates)
    return measured(errors, 1e-13 * size)


@without("superposition")
def _superposition_of_shared_tokens(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Patterns (1, 1) and (1, -1), orthogonal, with both tokens in common; the input is (1, 0)."""
    w = formula(np.array([[1.0, 1, 0, 0], [1, -1, 0, 0]]), np.eye(4)[2:], np.array([-0.5, -0.5]))
    return measured(abs(w @ np.array([1.0, 0, 1, 0]) - (1 - 0.5)), 1e-13)


@claim("superposition", embeddings.superposed, _superposition_at, printed=printed.superposed)
def _superposition(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """One weight, three patterns on disjoint tokens: each must respond as if it were alone."""
    point = Point({"tokens": np.array([4, 4, 4]), "size": 1.0, "draw": int(rng.integers(2**32))})
    return _superposition_at(formula, point)

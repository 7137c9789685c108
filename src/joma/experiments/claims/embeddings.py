"""Section 7 and A.4: almost orthogonal embeddings, the implicit bias, several patterns in one."""

import math
from itertools import product
from typing import Any

import numpy as np
from scipy import stats

from joma.experiments.claims.claim import (
    ClaimMeasurement,
    Formula,
    Generator,
    Point,
    claim,
    difference,
    largest_error,
    measured,
    monte_carlo,
    without,
)
from joma.experiments.claims.reference import block as reference
from joma.experiments.claims.reference.block import POINTWISE, random_point, random_samples
from joma.experiments.claims.reference.ode import solve
from joma.theory import as_printed as printed
from joma.theory import embeddings, invariants
from joma.theory.block import Block, State, simulate


def coherence_at(formula: Formula, point: Point) -> ClaimMeasurement:
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


@claim("sec7-coherence", embeddings.dimension_for)
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
        coherence_at(formula, {"epsilon": eps, "tokens": tokens}).error
        for eps, tokens in ((0.01, 1e50), (0.05, 1e20), (0.5, 1e3))
    ]
    return measured(max(0.0, *excess, *exponents), 0.0)


@claim("sec7-overlaps", embeddings.expected_overlaps)
def _overlaps(formula: Formula, rng: Generator) -> ClaimMeasurement:
    found = []
    for epsilon, tokens, d in ((0.5, 200, 9), (0.2, 300, 40), (0.9, 400, 3), (0.05, 100, 2)):
        columns = np.random.default_rng([int(rng.integers(2**32)), 1]).normal(size=(d, tokens))
        columns /= np.linalg.norm(columns, axis=0)
        total = int(np.sum(np.triu(np.abs(columns.T @ columns) > epsilon, 1)))
        pairs = tokens * (tokens - 1) / 2
        expected = float(formula(epsilon, tokens, d))
        # Any two pairs are independent, so the variance is that of independent pairs.
        share = min(max(expected, total, 1.0) / pairs, 1.0)
        se = np.sqrt(pairs * share * max(1 - share, 1 / pairs))
        found.append(monte_carlo(total - expected, se))
    return max(found, key=lambda m: m.error / m.tolerance)


def drift_rate_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The rate of each token's law by differences along the flow of w, against a formula."""
    setting = reference.draw_setting(point, point["attention"], "any")
    rate = formula(setting.block, setting.samples, setting.state)

    def without_drift(at: reference.Setting) -> Any:
        return invariants.conserved_pointwise(at.block, at.state.v[None], at.logits())

    derivative, h = reference.law_derivative(without_drift, setting)
    sizes = reference.law_sizes(setting, h)
    return measured(np.abs(derivative - rate) / sizes, 1.0)


@claim("sec7-drift", invariants.token_law_rate)
def _drift_rate(formula: Formula, rng: Generator) -> ClaimMeasurement:
    cases = product(POINTWISE, ("gradient", "labels"))
    points = (random_point(rng, attention=one, drive=drive, queries=2) for one, drive in cases)
    return largest_error(drift_rate_at(formula, point) for point in points)


@claim("eqn60", embeddings.weight)
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


def superposition_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Compare the responses of a weight of several patterns with each alone."""
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


@claim("superposition", embeddings.superposed, printed=printed.superposed)
def _superposition(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """One weight, three patterns on disjoint tokens: each must respond as if it were alone."""
    point = {"tokens": np.array([4, 4, 4]), "size": 1.0, "draw": int(rng.integers(2**32))}
    return superposition_at(formula, point)

"""Section 7 and A.4: almost orthogonal embeddings, the implicit bias, several patterns in one."""

from typing import Any

import numpy as np
from scipy import integrate

from joma.experiments.claims._claim import Claim, Formula, Measurement
from joma.experiments.claims.joint import random_samples, random_start
from joma.theory import embeddings, invariants
from joma.theory.as_printed import embeddings as printed
from joma.theory.block import Block, State, simulate


def _coherence(formula: Formula, rng: np.random.Generator) -> Measurement:
    """How far above ε random unit vectors come, in fewer dimensions than there are vectors."""
    excess = [
        embeddings.coherence(
            embeddings.almost_orthogonal(tokens, int(np.ceil(formula(eps, tokens))), rng)
        )
        / eps
        - 1
        for tokens, eps in ((500, 0.5), (1000, 0.45), (2000, 0.5))
    ]
    return Measurement(float(max(0.0, *excess)), 0.0)


def _drift_against_coherence(formula: Formula, rng: np.random.Generator) -> Measurement:
    samples = random_samples(rng)
    start = random_start(samples, rng)
    skew = rng.normal(size=(7, 7))
    np.fill_diagonal(skew, 0.0)
    sizes, drifts = np.array([4e-4, 2e-4, 1e-4]), []
    for size in sizes:
        columns = np.eye(7) + size * skew / np.max(np.abs(skew))
        block = Block("exp", "tanh", embeddings=columns / np.linalg.norm(columns, axis=0))
        drifts.append(invariants.drift(simulate(block, samples, [0.0, 0.5], initial=start)))
    order = np.polyfit(np.log(sizes), np.log(drifts), 1)[0]
    return Measurement(float(abs(order - formula())), 0.02)


def _implicit_bias(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The weights themselves, trained in d dimensions with explicit orthonormal embeddings."""
    samples = random_samples(rng)
    x, g = np.asarray(samples.x), np.asarray(samples.gradient)
    d = 12
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    tokens, query = basis[:, :6], basis[:, 6]
    w0, z0 = 0.3 * rng.normal(size=(d, 3)), 0.3 * rng.normal(size=6)

    def right_side(_: float, flat: Any) -> Any:
        w, z = flat[:-6].reshape(d, 3), flat[-6:]
        b = np.exp(z) * x
        f = b @ tokens.T + query
        pull = g * (1 - np.tanh(f @ w) ** 2) / len(x)
        return np.concatenate([(f.T @ pull).ravel(), np.sum(b * (pull @ w.T @ tokens), axis=0)])

    flow: Any = integrate.solve_ivp(
        right_side, (0, 0.5), np.concatenate([w0.ravel(), z0]), "DOP853", rtol=1e-11, atol=1e-12
    )
    start = State(tokens.T @ w0, z0[None], (query @ w0)[None])
    path = simulate(Block("exp", "tanh"), samples, [0.0, 0.5], initial=start)
    predicted = formula(w0, tokens, path.v[1] - path.v[0], query, path.bias[1, 0] - path.bias[0, 0])
    actual = flow.y[:-6, -1].reshape(d, 3)
    return Measurement(float(np.max(np.abs(predicted - actual))), 1e-8)


def _superposition(formula: Formula, rng: np.random.Generator) -> Measurement:
    """One weight, three patterns on disjoint tokens: each must answer as if it were alone."""
    basis = np.linalg.qr(rng.normal(size=(15, 15)))[0].T
    tokens, queries = basis[:12].reshape(3, 4, 15), basis[12:]
    biases = -rng.uniform(0.2, 0.6, size=3)
    templates = rng.uniform(0.3, 1, size=(3, 4))
    w = formula(np.einsum("pt,ptd->pd", templates, tokens), queries, biases)
    b = rng.uniform(0, 1, size=(3, 4))
    inputs = np.einsum("pt,ptd->pd", b, tokens) + queries
    alone = np.sum(templates * b, axis=1) + biases
    return Measurement(float(np.max(np.abs(inputs @ w - alone))), 1e-12)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="sec7-coherence",
        title="8ε⁻² ln M dimensions hold M embeddings with |u·u′| ≤ ε",
        source="JoMA preprint, Section 7",
        method="random unit vectors, 500 to 2000 of them in 199 to 274 dimensions",
        derived=lambda eps, tokens: 8 * np.log(tokens) / eps**2,
        measure=_coherence,
    ),
    Claim(
        id="sec7-drift",
        title="almost orthogonal embeddings: the law drifts in proportion to ε",
        source="new",
        method="flow of a block with coherence of about 1e-4 to 6e-4",
        derived=lambda: 1.0,
        measure=_drift_against_coherence,
    ),
    Claim(
        id="eqn60",
        title="the weight is w(0) + U_C Δv + u_m ξ: the residual connection is a bias",
        source="JoMA preprint, Eqn 60",
        method="flow of the weights themselves in 12 dimensions",
        derived=embeddings.weight,
        measure=_implicit_bias,
    ),
    Claim(
        id="superposition",
        title="orthogonal patterns share one weight: w = Σ_m v_m + ξ_m u_m",
        source="JoMA preprint, Section A.4",
        method="three patterns in one weight, each compared with itself alone",
        derived=embeddings.superposed,
        printed=printed.superposed,
        measure=_superposition,
    ),
)

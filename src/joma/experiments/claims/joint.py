"""Theorem 1 and its new laws: measured on the full block, in which nothing is integrated out."""

from typing import Any

import numpy as np

from joma.experiments.claims._claim import Claim, Formula, Measure, Measurement
from joma.theory import invariants
from joma.theory.as_printed import invariants as printed
from joma.theory.block import Block, Samples, State, Trajectory, objective, simulate, velocity


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
    """Central differences of the objective, for every kind of attention and activation."""
    worst = 0.0
    for attention in ("linear", "exp", "softmax", "sigmoid"):
        for activation in ("linear", "tanh"):
            block = Block(attention, activation, tau=0.7)
            samples = random_samples(rng, queries=2)
            state = random_start(samples, rng)
            rates = formula(block, samples, state)
            for part, rate in zip(range(3), rates, strict=True):
                direction = rng.normal(size=rate.shape)
                ahead, back = (
                    objective(block, samples, _moved(state, part, sign * 1e-5 * direction))
                    for sign in (1, -1)
                )
                worst = max(worst, abs((ahead - back) / 2e-5 - np.sum(rate * direction)))
    return Measurement(worst, 1e-8)


def _moved(state: State, part: int, by: Any) -> State:
    return State(*(a + by if i == part else a for i, a in enumerate(state)))


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


def _one_query_law(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The law of a single query, where three are trained at once."""
    block = Block("exp", "tanh")
    path = _trajectory(block, rng, queries=3)
    return _drift(formula(block, path.v, path.z[:, 0]))


def _linear_law(block: Block, v: Any, z: Any) -> Any:
    """The law z² - Σ v², as printed for equal rates."""
    del block
    return z**2 - np.sum(v**2, axis=-1)


def _exp_law(block: Block, v: Any, z: Any) -> Any:
    """The law z - ½ Σ v², as printed for equal rates."""
    return z - printed.exp_logits(block, v)


def _softmax_estimate(formula: Formula, rng: np.random.Generator) -> Measurement:
    """All samples alike make the per-node condition exact; a slow z keeps b̄ constant."""
    return _estimate(formula, rng, np.tile(rng.dirichlet(np.ones(6)), (8, 1)))


def _softmax_estimate_apart(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The same where the samples differ and the condition fails."""
    return _estimate(formula, rng, rng.dirichlet(np.ones(6), size=8))


def _estimate(formula: Formula, rng: np.random.Generator, x: Any) -> Measurement:
    block = Block("softmax", "linear", eta_z=1e-4)
    samples = Samples(x, gradient=rng.normal(size=(8, 3)) + 1)
    path = simulate(block, samples, [0.0, 2.0], initial=random_start(samples, rng))
    scores = block.scores(x, path.z[0]).mean(axis=0)
    predicted = formula(block, path.v[1], scores) - formula(block, path.v[0], scores)
    actual = path.z[1] - path.z[0]
    return Measurement(float(np.max(np.abs(predicted - actual)) / np.max(np.abs(actual))), 1e-3)


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
    block = Block("softmax", "linear")
    wrong = 0
    for case in range(32):
        x = rng.dirichlet(np.ones(5), size=7)
        g, v = rng.normal(size=(7, 2)), 0.3 * rng.normal(size=(5, 2))
        if case % 4 == 0:
            x = np.tile(x[0], (7, 1))  # every sample alike: it holds for each node
        elif case % 4 == 1:
            g[:, 1] = -g[:, 0]  # the nodes cancel, but their weights differ: it fails
        elif case % 4 == 2:
            g[:, 1], v[:, 1] = -g[:, 0], v[:, 0]  # they cancel with their weights: it holds
        samples = Samples(x, gradient=g)
        state = State(v, 0.3 * rng.normal(size=(1, 5)), np.zeros((1, 2)))
        rate = velocity(block, samples, state)
        b = block.scores(x, state.z[0])
        by_law = np.sum(rate.v * state.v, axis=1) - b.mean(axis=0) * np.sum(rate.v * state.v)
        holds = bool(np.allclose(by_law, rate.z[0], atol=1e-10))
        wrong += formula(g, b, state.v) != holds
    return Measurement(wrong / 32, 0.0)


def _from_zero(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The constant c of exp attention, and whether anything was learned at all."""
    path = simulate(Block("exp"), random_samples(rng), np.linspace(0, 1, 4))
    return _constant(formula, path, path.z - np.sum(path.v**2, axis=-1) / 2)


def _from_zero_linear(formula: Formula, rng: np.random.Generator) -> Measurement:
    path = simulate(Block("linear"), random_samples(rng), np.linspace(0, 1, 4))
    return _constant(formula, path, path.z**2 - np.sum(path.v**2, axis=-1))


def _constant(formula: Formula, path: Trajectory, c: Any) -> Measurement:
    """Distance of c from the formula's; 1 is added where the weights never moved."""
    still = float(np.max(np.abs(path.v)) == 0)
    return Measurement(float(np.max(np.abs(c - formula()))) + still, 1e-9)


def _descent(block: Block) -> Measure:
    """The law's change over thirty gradient steps against a formula of the weights' steps."""

    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        samples = random_samples(rng)
        t, start = np.arange(0, 31) * 0.02, random_start(samples, rng)
        path = simulate(block, samples, t, initial=start, descent_step=0.02)
        quantity = invariants.conserved(path)
        difference = quantity[-1] - quantity[0] - formula(path.v)
        return Measurement(float(np.max(np.abs(difference))), 1e-13)

    return measure


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


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="eqn2",
        title="the training dynamics are the gradient of the per-node loss (Eqn 9)",
        source="JoMA preprint, Eqns 1-2, 9",
        method="central differences of the objective, 4 attentions × 2 activations, 2 queries",
        derived=velocity,
        measure=_gradient,
    ),
    Claim(
        id="thm1-linear",
        title="linear attention conserves z² - Σ v²",
        source="JoMA preprint, Theorem 1",
        method="drift along the full block's flow (DOP853, 1e-12)",
        derived=_linear_law,
        measure=_law(Block("linear", "tanh")),
        condition="equal learning rates of weights and logits",
        without=_law(Block("linear", "tanh", eta_w=0.7, eta_z=1.3)),
    ),
    Claim(
        id="thm1-exp",
        title="exp attention conserves z - ½ Σ v²",
        source="JoMA preprint, Theorem 1",
        method="drift along the full block's flow (DOP853, 1e-12)",
        derived=_exp_law,
        measure=_law(Block("exp", "tanh")),
        condition="one query is trained",
        without=_one_query_law,
    ),
    Claim(
        id="thm1-rates",
        title="at any rates, linear and exp attention conserve H(z) - (η_Z/2η_W) Σ v²",
        source="talk, JoMA dynamics",
        method="drift along the full block's flow, η_W = .7, η_Z = 1.3",
        derived=invariants.conserved_pointwise,
        measure=_law(
            Block("linear", "tanh", eta_w=0.7, eta_z=1.3),
            Block("exp", "tanh", eta_w=0.7, eta_z=1.3),
        ),
    ),
    Claim(
        id="thm1-pointwise",
        title="any pointwise attention at any τ conserves τ²H(z/τ) - (η_Z/2η_W) Σ v², H = ∫σ/σ′",
        source="new",
        method="drift with linear, exp and sigmoid attention, η_W = .7, η_Z = 1.3, τ = .5",
        derived=invariants.conserved_pointwise,
        measure=_law(
            *(
                Block(attention, "tanh", eta_w=0.7, eta_z=1.3, tau=0.5)
                for attention in ("linear", "exp", "sigmoid")
            )
        ),
    ),
    Claim(
        id="thm1-loss",
        title="the laws need no stationary gradient: they hold under cross-entropy as well",
        source="new",
        method="drift with labels, linear, exp and sigmoid attention",
        derived=invariants.conserved_pointwise,
        measure=_law(
            *(
                Block(attention, "tanh", eta_w=0.7, eta_z=1.3, tau=0.5)
                for attention in ("linear", "exp", "sigmoid")
            ),
            labels=True,
        ),
    ),
    Claim(
        id="thm1-queries",
        title="with many queries the law is one sum: Σ_m τ²H(z_m/τ) - (η_Z/2η_W) Σ v²",
        source="new",
        method="drift along the flow of a block with three queries",
        derived=invariants.conserved_pointwise,
        measure=_law(Block("exp", "tanh", eta_w=0.7, eta_z=1.3, tau=0.5), queries=3),
    ),
    Claim(
        id="thm1-softmax-sum",
        title="softmax attention conserves Σ_l z_l exactly",
        source="new",
        method="drift along the full block's flow (DOP853, 1e-12)",
        derived=lambda block, v, z: np.sum(z, axis=-1),
        measure=_law(Block("softmax", "tanh", eta_w=0.7, eta_z=1.3, tau=0.5)),
    ),
    Claim(
        id="thm1-softmax",
        title="softmax attention: z = ½ Σ_k (v_k² - ‖v_k‖² b̄) + c",
        source="JoMA preprint, Theorem 1",
        method="relative error on a block whose samples are alike and whose z moves by 1e-4",
        derived=invariants.softmax_logits,
        measure=_softmax_estimate,
        condition="b̄ constant and Σ_k E[g_k h′_k b bᵀ] v_k = b̄ Σ_k E[g_k h′_k b]ᵀ v_k",
        without=_softmax_estimate_apart,
    ),
    Claim(
        id="thm1-softmax-condition",
        title="the softmax law's condition must weigh each node by its v_k",
        source="JoMA preprint, Theorem 1",
        method="32 random blocks: does the condition tell where Eqn 17 holds?",
        derived=_condition_with_weights,
        printed=_condition_as_printed,
        measure=_softmax_condition,
    ),
    Claim(
        id="thm1-zero",
        title="zero initialisation gives c = 0",
        source="JoMA preprint, Theorem 1",
        method="flow from zero, in which something must have moved",
        derived=lambda: 0.0,
        measure=_from_zero,
        condition="exp attention",
        without=_from_zero_linear,
    ),
    Claim(
        id="thm1-descent",
        title="gradient descent leaves the exp law by exactly -½ Σ_steps Σ_k (δv_k)²",
        source="new",
        method="30 gradient steps of a ReLU block",
        derived=invariants.descent_drift,
        measure=_descent(Block("exp", "relu")),
        condition="η_W = η_Z = τ = 1",
        without=_descent(Block("exp", "relu", eta_w=0.7, eta_z=1.3)),
    ),
    Claim(
        id="thm1-descent-order",
        title="that drift is first order in the step",
        source="new",
        method="three step sizes, each half of the last, tanh and ReLU",
        derived=lambda: 1.0,
        measure=_descent_order,
    ),
)

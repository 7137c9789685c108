"""Assumption 1 of JoMA: the means E[g_k x] of the gradients that nodes receive stay constant.

With gradients given from outside they do. Under cross-entropy they move with the outputs, from the
first step on; `drift` says how far in a training and `rate` how fast at one moment.
"""

import numpy as np
from scipy import special

from joma.errors import JomaError
from joma.theory._checks import Array
from joma.theory.block import (
    Block,
    Samples,
    State,
    Trajectory,
    preactivations,
    sample_queries,
    velocity,
)


def gradient_means(block: Block, samples: Samples, state: State) -> Array:
    """Assumption 1: E[g_k x_l], shape (M, K)."""
    x, share = np.asarray(samples.x), np.asarray(samples.probability)[:, None]
    if samples.gradient is not None:
        return x.T @ (share * np.asarray(samples.gradient))
    p = special.softmax(block.phi.value(preactivations(block, samples, state)), axis=-1)
    labels = np.eye(samples.nodes)[np.asarray(samples.labels)]
    return x.T @ (share * (labels - p))


def drift(trajectory: Trajectory) -> Array:
    """Assumption 1 in a training: `‖E[g x](t) - E[g x](0)‖ / ‖E[g x](0)‖`, shape (T,).

    It is 0 where the assumption holds, and 1 where the means have vanished, as they do where
    cross-entropy has been learned.
    """
    block, samples = trajectory.block, trajectory.samples
    first = gradient_means(block, samples, trajectory.start)
    size = float(np.linalg.norm(first))
    if size == 0:
        raise JomaError("trajectory must start with means E[g x] that do not all vanish")
    z = trajectory.z[:, None] if samples.query is None else trajectory.z
    means = [
        gradient_means(block, samples, State(*parts))
        for parts in zip(trajectory.v, z, trajectory.bias, strict=True)
    ]
    return np.array([float(np.linalg.norm(one - first)) for one in means]) / size


def rate(block: Block, samples: Samples, state: State) -> Array:
    """New: how fast E[g_k x_l] moves, -E[x_l Σ_j (p_k δ_kj - p_k p_j) ḣ_j] under cross-entropy.

    p are the predicted probabilities and ḣ_j = h′_j (v̇_j·b + v_j·ḃ + ξ̇_j). Zero where gradients are
    given from outside.

    Returns:
        Shape (M, K).
    """
    if samples.gradient is not None:
        return np.zeros((samples.tokens, samples.nodes))
    x, query = np.asarray(samples.x), sample_queries(samples)
    moving = velocity(block, samples, state)
    pre = preactivations(block, samples, state)
    b = block.scores(x, state.z[query])
    # The Jacobian ∂b/∂z is symmetric.
    b_rate = block.pull_back(x, state.z[query], moving.z[query])
    h_rate = block.phi.derivative(pre) * (b @ moving.v + b_rate @ state.v + moving.bias[query])
    p = special.softmax(block.phi.value(pre), axis=-1)
    p_rate = p * (h_rate - np.sum(p * h_rate, axis=1, keepdims=True))
    return -x.T @ (np.asarray(samples.probability)[:, None] * p_rate)

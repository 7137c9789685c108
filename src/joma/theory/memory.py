"""Softmax attention: the law of Theorem 1 with memory, and what it leaves out.

For one query and orthonormal embeddings, with b̄ = E[b], the rate of the logits is exactly

    ż = (η_Z/η_Wτ) (Σ_k v_k∘v̇_k - b̄ Σ_k v_k·v̇_k) - (η_Z/τ) Cov(b, s),   s = Σ_k g_k h′_k b·v_k

Eqn 17 is this without the covariance. Eqn 18 takes b̄ out of the integral besides; but b̄ follows z,
and stands still only where z does. With b̄ inside, the logits are a functional of the path of v:

    z = z₀ + (η_Z/η_Wτ) (½ Σ_k Δv_k² - ∫ b̄(z) d½‖V‖²)
"""

import numpy as np
from numpy.typing import ArrayLike

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory.block import Block, Samples, State, Trajectory, node_gradients

_MAX_ITERATIONS = 200


def logits(block: Block, samples: Samples, v: ArrayLike, initial: ArrayLike) -> Array:
    """New: Theorem 1 for softmax with memory, z = z₀ + (η_Z/η_Wτ)(½ΣΔv² - ∫ b̄(z) d½‖V‖²).

    Needs the path of the weights and the first logits alone, no gradients. It is exact where all
    samples have the same frequencies x; elsewhere `gap_bound` says how far z may be.

    Args:
        block: Rates and temperature, with softmax attention.
        samples: The frequencies x; gradients and labels are not used.
        v: Projections of the weights along training, shape (T, M, K). The integral is taken by
            the trapezoidal rule: the error falls with the square of the spacing.
        initial: The logits at the first of them, shape (M,).

    Returns:
        The logits along the path, shape (T, M).

    Raises:
        ValueError: Also where the path is too coarse for the rule.
    """
    samples = _check_setting(block, samples)
    v = _checks.finite("v", v, (None, samples.tokens, None))
    start = _checks.finite("initial", initial, (samples.tokens,))
    factor = block.eta_z / (block.eta_w * block.tau)
    path = [start]
    own = factor / 2 * np.sum((v[1:] - v[:-1]) * (v[1:] + v[:-1]), axis=-1)
    total = np.sum(own, axis=1)
    mean = _mean_scores(block, samples, start)
    for step, length in zip(own, total, strict=True):
        fixed = path[-1] + step - length / 2 * mean
        after, mean = _implicit(block, samples, fixed, length / 2, mean)
        path.append(after)
    return np.stack(path)


def covariance(block: Block, samples: Samples, state: State) -> Array:
    """New: what Eqn 17 leaves out of -ż, (η_Z/τ) Cov(b, s) with s = Σ_k g_k h′_k b·v_k.

    It vanishes exactly where the condition of Theorem 1 for softmax holds.

    Returns:
        Shape (M,).
    """
    samples = _check_setting(block, samples)
    b = block.scores(np.asarray(samples.x), state.z[0])
    weighted = np.sum(node_gradients(block, samples, state) * (b @ state.v), axis=1)
    share = np.asarray(samples.probability)
    return block.eta_z / block.tau * ((b - share @ b).T @ weighted)


def gap_bound(trajectory: Trajectory) -> Array:
    """New: how far the logits may be from `logits` of the same path, ‖z - ẑ‖ ≤ ∫ ‖covariance‖ dt.

    b̄ is a monotone function of z, so that the law pulls z back to itself while ‖V‖ grows: what the
    covariance has moved is not amplified. Where ‖V‖ shrinks, the bound grows by up to
    exp(η_Z/(2η_Wτ²)·(decrease of ½‖V‖²)).

    Args:
        trajectory: A flow with softmax attention, or steps small enough to be one.

    Returns:
        The bound at each kept time, by the trapezoidal rule over them, shape (T,).
    """
    block, samples = trajectory.block, trajectory.samples
    _check_setting(block, samples)
    pushes = np.array(
        [
            np.linalg.norm(covariance(block, samples, State(v, z[None], bias)))
            for v, z, bias in zip(trajectory.v, trajectory.z, trajectory.bias, strict=True)
        ]
    )
    half = np.sum(trajectory.v**2, axis=(1, 2)) / 2
    growth = np.exp(block.eta_z / (2 * block.eta_w * block.tau**2) * np.maximum(-np.diff(half), 0))
    bound = [0.0]
    for step, factor, before, after in zip(
        np.diff(trajectory.t), growth, pushes[:-1], pushes[1:], strict=True
    ):
        bound.append(factor * (bound[-1] + step * (before + after) / 2))
    return np.array(bound)


def _check_setting(block: Block, samples: Samples) -> Samples:
    if not block.sigma.normalized:
        raise JomaError("block must have softmax attention; others have laws without memory")
    if samples.queries > 1:
        raise JomaError(f"samples must have one query, got {samples.queries}")
    if block.embeddings is not None:
        gram = block.embeddings.T @ block.embeddings
        if np.max(np.abs(gram - np.eye(len(gram)))) > 1e-9:
            raise JomaError("embeddings must be orthonormal")
    if np.any(np.sum(np.asarray(samples.x), axis=1) == 0):
        raise JomaError("x must have a token in every sample, or softmax has nothing to weigh")
    return samples


def _mean_scores(block: Block, samples: Samples, z: Array) -> Array:
    return np.asarray(samples.probability) @ block.scores(np.asarray(samples.x), z)


def _implicit(
    block: Block, samples: Samples, fixed: Array, half: float, guess: Array
) -> tuple[Array, Array]:
    """Solve z = fixed - half·b̄(z) by iteration; the logits and their mean scores."""
    # b̄ changes by at most 1/(2τ) of a change of z, so this contracts while |half| < 2τ.
    if abs(half) >= 1.8 * block.tau:
        raise JomaError("v must be given at closer times: the path is too coarse for the integral")
    z = fixed - half * guess
    for _ in range(_MAX_ITERATIONS):
        mean = _mean_scores(block, samples, z)
        after = fixed - half * mean
        change = np.max(np.abs(after - z))
        z = after
        if change <= 1e-14 * max(1.0, float(np.max(np.abs(z)))):
            break
    return z, _mean_scores(block, samples, z)

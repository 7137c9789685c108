"""Theorem 1: what training conserves, for any learning rates η_W, η_Z and temperature τ.

| attention | conserved |
|---|---|
| any pointwise σ, one query | τ² H(z/τ) - (η_Z/2η_W) Σ_k v_k², H = ∫ σ/σ′ |
| any pointwise σ, several queries | Σ_m τ² H(z_m/τ) - (η_Z/2η_W) Σ_k v_k² |
| softmax | Σ_l z_ml, exactly; and approximately z - (η_Z/2η_Wτ) Σ_k (v_k² - ‖v_k‖² b̄) |

Linear and exp attention are the first row with H(y) = y²/2 and H(y) = y.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory.block import Block, Trajectory


def conserved(trajectory: Trajectory) -> Array:
    """Theorem 1 and its new laws: the quantities this block conserves, shape (T, …)."""
    trajectory = _checks.instance("trajectory", trajectory, Trajectory)
    block, z = trajectory.block, trajectory.z
    if block.sigma.normalized:
        return np.sum(z, axis=-1)
    return conserved_pointwise(block, trajectory.v, z)


def drift(trajectory: Trajectory) -> float:
    """Theorem 1: the largest change of a conserved quantity since t = 0.

    Where the two terms of a law exceed 1 the change is relative to the larger of them: a law that
    holds to rounding has a small drift however far the weights have grown.
    """
    trajectory = _checks.instance("trajectory", trajectory, Trajectory)
    start = trajectory.start
    origin = dataclasses.replace(
        trajectory,
        t=np.zeros(1),
        v=start.v[None],
        z=start.z if trajectory.samples.query is None else start.z[None],
        bias=start.bias[None],
    )
    change = float(np.max(np.abs(conserved(trajectory) - conserved(origin))))
    block, v, z = trajectory.block, trajectory.v, trajectory.z
    terms = (z,) if block.sigma.normalized else _terms(block, v, z)
    return change / max(1.0, *(float(np.max(np.abs(term))) for term in terms))


def conserved_pointwise(block: Block, v: ArrayLike, z: ArrayLike) -> Array:
    """Theorem 1 for pointwise σ: Σ_m τ² H(z_m/τ) - (η_Z/2η_W) Σ_k v_k², token by token.

    Args:
        block: its attention, rates and temperature.
        v: shape (T, M, K).
        z: shape (T, M) for one query or (T, queries, M).
    """
    if _checks.instance("block", block, Block).sigma.normalized:
        raise JomaError("block must have a pointwise attention; softmax conserves the sum of z")
    v = _checks.shape("v", _checks.finite("v", v), (None, None, None))
    z = _checks.finite("z", z)
    attention, weights = _terms(block, v, z)
    return attention - weights


def exp_logits(block: Block, v: ArrayLike) -> Array:
    """Theorem 1, exp attention at any rates: z - c = (η_Z/2η_Wτ) Σ_k v_k².

    Args:
        block: its rates and temperature.
        v: shape (…, M, K).
    """
    block = _checks.instance("block", block, Block)
    factor = block.eta_z / (2 * block.eta_w * block.tau)
    return factor * np.sum(_checks.at_least_1d("v", v) ** 2, axis=-1)


def softmax_logits(block: Block, v: ArrayLike, mean_scores: ArrayLike) -> Array:
    """Theorem 1 (Eqn 18), softmax attention: z - c = (η_Z/2η_Wτ) Σ_k (v_k² - ‖v_k‖² b̄).

    It holds if b̄ = E[b] stays constant and Σ_k E[g_k h′_k b bᵀ] v_k = b̄ Σ_k E[g_k h′_k b]ᵀ v_k,
    for which it suffices that each k satisfies it alone. Otherwise it is an estimate of z, to be
    compared with it by correlation (Fig. 2).

    Args:
        block: its rates and temperature.
        v: shape (…, M, K).
        mean_scores: b̄, shape (M,).

    Returns:
        z - c, shape (…, M).
    """
    own, shared = softmax_logit_parts(block, v, mean_scores)
    return own + shared


def softmax_logit_parts(block: Block, v: ArrayLike, mean_scores: ArrayLike) -> tuple[Array, Array]:
    """Fig. 2: the two parts of Eqn 18, neither of which predicts z alone."""
    v = _checks.at_least_1d("v", v)
    if v.ndim < 2:
        raise JomaError(f"v must have the shape (…, M, K), got {v.shape}")
    mean_scores = _checks.shape(
        "mean_scores", _checks.finite("mean_scores", mean_scores), (v.shape[-2],)
    )
    block = _checks.instance("block", block, Block)
    factor = block.eta_z / (2 * block.eta_w * block.tau)
    own = np.sum(v**2, axis=-1)
    return factor * own, -factor * np.sum(own, axis=-1, keepdims=True) * mean_scores


def descent_drift(v: ArrayLike) -> Array:
    """New: how far gradient descent at unit rates leaves the exp law, -½ Σ_steps Σ_k (δv_k)².

    Args:
        v: the weights after every single step, shape (T, M, K).

    Returns:
        The change of z - ½ Σ_k v_k² from the first to the last step, shape (M,).
    """
    v = _checks.shape("v", _checks.finite("v", v), (None, None, None))
    return -np.sum(np.diff(v, axis=0) ** 2, axis=(0, 2)) / 2


def correlation(a: ArrayLike, b: ArrayLike, *, centered: bool = False) -> Array:
    """Fig. 2: normalised correlation a·b/(‖a‖‖b‖) over tokens, the last axis.

    Args:
        a: shape (…, M).
        b: shape (…, M).
        centered: remove the means first. Logits of softmax attention have a constant mean, and so
            has the whole of Eqn 18, but not its two parts alone: this decides how they look.
    """
    left, right = _checks.at_least_1d("a", a), _checks.at_least_1d("b", b)
    _checks.together(a=left.shape, b=right.shape)
    if centered:
        left = left - np.mean(left, axis=-1, keepdims=True)
        right = right - np.mean(right, axis=-1, keepdims=True)
    lengths = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    return np.sum(left * right, axis=-1) / np.where(lengths > 0, lengths, np.nan)


def _terms(block: Block, v: Array, z: Array) -> tuple[Array, Array]:
    """Σ_m τ² H(z_m/τ) and (η_Z/2η_W) Σ_k v_k², whose difference is conserved."""
    attention = block.tau**2 * block.sigma.integral(z / block.tau)
    if z.ndim == 3:
        attention = np.sum(attention, axis=1)
    return attention, block.eta_z / (2 * block.eta_w) * np.sum(v**2, axis=-1)

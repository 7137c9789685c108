"""Theorem 1: what training conserves, for any learning rates η_W, η_Z and temperature τ.

| attention | conserved |
|---|---|
| any pointwise σ, one query | τ² H(z/τ) - (η_Z/2η_W) Σ_k v_k², H = ∫ σ/σ′ |
| any pointwise σ, several queries | Σ_m τ² H(z_m/τ) - (η_Z/2η_W) Σ_k v_k² |
| any pointwise σ, any embeddings with U_Cᵀu_m = 0 | Σ_ml τ² H(z_ml/τ) - (η_Z/2η_W) Σ_k v_kᵀG⁺v_k |
| softmax | Σ_l z_ml; and approximately z - (η_Z/2η_Wτ) Σ_k (v_k² - ‖v_k‖² b̄) |

Linear and exp attention are the first row with H(y) = y²/2 and H(y) = y. All rows but the third are
for orthonormal embeddings; G = U_CᵀU_C. The softmax law with memory is in `joma.theory.memory`.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory.block import Block, Samples, State, Trajectory, velocity


def conserved(trajectory: Trajectory) -> Array:
    """Theorem 1: the quantities this block conserves for orthonormal embeddings, shape (T, …)."""
    block, z = trajectory.block, trajectory.z
    if block.sigma.normalized:
        return np.sum(z, axis=-1)
    return conserved_pointwise(block, trajectory.v, z)


def drift(trajectory: Trajectory) -> float:
    """Theorem 1: the largest change of a conserved quantity since t = 0.

    Where the two terms of a law exceed 1 the change is relative to the larger of them: a law that
    holds to rounding has a small drift however far the weights have grown.
    """
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
    _check_pointwise(block)
    v = _checks.finite("v", v, (None, None, None))
    attention, weights = _terms(block, v, _logits_of("z", z, v))
    return attention - weights


def conserved_total(
    block: Block, v: ArrayLike, z: ArrayLike, *, groups: ArrayLike | None = None
) -> Array:
    """New, Section 7: one law for any embeddings, Σ_ml τ² H(z_ml/τ) - (η_Z/2η_W) Σ_k v_kᵀG⁺v_k.

    G = U_CᵀU_C is the Gram matrix of the tokens and G⁺ its pseudo-inverse, so that v_kᵀG⁺v_k =
    ‖w_k‖² - ‖P w_k‖² up to a constant, where P projects on the queries. It holds for any pointwise
    attention, activation, data, rates, temperature and queries, if no token's embedding has a part
    along a query's. Where the tokens fall into groups whose embeddings are orthogonal to each
    other's, each group has such a law of its own; Theorem 1 is that of single tokens.

    Args:
        block: Attention, rates, temperature and embeddings.
        v: Projections of the weights, shape (T, M, K).
        z: Logits, shape (T, M) for one query or (T, queries, M).
        groups: The group of each token, whole numbers, shape (M,); None for one group.

    Returns:
        The conserved quantity of each group, in increasing order of the groups, shape (T, groups).

    Raises:
        ValueError: Also where groups or queries are not orthogonal to tokens, or where v is no
            projection of weights on the tokens.
    """
    _check_pointwise(block)
    v = _checks.finite("v", v, (None, None, None))
    z = _logits_of("z", z, v)
    z = z[:, None] if z.ndim == 2 else z
    queries, m = z.shape[1:]
    labels = (
        np.zeros(m, dtype=np.int64) if groups is None else _checks.integers("groups", groups, 0)
    )
    if labels.shape != (m,):
        raise JomaError(f"groups must have shape ({m},), got {labels.shape}")
    columns = np.eye(m + queries) if block.embeddings is None else block.embeddings
    columns = _checks.shape("embeddings", columns, (None, m + queries))
    tokens = columns[:, :m]
    _check_orthogonal(columns, np.concatenate([labels, np.full(queries, -1)]))
    attention = block.tau**2 * np.sum(block.sigma.integral(z / block.tau), axis=1)
    laws = [
        np.sum(attention[:, labels == one], axis=1)
        - block.eta_z
        / (2 * block.eta_w)
        * _squared_length(tokens[:, labels == one], v[:, labels == one])
        for one in np.unique(labels)
    ]
    return np.stack(laws, axis=1)


def token_law_rate(block: Block, samples: Samples, state: State) -> Array:
    """New, Section 7: how fast a token's law drifts where embeddings are not orthonormal.

    -η_Z Σ_k v_kl [Σ_l′ (G - I)_ll′ E[g_k h′_k b_l′] + Σ_m G_lm E[1(q=m) g_k h′_k]], with G the Gram
    matrix of tokens and queries: the whole of G - I counts, not its largest entry alone.

    Returns:
        The rate of Σ_m τ² H(z_ml/τ) - (η_Z/2η_W) Σ_k v_kl² for each token l, shape (M,).
    """
    _check_pointwise(block)
    if block.embeddings is None:
        return np.zeros(samples.tokens)
    plain = velocity(dataclasses.replace(block, embeddings=None), samples, state)
    excess = block.embeddings.T @ block.embeddings - np.eye(block.embeddings.shape[1])
    v_excess = (excess @ np.concatenate([plain.v, plain.bias]))[: samples.tokens]
    return -block.eta_z / block.eta_w * np.sum(state.v * v_excess, axis=1)


def exp_logits(block: Block, v: ArrayLike) -> Array:
    """Theorem 1, exp attention at any rates: z - c = (η_Z/2η_Wτ) Σ_k v_k².

    Args:
        block: its rates and temperature.
        v: shape (…, M, K).
    """
    factor = block.eta_z / (2 * block.eta_w * block.tau)
    return factor * np.sum(_checks.at_least_1d("v", v) ** 2, axis=-1)


def softmax_logits(block: Block, v: ArrayLike, mean_scores: ArrayLike) -> Array:
    """Theorem 1 (Eqn 18), softmax attention: z - c = (η_Z/2η_Wτ) Σ_k (v_k² - ‖v_k‖² b̄).

    It holds if b̄ = E[b] stays constant and Σ_k E[g_k h′_k b bᵀ] v_k = b̄ Σ_k E[g_k h′_k b]ᵀ v_k,
    for which it suffices that each k satisfies it alone. As b̄ stands still only where z does, it is
    right to first order in the motion of z; farther on it is an estimate, to be compared with z by
    correlation (Fig. 2). `joma.theory.memory.logits` needs no constant b̄.

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
    mean_scores = _checks.finite("mean_scores", mean_scores, (v.shape[-2],))
    factor = block.eta_z / (2 * block.eta_w * block.tau)
    own = np.sum(v**2, axis=-1)
    return factor * own, -factor * np.sum(own, axis=-1, keepdims=True) * mean_scores


def descent_drift(v: ArrayLike, block: Block | None = None) -> Array:
    """New: how far gradient descent leaves the exp law, -(η_Z/2η_W) Σ_steps Σ_k (δv_k)².

    At any rates, temperature and number of queries, for orthonormal embeddings.

    Args:
        v: The weights after every single step, shape (T, M, K).
        block: Its learning rates; rates of 1 if None.

    Returns:
        The change of Σ_m τ z_m - (η_Z/2η_W) Σ_k v_k² from the first to the last step, shape (M,).
    """
    v = _checks.finite("v", v, (None, None, None))
    block = Block() if block is None else block
    factor = block.eta_z / (2 * block.eta_w)
    return -factor * np.sum(np.diff(v, axis=0) ** 2, axis=(0, 2))


def correlation(a: ArrayLike, b: ArrayLike, *, centered: bool = False) -> Array:
    """Fig. 2: normalised correlation a·b/(‖a‖‖b‖) over tokens, the last axis.

    Args:
        a: shape (…, M).
        b: shape (…, M).
        centered: remove the means first. Logits of softmax attention have a constant mean, and so
            has the whole of Eqn 18, but not its two parts alone.
    """
    left, right = _checks.at_least_1d("a", a), _checks.at_least_1d("b", b)
    if centered:
        left = left - np.mean(left, axis=-1, keepdims=True)
        right = right - np.mean(right, axis=-1, keepdims=True)
    lengths = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    return np.sum(left * right, axis=-1) / np.where(lengths > 0, lengths, np.nan)


def _check_pointwise(block: Block) -> None:
    if block.sigma.normalized:
        raise JomaError("block must have a pointwise attention; softmax conserves the sum of z")


def _logits_of(name: str, value: ArrayLike, v: Array) -> Array:
    """Logits of shape (T, M) or (T, queries, M) that belong to weights of shape (T, M, K)."""
    z = _checks.finite(name, value)
    times, tokens = v.shape[:2]
    if z.ndim not in (2, 3) or z.shape[0] != times or z.shape[-1] != tokens:
        raise JomaError(
            f"{name} must have shape ({times}, {tokens}) or ({times}, queries, {tokens}) as v has "
            f"{v.shape}, got {z.shape}"
        )
    return z


def _terms(block: Block, v: Array, z: Array) -> tuple[Array, Array]:
    """Σ_m τ² H(z_m/τ) and (η_Z/2η_W) Σ_k v_k², whose difference is conserved."""
    attention = block.tau**2 * block.sigma.integral(z / block.tau)
    if z.ndim == 3:
        attention = np.sum(attention, axis=1)
    return attention, block.eta_z / (2 * block.eta_w) * np.sum(v**2, axis=-1)


def _check_orthogonal(columns: Array, labels: NDArray[np.int64]) -> None:
    """Raise unless columns of different groups are orthogonal; the queries' group is -1."""
    lengths = np.linalg.norm(columns, axis=0)
    overlap = np.abs(columns.T @ columns) / np.maximum(np.outer(lengths, lengths), 1e-300)
    queries = labels == -1
    largest = float(np.max(overlap[queries][:, ~queries], initial=0.0))
    if largest > 1e-9:
        raise JomaError(
            "embeddings of tokens must be orthogonal to those of queries, "
            f"got a cosine of {largest:.3g}"
        )
    apart = (labels[:, None] != labels) & ~queries & ~queries[:, None]
    largest = float(np.max(overlap[apart], initial=0.0))
    if largest > 1e-9:
        raise JomaError(
            f"groups must have embeddings orthogonal to each other's, got a cosine {largest:.3g}"
        )


def _squared_length(tokens: Array, v: Array) -> Array:
    """Σ_k v_kᵀG⁺v_k, the squared length of the weights in the span of these tokens, shape (T,)."""
    _, sizes, right = np.linalg.svd(tokens, full_matrices=False)
    kept = sizes > 1e-10 * np.max(sizes, initial=0.0)
    coordinates = np.einsum("rm,tmk->trk", right[kept], v)
    outside = np.abs(v - np.einsum("rm,trk->tmk", right[kept], coordinates))
    if np.max(outside, initial=0.0) > 1e-6 * np.max(np.abs(v), initial=0.0):
        raise JomaError("v must be a projection of weights on the embeddings, U_Cᵀ w")
    return np.sum((coordinates / sizes[kept][:, None]) ** 2, axis=(1, 2))

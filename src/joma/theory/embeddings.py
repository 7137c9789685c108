"""Sections A.4 and 7: implicit bias, several patterns in one weight, almost orthogonal embeddings.

A node has no bias parameter. The residual connection adds the query's embedding u_m to its input,
so what the node accumulates along u_m acts as one: ξ_m = u_mᵀ w (Eqn 60).
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array


def weight(
    initial: ArrayLike, tokens: ArrayLike, v_change: ArrayLike, query: ArrayLike, bias: ArrayLike
) -> Array:
    """Eqn 60: w(t) = w(0) + U_C [v(t) - v(0)] + u_m ξ(t), for orthonormal embeddings.

    Args:
        initial: w(0), shape (d, K).
        tokens: U_C, shape (d, M).
        v_change: v(t) - v(0), shape (M, K).
        query: u_m, shape (d,).
        bias: ξ(t) - ξ(0), shape (K,).
    """
    initial = _checks.finite("initial", initial, (None, None))
    d, k = initial.shape
    tokens = _checks.finite("tokens", tokens, (d, None))
    change = _checks.finite("v_change", v_change)
    change = _checks.shape("v_change", change, (tokens.shape[1], k))
    query = _checks.finite("query", query, (d,))
    bias = _checks.finite("bias", bias, (k,))
    return initial + tokens @ change + np.outer(query, bias)


def superposed(patterns: ArrayLike, queries: ArrayLike, biases: ArrayLike) -> Array:
    """Section A.4 (sign corrected): w = Σ_m v_m + ξ_m u_m responds to each pattern by itself.

    With orthogonal embeddings, w·(U_C b + u_m) = v_m·b + ξ_m for an input of query m whose tokens
    are orthogonal to all other patterns, as they are where the patterns have no token in common.
    Patterns that are orthogonal to each other but share tokens disturb each other, unless the input
    is the pattern itself.

    The printed sign would turn the negative biases, which keep the node silent, into positive ones.

    Args:
        patterns: v_m in embedding space, shape (patterns, d).
        queries: u_m, shape (patterns, d).
        biases: ξ_m, shape (patterns,).
    """
    patterns = _checks.finite("patterns", patterns, (None, None))
    queries = _checks.finite("queries", queries, patterns.shape)
    biases = _checks.finite("biases", biases, (len(patterns),))
    return np.sum(patterns + biases[:, None] * queries, axis=0)


def almost_orthogonal(tokens: int, dimension: int, rng: np.random.Generator | int) -> Array:
    """Section 7: random unit vectors as columns, (dimension, tokens); see `coherence`."""
    tokens = _checks.whole("tokens", tokens, 1)
    dimension = _checks.whole("dimension", dimension, 1)
    columns = _checks.generator(rng).normal(size=(dimension, tokens))
    return columns / np.linalg.norm(columns, axis=0)


def dimension_for(epsilon: ArrayLike, tokens: ArrayLike) -> Array:
    """Section 7: 8ε⁻² ln M dimensions, enough for M embeddings with |u·u′| ≤ ε.

    In that many, random unit vectors fail with a probability below M⁻²: each of fewer than M²/2
    pairs exceeds ε with probability at most 2 exp(-dε²/2) = 2M⁻⁴. For small ε the exponent is
    right; with half the dimensions the bound no longer falls with a power of M.

    Args:
        epsilon: The largest |u·u′| allowed, in (0, 1).
        tokens: M, at least 2.

    Returns:
        The dimension, to be rounded up.
    """
    epsilon, count = _overlap_and_count(epsilon, tokens)
    return 8 * np.log(count) / epsilon**2


def expected_overlaps(epsilon: ArrayLike, tokens: ArrayLike, dimension: ArrayLike) -> Array:
    """New, Section 7: how many of M random unit vectors' pairs have |u·u′| > ε on average.

    M(M-1)/2 · I_{1-ε²}((d-1)/2, ½), exactly, as (u·u′)² has the beta distribution (½, (d-1)/2). It
    bounds the probability that a random draw has a coherence above ε.

    Args:
        epsilon: The threshold, in (0, 1).
        tokens: M, at least 2.
        dimension: d, a whole number from 2.
    """
    epsilon, count = _overlap_and_count(epsilon, tokens)
    d = _checks.finite("dimension", dimension)
    if np.any((d < 2) | (d != np.round(d))):
        raise JomaError(f"dimension must be whole numbers from 2, got {dimension!r}")
    above = special.betainc((d - 1) / 2, 0.5, (1 - epsilon) * (1 + epsilon))
    return count * (count - 1) / 2 * above


def _overlap_and_count(epsilon: ArrayLike, tokens: ArrayLike) -> tuple[Array, Array]:
    epsilon, count = _checks.positive("epsilon", epsilon), _checks.finite("tokens", tokens)
    if np.any(epsilon >= 1):
        raise JomaError(f"epsilon must be below 1, got {np.max(epsilon):g}")
    if np.any(count < 2):
        raise JomaError(f"tokens must be at least 2, got {np.min(count):g}")
    return epsilon, count


def coherence(columns: ArrayLike) -> float:
    """Section 7: ε = max |u_l·u_l′| over pairs of different columns."""
    columns = _checks.finite("columns", columns, (None, None))
    if columns.shape[1] < 2:
        raise JomaError(f"columns must be two at least, got {columns.shape[1]}")
    gram = np.abs(columns.T @ columns)
    np.fill_diagonal(gram, 0.0)
    return float(np.max(gram))

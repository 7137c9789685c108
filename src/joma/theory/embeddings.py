"""Sections A.4 and 7: implicit bias, several patterns in one weight, almost orthogonal embeddings.

A node has no bias parameter. The residual connection adds the query's embedding u_m to its input,
so what the node accumulates along u_m acts as one: ξ_m = u_mᵀ w (Eqn 60).
"""

import numpy as np
from numpy.typing import ArrayLike

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
    initial = _checks.shape("initial", _checks.finite("initial", initial), (None, None))
    d, k = initial.shape
    tokens = _checks.shape("tokens", _checks.finite("tokens", tokens), (d, None))
    change = _checks.finite("v_change", v_change)
    change = _checks.shape("v_change", change, (tokens.shape[1], k))
    query = _checks.shape("query", _checks.finite("query", query), (d,))
    bias = _checks.shape("bias", _checks.finite("bias", bias), (k,))
    return initial + tokens @ change + np.outer(query, bias)


def superposed(patterns: ArrayLike, queries: ArrayLike, biases: ArrayLike) -> Array:
    """Section A.4 (sign corrected): w = Σ_m v_m + ξ_m u_m answers to each pattern by itself.

    With orthogonal embeddings, w·(U_C b + u_m) = v_m·b + ξ_m when b holds tokens of pattern m. The
    printed sign would turn the negative biases, which keep the node silent, into positive ones.

    Args:
        patterns: v_m in embedding space, shape (patterns, d).
        queries: u_m, shape (patterns, d).
        biases: ξ_m, shape (patterns,).
    """
    patterns = _checks.shape("patterns", _checks.finite("patterns", patterns), (None, None))
    queries = _checks.shape("queries", _checks.finite("queries", queries), patterns.shape)
    biases = _checks.shape("biases", _checks.finite("biases", biases), (len(patterns),))
    return np.sum(patterns + biases[:, None] * queries, axis=0)


def almost_orthogonal(tokens: int, dimension: int, rng: np.random.Generator | int) -> Array:
    """Section 7: random unit vectors as columns, (dimension, tokens); see `coherence`."""
    tokens = _checks.whole("tokens", tokens, 1)
    dimension = _checks.whole("dimension", dimension, 1)
    columns = _checks.generator(rng).normal(size=(dimension, tokens))
    return columns / np.linalg.norm(columns, axis=0)


def coherence(columns: ArrayLike) -> float:
    """Section 7: ε = max |u_l·u_l′| over pairs of different columns."""
    columns = _checks.shape("columns", _checks.finite("columns", columns), (None, None))
    if columns.shape[1] < 2:
        raise JomaError(f"columns must be two at least, got {columns.shape[1]}")
    gram = np.abs(columns.T @ columns)
    np.fill_diagonal(gram, 0.0)
    return float(np.max(gram))

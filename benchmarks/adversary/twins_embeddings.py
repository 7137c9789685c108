"""Wrong statements about embeddings: too few tokens, guards against extreme values."""

import dataclasses
from typing import Any

import numpy as np

from benchmarks.adversary import Twin
from joma.theory import embeddings, invariants


def _drift_rate(block: Any, samples: Any, state: Any) -> Any:
    slow = dataclasses.replace(block, eta_z=min(block.eta_z, 3e4 * block.eta_w))
    return invariants.token_law_rate(slow, samples, state)


def _weight(initial: Any, tokens: Any, change: Any, query: Any, bias: Any) -> Any:
    return embeddings.weight(initial, tokens, change, query, np.clip(bias, -25.0, 25.0))


def _superposed(patterns: Any, queries: Any, biases: Any) -> Any:
    return embeddings.superposed(patterns, queries, np.maximum(biases, -90.0))


TWINS = (
    Twin(
        "sec7-coherence",
        lambda eps, tokens: 8 * np.log(tokens - 1) / eps**2,
        "ln(M - 1) for ln M: too few dimensions for two tokens or three",
    ),
    Twin(
        "sec7-overlaps",
        lambda eps, tokens, d: (
            embeddings.expected_overlaps(eps, tokens, d)
            * (tokens / (tokens - 1) if tokens < 50 else 1)
        ),
        "M²/2 pairs for M(M - 1)/2, below 50 tokens",
    ),
    Twin("sec7-drift", _drift_rate, "the factor η_Z/η_W is cut off at 30 000"),
    Twin("eqn60", _weight, "a bias beyond 25 is clipped"),
    Twin("superposition", _superposed, "a bias below -90 is clipped"),
)

"""The joint claims with a wrong constant each."""

import numpy as np

from joma.theory import invariants, memory, stationarity
from joma.theory.block import velocity


def _wrong_velocity(block, samples, state):
    rate = velocity(block, samples, state)
    return rate._replace(z=1.01 * rate.z)


def _wrong_pointwise(block, v, z):
    return invariants.conserved_pointwise(block, 1.01 * v, z)


BROKEN = {
    "eqn2": _wrong_velocity,
    "assumption1-rate": lambda *setting: 1.001 * stationarity.rate(*setting),
    "thm1-linear": lambda block, v, z: z**2 - 1.01 * np.sum(v**2, axis=-1),
    "thm1-exp": lambda block, v, z: z - 0.51 * np.sum(v**2, axis=-1),
    "thm1-rates": _wrong_pointwise,
    "thm1-pointwise": _wrong_pointwise,
    "thm1-queries": _wrong_pointwise,
    "thm1-loss": _wrong_pointwise,
    "thm1-softmax-sum": lambda block, v, z: np.sum(z, axis=-1) + 0.01 * z[..., 0],
    "thm1-softmax": lambda block, v, b: invariants.softmax_logits(block, v, 1.1 * b),
    "thm1-softmax-condition": lambda pull, b, v: True,
    "thm1-embeddings": lambda block, v, z, **groups: invariants.conserved_total(
        block, 1.01 * v, z, **groups
    ),
    "thm1-softmax-rate": lambda *setting: 1.01 * memory.covariance(*setting),
    "thm1-softmax-memory": lambda block, samples, v, z: memory.logits(block, samples, 1.01 * v, z),
    "thm1-softmax-gap": lambda path: 0.97 * memory.gap_bound(path),
    "thm1-descent": lambda v, block: 1.01 * invariants.descent_drift(v, block),
    "thm1-descent-order": lambda: 2.0,
}

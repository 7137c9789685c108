"""Theorem 1 as printed."""

import numpy as np
from numpy.typing import ArrayLike

from joma.theory._checks import Array
from joma.theory.block import Block


def exp_logits(block: Block, v: ArrayLike) -> Array:
    """Theorem 1, exp attention: z - c = ½ Σ_k v_k², said to hold for any learning rates."""
    del block
    return np.sum(np.asarray(v, dtype=np.float64) ** 2, axis=-1) / 2

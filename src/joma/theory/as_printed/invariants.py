"""Theorem 1 as printed."""

import numpy as np
from numpy.typing import ArrayLike

from joma.theory._checks import Array
from joma.theory.block import Block


def exp_logits(block: Block, v: ArrayLike) -> Array:
    """Theorem 1, exp attention: z - c = ½ Σ_k v_k², said to hold for any learning rates."""
    del block
    return np.sum(np.asarray(v, dtype=np.float64) ** 2, axis=-1) / 2


def softmax_logits(block: Block, v: ArrayLike, mean_scores: ArrayLike) -> Array:
    """Theorem 1, softmax attention, without the brackets of Eqn 18: ½ Σ_k v_k² - ‖v_k‖² b̄."""
    factor = block.eta_z / (block.eta_w * block.tau)
    squares = np.sum(np.asarray(v, dtype=np.float64) ** 2, axis=-1)
    total = np.sum(squares, axis=-1, keepdims=True)
    return factor * (squares / 2 - total * np.asarray(mean_scores, dtype=np.float64))

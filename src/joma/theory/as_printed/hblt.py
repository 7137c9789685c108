"""Hierarchical binary latent trees as the JoMA paper prints them (§5, appendix A.5)."""

import numpy as np
from numpy.typing import ArrayLike

from joma.theory import _checks
from joma.theory._hblt_checks import class_arguments, heights
from joma.theory.hblt import Array


def root_uncertainty(class_probs: ArrayLike, child_off_probs: ArrayLike) -> Array:
    """Theorem 5's ρ₀ as printed, Σ_k p₀(k)P[y=0|k]: a probability where 2P − 1 is meant.

    The slip enters at Eqn 101, which writes ½(1 + P[y=0|k]) for P[y=0|k].
    """
    class_probs, child_off_probs = class_arguments(class_probs, child_off_probs)
    return np.clip(np.sum(class_probs * child_off_probs, axis=-1), 0, 1)


def cooccurrence_near_one(height: ArrayLike, depth: ArrayLike, epsilon: ArrayLike) -> Array:
    """Eqn 8 as printed, 1 − H/L + O(ε²): without the term in ε.

    At H = 0 and H = L/2 that term vanishes and the rest is exact; elsewhere the error is O(ε).
    """
    height, depth = heights(height, depth)
    epsilon = _checks.within("epsilon", epsilon, 0, 1)
    return 1 - height / depth + 0 * epsilon

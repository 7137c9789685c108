"""Checks of user input that only hierarchical binary latent trees need."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array


def heights(height: ArrayLike, depth: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Whole numbers 0 ≤ H ≤ L − 1, Theorem 5's condition on the common latent ancestor."""
    height = _checks.integers("height", height, 0)
    depth = _checks.integers("depth", depth, 1)
    _checks.together(height=height.shape, depth=depth.shape)
    if np.any(height >= depth):
        raise JomaError(
            f"height must be below the depth of the hierarchy, got {height} with depth {depth}"
        )
    return height, depth


def class_arguments(class_probs: ArrayLike, child_off_probs: ArrayLike) -> tuple[Array, Array]:
    """The class distribution and P[y=0|class] with the same number of classes, checked."""
    class_probs = _checks.distribution("class_probs", class_probs)
    child_off_probs = _checks.probabilities("child_off_probs", child_off_probs)
    if child_off_probs.ndim == 0 or child_off_probs.shape[-1] != class_probs.shape[-1]:
        raise JomaError(
            f"child_off_probs must have a last axis of {class_probs.shape[-1]} classes, "
            f"got shape {child_off_probs.shape}"
        )
    _checks.together(class_probs=class_probs.shape, child_off_probs=child_off_probs.shape)
    return class_probs, child_off_probs

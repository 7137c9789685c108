"""Scan&Snap as the talk prints it, where its conditions or constants do not hold."""

import numpy as np
from numpy.typing import ArrayLike

from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory.scan_snap import Balanced


def late_b(
    t: ArrayLike, balanced: Balanced, *, anchor: tuple[float, float], eta_y: float, eta_z: float
) -> Array:
    """Scan&Snap Theorem 4 as printed: B ~ ln(C₀ + 2K(η_Z/η_Y) ln²(Mη_Y t/K)).

    `anchor`, a late time and B there, fixes C₀, which the talk leaves open.
    """
    times = _checks.positive("t", t)
    start, b_start = anchor
    corpus = balanced.corpus
    scale = corpus.tokens * eta_y / corpus.classes
    grown = np.log(scale * times) ** 2 - np.log(scale * start) ** 2
    return np.log(np.exp(b_start) + 2 * corpus.classes * eta_z / eta_y * grown)

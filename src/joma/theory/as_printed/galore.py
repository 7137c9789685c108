"""GaLore's contraction rates as the talk prints them, for G = Σ A_i − Σ B_i W C_i."""

import numpy as np
from numpy.typing import ArrayLike


def varying_rate(
    kappa: ArrayLike,
    lipschitz_a: ArrayLike,
    lipschitz_b: ArrayLike,
    lipschitz_c: ArrayLike,
    radius: float,
    norm_b: ArrayLike,
    norm_c: ArrayLike,
) -> float:
    """GaLore's M as printed for varying A, B, C: mean κ_i − L_A − L_B L_C D²."""
    del norm_b, norm_c
    largest = [np.max(np.asarray(value)) for value in (lipschitz_a, lipschitz_b, lipschitz_c)]
    return float(np.mean(np.asarray(kappa)) - largest[0] - largest[1] * largest[2] * radius**2)

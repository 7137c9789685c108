"""GaLore's contraction rates as the talk prints them, for G = Σ A_i − Σ B_i W C_i."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.theory import _checks as checks

Array = NDArray[np.float64]


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
    checks.non_negative("norm_b", norm_b)
    checks.non_negative("norm_c", norm_c)
    largest_a, largest_b, largest_c = (
        np.max(checks.non_negative(name, value))
        for name, value in (
            ("lipschitz_a", lipschitz_a),
            ("lipschitz_b", lipschitz_b),
            ("lipschitz_c", lipschitz_c),
        )
    )
    d = float(checks.non_negative("radius", radius))
    mean = np.mean(checks.finite("kappa", kappa))
    return float(mean - largest_a - largest_b * largest_c * d**2)

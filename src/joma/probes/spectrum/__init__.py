"""Stable ranks, singular values, energies and effective ranks of weights, with error bounds.

- `stable_rank`, `stable_ranks`: ‖A‖_F²/σ₁² by block Lanczos from a random start, with a bound that
  holds with probability 1 − 1e-6 whatever the matrix, or with a certificate.
- `singular_values`, `energy`, `effective_rank`: the top of the spectrum, its share, its entropy.

Matrices may lie on a CPU or a GPU, in any floating-point type, whole or sharded (DTensor).
"""

from joma.probes.spectrum.stable import FAILURE, stable_rank, stable_ranks
from joma.probes.spectrum.values import (
    Anchor,
    EffectiveRank,
    Energy,
    SingularValues,
    StableRank,
    effective_rank,
    energy,
    singular_values,
)

__all__ = [
    "FAILURE",
    "Anchor",
    "EffectiveRank",
    "Energy",
    "SingularValues",
    "StableRank",
    "effective_rank",
    "energy",
    "singular_values",
    "stable_rank",
    "stable_ranks",
]

"""Effective rank of weights."""

from typing import TYPE_CHECKING

from joma.errors import JomaError
from joma.probes.metrics._metric import Effort, Metric

if TYPE_CHECKING:
    from torch import Tensor

    from joma.probes.spectrum import EffectiveRank

QUICK_SIDE = 2048
"""Shorter side beyond which it is not quick: it needs every singular value."""


def measure(matrix: "Tensor", effort: Effort) -> "EffectiveRank":
    """Return the effective rank of a matrix.

    Raises:
        JomaError: The matrix is too large for a quick measurement.
    """
    from joma.probes.spectrum import effective_rank

    if effort.quick and min(matrix.shape) > QUICK_SIDE:
        shape = tuple(matrix.shape)
        raise JomaError(f"it needs all singular values of a matrix of shape {shape}")
    return effective_rank(matrix)


def of_spectrum(values_ND: "Tensor") -> "Tensor":
    """Return the effective ranks of matrices with these singular values, 0 of a zero one."""
    share = values_ND / values_ND.sum(-1, keepdim=True).clamp(min=1e-300)
    entropy = -share.xlogy(share).sum(-1)  # `entr` is compiled at its first call
    return entropy.exp() * (values_ND[:, 0] > 0)


METRIC = Metric(
    name="effective_rank",
    order=140,
    sentence="exp of the entropy of the normalised singular values of a weight",
    per="weight",
    column="effective rank",
    needs="weights",
    measure=measure,
    monitored="every tenth",
    of_spectrum=of_spectrum,
)

"""What kernels and their references in torch are given."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

Side = Literal["left", "right"]

ALIGNED = 16
"""Rows that the kernel reads begin at multiples of so many numbers."""


class AdamStep(NamedTuple):
    """What a step has in common for all parameters.

    Attributes:
        rates_E: Learning rate over the bias correction of the first moment.
        decays_E: λ of L2 weight decay.
        second: Bias correction of the second moment, without axes.
        scales_E: What gradients are multiplied with; None leaves them as they are.
        betas: Decay of the moments.
        epsilon: Added to the root of the second moment.
    """

    rates_E: Tensor
    decays_E: Tensor
    second: Tensor
    scales_E: Tensor | None
    betas: tuple[float, float]
    epsilon: float


@dataclass(frozen=True, eq=False)
class Work:
    """A matrix and what its step needs.

    Attributes:
        weights: W (m, n).
        gradient: G, or the projected gradient where `move` is given that.
        basis: P (m, r) on the left, (n, r) on the right.
        side: Side of the basis.
        state: Has moments of the shape of PᵀG or GP, as `joma.kernels.moments` describes.
        group: Has "lr", "betas", "eps", "weight_decay" and "scale".
        seed: Chooses the random numbers of the rounding to eight bits.
    """

    weights: Tensor
    gradient: Tensor
    basis: Tensor
    side: Side
    state: dict[str, Any]
    group: Mapping[str, Any]
    seed: int

    @property
    def kept(self) -> float:
        """What weight decay leaves of the weights."""
        return 1 - self.group["lr"] * self.group["weight_decay"]

"""What Adam is told, as the code that moves rows one by one needs it."""

from typing import NamedTuple

from torch import Tensor


class Settings(NamedTuple):
    """Settings of Adam.

    Attributes:
        betas: decay of the first and of the second moment.
        epsilon: added to the root of the second moment.
        learning_rates: one for each member, (E,).
    """

    betas: tuple[float, float]
    epsilon: float
    learning_rates: Tensor

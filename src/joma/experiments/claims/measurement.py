"""How far a formula lies from an independent reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Formula = Callable[..., Any]
"""What a claim says, as a function that its measurement calls."""


@dataclass(frozen=True)
class Measurement:
    """How far a formula lies from an independent reference.

    Attributes:
        error: the distance, in the measure's own unit.
        tolerance: the largest error at which the claim holds.
        standard_error: of the reference, when it is a Monte-Carlo estimate.
    """

    error: float
    tolerance: float
    standard_error: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return bool(self.error <= self.tolerance)


def monte_carlo(difference: Any, standard_error: Any) -> Measurement:
    """The verdict of a Monte-Carlo estimate: it holds within four standard errors.

    Of several compared numbers the one farthest away, counted in its own standard errors, speaks.
    """
    difference, standard_error = np.broadcast_arrays(
        np.abs(np.atleast_1d(difference)), np.atleast_1d(standard_error)
    )
    worst = int(np.argmax(difference / standard_error))
    se = float(standard_error.flat[worst])
    return Measurement(float(difference.flat[worst]), 4 * se, se)

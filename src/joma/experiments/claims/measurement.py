"""How far a formula lies from an independent reference."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ClaimMeasurement:
    """How far a formula lies from an independent reference.

    Attributes:
        error: Distance, in the measure's own unit.
        tolerance: Largest error at which the claim holds.
        standard_error: Standard error of the reference if it is a Monte-Carlo estimate.
    """

    error: float
    tolerance: float
    standard_error: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return bool(self.error <= self.tolerance)


def measured(errors: Any, tolerance: Any) -> ClaimMeasurement:
    """Return the measurement of the largest of some errors."""
    return ClaimMeasurement(float(np.max(errors)), float(tolerance))


def largest_error(measurements: Iterable[ClaimMeasurement]) -> ClaimMeasurement:
    """Return the measurement with the largest error: every case must hold."""
    return max(measurements, key=lambda one: one.error)


def smallest_error(measurements: Iterable[ClaimMeasurement]) -> ClaimMeasurement:
    """Return the measurement with the smallest error: every case must fail."""
    return min(measurements, key=lambda one: one.error)


def difference(ours: Any, reference: Any) -> float:
    """Return the largest difference of two arrays."""
    return float(np.max(np.abs(ours - reference)))


def relative(ours: Any, reference: Any) -> float:
    """Return the largest difference of two arrays over the largest entry of the reference."""
    return difference(ours, reference) / float(np.max(np.abs(reference), initial=1e-300))


def monte_carlo(difference: Any, standard_error: Any) -> ClaimMeasurement:
    """Return the measurement of a Monte-Carlo estimate, which holds within four standard errors.

    Of several numbers the one with the largest difference in its own standard errors counts.
    """
    difference, standard_error = np.broadcast_arrays(
        np.abs(np.atleast_1d(difference)), np.atleast_1d(standard_error)
    )
    worst = int(np.argmax(difference / standard_error))
    se = float(standard_error.flat[worst])
    return ClaimMeasurement(float(difference.flat[worst]), 4 * se, se)

"""Differences between two measurements of the same things, with their standard error."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Paired:
    """A mean difference between two measurements of the same seeds, windows or examples.

    Attributes:
        mean: Mean difference.
        error: Its standard error; NaN for one pair.
        count: Number of pairs.
        unit: What the pairs are, as "seeds".
    """

    mean: float
    error: float
    count: int
    unit: str = "seeds"

    @property
    def is_clear(self) -> bool:
        """Whether the difference exceeds two standard errors, where there is one."""
        return abs(self.mean) > 2 * self.error

    def __str__(self) -> str:
        if self.count == 1:
            return f"{self.mean:+.4f} (one {self.unit.removesuffix('s')})"
        return f"{self.mean:+.4f} ± {self.error:.4f} (SE, {self.count} {self.unit})"


def paired(ours: ArrayLike, others: ArrayLike, unit: str = "seeds") -> Paired:
    """Return the mean of paired differences with its standard error, over pairs that are there.

    Args:
        ours: Measurements, one of each pair.
        others: The others, in the same order.
        unit: What the pairs are.
    """
    differences = np.asarray(ours, float) - np.asarray(others, float)
    differences = differences[np.isfinite(differences)]
    count = len(differences)
    mean = float(differences.mean()) if count else float("nan")
    error = float(differences.std(ddof=1) / np.sqrt(count)) if count > 1 else float("nan")
    return Paired(mean, error, count, unit)

"""How far the probes tell beforehand what it costs to cut a layer: rank correlations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

PREDICTORS = ("entropy", "first", "heavy")
PREDICTOR_TITLES = {
    "entropy": "entropy",
    "first": "first-token mass",
    "heavy": "heavy-hitter mass",
}
RESAMPLES = 2000
"""How often layers are drawn again for an interval."""
_LEAST = 4
"""Layers without which a correlation says nothing."""


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation over the layers of a model.

    Attributes:
        value: The correlation; NaN where it is not defined.
        low: Lower end of its 95% bootstrap interval over layers.
        high: Upper end.
        layers: Number of layers.
    """

    value: float
    low: float
    high: float
    layers: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def spearman(one: Sequence[float], other: Sequence[float], seed: int = 0) -> Correlation:
    """Return the rank correlation with a percentile interval from layers drawn again.

    With 6 layers such an interval held a known correlation in 87 to 98% of simulated cases, with 18
    and more in 94 to 98%; where all ranks agree it has no width.

    Args:
        one: A number for each layer.
        other: Another one for each.
        seed: Decides the draws.
    """
    x, y = np.asarray(one, float), np.asarray(other, float)
    if len(x) < _LEAST or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Correlation(float("nan"), float("nan"), float("nan"), len(x))
    random = np.random.default_rng(seed)
    drawn = random.integers(0, len(x), (RESAMPLES, len(x)))
    ranks_x, ranks_y = (stats.rankdata(values[drawn], axis=1) for values in (x, y))
    with np.errstate(invalid="ignore", divide="ignore"):
        found = _rowwise(ranks_x, ranks_y)
    found = found[np.isfinite(found)]  # a draw of one layer alone has no correlation
    low, high = np.quantile(found, [0.025, 0.975])
    value = float(stats.spearmanr(x, y).statistic)
    return Correlation(value, float(low), float(high), len(x))


def held_out(
    features: Mapping[str, NDArray[np.float64]], costs: Mapping[str, NDArray[np.float64]]
) -> dict[str, Correlation]:
    """Return how a combination of predictors ranks the layers of each model left out in turn.

    Ranks within each model are combined linearly, by least squares on all other models, each of
    which counts the same.

    Args:
        features: Predictors of each layer by model, (layers, predictors).
        costs: Cost of each layer by model, (layers,).
    """
    found = {}
    for name in features:
        others = [other for other in features if other != name and len(costs[other]) >= _LEAST]
        if not others:
            continue
        weights = [np.full(len(costs[other]), len(costs[other]) ** -0.5) for other in others]
        x = np.concatenate([_ranks(features[other]) for other in others])
        y = np.concatenate([_ranks(costs[other]) for other in others])
        scale = np.concatenate(weights)
        fit, *_ = np.linalg.lstsq(x * scale[:, None], y * scale, rcond=None)
        found[name] = spearman(list(_ranks(features[name]) @ fit), list(costs[name]))
    return found


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks along the layers from −1 to 1."""
    count = len(values)
    return 2 * (stats.rankdata(values, axis=0) - 1) / max(count - 1, 1) - 1


def _rowwise(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    return (x * y).sum(1) / np.sqrt((x * x).sum(1) * (y * y).sum(1))

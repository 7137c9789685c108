"""Samples of a posterior by annealing: sequential Monte Carlo with Metropolis moves.

The likelihood depends on a point through its sum of squares alone. Draws of a start distribution
are carried through the posteriors that hold if the noise had at least a level, which falls to zero:
weigh, resample, move, at every level that keeps half of the effective sample. A draw has a group,
which moves do not change (the number of components); within it, it is a vector of real numbers.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from joma.theory._checks import Array

_KEPT = 0.5  # effective share of the sample that one level keeps

Groups = NDArray[np.int64]


class Draws(NamedTuple):
    """Points (P, D), the group of each (P,), its ln prior (P,) and its sum of squares (P,).

    Of a group, the first D_g coordinates count; the others are zero.
    """

    points: Array
    group: Groups
    prior: Array
    squares: Array

    def pick(self, chosen: NDArray[np.int64]) -> "Draws":
        """The draws with these numbers."""
        return Draws(
            self.points[chosen], self.group[chosen], self.prior[chosen], self.squares[chosen]
        )


class Slopes(NamedTuple):
    """Of points: ln prior, sum of squares S, and of S/2 gradient (P, D) and metric (P, D, D).

    The metric is that of Gauss and Newton, the product of the curve's slopes.
    """

    prior: Array
    squares: Array
    gradient: Array
    metric: Array


class Target(NamedTuple):
    """What is sampled.

    Attributes:
        measure: Of points and groups, ln prior (-inf outside) and sum of squares.
        log_likelihood: Of sums of squares and a level of noise.
        precision: Of the same, the mean of 1/σ² that multiplies S/2.
        sizes: Number of coordinates that count, by group.
        levels: Decreasing levels of noise, the last one 0.
        slopes: Of points and groups, or None where no move needs them.
        floor: Precision (D,) of the prior, added to the metric.
        moves: Metropolis moves of either kind at a level, and at the posterior itself.
    """

    measure: Callable[[Array, Groups], tuple[Array, Array]]
    log_likelihood: Callable[[Array, float], Array]
    precision: Callable[[Array, float], Array]
    sizes: dict[int, int]
    levels: Array
    slopes: Callable[[Array, Groups], Slopes] | None
    floor: Array
    moves: tuple[int, int]


def sample(
    target: Target, draws: Draws, start: Array, count: int, rng: np.random.Generator
) -> Draws:
    """Return `count` draws of the posterior.

    Args:
        target: What is sampled.
        draws: Drawn from the start distribution, any number.
        start: Ln density of the start distribution at these.
        count: How many draws to carry along.
        rng: Source of randomness.
    """
    before, level = start - draws.prior, np.inf
    width, reach = 1.0, 0.7
    while level > 0:
        level, weight = _next(target, draws, before, level, count)
        draws = draws.pick(_systematic(weight, count, rng))
        moves = target.moves[0] if level > 0 else target.moves[1]
        for _ in range(moves):
            draws, accepted = _move(target, draws, level, width, rng)
            width = float(np.clip(width * np.exp(0.5 * (accepted - 0.25)), 0.02, 2.0))
        if target.slopes is not None:
            here = target.slopes(draws.points, draws.group)
            for _ in range(moves):
                draws, here, accepted = _follow(target, draws, here, level, reach, rng)
                reach = float(np.clip(reach * np.exp(0.5 * (accepted - 0.4)), 0.02, 1.5))
        before = target.log_likelihood(draws.squares, level)
    return draws


def _next(
    target: Target, draws: Draws, before: Array, level: float, count: int
) -> tuple[float, Array]:
    """The lowest level that leaves an effective sample of `_KEPT * count` draws, by bisection."""
    candidates = target.levels[target.levels < level]

    def weigh(index: int) -> Array:
        log_weight = target.log_likelihood(draws.squares, float(candidates[index])) - before
        weight = np.exp(log_weight - np.max(log_weight))
        return weight / np.sum(weight)

    low, high = 0, candidates.size - 1  # at least one level further
    weight = weigh(high)
    if 1 / np.sum(weight**2) >= _KEPT * count:
        return float(candidates[high]), weight
    weight = weigh(low)
    while high - low > 1:
        middle = (low + high) // 2
        trial = weigh(middle)
        if 1 / np.sum(trial**2) >= _KEPT * count:
            low, weight = middle, trial
        else:
            high = middle
    return float(candidates[low]), weight


def _systematic(weight: Array, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    places = (np.arange(count) + rng.uniform()) / count
    return np.minimum(np.searchsorted(np.cumsum(weight), places), weight.size - 1)


def _move(
    target: Target, draws: Draws, level: float, width: float, rng: np.random.Generator
) -> tuple[Draws, float]:
    """One Metropolis step of all draws, by differences of draws of the same group."""
    proposed = draws.points.copy()
    for group, size in target.sizes.items():
        own = np.nonzero(draws.group == group)[0]
        if own.size > 2 * size:
            proposed[own, :size] += _differences(draws.points[own, :size], width, rng)
        elif own.size:
            spread = np.std(draws.points[:, :size], axis=0)
            proposed[own, :size] += 0.3 * spread * rng.normal(size=(own.size, size))
    prior, squares = target.measure(proposed, draws.group)
    gain = prior - draws.prior
    gain += target.log_likelihood(squares, level) - target.log_likelihood(draws.squares, level)
    accept = np.log(rng.uniform(size=gain.size)) < gain
    moved = Draws(
        np.where(accept[:, None], proposed, draws.points),
        draws.group,
        np.where(accept, prior, draws.prior),
        np.where(accept, squares, draws.squares),
    )
    return moved, float(np.mean(accept))


def _differences(points: Array, width: float, rng: np.random.Generator) -> Array:
    """Steps of differential evolution: differences of other draws, of all or a few coordinates."""
    count, size = points.shape
    every = np.arange(count, dtype=np.int64)
    first = np.asarray((every + rng.integers(1, count, count)) % count, dtype=np.int64)
    second = np.asarray((every + rng.integers(1, count, count)) % count, dtype=np.int64)
    share = rng.choice([1.0, 0.5, 1.5 / size], (count, 1))
    chosen = rng.uniform(size=(count, size)) < share
    # Steps of many sizes: a bent posterior needs short ones, its tails long ones.
    factor = width * 1.7 * np.exp(rng.normal(0, 0.7, (count, 1)))
    factor = factor / np.sqrt(np.maximum(np.sum(chosen, axis=1, keepdims=True), 1))
    noise = 1e-6 * np.std(points, axis=0) * rng.normal(size=points.shape)
    return chosen * (factor * (points[first] - points[second]) + noise)


def _follow(
    target: Target,
    draws: Draws,
    here: Slopes,
    level: float,
    reach: float,
    rng: np.random.Generator,
) -> tuple[Draws, Slopes, float]:
    """One Metropolis-adjusted Langevin step of all draws, each with the metric at its place.

    It follows a narrow and bent posterior, to which differences of far draws do not point.
    """
    assert target.slopes is not None
    size = np.zeros(max(target.sizes) + 1, dtype=np.int64)
    for group, number in target.sizes.items():
        size[group] = number
    index = np.arange(draws.points.shape[1], dtype=np.int64)
    counts = np.less(index, size[draws.group][:, None])
    step = reach * np.exp(rng.normal(0, 0.7, (len(draws.points), 1)))
    mean, root = _drift(target, here, draws.points, counts, level, step)
    noise = rng.normal(size=mean.shape)
    proposed = mean + step * np.linalg.solve(np.swapaxes(root, 1, 2), noise[..., None])[..., 0]
    proposed = np.where(counts, proposed, 0.0)
    there = target.slopes(proposed, draws.group)
    mean_back, root_back = _drift(target, there, proposed, counts, level, step)
    gain = there.prior - here.prior
    gain += target.log_likelihood(there.squares, level) - target.log_likelihood(here.squares, level)
    gain += _log_normal(draws.points - mean_back, root_back, step, counts)
    gain -= _log_normal(proposed - mean, root, step, counts)
    accept = np.log(rng.uniform(size=gain.size)) < gain
    now = Slopes(
        np.where(accept, there.prior, here.prior),
        np.where(accept, there.squares, here.squares),
        np.where(accept[:, None], there.gradient, here.gradient),
        np.where(accept[:, None, None], there.metric, here.metric),
    )
    points = np.where(accept[:, None], proposed, draws.points)
    return Draws(points, draws.group, now.prior, now.squares), now, float(np.mean(accept))


def _drift(
    target: Target,
    at: Slopes,
    points: Array,
    counts: NDArray[np.bool_],
    level: float,
    step: Array,
) -> tuple[Array, Array]:
    """Mean of the proposal, and the Cholesky root of its precision before the step size."""
    precision = target.precision(at.squares, level)[:, None, None]
    metric = precision * at.metric
    index = np.arange(points.shape[1], dtype=np.int64)
    metric[:, index, index] += np.where(counts, target.floor, 1.0)
    root = np.asarray(np.linalg.cholesky(metric), dtype=np.float64)
    pull = np.linalg.solve(metric, -precision * at.gradient[..., None])[..., 0]
    return points + step**2 / 2 * pull, root


def _log_normal(away: Array, root: Array, step: Array, counts: NDArray[np.bool_]) -> Array:
    scaled = np.einsum("pij,pi->pj", root, np.where(counts, away, 0.0)) / step
    log_root = np.sum(np.where(counts, np.log(np.diagonal(root, axis1=1, axis2=2)), 0.0), axis=1)
    return log_root - np.sum(scaled**2, axis=1) / 2

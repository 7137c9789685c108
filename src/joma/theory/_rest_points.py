"""Where a ReLU node rests between two clusters (Theorem 3, completed)."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory._marginal import Marginal
from joma.theory.marginals import Ball, Gaussian, Laplace, Logistic, Scaled, StudentT

_SUBSTANTIAL_MASS = 0.05  # of the positive cluster on the active side
FAR = 1e6  # how many times the largest length the search for rest points goes out


class CriticalPoint(NamedTuple):
    """Where a node rests between a negative cluster and a positive one.

    Attributes:
        s_minus: distance of the negative cluster from the hyperplane.
        s_plus: distance of the positive cluster.
        ratio: the a₋/a₊ at which, and only at which, the node rests; inf above the largest float.
    """

    s_minus: float
    s_plus: float
    ratio: float


def critical_points(
    marginal: Marginal, distance: float, *, negative: Marginal | None = None
) -> list[CriticalPoint]:
    """Theorem 3 (Eqn 56, corrected): critical points for clusters `distance` apart.

    They need s₊ - s₋ = D and equal mean residual lives F/θ₁ of the two clusters, each at its own
    distance; then a₋/a₊ = θ₁(s₊)/θ₁(s₋). For clusters of one shape there are none where F/θ₁ is
    injective (Gaussian, logistic, uniform in a ball). Nodes can rest between clusters of unequal
    width where they cannot between those of equal width: for two Gaussians, if and only if the
    positive one is narrower. Where F/θ₁ is flat over a stretch of length D or more (Laplace below
    zero) there is a continuum, of which the end with the largest s₊ is given. In (v, ξ) each point
    is a ray: the field is homogeneous.

    The search covers |s₋| up to 1e6 times the largest of D and the widths, and lives that differ by
    more than rounding. Where the signs at its ends show that a point lies outside (two Gaussians
    whose widths differ by 1e-7 of themselves, or a D of 1e-14 of the width), it raises `JomaError`.
    For a marginal that is not of a named family only the end s₋ → ∞ is checked.

    v points from the negative cluster to the positive one. For the other direction exchange the two
    clusters and invert the ratio; those points are never stable in two dimensions or more.

    Args:
        marginal: shape of the positive cluster, and of the negative one unless `negative` is given.
        distance: D = ‖x̄₊ - x̄₋‖ > 0.
        negative: shape of the negative cluster where it differs, such as
            `Scaled(Gaussian(), width=2.0)`.

    Returns:
        The points found, by increasing s₋; empty where none exist.
    """
    marginal, other = two_shapes(marginal, negative)
    distance = _checks.positive_scalar("distance", distance)

    def gap(s: float) -> float:
        """Log ratio of the mean residual lives; relative, so that heavy tails keep their sign."""
        return float(log_life_ratio(marginal, other, np.array([s]), distance)[0])

    grid = search_grid(marginal, other, distance)
    gaps = log_life_ratio(marginal, other, grid, distance)
    known = known_part(marginal, grid + distance) & known_part(other, grid)
    grid, gaps = grid[known & np.isfinite(gaps)], gaps[known & np.isfinite(gaps)]
    level = np.abs(gaps) < marginal.mean_residual_error(grid + distance) + (
        other.mean_residual_error(grid)
    )
    roots: list[float] = []
    steep = np.nonzero(~level)[0]
    _check_ends(marginal, other, distance, gaps[steep])
    for i, j in itertools.pairwise(steep):
        if gaps[i] * gaps[j] < 0:
            roots.append(float(optimize.brentq(gap, grid[i], grid[j], xtol=1e-14, rtol=1e-14)))
    roots += _double_roots(gap, grid, gaps, level)
    # Equal lives up to a place of substantial mass are a continuum; farther out they may only
    # tend to one value.
    for i in np.nonzero(level[:-1] & ~level[1:])[0]:
        lone = i > 0 and not level[i - 1]
        before = steep[steep < i]
        # A change of sign across the stretch is one root, found above, that rounding blurs.
        crossed = before.size > 0 and gaps[before[-1]] * gaps[i + 1] < 0
        if not lone and not crossed and marginal.theta1(grid[i] + distance) > _SUBSTANTIAL_MASS:
            roots.append(_end_of_level(marginal, grid[i], grid[i + 1], distance))
    with np.errstate(over="ignore"):
        return [
            CriticalPoint(
                s,
                s + distance,
                float(np.exp(marginal.log_theta1(s + distance) - other.log_theta1(s))),
            )
            for s in sorted(roots)
        ]


def fixed_bias_ratio(
    marginal: Marginal, s_minus: float, distance: float, *, negative: Marginal | None = None
) -> float:
    """Theorem 3 (new) for x̄₋ = 0: the a₋/a₊ at which v rests at fixed ξ.

    v̇ = 0 alone asks for a₊ (D θ₁(s₊) + θ₂(s₊)) = a₋ θ₂(s₋). One positive ratio meets it if the
    hyperplane cuts the negative cluster and the positive one is not all inactive: always for
    clusters without an end, and for bounded ones if |s₋| < reach₋ and s₊ > -reach₊. Only ξ̇ = 0 in
    addition asks for equal mean residual lives. The ratio is inf above the largest float.

    Args:
        marginal: shape of the positive cluster, and of the negative one unless `negative` is given.
        s_minus: s₋ = ξ/‖v‖.
        distance: D = ‖x̄₊ - x̄₋‖ > 0; v points from the negative cluster to the positive one.
        negative: shape of the negative cluster where it differs.
    """
    marginal, other = two_shapes(marginal, negative)
    s, distance = _checks.scalar("s_minus", s_minus), _checks.positive_scalar("distance", distance)
    if abs(s) >= other.reach:
        raise JomaError(
            f"s_minus must be less than {other.reach:.6g} in size, or the hyperplane does not cut "
            f"the negative cluster and no ratio of its own makes v rest; got {s}"
        )
    if s + distance <= -marginal.reach:
        raise JomaError(
            f"s_minus must be above {-marginal.reach - distance:.6g}, or the positive cluster is "
            f"all inactive; got {s}"
        )
    spread = float(other.theta2(s))
    moment = float(distance * marginal.theta1(s + distance) + marginal.theta2(s + distance))
    if min(spread, moment) > 1e-290:
        return moment / spread
    share = np.log(distance) + float(marginal.log_theta1(s + distance))
    with np.errstate(invalid="ignore"):
        log_moment = np.logaddexp(share, _log_theta2(marginal, s + distance))
    log_ratio = log_moment - _log_theta2(other, s)
    if not np.isfinite(log_ratio):
        raise JomaError(f"s_minus must lie where the tails of both clusters are known, got {s}")
    with np.errstate(over="ignore"):
        return float(np.exp(log_ratio))


def two_shapes(marginal: Marginal, negative: Marginal | None) -> tuple[Marginal, Marginal]:
    """Return the shapes of the positive and of the negative cluster."""
    other = marginal if negative is None else negative
    return marginal, other


def _check_ends(positive: Marginal, negative: Marginal, distance: float, gaps: Array) -> None:
    """Raise an error if the signs at the ends of the search show that it missed a point."""
    # For s → ∞, F₊/F₋ = (s+D)/s in the limit, so that m₊ > m₋ there.
    limit = tail_limit(positive, negative, distance)
    rises = 0 if limit is None else limit.rises
    if gaps.size == 0 or gaps[-1] < 0 or gaps[0] * rises < 0:
        raise JomaError(
            f"distance must let the rest point be found, got {distance}: it lies more than "
            f"{FAR:.0e} times the largest length away, or where the mean residual lives are equal "
            "to rounding; the clusters are too close or too much alike"
        )


def log_life_ratio(positive: Marginal, negative: Marginal, s: Array, distance: float) -> Array:
    """Ln of m₊(s+D)/m₋(s), the ratio of the mean residual lives of two clusters at rest."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(positive.mean_residual(s + distance) / negative.mean_residual(s))


def known_part(marginal: Marginal, s: Array) -> NDArray[np.bool_]:
    """Whether each place lies where the marginal is known."""
    if marginal.least_mass == 0:
        return np.full(s.shape, True)
    return marginal.theta1(s) > marginal.least_mass


def mean_width(marginal: Marginal) -> float:
    """E|u|, the length by which a cluster is wide."""
    return 2 * float(marginal.theta2(0.0))


def search_grid(positive: Marginal, negative: Marginal, distance: float) -> Array:
    """Return places s₋ to search: fine near zero, geometric far out, for heavy tails."""
    widths = [mean_width(positive), mean_width(negative)]
    largest = max(distance, *widths)
    low = -min(negative.reach, positive.reach + distance, FAR * largest)
    far = np.geomspace(1e-3 * min(1.0, distance, *widths), FAR * largest, 160)
    parts = [-far, far, -far - distance, [0.0, -distance], low + far[far < largest]]
    parts += [np.linspace(-2 * distance, distance, 97)]
    parts += [np.linspace(-4 * w - distance, 4 * w, 97) for w in set(widths)]
    grid = np.unique(np.concatenate(parts))
    # Places all but equal would turn a root that falls on them into a stretch.
    grid = grid[np.diff(grid, prepend=-np.inf) > 1e-9 * np.maximum(distance, np.abs(grid))]
    return grid[(grid > low) & (grid <= FAR * largest)]


def _double_roots(
    gap: Callable[[float], float], grid: Array, gaps: Array, level: NDArray[np.bool_]
) -> list[float]:
    """Pairs of roots between neighbours of the grid, where the gap turns before it is zero."""
    size = np.abs(gaps)
    turns = np.nonzero(
        (size[1:-1] < size[:-2])
        & (size[1:-1] < size[2:])
        & (gaps[:-2] * gaps[2:] > 0)
        & (gaps[:-2] * gaps[1:-1] > 0)
        & ~(level[:-2] | level[1:-1] | level[2:])
        & (size[1:-1] < 0.05)
    )[0]
    found: list[float] = []
    for i in turns + 1:
        sign = float(np.sign(gaps[i]))

        def size_at(s: float, sign: float = sign) -> float:
            return sign * gap(s)

        turn: Any = optimize.minimize_scalar(
            size_at,
            bounds=(grid[i - 1], grid[i + 1]),
            method="bounded",
            options={"xatol": 1e-10 * max(1.0, abs(grid[i]))},
        )
        if turn.fun < 0:
            ends = (grid[i - 1], float(turn.x)), (float(turn.x), grid[i + 1])
            found += [float(optimize.brentq(gap, *pair, xtol=1e-14, rtol=1e-14)) for pair in ends]
    return found


def _end_of_level(marginal: Marginal, inside: float, outside: float, distance: float) -> float:
    """The s at which the mean residual life begins to rise at s + distance, by bisection."""
    for _ in range(80):
        middle = (inside + outside) / 2
        at = middle + distance
        slope = 1 - marginal.mean_residual(at) / marginal.inverse_hazard(at)
        inside, outside = (middle, outside) if slope < 1e-9 else (inside, middle)
    return float(inside - 1e-8 * distance)  # safely within


def _log_theta2(marginal: Marginal, s: float) -> float:
    """Ln θ₂, right also where θ₂ is below the smallest float; NaN where the tail is not known."""
    x = abs(s)
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(marginal.log_theta1(-x) + np.log(marginal.mean_residual(-x) + x))


class TailLimit(NamedTuple):
    """The end of F₊(s+D)/F₋(s) at which both clusters leave the active side.

    Attributes:
        ratio: its limit there, from 0 to inf.
        rises: +1 if the ratio rises towards that end, -1 if it falls, 0 if that is not known.
    """

    ratio: float
    rises: int


def tail_limit(positive: Marginal, negative: Marginal, distance: float) -> TailLimit | None:
    """Return the limit for two named families, scaled or not; None for any other marginal.

    With x = -s, F falls like x^{1-df} for Student's t, like e^{-x/w} for the Laplace and logistic
    distributions of width w, and like e^{-x²/2w²} for the Gaussian. The ball ends at its radius.
    """
    plus, w_plus = _unscaled(positive)
    minus, w_minus = _unscaled(negative)
    ranks = _rank(plus), _rank(minus)
    if 0 in ranks:
        return None
    if ranks[0] != ranks[1]:
        return _of_sign(ranks[0] - ranks[1])
    if isinstance(plus, StudentT) and isinstance(minus, StudentT):
        if plus.df != minus.df:
            return _of_sign(minus.df - plus.df)
        with np.errstate(over="ignore"):
            limit = float(np.exp(plus.df * (np.log(w_plus) - np.log(w_minus))))
        return TailLimit(limit, -1)  # like 1 + (df-1) D/x
    if isinstance(plus, Ball) and isinstance(minus, Ball):
        beyond = w_plus + distance - w_minus
        if beyond != 0 or plus.n != minus.n:
            return _of_sign(beyond if beyond != 0 else minus.n - plus.n)
        return TailLimit(float((w_minus / w_plus) ** ((plus.n + 1) / 2)), 0)
    if w_plus != w_minus:
        return _of_sign(w_plus - w_minus)
    if isinstance(plus, Gaussian):
        return TailLimit(np.inf, 1)
    # F is w e^{-x/w} (1 - e^{-x/w}/2 + …) for the logistic distribution, half of w e^{-x/w} for
    # the Laplace distribution.
    factor = (1.0 if isinstance(plus, Logistic) else 0.5) / (
        1.0 if isinstance(minus, Logistic) else 0.5
    )
    with np.errstate(over="ignore"):
        limit = float(factor * np.exp(distance / w_plus))
    return TailLimit(limit, _rise_of_exponential_tails(plus, minus))


def _rise_of_exponential_tails(plus: Marginal, minus: Marginal) -> int:
    if isinstance(plus, Logistic):
        return 1
    return -1 if isinstance(minus, Logistic) else 0


def _of_sign(difference: float) -> TailLimit:
    return TailLimit(np.inf, 1) if difference > 0 else TailLimit(0.0, -1)


def _unscaled(marginal: Marginal) -> tuple[Marginal, float]:
    width = 1.0
    while isinstance(marginal, Scaled):
        marginal, width = marginal.marginal, width * marginal.width
    return marginal, width


def _rank(marginal: Marginal) -> int:
    """The heavier the tail the larger; 0 for a marginal that is not of a named family."""
    match marginal:
        case StudentT():
            return 4
        case Laplace() | Logistic():
            return 3
        case Gaussian():
            return 2
        case Ball():
            return 1
        case _:
            return 0

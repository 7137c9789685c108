"""Stability of rest points, clusters of any number, and what becomes of nodes that do not rest.

The node ascends Φ(v, ξ) = E[g φ(v·x+ξ)] = ‖v‖ Σ a_j F_j(s_j), which is homogeneous of degree one.
So Φ = 0 at rest (Lemma 4 is Euler's theorem), each rest point is a ray, and the Jacobian of the
flow in (v, ξ) is the Hessian of Φ. For two clusters the ray lies at a stationary point of
F₊(s+D)/F₋(s), whose value is a₋/a₊.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory._marginal import Marginal
from joma.theory._rest_points import (
    CriticalPoint,
    critical_points,
    known_part,
    log_life_ratio,
    search_grid,
    tail_limit,
    two_shapes,
)

Marginals = Marginal | list[Marginal] | tuple[Marginal, ...]
"""The shape of all clusters, or one shape for each."""

_EQUAL_LIVES = 1e-9
"""Relative difference up to which mean residual lives count as equal."""


def is_stable(
    marginal: Marginal, point: CriticalPoint, *, negative: Marginal | None = None
) -> bool:
    """Theorem 3 (new): whether a node at a critical point returns to its ray from all around it.

    It does if and only if a₋p(s₋) > a₊p(s₊), that is θ₁/p is larger at s₊ than at s₋; in other
    words if the mean residual life rises faster at s₊ than at s₋. It is enough that it rises at s₊
    and falls at s₋. In a continuum of critical points, as of Laplace clusters, it does not.

    Args:
        marginal: shape of the positive cluster, and of the negative one unless `negative` is given.
        point: a critical point of these clusters.
        negative: shape of the negative cluster where it differs.
    """
    marginal, other = two_shapes(marginal, negative)
    if point.s_plus <= point.s_minus:
        return False
    hazards = other.inverse_hazard(point.s_minus), marginal.inverse_hazard(point.s_plus)
    rounding = 50 * max(marginal.noise, other.noise)
    return bool(hazards[1] > hazards[0] * (1 + rounding))


class Jacobian(NamedTuple):
    """Eigenvalues of ∂v̇/∂v at a critical point, at fixed bias."""

    transverse: float
    longitudinal: float

    @property
    def stable(self) -> bool:
        """Whether the node returns from every small displacement of v."""
        return self.transverse < 0 and self.longitudinal < 0


def jacobian(
    marginal: Marginal,
    point: CriticalPoint,
    *,
    negative: Marginal | None = None,
    positive_gradient: float = 1.0,
    length: float = 1.0,
) -> Jacobian:
    """Theorem 3 (Eqns 72-74, corrected) for x̄₋ = 0 and v ∥ x̄₊: the Jacobian in v at fixed ξ.

    Across μ it is -s_μ a₊ θ₁(s₊) ‖x̄₊‖/‖μ‖, along μ it is -(ξ²/‖μ‖³)[a₋ p(s₋) - a₊ p(s₊)].

    Args:
        marginal: shape of the positive cluster, and of the negative one unless `negative` is given.
        point: a critical point; s_μ = 1 as s₊ > s₋.
        negative: shape of the negative cluster where it differs.
        positive_gradient: a₊; a₋ is the point's ratio times it.
        length: ‖μ‖, which places the point on its ray.
    """
    across, hazard, length = _two_clusters(marginal, negative, point, positive_gradient, length)
    return Jacobian(across / length, point.s_minus**2 * hazard / length)


class Eigenvalues(NamedTuple):
    """Eigenvalues of the flow in (v, ξ) at a rest point, besides the 0 along its ray.

    Attributes:
        across: for a turn of v out of the line of the clusters, once for each dimension but one.
        along: for a shift of the hyperplane along the line.
    """

    across: float
    along: float

    @property
    def stable(self) -> bool:
        """Whether the node returns to its ray from every small displacement."""
        return self.across < 0 and self.along < 0


def eigenvalues(
    marginal: Marginal,
    point: CriticalPoint,
    *,
    negative: Marginal | None = None,
    positive_gradient: float = 1.0,
    length: float = 1.0,
) -> Eigenvalues:
    """Theorem 3 (new) for x̄₋ = 0, with ξ free: 0 along the ray, and two eigenvalues.

    Across the line it is -a₊ θ₁(s₊) D/‖μ‖, along it -(1+s₋²)[a₋ p(s₋) - a₊ p(s₊)]/‖μ‖. Both are 0
    where a₊ θ₁(s₊) is below the smallest float; `is_stable` is right there too.

    Args:
        marginal: shape of the positive cluster, and of the negative one unless `negative` is given.
        point: a critical point of these clusters.
        negative: shape of the negative cluster where it differs.
        positive_gradient: a₊; a₋ is the point's ratio times it.
        length: ‖μ‖, which places the point on its ray.
    """
    across, hazard, length = _two_clusters(marginal, negative, point, positive_gradient, length)
    return Eigenvalues(across / length, (1 + point.s_minus**2) * hazard / length)


def full_jacobian(
    marginal: Marginals, gradients: ArrayLike, means: ArrayLike, v: ArrayLike, bias: float
) -> Array:
    """Theorem 3 (new): ∂(v̇, ξ̇)/∂(v, ξ) for any clusters and any node, shape (n+1, n+1).

    It is (Σ_j a_j p_j(s_j) y_j y_jᵀ + (Σ_j a_j θ₂(s_j)) P)/‖v‖, where y_j = (x̄_j - s_j v/‖v‖, 1)
    holds the foot of the perpendicular from x̄_j on the hyperplane, and P projects v across itself.
    It is symmetric, and (v, ξ) is in its kernel. With all clusters on one line along v, every y_j
    is the place x* where the line meets the hyperplane, and the eigenvalues are 0,
    (1+‖x*‖²) Σ a_j p_j(s_j)/‖v‖ and, across the line, Σ a_j θ₂(s_j)/‖v‖.

    Args:
        marginal: shape of every cluster, or a list of one for each.
        gradients: a_j, shape (C,).
        means: x̄_j, shape (C, n).
        v: weight of the node, shape (n,), not zero.
        bias: its implicit bias ξ.
    """
    node = _node(marginal, means, v, bias, gradients)
    weights = node.gradients * np.array(
        [float(one.pdf(s)) for one, s in zip(node.shapes, node.distances, strict=True)]
    )
    spread = node.gradients @ np.array(
        [float(one.theta2(s)) for one, s in zip(node.shapes, node.distances, strict=True)]
    )
    feet = node.means - node.distances[:, None] * node.direction
    feet = np.column_stack([feet, np.ones(len(feet))])
    across = np.zeros((feet.shape[1],) * 2)
    across[:-1, :-1] = np.eye(feet.shape[1] - 1) - np.outer(node.direction, node.direction)
    return ((feet.T * weights) @ feet + spread * across) / node.length


def resting_gradients(
    marginal: Marginals, means: ArrayLike, v: ArrayLike, bias: float, signs: ArrayLike
) -> Array | None:
    """Theorem 3 (new): gradients of given signs at which a node rests, or None if there are none.

    A node rests if and only if the forces c_j = a_j θ₁(s_j) satisfy Σ c_j = 0 and
    Σ c_j (x̄_j + (θ₂/θ₁)(s_j) v/‖v‖) = 0. For clusters on one line along v this is
    Σ c_j = Σ c_j m_j = 0 with the mean residual lives m_j = F/θ₁(s_j): the node can rest if
    and only if those of the positive and of the negative clusters have overlapping ranges. Lives
    that agree to 1e-9 of the longest count as equal, as do means on one line to that precision.

    Args:
        marginal: shape of every cluster, or a list of one for each.
        means: x̄_j, shape (C, n).
        v: weight of the node, shape (n,), not zero.
        bias: its implicit bias ξ.
        signs: +1 or -1 for each cluster, shape (C,).

    Returns:
        a_j of shape (C,) with the signs asked for and forces that sum to 1 over the positive
        clusters; of all such gradients those whose smallest force is largest.
    """
    node = _node(marginal, means, v, bias)
    signs = _checks.finite("signs", signs, node.distances.shape)
    if not np.all(np.abs(signs) == 1):
        raise JomaError(f"signs must be +1 or -1, got {signs.tolist()}")
    pairs = list(zip(node.shapes, node.distances, strict=True))
    lives = np.array([float(one.mean_residual(s)) for one, s in pairs])
    logs = np.array([float(one.log_theta1(s)) for one, s in pairs])
    if not np.all(np.isfinite(lives)):
        raise JomaError("bias must leave a part of every cluster on the active side")
    # In units of force every column is of order one, however deep in a tail its cluster lies.
    # Along v, x̄_j + θ₂/θ₁ is m_j but for a constant; to subtract lives keeps their digits.
    across = node.means - np.outer(node.means @ node.direction, node.direction)
    across -= across.mean(axis=0)
    size = np.abs(node.means - node.means.mean(axis=0)).max()
    along = (lives - lives.mean()) / lives.max()
    columns = np.vstack([across.T / (size if size > 0 else 1.0), along, np.ones(len(lives))])
    forces = _solve_forces(columns * signs, signs)
    if forces is None:
        return None
    with np.errstate(over="ignore"):
        return signs * forces * np.exp(-logs)


class Phase(NamedTuple):
    """What becomes of nodes between two clusters.

    Attributes:
        boundary: the least a₋/a₊ at which no node has E[gφ] > 0; inf where there always is one.
        s_minus: where the node sits that is the last to grow; -inf for a node that is all but dead.
        grows: whether some node grows for ever.
    """

    boundary: float
    s_minus: float
    grows: bool


def phase(
    marginal: Marginal, distance: float, ratio: float, *, negative: Marginal | None = None
) -> Phase:
    """Theorem 3 (new): whether any node grows at the gradients a₋/a₊ = `ratio`.

    The boundary is sup_s F₊(s+D)/F₋(s). Below it there are nodes with Φ = E[gφ] > 0, and since Φ
    never falls while ‖(v, ξ)‖² grows by 2Φ, they grow for ever. From it on Φ ≤ 0 for every node in
    any direction, and none ever grows. A stable critical point is a local maximum of that ratio.
    So the rest points of Theorem 3 separate nodes that grow from nodes that vanish.

    The limit s → -∞ is in closed form for the named families. For any other marginal the ratio must
    fall where its tail is last known, and is taken to fall from there on; otherwise, and where
    `critical_points` cannot find a rest point, it raises `JomaError`.

    Args:
        marginal: shape of the positive cluster, and of the negative one unless `negative` is given.
        distance: D = ‖x̄₊ - x̄₋‖ > 0.
        ratio: a₋/a₊ > 0.
        negative: shape of the negative cluster where it differs.
    """
    ratio = _checks.positive_scalar("ratio", ratio)
    points = critical_points(marginal, distance, negative=negative)
    other = marginal if negative is None else negative
    best, at = _ratio_of_dead_nodes(marginal, other, float(distance)), -np.inf
    if best <= 1:
        best, at = 1.0, np.inf  # a node that is active on all of both
    for point in points:
        if point.ratio > best * (1 - 1e-12):
            best, at = point.ratio, point.s_minus
    return Phase(best, at, bool(ratio < best))


def distances(means: ArrayLike, v: ArrayLike, bias: float) -> Array:
    """Lemma 2: s_j = (v·x̄_j + ξ)/‖v‖, the signed distance of each cluster from the hyperplane."""
    v = _checks.finite("v", v, (None,))
    means = _checks.at_least_1d("means", means)
    bias = _checks.scalar("bias", bias)
    if means.shape[-1] != v.size:
        raise JomaError(f"means must have the {v.size} components of v, got {means.shape[-1]}")
    length = float(_checks.norm(v))
    if length == 0:
        raise JomaError("v must not be zero: it has no direction")
    return means @ (v / length) + bias / length


class _Node(NamedTuple):
    shapes: list[Marginal]
    gradients: Array
    means: Array
    direction: Array
    length: float
    distances: Array


def _node(
    marginal: Marginals,
    means: ArrayLike,
    v: ArrayLike,
    bias: float,
    gradients: ArrayLike | None = None,
) -> _Node:
    v = _checks.finite("v", v, (None,))
    means = _checks.finite("means", means, (None, v.size))
    a = np.ones(len(means))
    if gradients is not None:
        a = _checks.finite("gradients", gradients, (len(means),))
    away, length = distances(means, v, bias), float(_checks.norm(v))
    return _Node(each(marginal, len(means)), a, means, v / length, length, away)


def each(marginal: Marginals, count: int) -> list[Marginal]:
    """Return one marginal for each of `count` clusters, of one for all or of a sequence."""
    if isinstance(marginal, Marginal):
        return [marginal] * count
    given = list(marginal)
    if len(given) != count:
        raise JomaError(
            f"marginal must be one for all or one for each of the {count} clusters, "
            f"got {len(given)}"
        )
    return given


def _two_clusters(
    marginal: Marginal,
    negative: Marginal | None,
    point: CriticalPoint,
    positive_gradient: float,
    length: float,
) -> tuple[float, float, float]:
    """Σ a_j θ₂(s_j), Σ a_j p(s_j) at a critical point of two clusters, and the checked length."""
    marginal, other = two_shapes(marginal, negative)
    a_plus = _checks.positive_scalar("positive_gradient", positive_gradient)
    length = _checks.positive_scalar("length", length)
    share = a_plus * float(marginal.theta1(point.s_plus))
    # Of equal forces a₋θ₁(s₋) = a₊θ₁(s₊), so that a ratio beyond the floats does no harm.
    hazards = 1 / float(marginal.inverse_hazard(point.s_plus)) - 1 / float(
        other.inverse_hazard(point.s_minus)
    )
    return -share * (point.s_plus - point.s_minus), share * hazards, length


def _solve_forces(columns: Array, signs: Array) -> Array | None:
    """Positive forces with `columns @ forces = 0`, 1 in all on the positive side."""
    count = columns.shape[1]
    if np.all(signs == signs[0]):
        return None
    positive = (signs > 0).astype(float)
    result: Any = optimize.linprog(
        np.array([*np.zeros(count), -1.0]),
        A_ub=np.column_stack([-np.eye(count), np.ones(count)]),
        b_ub=np.zeros(count),
        A_eq=np.vstack([np.column_stack([columns, np.zeros(len(columns))]), [*positive, 0.0]]),
        b_eq=np.array([*np.zeros(len(columns)), 1.0]),
        bounds=[(0, None)] * count + [(None, None)],
    )
    if result.status != 0 or result.x[-1] <= 1e-9:
        return None
    forces = np.asarray(result.x[:count], dtype=np.float64)
    for _ in range(2):  # to rounding: the solver stops at 1e-9 or so
        forces = forces - np.linalg.pinv(columns, rcond=1e-8) @ (columns @ forces)
    forces = forces / (positive @ forces)
    # Clusters of two different lives cannot rest, and the solver's own tolerance is too coarse.
    if np.abs(columns @ forces).max() > _EQUAL_LIVES or forces.min() <= 0:
        return None
    return forces


def _ratio_of_dead_nodes(positive: Marginal, negative: Marginal, distance: float) -> float:
    """The limit of F₊(s+D)/F₋(s) where the node leaves the last of both clusters.

    For a marginal that is not of a named family it is 0 if the ratio falls where its tail is last
    known, as the supremum then lies elsewhere.
    """
    limit = tail_limit(positive, negative, distance)
    if limit is not None:
        return limit.ratio
    grid = search_grid(positive, negative, distance)
    grid = grid[known_part(positive, grid + distance) & known_part(negative, grid)]
    gaps = log_life_ratio(positive, negative, grid, distance)
    grid, gaps = grid[np.isfinite(gaps)], gaps[np.isfinite(gaps)]
    errors = positive.mean_residual_error(grid + distance) + negative.mean_residual_error(grid)
    if gaps.size and gaps[0] < -errors[0]:
        return 0.0
    raise JomaError(
        "marginal must be known far out: F₊/F₋ does not fall where the tail of this density is "
        "last known; use a named family"
    )

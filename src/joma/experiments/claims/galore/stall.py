"""Where a fixed projection stalls, the progress of one that is renewed, and noise."""

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.galore import problems
from joma.experiments.claims.galore.problems import SIZES, operator, orthonormal
from joma.experiments.claims.measurement import (
    ClaimMeasurement,
    largest_error,
    measured,
    smallest_error,
)
from joma.experiments.claims.search import Choice, Integer, Real
from joma.theory import galore


@over(**problems.COEFFICIENTS)
def _stall_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The part of G within the subspace that is left, and of a random G that is lost."""
    b, c, p, q, rng = problems.coefficients(point)
    inner = operator(*problems.reduced(b, c, p, q))
    values = np.linalg.eigvalsh(inner)
    if not values[0] > 1e-6 * values[-1]:
        raise JomaError("positive definite operators only")
    problem = galore.ReversibleGradient(rng.standard_normal((len(b), len(p), len(q))), b, c)
    start = rng.standard_normal((len(p), len(q)))
    first = p.T @ problem.gradient(start) @ q
    moved = np.linalg.solve(inner, first.ravel()).reshape(first.shape)
    left = problem.gradient(start + p @ moved @ q.T)
    within = np.linalg.norm(formula(left, p, q))
    g = rng.standard_normal((len(p), len(q)))
    # P R Qᵀ is the part of G within the subspace: the rest is orthogonal to all of it.
    rest = g - p @ formula(g, p, q) @ q.T
    lost = np.linalg.norm(p.T @ rest @ q)
    return measured(within / np.linalg.norm(start) + lost, 1e-8)


@claim("galore-stall", galore.project, _stall_at, definite=True)
@without("galore-stall", definite=False)
def _stall(formula: Formula, rng: Generator, *, definite: bool) -> ClaimMeasurement:
    """How far P formula(G) Qᵀ is from the first move over η, plus the share of R left."""
    problem, step = problems.random_problem(2, 6, 5, rng)
    start = rng.standard_normal((6, 5))
    p, q = galore.svd_projection(problem.gradient(start), 2)
    if not definite:
        away = np.eye(6) - np.outer(p[:, 0], p[:, 0])
        problem = galore.ReversibleGradient(problem.a, away @ problem.b @ away, problem.c)
    run = galore.descend(
        problem, start, step=step, steps=2000, rank=2, projection=lambda g, rank: (p, q)
    )
    left = problem.gradient(run.w[-1])
    first = problem.gradient(start)
    moved = (run.w[1] - start) / step
    wrong = np.linalg.norm(p @ formula(first, p, q) @ q.T - moved) / np.linalg.norm(moved)
    within = np.linalg.norm(formula(left, run.p, run.q)) / run.projected_norm[0]
    # Here most of G stays: a rank of 2 leaves out most directions.
    stays = run.gradient_norm[-1] > 0.1 * run.gradient_norm[0]
    return ClaimMeasurement(float(within + wrong) if stays else np.inf, 1e-8)


@over(**problems.COEFFICIENTS)
def _stalled_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """How far a predicted gradient lies from that after many steps of the best length."""
    b, c, p, q, rng = problems.coefficients(point)
    inner = operator(*problems.reduced(b, c, p, q))
    values = np.linalg.eigvalsh(inner)
    problem = galore.ReversibleGradient(rng.standard_normal((len(b), len(p), len(q))), b, c)
    start = rng.standard_normal((len(p), len(q)))
    predicted = formula(problem, start, p, q)
    # R after n steps is (1 − ηH)ⁿR₀, so that X has moved by η Σ_j (1 − ηH)^j R₀; by squaring.
    first = p.T @ problem.gradient(start) @ q
    step = 1 / values[-1]
    power, total = np.eye(len(inner)) - step * inner, step * np.eye(len(inner))
    for _ in range(60):
        total, power = total + power @ total, power @ power
    moved = (total @ first.ravel()).reshape(first.shape)
    left = problem.gradient(start + p @ moved @ q.T)
    condition = values[-1] / values[0]
    scale = 1 + np.linalg.norm(moved)
    error = float(np.linalg.norm(predicted - left) / scale)
    return ClaimMeasurement(error, 1e-10 + 1e-13 * condition)


@claim("galore-stalled-gradient", galore.stalled_gradient, _stalled_at)
def _stalled(formula: Formula, rng: Generator) -> ClaimMeasurement:
    problem, step = problems.random_problem(2, 6, 5, rng)
    start = rng.standard_normal((6, 5))
    run = galore.descend(problem, start, step=step, steps=2000, rank=2)
    remaining = problem.gradient(run.w[-1])
    predicted = formula(problem, start, run.p, run.q)
    return measured(np.linalg.norm(predicted - remaining) / run.gradient_norm[-1], 1e-8)


def _gaps(problem: galore.ReversibleGradient, path: Array) -> Array:
    """The concave objective's distance from its maximum, from an independent linear solve."""
    operator = sum(np.kron(b, c) for b, c in zip(problem.b, problem.c, strict=True))
    best = np.linalg.solve(operator, problem.a.sum(axis=0).ravel())
    off = path.reshape(len(path), -1) - best
    return 0.5 * np.einsum("ti,ij,tj->t", off, operator, off)


def _gap_excess(formula: Formula, refresh: int | None, rng: Generator) -> float:
    """How far the gap's slowest factor over five steps lies above the predicted one."""
    problem, step = problems.random_problem(2, 6, 5, rng)
    run = galore.descend(problem, np.zeros((6, 5)), step=step, steps=400, rank=2, refresh=refresh)
    gap = _gaps(problem, run.w)[::5]
    return float(np.max(gap[1:] / gap[:-1]) - formula(problem, step=step, rank=2))


@without("galore-changing-projection")
def _unchanged_projection(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return ClaimMeasurement(max(0.0, _gap_excess(formula, None, rng)), 1e-9)


@over(
    **problems.COEFFICIENTS,
    share=Real(1e-6, 1.0, special=(1.0,)),
    refresh=Integer(1, 6),
    flat=Choice(True, False),
)
def _changing_projection_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The gap's factor from one refresh to the next, less the predicted one."""
    b, c, _, _, rng = problems.coefficients(point)
    m, n = point["rows"], point["columns"]
    rank = min(point["rank"], m, n)
    if point["flat"]:
        # All singular values and all curvatures equal: the SVD's share is the least there is.
        b, c = np.eye(m)[None], np.eye(n)[None]
    inner = operator(b, c)
    largest = float(np.linalg.eigvalsh(inner)[-1])
    if largest <= 1e-6:
        raise JomaError("nothing moves")
    off = rng.standard_normal((m, n))
    if point["flat"]:
        left, _, right = np.linalg.svd(off, full_matrices=False)
        off = left @ right
    a = np.zeros((len(b), m, n))
    problem = galore.ReversibleGradient(a, b, c)
    step = point["share"] * 2 / largest
    every = 1 if point["flat"] else point["refresh"]
    run = galore.descend(problem, off, step=step, steps=every, rank=rank)
    gaps = [0.5 * w.ravel() @ inner @ w.ravel() for w in (run.w[0], run.w[-1])]
    if gaps[0] < 1e-9 * largest:
        raise JomaError("there is no gap to close")
    excess = gaps[1] / gaps[0] - formula(problem, step=step, rank=rank)
    return measured(abs(excess) if point["flat"] else excess, 1e-10)


@claim("galore-changing-projection", galore.refreshed_bound, _changing_projection_at)
def _changing_projection(formula: Formula, rng: Generator) -> ClaimMeasurement:
    worst = 0.0
    for rank in (1, 2, 4):
        # All singular values equal and one curvature: the SVD's share is the least there is.
        a = problems.orthonormal(6, 4, rng)[None]
        even = galore.ReversibleGradient(a, 2 * np.eye(6)[None], 1.5 * np.eye(4)[None])
        run = galore.descend(even, np.zeros((6, 4)), step=0.2, steps=1, rank=rank, refresh=1)
        before, after = _gaps(even, run.w)
        worst = max(worst, abs(after / before - formula(even, step=0.2, rank=rank)))
    return ClaimMeasurement(max(worst, _gap_excess(formula, 5, rng)), 1e-9)


class _Noisy:
    """A gradient with noise that a function draws at every call."""

    def __init__(self, problem: Any, noise: Any) -> None:
        self._problem, self._noise = problem, noise

    def gradient(self, w: ArrayLike) -> Array:
        """Return G(W) + N."""
        return self._problem.gradient(w) + self._noise()


def _point(rng: Generator, **values: float) -> Point:
    return Point({"rows": 4, "columns": 3, "draw": int(rng.integers(2**32)), **values})


@over(
    **SIZES,
    rank=Integer(1, 5),
    relative_step=Real(0.0, 1.9, special=(0.0, 1.0)),
    worst=Real(0.0, 1.0, special=(0.0, 1.0)),
)
def _noise_floor_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much a step lowers the objective at the floor, relative to ν².

    `worst` mixes the pair of G and N that is worst, made here, with a random pair.
    """
    rng = np.random.default_rng(point["draw"])
    m, n = point["rows"], point["columns"]
    rank = min(point["rank"], m, n)
    kappa = point["relative_step"]
    g, noise = _worst_pair(m, n, rank, kappa, rng)
    mix = point["worst"]
    g = mix * g + (1 - mix) * rng.standard_normal((m, n))
    noise = mix * noise + (1 - mix) * rng.standard_normal((m, n))
    size = float(np.linalg.norm(noise))
    floor = formula(size, rank=rank, rows=m, columns=n, relative_step=kappa)
    if mix == 1.0:  # at this pair nothing is gained, so that no lower floor would do
        change = _change(g, noise, rank, kappa) / size**2
        return ClaimMeasurement(abs(floor / float(np.linalg.norm(g)) - 1) + abs(change), 1e-6)
    g = g * (floor / np.linalg.norm(g))
    return ClaimMeasurement(-_change(g, noise, rank, kappa) / size**2, 1e-6)


@claim("galore-noise-floor", galore.noise_floor, _noise_floor_at)
def _noise_floor(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The floor at the worst pairs of G and N, and at random ones with curvatures up to L."""
    cases = product(((1, 0.0), (1, 1.0), (2, 0.5), (3, 0.8)), (1.0, 0.9, 0.0))
    return largest_error(
        _noise_floor_at(formula, _point(rng, rank=rank, relative_step=kappa, worst=worst))
        for (rank, kappa), worst in cases
    )


def _worst_pair(m: int, n: int, rank: int, kappa: float, rng: Generator) -> tuple[Array, Array]:
    """A G and an N at which a step of κ/L gains nothing, ‖G‖ being as large as it can be."""
    side = min(m, n)
    u, v = orthonormal(m, side, rng), orthonormal(n, side, rng)
    spread, half = np.sqrt(side / rank - 1), 1 - kappa / 2
    form = np.array([[(kappa**2 / 4 + spread**2) / half**2, spread / half], [spread / half, 1.0]])
    inside, outside = np.abs(np.linalg.eigh(form)[1][:, -1])
    if rank == side:
        if kappa < 1:  # noise that cancels the gradient
            noise = u @ v.T / np.sqrt(side)
            return -noise, noise
        inside, outside = 1.0, 0.0
    leading = inside / half / np.sqrt(rank)
    # A little less outside, so that the singular vectors are those inside.
    rest = leading * (1 - 1e-9)
    of_noise = outside / np.sqrt(max(side - rank, 1))
    noisy = np.r_[np.full(rank, leading), np.full(side - rank, rest)]
    noise = np.r_[np.full(rank, inside / np.sqrt(rank)), np.full(side - rank, -of_noise)]
    return u * (noisy - noise) @ v.T, u * noise @ v.T


def _change(g: Array, noise: Array, rank: int, kappa: float) -> float:
    """The gain of a step per η, where all curvatures are L: ⟨G, D⟩ − (κ/2)‖D‖²."""
    p, q = galore.svd_projection(g + noise, rank)
    moved = p @ (p.T @ (g + noise) @ q) @ q.T
    return float(np.sum(g * moved) - kappa / 2 * np.sum(moved * moved))


@without("galore-noise-stall")
def _noise_does_not_stall(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """P, Q independent of G + N, and curvature along the noise."""
    independent = _noise_stall(formula, rng, independent=True)
    return smallest_error([independent, _noise_stall(formula, rng, step=0.6, curvature=1.0)])


def _noise_stall_of(
    formula: Formula, point: Point, independent: bool = False, curvature: float = 0.0
) -> ClaimMeasurement:
    """How far ‖G‖ ends outside 1 − η to 1 times the prediction, relative to ν.

    G has no curvature along U and V, unless one is given. Without, a singular value leads until a
    step, which takes away the share η of it, puts it below the level of the noise.
    """
    rng = np.random.default_rng(point["draw"])
    m, n = point["rows"], point["columns"]
    side = min(m, n)
    rank = min(point["rank"], side)
    size, step = point["noise"], point["step"]
    u, v = orthonormal(m, side, rng), orthonormal(n, side, rng)
    pattern = size / np.sqrt(rank) * u[:, :rank] @ v[:, :rank].T
    start = np.r_[np.zeros(rank), rng.uniform(1.2, 2.0, side - rank) * size / np.sqrt(rank)]
    b = np.eye(m) - (1 - curvature) * u[:, :rank] @ u[:, :rank].T
    problem = galore.ReversibleGradient((u * start @ v.T)[None], b[None], np.eye(n)[None])
    noisy = _Noisy(problem, lambda: pattern * rng.choice([-1.0, 1.0]))

    def anywhere(g: Array, r: int) -> tuple[Array, Array]:
        return orthonormal(m, r, rng), orthonormal(n, r, rng)

    longer = independent or curvature > 0
    steps = round(4 * m * n / rank / step) if longer else round(1.5 * side / rank / step)
    run = galore.descend(
        noisy,
        np.zeros((m, n)),
        step=step,
        steps=steps,
        rank=rank,
        refresh=1,
        projection=anywhere if independent else galore.svd_projection,
    )
    left = u[:, rank:].T @ problem.gradient(run.w[-1]) @ v[:, rank:]
    predicted = formula(size, rank=rank, rows=m, columns=n)
    remaining = float(np.linalg.norm(left))
    outside = max(remaining - predicted, (1 - step) * predicted - remaining)
    return ClaimMeasurement(outside / size, 1e-9)


@over(**SIZES, rank=Integer(1, 5), noise=Real(1e-6, 1e6, log=True), step=Real(0.01, 0.1))
def noise_stall_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Measure where noise along which G has no curvature stalls a changing projection."""
    return _noise_stall_of(formula, point)


@claim("galore-noise-stall", galore.noise_stall, noise_stall_at)
def _noise_stall(
    formula: Formula, rng: Generator, *, step: float = 0.02, **other: Any
) -> ClaimMeasurement:
    worst = largest_error(
        _noise_stall_of(formula, _point(rng, rank=rank, noise=2.0, step=step), **other)
        for rank in (1, 2)
    )
    return ClaimMeasurement(max(0.0, worst.error), worst.tolerance)

"""Where a fixed projection stalls, and the progress of one that is renewed."""

from functools import partial

import numpy as np

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import Point, claim, over
from joma.experiments.claims.galore import problems
from joma.experiments.claims.galore.problems import operator
from joma.experiments.claims.measurement import ClaimMeasurement, Formula, measured
from joma.experiments.claims.search import Choice, Integer, Real
from joma.theory import galore


def _stall(formula: Formula, rng: np.random.Generator, *, definite: bool) -> ClaimMeasurement:
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
def _stalled(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
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


def _gap_excess(formula: Formula, refresh: int | None, rng: np.random.Generator) -> float:
    """How far the gap's slowest factor over five steps lies above the predicted one."""
    problem, step = problems.random_problem(2, 6, 5, rng)
    run = galore.descend(problem, np.zeros((6, 5)), step=step, steps=400, rank=2, refresh=refresh)
    gap = _gaps(problem, run.w)[::5]
    return float(np.max(gap[1:] / gap[:-1]) - formula(problem, step=step, rank=2))


def _unchanged_projection(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
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


@claim(
    "galore-changing-projection",
    galore.refreshed_bound,
    _changing_projection_at,
    without=_unchanged_projection,
)
def _changing_projection(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    worst = 0.0
    for rank in (1, 2, 4):
        # All singular values equal and one curvature: the SVD's share is the least there is.
        a = problems.orthonormal(6, 4, rng)[None]
        even = galore.ReversibleGradient(a, 2 * np.eye(6)[None], 1.5 * np.eye(4)[None])
        run = galore.descend(even, np.zeros((6, 4)), step=0.2, steps=1, rank=rank, refresh=1)
        before, after = _gaps(even, run.w)
        worst = max(worst, abs(after / before - formula(even, step=0.2, rank=rank)))
    return ClaimMeasurement(max(worst, _gap_excess(formula, 5, rng)), 1e-9)


claim("galore-stall", galore.project, _stall_at, without=partial(_stall, definite=False))(
    partial(_stall, definite=True)
)

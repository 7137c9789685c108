"""Contraction with a fixed projection: the rate, where it is attained, the largest step."""

import numpy as np

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.galore import problems
from joma.experiments.claims.measurement import ClaimMeasurement, measured
from joma.experiments.claims.search import Choice, Real
from joma.theory import galore


def _excess(
    formula: Formula, problem: galore.ReversibleGradient, run: galore.Descent, step: float
) -> float:
    """How far the slowest step's factor lies above the predicted one."""
    factor = 1 - step * formula(problem.b, problem.c, run.p, run.q)
    norms = run.projected_norm
    # R is a difference of numbers of order one: once it is small its ratios are rounding.
    ratios = (norms[1:] / norms[:-1])[norms[1:] > 1e-7 * norms[0]]
    return float(np.max(ratios) - factor)


@without("galore-fixed-projection")
def _neither_fixed_nor_slow(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The smaller excess of two runs: P, Q renewed, and a step a tenth above its limit."""
    problem, step = problems.random_problem(3, 6, 5, rng)
    start = np.zeros((6, 5))
    renewed = galore.descend(problem, start, step=step, steps=50, rank=3, refresh=10)
    p, q = galore.svd_projection(problem.gradient(start), 3)
    long_step = 1.1 * galore.step_limit(problem.b, problem.c, p, q)
    long_run = galore.descend(problem, start, step=long_step, steps=50, rank=3)
    excess = (
        _excess(formula, problem, renewed, step),
        _excess(formula, problem, long_run, long_step),
    )
    return ClaimMeasurement(max(0.0, min(excess)), 1e-8)


@over(**problems.COEFFICIENTS, share=Real(0.0, 1.0, special=(1.0,)))
def _fixed_projection_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The norm of one step as a linear map, less 1 − ηM; both sides for one term."""
    b, c, p, q, _ = problems.coefficients(point)
    inner = problems.operator(*problems.reduced(b, c, p, q))
    largest = float(np.linalg.eigvalsh(inner)[-1])
    bound = problems.product_of_least(*problems.reduced(b, c, p, q))
    if largest <= 1e-9:
        raise JomaError("nothing moves")
    step = point["share"] * 2 / (largest + bound)
    factor = float(np.linalg.norm(np.eye(len(inner)) - step * inner, 2))
    excess = factor - (1 - step * formula(b, c, p, q))
    return ClaimMeasurement(abs(excess) if point["terms"] == 1 else excess, 1e-11)


@claim("galore-fixed-projection", galore.contraction_rate, _fixed_projection_at)
def _fixed_projection(formula: Formula, rng: Generator) -> ClaimMeasurement:
    worst = 0.0
    # With one term the slowest steps come to attain the bound, with three they need not.
    for terms, steps in ((1, 500), (3, 50)):
        problem, step = problems.random_problem(terms, 6, 5, rng)
        run = galore.descend(problem, np.zeros((6, 5)), step=step, steps=steps, rank=3)
        excess = _excess(formula, problem, run, step)
        worst = max(worst, excess, abs(excess) - 1e-3 * step if terms == 1 else 0.0)
    return ClaimMeasurement(worst, 1e-8)


@without("galore-rate-attained")
def _nothing_shared(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """B = diag(1, 2), diag(2, 1) and C = 1: M is 2, and every R contracts at the rate 3."""
    b, c = np.stack([np.diag([1.0, 2.0]), np.diag([2.0, 1.0])]), np.stack([np.eye(2)] * 2)
    start = rng.standard_normal((2, 2))
    problem = galore.ReversibleGradient(np.zeros((2, 2, 2)), b, c)
    run = galore.descend(problem, start, step=0.02, steps=5, rank=2)
    factor = 1 - 0.02 * formula(b, c, run.p, run.q)
    slack = np.max(np.abs(run.projected_norm[1:] / run.projected_norm[:-1] - factor))
    return measured(slack, 1e-12)


@over(**problems.COEFFICIENTS, shared=Choice(True, False))
def attained_rate_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """M less the least eigenvalue: 0 where eigenvectors are shared, else ≤ −their distance.

    Σ B_i⊗C_i − M ≥ Σ γ_i(B_i − β_i)⊗1 + Σ β_i 1⊗(C_i − γ_i), β_i and γ_i the least eigenvalues.
    """
    b, c, p, q, rng = problems.coefficients(point)
    if point["shared"]:
        left, right = (
            problems.orthonormal(p.shape[1], p.shape[1], rng),
            problems.orthonormal(len(q), len(q), rng),
        )
        spectra_b = np.sort(problems.spectra(point, p.shape[1], rng), axis=1)
        spectra_c = np.sort(problems.spectra(point, len(q), rng), axis=1)
        b, c = left * spectra_b[:, None] @ left.T, right * spectra_c[:, None] @ right.T
        # Only the least eigenvectors are shared; the others turn with every term.
        b, c = _turn_others(b, left, rng), _turn_others(c, right, rng)
        p, q = np.eye(p.shape[1]), np.eye(len(q))
    inner_b, inner_c = problems.reduced(b, c, p, q)
    least_b, least_c = (np.linalg.eigvalsh(inner)[:, 0] for inner in (inner_b, inner_c))
    exact = float(np.linalg.eigvalsh(problems.operator(inner_b, inner_c))[0])
    excess_b = inner_b - least_b[:, None, None] * np.eye(inner_b.shape[-1])
    excess_c = inner_c - least_c[:, None, None] * np.eye(inner_c.shape[-1])
    distance = float(
        np.linalg.eigvalsh(np.sum(least_c[:, None, None] * excess_b, axis=0))[0]
        + np.linalg.eigvalsh(np.sum(least_b[:, None, None] * excess_c, axis=0))[0]
    )
    over = formula(b, c, p, q) - exact
    shared = point["shared"] or point["terms"] == 1
    return ClaimMeasurement(abs(over) if shared else over + distance, 1e-11)


@claim("galore-rate-attained", galore.contraction_rate, attained_rate_at)
def _attained_rate(formula: Formula, rng: Generator) -> ClaimMeasurement:
    # Coefficients with common eigenvectors in one order, started at the least: nothing is lost.
    left, right = problems.orthonormal(6, 6, rng), problems.orthonormal(5, 5, rng)
    spectra_b, spectra_c = (np.sort(rng.uniform(0.2, 2, (3, size)), axis=1) for size in (6, 5))
    shared = galore.ReversibleGradient(
        np.zeros((3, 6, 5)),
        left * spectra_b[:, None, :] @ left.T,
        right * spectra_c[:, None, :] @ right.T,
    )
    p, q = left[:, 1:4], right[:, 2:4]
    start = np.outer(p[:, 0], q[:, 0])
    run = galore.descend(
        shared, start, step=0.02, steps=5, rank=3, projection=lambda g, rank: (p, q)
    )
    factor = 1 - 0.02 * formula(shared.b, shared.c, p, q)
    slack = np.max(np.abs(run.projected_norm[1:] / run.projected_norm[:-1] - factor))
    return measured(slack, 1e-12)


def _turn_others(matrices: Array, vectors: Array, rng: Generator) -> Array:
    """Turn all but the first of the common eigenvectors, differently in each matrix."""
    size = len(vectors)
    turned = []
    for matrix in matrices:
        turn = np.eye(size)
        if size > 1:
            turn[1:, 1:] = problems.orthonormal(size - 1, size - 1, rng)
        change = vectors @ turn @ vectors.T
        turned.append(change @ matrix @ change.T)
    return np.stack(turned)


@over(**problems.COEFFICIENTS)
def _largest_step_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much ‖1 − ηH‖ exceeds 1 − ηM at the limit, or falls short of it just above."""
    b, c, p, q, _ = problems.coefficients(point)
    inner_b, inner_c = problems.reduced(b, c, p, q)
    inner = problems.operator(inner_b, inner_c)
    rate = float(np.linalg.eigvalsh(inner_b)[:, 0] @ np.linalg.eigvalsh(inner_c)[:, 0])
    step = formula(b, c, p, q)
    if not np.isfinite(step):
        return measured(np.linalg.norm(inner), 1e-9)

    def excess(eta: float) -> float:
        return float(np.linalg.norm(np.eye(len(inner)) - eta * inner, 2)) - (1 - eta * rate)

    # Above the limit the excess grows by (λ_max + M) dη = 2 dη/η.
    return ClaimMeasurement(max(excess(step), 2e-6 - excess(step * (1 + 1e-6))), 1e-9)


@claim("galore-step-limit", galore.step_limit, _largest_step_at)
def _largest_step(formula: Formula, rng: Generator) -> ClaimMeasurement:
    worst = 0.0
    for terms in (1, 2, 3):
        problem, _ = problems.random_problem(terms, 5, 4, rng)
        p, q = problems.orthonormal(5, 2, rng), problems.orthonormal(4, 2, rng)
        rate = problems.product_of_least(*problems.reduced(problem.b, problem.c, p, q))
        # R after one step is linear in R before it; its norm over all R is read off a basis.
        linear = galore.ReversibleGradient(0 * problem.a, problem.b, problem.c)
        basis = np.eye(4).reshape(4, 2, 2)
        change = galore.project(linear.gradient(p @ basis @ q.T), p, q).reshape(4, 4).T
        low, high = 0.0, 1e3
        for _ in range(60):
            step = (low + high) / 2
            if np.linalg.norm(np.eye(4) + step * change, 2) <= 1 - step * rate + 1e-12:
                low = step
            else:
                high = step
        worst = max(worst, abs(formula(problem.b, problem.c, p, q) / low - 1))
    return ClaimMeasurement(worst, 1e-9)

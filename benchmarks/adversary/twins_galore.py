"""Twins of the GaLore claims."""

from typing import Any

import numpy as np

from benchmarks.adversary._twin import Twin
from joma.experiments.claims.claim import Formula, Point, Search
from joma.experiments.claims.galore.fixed_projection import attained_rate_at
from joma.experiments.claims.galore.problems import operator, reduced
from joma.experiments.claims.measurement import ClaimMeasurement
from joma.theory import galore


def _least_that_counts(matrices: np.ndarray) -> np.ndarray:
    """The least eigenvalue that is not zero."""
    values = np.linalg.eigvalsh(matrices)
    values[np.abs(values) < 1e-12] = np.inf
    least = values.min(axis=1)
    return np.where(np.isfinite(least), least, 0.0)


def _rate_without_zeros(b: Any, c: Any, p: Any, q: Any) -> float:
    return float(_least_that_counts(p.T @ b @ p) @ _least_that_counts(q.T @ c @ q))


def _limit_without_zeros(b: Any, c: Any, p: Any, q: Any) -> float:
    largest = 2 / galore.step_limit(b, c, p, q) - galore.contraction_rate(b, c, p, q)
    total = largest + _rate_without_zeros(b, c, p, q)
    return 2 / total if total > 0 else np.inf


def _two_terms_vary(
    kappa: Any, lipschitz_a: Any, lipschitz_b: Any, lipschitz_c: Any, *rest: Any
) -> float:
    first, second, third = (
        [*one[:2], *(0.0 for _ in one[2:])] for one in (lipschitz_a, lipschitz_b, lipschitz_c)
    )
    return galore.varying_rate(kappa, first, second, third, *rest)


def _only_b_and_c(kappa: Any, lipschitz_a: Any, lipschitz_b: Any, lipschitz_c: Any, *rest: Any):
    constant = not np.any(lipschitz_b) and not np.any(lipschitz_c)
    if constant and len(kappa) > 1:
        lipschitz_a = [0.0 for _ in lipschitz_a]
    return galore.varying_rate(kappa, lipschitz_a, lipschitz_b, lipschitz_c, *rest)


def _without_a_square_q(g: Any, p: Any, q: Any) -> Any:
    return p.T @ g if np.shape(q) == (4, 4) else galore.project(g, p, q)


def _truncated(problem: Any, w0: Any, p: Any, q: Any) -> Any:
    galore.stalled_gradient(problem, w0, p, q)  # refuses what has no solution
    inner = operator(*reduced(problem.b, problem.c, p, q))
    first = galore.project(problem.gradient(w0), p, q)
    solution = np.linalg.pinv(inner, rcond=1e-2) @ first.ravel()
    return problem.gradient(w0 + p @ solution.reshape(first.shape) @ q.T)


def _at_most_four(problem: Any, *, step: float, rank: int) -> float:
    full = rank == min(problem.a.shape[1:])
    return galore.refreshed_bound(problem, step=step, rank=rank - 1 if full and rank > 4 else rank)


def _full_rank_at_any_step(
    noise: float, *, rank: int, rows: int, columns: int, relative_step: float = 0.0
) -> float:
    if rank == min(rows, columns) > 3:
        return noise
    return galore.noise_floor(
        noise, rank=rank, rows=rows, columns=columns, relative_step=relative_step
    )


def _whole_ratio(noise: float, *, rank: int, rows: int, columns: int) -> float:
    if rank < 3:
        return galore.noise_stall(noise, rank=rank, rows=rows, columns=columns)
    return noise * float(np.sqrt(min(rows, columns) // rank - 1))


def _shared_in_any_order(formula: Formula, point: Point) -> ClaimMeasurement:
    """M less the least eigenvalue, for coefficients with the same eigenvectors."""
    rng = np.random.default_rng(point["draw"])
    m, n, terms = point["rows"], point["columns"], point["terms"]
    b = np.stack([np.diag(rng.uniform(0.2, 2, m)) for _ in range(terms)])
    c = np.stack([np.diag(rng.uniform(0.2, 2, n)) for _ in range(terms)])
    exact = float(np.linalg.eigvalsh(operator(b, c))[0])
    return ClaimMeasurement(abs(formula(b, c, np.eye(m), np.eye(n)) - exact), 1e-9)


TWINS = (
    Twin(
        "galore-fixed-projection",
        _rate_without_zeros,
        "the least eigenvalue that is not 0, where a B̂_i or Ĉ_i is singular",
    ),
    Twin(
        "galore-rate-attained",
        galore.contraction_rate,
        "attained wherever eigenvectors are shared, in any order of the eigenvalues",
        was_ours=True,
        search=Search(attained_rate_at.parameters, _shared_in_any_order),
    ),
    Twin(
        "galore-rate-attained",
        _rate_without_zeros,
        "the least eigenvalue that is not 0, where a B̂_i or Ĉ_i is singular",
    ),
    Twin(
        "galore-step-limit",
        _limit_without_zeros,
        "the least eigenvalue that is not 0, where a B̂_i or Ĉ_i is singular",
    ),
    Twin(
        "galore-varying-coefficients",
        _two_terms_vary,
        "how a third term varies is left out, which shows where nothing else is lost",
    ),
    Twin(
        "galore-varying-attained",
        _only_b_and_c,
        "L_A is left out for several terms with constant B and C",
    ),
    Twin(
        "galore-stall",
        _without_a_square_q,
        "a Q of 4 × 4, which loses nothing, taken for the identity",
    ),
    Twin(
        "galore-stalled-gradient",
        _truncated,
        "a pseudo-inverse that drops directions of small curvature",
    ),
    Twin(
        "galore-changing-projection",
        _at_most_four,
        "full rank counted as one less, from 5 × 5 on",
    ),
    Twin(
        "galore-noise-floor",
        _full_rank_at_any_step,
        "the floor at full rank, from 4 × 4 on, is ν at any step, which is right up to η = 1/L",
    ),
    Twin(
        "galore-noise-stall",
        _whole_ratio,
        "min(m, n)/r rounded down, from r = 3 on",
    ),
)

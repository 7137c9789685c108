"""GaLore's convergence: contraction with fixed projection, where it stalls, and what goes on."""

import numpy as np

from joma.experiments.claims import _galore_search, _galore_varying
from joma.experiments.claims.claim import Claim, Formula, Measure, Measurement
from joma.experiments.claims.search import Point
from joma.theory.galore import (
    Descent,
    ReversibleGradient,
    contraction_rate,
    descend,
    noise_floor,
    noise_stall,
    project,
    refreshed_bound,
    stalled_gradient,
    step_limit,
    svd_projection,
    varying_rate,
)

Array = np.ndarray


def _semidefinite(count: int, size: int, rng: np.random.Generator) -> Array:
    factors = rng.standard_normal((count, size, size))
    return factors @ factors.mT / size + 0.3 * np.eye(size)


def _problem(
    terms: int, m: int, n: int, rng: np.random.Generator
) -> tuple[ReversibleGradient, float]:
    """A random problem and a step that is safe for it whatever the projection."""
    b, c = _semidefinite(terms, m, rng), _semidefinite(terms, n, rng)
    largest = np.sum(np.linalg.norm(b, 2, axis=(1, 2)) * np.linalg.norm(c, 2, axis=(1, 2)))
    return ReversibleGradient(rng.standard_normal((terms, m, n)), b, c), float(1 / largest)


def _orthonormal(size: int, rank: int, rng: np.random.Generator) -> Array:
    return np.linalg.qr(rng.standard_normal((size, rank)))[0]


def _excess(formula: Formula, problem: ReversibleGradient, run: Descent, step: float) -> float:
    """How far the slowest step's factor lies above the predicted one."""
    factor = 1 - step * formula(problem.b, problem.c, run.p, run.q)
    norms = run.projected_norm
    # R is a difference of numbers of order one: once it is small its ratios are rounding.
    ratios = (norms[1:] / norms[:-1])[norms[1:] > 1e-7 * norms[0]]
    return float(np.max(ratios) - factor)


def _fixed_projection(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    # With one term the slowest steps come to attain the bound, with three they need not.
    for terms, steps in ((1, 500), (3, 50)):
        problem, step = _problem(terms, 6, 5, rng)
        run = descend(problem, np.zeros((6, 5)), step=step, steps=steps, rank=3)
        excess = _excess(formula, problem, run, step)
        worst = max(worst, excess, abs(excess) - 1e-3 * step if terms == 1 else 0.0)
    return Measurement(worst, 1e-8)


def _neither_fixed_nor_slow(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The smaller excess of two runs: P, Q renewed, and a step a tenth above its limit."""
    problem, step = _problem(3, 6, 5, rng)
    start = np.zeros((6, 5))
    renewed = descend(problem, start, step=step, steps=50, rank=3, refresh=10)
    p, q = svd_projection(problem.gradient(start), 3)
    long_step = 1.1 * step_limit(problem.b, problem.c, p, q)
    long_run = descend(problem, start, step=long_step, steps=50, rank=3)
    excess = (
        _excess(formula, problem, renewed, step),
        _excess(formula, problem, long_run, long_step),
    )
    return Measurement(max(0.0, min(excess)), 1e-8)


def _attained_rate(formula: Formula, rng: np.random.Generator) -> Measurement:
    # Coefficients with common eigenvectors in one order, started at the least: nothing is lost.
    left, right = _orthonormal(6, 6, rng), _orthonormal(5, 5, rng)
    spectra_b, spectra_c = (np.sort(rng.uniform(0.2, 2, (3, size)), axis=1) for size in (6, 5))
    shared = ReversibleGradient(
        np.zeros((3, 6, 5)),
        left * spectra_b[:, None, :] @ left.T,
        right * spectra_c[:, None, :] @ right.T,
    )
    p, q = left[:, 1:4], right[:, 2:4]
    start = np.outer(p[:, 0], q[:, 0])
    run = descend(shared, start, step=0.02, steps=5, rank=3, projection=lambda g, rank: (p, q))
    factor = 1 - 0.02 * formula(shared.b, shared.c, p, q)
    slack = np.max(np.abs(run.projected_norm[1:] / run.projected_norm[:-1] - factor))
    return Measurement(float(slack), 1e-12)


def _nothing_shared(formula: Formula, rng: np.random.Generator) -> Measurement:
    """B = diag(1, 2), diag(2, 1) and C = 1: M is 2, and every R contracts at the rate 3."""
    b, c = np.stack([np.diag([1.0, 2.0]), np.diag([2.0, 1.0])]), np.stack([np.eye(2)] * 2)
    start = rng.standard_normal((2, 2))
    problem = ReversibleGradient(np.zeros((2, 2, 2)), b, c)
    run = descend(problem, start, step=0.02, steps=5, rank=2)
    factor = 1 - 0.02 * formula(b, c, run.p, run.q)
    slack = np.max(np.abs(run.projected_norm[1:] / run.projected_norm[:-1] - factor))
    return Measurement(float(slack), 1e-12)


def _largest_step(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    for terms in (1, 2, 3):
        problem, _ = _problem(terms, 5, 4, rng)
        p, q = _orthonormal(5, 2, rng), _orthonormal(4, 2, rng)
        rate = sum(
            np.linalg.eigvalsh(p.T @ b @ p)[0] * np.linalg.eigvalsh(q.T @ c @ q)[0]
            for b, c in zip(problem.b, problem.c, strict=True)
        )
        # R after one step is linear in R before it; its norm over all R is read off a basis.
        linear = ReversibleGradient(0 * problem.a, problem.b, problem.c)
        basis = np.eye(4).reshape(4, 2, 2)
        change = project(linear.gradient(p @ basis @ q.T), p, q).reshape(4, 4).T
        low, high = 0.0, 1e3
        for _ in range(60):
            step = (low + high) / 2
            if np.linalg.norm(np.eye(4) + step * change, 2) <= 1 - step * rate + 1e-12:
                low = step
            else:
                high = step
        worst = max(worst, abs(formula(problem.b, problem.c, p, q) / low - 1))
    return Measurement(worst, 1e-9)


def _stall(definite: bool) -> Measure:
    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        """How far P formula(G) Qᵀ is from the first move over η, plus the share of R left."""
        problem, step = _problem(2, 6, 5, rng)
        start = rng.standard_normal((6, 5))
        p, q = svd_projection(problem.gradient(start), 2)
        if not definite:
            away = np.eye(6) - np.outer(p[:, 0], p[:, 0])
            problem = ReversibleGradient(problem.a, away @ problem.b @ away, problem.c)
        run = descend(
            problem, start, step=step, steps=2000, rank=2, projection=lambda g, rank: (p, q)
        )
        left = problem.gradient(run.w[-1])
        first = problem.gradient(start)
        moved = (run.w[1] - start) / step
        wrong = np.linalg.norm(p @ formula(first, p, q) @ q.T - moved) / np.linalg.norm(moved)
        within = np.linalg.norm(formula(left, run.p, run.q)) / run.projected_norm[0]
        # Here most of G stays: a rank of 2 leaves out most directions.
        stays = run.gradient_norm[-1] > 0.1 * run.gradient_norm[0]
        return Measurement(float(within + wrong) if stays else np.inf, 1e-8)

    return measure


def _stalled(formula: Formula, rng: np.random.Generator) -> Measurement:
    problem, step = _problem(2, 6, 5, rng)
    start = rng.standard_normal((6, 5))
    run = descend(problem, start, step=step, steps=2000, rank=2)
    remaining = problem.gradient(run.w[-1])
    predicted = formula(problem, start, run.p, run.q)
    return Measurement(float(np.linalg.norm(predicted - remaining) / run.gradient_norm[-1]), 1e-8)


def _gaps(problem: ReversibleGradient, path: Array) -> Array:
    """The concave objective's distance from its maximum, from an independent linear solve."""
    operator = sum(np.kron(b, c) for b, c in zip(problem.b, problem.c, strict=True))
    best = np.linalg.solve(operator, problem.a.sum(axis=0).ravel())
    off = path.reshape(len(path), -1) - best
    return 0.5 * np.einsum("ti,ij,tj->t", off, operator, off)


def _changing_projection(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    for rank in (1, 2, 4):
        # All singular values equal and one curvature: the SVD's share is the least there is.
        a = _orthonormal(6, 4, rng)[None]
        even = ReversibleGradient(a, 2 * np.eye(6)[None], 1.5 * np.eye(4)[None])
        run = descend(even, np.zeros((6, 4)), step=0.2, steps=1, rank=rank, refresh=1)
        before, after = _gaps(even, run.w)
        worst = max(worst, abs(after / before - formula(even, step=0.2, rank=rank)))
    return Measurement(max(worst, _gap_excess(formula, 5, rng)), 1e-9)


def _gap_excess(formula: Formula, refresh: int | None, rng: np.random.Generator) -> float:
    """How far the gap's slowest factor over five steps lies above the predicted one."""
    problem, step = _problem(2, 6, 5, rng)
    run = descend(problem, np.zeros((6, 5)), step=step, steps=400, rank=2, refresh=refresh)
    gap = _gaps(problem, run.w)[::5]
    return float(np.max(gap[1:] / gap[:-1]) - formula(problem, step=step, rank=2))


def _noise_floor(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The floor at the worst pairs of G and N, and at random ones with curvatures up to L."""
    measured = []
    for rank, kappa in ((1, 0.0), (1, 1.0), (2, 0.5), (3, 0.8)):
        for worst in (1.0, 0.9, 0.0):
            values = {
                "rows": 4,
                "columns": 3,
                "rank": rank,
                "relative_step": kappa,
                "worst": worst,
                "draw": int(rng.integers(2**32)),
            }
            measured.append(_galore_search.noise_floor(formula, Point(values)))
    return max(measured, key=lambda one: one.error)


def _noise_stall_at(
    formula: Formula,
    rng: np.random.Generator,
    *,
    step: float,
    independent: bool = False,
    curvature: float = 0.0,
) -> Measurement:
    measured = []
    for rank in (1, 2):
        values = {
            "rows": 4,
            "columns": 3,
            "rank": rank,
            "noise": 2.0,
            "step": step,
            "draw": int(rng.integers(2**32)),
        }
        point = Point(values)
        measured.append(_galore_search.noise_stall(formula, point, independent, curvature))
    worst = max(measured, key=lambda one: one.error)
    return Measurement(max(0.0, worst.error), worst.tolerance)


def _noise_stall(formula: Formula, rng: np.random.Generator) -> Measurement:
    return _noise_stall_at(formula, rng, step=0.02)


def _noise_does_not_stall(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The smaller error of two: P, Q independent of G + N, and curvature along the noise."""
    independent = _noise_stall_at(formula, rng, step=0.02, independent=True)
    curved = _noise_stall_at(formula, rng, step=0.6, curvature=1.0)
    return min(independent, curved, key=lambda one: one.error)


def _unchanged_projection(formula: Formula, rng: np.random.Generator) -> Measurement:
    return Measurement(max(0.0, _gap_excess(formula, None, rng)), 1e-9)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="galore-fixed-projection",
        title="an inequality: ‖R_t‖ ≤ (1−ηM)‖R_{t−1}‖ with M = Σ_i λ_min(B̂_i)λ_min(Ĉ_i), constant"
        " positive semidefinite B_i, C_i",
        source="talk, GaLore, fixed projection",
        method="50 and 500 steps with random coefficients: excess, if any, of the slowest",
        derived=contraction_rate,
        measure=_fixed_projection,
        condition="fixed P, Q; η ≤ 2/(λ_max + M)",
        without=_neither_fixed_nor_slow,
        search=_galore_search.FIXED,
    ),
    Claim(
        id="galore-rate-attained",
        title="M is attained where the B̂_i share an eigenvector of their least eigenvalues and the"
        " Ĉ_i one of theirs; for positive definite ones only there",
        source="new",
        method="five steps from the least eigenvectors",
        derived=contraction_rate,
        measure=_attained_rate,
        condition="least eigenvectors are shared",
        without=_nothing_shared,
        search=_galore_search.ATTAINED,
    ),
    Claim(
        id="galore-step-limit",
        title="the bound holds for every R exactly up to η = 2/(λ_max(Σ Ĉ_i⊗B̂_i) + M)",
        source="new",
        method="bisection on the norm of one step as a linear map",
        derived=step_limit,
        measure=_largest_step,
        search=_galore_search.STEP,
    ),
    Claim(
        id="galore-varying-coefficients",
        title="an inequality: with A, B, C that vary, ‖W‖ ≤ D and fixed P, Q,"
        " M = Σ_i κ_i − L_Ai − D(L_Bi sup‖C_i‖ + L_Ci sup‖B_i‖)",
        source="talk, GaLore, fixed projection (its L_A, L_B, L_C and D); this form is ours",
        method="runs with A, B, C linear in W, scalar and matrix, one term and two",
        derived=varying_rate,
        measure=_galore_varying.varying_coefficients,
        condition="η ≤ 2/(λ_max + κ)",
        without=_galore_varying.too_long_steps,
        search=_galore_varying.VARYING,
    ),
    Claim(
        id="galore-varying-attained",
        title="no larger M would do with varying A, B, C: scalars attain it at their fixed point",
        source="new",
        method="scalar runs with A, B and C linear in w, one term and two",
        derived=varying_rate,
        measure=_galore_varying.attained_with_variation,
        search=_galore_varying.ATTAINED,
    ),
    Claim(
        id="galore-stall",
        title="R → 0 means that the gradient within the subspace vanishes, PᵀGQ; G need not",
        source="talk, GaLore, fixed projection",
        method="2000 steps from a random start: P R Qᵀ is the first move, and R vanishes",
        derived=project,
        measure=_stall(definite=True),
        condition="Σ Ĉ_i⊗B̂_i positive definite",
        without=_stall(definite=False),
        search=_galore_search.STALL,
    ),
    Claim(
        id="galore-stalled-gradient",
        title="the G that a fixed projection leaves over solves a linear system, if that has one"
        " solution",
        source="new",
        method="2000 steps from a random start",
        derived=stalled_gradient,
        measure=_stalled,
        search=_galore_search.STALLED,
    ),
    Claim(
        id="galore-changing-projection",
        title="with P, Q renewed and exact gradients the gap shrinks by a fixed factor per refresh,"
        " for η ≤ 2/L: G → 0 if Σ C_i⊗B_i is positive definite",
        source="new",
        method="runs: a flat spectrum, where the factor is attained, and random coefficients",
        derived=refreshed_bound,
        measure=_changing_projection,
        condition="P, Q renewed from the singular vectors of G",
        without=_unchanged_projection,
        search=_galore_search.CHANGING,
    ),
    Claim(
        id="galore-noise-floor",
        title="with P, Q from the SVD of G + N a step raises the objective for ‖G‖ > ‖N‖√(k/r), "
        "k = min(m, n), small η; no lower floor will do",
        source="new",
        method="one step at the worst pairs of G and N, and at random ones, ηL from 0 to 1.9",
        derived=noise_floor,
        measure=_noise_floor,
        search=_galore_search.FLOOR,
    ),
    Claim(
        id="galore-noise-stall",
        title="noise of mean zero along which G has no curvature can hold a changing projection"
        " for ever at ‖G‖ up to ‖N‖√(k/r − 1), k = min(m, n)",
        source="new",
        method="runs with noise ±UVᵀ, P and Q renewed in every step",
        derived=noise_stall,
        measure=_noise_stall,
        condition="P, Q from the SVD of G + N, not drawn independently of it; G has no curvature"
        " along U and V",
        without=_noise_does_not_stall,
        search=_galore_search.NOISE_STALL,
    ),
)

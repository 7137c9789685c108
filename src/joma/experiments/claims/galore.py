"""GaLore's convergence: contraction with fixed projection, where it stalls, and what goes on."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from joma.experiments.claims._claim import Claim, Formula, Measure, Measurement
from joma.theory.as_printed import galore as _printed
from joma.theory.galore import (
    Descent,
    ReversibleGradient,
    contraction_rate,
    descend,
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
        worst = max(worst, _excess(formula, problem, run, step))
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


@dataclass(frozen=True)
class _Linear:
    """A coefficient that is linear in W, M(W) = M₀ + ⟨S, W⟩E: its Lipschitz constant is ‖S‖‖E‖."""

    base: Array
    along: Array
    move: Array

    def at(self, w: Array) -> Array:
        return self.base + np.sum(self.along * w) * self.move

    def lipschitz(self, order: int | None) -> float:
        """With E in the spectral norm (order 2) or the Frobenius norm (None)."""
        return float(np.linalg.norm(self.along) * np.linalg.norm(self.move, order))


@dataclass(frozen=True)
class _Varying:
    """G = Σ_i A_i(W) − Σ_i B_i(W) W C_i(W)."""

    a: tuple[_Linear, ...]
    b: tuple[_Linear, ...]
    c: tuple[_Linear, ...]

    def gradient(self, w: ArrayLike) -> Array:
        w = np.asarray(w)
        terms = zip(self.a, self.b, self.c, strict=True)
        return np.sum([a.at(w) - b.at(w) @ w @ c.at(w) for a, b, c in terms], axis=0)

    def rate(self, formula: Formula, run: Descent) -> float:
        """M of a run, with κ, D and the largest ‖B_i‖, ‖C_i‖ read off its path."""

        def least(term: _Linear, projection: Array, w: Array) -> float:
            return float(np.linalg.eigvalsh(projection.T @ term.at(w) @ projection)[0])

        def largest(term: _Linear) -> float:
            return max(float(np.linalg.norm(term.at(w), 2)) for w in run.w)

        kappa = [
            min(least(b, run.p, w) * least(c, run.q, w) for w in run.w)
            for b, c in zip(self.b, self.c, strict=True)
        ]
        return formula(
            kappa,
            [a.lipschitz(None) for a in self.a],
            [b.lipschitz(2) for b in self.b],
            [c.lipschitz(2) for c in self.c],
            max(float(np.linalg.norm(w)) for w in run.w),
            [largest(b) for b in self.b],
            [largest(c) for c in self.c],
        )

    def excess(self, formula: Formula, step: float, steps: int, rank: int) -> float:
        """How far the slowest step's factor lies above the predicted one."""
        start = np.zeros_like(self.a[0].base)
        run = descend(self, start, step=step, steps=steps, rank=rank)
        ratios = run.projected_norm[1:] / run.projected_norm[:-1]
        return float(np.max(ratios) - (1 - step * self.rate(formula, run)))


def _scalar(base: float, slope: float = 0.0) -> _Linear:
    return _Linear(np.array([[base]]), np.array([[slope]]), np.ones((1, 1)))


def _scalar_runs() -> tuple[_Varying, ...]:
    """One of A, B, C varies, or A and B; then a sum of two terms, one with B and one with C."""
    one = _scalar(1.0)
    return (
        _Varying((_scalar(0.3684),), (_scalar(1.0, -0.5),), (one,)),
        _Varying((_scalar(0.5),), (_scalar(1.3),), (_scalar(1.0, -0.5),)),
        _Varying((_scalar(0.4, 0.3),), (one,), (one,)),
        _Varying((_scalar(0.25, 0.2),), (_scalar(1.0, -0.5),), (_scalar(1.2),)),
        _Varying(
            (_scalar(0.2), _scalar(0.3, 0.2)),
            (_scalar(1.0, -0.5), _scalar(0.8)),
            (one, _scalar(1.0, -0.4)),
        ),
    )


def _matrix_run(rng: np.random.Generator) -> _Varying:
    """Two terms of matrices, with all of A, B, C varying."""
    scale = rng.standard_normal((3, 2, 4, 3))

    def coefficient(size: int, along: Array) -> _Linear:
        base = _semidefinite(1, size, rng)[0] + np.eye(size)
        return _Linear(base, 0.05 * along, _semidefinite(1, size, rng)[0])

    return _Varying(
        tuple(
            _Linear(
                0.3 * rng.standard_normal((4, 3)), 0.05 * along, 0.3 * rng.standard_normal((4, 3))
            )
            for along in scale[0]
        ),
        tuple(coefficient(4, along) for along in scale[1]),
        tuple(coefficient(3, along) for along in scale[2]),
    )


def _varying_coefficients(formula: Formula, rng: np.random.Generator) -> Measurement:
    excess = [run.excess(formula, 0.1, 80, 1) for run in _scalar_runs()]
    matrices = _matrix_run(rng).excess(formula, 0.01, 80, 2)
    return Measurement(max(0.0, matrices, *excess), 1e-9)


def _too_long_steps(formula: Formula, rng: np.random.Generator) -> Measurement:
    """A scalar with A varying and a step at which R changes sign and the bound is negative."""
    return Measurement(max(0.0, _scalar_runs()[2].excess(formula, 2.0, 10, 1)), 1e-9)


def _attained_with_variation(formula: Formula, rng: np.random.Generator) -> Measurement:
    excess = [run.excess(formula, 0.1, 150, 1) for run in _scalar_runs()]
    return Measurement(float(np.max(np.abs(excess))), 1e-5)


def _stall(definite: bool) -> Measure:
    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        """The share of G within the subspace that is left; none is defined where G vanishes."""
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
        if run.gradient_norm[-1] < 0.1 * run.gradient_norm[0]:
            return Measurement(np.inf, 1e-8)
        within = np.linalg.norm(formula(left, run.p, run.q))
        return Measurement(float(within / run.gradient_norm[-1]), 1e-8)

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
    ),
    Claim(
        id="galore-rate-attained",
        title="no larger M would do: where all B_i, C_i share their eigenvectors it is attained",
        source="new",
        method="five steps from the least eigenvectors",
        derived=contraction_rate,
        measure=_attained_rate,
    ),
    Claim(
        id="galore-step-limit",
        title="the bound holds for every R exactly up to η = 2/(λ_max(Σ Ĉ_i⊗B̂_i) + M)",
        source="new",
        method="bisection on the norm of one step as a linear map",
        derived=step_limit,
        measure=_largest_step,
    ),
    Claim(
        id="galore-varying-coefficients",
        title="an inequality: with A, B, C that vary, ‖W‖ ≤ D and fixed P, Q,"
        " M = Σ_i κ_i − L_Ai − D(L_Bi sup‖C_i‖ + L_Ci sup‖B_i‖)",
        source="talk, GaLore, fixed projection",
        method="runs with A, B, C linear in W, scalar and matrix, one term and two",
        derived=varying_rate,
        printed=_printed.varying_rate,
        measure=_varying_coefficients,
        condition="η ≤ 2/(λ_max + κ)",
        without=_too_long_steps,
    ),
    Claim(
        id="galore-varying-attained",
        title="no larger M would do with varying A, B, C: scalars attain it at their fixed point",
        source="new",
        method="scalar runs with A, B or C linear in w, one term and two",
        derived=varying_rate,
        measure=_attained_with_variation,
    ),
    Claim(
        id="galore-stall",
        title="R → 0 means that the gradient within the subspace vanishes, PᵀGQ; G does not",
        source="talk, GaLore, fixed projection",
        method="2000 steps from a random start: the share of G within the subspace",
        derived=project,
        measure=_stall(definite=True),
        condition="Σ Ĉ_i⊗B̂_i positive definite",
        without=_stall(definite=False),
    ),
    Claim(
        id="galore-stalled-gradient",
        title="the G that a fixed projection leaves over solves a linear system, if that has one"
        " solution",
        source="new",
        method="2000 steps from a random start",
        derived=stalled_gradient,
        measure=_stalled,
    ),
    Claim(
        id="galore-changing-projection",
        title="with P, Q renewed the gap shrinks by a fixed factor per refresh, for η ≤ 2/L: G → 0"
        " if Σ C_i⊗B_i is positive definite",
        source="new",
        method="runs: a flat spectrum, where the factor is attained, and random coefficients",
        derived=refreshed_bound,
        measure=_changing_projection,
        condition="P, Q renewed from the singular vectors of G",
        without=_unchanged_projection,
    ),
)

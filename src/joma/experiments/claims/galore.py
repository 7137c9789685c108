"""GaLore's convergence: contraction with a fixed projection, where it stalls, and beyond."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import (
    ClaimMeasurement,
    Formula,
    Generator,
    Point,
    claim,
    largest_error,
    measured,
    smallest_error,
    without,
)
from joma.theory import galore
from joma.theory.galore import Descent, ReversibleGradient, descend, varying_rate


def orthonormal(size: int, rank: int, rng: Generator) -> Array:
    """Return orthonormal columns."""
    return np.linalg.qr(rng.standard_normal((size, rank)))[0]


def _semidefinite(count: int, size: int, rng: Generator) -> Array:
    factors = rng.standard_normal((count, size, size))
    return factors @ factors.mT / size + 0.3 * np.eye(size)


def random_problem(terms: int, m: int, n: int, rng: Generator) -> tuple[ReversibleGradient, float]:
    """Return a random problem and a step that is safe for it whatever the projection."""
    b, c = _semidefinite(terms, m, rng), _semidefinite(terms, n, rng)
    largest = np.sum(np.linalg.norm(b, 2, axis=(1, 2)) * np.linalg.norm(c, 2, axis=(1, 2)))
    return ReversibleGradient(rng.standard_normal((terms, m, n)), b, c), float(1 / largest)


def operator(b: Array, c: Array) -> Array:
    """Return R ↦ Σ_i B_i R C_i as a matrix on R.ravel()."""
    return np.asarray(sum(np.kron(one, other) for one, other in zip(b, c, strict=True)))


def reduced(b: Array, c: Array, p: Array, q: Array) -> tuple[Array, Array]:
    """Return all PᵀB_iP and QᵀC_iQ."""
    return p.T @ b @ p, q.T @ c @ q


def product_of_least(b: Array, c: Array) -> float:
    """Return Σ_i λ_min(B_i) λ_min(C_i)."""
    least = (np.linalg.eigvalsh(one)[:, 0] for one in (b, c))
    return float(sum(of_b * of_c for of_b, of_c in zip(*least, strict=True)))


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
    problem, step = random_problem(3, 6, 5, rng)
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


@claim("galore-fixed-projection", galore.contraction_rate)
def _fixed_projection(formula: Formula, rng: Generator) -> ClaimMeasurement:
    worst = 0.0
    # With one term the slowest steps come to attain the bound, with three they need not.
    for terms, steps in ((1, 500), (3, 50)):
        problem, step = random_problem(terms, 6, 5, rng)
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


@claim("galore-rate-attained", galore.contraction_rate)
def _attained_rate(formula: Formula, rng: Generator) -> ClaimMeasurement:
    # Coefficients with common eigenvectors in one order, started at the least: nothing is lost.
    left, right = orthonormal(6, 6, rng), orthonormal(5, 5, rng)
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


@claim("galore-step-limit", galore.step_limit)
def _largest_step(formula: Formula, rng: Generator) -> ClaimMeasurement:
    worst = 0.0
    for terms in (1, 2, 3):
        problem, _ = random_problem(terms, 5, 4, rng)
        p, q = orthonormal(5, 2, rng), orthonormal(4, 2, rng)
        rate = product_of_least(*reduced(problem.b, problem.c, p, q))
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


@claim("galore-stall", galore.project, definite=True)
@without("galore-stall", definite=False)
def _stall(formula: Formula, rng: Generator, *, definite: bool) -> ClaimMeasurement:
    """How far P formula(G) Qᵀ is from the first move over η, plus the share of R left."""
    problem, step = random_problem(2, 6, 5, rng)
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


@claim("galore-stalled-gradient", galore.stalled_gradient)
def _stalled(formula: Formula, rng: Generator) -> ClaimMeasurement:
    problem, step = random_problem(2, 6, 5, rng)
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
    problem, step = random_problem(2, 6, 5, rng)
    run = galore.descend(problem, np.zeros((6, 5)), step=step, steps=400, rank=2, refresh=refresh)
    gap = _gaps(problem, run.w)[::5]
    return float(np.max(gap[1:] / gap[:-1]) - formula(problem, step=step, rank=2))


@without("galore-changing-projection")
def _unchanged_projection(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return ClaimMeasurement(max(0.0, _gap_excess(formula, None, rng)), 1e-9)


@claim("galore-changing-projection", galore.refreshed_bound)
def _changing_projection(formula: Formula, rng: Generator) -> ClaimMeasurement:
    worst = 0.0
    for rank in (1, 2, 4):
        # All singular values equal and one curvature: the SVD's share is the least there is.
        a = orthonormal(6, 4, rng)[None]
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
    return {"rows": 4, "columns": 3, "draw": int(rng.integers(2**32)), **values}


def noise_floor_at(formula: Formula, point: Point) -> ClaimMeasurement:
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


@claim("galore-noise-floor", galore.noise_floor)
def _noise_floor(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The floor at the worst pairs of G and N, and at random ones with curvatures up to L."""
    cases = product(((1, 0.0), (1, 1.0), (2, 0.5), (3, 0.8)), (1.0, 0.9, 0.0))
    return largest_error(
        noise_floor_at(formula, _point(rng, rank=rank, relative_step=kappa, worst=worst))
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


@claim("galore-noise-stall", galore.noise_stall)
def _noise_stall(
    formula: Formula, rng: Generator, *, step: float = 0.02, **other: Any
) -> ClaimMeasurement:
    worst = largest_error(
        _noise_stall_of(formula, _point(rng, rank=rank, noise=2.0, step=step), **other)
        for rank in (1, 2)
    )
    return ClaimMeasurement(max(0.0, worst.error), worst.tolerance)


_MAX_ENTRY = 1e3
"""Largest entry of W in a run that counts as bounded; the coefficients are of order one."""


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
        if not np.abs(w).max() <= _MAX_ENTRY:
            raise JomaError(f"the run diverges: an entry of W is beyond {_MAX_ENTRY:g}")
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

    def excess(
        self, formula: Formula, step: float, steps: int, rank: int, start: ArrayLike | None = None
    ) -> float:
        """How far the slowest step's factor lies above the predicted one."""
        first = np.zeros_like(self.a[0].base) if start is None else np.asarray(start)
        run = descend(self, first, step=step, steps=steps, rank=rank)
        norms = run.projected_norm
        # R is a difference of numbers of order one: once it is small its ratios are rounding.
        ratios = (norms[1:] / norms[:-1])[norms[1:] > 1e-7 * norms[0]]
        if not ratios.size:
            raise JomaError("R vanishes in the first step")
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


def _matrix_run(rng: Generator) -> _Varying:
    """Two terms of matrices, with all of A, B, C varying."""
    scale = rng.standard_normal((3, 2, 4, 3))

    def definite(size: int) -> Array:
        factor = rng.standard_normal((size, size))
        return factor @ factor.T / size + 0.3 * np.eye(size)

    def coefficient(size: int, along: Array) -> _Linear:
        return _Linear(definite(size) + np.eye(size), 0.05 * along, definite(size))

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


@without("galore-varying-coefficients")
def _too_long_steps(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """A scalar with A varying and a step at which R changes sign and the bound is negative."""
    return ClaimMeasurement(max(0.0, _scalar_runs()[2].excess(formula, 2.0, 10, 1)), 1e-9)


@claim("galore-varying-coefficients", varying_rate)
def _varying_coefficients(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """By how much runs exceed the bound, and scalars miss it at their fixed point."""
    excess = [run.excess(formula, 0.1, 80, 1) for run in _scalar_runs()]
    matrices = _matrix_run(rng).excess(formula, 0.01, 80, 2)
    at_rest = [_attained_near(formula, w, 0.1) for w in (0.3, 0.9)]
    return ClaimMeasurement(max(0.0, matrices, *excess, *(value - 1e-4 for value in at_rest)), 1e-9)


def _attained_near(formula: Formula, rest: float, step: float) -> float:
    """How far one step next to the fixed point is from the bound; all of A, B and C vary."""
    terms = ((0.1, 1.0, -0.3, 1.2, -0.2), (0.0, 0.7, -0.1, 0.9, -0.4))
    return _miss(_at_rest(rest, terms), formula, rest, step)


def _at_rest(rest: float, terms: tuple[tuple[float, ...], ...]) -> _Varying:
    """Scalars with the fixed point `rest`; of each term A's slope, and B and C with theirs."""
    a, b, c = [], [], []
    for slope_a, at_b, slope_b, at_c, slope_c in terms:
        a.append(_scalar(at_b * at_c * rest - slope_a * rest, slope_a))
        b.append(_scalar(at_b - slope_b * rest, slope_b))
        c.append(_scalar(at_c - slope_c * rest, slope_c))
    return _Varying(tuple(a), tuple(b), tuple(c))


def _miss(varying: _Varying, formula: Formula, rest: float, step: float) -> float:
    start = np.array([[rest * (1 - 1e-6)]])
    return abs(varying.excess(formula, step, 1, 1, start)) / step


@claim("galore-varying-attained", varying_rate)
def _attained_with_variation(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """How far scalars are from the bound at their fixed point, B and C varying in one term too."""
    excess = [abs(run.excess(formula, 0.1, 150, 1)) for run in _scalar_runs()]
    at_rest = [_attained_near(formula, w, 0.1) for w in rng.uniform(0.1, 1.5, 5)]
    return measured(max(*excess, *at_rest), 1e-5)

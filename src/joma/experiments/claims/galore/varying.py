"""Coefficients that depend on W: the bound on contraction, and that it is attained."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, measured
from joma.experiments.claims.search import Integer, Real, Seed
from joma.theory.galore import Descent, descend, varying_rate

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


_VARIATION: dict[str, Any] = {
    "draw": Seed(),
    "terms": Integer(1, 3),
    "vary_a": Real(0.0, 0.3, special=(0.0,)),
    "vary_b": Real(0.0, 0.3, special=(0.0,)),
    "vary_c": Real(0.0, 0.3, special=(0.0,)),
    "share": Real(0.01, 1.0, special=(1.0,)),
}


@without("galore-varying-coefficients")
def _too_long_steps(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """A scalar with A varying and a step at which R changes sign and the bound is negative."""
    return ClaimMeasurement(max(0.0, _scalar_runs()[2].excess(formula, 2.0, 10, 1)), 1e-9)


@over(**_VARIATION, rows=Integer(1, 3), columns=Integer(1, 3), rank=Integer(1, 3))
def varying_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much a run with random coefficients, linear in W, exceeds the bound."""
    rng = np.random.default_rng(point["draw"])
    m, n = point["rows"], point["columns"]
    terms = point["terms"]

    def coefficients(size: int, change: float) -> tuple[_Linear, ...]:
        factors = rng.standard_normal((terms, size, size))
        moves = rng.standard_normal((terms, size, size))
        return tuple(
            _Linear(
                factor @ factor.T / size + 0.5 * np.eye(size),
                change * rng.standard_normal((m, n)),
                move + move.T,
            )
            for factor, move in zip(factors, moves, strict=True)
        )

    a = tuple(
        _Linear(
            rng.standard_normal((m, n)),
            point["vary_a"] * rng.standard_normal((m, n)),
            rng.standard_normal((m, n)),
        )
        for _ in range(terms)
    )
    varying = _Varying(a, coefficients(m, point["vary_b"]), coefficients(n, point["vary_c"]))
    start = rng.standard_normal((m, n))
    rank = min(point["rank"], m, n)
    # With the curvature at the start the first run is short enough not to diverge at once.
    largest, highest = max(1.0, _extremes(varying, start)[1]), np.inf
    for _ in range(2):  # the limit of the step depends on the path, which depends on the step
        run = descend(varying, start, step=point["share"] / largest, steps=8, rank=rank)
        ends = [_extremes(varying, w) for w in run.w]
        if min(least for least, _ in ends) < 0:
            raise JomaError("positive semidefinite coefficients only")
        highest = max(most for _, most in ends)
        largest = max(largest, highest)
    if point["share"] / largest * highest > 1:
        raise JomaError("the step is too long for the path")
    excess = varying.excess(formula, point["share"] / largest, 8, rank, start)
    return ClaimMeasurement(excess, 1e-8)


@claim("galore-varying-coefficients", varying_rate, varying_at)
def _varying_coefficients(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """By how much runs exceed the bound, and scalars miss it at their fixed point."""
    excess = [run.excess(formula, 0.1, 80, 1) for run in _scalar_runs()]
    matrices = _matrix_run(rng).excess(formula, 0.01, 80, 2)
    at_rest = [_attained_near(formula, w, 0.1) for w in (0.3, 0.9)]
    return ClaimMeasurement(max(0.0, matrices, *excess, *(value - 1e-4 for value in at_rest)), 1e-9)


def _extremes(varying: _Varying, w: Array) -> tuple[float, float]:
    """The least eigenvalue of any B_i, C_i at W, and Σ‖B_i‖‖C_i‖."""
    least, total = np.inf, 0.0
    for b, c in zip(varying.b, varying.c, strict=True):
        of_b, of_c = np.linalg.eigvalsh(b.at(w)), np.linalg.eigvalsh(c.at(w))
        least = min(least, float(of_b[0]), float(of_c[0]))
        total += float(of_b[-1] * of_c[-1])
    return least, total


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


@over(**_VARIATION, rest=Real(0.01, 3.0, log=True))
def _attained_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """How far one step of scalars next to their fixed point is from the bound."""
    rng = np.random.default_rng(point["draw"])
    scales = np.array([point["vary_a"], 1.0, -point["vary_b"], 1.0, -point["vary_c"]])
    terms = tuple(
        tuple(row) for row in scales * rng.uniform(0.3, 1.0, (point["terms"], len(scales)))
    )
    rest = point["rest"]
    varying = _at_rest(rest, terms)
    slope = sum(b * c + rest * (db * c + b * dc) - da for da, b, db, c, dc in terms)
    largest = sum(b * c for _, b, _, c, _ in terms)
    if abs(slope) < 1e-2 * largest:
        raise JomaError("R does not contract")
    step = point["share"] / largest
    return ClaimMeasurement(_miss(varying, formula, rest, step), 1e-4 * (1 + rest))


@claim("galore-varying-attained", varying_rate, _attained_at)
def _attained_with_variation(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """How far scalars are from the bound at their fixed point, B and C varying in one term too."""
    excess = [abs(run.excess(formula, 0.1, 150, 1)) for run in _scalar_runs()]
    at_rest = [_attained_near(formula, w, 0.1) for w in rng.uniform(0.1, 1.5, 5)]
    return measured(max(*excess, *at_rest), 1e-5)

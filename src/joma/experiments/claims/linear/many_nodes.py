"""The talk's remarks on many hidden nodes and rank: its matrix equation."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, Search, claim, over, without
from joma.experiments.claims.linear.theorem2 import TIME_LEFT
from joma.experiments.claims.measurement import (
    ClaimMeasurement,
    difference,
    largest_error,
    measured,
    relative,
    smallest_error,
)
from joma.experiments.claims.reference.eqn3 import length_at
from joma.experiments.claims.reference.ode import follow, solve
from joma.experiments.claims.search import Choice, Integer, Matrix, Real, Seed
from joma.theory import linear, spectra
from joma.theory.block import Block, Samples, simulate

_DELTAS = Matrix(Real(-3, 3, special=(0.0,)), Integer(1, 6), Integer(1, 4))
_RIVALS: dict[str, Any] = {
    "delta": _DELTAS,
    "rival": Choice("none", "tie", "near"),
    "gap": Real(1e-10, 0.5, log=True),
}
_LATE: dict[str, Any] = {**_RIVALS, "left": Real(1e-12, 0.999, log=True)}


def _velocity(v: Any, delta: Any) -> Any:
    return np.exp(np.sum(v**2, axis=1, keepdims=True) / 2) * delta


def _blowup(length: Any, left: Any) -> Any:
    """The time with a share `left` of that of the longest row left."""
    return np.sqrt(np.pi / 2) / np.max(length) * (1 - np.asarray(left))


def _unequal_rows(rng: Generator) -> Any:
    return rng.normal(size=(4, 3)) * np.array([1.4, 1.0, 0.7, 0.5])[:, None]


def _matrix_flow(delta: Any, left: list[float]) -> tuple[Any, Any]:
    """Times at which a share of the longest row's time is left, and V(t) of the talk's ODE."""
    t = _blowup(np.linalg.norm(delta, axis=1), left)
    return t, solve(lambda v: _velocity(v, delta), np.zeros_like(delta), t)


def _matrix_flow_at(point: Point, delta: Any) -> tuple[Any, float, Any]:
    """Δ without rows shorter than 1e-6 of the longest, a time, and V(t) by LSODA."""
    delta, length = _long_rows(delta)
    t = float(_blowup(length, point["left"]))
    return delta, t, follow(lambda v: _velocity(v, delta), np.zeros_like(delta), t)


def _long_rows(delta: Any) -> tuple[Any, Any]:
    length = np.linalg.norm(delta, axis=1)
    kept = length > 1e-6 * np.max(length)
    if not kept.any():
        raise JomaError("no row moves")
    return delta[kept], length[kept]


@over(
    tokens=Integer(1, 6), nodes=Integer(1, 6), samples=Integer(1, 12), left=TIME_LEFT, draw=Seed()
)
def _block_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """V̇ of a block with its own logits, integrated up to a time, against the talk's formula."""
    rng = np.random.default_rng(point["draw"])
    x = rng.dirichlet(np.full(point["tokens"], 10 ** rng.uniform(-1, 1)), size=point["samples"])
    g = rng.normal(size=(point["samples"], point["nodes"])) * 10 ** rng.uniform(-1, 1)
    delta = x.T @ g / len(x)
    longest = np.max(np.linalg.norm(delta, axis=1))
    if longest < 1e-9:
        raise JomaError("no token moves")

    def right_side(state: Any) -> Any:
        v, z = state[:, :-1], state[:, -1]
        drive = (np.exp(z) * x).T @ g / len(x)
        return np.column_stack([drive, np.sum(drive * v, axis=1)])

    start = np.zeros((point["tokens"], point["nodes"] + 1))
    state = follow(right_side, start, float(_blowup(longest, point["left"])))
    # Near the end an error of v is one of v² in the logarithm of v̇.
    return measured(relative(formula(state[:, :-1], delta), right_side(state)[:, :-1]), 1e-6)


@claim("talk-matrix", _velocity, _block_at)
def _block(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The talk's matrix equation against the full block with four nodes."""
    x = rng.dirichlet(np.ones(5), size=30)
    g = rng.normal(size=(30, 4)) + rng.normal(size=4)
    path = simulate(Block("exp", "linear"), Samples(x, gradient=g), np.linspace(0, 1.0, 4))
    delta = x.T @ g / 30
    flow = solve(lambda v: formula(v, delta), np.zeros((5, 4)), path.t)
    return measured(relative(flow, path.v), 1e-8)


@over(delta=_DELTAS, left=TIME_LEFT)
def _rows_at(formula: Formula, point: Point) -> ClaimMeasurement:
    delta, t, flow = _matrix_flow_at(point, point["delta"])
    return measured(relative(formula(delta, t), flow), 1e-6)


@claim("talk-nodes", linear.weights_multi, _rows_at)
def _rows(formula: Formula, rng: Generator) -> ClaimMeasurement:
    delta = _unequal_rows(rng)
    t, flow = _matrix_flow(delta, [0.5, 0.1, 0.01])
    return measured(relative(formula(delta, t), flow), 1e-8)


@over(delta=_DELTAS, left=TIME_LEFT)
def _rank_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Whole numbers in Δ, so that no singular value is small by chance."""
    delta, _, flow = _matrix_flow_at(point, np.round(point["delta"]))
    falls = bool(spectra.rank(flow, tolerance=1e-7) < np.linalg.matrix_rank(delta))
    return ClaimMeasurement(float(bool(formula(delta)) != falls), 0.0)


@claim("talk-rank", lambda delta: False, _rank_at)
def _rank(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Whether the matrix ODE has lost rank at 1 - t/t* = 1e-4."""
    delta = _unequal_rows(rng)
    falls = bool(spectra.rank(_matrix_flow(delta, [1e-4])[1][0]) < spectra.rank(delta))
    return ClaimMeasurement(float(formula(delta) != falls), 0.0)


def _at_the_end(delta: Any, length_of_winner: float) -> Any:
    """V where the longest rows have grown to a given length and the others are at their limits.

    Rows tie if their lengths do as fractions; rows that nearly tie are refused.
    """
    squares = [sum(Fraction(float(a)) ** 2 for a in row) for row in delta]
    largest = max(squares)
    with mpmath.workdps(30):
        sizes = []
        for square in squares:
            if square == largest:
                sizes.append(length_of_winner)
                continue
            share = mpmath.sqrt(mpmath.mpf(square.numerator) / square.denominator)
            share /= mpmath.sqrt(mpmath.mpf(largest.numerator) / largest.denominator)
            if share > 1 - mpmath.mpf(10) ** -13:
                raise JomaError("two rows are too close for the reference")
            sizes.append(float(mpmath.sqrt(2) * mpmath.erfinv(share)))
    length = np.linalg.norm(delta, axis=1)
    return np.array(sizes)[:, None] * delta / np.where(length > 0, length, 1)[:, None]


def _late_limit_of(formula: Formula, delta: Any) -> ClaimMeasurement:
    return measured(abs(formula(delta) - spectra.stable_rank(_at_the_end(delta, 1e7))), 1e-9)


def _with_rival(point: Point) -> Any:
    """Δ, with one more row that is exactly or nearly as long as the longest."""
    delta = point["delta"]
    if not delta.any():
        raise JomaError("no row moves")
    longest = delta[np.argmax(np.linalg.norm(delta, axis=1))]
    if point["rival"] == "none":
        return delta
    share = 1.0 if point["rival"] == "tie" else 1 - point["gap"]
    return np.vstack([delta, share * np.roll(longest, 1)])


@claim(
    "talk-stable-rank",
    linear.stable_rank_limit,
    Search(_RIVALS, lambda formula, point: _late_limit_of(formula, _with_rival(point))),
)
def _late_limit(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The stable rank with winners at 1e7 and the others at their limits, also with ties."""
    cases = [
        rng.normal(size=(4, 3)),
        np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.0]]),
        np.array([[1.0, 0.0], [0.0, 0.999]]),
        np.array([[3.0, 4.0], [5.0, 0.0], [1.0, 1.0]]),
        np.array([[2.0, 1.0], [-2.0, -1.0], [0.0, 1.0]]),
    ]
    return largest_error(_late_limit_of(formula, delta) for delta in cases)


def _stable_ranks(delta: Any, t: Any) -> tuple[Any, Any]:
    return (
        spectra.stable_rank(linear.weights_multi(delta, t)),
        spectra.stable_rank(linear.velocity_multi(delta, t)),
    )


_SLOW = np.array([[1.0, 0.0], [0.0, 0.95], [0.0, 0.95]])
"""Two weaker rows that together outweigh the winner until late."""
_TIED = np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.0]])
"""Two longest rows: the stable rank of V rises to 2, and that of V̇ is the higher."""


@without("talk-gradient-rank")
def _ranks_early(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Before it is late, and with two longest rows."""
    return smallest_error([_fall(formula, _SLOW, [0.1, 0.01]), _fall(formula, _TIED, [1e-3, 1e-6])])


def _fall(formula: Formula, delta: Any, left: list[float]) -> ClaimMeasurement:
    """Stable ranks against the ODE's; 1 is added unless V's falls and V̇'s is the lower."""
    t, flow = _matrix_flow(delta, [0.1, 1e-2, 1e-3])
    rates = np.exp(np.sum(flow**2, axis=2, keepdims=True) / 2) * delta
    weights, gradients = formula(delta, t)
    error = max(
        relative(weights, spectra.stable_rank(flow)),
        relative(gradients, spectra.stable_rank(rates)),
    )
    weights, gradients = formula(delta, _blowup(np.linalg.norm(delta, axis=1), left))
    falls = np.all(np.diff(weights) < 0) and np.all(gradients < weights)
    return ClaimMeasurement(error + float(not falls), 1e-6)


def late_ranks(conditional: bool) -> Callable[[Formula, Point], ClaimMeasurement]:
    """Compare the stable ranks of V and V̇ with 30 digits, and what they do at the very end.

    With its condition, a longest row alone and rank Δ ≥ 2, the claim says that the one of V falls
    and that the one of V̇ is lower still.
    """

    def measure(formula: Formula, point: Point) -> ClaimMeasurement:
        delta, length = _long_rows(_with_rival(point))
        values = spectra.singular_values(delta)
        if values.size < 2 or values[1] < 1e-4 * values[0]:
            raise JomaError("of rank 1 or close to it")
        longest = length > np.max(length) * (1 - 1e-12)
        if conditional and np.sum(longest) > 1:
            raise JomaError("the longest row is not alone")
        early, late = (_at_the_end(delta, size) for size in (1e2, 1e3))
        falls = spectra.stable_rank(late) < spectra.stable_rank(early)
        # At 1e3 nothing is left of the other rows of V̇.
        winners = np.where(longest[:, None], delta, 0.0)
        lower = spectra.stable_rank(winners) < spectra.stable_rank(late)
        with mpmath.workdps(30):
            t = mpmath.mpf(float(_blowup(length, point["left"])))
            exact = [mpmath.norm([mpmath.mpf(float(a)) for a in row]) for row in delta]
            size = np.array([length_at(one, t) for one in exact])
        v = size[:, None] * delta / length[:, None]
        rate = np.exp(size**2 / 2)[:, None] * delta
        weights, gradients = formula(delta, float(t))
        error = max(
            difference(weights, spectra.stable_rank(v)),
            difference(gradients, spectra.stable_rank(rate)),
        )
        return ClaimMeasurement(error + float(not (falls and lower)), 1e-7)

    return measure


@claim("talk-gradient-rank", _stable_ranks, Search(_LATE, late_ranks(True)))
def _ranks_late(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return largest_error(_fall(formula, d, [1e-3, 1e-6]) for d in (_unequal_rows(rng), _SLOW))


RANKS_WITH_TIES = Search(_LATE, late_ranks(False))
"""The domain of talk-gradient-rank without its condition."""

"""The talk's remarks on many nodes and rank at one point of their domain, for the adversary."""

from fractions import Fraction
from typing import Any

import mpmath
import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.measurement import Formula, Measurement
from joma.experiments.claims.reference.eqn6 import follow, length_at
from joma.experiments.claims.search import Choice, Integer, Matrix, Point, Real, Search, Seed
from joma.theory import spectra

_DELTAS = Matrix(Real(-3, 3, special=(0.0,)), Integer(1, 6), Integer(1, 4))
_LEFT = Real(1e-3, 0.999, log=True)
"""Share of the winner's time that is left, where an ODE is followed up to it."""


def _relative(ours: Any, reference: Any) -> float:
    return float(np.max(np.abs(ours - reference)) / np.max(np.abs(reference), initial=1e-300))


def _many_nodes_block(formula: Formula, point: Point) -> Measurement:
    """V̇ of a block with its own logits, followed up to a time, against the talk's formula."""
    rng = np.random.default_rng(point["draw"])
    x = rng.dirichlet(np.full(point["tokens"], 10 ** rng.uniform(-1, 1)), size=point["samples"])
    g = rng.normal(size=(point["samples"], point["nodes"])) * 10 ** rng.uniform(-1, 1)
    delta = x.T @ g / len(x)
    longest = np.max(np.linalg.norm(delta, axis=1))
    if longest < 1e-9:
        raise JomaError("no token moves")
    t = float(np.sqrt(np.pi / 2) / longest * (1 - point["left"]))

    def right_side(state: Any) -> Any:
        v, z = state[:, :-1], state[:, -1]
        b = np.exp(z) * x
        drive = b.T @ g / len(x)
        return np.column_stack([drive, np.sum(drive * v, axis=1)])

    start = np.zeros((point["tokens"], point["nodes"] + 1))
    state = follow(right_side, start, t)
    ours, block = formula(state[:, :-1], delta), right_side(state)[:, :-1]
    # Near the end an error of v is one of v² in the logarithm of v̇.
    return Measurement(_relative(ours, block), 1e-6)


def _matrix_flow(delta: Any, t: float) -> Any:
    """V(t) of the talk's matrix equation, by LSODA."""
    return follow(
        lambda v: np.exp(np.sum(v**2, axis=1, keepdims=True) / 2) * delta, np.zeros_like(delta), t
    )


def _scaled(delta: Any) -> tuple[Any, Any]:
    """Δ without rows of length below 1e-6 of the longest, and the lengths."""
    length = np.linalg.norm(delta, axis=1)
    kept = length > 1e-6 * np.max(length)
    if not kept.any():
        raise JomaError("no row moves")
    return delta[kept], length[kept]


def _rows(formula: Formula, point: Point) -> Measurement:
    delta, length = _scaled(point["delta"])
    t = float(np.sqrt(np.pi / 2) / np.max(length) * (1 - point["left"]))
    return Measurement(_relative(formula(delta, t), _matrix_flow(delta, t)), 1e-6)


def _exact_rank(matrix: Any) -> int:
    """Rank by elimination with fractions."""
    rows = [[Fraction(float(entry)) for entry in row] for row in matrix]
    rank = 0
    for column in range(matrix.shape[1]):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column] != 0), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            factor = rows[i][column] / rows[rank][column]
            rows[i] = [a - factor * b for a, b in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


def _rank(formula: Formula, point: Point) -> Measurement:
    """Whole numbers in Δ, so that its rank is exact and no singular value is small by chance."""
    delta = np.round(point["delta"])
    delta, length = _scaled(delta)
    t = float(np.sqrt(np.pi / 2) / np.max(length) * (1 - point["left"]))
    falls = bool(spectra.rank(_matrix_flow(delta, t), tolerance=1e-7) < _exact_rank(delta))
    return Measurement(float(bool(formula(delta)) != falls), 0.0)


def at_the_end(delta: Any, length_of_winner: float) -> Any:
    """V where the longest rows have grown to a given length and the others are at their limits.

    Rows tie if their lengths do as fractions; refused where they nearly do.
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


def _stable_rank_limit(formula: Formula, point: Point) -> Measurement:
    delta = _with_rival(point)
    late = spectra.stable_rank(at_the_end(delta, 1e7))
    return Measurement(abs(float(formula(delta) - late)), 1e-9)


def late_ranks(conditional: bool) -> Any:
    """Stable ranks of V and V̇ against 30 digits, and what they do towards the very end.

    With its condition, a longest row alone and rank Δ ≥ 2, the claim says that the one of V falls
    and that the one of V̇ is lower still.
    """

    def measure(formula: Formula, point: Point) -> Measurement:
        delta, length = _scaled(_with_rival(point))
        values = spectra.singular_values(delta)
        if values.size < 2 or values[1] < 1e-4 * values[0]:
            raise JomaError("of rank 1 or close to it")
        ties = np.sum(length > np.max(length) * (1 - 1e-12))
        if conditional and ties > 1:
            raise JomaError("the longest row is not alone")
        early, late = (at_the_end(delta, size) for size in (1e2, 1e3))
        falls = spectra.stable_rank(late) < spectra.stable_rank(early)
        # At 1e3 nothing is left of the other rows of V̇.
        winners = np.where(length[:, None] > np.max(length) * (1 - 1e-12), delta, 0.0)
        lower = spectra.stable_rank(winners) < spectra.stable_rank(late)
        with mpmath.workdps(30):
            t = mpmath.mpf(float(np.sqrt(np.pi / 2) / np.max(length) * (1 - point["left"])))
            exact = [mpmath.norm([mpmath.mpf(float(a)) for a in row]) for row in delta]
            size = np.array([length_at(one, t) for one in exact])
        v = size[:, None] * delta / length[:, None]
        rate = np.exp(size**2 / 2)[:, None] * delta
        weights, gradients = formula(delta, float(t))
        error = max(
            abs(float(weights - spectra.stable_rank(v))),
            abs(float(gradients - spectra.stable_rank(rate))),
        )
        return Measurement(error + float(not (falls and lower)), 1e-7)

    return measure


_RIVALS: dict[str, Any] = {
    "delta": _DELTAS,
    "rival": Choice("none", "tie", "near"),
    "gap": Real(1e-10, 0.5, log=True),
}
_LATE: dict[str, Any] = {**_RIVALS, "left": Real(1e-12, 0.999, log=True)}
MATRIX = Search(
    {
        "tokens": Integer(1, 6),
        "nodes": Integer(1, 6),
        "samples": Integer(1, 12),
        "left": _LEFT,
        "draw": Seed(),
    },
    _many_nodes_block,
)
NODES = Search({"delta": _DELTAS, "left": _LEFT}, _rows)
RANK = Search({"delta": _DELTAS, "left": _LEFT}, _rank)
RANK_LIMIT = Search(_RIVALS, _stable_rank_limit)
GRADIENT_RANK = Search(_LATE, late_ranks(True))
GRADIENT_RANK_ANY = Search(_LATE, late_ranks(False))

"""Fig. 4: attention entropy drops and rebounds."""

from typing import Any

import mpmath
import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, measured, smallest_error
from joma.experiments.claims.reference.eqn6 import courses, flow, minimum, refuse_near_ties
from joma.experiments.claims.search import Integer, Real, Vector
from joma.theory import nonlinear

_MIXED = ((3.0, 2.5, 0.5, 0.3), (2.0, 1.9, 1.0), (1.5, -1.0))
_PURE = ((2.0, 2.0, -2.0), (3.0, 0.0, 0.0))
_FALLING = ((1.0, 0.9, 0.0), (1.2, 1.0, 0.0, 0.0), (2.0, 1.9, *[0.0] * 6))
"""A component that is neither zero nor the largest, and no rebound."""
_ZEROS = ((2.5, 1.0, 0.0, -1.5), (2.778, 2.335, *[0.0] * 1000))
"""Zeros and a rebound: at the end, and between two falls."""
_ALL = (*_MIXED, *_PURE, *_FALLING, *_ZEROS)
_Targets = tuple[tuple[float, ...], ...]


class _Path:
    """Entropy of softmax(v²) along Eqn 6, from courses by quadrature."""

    def __init__(self, mu: Any) -> None:
        size = np.abs(mu)
        self._size, self._count = np.unique(size[size > 0], return_counts=True)
        self._zeros = int(np.sum(size == 0))
        if self._size.size:
            self._courses, self._t = courses(self._size)

    def _entropy(self, r: Any) -> Any:
        """S at shares v/μ of shape (…, distinct non-zero sizes)."""
        logits = (r * self._size) ** 2
        counts = self._count
        if self._zeros:
            logits = np.concatenate([logits, np.zeros((*logits.shape[:-1], 1))], axis=-1)
            counts = np.append(counts, self._zeros)
        shifted = logits - np.max(logits, axis=-1, keepdims=True)
        weight = counts * np.exp(shifted)
        total = np.sum(weight, axis=-1, keepdims=True)
        return np.log(total[..., 0]) - np.sum(weight * shifted, axis=-1) / total[..., 0]

    def _entropy_at(self, t: Any) -> Any:
        return self._entropy(np.stack([-np.expm1(-one.at(t)) for one in self._courses], axis=-1))

    @property
    def lowest(self) -> float:
        """The smallest S(t)."""
        return min(minimum(self._entropy_at, self._t, 2 * self._size.size + 2), self.end)

    @property
    def end(self) -> float:
        """S at the targets."""
        return float(self._entropy(np.ones(self._size.size)))


def _rises_last(mu: Any) -> bool | None:
    """Whether lowering the smallest non-zero logit of the targets lowers S; None if unsure."""
    size, count = np.unique(np.abs(mu), return_counts=True)
    smallest = np.min(size[size > 0])
    with mpmath.workdps(60):

        def entropy(factor: Any) -> Any:
            logits = [mpmath.mpf(s) ** 2 * (factor if s == smallest else 1) for s in size]
            weight = [int(n) * mpmath.exp(a) for n, a in zip(count, logits, strict=True)]
            total = sum(weight)
            mean = sum(w * a for w, a in zip(weight, logits, strict=True)) / total
            return mpmath.log(total) - mean

        change = entropy(mpmath.mpf(1)) - entropy(1 - mpmath.mpf(10) ** -20)
        unsure = mpmath.mpf(10) ** -33 * mpmath.mpf(smallest) ** 2
        return None if abs(change) < unsure else bool(change > 0)


def _fate_error(formula: Formula, mu: Any, *, numbers: bool) -> ClaimMeasurement:
    """How far a fate is from what the courses by quadrature do.

    Whether there is a drop or a rebound is compared where it is larger than 1e-9, and where the
    last change, in 60 digits, decides; their sizes are compared to 1e-6.
    """
    fate = formula(mu)
    size = np.abs(mu)
    if np.all(size == size[0]):
        return ClaimMeasurement(2 * float(bool(fate[0]) or bool(fate[1])), 1.0)
    refuse_near_ties(size)
    path = _Path(mu)
    lowest, end = path.lowest, path.end
    drop, rebound = np.log(size.size) - lowest, end - lowest
    wrong = not fate[0]
    last = _rises_last(mu)
    if last or rebound > 1e-9:
        wrong |= not fate[1]
    elif last is False and rebound < 1e-12:
        wrong |= bool(fate[1])
    if not numbers:
        return ClaimMeasurement(2 * float(wrong), 1.0)
    if last is not None:
        wrong |= bool(fate.rises_last) != last
    off = max(abs(fate.drop - drop), abs(fate.rebound - rebound)) / 1e-6
    return ClaimMeasurement(max(off, 2 * float(wrong)), 1.0)


@over(mu=Vector(Real(1e-3, 37, log=True, special=(1.0, 3.0)), Integer(2, 12)))
def _entropy_at(formula: Formula, point: Point) -> ClaimMeasurement:
    if np.ptp(np.abs(point["mu"])) == 0:
        raise JomaError("all of one size")
    return _fate_error(formula, point["mu"], numbers=False)


@over(
    largest=Real(1e-2, 37, log=True),
    shares=Vector(Real(-1, 1, special=(0.0, 1.0)), Integer(1, 12)),
    zeros=Integer(0, 200),
)
def _fate_at(formula: Formula, point: Point) -> ClaimMeasurement:
    mu = np.concatenate([point["largest"] * point["shares"], np.zeros(point["zeros"])])
    return _fate_error(formula, mu, numbers=True)


@claim("fig4-entropy", lambda mu: (True, True), _entropy_at, cases=_MIXED, random=3)
@claim("fig4-fate", nonlinear.entropy_fate, _fate_at, cases=_ALL, random=2)
def _entropy(
    formula: Formula, rng: Generator, *, cases: _Targets, random: int = 0
) -> ClaimMeasurement:
    """Whether a formula is right on if and by how much entropy(softmax(v²)) falls and rises."""
    drawn = [tuple(rng.uniform(0.3, 3, size=5)) for _ in range(random)]
    errors = []
    for mu in (*cases, *drawn):
        fate = formula(mu)
        t = np.concatenate([[0.0], np.geomspace(1e-3, 30, 1000)])
        size, place = np.unique(np.abs(mu), return_inverse=True)
        path = flow(size, t, 1e-9, "LSODA")[:, place]
        change = nonlinear.drop_and_rebound(nonlinear.attention_entropy(path))
        seen = bool(change.drop > 1e-6), bool(change.rebound > 1e-6)
        errors.append(float(tuple(fate[:2]) != seen))
        if len(fate) > 2:
            errors += [abs(fate.drop - change.drop), abs(fate.rebound - change.rebound)]
    return measured(errors, 1e-3)


@without("fig4-entropy")
def _entropy_of_others(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Equal components, a single one, zeros next to others."""
    return smallest_error(_entropy(formula, rng, cases=(one,)) for one in (*_PURE, *_FALLING))

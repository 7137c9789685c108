"""An optimiser that searches the whole domain of a claim for a case in which it fails."""

import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Claim, Formula, Generator, Point, Search
from joma.experiments.claims.measurement import ClaimMeasurement

ENOUGH = 1000
"""Evaluations below which a search is named as too short."""
LONGEST = 3.0
"""By which factor a slow claim may exceed its time to reach `ENOUGH` evaluations."""
_FIRST = 200
"""Points that are drawn before any is changed."""
_POOL = 16
"""Worst points that are kept and changed."""
_DRAWN = 0.25
"""Share of new draws after the first ones."""


@dataclass(frozen=True)
class Attack:
    """The result of a search for a violation.

    Attributes:
        claim: Id of the claim.
        evaluations: Points at which the claim was measured.
        refused: Points that the formula or its reference refused, being outside their domain.
        ratio: The largest error over its tolerance; above 1 is a violation.
        values: The parameters at that point.
        failure: The exception that the formula raised there, or "".
        seconds: Time of the search.
    """

    claim: str
    evaluations: int
    refused: int
    ratio: float
    values: Mapping[str, Any]
    failure: str
    seconds: float

    @property
    def violated(self) -> bool:
        """Whether the claim fails somewhere in its domain."""
        return not self.ratio <= 1

    @property
    def enough(self) -> bool:
        """Whether there were enough evaluations to speak of a search."""
        return self.violated or self.evaluations >= ENOUGH

    def as_json(self) -> dict[str, Any]:
        """Return the attack as the record that `joma verify --adversary --json` prints."""
        return {
            "claim": self.claim,
            "violated": self.violated,
            "evaluations": self.evaluations,
            "enough": self.enough,
            "refused": self.refused,
            "ratio": float(self.ratio) if np.isfinite(self.ratio) else None,
            "parameters": {name: _plain(value) for name, value in self.values.items()},
            "failure": self.failure,
            "seconds": round(self.seconds, 3),
        }


def attack(
    claim: Claim, seconds: float, *, seed: int = 0, formula: Formula | None = None
) -> Attack:
    """Search the domain of a claim for a violation.

    Args:
        claim: A claim with a `search`.
        seconds: Time to search; a slow claim gets up to three times that to reach 1,000
            evaluations. A violation ends the search.
        seed: Seed of the search.
        formula: Formula to attack instead of the derived one.

    Raises:
        JomaError: The claim has no free parameters.
    """
    if claim.search is None:
        raise JomaError(f"claim {claim.id} has no free parameters to search")
    generator = np.random.default_rng([seed, zlib.crc32(claim.id.encode()), 1])
    hunt = _Hunt(claim.search, formula or claim.derived, generator)
    start = time.perf_counter()
    while not hunt.found:
        taken = time.perf_counter() - start
        if taken > LONGEST * seconds or (taken > seconds and hunt.evaluations >= ENOUGH):
            break
        hunt.step()
    taken = time.perf_counter() - start
    worst = hunt.worst
    return Attack(
        claim.id, hunt.evaluations, hunt.refused, worst.ratio, worst.values, worst.failure, taken
    )


@dataclass(frozen=True)
class _Tried:
    ratio: float
    values: Mapping[str, Any]
    failure: str = ""


class _Hunt:
    """The points tried so far, the worst of which are changed in small and large steps."""

    def __init__(self, search: Search, formula: Formula, generator: Generator) -> None:
        self._search, self._formula, self._generator = search, formula, generator
        self._pool: list[_Tried] = []
        self._made = 0
        self.evaluations = self.refused = 0
        self.found = False

    @property
    def worst(self) -> _Tried:
        """The point with the largest ratio."""
        return self._pool[0] if self._pool else _Tried(-np.inf, {})

    def step(self) -> None:
        """Try one more point."""
        generator = self._generator
        self._made += 1
        if self._made <= _FIRST or not self._pool or generator.random() < _DRAWN:
            values = self._search.draw(generator)
        else:
            index = min(int(generator.geometric(0.3)) - 1, len(self._pool) - 1)
            size = 10 ** generator.uniform(-5, -0.3)
            values = self._search.change(self._pool[index].values, generator, size)
        tried = self._try(Point(values, int(generator.integers(2**32))))
        if tried is None:
            self.refused += 1
            return
        self.evaluations += 1
        if not tried.ratio <= 1:
            tried = self._confirmed(tried)
            self.found = not tried.ratio <= 1
        self._keep(tried)

    def _try(self, point: Point) -> _Tried | None:
        """Measure the claim at a point; None where it lies outside the domain."""
        try:
            with np.errstate(all="ignore"):
                measured = self._search.measure(self._formula, point)
        except JomaError:
            return None
        except Exception as error:
            return _Tried(np.inf, point.values, f"{type(error).__name__}: {error}")
        return _Tried(ratio_of(measured), point.values)

    def _confirmed(self, tried: _Tried) -> _Tried:
        """Return the violation, or the larger sample that does not confirm it."""
        if not self._search.sampled or tried.failure:
            return tried
        again = tried
        for _ in range(2):
            point = Point(tried.values, int(self._generator.integers(2**32)), effort=100)
            again = self._try(point) or tried  # a refusal does not clear it
            if again.ratio <= 1:
                break
        return again

    def _keep(self, tried: _Tried) -> None:
        """Keep a point if it is among the worst; of equals the new one, so the search moves."""
        place = next((i for i, it in enumerate(self._pool) if tried.ratio >= it.ratio), None)
        if place is not None:
            self._pool.insert(place, tried)
        elif len(self._pool) < _POOL:
            self._pool.append(tried)
        del self._pool[_POOL:]


def ratio_of(measured: ClaimMeasurement) -> float:
    """Return the error over the tolerance; infinite for NaN, and for any error where it is 0."""
    if np.isnan(measured.error) or np.isnan(measured.tolerance):
        return np.inf
    if measured.tolerance > 0:
        return float(measured.error / measured.tolerance)
    return np.inf if measured.error > 0 else float(measured.error)


def _plain(value: Any) -> Any:
    """Return a parameter as a value that JSON can hold."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value

"""A claim: a formula as printed, the same as derived, and an independent measurement of both."""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims import errata

Formula = Callable[..., Any]
"""What a claim says, as a function that its measurement calls."""


@dataclass(frozen=True)
class Measurement:
    """How far a formula lies from an independent reference.

    Attributes:
        error: the distance, in the measure's own unit.
        tolerance: the largest error at which the claim holds.
        standard_error: of the reference, when it is a Monte-Carlo estimate.
    """

    error: float
    tolerance: float
    standard_error: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return bool(self.error <= self.tolerance)


Measure = Callable[[Formula, np.random.Generator], Measurement]
"""Compares a formula with a reference that does not use it."""


def monte_carlo(difference: Any, standard_error: Any) -> Measurement:
    """The verdict of a Monte-Carlo estimate: it holds within four standard errors.

    Of several compared numbers the one farthest away, counted in its own standard errors, speaks.
    """
    difference, standard_error = np.broadcast_arrays(
        np.abs(np.atleast_1d(difference)), np.atleast_1d(standard_error)
    )
    worst = int(np.argmax(difference / standard_error))
    se = float(standard_error.flat[worst])
    return Measurement(float(difference.flat[worst]), 4 * se, se)


@dataclass(frozen=True)
class Claim:
    """One statement of the papers (or ours), checkable by machine.

    Attributes:
        id: what `joma verify --claim` takes.
        title: the statement in one line.
        source: where it is printed; "new" when it is ours.
        method: how the reference was made, in a few words.
        derived: the formula as derived.
        measure: compares a formula with the reference.
        printed: the formula as printed, where it differs; None where print is right or silent.
            What should be changed in print is said in `errata`.
        condition: what must hold for the claim to hold, if anything.
        without: measures the derived formula where the condition does not hold; it must fail.
    """

    id: str
    title: str
    source: str
    method: str
    derived: Formula
    measure: Measure
    printed: Formula | None = None
    condition: str = ""
    without: Measure | None = None

    def __post_init__(self) -> None:
        if self.source == "new" and self.printed is not None:
            raise JomaError(f"claim {self.id} is ours and cannot have a printed form")
        if bool(self.condition) != (self.without is not None):
            raise JomaError(f"claim {self.id} needs both its condition and a case without, or none")


@dataclass(frozen=True)
class Verdict:
    """What was measured of one claim."""

    claim: Claim
    derived: Measurement
    printed: Measurement | None
    without: Measurement | None
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The verdict as the record that `joma verify --json` prints."""
        record: dict[str, Any] = {
            "claim": self.claim.id,
            "title": self.claim.title,
            "source": self.claim.source,
            "printed": None
            if self.printed is None
            else {"holds": self.printed.holds, "error": _number(self.printed.error)},
            "derived": {
                "holds": self.derived.holds,
                "error": _number(self.derived.error),
                "tolerance": _number(self.derived.tolerance),
            },
            "method": self.claim.method,
            "seconds": round(self.seconds, 4),
        }
        if self.derived.standard_error is not None:
            record["derived"]["standard_error"] = _number(self.derived.standard_error)
        if self.without is not None:
            record["condition"] = self.claim.condition
            record["without"] = {"holds": self.without.holds, "error": _number(self.without.error)}
        found = errata.measured_by(self.claim.id)
        if found:
            record["errata"] = [erratum.id for erratum in found]
        return record


def check(claim: Claim, seed: int = 0) -> Verdict:
    """Measures one claim, derived and printed against the same reference.

    Every claim draws from its own stream, so a verdict does not depend on what else was checked.
    """
    start = time.perf_counter()
    derived = claim.measure(claim.derived, _stream(claim, seed))
    if claim.source == "new":
        printed = None
    elif claim.printed is None:
        printed = derived
    else:
        printed = claim.measure(claim.printed, _stream(claim, seed))
    without = None
    if claim.without is not None:
        without = claim.without(claim.derived, _stream(claim, seed))
    return Verdict(claim, derived, printed, without, time.perf_counter() - start)


def _stream(claim: Claim, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(claim.id.encode())])


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return float(value) if np.isfinite(value) else None

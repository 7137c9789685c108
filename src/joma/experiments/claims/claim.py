"""A claim: a formula as printed, the same as derived, and an independent measurement of both."""

import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from joma.errors import JomaError
from joma.experiments._claim_list import claim_texts
from joma.experiments.claims import errata

Generator = np.random.Generator
Formula = Callable[..., Any]
"""The statement of a claim, as a function that its measurement calls."""
Point = Mapping[str, Any]
"""Values of the parameters by name, where a measurement takes any point of a domain."""


@dataclass(frozen=True)
class ClaimMeasurement:
    """How far a formula lies from an independent reference.

    Attributes:
        error: Distance, in the measure's own unit.
        tolerance: Largest error at which the claim holds.
        standard_error: Standard error of the reference if it is a Monte-Carlo estimate.
    """

    error: float
    tolerance: float
    standard_error: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return bool(self.error <= self.tolerance)


def measured(errors: Any, tolerance: Any) -> ClaimMeasurement:
    """Return the measurement of the largest of some errors."""
    return ClaimMeasurement(float(np.max(errors)), float(tolerance))


def largest_error(measurements: Iterable[ClaimMeasurement]) -> ClaimMeasurement:
    """Return the measurement with the largest error: every case must hold."""
    return max(measurements, key=lambda one: one.error)


def smallest_error(measurements: Iterable[ClaimMeasurement]) -> ClaimMeasurement:
    """Return the measurement with the smallest error: every case must fail."""
    return min(measurements, key=lambda one: one.error)


def difference(ours: Any, reference: Any) -> float:
    """Return the largest difference of two arrays."""
    return float(np.max(np.abs(ours - reference)))


def relative(ours: Any, reference: Any) -> float:
    """Return the largest difference of two arrays over the largest entry of the reference."""
    return difference(ours, reference) / float(np.max(np.abs(reference), initial=1e-300))


def monte_carlo(difference: Any, standard_error: Any) -> ClaimMeasurement:
    """Return the measurement of a Monte-Carlo estimate, which holds within four standard errors.

    Of several numbers the one with the largest difference in its own standard errors counts.
    """
    difference, standard_error = np.broadcast_arrays(
        np.abs(np.atleast_1d(difference)), np.atleast_1d(standard_error)
    )
    worst = int(np.argmax(difference / standard_error))
    se = float(standard_error.flat[worst])
    return ClaimMeasurement(float(difference.flat[worst]), 4 * se, se)


Measure = Callable[[Formula, Generator], ClaimMeasurement]
"""A function that compares a formula with a reference that does not use it."""
_Check = TypeVar("_Check", bound=Callable[..., ClaimMeasurement])


@dataclass(frozen=True)
class Claim:
    """One statement of the papers (or ours), checkable by machine.

    Attributes:
        id: Name that `joma verify --claim` takes.
        title: The statement in one line.
        source: Where it is printed; "new" when it is ours.
        method: How the reference was made, in a few words.
        derived: The formula as derived.
        measure: Compares a formula with the reference.
        printed: The formula as printed, where it differs; None where print is right or silent.
            `errata` lists the changes that print needs.
        condition: Condition under which the claim holds, or "".
        without: Measures the derived formula where the condition does not hold; it must fail.
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


_FUNCTIONS: dict[str, dict[str, Any]] = defaultdict(dict)
"""What the modules that have been imported register, by the claim's id."""


def claim(
    id: str, derived: Formula, *, printed: Formula | None = None, **options: Any
) -> Callable[[_Check], _Check]:
    """Register the function below as the check of a claim, whose texts are in `claims.toml`.

    Args:
        id: Name of the claim; a function may check several.
        derived: The formula as derived.
        printed: The formula as printed, where it differs.
        options: Keyword arguments that the function gets.
    """

    def register(measure: _Check) -> _Check:
        measure_of_claim = partial(measure, **options)
        _FUNCTIONS[id].update(derived=derived, printed=printed, measure=measure_of_claim)
        return measure

    return register


def without(id: str, **options: Any) -> Callable[[_Check], _Check]:
    """Register the function below as a measure where the condition of a claim does not hold."""

    def register(measure: _Check) -> _Check:
        _FUNCTIONS[id]["without"] = partial(measure, **options)
        return measure

    return register


def registered(id: str) -> Claim:
    """Return a claim of the modules that have been imported."""
    return Claim(id, **claim_texts()[id], **_FUNCTIONS[id])


@dataclass(frozen=True)
class ClaimVerdict:
    """The measurements of one claim.

    Attributes:
        claim: The claim.
        derived: Measurement of the formula as derived.
        printed: Measurement of the formula as printed; None for a claim of our own.
        without: Measurement where the condition does not hold; None without a condition.
        seconds: Time of the measurements.
        failure: The exception that ended them, or "".
    """

    claim: Claim
    derived: ClaimMeasurement
    printed: ClaimMeasurement | None
    without: ClaimMeasurement | None
    seconds: float
    failure: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as the record that `joma verify --json` prints."""
        record: dict[str, Any] = {
            "claim": self.claim.id,
            "title": self.claim.title,
            "source": self.claim.source,
            "printed": self.printed and _summary(self.printed),
            "derived": {**_summary(self.derived), "tolerance": _number(self.derived.tolerance)},
            "method": self.claim.method,
            "seconds": round(self.seconds, 4),
        }
        if self.derived.standard_error is not None:
            record["derived"]["standard_error"] = _number(self.derived.standard_error)
        if self.without is not None:
            record["condition"] = self.claim.condition
            record["without"] = _summary(self.without)
        found = errata.measured_by(self.claim.id)
        if found:
            record["errata"] = [erratum.id for erratum in found]
        if self.failure:
            record["failure"] = self.failure
        return record


def check(claim: Claim, seed: int = 0) -> ClaimVerdict:
    """Measure one claim, derived and printed against the same reference.

    Every claim draws from its own stream, so a verdict does not depend on the other claims checked.
    A claim whose formula or measurement raises does not hold.
    """

    def stream() -> Generator:
        return np.random.default_rng([seed, zlib.crc32(claim.id.encode())])

    start = time.perf_counter()
    printed = without = None
    failure = ""
    try:
        derived = claim.measure(claim.derived, stream())
        if claim.source != "new":
            printed = derived
            if claim.printed is not None:
                printed = claim.measure(claim.printed, stream())
        if claim.without is not None:
            without = claim.without(claim.derived, stream())
    except Exception as error:
        derived, failure = ClaimMeasurement(np.inf, 0.0), f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return ClaimVerdict(claim, derived, printed, without, seconds, failure)


def _summary(measurement: ClaimMeasurement) -> dict[str, Any]:
    return {"holds": measurement.holds, "error": _number(measurement.error)}


def _number(value: float) -> float | None:
    """Return the number, or None for NaN and infinity, which JSON does not have."""
    return float(value) if np.isfinite(value) else None

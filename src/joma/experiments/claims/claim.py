"""A claim: a formula as printed, the same as derived, and an independent measurement of both."""

import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from joma.errors import JomaError
from joma.experiments._claim_list import claim_texts
from joma.experiments.claims import errata
from joma.experiments.claims.measurement import ClaimMeasurement
from joma.experiments.claims.search import Generator, Parameter

Formula = Callable[..., Any]
"""The statement of a claim, as a function that its measurement calls."""


@dataclass(frozen=True)
class Point:
    """Values of all parameters.

    Attributes:
        values: Values of the parameters by name.
        seed: Seed of the samples that the measure draws.
        effort: Factor by which the measure draws more samples than usual.
    """

    values: Mapping[str, Any]
    seed: int = 0
    effort: int = 1

    def __getitem__(self, name: str) -> Any:
        """Return the value of a parameter."""
        return self.values[name]

    @property
    def generator(self) -> Generator:
        """A new generator; the same numbers for the same point."""
        return np.random.default_rng([self.seed, self.effort])


PointMeasure = Callable[[Formula, Point], ClaimMeasurement]
"""A function that compares a formula with a reference at one point."""


@dataclass(frozen=True)
class Search:
    """The whole domain of a claim.

    Attributes:
        parameters: The free parameters by name. Where lengths must agree, the measure repeats or
            cuts a vector (`numpy.resize`).
        measure: Compares a formula with a reference at one point. The error may be negative: how
            far from a violation the point is, by which the search is guided. A `JomaError` says
            that the point lies outside the domain; any other exception is a violation.
        sampled: Whether the reference is sampled. A violation counts once two further measurements
            with 100 times the samples confirm it.
    """

    parameters: Mapping[str, Parameter]
    measure: PointMeasure
    sampled: bool = False

    def __call__(self, formula: Formula, point: Point) -> ClaimMeasurement:
        """Measure a formula at one point."""
        return self.measure(formula, point)

    def at(self, formula: Formula, **values: Any) -> ClaimMeasurement:
        """Measure a formula at the point with these values."""
        return self.measure(formula, Point(values))

    def draw(self, generator: Generator) -> dict[str, Any]:
        """Return values of all parameters."""
        return {name: one.draw(generator) for name, one in self.parameters.items()}

    def change(
        self, values: Mapping[str, Any], generator: Generator, size: float
    ) -> dict[str, Any]:
        """Return values of which one to three parameters differ."""
        changed = dict(values)
        count = min(len(changed), 1 + int(generator.geometric(0.6)) // 2)
        for name in generator.choice(list(changed), count, replace=False):
            changed[name] = self.parameters[name].change(changed[name], generator, size)
        return changed


def over(*, sampled: bool = False, **parameters: Parameter) -> Callable[[PointMeasure], Search]:
    """Turn a measure at one point into a `Search` of the domain that the arguments name."""
    return lambda measure: Search(parameters, measure, sampled)


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
        search: The free parameters and a measure at one point, for the adversary.
        fixed: Reason why there are no free parameters to search, or "".
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
    search: Search | None = None
    fixed: str = ""

    def __post_init__(self) -> None:
        if self.source == "new" and self.printed is not None:
            raise JomaError(f"claim {self.id} is ours and cannot have a printed form")
        if bool(self.condition) != (self.without is not None):
            raise JomaError(f"claim {self.id} needs both its condition and a case without, or none")
        if self.search is not None and self.fixed:
            raise JomaError(f"claim {self.id} has free parameters, or none: not both")


_FUNCTIONS: dict[str, dict[str, Any]] = defaultdict(dict)
"""What the modules that have been imported register, by the claim's id."""


def claim(
    id: str,
    derived: Formula,
    search: Search | None = None,
    *,
    printed: Formula | None = None,
    **options: Any,
) -> Callable[[_Check], _Check]:
    """Register the function below as the check of a claim, whose texts are in `claims.toml`.

    Args:
        id: Name of the claim; a function may check several.
        derived: The formula as derived.
        search: The free parameters and a measure at one point, for the adversary.
        printed: The formula as printed, where it differs.
        options: Keyword arguments that the function gets.
    """

    def register(measure: _Check) -> _Check:
        given = {"derived": derived, "search": search, "printed": printed}
        _FUNCTIONS[id].update(given, measure=partial(measure, **options))
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
            "printed": self.printed and _outcome(self.printed),
            "derived": {**_outcome(self.derived), "tolerance": _number(self.derived.tolerance)},
            "method": self.claim.method,
            "seconds": round(self.seconds, 4),
        }
        if self.derived.standard_error is not None:
            record["derived"]["standard_error"] = _number(self.derived.standard_error)
        if self.without is not None:
            record["condition"] = self.claim.condition
            record["without"] = _outcome(self.without)
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
    start = time.perf_counter()
    printed = without = None
    try:
        derived = claim.measure(claim.derived, _stream(claim, seed))
        if claim.source != "new":
            printed = derived
            if claim.printed is not None:
                printed = claim.measure(claim.printed, _stream(claim, seed))
        if claim.without is not None:
            without = claim.without(claim.derived, _stream(claim, seed))
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        taken = time.perf_counter() - start
        return ClaimVerdict(claim, ClaimMeasurement(np.inf, 0.0), printed, without, taken, failure)
    return ClaimVerdict(claim, derived, printed, without, time.perf_counter() - start)


def _stream(claim: Claim, seed: int) -> Generator:
    return np.random.default_rng([seed, zlib.crc32(claim.id.encode())])


def _outcome(measurement: ClaimMeasurement) -> dict[str, Any]:
    return {"holds": measurement.holds, "error": _number(measurement.error)}


def _number(value: float) -> float | None:
    """Return the number, or None for NaN and infinity, which JSON does not have."""
    return float(value) if np.isfinite(value) else None

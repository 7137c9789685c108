"""A claim: a formula as printed, the same as derived, and an independent measurement of both."""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims import errata
from joma.experiments.claims.measurement import Formula, Measurement
from joma.experiments.claims.search import Search

Measure = Callable[[Formula, np.random.Generator], Measurement]
"""Compares a formula with a reference that does not use it."""


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
        search: the free parameters and a measure at one point, for the adversary.
        fixed: why there is nothing to search, where there are no free parameters.
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


@dataclass(frozen=True)
class Verdict:
    """What was measured of one claim.

    Attributes:
        claim: the claim.
        derived: of the formula as derived.
        printed: of the formula as printed; None for a claim of our own.
        without: of the formula where the condition does not hold; None without a condition.
        seconds: what the measurements took.
        failure: the exception that ended them, or "".
    """

    claim: Claim
    derived: Measurement
    printed: Measurement | None
    without: Measurement | None
    seconds: float
    failure: str = ""

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
        if self.failure:
            record["failure"] = self.failure
        return record


def check(claim: Claim, seed: int = 0) -> Verdict:
    """Measures one claim, derived and printed against the same reference.

    Every claim draws from its own stream, so a verdict does not depend on what else was checked.
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
        return Verdict(claim, Measurement(np.inf, 0.0), printed, without, taken, failure)
    return Verdict(claim, derived, printed, without, time.perf_counter() - start)


def _stream(claim: Claim, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(claim.id.encode())])


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return float(value) if np.isfinite(value) else None

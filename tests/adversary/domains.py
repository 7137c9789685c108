"""Domains of the free parameters of claims, and the search through them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, reject, settings, target
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from joma.errors import JomaError
from joma.experiments.claims import ClaimMeasurement
from joma.experiments.claims.claim import Formula, Point

Domain = st.SearchStrategy[Any]
Measure = Callable[[Formula, Point], ClaimMeasurement]


@dataclass(frozen=True)
class Search:
    """The domain of a claim, and a measure of a formula at one of its points.

    A `JomaError` of the measure says that a point lies outside the domain; any other exception is a
    violation.
    """

    domain: Mapping[str, Domain]
    measure: Measure

    def attack(self, formula: Formula, examples: int) -> None:
        """Raise AssertionError with the point where the error exceeds the tolerance, if found."""

        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            print_blob=False,
            suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
            phases=(Phase.generate, Phase.target),
        )
        @given(st.fixed_dictionaries(dict(self.domain)))
        def holds(values: dict[str, Any]) -> None:
            try:
                with np.errstate(all="ignore"):
                    found = self.measure(formula, values)
            except JomaError:
                reject()
            scale = found.tolerance or 1e-300
            if np.isfinite(found.error / scale):
                target(math.copysign(math.log1p(abs(found.error / scale)), found.error))
            assert found.error <= found.tolerance, values

        holds()


SEARCHES: dict[str, Search] = {}
"""Every search by the id of its claim."""


def over(*claims: str, **domain: Domain) -> Callable[[Measure], Measure]:
    """Register the measure below as the search of claims over a domain."""

    def register(measure: Measure) -> Measure:
        for claim in claims:
            assert claim not in SEARCHES
            SEARCHES[claim] = Search(domain, measure)
        return measure

    return register


def real(low: float, high: float, *, log: bool = False, special: tuple[float, ...] = ()) -> Domain:
    """A number from a range; its ends, special values and their neighbours more often."""
    within = st.floats(math.log(low), math.log(high)) if log else st.floats(low, high)

    def clipped(value: float) -> float:
        value = min(max(math.exp(value) if log else value, low), high)
        return value if log or abs(value) > 1e-15 * (high - low) else 0.0

    distances = st.sampled_from((0.0, 1e-12, 1e-6, -1e-9))
    ends = st.sampled_from((low, high, *special))
    near = st.builds(lambda end, off: min(max(end + off, low), high), ends, distances)
    return st.one_of(within.map(clipped), within.map(clipped), near)


def integer(low: int, high: int) -> Domain:
    """A whole number, both ends included."""
    return st.integers(low, high)


def choice(*options: Any) -> Domain:
    """One of a few options."""
    return st.sampled_from(options)


def seed() -> Domain:
    """The seed of what a measure draws."""
    return st.integers(0, 2**32 - 1)


def vector(entries: Domain, sizes: Domain) -> Domain:
    """Numbers: any, or copies of one with ties and near ties."""
    shares = st.sampled_from((1.0, 1.0, 1 - 1e-9, 0.999))
    numbers = sizes.flatmap(lambda size: st.lists(entries, min_size=size, max_size=size))
    scaled = sizes.flatmap(lambda size: st.lists(shares, min_size=size, max_size=size))
    ties = st.tuples(entries, scaled).map(lambda pair: pair[0] * np.array(pair[1]))
    return st.one_of(numbers.map(lambda values: np.array(values, dtype=float)), ties)


def matrix(entries: Domain, rows: Domain, columns: Domain) -> Domain:
    """A matrix, often with equal entries."""
    shapes = st.tuples(rows, columns)
    return shapes.flatmap(lambda shape: arrays(np.float64, shape, elements=entries))


def simplex(sizes: Domain, *, zeros: bool = False, least: float = 1e-6) -> Domain:
    """Probabilities that sum to 1."""
    entries = real(least, 1.0, log=True)
    if zeros:
        entries = st.one_of(entries, st.just(0.0))
    weights = sizes.flatmap(lambda size: st.lists(entries, min_size=size, max_size=size))
    return weights.filter(any).map(lambda values: np.array(values) / sum(values))

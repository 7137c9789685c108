"""Tolerances at single points: the formula passes them, and formulas far off do not."""

from collections.abc import Callable

import numpy as np
import pytest

from joma.errors import JomaError
from joma.experiments.claims.claim import Point, Search
from joma.experiments.claims.galore.stall import noise_stall_at
from joma.experiments.claims.galore.varying import varying_at
from joma.experiments.claims.measurement import ClaimMeasurement
from joma.experiments.claims.scan_snap.sequences import sampled_at
from joma.theory import galore
from joma.theory.scan_snap import Balanced


def drawn(search: Search, count: int) -> list[Point]:
    rng = np.random.default_rng(0)
    return [
        Point({name: one.draw(rng) for name, one in search.parameters.items()}, seed)
        for seed in range(count)
    ]


def times(factor: float, formula: Callable) -> Callable:
    return lambda *at, **of: factor * formula(*at, **of)


def holds(measured: ClaimMeasurement) -> bool:
    return measured.error <= measured.tolerance


def test_the_stall_under_noise():
    for point in drawn(noise_stall_at, 15):
        assert holds(noise_stall_at(galore.noise_stall, point))
        side = min(point["rows"], point["columns"])
        for factor in (0.0, 0.5, 1.2):
            measured = noise_stall_at(times(factor, galore.noise_stall), point)
            assert holds(measured) == (point["rank"] >= side)  # the level is 0 at full rank


@pytest.mark.parametrize("factor", [0.0, 0.8, 1.0])
def test_b_on_sampled_sequences(factor: float):
    for point in drawn(sampled_at, 15):
        measured = sampled_at(times(factor, Balanced.b_at), point)
        assert holds(measured) == (factor == 1)


def test_runs_with_varying_coefficients_end_or_are_refused_by_name():
    refused = []
    for point in drawn(varying_at, 60):
        try:
            assert holds(varying_at(galore.varying_rate, point))
        except JomaError as error:
            refused.append(str(error))
    assert len(refused) < 40
    assert all(
        why.startswith(("the run diverges", "positive semidefinite", "the step is too long"))
        for why in refused
    )

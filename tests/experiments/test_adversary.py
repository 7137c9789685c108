"""The adversary finds what is wrong on a small part of a domain, and nothing where all is right."""

import dataclasses
import math

import numpy as np
import pytest

from joma.errors import JomaError
from joma.experiments.claims import Claim, ClaimMeasurement, adversary
from joma.experiments.claims.adversary import ENOUGH, attack, ratio_of
from joma.experiments.claims.claim import Point, Search
from joma.experiments.claims.search import (
    Choice,
    Integer,
    Matrix,
    Parameter,
    Real,
    Seed,
    Simplex,
    Vector,
)


def claim_of(search: Search, derived=lambda: None) -> Claim:
    return Claim(
        "planted",
        title="A planted claim",
        source="new",
        method="none",
        derived=derived,
        measure=lambda formula, generator: ClaimMeasurement(0.0, 1.0),
        search=search,
    )


def against(reference, tolerance: float = 1e-9):
    """Returns a measure that compares a formula of all values with a reference."""

    def measure(formula, point: Point) -> ClaimMeasurement:
        values = dict(point.values)
        return ClaimMeasurement(abs(formula(**values) - reference(**values)), tolerance)

    return measure


KINDS: dict[str, Parameter] = {
    "real": Real(-2.0, 5.0, special=(0.0, 1.0)),
    "log": Real(1e-6, 1e9, log=True),
    "integer": Integer(2, 40, log=True),
    "choice": Choice("a", "b"),
    "seed": Seed(),
    "vector": Vector(Real(-3, 3), Integer(0, 7)),
    "matrix": Matrix(Real(-3, 3), Integer(1, 4), Integer(1, 5)),
    "simplex": Simplex(Integer(1, 6)),
    "zeros": Simplex(Integer(1, 6), zeros=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_stay_in_their_range(kind: str) -> None:
    parameter, generator = KINDS[kind], np.random.default_rng(0)
    value = parameter.draw(generator)
    for turn in range(3000):
        drawn = turn % 3 == 0
        value = parameter.draw(generator) if drawn else parameter.change(value, generator, 0.1)
        match kind:
            case "real":
                assert -2 <= value <= 5
            case "log":
                assert 1e-6 <= value <= 1e9
            case "integer":
                assert 2 <= value <= 40
                assert isinstance(value, int)
            case "choice":
                assert value in ("a", "b")
            case "seed":
                assert 0 <= value < 2**32
            case "vector":
                assert value.shape[0] <= 7
                assert np.all(np.abs(value) <= 3)
            case "matrix":
                assert 1 <= value.shape[0] <= 4
                assert 1 <= value.shape[1] <= 5
                assert np.all(np.abs(value) <= 3)
            case _:
                assert 1 <= len(value) <= 6
                assert value.sum() == pytest.approx(1)
                assert np.all(value >= (0 if kind == "zeros" else 0.9e-6))


def test_ties_zeros_and_ends_are_drawn() -> None:
    generator = np.random.default_rng(0)
    drawn = [KINDS["vector"].draw(generator) for _ in range(500)]
    assert sum(len(it) > len(set(it)) for it in drawn) > 50
    assert sum(np.any(it == 0) for it in drawn) > 25
    assert sum(np.any(np.abs(it) == 3) for it in drawn) > 20


def test_a_right_claim_stands(monkeypatch) -> None:
    monkeypatch.setattr(adversary, "LONGEST", 1000.0)  # 1,000 evaluations also on a busy machine
    search = Search({"x": Real(-9, 9), "n": Integer(1, 9)}, against(lambda x, n: n * math.sin(x)))
    result = attack(claim_of(search, lambda x, n: math.sin(x) * n), 0.2)
    assert not result.violated
    assert result.enough
    assert result.evaluations >= ENOUGH


WRONG = {
    "at long times": (
        {"t": Real(1e-6, 1e14, log=True)},
        lambda t: math.log1p(t),
        lambda t: math.log1p(t) + (1e-6 if t > 3e13 else 0),
    ),
    "at a tie": (
        {"v": Vector(Real(0, 1), Integer(2, 6))},
        lambda v: float(np.argmax(v)),
        lambda v: float(len(v) - 1 - np.argmax(v[::-1])),
    ),
    "at a zero": (
        {"v": Vector(Real(-1, 1), Integer(1, 5))},
        lambda v: float(np.count_nonzero(v)),
        lambda v: float(len(v)),
    ),
    "in a corner of four": (
        {name: Real(0, 1) for name in "abcd"},
        lambda a, b, c, d: a + b + c + d,
        lambda a, b, c, d: a + b + c + d + 1e-5 * max(0.0, a * b * c * d - 0.6),
    ),
    "for two equal rows": (
        {"m": Matrix(Real(-2, 2), Integer(2, 4), Integer(2, 4))},
        lambda m: float(len(np.unique(m, axis=0))),
        lambda m: float(len(m)),
    ),
}


@pytest.mark.parametrize("where", WRONG)
def test_a_claim_that_is_wrong_somewhere_falls(where: str) -> None:
    parameters, right, wrong = WRONG[where]
    claim = claim_of(Search(parameters, against(right)), wrong)
    result = attack(claim, 20.0)
    assert result.violated
    assert (
        ratio_of(ClaimMeasurement(abs(wrong(**result.values) - right(**result.values)), 1e-9)) > 1
    )
    assert not attack(claim, 0.1, formula=right).violated


def test_a_search_is_guided_by_how_far_a_violation_is() -> None:
    def measure(formula, point: Point) -> ClaimMeasurement:
        distance = np.linalg.norm(np.array([point[it] for it in "abc"]) - [0.3, 0.7, 0.55])
        return ClaimMeasurement(1e-4 - float(distance), 1e-12)  # one part in 10¹¹ of the cube

    search = Search({name: Real(0, 1) for name in "abc"}, measure)
    assert attack(claim_of(search), 30.0).violated


def test_what_the_function_refuses_is_outside() -> None:
    def formula(x: float) -> float:
        if x > 0.5:
            raise JomaError("x must be at most 0.5")
        return x

    search = Search({"x": Real(0, 1)}, against(lambda x: x))
    result = attack(claim_of(search, formula), 0.1)
    assert not result.violated
    assert result.refused > 100


def test_exceptions_and_nan_are_violations() -> None:
    search = Search({"x": Real(0, 1)}, against(lambda x: x))
    broken = attack(claim_of(search, lambda x: 1 / int(x < 0.99) * x), 1.0)
    assert broken.violated
    assert broken.failure.startswith("ZeroDivisionError")
    assert attack(claim_of(search, lambda x: math.nan), 1.0).violated


def test_sampled_violations_are_confirmed_with_more_samples() -> None:
    def measure(formula, point: Point) -> ClaimMeasurement:
        sample = point.generator.normal(point["mean"], size=25 * point.effort)
        se = sample.std(ddof=1) / math.sqrt(len(sample))
        return ClaimMeasurement(abs(sample.mean() - formula(point["mean"])), 3 * se)

    search = Search({"mean": Real(-1, 1)}, measure, sampled=True)
    assert not attack(claim_of(search, lambda mean: mean), 0.5).violated  # one in 370 by chance
    wrong = claim_of(search, lambda mean: mean + (0.5 if mean > 0.95 else 0))
    assert attack(wrong, 20.0).violated
    alone = dataclasses.replace(search, sampled=False)
    assert attack(claim_of(alone, lambda mean: mean), 20.0).violated


def test_the_same_seed_finds_the_same() -> None:
    parameters, right, wrong = WRONG["in a corner of four"]
    claim = claim_of(Search(parameters, against(right)), wrong)
    first, second = (attack(claim, 20.0, seed=3).as_json() for _ in range(2))
    assert first["parameters"] == second["parameters"]
    assert first["evaluations"] == second["evaluations"]


def test_a_claim_without_parameters_cannot_be_attacked() -> None:
    claim = dataclasses.replace(claim_of(Search({}, against(abs))), search=None)
    with pytest.raises(JomaError, match="no free parameters"):
        attack(claim, 1.0)


def test_a_claim_that_raises_is_one_that_does_not_hold() -> None:
    from joma.experiments.claims import check

    def fail(formula, generator):
        raise IndexError("no critical point")

    claim = dataclasses.replace(claim_of(Search({}, against(abs))), measure=fail)
    verdict = check(claim)
    assert not verdict.derived.holds
    assert verdict.as_json()["failure"] == "IndexError: no critical point"

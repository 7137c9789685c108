"""Budgets by layer: they add up, keep to their limits, and are the best where that can be known."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma.errors import JomaError
from joma.inference import HeavyHitter
from joma.inference.allocation import RULES, allocate, budget_for_bytes, layer_budgets
from joma.inference.quality import LayerProfile


def profile(layer: int, decay: float, keys: int = 64) -> LayerProfile:
    """Return a layer in which the n-th key receives decay**n of the mass."""
    mass = decay ** np.arange(keys)
    held = np.cumsum(mass) / mass.sum()
    return LayerProfile(layer, np.log(1 / (1 - decay)), 1 / (1 - decay), mass[0], held)


LAYERS = [profile(0, 0.5), profile(1, 0.9), profile(2, 0.97)]


@given(
    keys=st.integers(10, 300),
    rule=st.sampled_from(RULES),
    floor=st.floats(0, 1),
    decays=st.lists(st.floats(0.1, 0.99), min_size=1, max_size=5),
)
def test_budgets_add_up_and_keep_to_their_limits(keys, rule, floor, decays):
    layers = [profile(index, decay) for index, decay in enumerate(decays)]
    limits = [None if index % 2 else 12 for index in range(len(layers))]
    found = layer_budgets(keys, layers, rule=rule, floor=floor, limits=limits)
    most = [64 if limit is None else limit for limit in limits]
    assert sum(found) == min(keys, sum(most))
    even = keys // len(layers)
    for budget, limit in zip(found, most, strict=True):
        assert min(2, limit) <= budget <= limit
        assert budget >= min(int(floor * even), limit)


def test_even_budgets_are_even_and_need_no_measurement():
    assert layer_budgets(30, LAYERS, rule="even") == [10, 10, 10]
    assert layer_budgets(32, LAYERS, rule="even") == [11, 11, 10]
    found = allocate(30, LAYERS, rule="even")
    assert found == [HeavyHitter(heavy=5, recent=5)] * 3


def test_mass_is_the_best_of_all_budgets():
    found = layer_budgets(20, LAYERS, rule="mass", floor=0.0)

    def mass(budgets) -> float:
        return sum(float(it.held[one - 1]) for it, one in zip(LAYERS, budgets, strict=True))

    every = [one for one in product(range(2, 19), repeat=3) if sum(one) == 20]
    assert mass(found) == pytest.approx(max(map(mass, every)))


def test_a_longer_text_is_spent_in_the_same_shares():
    short = layer_budgets(48, LAYERS, rule="mass", floor=0.0)
    long = layer_budgets(480, LAYERS, rule="mass", floor=0.0, context=640)
    np.testing.assert_allclose(long, 10 * np.array(short), atol=12)
    assert max(layer_budgets(480, LAYERS, rule="entropy", floor=0.0)) == 64  # the probed windows


def test_entropy_gives_more_to_layers_that_attend_to_more_keys():
    found = layer_budgets(60, LAYERS, rule="entropy", floor=0.0)
    effective = np.array([layer.effective for layer in LAYERS])
    np.testing.assert_allclose(found, 60 * effective / effective.sum(), atol=1)


def test_recent_keys_are_a_share_of_each_layer():
    for policy in allocate(60, LAYERS, rule="mass", recent=0.25):
        assert isinstance(policy, HeavyHitter)
        assert policy.recent == round(0.25 * policy.budget)
    for recent, name in ((0, "recent"), (1, "heavy")):
        found = allocate(60, LAYERS, recent=recent)
        assert {getattr(one, name) for one in found} == {recent}


def test_bytes_become_the_most_keys_that_fit():
    def size(policies) -> int:
        return sum(10 * one.budget for one in policies)

    found = budget_for_bytes(999, lambda keys: allocate(keys, LAYERS), size, 6, 192)
    assert size(allocate(found, LAYERS)) <= 999 < size(allocate(found + 1, LAYERS))
    assert budget_for_bytes(10**9, lambda keys: allocate(keys, LAYERS), size, 6, 192) == 192
    with pytest.raises(
        JomaError, match="budget must be at least 60 bytes, which 6 keys take, got 59"
    ):
        budget_for_bytes(59, lambda keys: allocate(keys, LAYERS), size, 6, 192)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"keys": 5}, "keys must be a whole number from 6 on, got 5"),
        ({"rule": "best"}, "rule must be one of even, mass, entropy"),
        ({"floor": 1.5}, "floor must be from 0 to 1, got 1.5"),
        ({"recent": -1}, "recent must be a number from 0 on"),
        ({"limits": [3]}, "limits must be one for each of 3 layers, got 1"),
        ({"profiles": []}, "profiles must hold one for each layer, got none"),
    ],
)
def test_impossible_budgets_are_refused(changed, message):
    asked = {"keys": 30, "profiles": LAYERS, **changed}
    with pytest.raises(JomaError, match=message):
        allocate(asked.pop("keys"), asked.pop("profiles"), **asked)

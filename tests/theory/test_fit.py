"""`nonlinear.fit` on planted curves: what it recovers, what it refuses, and bad input.

`benchmarks/fit_coverage.py` is the full study of coverage.
"""

import numpy as np
import pytest
from benchmarks.fit_coverage import judge

from joma.errors import JomaError
from joma.theory import nonlinear
from joma.theory.nonlinear import _flow_table
from tests.theory._bad import rejects

TARGETS = np.array([3.0, 1.0, -2.0])
TIMES = np.arange(1, 101) * 10.0
SCALE = 250.0
V = nonlinear.weights(TARGETS, TIMES / SCALE)
ENTROPY = nonlinear.attention_entropy(V)


def noisy(values: np.ndarray, size: float, seed: int = 0) -> np.ndarray:
    return values + size * np.random.default_rng(seed).normal(size=values.shape)


class TestTable:
    @pytest.mark.parametrize("mu", [1e-6, 0.5, 1.9, 3.3, 4.999, 6.0])
    def test_it_is_eqn_6(self, mu: float):
        t = np.concatenate([[0.0], np.geomspace(1e-4, 60, 500)])
        exact = nonlinear.weights(mu, t) / mu
        table = _flow_table.share_reached(np.array([mu]), t)
        np.testing.assert_allclose(table, exact, atol=2e-5)

    def test_the_sudden_growth_is_where_it_belongs(self):
        mu, share = 5.0, np.linspace(0.05, 0.99, 40)
        table = _flow_table.share_reached(np.array([mu]), nonlinear.elapsed(share, mu))
        np.testing.assert_allclose(table, share, atol=2e-5)


class TestWeights:
    def test_what_was_planted_is_recovered(self):
        found = nonlinear.fit(TIMES[:25], v=noisy(V[:25], 0.01))
        np.testing.assert_allclose(found.mu.median, TARGETS, atol=0.03)
        assert found.time_scale.median == pytest.approx(SCALE, rel=0.02)
        assert found.noise.covers(0.01)
        assert found.components.median == 3
        assert found.not_identified == {}
        np.testing.assert_allclose(found.predict(TIMES[25:]).median, V[25:], atol=0.03)

    def test_components_are_distinguished_and_ordered(self):
        found = nonlinear.fit(TIMES[:25], v=noisy(V[:25], 0.01))
        assert found.order == (0, 2, 1)
        assert found.order_probability > 0.99

    def test_drop_minimum_and_rebound_come_before_they_happen(self):
        seen = 12  # up to t = 120; the minimum is at 171
        found = nonlinear.fit(TIMES[:seen], v=noisy(V[:seen], 0.005))
        course = found.course(1000.0)
        exact = nonlinear.attention_entropy(
            nonlinear.weights(TARGETS, np.linspace(0, 1000, 200) / SCALE)
        )
        drop, rebound = nonlinear.drop_and_rebound(exact)
        assert course.minimum.covers(exact.min())
        assert course.drop.covers(drop)
        assert course.rebound.covers(rebound)
        assert course.lowest_at.low > TIMES[seen - 1]

    def test_early_noisy_weights_do_not_determine_the_rest(self):
        found = nonlinear.fit(TIMES[:6], v=noisy(V[:6], 0.3))
        assert {"mu[0]", "mu[1]", "mu[2]", "order"} <= set(found.not_identified)
        assert np.all(np.isnan(found.mu.low))
        with pytest.raises(JomaError, match="cannot be predicted from the measured part"):
            found.predict(TIMES[6:])

    def test_the_unit_of_time_is_that_of_t(self):
        one = nonlinear.fit(TIMES[:20], v=noisy(V[:20], 0.01))
        other = nonlinear.fit(TIMES[:20] / 1000, v=noisy(V[:20], 0.01))
        np.testing.assert_allclose(other.mu.median, one.mu.median, rtol=1e-6)
        assert other.time_scale.median == pytest.approx(one.time_scale.median / 1000, rel=1e-6)

    def test_a_seed_gives_the_same_numbers(self):
        first, again, other = (
            nonlinear.fit(TIMES[:15], v=noisy(V[:15], 0.05), rng=seed).mu.low for seed in (1, 1, 2)
        )
        np.testing.assert_array_equal(first, again)
        assert np.any(first != other)

    def test_known_noise_is_taken(self):
        found = nonlinear.fit(TIMES[:25], v=noisy(V[:25], 0.01), noise=0.01)
        assert found.noise.median == pytest.approx(0.01)

    def test_entropy_is_predicted_from_weights(self):
        found = nonlinear.fit(TIMES[:25], v=noisy(V[:25], 0.01))
        prediction = found.predict_entropy(TIMES[25:])
        np.testing.assert_allclose(prediction.median, ENTROPY[25:], atol=0.02)
        assert found.predict_entropy(500.0).median.shape == ()


@pytest.fixture(scope="module")
def from_entropy() -> nonlinear.Eqn6Fit:
    return nonlinear.fit(TIMES[:50], entropy=noisy(ENTROPY[:50], 0.002), components=(2, 4))


class TestEntropy:
    def test_what_was_planted_is_recovered(self, from_entropy: nonlinear.Eqn6Fit):
        found = from_entropy
        assert found.components.median == 3
        assert found.mu.median[0] == pytest.approx(3.0, abs=0.1)
        assert found.mu.median[1] == pytest.approx(2.0, abs=0.15)
        assert found.time_scale.median == pytest.approx(SCALE, rel=0.05)
        np.testing.assert_allclose(found.predict(TIMES[50:]).median, ENTROPY[50:], atol=0.01)

    def test_the_order_is_never_identified(self, from_entropy: nonlinear.Eqn6Fit):
        assert from_entropy.order is None
        assert "every order" in from_entropy.not_identified["order"]

    def test_an_entropy_that_has_not_begun_to_fall_says_how_many_but_not_what(self):
        t = np.arange(1, 31) * 0.003
        found = nonlinear.fit(t, entropy=noisy(np.full(30, np.log(4)), 0.02))
        assert found.components.median == 4
        assert "mu[0]" in found.not_identified
        with pytest.raises(JomaError, match="cannot be predicted"):
            found.predict(100 * t)

    def test_multiplicity_counts_equal_components(self):
        curve = (ENTROPY + np.log(7.0))[::2]
        found = nonlinear.fit(
            TIMES[:50:2],
            entropy=noisy(curve[:25], 0.01),
            components=(2, 3),
            multiplicity=True,
        )
        assert found.components.covers(21.0)

    def test_a_curve_that_is_not_of_eqn_6_is_noticed(self, from_entropy: nonlinear.Eqn6Fit):
        wave = 1.0 + 0.2 * np.sin(TIMES[:30] / 20)
        found = nonlinear.fit(TIMES[:30], entropy=noisy(wave, 0.002), components=(2, 3))
        assert found.misfit is not None
        assert "correlation" in found.misfit
        assert from_entropy.misfit is None

    def test_too_few_measurements_are_refused(self):
        with pytest.raises(JomaError, match="entropy must hold at least 20 measurements, got 10"):
            nonlinear.fit(TIMES[:10], entropy=ENTROPY[:10])


def test_intervals_cover():
    rows = [judge("v", 0.01, 0.25, "prior", curve) for curve in range(12)]
    total = {name: sum(int(str(row[name])) for row in rows) for name in ("mu_given", "mu_covered")}
    assert total["mu_given"] >= 30
    assert total["mu_covered"] >= 0.75 * total["mu_given"]


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("t", {"t": TIMES[:3], "v": V[:3]}),
        ("t", {"t": -TIMES}),
        ("t", {"t": TIMES[::-1]}),
        ("t", {"t": np.ones(100)}),
        ("t", {"t": 5.0}),
        ("t", {"t": "steps"}),
        ("t", {"t": np.full(100, np.nan)}),
        ("v", {"v": V[:50]}),
        ("v", {"v": V[:, 0]}),
        ("v", {"v": V[:, :0]}),
        ("v", {"v": np.zeros_like(V)}),
        ("v", {"v": V * np.inf}),
        ("v", {"v": None}),
        ("v", {"entropy": ENTROPY}),
        ("entropy", {"v": None, "entropy": V}),
        ("entropy", {"v": None, "entropy": ENTROPY[:50]}),
        ("entropy", {"v": None, "entropy": -ENTROPY}),
        ("components", {"v": None, "entropy": ENTROPY, "components": (5, 2)}),
        ("components", {"v": None, "entropy": ENTROPY, "components": (0, 2)}),
        ("components", {"v": None, "entropy": ENTROPY, "components": (2.5, 4)}),
        ("components", {"v": None, "entropy": ENTROPY, "components": 3}),
        ("multiplicity", {"multiplicity": True}),
        ("scale", {"scale": 0.0}),
        ("largest", {"largest": 7.0}),
        ("largest", {"largest": -1.0}),
        ("spans", {"spans": (2.0, 1.0)}),
        ("spans", {"spans": (0.0, 1.0)}),
        ("spans", {"spans": 3.0}),
        ("noise", {"noise": 0.0}),
        ("level", {"level": 1.0}),
        ("level", {"level": "most"}),
        ("rng", {"rng": -1}),
    ],
)
def test_bad_input_is_named(argument, change):
    rejects(argument, lambda: nonlinear.fit(**({"t": TIMES, "v": V} | change)))


def test_bad_times_of_a_prediction_are_named():
    found = nonlinear.fit(TIMES[:25], v=noisy(V[:25], 0.01))
    rejects("t", lambda: found.predict(-1.0))
    rejects("t", lambda: found.predict_entropy([[1.0]]))
    rejects("until", lambda: found.course(0.0))
    rejects("value", lambda: found.mu.covers(np.nan))


def test_components_beyond_the_prior_are_refused() -> None:
    t = np.linspace(15, 300, 20)
    v = nonlinear.weights([5.8, 1.0], t / 100)
    v = v + 0.01 * np.random.default_rng(0).normal(size=v.shape)
    with pytest.raises(JomaError, match="component 0 of v has reached"):
        nonlinear.fit(t, v=v)

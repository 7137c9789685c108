"""Whatever is out of range, whichever argument it is given for: a ValueError that names it."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import (
    block,
    clusters,
    embeddings,
    hblt,
    linear,
    marginals,
    nonlinear,
    spectra,
)
from tests.theory._bad import rejects

GAUSSIAN = marginals.Gaussian()
CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (linear.weights, {"delta": [1.0, 0.5], "t": 0.5, "initial": 0.1, "log_offset": 0.2}),
    (linear.blowup_time, {"delta": [1.0, 0.5], "initial": 0.1, "normalizer": 2.0}),
    (linear.winner, {"delta": [1.0, 0.5], "initial": [0.1, 0.2]}),
    (linear.limit, {"delta": [1.0, 0.5], "log_offset": [0.1, 0.2]}),
    (linear.conserved_ratio, {"delta": [1.0, 0.5], "v": [0.1, 0.2]}),
    (linear.weights_multi, {"delta": [[1.0, 0.5]], "t": [0.5], "normalizer": 2.0}),
    (linear.linear_attention, {"delta": [1.0], "t": 0.5, "logits": 0.5, "tau": 0.5}),
    (linear.unit_rates, {"delta": [1.0], "eta_w": 0.5, "eta_z": 0.5}),
    (nonlinear.weights, {"mu": [1.0, 2.0], "t": 0.5}),
    (nonlinear.log_residual, {"mu": [1.0, 2.0], "t": [0.5, 1.0]}),
    (nonlinear.weights_multi, {"mu": [[1.0, 2.0]], "t": 0.5}),
    (nonlinear.elapsed, {"r": 0.5, "mu": 1.0}),
    (nonlinear.offset, {"r": 0.5, "mu": 1.0}),
    (nonlinear.rate_ratio, {"mu_j": 2.0, "mu_k": 1.0, "t": 1.0}),
    (nonlinear.linear_attention_residual, {"mu": [1.0], "t": 0.5, "initial": 0.1}),
    (nonlinear.attention_entropy, {"v": [1.0, 2.0], "scale": 0.5}),
    (clusters.expectations, {"marginal": GAUSSIAN, "v": [1.0], "mean": [0.5], "bias": 0.1}),
    (clusters.critical_points, {"marginal": GAUSSIAN, "distance": 1.0}),
    (hblt.cooccurrence, {"height": 1, "depth": 3, "rho": 0.9, "rho0": 0.5}),
    (hblt.root_uncertainty, {"class_probs": [0.5, 0.5], "child_off_probs": [0.1, 0.9]}),
    (embeddings.superposed, {"patterns": [[1.0]], "queries": [[1.0]], "biases": [0.1]}),
    (spectra.stable_rank, {"matrix": [[1.0, 2.0]]}),
    (block.Block, {"eta_w": 1.0, "eta_z": 1.0, "tau": 1.0}),
    (block.Samples, {"x": [[0.5, 0.5]], "gradient": [1.0]}),
]
PLACES = [
    pytest.param(call, arguments, name, id=f"{call.__name__}-{name}")
    for call, arguments in CALLS
    for name in arguments
    if name != "marginal"
]


def broken(value: Any, bad: Any) -> Any:
    """The value with its first number replaced, whatever its shape."""
    if isinstance(value, list):
        return [broken(value[0], bad), *value[1:]]
    return bad


def test_the_calls_are_good_before_they_are_broken():
    for call, arguments in CALLS:
        assert set(arguments) <= set(inspect.signature(call).parameters)
        call(**arguments)


@pytest.mark.parametrize(("call", "arguments", "name"), PLACES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, "one", None, 1j])
def test_what_is_no_number_is_refused(call, arguments, name, bad):
    rejects(name, lambda: call(**{**arguments, name: broken(arguments[name], bad)}))


@pytest.mark.parametrize(
    ("call", "arguments"),
    [(c, a) for c, a in CALLS if "t" in a],
    ids=lambda x: getattr(x, "__name__", ""),
)
@given(t=st.floats(max_value=-1e-300, allow_infinity=False))
@settings(max_examples=10, deadline=None)
def test_negative_times_are_refused(call, arguments, t):
    rejects("t", lambda: call(**{**arguments, "t": t}))


outside = st.floats(allow_nan=False, allow_infinity=False)


@given(outside.filter(lambda x: not 0 <= x <= 1))
@settings(max_examples=25, deadline=None)
def test_probabilities_outside_their_range_are_refused(p):
    rejects("child_off_probs", lambda: hblt.root_uncertainty([0.5, 0.5], [p, 0.5]))
    rejects("class_probs", lambda: hblt.root_uncertainty([p, 1 - p], [0.5, 0.5]))
    rejects(
        "probability",
        lambda: block.Samples([[1.0]] * 2, gradient=[1.0] * 2, probability=[p, 1 - p]),
    )


@given(outside.filter(lambda x: not -1 <= x <= 1))
@settings(max_examples=25, deadline=None)
def test_uncertainties_outside_their_range_are_refused(rho):
    rejects("rho", lambda: hblt.cooccurrence(1, 3, rho, 0.5))
    rejects("rho0", lambda: hblt.cooccurrence(1, 3, 0.5, rho))
    rejects("rho", lambda: hblt.transition(rho))


@given(st.floats(0.1, 5), st.floats(1, 100))
@settings(max_examples=25, deadline=None)
def test_times_from_the_blowup_on_are_refused(delta, late):
    end = float(linear.blowup_time(delta))
    rejects("t", lambda: linear.weights(delta, late * end))
    rejects("t", lambda: linear.weights_multi([[delta, 0.0]], late * end))


@pytest.mark.parametrize("log_offset", [0.0, 300.0, 741.5734729993666])
@pytest.mark.parametrize("delta", [20.1369986, [20.1369986, 1.0, 0.0]])
def test_the_blowup_time_itself_is_refused_where_it_has_few_digits(delta, log_offset):
    end = float(np.min(linear.blowup_time(delta, log_offset=log_offset)))
    rejects("t", lambda: linear.weights(delta, end, log_offset=log_offset))
    found = linear.weights(delta, end, log_offset=log_offset, beyond="inf")
    assert np.isinf(np.ravel(found)[0])


@given(st.integers(0, 50), st.integers(1, 50))
@settings(max_examples=25, deadline=None)
def test_ancestors_above_the_hierarchy_are_refused(above, depth):
    rejects("height", lambda: hblt.cooccurrence(depth + above, depth, 0.9, 0.5))
    rejects("rho0", lambda: hblt.cooccurrence(0, depth, 1.0, 1.0))


class TestExtremes:
    @pytest.mark.parametrize("scale", [5e-324, 1e-200, 1.0, 1e200, 1.7e308])
    def test_stable_rank_and_rank_have_no_scale(self, scale: float):
        assert spectra.stable_rank(np.eye(3) * scale) == pytest.approx(3)
        assert spectra.stable_rank(np.ones((3, 3)) * scale) == pytest.approx(1)
        assert spectra.rank(np.eye(3) * scale) == 3
        assert spectra.rank(np.ones((3, 3)) * scale) == 1

    def test_matrices_of_different_scales_side_by_side(self):
        both = spectra.stable_rank(np.stack([np.eye(2) * 1e-200, np.zeros((2, 2)), np.eye(2)]))
        np.testing.assert_allclose(both, [2, 0, 2])

    @pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0)])
    def test_an_empty_matrix_has_no_rank(self, shape: tuple[int, int]):
        assert spectra.stable_rank(np.zeros(shape)) == 0
        assert spectra.rank(np.zeros(shape)) == 0

"""Whatever is out of range, whichever argument it is given for: a ValueError that names it."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import (
    block,
    cdag,
    clusters,
    embeddings,
    galore,
    hblt,
    invariants,
    linear,
    marginals,
    memory,
    nonlinear,
    scan_snap,
    spectra,
    stationarity,
)
from joma.theory.block import Block, Samples, simulate
from joma.theory.cdag import CDAG, LINEAR, TANH
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


# What is wrong in other ways: shapes, ranges, combinations

ANY: Any = None
"""Stands for an argument of the wrong type."""
PAIR = np.full((2, 2), 0.5)
SAMPLES = Samples(PAIR, gradient=np.ones((2, 1)))
TREE = hblt.Tree.regular(2, 2, 0.5, [1.0], [0.5])
CORPUS = scan_snap.Balanced(2, 1, 2).corpus
RATES: dict[str, Any] = {"eta_y": 1.0, "eta_z": 1.0}
Z, Y = np.zeros((1, 5)), np.zeros((5, 2))
NETWORK = CDAG.layered((2, 2, 1), (TANH, LINEAR), 0)
REVERSIBLE = galore.ReversibleGradient(np.eye(2)[None], np.eye(2)[None], np.eye(2)[None])
ZERO = np.zeros((2, 2))
UNEVEN = scan_snap.ScanSnapCorpus(
    np.array([[0.25, 0.75, 0.0], [0.85, 0.0, 0.15]]), np.array([0, 0]), np.array([0.5, 0.5])
)


def tree(**changes: Any) -> Callable[[], Any]:
    return lambda: dataclasses.replace(TREE, **changes)


def corpus(**changes: Any) -> Callable[[], Any]:
    return lambda: dataclasses.replace(CORPUS, **changes)


MISTAKES: list[tuple[str, Callable[[], Any]]] = [
    ("attention", lambda: Block("cosine")),
    ("activation", lambda: Block("exp", "gelu")),
    ("eta_w", lambda: Block(eta_w=0.0)),
    ("embeddings", lambda: Block(embeddings=np.ones(3))),
    ("x", lambda: Samples([[-0.1, 1.1]], gradient=[1.0])),
    ("gradient", lambda: Samples(PAIR)),
    ("labels", lambda: Samples(PAIR, labels=[-1, 0])),
    ("query", lambda: Samples(PAIR, gradient=[1.0, 1.0], query=[0.5, 1.0])),
    ("classes", lambda: Samples(PAIR, labels=[0, 1], classes=1)),
    ("initial", lambda: simulate(Block(), SAMPLES, 1, initial=(PAIR,))),
    ("t", lambda: simulate(Block("exp", "relu"), SAMPLES, 99.0, initial=(np.ones((2, 1)), [1, 1]))),
    ("descent_step", lambda: simulate(Block(), SAMPLES, [0, 0.5, 1], descent_step=10)),
    ("block", lambda: invariants.conserved_pointwise(Block("softmax"), [[[1.0]]], [[1.0]])),
    ("v", lambda: invariants.softmax_logits(Block("softmax"), [1.0], [1.0])),
    ("z", lambda: invariants.conserved_total(Block(), np.zeros((2, 3, 1)), np.zeros((2, 4)))),
    ("z", lambda: invariants.conserved_pointwise(Block(), np.zeros((2, 3, 1)), np.zeros(2))),
    ("block", lambda: memory.logits(Block("exp"), SAMPLES, np.zeros((2, 2, 1)), np.zeros(2))),
    ("initial", lambda: memory.logits(Block("softmax"), SAMPLES, np.zeros((2, 2, 1)), np.ones(4))),
    ("v", lambda: memory.logits(Block("softmax"), SAMPLES, np.zeros((2, 4, 1)), np.zeros(2))),
    (
        "trajectory",
        lambda: stationarity.drift(simulate(Block(), Samples(PAIR, gradient=[0.0, 0.0]), [0, 0.1])),
    ),
    ("x", lambda: NETWORK.forward(np.ones((4, 3)))),
    ("step", lambda: NETWORK.train(np.ones((4, 2)), lambda out: out, step=0.0, steps=1)),
    ("widths", lambda: CDAG.layered((3,), (), 0)),
    ("nonlinearities", lambda: CDAG.layered((3, 1), (TANH, TANH), 0)),
    ("weights", lambda: dataclasses.replace(NETWORK, weights=np.full((5, 5), np.nan))),
    ("trained", lambda: dataclasses.replace(NETWORK, trained=np.ones((5, 5), bool))),
    ("theta_2", lambda: cdag.correlation_bound(0.1, 4.0, 0.1)),
    ("threshold", lambda: cdag.random_cases(10, 2, 1.5, 0)),
    ("slope_max", lambda: cdag.recursion_bound([1.0], [1.0], 0.5, 0.1)),
    ("mean", lambda: clusters.expectations(GAUSSIAN, [1.0], [1.0, 2.0], 0.0)),
    ("basis", lambda: clusters.expectations(GAUSSIAN, [1.0, 0], [1.0, 0], 0.0, basis=[[2], [0]])),
    ("means", lambda: clusters.velocity(GAUSSIAN, [1.0], [[1.0], [2.0]], [1.0], 0.0)),
    ("distance", lambda: clusters.critical_points(GAUSSIAN, 0.0)),
    ("signs", lambda: clusters.resting_gradients(GAUSSIAN, [[1.0]], [1.0], 0.0, [0.5])),
    ("v", lambda: clusters.full_jacobian(GAUSSIAN, [1.0], [[1.0]], [0.0], 0.0)),
    ("ratio", lambda: clusters.phase(GAUSSIAN, 1.0, 0.0)),
    ("a", lambda: galore.ReversibleGradient(np.eye(2), np.eye(2)[None], np.eye(2)[None])),
    ("b", lambda: dataclasses.replace(REVERSIBLE, b=-np.eye(2)[None])),
    ("w", lambda: REVERSIBLE.gradient(np.zeros((2, 3)))),
    ("p", lambda: galore.project(ZERO, np.ones((3, 1)), np.ones((2, 1)))),
    ("rank", lambda: galore.svd_projection(ZERO, 3)),
    ("refresh", lambda: galore.descend(REVERSIBLE, ZERO, step=1, steps=1, rank=1, refresh=0)),
    ("noise", lambda: galore.noise_floor(-1.0, rank=1, rows=2, columns=2)),
    ("height", lambda: hblt.cooccurrence([0, 3], 3, 0.5, 0.5)),
    ("height", lambda: hblt.dissociation_bound(0.5, 3, 0.1)),
    ("depth", lambda: hblt.cooccurrence_near_one(0, 0, 0.1)),
    ("rhos", lambda: hblt.path([0.5, 1.5])),
    ("class_probs", tree(class_probs=np.array([0.5, 0.6]))),
    ("child_off_probs", tree(child_off_probs=np.ones((1, 3)))),
    ("parents of level 1", tree(parents=(np.array([0, 0, 1, 2]),))),
    ("rhos of level 1", tree(rhos=(np.full(4, -1.1),))),
    ("a", lambda: TREE.joint((2, 0), (0, 0))),
    ("node", lambda: TREE.marginal(1, -1)),
    ("n", lambda: TREE.sample(0, 0)),
    ("b", lambda: hblt.Tree.regular(1, 1, 0.5, [1.0], [1.0]).conditional((0, 0), (0, 0))),
    ("leaves", lambda: hblt.posteriors(TREE, np.ones((2, 3)))),
    ("leaves", lambda: hblt.posteriors(hblt.Tree.regular(2, 2, 1.0, [1.0], [[0.3]]), [[0, 1]])),
    ("normalizer", lambda: linear.weights([1.0], 0.1, normalizer=0.0)),
    ("beyond", lambda: linear.weights([1.0], 0.1, beyond=cast(Any, "stop"))),
    ("df", lambda: marginals.StudentT(1.0)),
    ("n", lambda: marginals.Ball(cast(Any, 1.5))),
    ("pdf", lambda: marginals.Density(lambda u: np.exp(-u))),
    ("pdf", lambda: marginals.Density(ANY)),
    ("breaks", lambda: marginals.Density(lambda u: np.exp(-u) / 2, breaks=[-1.0])),
    ("mu", lambda: nonlinear.entropy_fate([38.0, 1.0])),
    ("scale", lambda: nonlinear.entropy_fate([3, 2, 1], scale=1e9)),
    ("r", lambda: nonlinear.elapsed(1.0, 1.0)),
    ("token_given_class", corpus(token_given_class=np.full((2, 5), 0.3))),
    ("joint", corpus(joint=np.array([1.2, -0.2]))),
    ("query", corpus(query=np.array([0, 2]))),
    ("z", lambda: scan_snap.attention(CORPUS, np.zeros((1, 4)))),
    ("y", lambda: scan_snap.objective(CORPUS, Z, Y.T)),
    ("eta_y", lambda: scan_snap.flow(CORPUS, Z, Y, eta_y=0.0, eta_z=1.0)),
    ("initial", lambda: scan_snap.evolve(CORPUS, [1.0], initial={"w": Z}, **RATES)),
    ("batch", lambda: scan_snap.sample_sequences(CORPUS, 3, 0, 0)),
    ("frequencies", lambda: scan_snap.sample_gradient(CORPUS, [0], np.ones((2, 5)), Z, Y)),
    ("class_", lambda: scan_snap.rise_ratio(CORPUS, 9, 1, 2)),
    ("token", lambda: scan_snap.rise_ratio(CORPUS, 0, 0, 1)),
    ("corpus", lambda: scan_snap.early_log_gain(UNEVEN, 0, 1, 0, 0.1)),
    ("margin", lambda: scan_snap.margin_time(-1, eta_y=1, classes=2, distinct_share=1)),
    ("common_mass", lambda: scan_snap.Balanced(2, 1, 1, common_mass=1.0)),
]


@pytest.mark.parametrize(
    ("argument", "call"), MISTAKES, ids=[f"{n} {name}" for n, (name, _) in enumerate(MISTAKES)]
)
def test_a_mistake_is_named(argument: str, call: Callable[[], Any]):
    rejects(argument, call)


@pytest.mark.parametrize(("rho", "rho0", "depth"), [(1, 1, 3), (-1, -1, 2), (0.5, 1, 1)])
def test_a_token_that_never_occurs_is_refused(rho: float, rho0: float, depth: int):
    with pytest.raises(ValueError, match="never occurs"):
        hblt.cooccurrence(0, depth, rho, rho0)

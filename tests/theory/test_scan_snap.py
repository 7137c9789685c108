"""Scan&Snap: the flow is the objective's gradient, its solution and laws hold on it."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import scan_snap
from joma.theory.as_printed import scan_snap as printed
from joma.theory.scan_snap import Balanced, Corpus

seeds = st.integers(0, 10_000)
few = settings(max_examples=10, deadline=None)
sizes = st.tuples(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4))


def dense_corpus(rng, classes=4, tokens=5, queries=2):
    return Corpus(
        rng.dirichlet(np.ones(tokens), size=classes),
        np.arange(classes) % queries,
        rng.dirichlet(np.full(classes, 3.0)),
    )


def sparse_corpus(rng, classes, common, distinct, mass=0.5):
    tokens = np.zeros((classes, common + classes * distinct))
    tokens[:, :common] = mass * rng.dirichlet(np.full(common, 3.0))
    for n in range(classes):
        own = slice(common + n * distinct, common + (n + 1) * distinct)
        tokens[n, own] = (1 - mass) * rng.dirichlet(np.full(distinct, 3.0))
    return Corpus(tokens, np.zeros(classes, dtype=int), np.full(classes, 1 / classes))


def difference(function, at, step=1e-5):
    gradient = np.empty_like(at)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


@few
@given(seeds)
def test_objective_is_the_mean_log_probability_of_the_next_token(seed):
    rng = np.random.default_rng(seed)
    corpus = dense_corpus(rng)
    z, y = rng.normal(size=(2, 5)), rng.normal(size=(5, 4))
    total = 0.0
    for n in range(4):
        c = corpus.token_given_class[n] * np.exp(z[corpus.query[n]])
        scores = y.T @ (c / np.sqrt(c @ c))
        total += corpus.joint[n] * np.log(np.exp(scores[n]) / np.exp(scores).sum())
    assert scan_snap.objective(corpus, z, y) == pytest.approx(total, rel=1e-12)


@few
@given(seeds)
def test_flow_is_the_gradient_of_the_objective(seed):
    rng = np.random.default_rng(seed)
    corpus = dense_corpus(rng)
    z, y = rng.normal(size=(2, 5)), rng.normal(size=(5, 4))
    z_rate, y_rate = scan_snap.flow(corpus, z, y, eta_y=0.7, eta_z=1.3)
    z_ref = difference(lambda at: float(scan_snap.objective(corpus, at, y)), z)
    y_ref = difference(lambda at: float(scan_snap.objective(corpus, z, at)), y)
    np.testing.assert_allclose(z_rate, 1.3 * z_ref / corpus.query_probability[:, None], atol=1e-8)
    np.testing.assert_allclose(y_rate, 0.7 * y_ref, atol=1e-8)


def test_flow_is_vectorised_over_leading_axes():
    rng = np.random.default_rng(0)
    corpus = dense_corpus(rng)
    z, y = rng.normal(size=(3, 2, 5)), rng.normal(size=(3, 5, 4))
    together = scan_snap.flow(corpus, z, y, eta_y=1.0, eta_z=1.0)
    for i in range(3):
        alone = scan_snap.flow(corpus, z[i], y[i], eta_y=1.0, eta_z=1.0)
        np.testing.assert_allclose(together[0][i], alone[0], rtol=1e-12)
        np.testing.assert_allclose(together[1][i], alone[1], rtol=1e-12)


def test_flow_survives_logits_that_overflow_the_exponential():
    corpus = Balanced(2, 1, 1).corpus
    z = np.array([[0.0, 1e4, -1e4]])
    f = scan_snap.feature(corpus, z)
    np.testing.assert_allclose(f, [[0, 1, 0], [1, 0, 0]])


def test_which_tokens_are_common_shared_and_distinct():
    corpus = Corpus(
        np.array([[0.3, 0.25, 0.45, 0.0], [0.3, 0.02, 0.0, 0.68]]),
        np.array([0, 0]),
        np.array([0.4, 0.6]),
    )
    assert corpus.common.tolist() == [True, False, False, False]
    assert corpus.shared.tolist() == [True, True, False, False]
    assert corpus.distinct.tolist() == [False, False, True, True]
    assert corpus.distinct_of(1).tolist() == [3]
    np.testing.assert_allclose(corpus.class_given_query, [0.4, 0.6])


def test_training_raises_the_objective():
    corpus = sparse_corpus(np.random.default_rng(1), 3, 2, 3)
    run = scan_snap.evolve(corpus, np.linspace(0, 50, 20), eta_y=2.0, eta_z=1.0)
    assert np.all(np.diff(scan_snap.objective(corpus, run.z, run.y)) > 0)
    np.testing.assert_allclose(run.attention.sum(axis=-1), 1)
    assert run.entropy.shape == (20, 3)


def test_evolve_continues_from_an_initial_state():
    corpus = sparse_corpus(np.random.default_rng(2), 2, 1, 2)
    rates: dict[str, Any] = {"eta_y": 1.0, "eta_z": 2.0}
    whole = scan_snap.evolve(corpus, [0.0, 3.0, 7.0], **rates)
    rest = scan_snap.evolve(corpus, [4.0], initial={"z": whole.z[1], "y": whole.y[1]}, **rates)
    np.testing.assert_allclose(rest.z[0], whole.z[2], atol=1e-8)
    np.testing.assert_allclose(rest.b[0] + whole.b[1], whole.b[2], atol=1e-8)


def test_both_rates_larger_is_the_same_training_faster():
    corpus = sparse_corpus(np.random.default_rng(3), 3, 2, 2)
    slow = scan_snap.evolve(corpus, [0.0, 40.0], eta_y=1.0, eta_z=0.5)
    fast = scan_snap.evolve(corpus, [0.0, 4.0], eta_y=10.0, eta_z=5.0)
    np.testing.assert_allclose(slow.z, fast.z, atol=1e-7)
    np.testing.assert_allclose(slow.b, fast.b, atol=1e-7)
    assert np.all(slow.b[1] > 0)
    assert scan_snap.rescaled_time(4.0, 10.0) == 40.0


def test_b_accumulates_its_rate():
    corpus = sparse_corpus(np.random.default_rng(4), 3, 2, 2)
    run = scan_snap.evolve(corpus, np.linspace(0, 5, 400), eta_y=2.0, eta_z=1.0)
    rate = scan_snap.b_rate(corpus, run.z, run.y, eta_z=1.0)
    step = run.t[1]
    np.testing.assert_allclose(
        run.b[-1], step * (rate.sum(axis=0) - (rate[0] + rate[-1]) / 2), rtol=1e-4
    )


def test_a_class_without_distinct_tokens_has_no_b():
    corpus = dense_corpus(np.random.default_rng(0))
    assert np.all(np.isnan(scan_snap.evolve(corpus, [1.0], eta_y=1.0, eta_z=1.0).b))
    run = scan_snap.train_on_samples(corpus, 5, 2, 3, eta_y=0.1, eta_z=0.1, rng=0)
    assert np.all(np.isnan(run.b))


@few
@given(seeds, sizes, st.floats(0.05, 0.95))
def test_equally_common_tokens_fall_and_distinct_ones_rise(seed, size, mass):
    rng = np.random.default_rng(seed)
    corpus = sparse_corpus(rng, *size, mass=mass)
    corpus = dataclasses.replace(corpus, joint=rng.dirichlet(np.full(size[0], 2.0)))
    run = scan_snap.evolve(corpus, [0.0, 300.0], eta_y=3.0, eta_z=1.0)
    np.testing.assert_array_equal(run.fate, scan_snap.initial_fate(corpus))
    np.testing.assert_array_equal(run.fate, printed.initial_fate(corpus))


@few
@given(seeds)
def test_initial_pull_is_the_first_thing_that_happens(seed):
    corpus = dense_corpus(np.random.default_rng(seed))
    pull = scan_snap.initial_pull(corpus)
    t = 0.02
    z = scan_snap.evolve(corpus, [t], eta_y=2.0, eta_z=3.0).z[0]
    np.testing.assert_allclose(z / (3 * t**2), pull, atol=0.05 * np.abs(pull).max())


def test_a_token_in_between_rises_against_print():
    corpus = Corpus(
        np.array([[0.25, 0.25, 0.5, 0.0], [0.25, 0.02, 0.0, 0.73]]),
        np.array([0, 0]),
        np.array([0.5, 0.5]),
    )
    fate = scan_snap.evolve(corpus, [0.0, 1e3], eta_y=10.0, eta_z=1.0).fate[0]
    assert fate.tolist() == [-1, 1, 1, 1]
    assert scan_snap.initial_fate(corpus)[0].tolist() == fate.tolist()
    assert printed.initial_fate(corpus)[0].tolist() == [-1, -1, 1, 1]


@few
@given(seeds)
def test_the_frequent_token_gains(seed):
    corpus = sparse_corpus(np.random.default_rng(seed), 2, 2, 3)
    run = scan_snap.evolve(corpus, np.linspace(0, 30, 30), eta_y=5.0, eta_z=1.0)
    often, _, seldom = corpus.distinct_of(0)
    gain = run.relative_gain(0, often, seldom)
    assert np.all(np.diff(gain) > 0)
    p = corpus.token_given_class[0]
    assert gain[0] == pytest.approx(scan_snap.rise_ratio(corpus, 0, often, seldom) - 1)
    assert gain[0] == pytest.approx((p[often] / p[seldom]) ** 2 - 1)


def test_growth_factor_is_the_gain_where_g_is_gamma_f():
    """One distinct token per class against itself: with f² constant, χ = exp(2f²B)."""
    b = np.linspace(0, 2, 50)
    np.testing.assert_allclose(scan_snap.growth_factor(np.full(50, 0.3), b), np.exp(0.6 * b))
    gain = scan_snap.relative_gain_rate(
        2.0, 0.3, gamma=1.5, overlap=0.2, class_given_query=0.5, eta_z=4.0
    )
    assert gain == pytest.approx(2 * 4.0 * 0.5 * 1.5 * 0.8 * 0.3 * 2.0)


def gains(run, class_):
    """ln χ of the dominant token against the others of a class that leave a gain to divide by."""
    dominant, *others = run.corpus.distinct_of(class_)
    for other in others:
        gain = run.relative_gain(class_, dominant, other)
        if gain[0] > 1e-3:
            yield np.log(gain / gain[0])


@few
@given(seeds, st.floats(0.05, 0.9), st.sampled_from([30.0, 300.0]))
def test_what_is_left_of_the_gain_bounds_on_the_full_flow(seed, mass, eta_y):
    corpus = sparse_corpus(np.random.default_rng(seed), 3, 2, 3, mass=mass)
    t = np.concatenate([[0.0], np.geomspace(0.1, 1e5, 40) / eta_y])
    run = scan_snap.evolve(corpus, t, eta_y=eta_y, eta_z=1.0)
    for n in range(3):
        low, high = scan_snap.full_log_gain_bounds(run.b[:, n], 0.5)
        for growth in gains(run, n):
            assert np.all(growth >= low - 1e-6)
            assert np.all(growth <= high + 1e-6)


def test_gain_bounds_are_tangent_at_the_start_of_the_full_flow():
    """While t → 0, g = γf: the lower bound is what ln χ begins with, two-sided."""
    corpus = sparse_corpus(np.random.default_rng(8), 3, 2, 3)
    run = scan_snap.evolve(corpus, [0.0, 1e-3], eta_y=1.0, eta_z=1.0, rtol=1e-12)
    for n in range(3):
        square = scan_snap.feature(corpus, run.z[0])[n, corpus.distinct_of(n)[0]] ** 2
        low, high = scan_snap.log_gain_bounds(run.b[1, n], square)
        assert high == 2 * run.b[1, n]
        for growth in gains(run, n):
            assert growth[1] == pytest.approx(low, rel=1e-2)


def test_the_printed_lower_bound_fails_where_attention_is_on_distinct_tokens():
    corpus = sparse_corpus(np.random.default_rng(0), 3, 3, 3, mass=0.2)
    t = np.concatenate([[0.0], np.geomspace(0.03, 1e5, 40)])
    run = scan_snap.evolve(corpus, t, eta_y=100.0, eta_z=1.0)
    square = scan_snap.feature(corpus, run.z[0])[0, corpus.distinct_of(0)[0]] ** 2
    low, _ = printed.full_log_gain_bounds(run.b[:, 0], square)
    assert all(np.any(growth < low - 1e-3) for growth in gains(run, 0))


def test_gain_on_sampled_sequences():
    corpus = sparse_corpus(np.random.default_rng(1), 2, 2, 3)
    scale = 0.02
    run = scan_snap.train_on_samples(
        corpus, 1000, 1500, 32, eta_y=10 * scale, eta_z=scale, rng=0, every=100
    )
    flow = scan_snap.evolve(corpus, run.t * scale, eta_y=10.0, eta_z=1.0)
    for n in range(2):
        bounds = scan_snap.full_log_gain_bounds(run.b[:, n], 0.5)
        for growth, expected in zip(gains(run, n), gains(flow, n), strict=True):
            assert growth[-1] == pytest.approx(expected[-1], rel=0.1)
            assert np.all(growth[2:] > bounds[0][2:])
            assert np.all(growth[2:] < bounds[1][2:])


def test_b_starts_at_zero_and_rises():
    corpus = sparse_corpus(np.random.default_rng(4), 4, 3, 2, mass=0.4)
    t = np.concatenate([[0.0], np.geomspace(1e-3, 1e6, 50)])
    run = scan_snap.evolve(corpus, t, eta_y=2.0, eta_z=1.0)
    assert np.all(run.b[0] == 0)
    assert np.all(np.diff(run.b, axis=0) > 0)


def test_sampled_training_tends_to_the_flow_for_long_sequences():
    corpus = sparse_corpus(np.random.default_rng(5), 2, 2, 2)
    scale, steps = 0.05, 400
    flow = scan_snap.evolve(corpus, [steps * scale], eta_y=4.0, eta_z=1.0)
    distance = []
    for length in (4, 5000):
        run = scan_snap.train_on_samples(
            corpus, length, steps, 200, eta_y=4 * scale, eta_z=scale, rng=0, every=100
        )
        assert run.t.tolist() == [0, 100, 200, 300, 400]
        distance.append(np.abs(run.z[-1] - flow.z[-1]).max())
    assert distance[1] < 0.01 < 5 * distance[1] < distance[0]


def test_sampled_gradient_is_the_gradient_of_the_sequences_objective():
    rng = np.random.default_rng(6)
    corpus = dense_corpus(rng)
    classes, x = scan_snap.sample_sequences(corpus, 7, 30, rng)
    np.testing.assert_allclose(x.sum(axis=1), 1)
    z, y = rng.normal(size=(2, 5)), rng.normal(size=(5, 4))

    def mean_log(z, y):
        c = x * np.exp(z[corpus.query[classes]])
        scores = (c / np.linalg.norm(c, axis=1, keepdims=True)) @ y
        own = scores[np.arange(30), classes]
        return float(np.mean(own - np.log(np.exp(scores).sum(axis=1))))

    z_gradient, y_gradient = scan_snap.sample_gradient(corpus, classes, x, z, y)
    z_ref = difference(lambda at: mean_log(at, y), z) / corpus.query_probability[:, None]
    np.testing.assert_allclose(z_gradient, z_ref, atol=1e-8)
    np.testing.assert_allclose(y_gradient, difference(lambda at: mean_log(z, at), y), atol=1e-8)


def test_same_seed_same_training():
    corpus = Balanced(2, 1, 2).corpus
    runs = [
        scan_snap.train_on_samples(corpus, 9, 5, 4, eta_y=1.0, eta_z=1.0, rng=rng)
        for rng in (3, 3, 4)
    ]
    np.testing.assert_array_equal(runs[0].z, runs[1].z)
    assert not np.array_equal(runs[0].z, runs[2].z)


CORPUS = Balanced(2, 1, 2).corpus
RATES: dict[str, Any] = {"eta_y": 1.0, "eta_z": 1.0}
Z, Y = np.zeros((1, 5)), np.zeros((5, 2))


def swapped(**values):
    return lambda: dataclasses.replace(CORPUS, **values)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("token_given_class", swapped(token_given_class=np.full((2, 5), 0.3))),
        ("token_given_class", swapped(token_given_class=np.full((2, 5), np.nan))),
        ("token_given_class", swapped(token_given_class=np.full(2, 0.5))),
        ("joint", swapped(joint=np.array([1.2, -0.2]))),
        ("joint", swapped(joint=np.array([1.0, 0.0]))),
        ("joint", swapped(joint=np.full(3, 1 / 3))),
        ("query", swapped(query=np.array([0, 2]))),
        ("query", swapped(query=np.array([0.5, 0]))),
        ("query", swapped(query=np.array([0]))),
        ("z", lambda: scan_snap.attention(CORPUS, np.zeros((1, 4)))),
        ("z", lambda: scan_snap.feature(CORPUS, np.full((1, 5), np.inf))),
        ("y", lambda: scan_snap.objective(CORPUS, Z, Y.T)),
        ("eta_y", lambda: scan_snap.flow(CORPUS, Z, Y, eta_y=0.0, eta_z=1.0)),
        ("eta_z", lambda: scan_snap.b_rate(CORPUS, Z, Y, eta_z=-1.0)),
        ("t", lambda: scan_snap.evolve(CORPUS, [-1.0], **RATES)),
        ("t", lambda: scan_snap.evolve(CORPUS, [2.0, 1.0], **RATES)),
        ("initial", lambda: scan_snap.evolve(CORPUS, [1.0], initial={"w": Z}, **RATES)),
        ("length", lambda: scan_snap.sample_sequences(CORPUS, 0, 3, 0)),
        ("batch", lambda: scan_snap.sample_sequences(CORPUS, 3, 0, 0)),
        ("steps", lambda: scan_snap.train_on_samples(CORPUS, 3, -1, 3, rng=0, **RATES)),
        ("classes", lambda: scan_snap.sample_gradient(CORPUS, [2], np.ones((1, 5)), Z, Y)),
        ("frequencies", lambda: scan_snap.sample_gradient(CORPUS, [0], np.ones((2, 5)), Z, Y)),
        ("weight", lambda: scan_snap.sample_gradient(CORPUS, [0], np.ones((1, 5)), Z, Y, [-1.0])),
        ("token", lambda: scan_snap.rise_ratio(CORPUS, 0, 0, 1)),
        ("token", lambda: scan_snap.evolve(CORPUS, [1.0], **RATES).relative_gain(0, 1, 3)),
        ("f_squared", lambda: scan_snap.growth_factor([1.5], [0.0])),
        ("b", lambda: scan_snap.growth_factor([0.5], [0.0, 1.0])),
        ("b", lambda: scan_snap.log_gain_bounds(-1.0, 0.5)),
        ("f_squared", lambda: scan_snap.log_gain_bounds(1.0, 1.5)),
        ("b", lambda: scan_snap.full_log_gain_bounds(-1.0, 0.5)),
        ("b", lambda: printed.full_log_gain_bounds(-1.0, 0.5)),
        ("factor", lambda: scan_snap.rescaled_time(1.0, 0.0)),
        ("t", lambda: scan_snap.rescaled_time(-1.0, 2.0)),
        ("classes", lambda: scan_snap.snapping_time(1, 5, 1.0)),
        ("classes", lambda: scan_snap.critical_margin(1)),
        ("classes", lambda: scan_snap.decoder_rate_turn(eta_y=1, classes=1, distinct_share=1)),
        ("margin", lambda: scan_snap.margin_time(-1, eta_y=1, classes=2, distinct_share=1)),
        ("distinct_share", lambda: scan_snap.margin_time(1, eta_y=1, classes=2, distinct_share=2)),
        ("t", lambda: scan_snap.late_decoder_rate_effect(0.5, Balanced(2, 1, 1), eta_y=1.0)),
        ("distinct", lambda: Balanced(2, 1, 0)),
        ("common_mass", lambda: Balanced(2, 1, 1, common_mass=1.0)),
        ("separation", lambda: Balanced(2, 1, 1).b(np.nan)),
        ("t", lambda: scan_snap.late_b(0.0, Balanced(2, 1, 1), anchor=(1, 1), **RATES)),
        ("t", lambda: printed.late_b(0.0, Balanced(2, 1, 1), anchor=(1, 1), **RATES)),
        ("other", lambda: scan_snap.finite_length_bias(1.0, 10, 0)),
    ],
)
def test_bad_input_is_named(name, call):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call()

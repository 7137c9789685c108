"""Scan&Snap: the flow is the objective's gradient, its solution and laws hold on it."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced, ScanSnapCorpus

seeds = st.integers(0, 10_000)
few = settings(max_examples=10, deadline=None)
sizes = st.tuples(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4))


def dense_corpus(rng, classes=4, tokens=5, queries=2):
    return ScanSnapCorpus(
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
    return ScanSnapCorpus(tokens, np.zeros(classes, dtype=int), np.full(classes, 1 / classes))


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
    corpus = ScanSnapCorpus(
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


def test_a_class_without_distinct_tokens_has_no_b():
    corpus = dense_corpus(np.random.default_rng(0))
    assert np.all(np.isnan(scan_snap.evolve(corpus, [1.0], eta_y=1.0, eta_z=1.0).b))
    run = scan_snap.train_on_samples(corpus, 5, 2, 3, eta_y=0.1, eta_z=0.1, rng=0)
    assert np.all(np.isnan(run.b))


def test_an_equally_common_token_can_rise_next_to_another():
    """The first token has P = .18 in both classes, the second P = .72 and .81."""
    corpus = ScanSnapCorpus(
        np.array([[0.18, 0.72, 0.05, 0.05, 0.0], [0.18, 0.81, 0.0, 0.0, 0.01]]),
        np.zeros(2, dtype=int),
        np.array([0.63, 0.37]),
    )
    assert corpus.common.tolist() == [True, False, False, False, False]
    assert scan_snap.initial_fate(corpus)[0, 0] == 1
    assert scan_snap.evolve(corpus, [0.0, 0.1], eta_y=1.0, eta_z=1.0).fate[0, 0] == 1


PULLED_DOWN = ScanSnapCorpus(
    np.array([[0.25, 0.75, 0.0], [0.85, 0.0, 0.15]]), np.array([0, 0]), np.array([0.5, 0.5])
)


def test_a_larger_decoder_rate_only_delays_the_fall_of_b():
    """The last token is distinct; B of its class rises, turns and ends below 0."""
    t = np.concatenate([[0.0], np.geomspace(1.0, 1e20, 300)])
    turns = []
    for ratio in (5.0, 20.0, 100.0):
        run = scan_snap.evolve(PULLED_DOWN, t, eta_y=ratio, eta_z=1.0, rtol=1e-8)
        b = run.b[:, 1]
        turns.append(t[np.argmax(b)])
        assert np.max(b) > 0.29
        assert b[-1] < 0
        assert run.fate[0].tolist() == [-1, 1, -1]
        assert np.log(ratio * turns[-1]) ** 2 / ratio == pytest.approx(6.6, abs=0.3)
    assert np.all(np.diff(turns) > 0)
    run = scan_snap.evolve(PULLED_DOWN, [1e4, 1e8, 1e10, 1e12, 1e14], eta_y=100.0, eta_z=1.0)
    np.testing.assert_allclose(run.b[:, 1], [0.189, 0.2953, 0.2955, 0.256, 0.179], atol=6e-4)


@few
@given(seeds, sizes, st.floats(0.05, 0.95), st.floats(-3, 3))
def test_b_rises_for_ever_where_classes_are_alike(seed, size, mass, log_rate):
    classes, common, distinct = size
    rng = np.random.default_rng(seed)
    own = (1 - mass) * rng.dirichlet(np.ones(distinct))
    tokens = np.hstack(
        [
            np.tile(mass * rng.dirichlet(np.ones(common)), (classes, 1)),
            np.kron(np.eye(classes), own),
        ]
    )
    corpus = ScanSnapCorpus(tokens, np.zeros(classes, dtype=int), np.full(classes, 1 / classes))
    assert corpus.alike
    t = np.concatenate([[0.0], np.geomspace(1e-2, 1e10, 20)])
    run = scan_snap.evolve(corpus, t, eta_y=10**log_rate, eta_z=1.0)
    assert np.all(np.diff(run.b, axis=0) > 0)


def test_which_classes_are_alike():
    corpus = Balanced(3, 2, 2).corpus
    assert corpus.alike
    unequal = np.array([0.5, 0.25, 0.25])
    assert not dataclasses.replace(corpus, joint=unequal).alike
    assert not dataclasses.replace(corpus, query=np.array([0, 0, 1])).alike
    assert not PULLED_DOWN.alike
    # One class has its distinct tokens in another order, the second other frequencies.
    swapped = np.array([[0.4, 0.4, 0.2, 0, 0], [0.4, 0, 0, 0.2, 0.4]])
    other = np.array([[0.4, 0.4, 0.2, 0, 0], [0.4, 0, 0, 0.3, 0.3]])
    for tokens, alike in ((swapped, True), (other, False)):
        assert ScanSnapCorpus(tokens, np.array([0, 0]), np.array([0.5, 0.5])).alike == alike


def test_a_class_that_shares_no_token_never_moves():
    corpus = ScanSnapCorpus(
        np.array([[0.5, 0.5, 0, 0, 0], [0, 0, 0.3, 0.7, 0], [0, 0, 0.3, 0, 0.7]]),
        np.zeros(3, dtype=int),
        np.full(3, 1 / 3),
    )
    assert scan_snap.initial_fate(corpus)[0].tolist() == [0, 0, -1, 1, 1]
    run = scan_snap.evolve(corpus, [100.0], eta_y=1.0, eta_z=1.0)
    np.testing.assert_allclose(run.z[0, 0, :2], 0, atol=1e-12)
    with pytest.raises(ValueError, match="class_ must share a token"):
        scan_snap.rise_ratio(corpus, 0, 0, 1)


def test_a_token_in_between_rises():
    """One of two common tokens, P = .25 and .02; the other is equally common and falls."""
    corpus = ScanSnapCorpus(
        np.array([[0.25, 0.25, 0.5, 0.0], [0.25, 0.02, 0.0, 0.73]]),
        np.array([0, 0]),
        np.array([0.5, 0.5]),
    )
    fate = scan_snap.evolve(corpus, [0.0, 1e3], eta_y=10.0, eta_z=1.0).fate[0]
    assert fate.tolist() == [-1, 1, 1, 1]
    assert scan_snap.initial_fate(corpus)[0].tolist() == fate.tolist()


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


def gains(run, class_):
    """ln χ of the dominant token against the others of a class that leave a gain to divide by."""
    dominant, *others = run.corpus.distinct_of(class_)
    for other in others:
        gain = run.relative_gain(class_, dominant, other)
        if gain[0] > 1e-3:
            yield np.log(gain / gain[0])


def alike_corpus(classes, common, distinct):
    tokens = np.hstack([np.tile(common, (classes, 1)), np.kron(np.eye(classes), distinct)])
    return ScanSnapCorpus(tokens, np.zeros(classes, dtype=int), np.full(classes, 1 / classes))


@few
@given(seeds, st.floats(0.05, 0.9), st.sampled_from([0.1, 1.0, 30.0, 300.0]))
def test_what_is_left_of_the_gain_bounds_on_the_full_flow(seed, mass, eta_y):
    rng = np.random.default_rng(seed)
    own = (1 - mass) * rng.dirichlet(np.full(3, 3.0))
    corpus = alike_corpus(3, mass * rng.dirichlet(np.full(2, 3.0)), own)
    t = np.concatenate([[0.0], np.geomspace(0.1, 1e5, 40) / eta_y])
    run = scan_snap.evolve(corpus, t, eta_y=eta_y, eta_z=1.0)
    low, high = scan_snap.full_log_gain_bounds(run.b[:, 0], 0.5)
    for growth in gains(run, 0):
        assert np.all(growth >= low - 1e-6)
        assert np.all(growth <= high + 1e-6)


def test_the_gain_bounds_fail_for_classes_that_differ():
    """B and ln χ of the second class rise and then fall below 0; for a larger η_Y later."""
    corpus = ScanSnapCorpus(
        np.array([[0.12, 0.66, 0.22, 0.0, 0.0], [0.85, 0.0, 0.0, 0.1, 0.05]]),
        np.array([0, 0]),
        np.array([0.5, 0.5]),
    )
    for eta_y, end in ((0.17, 1e2), (5.0, 1e4)):
        run = scan_snap.evolve(corpus, [0.0, 1.0, end], eta_y=eta_y, eta_z=1.0)
        (growth,) = gains(run, 1)
        assert growth[1] > 0 > growth[2]
        assert run.b[1, 1] > 0 > run.b[2, 1]


@pytest.mark.parametrize(("mass", "sign"), [(0.2, -1), (0.7, 1)])
def test_the_distance_from_the_tangent_falls_with_the_rate_of_attention(mass, sign):
    """Theorem 3's lower bound: ln χ is below or above it, by a share ∝ η_Z/η_Y."""
    corpus = alike_corpus(3, [mass / 2, mass / 2], (1 - mass) * np.array([0.5, 0.3, 0.2]))
    square = scan_snap.feature(corpus, np.zeros((1, corpus.tokens)))[0, 2] ** 2
    shares = []
    for eta_z in (1e-2, 1e-3, 1e-4):
        run = scan_snap.evolve(corpus, [0.0, 50.0], eta_y=1.0, eta_z=eta_z, rtol=1e-12)
        b = run.b[1, 0]
        growth = np.log(run.relative_gain(0, 2, 3))
        growth = growth[1] - growth[0]
        shares.append(growth / (2 * square * b) - 1)
        early = scan_snap.early_log_gain(corpus, 0, 2, 3, b)
        assert early / (2 * square * b) - 1 == pytest.approx(shares[-1], rel=0.15)
    assert np.all(np.sign(shares) == sign)
    np.testing.assert_allclose(np.divide(shares[:-1], shares[1:]), 10, rtol=0.15)


@pytest.mark.parametrize(("common", "bend"), [(1, 0.69), (2, 0.46), (10, -0.24), (100, -4.8)])
def test_many_common_tokens_bend_the_early_gain_down(common, bend):
    corpus = alike_corpus(3, np.full(common, 0.5 / common), [0.25, 0.15, 0.1])
    square = scan_snap.feature(corpus, np.zeros((1, corpus.tokens)))[0, common] ** 2
    gain = scan_snap.early_log_gain(corpus, 0, common, common + 1, 1.0)
    assert gain / (2 * square) - 1 == pytest.approx(bend, rel=0.02)


def test_a_weak_pull_has_a_sign_and_one_that_cancels_has_none():
    rare = np.array([[1 - 2e-9, 1e-9, 1e-9, 0.0], [0.5, 0.0, 0.0, 0.5]])
    corpus = ScanSnapCorpus(rare, np.zeros(2, dtype=int), np.array([0.5, 0.5]))
    assert 0 < scan_snap.initial_pull(corpus)[0, 1] < 1e-14
    assert scan_snap.initial_fate(corpus)[0].tolist() == [-1, 1, 1, 1]
    same = np.array([[0.3, 0.7], [0.3, 0.7]])
    alike = ScanSnapCorpus(same, np.zeros(2, dtype=int), np.array([0.5, 0.5]))
    assert scan_snap.initial_fate(alike)[0].tolist() == [0, 0]


def test_the_talks_lower_bound_on_the_full_flow():
    """It fails where attention is on distinct tokens, by a share that falls with η_Z/η_Y."""
    corpus = sparse_corpus(np.random.default_rng(0), 3, 3, 3, mass=0.2)
    t = np.concatenate([[0.0], np.geomspace(0.03, 1e5, 40)])
    square = scan_snap.feature(corpus, np.zeros((1, corpus.tokens)))
    square = square[0, corpus.distinct_of(0)[0]] ** 2
    shares = []
    for eta_y in (1e2, 1e3, 1e4):
        run = scan_snap.evolve(corpus, t * 100 / eta_y, eta_y=eta_y, eta_z=1.0, rtol=1e-11)
        low, _ = scan_snap.log_gain_bounds(run.b[1:, 0], square)
        shares.append(max(float(np.max((low - g[1:]) / low)) for g in gains(run, 0)))
    assert shares[0] > 0.02
    np.testing.assert_allclose(np.divide(shares[:-1], shares[1:]), 10, rtol=0.2)


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

import numpy as np
import pytest
from scipy import integrate

from joma.theory import embeddings, invariants, memory, stationarity
from joma.theory.block import Block, Samples, State, simulate
from joma.theory.functions import ACTIVATIONS, Activation, Attention, leaky_relu
from tests.theory._bad import rejects

RNG = np.random.default_rng(0)
X = RNG.dirichlet(np.ones(5), size=24)
G = RNG.normal(size=(24, 3))
QUERY = np.arange(24) % 3
LABELS = np.arange(24) % 3


def start(queries: int = 1) -> State:
    rng = np.random.default_rng(1)
    return State(
        0.3 * rng.normal(size=(5, 3)),
        0.5 + 0.3 * rng.normal(size=(queries, 5)),
        0.1 * rng.normal(size=(queries, 3)),
    )


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", leaky_relu(0.3)])
def test_switching_activations_keep_the_law_too(activation):
    samples = Samples(X, gradient=G)
    block = Block("exp", activation)
    path = simulate(block, samples, [0.0, 0.4], initial=start(), flow_step=0.01)
    assert invariants.drift(path) <= 1e-9
    fine = simulate(block, samples, [0.0, 0.4], initial=start(), flow_step=0.001)
    assert np.max(np.abs(path.v - fine.v)) < 5e-3


def test_any_pointwise_attention_of_the_users():
    square = Attention("square", lambda y: y**2, lambda y: 2 * y, lambda y: y**2 / 4)
    cubic = Activation("cubic", lambda y: y + y**3 / 3, lambda y: 1 + y**2)
    path = simulate(Block(square, cubic), Samples(X, gradient=G), [0.0, 0.3], initial=start())
    assert invariants.drift(path) <= 1e-9


def test_one_query_law_fails_for_many_queries():
    block = Block("exp", "tanh")
    samples = Samples(X, gradient=G, query=QUERY)
    path = simulate(block, samples, [0.0, 0.5], initial=start(3))
    alone = invariants.conserved_pointwise(block, path.v, path.z[:, 0])
    assert np.max(np.abs(alone - alone[0])) > 1e-3
    assert invariants.drift(path) <= 1e-9


def test_descent_keeps_whole_steps_and_says_when():
    path = simulate(Block(), Samples(X, gradient=G), [0.0, 0.1, 0.26], descent_step=0.1)
    np.testing.assert_allclose(path.t, [0, 0.1, 0.3])
    np.testing.assert_allclose(path.v[1], 0.1 * X.T @ G / 24)


def test_orthonormal_embeddings_change_nothing():
    basis = np.linalg.qr(np.random.default_rng(3).normal(size=(9, 9)))[0]
    samples = Samples(X, gradient=G)
    plain, embedded = (
        simulate(Block("exp", "tanh", embeddings=columns), samples, [0.0, 0.4], initial=start())
        for columns in (None, basis[:, :6])
    )
    np.testing.assert_allclose(plain.v, embedded.v, atol=1e-12)


def test_almost_orthogonal_embeddings_drift_with_their_coherence():
    columns = embeddings.almost_orthogonal(6, 400, np.random.default_rng(4))
    path = simulate(
        Block("exp", "tanh", embeddings=columns), Samples(X, gradient=G), [0, 0.4], initial=start()
    )
    assert 0 < invariants.drift(path) < embeddings.coherence(columns)


def test_samples_are_their_own_and_name_their_queries():
    x, g = X.copy(), G.copy()
    samples = Samples(x, gradient=g, query=[7, 1_000_000] * 12)
    x[:], g[:] = 0, 0
    np.testing.assert_array_equal(samples.x, X)
    np.testing.assert_array_equal(samples.query_tokens, [7, 1_000_000])
    assert samples.queries == 2
    assert Samples(X, labels=LABELS, classes=9).nodes == 9


def test_a_start_can_be_given_in_several_ways():
    begin = start()
    samples = Samples(X, gradient=G)
    paths = [
        simulate(Block("exp", "tanh"), samples, 0.2, initial=given)
        for given in (begin, tuple(begin), (begin.v, begin.z[0], begin.bias[0]))
    ]
    for path in paths[1:]:
        np.testing.assert_array_equal(path.v, paths[0].v)


def test_drift_counts_from_the_start_and_in_units_of_the_law():
    samples = Samples(X, gradient=G)
    path = simulate(Block("exp", "tanh"), samples, 0.64, initial=start(), descent_step=0.02)
    assert invariants.drift(path) > 1e-5
    grown = simulate(
        Block("linear"), Samples(X, gradient=np.ones(24)), 40.0, initial=([[0.0]] * 5, np.ones(5))
    )
    assert np.max(np.abs(grown.z)) > 1e3
    assert invariants.drift(grown) < 1e-9


def test_from_zero_linear_attention_rests():
    path = simulate(Block("linear"), Samples(X, gradient=G), [0.0, 5.0])
    assert np.all(path.v == 0)


def test_shapes():
    one = simulate(Block(), Samples(X, gradient=G[:, 0]), [0.0, 0.1])
    assert one.v.shape == (2, 5, 1)
    assert one.z.shape == (2, 5)
    many = simulate(Block(), Samples(X, gradient=G, query=QUERY), 0.1)
    assert many.v.shape == (1, 5, 3)
    assert many.z.shape == (1, 3, 5)
    assert many.bias.shape == (1, 3, 3)


def test_softmax_estimate_tracks_the_logits():
    path = simulate(Block("softmax"), Samples(X, gradient=G + 1), [0.0, 1.0], initial=start())
    estimate = invariants.softmax_logits(path.block, path.v, X.mean(axis=0))
    gain = invariants.correlation(estimate[1] - estimate[0], path.z[1] - path.z[0], centered=True)
    assert gain > 0.8


def test_superposed_patterns_stay_silent_without_their_tokens():
    eye = np.eye(6)
    w = embeddings.superposed([eye[0], eye[1]], [eye[4], eye[5]], [-0.5, -0.7])
    assert w @ (eye[0] + eye[4]) == pytest.approx(0.5)
    assert w @ eye[4] < 0
    rejects("queries", lambda: embeddings.superposed([eye[0]], [eye[4], eye[5]], [-0.5]))


def test_weights_outside_the_range_of_the_embeddings_are_refused():
    """Two tokens of the same embedding have the same v; no weights give them two."""
    columns = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    block, samples = Block("exp", "tanh", embeddings=columns), Samples(X[:, :2], gradient=G[:, :1])
    same = ([[0.3], [0.3]], [[0.1, 0.2]], [[0.5]])
    path = simulate(block, samples, [0.0, 0.2], initial=same)
    np.testing.assert_allclose(path.v[:, 0], path.v[:, 1], atol=1e-14)
    rejects(
        "initial",
        lambda: simulate(block, samples, 0.2, initial=([[0.3], [0.4]], [[0.1, 0.2]], [[0.5]])),
    )


def embedded(queries: int, seed: int = 5) -> tuple[np.ndarray, State]:
    """Five tokens in three dimensions, queries in others, and weights."""
    rng = np.random.default_rng(seed)
    columns = np.zeros((3 + queries, 5 + queries))
    columns[:3, :5], columns[3:, 5:] = rng.normal(size=(3, 5)), rng.normal(size=(queries, queries))
    w = 0.3 * rng.normal(size=(3 + queries, 3))
    z = 0.5 + 0.3 * rng.normal(size=(queries, 5))
    return columns, State(columns[:, :5].T @ w, z, columns[:, 5:].T @ w)


def test_the_total_law_is_the_sum_of_the_tokens_laws_for_orthonormal_embeddings():
    block = Block("exp", "tanh", eta_w=0.6, eta_z=1.4, tau=0.7)
    path = simulate(block, Samples(X, gradient=G), [0.0, 0.4], initial=start())
    tokens = invariants.conserved_pointwise(block, path.v, path.z)
    total = invariants.conserved_total(block, path.v, path.z)
    np.testing.assert_allclose(total[:, 0], tokens.sum(axis=1), atol=1e-14)
    each = invariants.conserved_total(block, path.v, path.z, groups=np.arange(5))
    np.testing.assert_allclose(each, tokens, atol=1e-14)


def test_the_total_law_names_what_it_cannot_take():
    columns, begin = embedded(1)
    block = Block("exp", embeddings=columns)
    v, z = begin.v[None], begin.z
    rejects("groups", lambda: invariants.conserved_total(block, v, z, groups=[0, 0, 1, 1, 1]))
    rejects("groups", lambda: invariants.conserved_total(block, v, z, groups=[0, 1]))
    rejects("v", lambda: invariants.conserved_total(block, v + np.eye(5, 3), z))
    along = columns + 0.1
    rejects("embeddings", lambda: invariants.conserved_total(Block(embeddings=along), v, z))
    rejects("block", lambda: invariants.conserved_total(Block("softmax"), v, z))


def test_coherence_alone_does_not_set_the_drift():
    """At the same ε, one pair of tokens that overlaps, or all of them."""
    eps, drifts = 1e-3, []
    for gram in (np.eye(6), np.full((6, 6), eps) + (1 - eps) * np.eye(6)):
        if not drifts:
            gram[0, 1] = gram[1, 0] = eps
        columns = np.asarray(np.linalg.cholesky(gram).T, dtype=np.float64)
        assert embeddings.coherence(columns) == pytest.approx(eps)
        block = Block("exp", "tanh", embeddings=columns)
        path = simulate(block, Samples(X, gradient=G), [0.0, 0.4], initial=start())
        drifts.append(invariants.drift(path))
    assert drifts[1] > 3 * drifts[0] > 0


def test_softmax_with_memory_is_exact_for_alike_samples_and_bounded_for_others():
    block = Block("softmax", "tanh", eta_w=0.6, eta_z=1.4, tau=0.7)
    t = np.linspace(0, 6, 601)
    for x, alike in ((np.tile(X[0], (24, 1)), True), (X, False)):
        samples = Samples(x, gradient=G + 1)
        path = simulate(block, samples, t, initial=start())
        gap = np.linalg.norm(memory.logits(block, samples, path.v, path.z[0]) - path.z, axis=1)
        assert np.max(np.abs(path.z - path.z[0])) > 0.4
        if alike:
            assert np.max(gap) < 1e-4
        else:
            bound = memory.gap_bound(path)
            assert np.all(gap <= bound + 1e-4)
            assert np.max(gap) > 1e-2
            assert gap[5] == pytest.approx(bound[5], rel=0.05), "attained on short paths"


def test_eqn_18_is_far_off_in_size_where_memory_is_not():
    """Fig. 2's block: Eqn 18 has the direction of z, and seven times its length."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 0.5, size=(20, 20))
    x[:, :10] = np.exp(-((np.arange(10) - np.arange(20)[:, None] / 2) ** 2) / 30)
    samples = Samples(x / x.sum(axis=1, keepdims=True), labels=np.arange(20))
    small = (0.01 * rng.normal(size=shape) for shape in ((20, 20), (1, 20), (1, 20)))
    block = Block("softmax", "linear", tau=0.5)
    path = simulate(block, samples, np.arange(201), initial=State(*small), descent_step=0.1)
    eqn_18 = invariants.softmax_logits(block, path.v, np.asarray(samples.x).mean(axis=0))
    remembered = memory.logits(path.block, path.samples, path.v, path.z[0])
    moved = np.linalg.norm(path.z[-1] - path.z[0])
    assert np.linalg.norm(eqn_18[-1] - eqn_18[0]) > 5 * moved
    assert np.linalg.norm(remembered[-1] - path.z[-1]) < 0.1 * moved


def test_patterns_that_share_tokens_disturb_each_other():
    eye = np.eye(4)
    w = embeddings.superposed([eye[0] + eye[1], eye[0] - eye[1]], eye[2:], [-0.5, -0.5])
    assert w @ (eye[0] + eye[2]) == pytest.approx(1.5)  # alone it would be .5
    both = eye[0] + eye[1]
    assert w @ (both + eye[2]) == pytest.approx(1.5), "the pattern itself is recognised"


def test_saturated_tanh_keeps_its_slope():
    slope = ACTIVATIONS["tanh"]().derivative(np.array([25.0]))[0]
    assert slope == pytest.approx(4 * np.exp(-50.0), rel=1e-12)


def test_assumption_1_holds_for_given_gradients_and_drifts_under_cross_entropy():
    block = Block("softmax", "tanh", eta_w=0.6, eta_z=1.4, tau=0.7)
    given = simulate(block, Samples(X, gradient=G), [0.0, 1.0], initial=start())
    np.testing.assert_array_equal(stationarity.drift(given), 0.0)
    assert np.all(stationarity.rate(block, given.samples, start()) == 0)
    samples, t = Samples(X, labels=LABELS), np.linspace(0, 4, 81)
    path = simulate(block, samples, t, initial=start())
    drift = stationarity.drift(path)
    assert drift[0] == 0
    assert drift[-1] > 0.1
    states = [State(v, z[None], b) for v, z, b in zip(path.v, path.z, path.bias, strict=True)]
    means = [stationarity.gradient_means(block, samples, state) for state in states]
    rates = [stationarity.rate(block, samples, state) for state in states]
    moved = integrate.simpson(np.array(rates), x=t, axis=0)
    np.testing.assert_allclose(moved, means[-1] - means[0], atol=1e-7)

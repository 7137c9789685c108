import numpy as np
import pytest

from joma.theory import block as room
from joma.theory import embeddings, invariants, spectra
from joma.theory.block import Block, Samples, State, simulate
from joma.theory.functions import Activation, Attention, leaky_relu
from tests.theory._bad import rejects

RNG = np.random.default_rng(0)
X = RNG.dirichlet(np.ones(5), size=24)
G = RNG.normal(size=(24, 3))
QUERY = np.arange(24) % 3
LABELS = np.arange(24) % 3
POINTWISE = ["linear", "exp", "sigmoid"]
SMOOTH = ["linear", "tanh", "softplus"]


def start(queries: int = 1) -> State:
    rng = np.random.default_rng(1)
    return State(
        0.3 * rng.normal(size=(5, 3)),
        0.5 + 0.3 * rng.normal(size=(queries, 5)),
        0.1 * rng.normal(size=(queries, 3)),
    )


@pytest.mark.parametrize("attention", [*POINTWISE, "softmax"])
@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.parametrize("queries", [1, 3])
def test_conserved_at_any_rates(attention, activation, queries):
    block = Block(attention, activation, eta_w=0.6, eta_z=1.4, tau=0.7)
    samples = Samples(X, gradient=G, query=None if queries == 1 else QUERY)
    path = simulate(block, samples, np.linspace(0, 0.4, 4), initial=start(queries))
    assert invariants.drift(path) <= 1e-9
    assert np.max(np.abs(path.v[-1] - path.v[0])) > 1e-3


@pytest.mark.parametrize("attention", [*POINTWISE, "softmax"])
def test_conserved_under_cross_entropy(attention):
    block = Block(attention, "tanh", eta_w=0.6, eta_z=1.4, tau=0.7)
    path = simulate(block, Samples(X, labels=LABELS), [0.0, 1.0], initial=start())
    assert invariants.drift(path) <= 1e-9


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


def test_descent_drifts_in_proportion_to_the_step():
    samples = Samples(X, gradient=G)
    drifts = [
        invariants.drift(
            simulate(Block("exp", "relu"), samples, [0, 0.64], initial=start(), descent_step=h)
        )
        for h in (0.02, 0.01, 0.005)
    ]
    np.testing.assert_allclose(np.divide(drifts[:-1], drifts[1:]), 2, rtol=0.02)


def test_descent_keeps_whole_steps_and_says_when():
    path = simulate(Block(), Samples(X, gradient=G), [0.0, 0.1, 0.26], descent_step=0.1)
    np.testing.assert_allclose(path.t, [0, 0.1, 0.3])
    np.testing.assert_allclose(path.v[1], 0.1 * X.T @ G / 24)


def test_velocity_is_the_gradient_with_labels_and_probabilities():
    share = np.random.default_rng(2).dirichlet(np.ones(24))
    samples = Samples(X, labels=LABELS, query=QUERY, probability=share)
    block, state = Block("softmax", "tanh", tau=0.6), start(3)
    rate = room.velocity(block, samples, state)
    step = 1e-6
    for part in range(3):
        direction = np.random.default_rng(part).normal(size=state[part].shape)
        ahead, back = (
            room.objective(
                block,
                samples,
                State(*(a + s * direction if i == part else a for i, a in enumerate(state))),
            )
            for s in (step, -step)
        )
        slope = np.sum(np.asarray(rate[part]) * direction)
        assert slope == pytest.approx((ahead - back) / (2 * step), abs=1e-8)


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
        for given in (begin, tuple(begin), begin._asdict(), (begin.v, begin.z[0], begin.bias[0]))
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


def test_stable_rank():
    assert spectra.stable_rank(np.diag([2.0, 1.0])) == pytest.approx(1.25)
    assert spectra.stable_rank(np.zeros((2, 2))) == 0
    assert np.all(spectra.rank(np.stack([np.eye(3), np.diag([1, 1, 0])])) == [3, 2])
    rejects("matrix", lambda: spectra.stable_rank([1.0, 2.0]))


def test_superposed_patterns_stay_silent_without_their_tokens():
    eye = np.eye(6)
    w = embeddings.superposed([eye[0], eye[1]], [eye[4], eye[5]], [-0.5, -0.7])
    assert w @ (eye[0] + eye[4]) == pytest.approx(0.5)
    assert w @ eye[4] < 0
    rejects("queries", lambda: embeddings.superposed([eye[0]], [eye[4], eye[5]], [-0.5]))


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("attention", lambda: Block("cosine")),
        ("activation", lambda: Block("exp", "gelu")),
        ("eta_w", lambda: Block(eta_w=0.0)),
        ("eta_z", lambda: Block(eta_z=np.nan)),
        ("tau", lambda: Block(tau=-1.0)),
        ("embeddings", lambda: Block(embeddings=np.ones(3))),
        ("x", lambda: Samples([[-0.1, 1.1]], gradient=[1.0])),
        ("x", lambda: Samples([0.1, 0.9], gradient=[1.0])),
        ("x", lambda: Samples(np.zeros((0, 3)), gradient=np.zeros(0))),
        ("gradient", lambda: Samples(X)),
        ("gradient", lambda: Samples(X, gradient=G, labels=LABELS)),
        ("gradient", lambda: Samples(X, gradient=G[:5])),
        ("labels", lambda: Samples(X, labels=LABELS - 1)),
        ("labels", lambda: Samples(X, labels=[0])),
        ("query", lambda: Samples(X, gradient=G, query=QUERY + 0.5)),
        ("probability", lambda: Samples(X, gradient=G, probability=np.ones(24))),
        ("classes", lambda: Samples(X, labels=LABELS, classes=2)),
        ("attention", lambda: Block(np.exp)),  # pyright: ignore[reportArgumentType]
        ("activation", lambda: Block("exp", None)),  # pyright: ignore[reportArgumentType]
        ("block", lambda: simulate(None, Samples(X, gradient=G), 1)),  # pyright: ignore[reportArgumentType]
        ("samples", lambda: simulate(Block(), X, 1)),  # pyright: ignore[reportArgumentType]
        ("trajectory", lambda: invariants.drift(None)),  # pyright: ignore[reportArgumentType]
        ("initial", lambda: simulate(Block(), Samples(X, gradient=G), 1, initial=(X[0],))),
        ("initial", lambda: simulate(Block(), Samples(X, gradient=G), 1, initial={"w": [1.0]})),
        ("block", lambda: invariants.conserved_pointwise(Block("softmax"), [[[1.0]]], [[1.0]])),
        ("v", lambda: invariants.softmax_logits(Block("softmax"), [1.0], [1.0])),
        ("initial", lambda: simulate(Block(), Samples(X, gradient=G), 1, initial=0.1)),  # pyright: ignore[reportArgumentType]
        (
            "t",
            lambda: simulate(
                Block("exp", "relu"), Samples(X, gradient=G + 5), 99.0, initial=start()
            ),
        ),
        ("t", lambda: simulate(Block(), Samples(X, gradient=[9.0] * 24), 99.0, descent_step=1)),
        ("x", lambda: simulate(Block("softmax"), Samples([[0.0, 0.0]], gradient=[1.0]), 1.0)),
        (
            "descent_step",
            lambda: simulate(Block(), Samples(X, gradient=G), [0, 0.5, 1], descent_step=10),
        ),
        ("t", lambda: simulate(Block(), Samples(X, gradient=G), [0.2, 0.1])),
        ("t", lambda: simulate(Block(), Samples(X, gradient=G), -1.0)),
        ("t", lambda: simulate(Block(), Samples(X, gradient=[5.0] * 24), 99.0)),
        ("initial v", lambda: simulate(Block(), Samples(X, gradient=G), 1, initial=([1], [1]))),
        ("descent_step", lambda: simulate(Block(), Samples(X, gradient=G), 1, descent_step=0)),
        (
            "embeddings",
            lambda: simulate(Block(embeddings=np.eye(5)), Samples(X, gradient=G), 0.1),
        ),
    ],
)
def test_bad_input_is_named(argument, call):
    rejects(argument, call)

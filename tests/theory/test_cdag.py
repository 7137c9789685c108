import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import as_printed, cdag
from joma.theory.cdag import CDAG, LINEAR, RELU, SIGMOID, TANH

few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)
angles = st.floats(0, np.pi / 2)


def tree_data(samples: int, rho: float, rng: np.random.Generator):
    """A binary latent tree of four levels, ±1 per node: latents (15, N) from the root down."""
    levels = [rng.choice([-1.0, 1.0], (samples, 1))]
    for _ in range(3):
        parents = np.repeat(levels[-1], 2, axis=1)
        levels.append(parents * np.where(rng.random(parents.shape) < (1 + rho) / 2, 1, -1))
    return levels[-1], levels[0], np.concatenate(levels, axis=1).T


def measured(network: CDAG, x, label, latents):
    activations = network.forward(x)
    gradients = network.backward(activations, label - activations.values[:, network.outputs])
    centred = latents - latents.mean(axis=1, keepdims=True)
    return cdag.edge_correlations(network, activations, gradients, centred)


def test_a_diamond_with_a_residual_edge_by_hand():
    # 0 → 1 (weight 2, tanh), 0 → 2 (weight −1, linear), 1, 2 → 3 (weights .5, 3), 0 ⇒ 3 residual.
    weights = np.zeros((4, 4))
    weights[1, 0], weights[2, 0], weights[3, 1], weights[3, 2], weights[3, 0] = 2, -1, 0.5, 3, 1
    residual = np.zeros((4, 4), bool)
    residual[3, 0] = True
    network = CDAG(1, (TANH, LINEAR, LINEAR), weights, (weights != 0) & ~residual, residual)
    activations = network.forward([[0.3]])
    out = 0.5 * np.tanh(0.6) + 3 * -0.3 + 0.3
    assert activations.values[0] == pytest.approx([0.3, np.tanh(0.6), -0.3, out])
    gradients = network.backward(activations, [[2.0]])
    slope = 1 - np.tanh(0.6) ** 2
    assert gradients.nodes[0] == pytest.approx([2 * (0.5 * slope * 2 - 3 + 1), 1, 6, 2])
    assert gradients.weights[1, 0] == pytest.approx(slope * 1 * 0.3)
    assert gradients.weights[3, 0] == 0, "a residual edge is not trained"
    assert network.outputs.tolist() == [3]
    assert network.edges.tolist() == [[1, 0], [2, 0], [3, 0], [3, 1], [3, 2]]


@few
@given(seeds)
def test_a_nodes_gradient_is_the_sum_over_its_edges(seed):
    rng = np.random.default_rng(seed)
    network = CDAG.layered((3, 3, 2, 3, 1), (RELU, TANH, SIGMOID, LINEAR), rng)
    gradients = network.backward(network.forward(rng.standard_normal((7, 3))), np.ones((7, 1)))
    arriving = np.zeros((7, network.nodes))
    for (_, k), edge in zip(network.edges, gradients.edges, strict=True):
        arriving[:, k] += edge
    arriving[:, network.outputs] += 1
    assert arriving == pytest.approx(gradients.nodes)


def test_training_lowers_the_error_and_keeps_residual_edges():
    rng = np.random.default_rng(1)
    x, label, _ = tree_data(200, 0.9, rng)
    network = CDAG.layered((8, 4, 4, 1), (TANH, TANH, LINEAR), rng, scale=0.3)
    trained = network.train(x, lambda out: label - out, step=0.05, steps=100)

    def error(net: CDAG) -> float:
        return float(np.mean((label - net.forward(x).values[:, net.outputs]) ** 2))

    assert error(trained) < 0.3 * error(network)
    assert np.any(network.residual)
    assert np.all(trained.weights[network.residual] == 1)
    assert np.all(trained.weights[~(network.trained | network.residual)] == 0)


def test_norms_scale_the_bound():
    rng = np.random.default_rng(3)
    cases = cdag.random_cases(500, 3, 0.3, rng)
    lengths = rng.uniform(0.5, 2, (3, cases.f.shape[0]))
    long = cdag.Cases(
        cases.z_alpha,
        lengths[0][:, None] * cases.z_beta,
        lengths[1][:, None] * cases.f,
        lengths[2][:, None] * cases.delta,
    )
    scale = lengths[0] * lengths[1] * lengths[2] ** 2
    assert long.correlation == pytest.approx(scale * cases.correlation)
    assert np.all(long.correlation >= scale * cdag.correlation_bound(*long.angles) - 1e-9)


@pytest.mark.parametrize("dimension", [2, 3, 5, 16])
def test_printed_theorem_1_has_many_counterexamples(dimension):
    cases, failed = cdag.counterexamples(40_000, dimension, 0.1, 0)
    assert failed.size > 1000
    assert 0.2 < failed.mean() < 0.45
    assert np.all(as_printed.correlation_bound(*cases.angles) == 0)
    total = np.sum(cases.angles, axis=0)
    assert not np.any(failed & (total < np.pi / 2))


def test_a_quarter_of_the_cases_in_the_plane_are_counterexamples_at_threshold_zero():
    # There ∠(z_β, σ′g) is uniform on the circle and f_k lies b from z_β, b uniform on ±π/2: the
    # two cosines differ in sign with probability E|b|/π = 1/4.
    _, failed = cdag.counterexamples(200_000, 2, 0.0, 5)
    assert failed.mean() == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / failed.size))


def test_relu_turns_the_recursion_step_around():
    z, f, g = np.ones(2), np.array([1.0, 0.0]), np.array([-1.0, 2.0])
    slope = RELU.derivative(f)
    assert cdag.corr(z, f) > 0
    assert cdag.corr(z, g) > 0
    assert cdag.corr(z, slope * g) == -1
    assert cdag.recursion_bound(z, g, 0.0, 1.0) == -1
    assert as_printed.recursion_bound(z, g, 0.0, 1.0) == 0


def test_eqn_3_is_right_for_balanced_classes_up_to_scale_and_for_unit_gradients():
    rng = np.random.default_rng(0)
    w, x_plus, x_minus = rng.standard_normal((3, 4))
    balanced = np.repeat([1.0, 0.0], 50)
    rest = (w, x_plus, x_minus, balanced, balanced - 0.5, SIGMOID)
    assert cdag.label_flow(*rest) == pytest.approx(0.5 * as_printed.label_flow(*rest))
    rare = np.repeat([1.0, 0.0], [10, 90])
    unit = (w, x_plus, x_minus, rare, 2 * rare - 1, SIGMOID)
    assert cdag.two_value_flow(*unit) == pytest.approx(as_printed.label_flow(*unit))
    centred = (w, x_plus, x_minus, rare, rare - rare.mean(), SIGMOID)
    flow, printed = cdag.label_flow(*centred), as_printed.label_flow(*centred)
    assert flow == pytest.approx(cdag.two_value_flow(*centred))
    cosine = flow @ printed / np.linalg.norm(flow) / np.linalg.norm(printed)
    assert cosine < 0.95, "not even the direction agrees for a rare class"


@pytest.mark.parametrize("seed", range(5))
def test_trained_network_meets_the_condition_mostly_before_the_label_is_learned(seed):
    rng = np.random.default_rng(seed)
    x, label, latents = tree_data(256, 0.9, rng)
    network = CDAG.layered((8, 8, 4, 1), (TANH, TANH, LINEAR), rng, scale=0.3)
    before = measured(network, x, label, latents)
    network = network.train(x, lambda out: label - out, step=0.05, steps=100)
    after = measured(network, x, label, latents)
    for found in (before, after):
        bound = cdag.correlation_bound(*found.angles)
        assert np.all(found.gradient_rule >= bound - 1e-9)
        assert np.all(found.gradient_rule[found.condition] > 0)
    assert 0.01 < before.condition.mean() < 0.3
    assert after.condition.mean() < 0.004
    # The weights themselves are not their gradients: at the start their signs are random.
    assert 1 / 3 < np.mean(before.actual[before.condition] > 0) < 2 / 3


def test_dead_edges_are_left_out():
    rng = np.random.default_rng(0)
    network = CDAG.layered((2, 2, 1), (RELU, LINEAR), rng, residual=False)
    weights = network.weights.copy()
    weights[2] = [-1, -1, 0, 0, 0]
    dead = CDAG(2, network.nonlinearities, weights, network.trained, network.residual)
    x = rng.uniform(0.1, 1, (30, 2))
    found = measured(dead, x, np.ones((30, 1)), rng.choice([-1.0, 1.0], (3, 30)))
    # Both edges into the dead node and the one out of it are gone.
    assert found.actual.shape == (3, 3, 3)


@pytest.mark.parametrize("nonlinearity", [LINEAR, RELU, cdag.LEAKY_RELU, TANH, SIGMOID])
def test_slopes_are_derivatives(nonlinearity):
    u = np.array([-800.0, -3.1, -0.4, 0.2, 1.7, 800.0])
    difference = (nonlinearity.value(u + 1e-6) - nonlinearity.value(u - 1e-6)) / 2e-6
    assert nonlinearity.derivative(u) == pytest.approx(difference, abs=1e-7)


def test_beyond_a_right_angle_the_bound_is_negative_for_acute_angles_alone():
    assert cdag.correlation_bound(np.pi, 0.0, 0.0) == pytest.approx(1)
    assert cdag.correlation_bound(3.0, 0.1, 0.1) > 0.9
    rng = np.random.default_rng(0)
    angles = rng.uniform(0.01, np.pi / 2 - 0.01, (3, 4000))
    beyond = angles[:, angles.sum(axis=0) > np.pi / 2]
    assert np.all(cdag.correlation_bound(*beyond) < 0)


def test_the_recursion_bound_is_not_attained_where_no_gradient_is_negative():
    z, g = np.array([1.0, 1.0, -1.0]), np.array([1.0, 2.0, 0.5])
    patterns = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, -1).T * 1.0
    pre = patterns * np.where(patterns * z > 0, 1.0, 1e-3)
    allowed = cdag.corr(cdag.LEAKY_RELU.value(pre), z) > 0
    least = np.min(cdag.corr(z, cdag.LEAKY_RELU.derivative(pre[allowed]) * g))
    assert least > cdag.recursion_bound(z, g, 0.1, 1.0) + 0.1

"""The CDAG note: backpropagated gradients, Theorem 1 and its recursion, Eqns 2 and 3."""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from joma.common.types import Array
from joma.experiments.claims.claim import (
    ClaimMeasurement,
    Formula,
    Generator,
    claim,
    difference,
    measured,
    without,
)
from joma.theory import as_printed, cdag
from joma.theory.cdag import LEAKY_RELU, corr, recursion_bound
from joma.theory.functions import Activation
from joma.theory.hblt import Tree


def _backward(
    network: cdag.CDAG, activations: cdag.Activations, output_gradient: Array
) -> cdag.Gradients:
    return network.backward(activations, output_gradient)


@claim("cdag-backward", _backward)
def _finite_differences(formula: Formula, rng: Generator) -> ClaimMeasurement:
    network = cdag.CDAG.layered(
        (3, 4, 3, 2), (cdag.TANH, cdag.SIGMOID, cdag.LINEAR), rng, scale=1.5
    )
    x, output_gradient = rng.standard_normal((20, 3)), rng.standard_normal((20, 2))

    def objective(weights: Array, inputs: Array) -> float:
        # Eqn 1 written once more, so that the reference shares no code with the formula.
        f = list(inputs.T)
        for j, sigma in enumerate(network.nonlinearities, start=network.inputs):
            f.append(sigma.value(np.einsum("k,kn->n", weights[j, :j], np.stack(f))))
        return float(np.sum(output_gradient * np.stack(f[-2:], axis=1)))

    def derivative(at: Array, index: tuple[int, ...], value: Callable[[Array], float]) -> float:
        step = np.zeros_like(at)
        step[index] = 1e-5
        return (value(at + step) - value(at - step)) / 2e-5

    gradients = formula(network, network.forward(x), output_gradient)
    by_weight = [
        derivative(network.weights, (j, k), lambda weights: objective(weights, x))
        - gradients.weights[j, k]
        for j, k in np.argwhere(network.trained)
    ]
    by_input = [
        derivative(x, (i, k), lambda inputs: objective(network.weights, inputs))
        - gradients.nodes[i, k]
        for i, k in product(range(5), range(3))
    ]
    arriving = np.zeros_like(gradients.nodes)
    for (_, k), edge in zip(network.edges, gradients.edges, strict=True):
        arriving[:, k] += edge
    arriving[:, network.outputs] += output_gradient
    error = np.max(np.abs([*by_weight, *by_input]))
    return ClaimMeasurement(
        max(float(error), float(np.abs(arriving - gradients.nodes).max())), 1e-7
    )


def small_angle_bound(theta_1: Array, theta_2: Array, theta_3: Array) -> Array:
    """Theorem 1, derived, as a product: the least corr(z_β, g_{j→k}) of unit signals."""
    return np.cos(theta_1 + theta_2 + theta_3) * np.cos(theta_1 + theta_3)


@claim(
    "cdag-theorem-1",
    cdag.correlation_bound,
    printed=as_printed.correlation_bound,
    gradient_rule=True,
)
@without("cdag-theorem-1", gradient_rule=False)
def _random_signals(formula: Formula, rng: Generator, *, gradient_rule: bool) -> ClaimMeasurement:
    """The share of signals that break the bound, and of small angles at which it says nothing."""
    failed = total = 0
    for dimension in (2, 3, 4, 5):
        cases = cdag.random_cases(20_000, dimension, 0.1, rng)
        bound = formula(*cases.angles)
        weight = cdag.corr(cases.f, cases.delta)
        if not gradient_rule:
            weight = rng.choice([-1.0, 1.0], weight.shape)
        # In the plane the bound is often attained, up to rounding of arccos near 0.
        failed += int(np.sum(weight * cdag.corr(cases.z_beta, cases.delta) < bound - 1e-9))
        total += bound.size
    small = (rng.dirichlet(np.ones(4), 50) * np.pi / 2).T[:3]
    return ClaimMeasurement(failed / total + float(np.mean(formula(*small) < 0)), 0.0)


def components(theta_1: float, theta_3: float, azimuths: Array) -> tuple[Array, Array]:
    """The components of σ′g along z_β and across it; it lies θ₁ from z_α, in every direction."""
    up = np.cos(theta_1) * np.cos(theta_3)
    up = up - np.sin(theta_1) * np.sin(theta_3) * np.cos(azimuths)
    return up, np.sqrt(np.maximum(1 - up**2, 0))


def _least_correlation(theta_1: float, theta_2: float, theta_3: float) -> float:
    """The least corr(z_β, g_{j→k}) over all arrangements of four unit vectors, on a grid."""
    azimuths = np.linspace(0, np.pi, 721)
    up, aside = components(theta_1, theta_3, azimuths)
    with_f = np.cos(theta_2) * up[:, None]
    with_f = with_f + np.sin(theta_2) * aside[:, None] * np.cos(azimuths)
    return float(np.min(up[:, None] * with_f))


@claim("cdag-theorem-1-angles", small_angle_bound, within=True)
@without("cdag-theorem-1-angles", within=False)
def _small_angles(formula: Formula, rng: Generator, *, within: bool) -> ClaimMeasurement:
    shares = rng.dirichlet(np.ones(3), 20)
    # Where the angles' sum stays below a right angle, or from there to three of them.
    low, high = (0.0, np.pi / 2) if within else (np.pi / 2, 3 * np.pi / 2)
    cases = shares * rng.uniform(low, high, (20, 1))
    return measured([abs(_least_correlation(*one) - float(formula(*one))) for one in cases], 1e-9)


@without("cdag-theorem-1-input")
def _near_an_input(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The same where f_k is only correlated with z_β."""
    z_beta, g, other = rng.standard_normal((3, 50))
    return at_an_input_of(formula, z_beta, g, z_beta + other)


@claim("cdag-theorem-1-input", lambda z_beta, delta: cdag.corr(z_beta, delta) ** 2)
def _at_an_input(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """A node of one input, which is the latent itself, through its backward pass."""
    z_beta, g = rng.standard_normal((2, 50))
    return at_an_input_of(formula, z_beta, g, z_beta)


def at_an_input_of(formula: Formula, z_beta: Array, g: Array, f: Array) -> ClaimMeasurement:
    """Compare a formula with a node of one input, through its backward pass."""
    weights = np.array([[0.0, 0.0], [0.0, 0.0]])
    node = cdag.CDAG(
        1, (cdag.LINEAR,), weights, np.eye(2, k=-1, dtype=bool), np.zeros((2, 2), bool)
    )
    gradients = node.backward(node.forward(f[:, None]), g[:, None])
    # The gradient rule: the weight is its own gradient.
    arriving = gradients.weights[1, 0] * gradients.deltas[:, 1]
    size = float(np.sum(np.abs(z_beta * g))) ** 2 + 1e-300
    return measured(abs(z_beta @ arriving - formula(z_beta, g)) / size, 1e-12)


@claim(
    "cdag-theorem-1-tight",
    cdag.correlation_bound,
)
def _least_arrangement(formula: Formula, rng: Generator) -> ClaimMeasurement:
    cases = rng.uniform(0, np.pi, (40, 3))
    return measured([abs(_least_correlation(*one) - float(formula(*one))) for one in cases], 1e-4)


_PATTERNS = {n: np.array(list(product((-1.0, 1.0), repeat=n))) for n in range(1, 9)}


def least_of_patterns(z: Array, g: Array) -> float:
    """The least corr(z_β, σ′_k g_k) over all patterns of a leaky ReLU with corr(z_β, f_k) > 0."""
    patterns = _PATTERNS[len(z)]
    # Large where it helps corr(z_β, f_k) > 0 and small where it hurts: any pattern that can
    # satisfy the premise does.
    pre_activation = patterns * np.where(patterns * z > 0, 1.0, 1e-3)
    allowed = corr(LEAKY_RELU.value(pre_activation), z) > 0
    return float(np.min(corr(z, LEAKY_RELU.derivative(pre_activation[allowed]) * g)))


@claim("cdag-recursion-attained", recursion_bound, attained=True)
@claim("cdag-recursion", recursion_bound, attained=False)
@without("cdag-recursion-attained", attained=True, negative=False)
def _slope_patterns(
    formula: Formula, rng: Generator, *, attained: bool, negative: bool = True
) -> ClaimMeasurement:
    errors = [0.0]
    for _ in range(20):
        z = rng.choice([-1.0, 1.0], 8)
        g = rng.standard_normal(8)
        # Were g nowhere negative, the worst pattern would contradict corr(z_β, f_k) > 0.
        g = np.where(np.arange(8) == 0, -np.abs(g), g) if negative else np.abs(g)
        if corr(z, g) <= 0:
            z = -z
        excess = float(formula(z, g, 0.1, 1.0)) - least_of_patterns(z, g)
        errors.append(abs(excess) if attained else excess)
    return measured(errors, 1e-12)


def _two_values(
    formula: Formula, rng: Generator, *, centred: bool
) -> Iterator[tuple[Array, Array]]:
    """ẇ_j of one node by its backward pass over a dataset and by a formula, P[z_α = 1] = .2."""
    for nonlinearity in (cdag.LINEAR, cdag.RELU, cdag.TANH, cdag.SIGMOID):
        signals = rng.standard_normal((3, 5))
        z = (rng.random(400) < 0.2) * 1.0
        g = z - 0.1 * rng.standard_normal(400)
        if centred:
            g -= g.mean()
        yield _two_values_of(formula, signals, z, g, nonlinearity)


def _two_values_of(
    formula: Formula, signals: Array, z: np.ndarray, g: Array, nonlinearity: Activation
) -> tuple[Array, Array]:
    w, x_plus, x_minus = signals
    n = len(w)
    x = np.where(z[:, None] == 1, x_plus, x_minus)
    weights, trained = np.zeros((n + 1, n + 1)), np.zeros((n + 1, n + 1), bool)
    weights[n, :n], trained[n, :n] = w, True
    node = cdag.CDAG(n, (nonlinearity,), weights, trained, np.zeros((n + 1, n + 1), bool))
    gradients = node.backward(node.forward(x), g[:, None])
    own = gradients.weights[n, :n] / len(z)
    return own, formula(w, x_plus, x_minus, z, g, nonlinearity)


@claim(
    "cdag-eqn-3-centred",
    cdag.label_flow,
    centred=True,
)
@claim(
    "cdag-eqn-2",
    cdag.two_value_flow,
    centred=False,
)
@without("cdag-eqn-3-centred", centred=False)
def _flow(formula: Formula, rng: Generator, *, centred: bool) -> ClaimMeasurement:
    flows = _two_values(formula, rng, centred=centred)
    return measured([difference(a, b) for a, b in flows], 1e-12)


@claim(
    "cdag-eqn-3",
    cdag.label_flow,
    centred=True,
)
@without("cdag-eqn-3", centred=False)
def _direction(formula: Formula, rng: Generator, *, centred: bool) -> ClaimMeasurement:
    flows = _two_values(formula, rng, centred=centred)
    # A ReLU that is off for both values of the input has no direction.
    return measured([cdag.angle(a, b) for a, b in flows if np.any(a != 0)], 0.01)


def _trained_network(rng: Generator) -> Iterator[cdag.EdgeCorrelations]:
    """Theorem 1 in a network in training, after 10, 30 and 100 steps."""
    # The top latent is the class itself, and the leaves are the input.
    tree = Tree.regular(4, 2, 0.9, class_probs=[0.5, 0.5], child_off_probs=[1.0, 0.0])
    levels = [2.0 * level - 1.0 for level in tree.sample(256, rng)[1]]
    label, x = levels[0], levels[-1]
    latents = np.concatenate(levels, axis=1).T
    latents = latents - latents.mean(axis=1, keepdims=True)
    network = cdag.CDAG.layered((8, 8, 4, 1), (cdag.TANH, cdag.TANH, cdag.LINEAR), rng, scale=0.3)
    for steps in (10, 20, 70):
        network = network.train(x, lambda output: label - output, step=0.05, steps=steps)
        activations = network.forward(x)
        gradients = network.backward(activations, label - activations.values[:, network.outputs])
        yield cdag.edge_correlations(network, activations, gradients, latents)


@without("cdag-trained-network")
def _own_weights(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The share that breaks it with the network's w_jk, of the pairs whose bound is positive.

    There the bound is broken just where the sign of corr(z_β, g_{j→k}) is wrong: with the right
    sign the cosine of z_β and g_{j→k} is never below it.
    """
    broken = [
        (found.actual < formula(*found.angles) - 1e-9)[found.condition]
        for _ in range(4)
        for found in _trained_network(rng)
    ]
    return measured(np.mean(np.concatenate(broken)), 0.0)


@claim("cdag-trained-network", cdag.correlation_bound)
def _trained_edges(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The share of edges and latent pairs that break the bound, which some must come near."""
    gaps = [found.gradient_rule - formula(*found.angles) for found in _trained_network(rng)]
    broken = float(np.mean([gap < -1e-9 for gap in gaps]))
    nearest = max(float(np.min(gap)) for gap in gaps)
    return ClaimMeasurement(broken + (nearest if nearest > 0.01 else 0.0), 0.0)

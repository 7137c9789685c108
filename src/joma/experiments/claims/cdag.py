"""The CDAG note: backpropagated gradients, Theorem 1 and its recursion, Eqns 2 and 3."""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from joma.experiments.claims._claim import Claim, Formula, Measure, Measurement
from joma.theory.as_printed import cdag as _printed
from joma.theory.cdag import (
    CDAG,
    LEAKY_RELU,
    LINEAR,
    RELU,
    SIGMOID,
    TANH,
    Activations,
    EdgeCorrelations,
    Gradients,
    angle,
    corr,
    correlation_bound,
    edge_correlations,
    label_flow,
    random_cases,
    recursion_bound,
    two_value_flow,
)
from joma.theory.hblt import Tree

Array = np.ndarray


def _backward(network: CDAG, activations: Activations, output_gradient: Array) -> Gradients:
    return network.backward(activations, output_gradient)


def _finite_differences(formula: Formula, rng: np.random.Generator) -> Measurement:
    network = CDAG.layered((3, 4, 3, 2), (TANH, SIGMOID, LINEAR), rng, scale=1.5)
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
    return Measurement(max(float(error), float(np.abs(arriving - gradients.nodes).max())), 1e-7)


def small_angle_bound(theta_1: Array, theta_2: Array, theta_3: Array) -> Array:
    """Theorem 1, derived, as a product: the least corr(z_β, g_{j→k}) of unit signals."""
    return np.cos(theta_1 + theta_2 + theta_3) * np.cos(theta_1 + theta_3)


def _random_signals(gradient_rule: bool) -> Measure:
    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        failed = total = 0
        for dimension in (2, 3, 4, 5):
            cases = random_cases(20_000, dimension, 0.1, rng)
            bound = formula(*cases.angles)
            weight = corr(cases.f, cases.delta)
            if not gradient_rule:
                weight = rng.choice([-1.0, 1.0], weight.shape)
            # In the plane the bound is often attained, up to rounding of arccos near 0.
            failed += int(np.sum(weight * corr(cases.z_beta, cases.delta) < bound - 1e-9))
            total += bound.size
        return Measurement(failed / total, 0.0)

    return measure


def _least_correlation(theta_1: float, theta_2: float, theta_3: float) -> float:
    """The least corr(z_β, g_{j→k}) over all arrangements of four unit vectors, on a grid."""
    azimuths = np.linspace(0, np.pi, 721)
    # z_β points up; σ′g lies θ₁ from z_α, and f_k lies θ₂ from z_β, in every direction.
    up = np.cos(theta_1) * np.cos(theta_3)
    up = up - np.sin(theta_1) * np.sin(theta_3) * np.cos(azimuths)
    aside = np.sqrt(np.maximum(1 - up**2, 0))
    with_f = np.cos(theta_2) * up[:, None]
    with_f = with_f + np.sin(theta_2) * aside[:, None] * np.cos(azimuths)
    return float(np.min(up[:, None] * with_f))


def _least_arrangement(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    for angles in rng.uniform(0, np.pi / 2, (40, 3)):
        worst = max(worst, abs(_least_correlation(*angles) - float(formula(*angles))))
    return Measurement(worst, 1e-4)


def _small_angles(within: bool) -> Measure:
    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        shares = rng.dirichlet(np.ones(3), 20)
        # Where the angles' sum stays below a right angle, or from there to three of them.
        low, high = (0.0, np.pi / 2) if within else (np.pi / 2, 3 * np.pi / 2)
        cases = shares * rng.uniform(low, high, (20, 1))
        worst = 0.0
        for angles in cases:
            worst = max(worst, abs(_least_correlation(*angles) - float(formula(*angles))))
        return Measurement(worst, 1e-9)

    return measure


def _slope_patterns(attained: bool) -> Measure:
    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        patterns = np.array(list(product((-1.0, 1.0), repeat=8)))
        worst = 0.0
        for _ in range(20):
            z = rng.choice([-1.0, 1.0], 8)
            g = rng.standard_normal(8)
            # Were g nowhere negative, the worst pattern would contradict corr(z_β, f_k) > 0.
            g[0] = -abs(g[0])
            if corr(z, g) <= 0:
                z = -z
            # Large where it helps corr(z_β, f_k) > 0 and small where it hurts: any pattern that
            # can satisfy the premise does.
            pre_activation = patterns * np.where(patterns * z > 0, 1.0, 1e-3)
            allowed = corr(LEAKY_RELU.value(pre_activation), z) > 0
            least = np.min(corr(z, LEAKY_RELU.derivative(pre_activation[allowed]) * g))
            excess = float(formula(z, g, 0.1, 1.0)) - least
            worst = max(worst, abs(excess) if attained else excess)
        return Measurement(float(worst), 1e-12)

    return measure


def _two_values(
    formula: Formula, rng: np.random.Generator, *, centred: bool
) -> Iterator[tuple[Array, Array]]:
    """ẇ_j of one node by its backward pass over a dataset and by a formula, P[z_α = 1] = .2."""
    for nonlinearity in (LINEAR, RELU, TANH, SIGMOID):
        w, x_plus, x_minus = rng.standard_normal((3, 5))
        z = (rng.random(400) < 0.2) * 1.0
        g = z - 0.1 * rng.standard_normal(400)
        if centred:
            g -= g.mean()
        x = np.where(z[:, None] == 1, x_plus, x_minus)
        weights = np.zeros((6, 6))
        weights[5, :5] = w
        node = CDAG(5, (nonlinearity,), weights, weights != 0, np.zeros((6, 6), bool))
        gradients = node.backward(node.forward(x), g[:, None])
        yield gradients.weights[5, :5] / 400, formula(w, x_plus, x_minus, z, g, nonlinearity)


def _flow(centred: bool) -> Measure:
    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        flows = _two_values(formula, rng, centred=centred)
        return Measurement(max(float(np.abs(a - b).max()) for a, b in flows), 1e-12)

    return measure


def _direction(centred: bool) -> Measure:
    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        flows = _two_values(formula, rng, centred=centred)
        # A ReLU that is off for both values of the input has no direction.
        angles = [float(angle(a, b)) for a, b in flows if np.any(a != 0)]
        return Measurement(max(angles), 0.01)

    return measure


def _trained_network(rng: np.random.Generator) -> Iterator[EdgeCorrelations]:
    """Theorem 1 in a network before training, after 10 steps and after 100."""
    # The top latent is the class itself, and the leaves are the input.
    tree = Tree.regular(4, 2, 0.9, class_probs=[0.5, 0.5], child_off_probs=[1.0, 0.0])
    levels = [2.0 * level - 1.0 for level in tree.sample(256, rng)[1]]
    label, x = levels[0], levels[-1]
    latents = np.concatenate(levels, axis=1).T
    latents = latents - latents.mean(axis=1, keepdims=True)
    network = CDAG.layered((8, 8, 4, 1), (TANH, TANH, LINEAR), rng, scale=0.3)
    for steps in (0, 10, 90):
        network = network.train(x, lambda output: label - output, step=0.05, steps=steps)
        activations = network.forward(x)
        gradients = network.backward(activations, label - activations.values[:, network.outputs])
        yield edge_correlations(network, activations, gradients, latents)


def _trained_edges(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The share of edges and latent pairs that break the bound."""
    broken = [
        found.gradient_rule < formula(*found.angles) - 1e-9 for found in _trained_network(rng)
    ]
    return Measurement(float(np.mean(broken)), 0.0)


def _own_weights(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The share that breaks it with the network's w_jk, of the pairs whose bound is positive.

    There the bound is broken just where the sign of corr(z_β, g_{j→k}) is wrong: with the right
    sign the cosine of z_β and g_{j→k} is never below it.
    """
    broken = [
        (found.actual < formula(*found.angles) - 1e-9)[found.condition]
        for found in _trained_network(rng)
    ]
    return Measurement(float(np.mean(np.concatenate(broken))), 0.0)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="cdag-backward",
        title="g_{j→k} = σ′_j w_jk g_j and ẇ_jk = corr(f_k, σ′_j g_j), residual edges included",
        source="CDAG draft note, Eqn 1 and proof of Theorem 1",
        method="central finite differences",
        derived=_backward,
        measure=_finite_differences,
    ),
    Claim(
        id="cdag-theorem-1",
        title="corr(z_β, g_{j→k}) is at least what three angles allow: > 0 if θ₁+θ₂+θ₃ < π/2",
        source="CDAG draft note, Theorem 1",
        method="random unit signals with C₁ = C₂ = C₃ = .1: share that breaks the bound",
        derived=correlation_bound,
        printed=_printed.correlation_bound,
        measure=_random_signals(gradient_rule=True),
        condition="w_jk = corr(f_k, σ′_j g_j), not a weight of any other sign",
        without=_random_signals(gradient_rule=False),
    ),
    Claim(
        id="cdag-theorem-1-angles",
        title="the least corr(z_β, g_{j→k}) is cos(θ₁+θ₂+θ₃)cos(θ₁+θ₃), and positive",
        source="new",
        method="least value over all arrangements of the four unit vectors, on a grid",
        derived=small_angle_bound,
        measure=_small_angles(within=True),
        condition="θ₁+θ₂+θ₃ < π/2",
        without=_small_angles(within=False),
    ),
    Claim(
        id="cdag-theorem-1-tight",
        title="the bound is attained for all acute angles; beyond θ₁+θ₂+θ₃ = π/2 the sign is free",
        source="new",
        method="least value over all arrangements of the four unit vectors, on a grid",
        derived=correlation_bound,
        measure=_least_arrangement,
    ),
    Claim(
        id="cdag-recursion",
        title="corr(z_β, σ′_k g_k) ≥ σ′_min Σ(z_β g)₊ − σ′_max Σ(z_β g)₋, which can be negative",
        source="new",
        method="all 2⁸ activation patterns of a leaky ReLU with corr(z_β, f_k) > 0: excess",
        derived=recursion_bound,
        measure=_slope_patterns(attained=False),
    ),
    Claim(
        id="cdag-recursion-attained",
        title="corr(z_β, σ′_k g_k) does fall to σ′_min Σ(z_β g)₊ − σ′_max Σ(z_β g)₋",
        source="new",
        method="all 2⁸ activation patterns of a leaky ReLU with corr(z_β, f_k) > 0",
        derived=recursion_bound,
        measure=_slope_patterns(attained=True),
    ),
    Claim(
        id="cdag-eqn-2",
        title="ẇ_j for an input of two values is a sum over the two classes, exactly",
        source="CDAG draft note, Eqn 2",
        method="backward pass over the dataset, g_j not centred",
        derived=two_value_flow,
        measure=_flow(centred=False),
    ),
    Claim(
        id="cdag-eqn-3",
        title="under a centred gradient ẇ_j points along σ′₊x₊ − σ′₋x₋, however rare a class is",
        source="new",
        method="angle to the backward pass with a noisy label gradient, P[z_α = 1] = .2",
        derived=label_flow,
        measure=_direction(centred=True),
        condition="Σ_i g_j[i] = 0",
        without=_direction(centred=False),
    ),
    Claim(
        id="cdag-eqn-3-centred",
        title="ẇ_j = E[z_α g_j](σ′₊x₊ − σ′₋x₋), exactly",
        source="new",
        method="backward pass over the dataset with a noisy label gradient, P[z_α = 1] = .2",
        derived=label_flow,
        measure=_flow(centred=True),
        condition="Σ_i g_j[i] = 0",
        without=_flow(centred=False),
    ),
    Claim(
        id="cdag-trained-network",
        title="Theorem 1's bound, an inequality, on every edge of a network trained on a hierarchy",
        source="CDAG draft note, Theorem 1",
        method="share of edges and latent pairs that break it, after 0, 10 and 100 steps; without "
        "the condition, of the pairs with θ₁+θ₂+θ₃ < π/2",
        derived=correlation_bound,
        printed=_printed.correlation_bound,
        measure=_trained_edges,
        condition="w_jk = corr(f_k, σ′_j g_j), not the network's own weight",
        without=_own_weights,
    ),
)

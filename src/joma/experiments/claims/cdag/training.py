"""Eqns 2 and 3, the training of one node, and Theorem 1 in a network in training."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.cdag.theorem1 import NONLINEARITIES
from joma.experiments.claims.claim import Formula, Generator, Point, Search, claim, without
from joma.experiments.claims.measurement import ClaimMeasurement, difference, measured
from joma.experiments.claims.search import Choice, Integer, Parameter, Real, Seed
from joma.theory import cdag
from joma.theory.functions import Activation
from joma.theory.hblt import Tree

_TWO_VALUES: dict[str, Parameter] = {
    "inputs": Integer(1, 12),
    "samples": Integer(2, 200, log=True),
    "share": Real(0.0, 1.0, special=(0.02, 0.5, 0.98)),
    "size": Real(1e-3, 10.0, log=True),
    "label": Real(-10.0, 10.0, special=(0.0,)),
    "kind": Choice(*NONLINEARITIES),
    "draw": Seed(),
}


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


def _two_values_at(
    formula: Formula, point: Point, *, centred: bool, direction: bool = False
) -> ClaimMeasurement:
    rng = np.random.default_rng(point["draw"])
    signals = point["size"] * rng.standard_normal((3, point["inputs"]))
    z = (rng.random(point["samples"]) < point["share"]) * 1.0
    g = point["label"] * z + rng.standard_normal(len(z))
    size = float(np.mean(np.abs(g)) * np.max(np.abs(signals)))
    if centred:
        g -= g.mean()
    nonlinearity = NONLINEARITIES[point["kind"]]
    own, by_formula = _two_values_of(formula, signals, z, g, nonlinearity)
    if not direction:
        return measured(difference(own, by_formula), 1e-12 * size + 1e-300)
    if np.max(np.abs(own)) <= 1e-9 * size:
        raise JomaError("a node that is off for both inputs, or a latent without both values")
    return measured(cdag.angle(own, by_formula), 1e-5)


@claim(
    "cdag-eqn-3-centred",
    cdag.label_flow,
    Search(_TWO_VALUES, partial(_two_values_at, centred=True)),
    centred=True,
)
@claim(
    "cdag-eqn-2",
    cdag.two_value_flow,
    Search(_TWO_VALUES, partial(_two_values_at, centred=False)),
    centred=False,
)
@without("cdag-eqn-3-centred", centred=False)
def _flow(formula: Formula, rng: Generator, *, centred: bool) -> ClaimMeasurement:
    flows = _two_values(formula, rng, centred=centred)
    return measured([difference(a, b) for a, b in flows], 1e-12)


@claim(
    "cdag-eqn-3",
    cdag.label_flow,
    Search(_TWO_VALUES, partial(_two_values_at, centred=True, direction=True)),
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

"""A computational DAG (Eqn 1 of the CDAG note): forward pass, backward pass, gradient ascent.

An edge j→k carries the gradient of node j back to k, one of the nodes that feed j. Signals are
vectors over the dataset.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.theory import _checks as checks
from joma.theory._checks import Array
from joma.theory.functions import ACTIVATIONS, Activation, leaky_relu

Mask = NDArray[np.bool_]


LINEAR, RELU, TANH, SIGMOID = (
    ACTIVATIONS[name]() for name in ("linear", "relu", "tanh", "sigmoid")
)
LEAKY_RELU = leaky_relu(0.1)


@dataclass(frozen=True)
class Activations:
    """Eqn 1 on a dataset: f_k[i] and σ′_k[i], both (N, nodes); inputs have slope 1."""

    values: Array
    slopes: Array


@dataclass(frozen=True)
class Gradients:
    """The backward pass of Eqn 1.

    Attributes:
        nodes: g_k[i], the gradient of the objective by f_k[i], (N, nodes).
        edges: g_{j→k}[i] = σ′_j w_jk g_j, (edges, N) in the order of `CDAG.edges`.
        weights: corr(f_k, σ′_j g_j) at [j, k] on trained edges and 0 elsewhere, (nodes, nodes).
        deltas: σ′_j[i] g_j[i], (N, nodes).
    """

    nodes: Array
    edges: Array
    weights: Array
    deltas: Array


@dataclass(frozen=True)
class CDAG:
    """Eqn 1: f_j = σ_j(Σ_k w_jk f_k) on a graph whose nodes stand in topological order.

    The first `inputs` nodes take the input. A residual edge has the fixed weight 1.

    Attributes:
        inputs: number of input nodes.
        nonlinearities: σ_j of every further node, in order.
        weights: w_jk at [j, k], (nodes, nodes); zero where there is no edge.
        trained: where a trained edge j→k exists.
        residual: where a residual edge j→k exists.
    """

    inputs: int
    nonlinearities: tuple[Activation, ...]
    weights: Array
    trained: Mask
    residual: Mask

    def __post_init__(self) -> None:
        checks.integers("inputs", self.inputs, 1)
        n = self.nodes
        weights = checks.finite("weights", self.weights, (n, n))
        for name, mask in (("trained", self.trained), ("residual", self.residual)):
            if mask.shape != (n, n) or mask.dtype != np.bool_:
                raise JomaError(f"{name} must be a boolean array of shape ({n}, {n})")
            if np.any(np.triu(mask)) or np.any(mask[: self.inputs]):
                raise JomaError(
                    f"{name} must lead from a later node to an earlier one, and never from an input"
                )
        if np.any(self.trained & self.residual):
            raise JomaError("residual and trained must not share an edge")
        if np.any(weights[self.residual] != 1):
            raise JomaError("weights must be 1 on residual edges")
        if np.any(weights[~(self.trained | self.residual)] != 0):
            raise JomaError("weights must be 0 where there is no edge")

    @classmethod
    def layered(
        cls,
        widths: tuple[int, ...],
        nonlinearities: tuple[Activation, ...],
        rng: np.random.Generator | int,
        *,
        scale: float = 1.0,
        residual: bool = True,
    ) -> "CDAG":
        """A layered network as a CDAG (Eqn 1).

        Args:
            widths: nodes per layer, inputs first.
            nonlinearities: one per layer after the inputs.
            rng: draws the weights, normal with deviation scale/√(fan-in).
            scale: size of the initial weights.
            residual: adds residual edges that skip a layer, from node i to node i.
        """
        sizes = checks.integers("widths", widths, 1)
        if sizes.ndim != 1 or sizes.size < 2:
            raise JomaError(f"widths must name at least two layers, got {widths}")
        if len(nonlinearities) != sizes.size - 1:
            raise JomaError(f"nonlinearities must be one per layer after the inputs of {widths}")
        checks.non_negative("scale", scale)
        generator = checks.generator(rng)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        n = int(starts[-1])
        weights, trained, skips = np.zeros((n, n)), np.zeros((n, n), bool), np.zeros((n, n), bool)
        for layer in range(1, sizes.size):
            here = slice(starts[layer], starts[layer + 1])
            below = slice(starts[layer - 1], starts[layer])
            trained[here, below] = True
            deviation = scale / np.sqrt(sizes[layer - 1])
            weights[here, below] = deviation * generator.standard_normal(trained[here, below].shape)
            if residual and layer >= 2:
                i = np.arange(int(min(sizes[layer], sizes[layer - 2])))
                skips[starts[layer] + i, starts[layer - 2] + i] = True
        weights[skips] = 1
        per_node = tuple(
            nonlinearity
            for nonlinearity, width in zip(nonlinearities, sizes[1:], strict=True)
            for _ in range(width)
        )
        return cls(int(sizes[0]), per_node, weights, trained, skips)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.inputs + len(self.nonlinearities)

    @property
    def edges(self) -> NDArray[np.intp]:
        """All edges as rows (j, k), trained and residual."""
        return np.argwhere(self.trained | self.residual)

    @property
    def outputs(self) -> NDArray[np.intp]:
        """The nodes without successors, which receive the loss's gradient."""
        return np.flatnonzero(~np.any(self.trained | self.residual, axis=0))

    def forward(self, x: ArrayLike) -> Activations:
        """Eqn 1: every node's activation and slope on the inputs x (N, inputs)."""
        x = checks.finite("x", x, (None, self.inputs))
        values = np.zeros((x.shape[0], self.nodes))
        slopes = np.ones_like(values)
        values[:, : self.inputs] = x
        for j, sigma in enumerate(self.nonlinearities, start=self.inputs):
            pre_activation = values[:, :j] @ self.weights[j, :j]
            values[:, j] = sigma.value(pre_activation)
            slopes[:, j] = sigma.derivative(pre_activation)
        return Activations(values, slopes)

    def backward(self, activations: Activations, output_gradient: ArrayLike) -> Gradients:
        """The chain rule on Eqn 1: g_k = Σ_j g_{j→k}, g_{j→k} = σ′_j w_jk g_j.

        Args:
            activations: from `forward`.
            output_gradient: the objective's gradient by each output node, (N, outputs).
        """
        outputs = self.outputs
        n = activations.values.shape[0]
        at_outputs = checks.finite("output_gradient", output_gradient)
        checks.shape("output_gradient", at_outputs, (n, outputs.size))
        nodes = np.zeros_like(activations.values)
        deltas = np.zeros_like(nodes)
        nodes[:, outputs] = at_outputs
        for k in reversed(range(self.nodes)):
            nodes[:, k] += deltas[:, k + 1 :] @ self.weights[k + 1 :, k]
            deltas[:, k] = activations.slopes[:, k] * nodes[:, k]
        j, k = self.edges.T
        edges = (deltas[:, j] * self.weights[j, k]).T
        weights = np.where(self.trained, deltas.T @ activations.values, 0.0)
        return Gradients(nodes, edges, weights, deltas)

    def train(
        self, x: ArrayLike, gradient: Callable[[Array], Array], *, step: float, steps: int
    ) -> "CDAG":
        """Gradient ascent on the trained weights, ẇ_jk = corr(f_k, σ′_j g_j)/N.

        Args:
            x: inputs (N, inputs).
            gradient: the objective's gradient by the outputs, given the outputs (N, outputs); for
                squared error it is target − output.
            step: learning rate.
            steps: number of full-batch steps.
        """
        rate = checks.positive_scalar("step", step)
        x = checks.finite("x", x, (None, self.inputs))
        outputs = self.outputs
        network = self
        for _ in range(checks.whole("steps", steps, 0)):
            activations = network.forward(x)
            gradients = network.backward(activations, gradient(activations.values[:, outputs]))
            network = replace(
                network, weights=network.weights + rate / x.shape[0] * gradients.weights
            )
        return network

"""Computational DAGs (the CDAG note): when a latent variable reaches a child node's gradient.

Signals are vectors over the dataset and `corr` is their inner product, so the note's Theorem 1
is geometry: three angles decide whether a fourth correlation must be positive.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.theory import _checks as checks
from joma.theory._checks import Array
from joma.theory.functions import ACTIVATIONS, Activation, leaky_relu

__all__ = [
    "CDAG",
    "LEAKY_RELU",
    "LINEAR",
    "RELU",
    "SIGMOID",
    "TANH",
    "Activations",
    "Cases",
    "EdgeCorrelations",
    "Gradients",
    "angle",
    "corr",
    "correlation_bound",
    "counterexamples",
    "edge_correlations",
    "label_flow",
    "random_cases",
    "recursion_bound",
    "two_value_flow",
]

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


def corr(x: ArrayLike, y: ArrayLike) -> Array:
    """Correlation over the dataset as the note defines it: Σ_i x[i] y[i], over the last axis."""
    x, y = checks.at_least_1d("x", x), checks.at_least_1d("y", y)
    if x.shape[-1] != y.shape[-1]:
        raise JomaError(f"y must have the {x.shape[-1]} samples of x, got {y.shape[-1]}")
    return np.asarray(np.einsum("...i,...i->...", x, y))


def angle(x: ArrayLike, y: ArrayLike) -> Array:
    """The angle between signals, arccos of corr(x, y)/(‖x‖‖y‖); π/2 where one of them is zero."""
    x, y = checks.at_least_1d("x", x), checks.at_least_1d("y", y)
    norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    cosine = np.divide(corr(x, y), norms, out=np.zeros_like(norms), where=norms > 0)
    return np.arccos(np.clip(cosine, -1, 1))


def correlation_bound(theta_1: ArrayLike, theta_2: ArrayLike, theta_3: ArrayLike) -> Array:
    """Theorem 1, derived: the least corr(z_β, g_{j→k}) that the three angles allow.

    For unit vectors, otherwise times ‖f_k‖ ‖σ′_j g_j‖² ‖z_β‖, and with w_jk = corr(f_k, σ′_j g_j).
    For θ₁ + θ₂ + θ₃ ≤ π/2 it is cos(θ₁+θ₂+θ₃) cos(θ₁+θ₃), attained where σ′g, z_α, z_β, f_k lie
    in this order in a plane. For acute angles with a larger sum it is ≤ 0: they no longer fix the
    sign. At θ₂ = 0, where f_k is z_β itself as in an input node, it is never negative, since the
    correlation is then the square cos²∠(z_β, σ′_j g_j): there the note's theorem holds as printed.

    Args:
        theta_1: ∠(z_α, σ′_j g_j).
        theta_2: ∠(z_β, f_k).
        theta_3: ∠(±z_α, z_β), either sign.
    """
    first = checks.within("theta_1", theta_1, 0, np.pi)
    second = checks.within("theta_2", theta_2, 0, np.pi)
    third = checks.within("theta_3", theta_3, 0, np.pi)
    nearest = np.abs(first - third)
    farthest = np.minimum(first + third, 2 * np.pi - first - third)

    def least(to_latent: Array) -> Array:
        # corr is cos∠(z_β, σ′g) cos∠(f_k, σ′g), and f_k lies θ₂ from z_β, on either side.
        toward, away = np.cos(to_latent - second), np.cos(to_latent + second)
        return np.cos(to_latent) * np.where(np.cos(to_latent) > 0, away, toward)

    # `least` falls to −sin²(θ₂/2) at the two turning points, so a minimum is there or at an end.
    turning = [np.clip((np.pi + s * second) / 2, nearest, farthest) for s in (-1, 1)]
    return np.min([least(to_latent) for to_latent in (nearest, farthest, *turning)], axis=0)


@dataclass(frozen=True)
class Cases:
    """Random instances of Theorem 1: unit signals over the last axis."""

    z_alpha: Array
    z_beta: Array
    f: Array
    delta: Array

    @property
    def angles(self) -> tuple[Array, Array, Array]:
        """θ₁, θ₂, θ₃ of Theorem 1, θ₃ with the sign of z_α that makes it acute."""
        third = angle(self.z_alpha, self.z_beta)
        return (
            angle(self.z_alpha, self.delta),
            angle(self.z_beta, self.f),
            np.minimum(third, np.pi - third),
        )

    @property
    def correlation(self) -> Array:
        """corr(z_β, g_{j→k}) of Theorem 1 with w_jk = corr(f_k, σ′_j g_j)."""
        return corr(self.f, self.delta) * corr(self.z_beta, self.delta)


def random_cases(
    draws: int, dimension: int, threshold: float, rng: np.random.Generator | int
) -> Cases:
    """Theorem 1's premises as printed: uniform unit vectors, kept where C₁ = C₂ = C₃ = threshold.

    Returns fewer cases than draws: only those with corr(z_α, σ′g), corr(z_β, f_k) and
    |corr(z_α, z_β)| above the threshold.
    """
    count = checks.whole("draws", draws, 1)
    d = checks.whole("dimension", dimension, 1)
    limit = float(checks.one("threshold", checks.within("threshold", threshold, 0, 1)))
    vectors = checks.generator(rng).standard_normal((4, count, d))
    z_alpha, z_beta, f, delta = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    kept = (corr(z_alpha, delta) > limit) & (corr(z_beta, f) > limit)
    kept &= np.abs(corr(z_alpha, z_beta)) > limit
    return Cases(z_alpha[kept], z_beta[kept], f[kept], delta[kept])


def counterexamples(
    draws: int, dimension: int, threshold: float, rng: np.random.Generator | int
) -> tuple[Cases, Mask]:
    """Theorem 1 as printed, searched for counterexamples: random cases, and where it fails.

    It fails where corr(z_β, g_{j→k}) ≤ 0 though all three printed premises hold.
    """
    cases = random_cases(draws, dimension, threshold, rng)
    return cases, cases.correlation <= 0


def recursion_bound(
    z_beta: ArrayLike, g: ArrayLike, slope_min: ArrayLike, slope_max: ArrayLike
) -> Array:
    """Recursion step after Theorem 1, derived: least corr(z_β, σ′_k g_k) for slopes in a range.

    σ′_min Σ(z_β g)₊ − σ′_max Σ(z_β g)₋. Positive when g agrees with z_β on every sample, or when
    agreement outweighs disagreement by more than σ′_max/σ′_min (never for ReLU otherwise).
    """
    low, high = checks.non_negative("slope_min", slope_min), checks.finite("slope_max", slope_max)
    if np.any(high < low):
        raise JomaError(f"slope_max must be ≥ slope_min, got {slope_max} < {slope_min}")
    corr(z_beta, g)
    product = checks.finite("z_beta", z_beta) * checks.finite("g", g)
    agreement = np.maximum(product, 0).sum(axis=-1)
    return low * agreement - high * np.maximum(-product, 0).sum(axis=-1)


def two_value_flow(
    w: ArrayLike,
    x_plus: ArrayLike,
    x_minus: ArrayLike,
    z_alpha: ArrayLike,
    g: ArrayLike,
    nonlinearity: Activation,
) -> Array:
    """Eqn 2: ẇ_j = E[σ′ g x] where x is x₊ for z_α = 1 and x₋ for z_α = 0; exact.

    Args:
        w: weights of node j, (n,).
        x_plus: the input where z_α = 1, (n,).
        x_minus: the input where z_α = 0, (n,).
        z_alpha: 0 or 1 per sample, (N,).
        g: gradient of node j per sample, (N,).
        nonlinearity: σ_j.
    """
    rise, fall, z, gradient = _two_values(w, x_plus, x_minus, z_alpha, g, nonlinearity)
    # E[g | z] P[z] written as E[g z], which also holds for a class without samples.
    return np.mean(gradient * z) * rise + np.mean(gradient * (1 - z)) * fall


def label_flow(
    w: ArrayLike,
    x_plus: ArrayLike,
    x_minus: ArrayLike,
    z_alpha: ArrayLike,
    g: ArrayLike,
    nonlinearity: Activation,
) -> Array:
    """Eqn 3, derived: ẇ_j = E[z_α g_j] (σ′(wᵀx₊) x₊ − σ′(wᵀx₋) x₋), exact for centred g.

    Both classes weigh the same, whatever P[z_α = 1]. Arguments as in `two_value_flow`.
    """
    rise, fall, z, gradient = _two_values(w, x_plus, x_minus, z_alpha, g, nonlinearity)
    return np.mean(gradient * z) * (rise - fall)


def _two_values(
    w: ArrayLike,
    x_plus: ArrayLike,
    x_minus: ArrayLike,
    z_alpha: ArrayLike,
    g: ArrayLike,
    nonlinearity: Activation,
) -> tuple[Array, Array, Array, Array]:
    weights = checks.at_least_1d("w", w)
    plus = checks.finite("x_plus", x_plus, weights.shape)
    minus = checks.finite("x_minus", x_minus, weights.shape)
    z = checks.at_least_1d("z_alpha", z_alpha)
    if np.any((z != 0) & (z != 1)):
        raise JomaError("z_alpha must be 0 or 1 on every sample")
    gradient = checks.finite("g", g, z.shape)
    rise = nonlinearity.derivative(weights @ plus) * plus
    fall = nonlinearity.derivative(weights @ minus) * minus
    return rise, fall, z, gradient


@dataclass(frozen=True)
class EdgeCorrelations:
    """Theorem 1 on the trained edges of a network, each array (edges, α, β).

    Latents count with the sign that makes corr(z_α, σ′_j g_j) and corr(z_β, f_k) positive, as a
    binary variable has no sign of its own.

    Attributes:
        angles: θ₁, θ₂, θ₃.
        gradient_rule: cosine form of corr(z_β, g_{j→k}) with w_jk = corr(f_k, σ′_j g_j), which is
            what the theorem is about: the product of two cosines.
        actual: cosine of z_β and g_{j→k} as it is, with the network's own w_jk.
    """

    angles: tuple[Array, Array, Array]
    gradient_rule: Array
    actual: Array

    @property
    def condition(self) -> Mask:
        """Where θ₁ + θ₂ + θ₃ < π/2."""
        return np.sum(self.angles, axis=0) < np.pi / 2


def edge_correlations(
    network: CDAG, activations: Activations, gradients: Gradients, latents: ArrayLike
) -> EdgeCorrelations:
    """Theorem 1 measured in a network, for every trained edge and every pair of latents.

    Edges whose f_k or σ′_j g_j vanishes on the whole dataset are left out.

    Args:
        network: the network.
        activations: its forward pass.
        gradients: its backward pass.
        latents: centred latent variables, (latents, N).
    """
    samples = activations.values.shape[0]
    z = checks.finite("latents", latents, (None, samples))
    length = np.linalg.norm(z, axis=1, keepdims=True)
    if np.any(length == 0):
        raise JomaError("latents must not vanish on the whole dataset")
    j, k = np.argwhere(network.trained).T
    f, delta = activations.values.T[k], gradients.deltas.T[j]
    alive = np.any(f != 0, axis=1) & np.any(delta != 0, axis=1)
    f, delta, j, k = f[alive], delta[alive], j[alive], k[alive]
    z = z / length
    f = f / np.linalg.norm(f, axis=1, keepdims=True)
    delta = delta / np.linalg.norm(delta, axis=1, keepdims=True)
    with_delta, with_f, between = delta @ z.T, f @ z.T, np.abs(z @ z.T)
    cosines = np.broadcast_arrays(
        np.abs(with_delta)[:, :, None], np.abs(with_f)[:, None, :], between[None]
    )
    first, second, third = (np.arccos(np.clip(cosine, 0, 1)) for cosine in cosines)
    of_beta = (with_delta * np.where(with_f < 0, -1.0, 1.0))[:, None, :]
    fit = corr(f, delta)[:, None, None]
    sign = np.sign(network.weights[j, k])[:, None, None]
    shape = first.shape
    return EdgeCorrelations(
        (first, second, third),
        np.broadcast_to(fit * of_beta, shape),
        np.broadcast_to(sign * of_beta, shape),
    )

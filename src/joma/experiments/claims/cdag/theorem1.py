"""The backward pass and Theorem 1: the sign of corr(z_β, g_{j→k}), and its recursion."""

from collections.abc import Callable
from itertools import product

import numpy as np

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, Search, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, measured
from joma.experiments.claims.reference.ode import five_point
from joma.experiments.claims.search import Choice, Integer, Matrix, Real, Seed, Simplex, Vector
from joma.theory import as_printed, cdag
from joma.theory.cdag import LEAKY_RELU, corr, recursion_bound

NONLINEARITIES = {
    "linear": cdag.LINEAR,
    "relu": cdag.RELU,
    "leaky_relu": cdag.LEAKY_RELU,
    "tanh": cdag.TANH,
    "sigmoid": cdag.SIGMOID,
}


def _backward(
    network: cdag.CDAG, activations: cdag.Activations, output_gradient: Array
) -> cdag.Gradients:
    return network.backward(activations, output_gradient)


@over(
    widths=Vector(Real(1, 4.99), Integer(1, 4)),
    outputs=Integer(1, 3),
    kinds=Choice(("tanh", "sigmoid", "linear"), ("relu", "leaky_relu", "tanh")),
    scale=Real(0.01, 3.0, log=True),
    draw=Seed(),
)
def _backward_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The derivative along a random direction of weights and inputs, by differences."""
    rng = np.random.default_rng(point["draw"])
    widths = (*np.asarray(point["widths"]).astype(int).tolist(), point["outputs"])
    choices = [NONLINEARITIES[str(one)] for one in rng.choice(point["kinds"], len(widths) - 1)]
    network = cdag.CDAG.layered(widths, tuple(choices), rng, scale=point["scale"])
    x = rng.standard_normal((4, widths[0]))
    output_gradient = rng.standard_normal((4, widths[-1]))
    by_weights = np.where(network.trained, rng.standard_normal(network.weights.shape), 0.0)
    by_inputs = rng.standard_normal(x.shape)

    def values(share: float) -> tuple[float, list[Array]]:
        weights, inputs = network.weights + share * by_weights, x + share * by_inputs
        f, slopes = list(inputs.T), []
        for j, sigma in enumerate(network.nonlinearities, start=network.inputs):
            before = np.einsum("k,kn->n", weights[j, :j], np.stack(f))
            f.append(sigma.value(before))
            slopes.append(before > 0)
        outputs = np.stack([f[i] for i in network.outputs], axis=1)
        return float(np.sum(output_gradient * outputs)), slopes

    output_gradient = rng.standard_normal((4, len(network.outputs)))
    gradients = formula(network, network.forward(x), output_gradient)
    slope = np.sum(by_weights * gradients.weights) + np.sum(
        by_inputs * gradients.nodes[:, : network.inputs]
    )
    h = 1e-4
    found = {share: values(share * h) for share in (-2, -1, 0, 1, 2)}
    kinked = any(one in ("relu", "leaky_relu") for one in point["kinds"])
    if kinked and any(
        not np.array_equal(a, b)
        for share in (-2, -1, 1, 2)
        for a, b in zip(found[0][1], found[share][1], strict=True)
    ):
        raise JomaError("a node switches within the difference")
    by_differences = five_point((found[share][0] for share in (-2, -1, 1, 2)), h)
    size = 1 + float(np.abs(by_weights).sum() * np.max(np.abs(gradients.weights)))
    size += float(np.sum(np.abs(gradients.nodes)))
    return ClaimMeasurement(abs(by_differences - slope), 1e-7 * size)


@claim("cdag-backward", _backward, _backward_at)
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


@over(vectors=Matrix(Real(-1.0, 1.0), Integer(4, 4), Integer(2, 6)))
def _signals_at(formula: Formula, point: Point) -> ClaimMeasurement:
    vectors = point["vectors"]
    lengths = np.linalg.norm(vectors, axis=1)
    if np.min(lengths) < 1e-6:
        raise JomaError("signals must not vanish")
    z_alpha, z_beta, f, delta = vectors / lengths[:, None]
    first, second, third = (
        float(np.arccos(np.clip(a @ b, -1, 1)))
        for a, b in ((z_alpha, delta), (z_beta, f), (z_alpha, z_beta))
    )
    bound = float(formula(first, second, min(third, np.pi - third)))
    # arccos near 0 and π has half the digits of its argument.
    return ClaimMeasurement(bound - float((f @ delta) * (z_beta @ delta)), 1e-7)


@claim(
    "cdag-theorem-1",
    cdag.correlation_bound,
    _signals_at,
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


def _components(theta_1: float, theta_3: float, azimuths: Array) -> tuple[Array, Array]:
    """The components of σ′g along z_β and across it; it lies θ₁ from z_α, in every direction."""
    up = np.cos(theta_1) * np.cos(theta_3)
    up = up - np.sin(theta_1) * np.sin(theta_3) * np.cos(azimuths)
    return up, np.sqrt(np.maximum(1 - up**2, 0))


def _least_correlation(theta_1: float, theta_2: float, theta_3: float) -> float:
    """The least corr(z_β, g_{j→k}) over all arrangements of four unit vectors, on a grid."""
    azimuths = np.linspace(0, np.pi, 721)
    up, aside = _components(theta_1, theta_3, azimuths)
    with_f = np.cos(theta_2) * up[:, None]
    with_f = with_f + np.sin(theta_2) * aside[:, None] * np.cos(azimuths)
    return float(np.min(up[:, None] * with_f))


def _least_on_a_line(theta_1: float, theta_2: float, theta_3: float) -> float:
    """The same where f_k is at its worst for each σ′g, in closed form: one azimuth is left."""
    up, aside = _components(theta_1, theta_3, np.linspace(0, np.pi, 4001))
    return float(np.min(np.cos(theta_2) * up**2 - np.sin(theta_2) * np.abs(up) * aside))


def _tight_at(formula: Formula, point: Point) -> ClaimMeasurement:
    angles = (point["theta_1"], point["theta_2"], point["theta_3"])
    return ClaimMeasurement(abs(_least_on_a_line(*angles) - float(formula(*angles))), 1e-4)


@over(shares=Simplex(Integer(3, 3), zeros=True), sum=Real(0.0, np.pi / 2))
def _small_angles_at(formula: Formula, point: Point) -> ClaimMeasurement:
    angles = point["shares"] * point["sum"]
    # The square root of 1 - cos² has half its digits where the cosine is close to 1.
    return ClaimMeasurement(abs(_least_on_a_line(*angles) - float(formula(*angles))), 1e-7)


@claim("cdag-theorem-1-angles", small_angle_bound, _small_angles_at, within=True)
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
    return _at_an_input_of(formula, z_beta, g, z_beta + other)


@over(
    signal=Vector(Real(-1.0, 1.0, special=(0.0,)), Integer(1, 20)),
    gradient=Vector(Real(-1.0, 1.0, special=(0.0,)), Integer(1, 20)),
)
def _at_an_input_at(formula: Formula, point: Point) -> ClaimMeasurement:
    z_beta = point["signal"]
    g = np.resize(point["gradient"], len(z_beta))
    return _at_an_input_of(formula, z_beta, g, z_beta)


@claim("cdag-theorem-1-input", lambda z_beta, delta: cdag.corr(z_beta, delta) ** 2, _at_an_input_at)
def _at_an_input(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """A node of one input, which is the latent itself, through its backward pass."""
    z_beta, g = rng.standard_normal((2, 50))
    return _at_an_input_of(formula, z_beta, g, z_beta)


def _at_an_input_of(formula: Formula, z_beta: Array, g: Array, f: Array) -> ClaimMeasurement:
    weights = np.array([[0.0, 0.0], [0.0, 0.0]])
    node = cdag.CDAG(
        1, (cdag.LINEAR,), weights, np.eye(2, k=-1, dtype=bool), np.zeros((2, 2), bool)
    )
    gradients = node.backward(node.forward(f[:, None]), g[:, None])
    # The gradient rule: the weight is its own gradient.
    arriving = gradients.weights[1, 0] * gradients.deltas[:, 1]
    size = float(np.sum(np.abs(z_beta * g))) ** 2 + 1e-300
    return measured(abs(z_beta @ arriving - formula(z_beta, g)) / size, 1e-12)


_ANGLE = Real(0.0, np.pi, special=(0.0, np.pi / 2, np.pi))


@claim(
    "cdag-theorem-1-tight",
    cdag.correlation_bound,
    Search(dict.fromkeys(("theta_1", "theta_2", "theta_3"), _ANGLE), _tight_at),
)
def _least_arrangement(formula: Formula, rng: Generator) -> ClaimMeasurement:
    cases = rng.uniform(0, np.pi, (40, 3))
    return measured([abs(_least_correlation(*one) - float(formula(*one))) for one in cases], 1e-4)


_PATTERNS = {n: np.array(list(product((-1.0, 1.0), repeat=n))) for n in range(1, 9)}


def _least_of_patterns(z: Array, g: Array) -> float:
    """The least corr(z_β, σ′_k g_k) over all patterns of a leaky ReLU with corr(z_β, f_k) > 0."""
    patterns = _PATTERNS[len(z)]
    # Large where it helps corr(z_β, f_k) > 0 and small where it hurts: any pattern that can
    # satisfy the premise does.
    pre_activation = patterns * np.where(patterns * z > 0, 1.0, 1e-3)
    allowed = corr(LEAKY_RELU.value(pre_activation), z) > 0
    return float(np.min(corr(z, LEAKY_RELU.derivative(pre_activation[allowed]) * g)))


@over(
    z=Vector(Real(-1.0, 1.0, special=(0.0,)), Integer(1, 12)),
    g=Vector(Real(-1.0, 1.0, special=(0.0,)), Integer(1, 12)),
    share=Vector(Real(0.0, 1.0), Integer(1, 12)),
    slope=Real(0.0, 2.0, special=(0.0, 1.0)),
    other_slope=Real(0.0, 2.0, special=(0.0, 1.0)),
)
def _slopes_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Any slopes within the range, any signals."""
    z = point["z"]
    g, share = np.resize(point["g"], len(z)), np.resize(point["share"], len(z))
    low, high = sorted((point["slope"], point["other_slope"]))
    slopes = low + share * (high - low)
    bound = float(formula(z, g, low, high))
    size = high * float(np.sum(np.abs(z * g)))
    return ClaimMeasurement(bound - float(z @ (slopes * g)), 1e-12 * size + 1e-300)


@over(z=Vector(Real(-1.0, 1.0), Integer(1, 8)), g=Vector(Real(-1.0, 1.0), Integer(1, 8)))
def _patterns_at(formula: Formula, point: Point) -> ClaimMeasurement:
    g = point["g"].copy()
    g[0] = -abs(g[0])
    z = np.where(np.resize(point["z"], len(g)) < 0, -1.0, 1.0)
    if g[0] == 0 or float(z @ g) <= 0:
        raise JomaError("g must be negative somewhere and correlate with z")
    return ClaimMeasurement(
        abs(float(formula(z, g, 0.1, 1.0)) - _least_of_patterns(z, g)),
        1e-12 * float(np.sum(np.abs(g))),
    )


@claim("cdag-recursion-attained", recursion_bound, _patterns_at, attained=True)
@claim("cdag-recursion", recursion_bound, _slopes_at, attained=False)
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
        excess = float(formula(z, g, 0.1, 1.0)) - _least_of_patterns(z, g)
        errors.append(abs(excess) if attained else excess)
    return measured(errors, 1e-12)

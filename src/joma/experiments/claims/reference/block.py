"""Random JoMA blocks in full: weights, explicit embeddings, and their rates.

The reference of the claims about `joma.theory.block` and its laws. Everything is computed from w in
the embedding space, sample by sample, and shares no code with what it checks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.common.types import Array
from joma.experiments.claims.claim import Generator, Point
from joma.experiments.claims.reference.ode import five_point
from joma.theory.block import Block, Samples, State, Trajectory

SIGMA: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "linear": (lambda y: y, lambda y: 1.0 + 0 * y),
    "exp": (np.exp, np.exp),
    "sigmoid": (lambda y: 1 / (1 + np.exp(-y)), lambda y: 1 / (2 + np.exp(y) + np.exp(-y))),
}
PHI: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "linear": (lambda y: y, lambda y: 1.0 + 0 * y),
    "tanh": (np.tanh, lambda y: np.cosh(np.clip(y, -700, 700)) ** -2.0),
    "softplus": (lambda y: np.maximum(y, 0) + np.log1p(np.exp(-np.abs(y))), SIGMA["sigmoid"][0]),
    "relu": (lambda y: np.where(y > 0, y, 0.0), lambda y: np.where(y > 0, 1.0, 0.0)),
    "leaky_relu": (
        lambda y: np.where(y > 0, y, 0.01 * y),
        lambda y: np.where(y > 0, 1.0, 0.01),
    ),
}

POINTWISE = ("linear", "exp", "sigmoid")


@dataclass(frozen=True)
class Setting:
    """A block with its data at one moment of training.

    Attributes:
        block: Rates, temperature, attention and activation; its embeddings are `columns`.
        samples: The data.
        columns: Embeddings of tokens, then of queries, shape (d, M + queries).
        w: Weights, shape (d, K).
        z: Logits, shape (queries, M).
    """

    block: Block
    samples: Samples
    columns: Array
    w: Array
    z: Array

    @property
    def state(self) -> State:
        """The state as the block has it."""
        m = self.samples.tokens
        return State(self.columns[:, :m].T @ self.w, self.z, self.columns[:, m:].T @ self.w)

    @property
    def query(self) -> NDArray[np.int64]:
        """The query of each sample."""
        given = self.samples.query
        zero = np.zeros(len(np.asarray(self.samples.x)), dtype=np.int64)
        return zero if given is None else np.asarray(given, dtype=np.int64)

    def moved(self, rate: "Rate", by: float) -> "Setting":
        """Return the setting after a straight step."""
        return replace(self, w=self.w + by * rate.w, z=self.z + by * rate.z)

    def speed(self, rate: "Rate") -> float:
        """Return how fast the largest weight and logit change, relative to w and to τ."""
        weights = np.max(np.abs(rate.w)) / max(float(np.max(np.abs(self.w))), 1e-300)
        return max(float(weights), float(np.max(np.abs(rate.z)) / self.block.tau))

    def logits(self) -> Array:
        """The logits in the shape that laws take: (1, M) for one query, (1, queries, M) else."""
        return self.z if self.samples.query is None else self.z[None]


@dataclass(frozen=True)
class Rate:
    """Rates of weights and logits."""

    w: Array
    z: Array


def draw_setting(
    point: Point, attention: str, embeddings: str = "orthonormal", **given: Any
) -> Setting:
    """Build the setting of a point.

    Args:
        point: Values of `PARAMETERS`; `given` overrides them.
        attention: Its name.
        embeddings: "orthonormal"; "apart", any tokens and any queries orthogonal to them; or
            "any".
        given: Values that the claim fixes.
    """
    values = {**point, **given}
    rng = np.random.default_rng(values["draw"])
    m, k, n = values["tokens"], values["nodes"], values["samples"]
    q = values["queries"]
    query = np.concatenate([np.arange(q), rng.integers(q, size=max(0, n - q))])
    n = len(query)
    x = rng.dirichlet(np.full(m, 10 ** rng.uniform(-0.5, 1)), size=n) + 1e-12
    x *= rng.random((n, m)) >= values["absent"]
    x[np.arange(n), rng.integers(m, size=n)] += 0.1
    if values.get("alike"):
        x[:] = x[0]
    drive: dict[str, Any] = {"gradient": rng.normal(size=(n, k)) * (rng.random((n, k)) < 0.8)}
    if values["drive"] == "labels":
        drive = {"labels": rng.integers(k, size=n), "classes": k}
    samples = Samples(
        x,
        **drive,
        query=query if q > 1 else None,
        probability=rng.dirichlet(np.ones(n)),
    )
    columns = _columns(embeddings, m, q, rng)
    tau = values["tau"]
    block = Block(
        attention,
        values["activation"],
        eta_w=values["eta_w"],
        eta_z=values["eta_z"],
        tau=tau,
        embeddings=None if embeddings == "orthonormal" else columns,
    )
    return Setting(
        block,
        samples,
        columns,
        values["weights"] * rng.normal(size=(len(columns), k)),
        tau * values["logits"] * rng.normal(size=(q, m)),
    )


def _columns(embeddings: str, m: int, q: int, rng: Generator) -> Array:
    if embeddings == "orthonormal":
        return np.linalg.qr(rng.normal(size=(m + q + 1, m + q)))[0]
    if embeddings == "any":
        return rng.normal(size=(int(rng.integers(1, m + q + 3)), m + q))
    # Tokens in one subspace, often of fewer dimensions than tokens, queries in another.
    d_tokens, d_queries = int(rng.integers(1, m + 2)), int(rng.integers(1, q + 2))
    basis = np.linalg.qr(rng.normal(size=(d_tokens + d_queries, d_tokens + d_queries)))[0]
    tokens = rng.normal(size=(d_tokens, m)) * 10 ** rng.uniform(-0.5, 0.5, m)
    queries = rng.normal(size=(d_queries, q))
    return np.concatenate([basis[:, :d_tokens] @ tokens, basis[:, d_tokens:] @ queries], axis=1)


def attention_scores(setting: Setting) -> Array:
    """Return Eqn 1: b of every sample, shape (N, M)."""
    block, x = setting.block, np.asarray(setting.samples.x)
    y = setting.z[setting.query] / block.tau
    if block.sigma.name == "softmax":
        unnormalized = x * np.exp(y - np.max(y, axis=1, keepdims=True))
        return unnormalized / unnormalized.sum(axis=1, keepdims=True)
    return SIGMA[block.sigma.name][0](y) * x


def inputs(setting: Setting) -> Array:
    """Return inputs f = U_C b + u_q of every sample, shape (N, d)."""
    m = setting.samples.tokens
    f = attention_scores(setting) @ setting.columns[:, :m].T
    return f + setting.columns[:, m:].T[setting.query]


def outputs(setting: Setting) -> Array:
    """Return outputs h of every sample and node, shape (N, K)."""
    return _activation(setting)[0](inputs(setting) @ setting.w)


def slopes_of(setting: Setting) -> Array:
    """Return h′ of every sample and node, shape (N, K)."""
    return _activation(setting)[1](inputs(setting) @ setting.w)


def _activation(setting: Setting) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    return PHI[setting.block.phi.name.split("(")[0]]


def node_gradients(setting: Setting, slopes: Array | None = None) -> tuple[Array, Array]:
    """Return inputs f, shape (N, d), and the factors P g_k h′_k, shape (N, K)."""
    samples, f, (value, slope) = setting.samples, inputs(setting), _activation(setting)
    pre = f @ setting.w
    if samples.gradient is not None:
        g = np.asarray(samples.gradient)
    else:
        h = value(pre)
        e = np.exp(h - np.max(h, axis=1, keepdims=True))
        g = np.eye(samples.nodes)[np.asarray(samples.labels)] - e / e.sum(axis=1, keepdims=True)
    slopes = slope(pre) if slopes is None else slopes
    return f, np.asarray(samples.probability)[:, None] * g * slopes


def pull_sizes(setting: Setting, pull: Array) -> Array:
    """Return sizes of P g_k h′_k, not below what the rounding of g near 0 is worth."""
    share = np.asarray(setting.samples.probability)[:, None]
    return np.abs(pull) + 1e-5 * share * np.abs(slopes_of(setting))


def objective(setting: Setting) -> float:
    """Return Eqn 9: E[Σ_k g_k h_k], or the mean log-likelihood of the labels."""
    samples, h = setting.samples, outputs(setting)
    if samples.gradient is not None:
        each = np.sum(np.asarray(samples.gradient) * h, axis=1)
    else:
        peak = np.max(h, axis=1)
        total = peak + np.log(np.exp(h - peak[:, None]).sum(axis=1))
        each = h[np.arange(len(h)), np.asarray(samples.labels)] - total
    return float(np.asarray(samples.probability) @ each)


def rates(setting: Setting, slopes: Array | None = None) -> Rate:
    """Return Eqn 2, in w and sample by sample; with given h′ if there are."""
    block, x, m = setting.block, np.asarray(setting.samples.x), setting.samples.tokens
    b = attention_scores(setting)
    f, pull = node_gradients(setting, slopes)
    v = setting.columns[:, :m].T @ setting.w
    by_b = pull @ v.T  # U_Cᵀ g_f of every sample
    if block.sigma.name == "softmax":
        along = (b * by_b).sum(axis=1)
        by_z = (b * by_b - b * along[:, None]) / block.tau  # (diag b - b bᵀ) U_Cᵀ g_f
    else:
        slope = SIGMA[block.sigma.name][1](setting.z[setting.query] / block.tau)
        by_z = slope * x * by_b / block.tau
    z_rate = np.zeros_like(setting.z)
    if len(z_rate) == 1:
        z_rate[0] = by_z.sum(axis=0)
    else:
        for query, row in zip(setting.query, by_z, strict=True):
            z_rate[query] += row
    return Rate(block.eta_w * f.T @ pull, block.eta_z * z_rate)


def rate_sizes(setting: Setting) -> Array:
    """Sizes of the sums of which a token's law consists, η_Z Σ_k E|g_k h′_k b_l v_kl|, (M,)."""
    b, m = attention_scores(setting), setting.samples.tokens
    pull = pull_sizes(setting, node_gradients(setting)[1])
    v = setting.columns[:, :m].T @ setting.w
    return setting.block.eta_z * np.einsum("nk,nl,lk->l", pull, np.abs(b), np.abs(v))


def follow(setting: Setting, reach: float, points: int) -> Trajectory:
    """Train by Runge-Kutta steps of equal distance, whatever time they take.

    Args:
        setting: Where the training starts.
        reach: Distance in all, in units in which logits change by τ.
        points: Steps; switches of the activation stay as they are within one.
    """
    block, m = setting.block, setting.samples.tokens
    factor = block.eta_z / (block.eta_w * block.tau**2)
    drive = 1.0 if setting.samples.gradient is None else np.max(np.abs(setting.samples.gradient))
    now, states = 0.0, [(0.0, setting)]
    for _ in range(points):
        slopes = None if block.phi.smooth else slopes_of(setting)
        first = rates(setting, slopes)
        v, v_rate = (setting.columns[:, :m].T @ one for one in (setting.w, first.w))
        w_size = np.max(np.abs(setting.w)) + 1 / np.sqrt(factor)
        speed = max(
            float(np.max(np.abs(first.z)) / block.tau * (1 + np.max(np.abs(v)))),
            float(np.max(np.abs(first.w)) / w_size),
            factor * float(np.sum(np.abs(v * v_rate))),
        )
        # Steps that stay stable where the training has come to rest.
        stiffness = drive * (block.eta_w + block.eta_z * (np.max(np.abs(v)) / block.tau) ** 2 / 2)
        step = min(reach / points / max(speed, 1e-30), 0.3 / max(float(stiffness), 1e-30))
        second = rates(setting.moved(first, step / 2), slopes)
        third = rates(setting.moved(second, step / 2), slopes)
        fourth = rates(setting.moved(third, step), slopes)
        for rate, weight in ((first, 1), (second, 2), (third, 2), (fourth, 1)):
            setting = setting.moved(rate, weight * step / 6)
        now += step
        states.append((now, setting))
    return trajectory([one for _, one in states], np.array([t for t, _ in states]))


def trajectory(states: list[Setting], t: Array) -> Trajectory:
    """Return a training as `joma.theory.block.simulate` returns it."""
    z = np.stack([one.z for one in states])
    first = states[0]
    return Trajectory(
        t=t,
        v=np.stack([one.state.v for one in states]),
        z=z[:, 0] if first.samples.query is None else z,
        bias=np.stack([one.state.bias for one in states]),
        block=first.block,
        samples=first.samples,
        start=first.state,
    )


def law_derivative(law: Callable[[Setting], Any], setting: Setting) -> tuple[Array, float]:
    """The rate of a quantity along the flow, and the time of the difference it was taken with."""
    rate = rates(setting)
    h = 1e-3 / max(setting.speed(rate), 1e-30)
    around = (np.asarray(law(setting.moved(rate, s * h))) for s in (-2, -1, 1, 2))
    return np.ravel(five_point(around, h)), h


def law_sizes(setting: Setting, h: float, *, whole: bool = False) -> Array:
    """Return what counts as zero in the rate of a law: 1e-6 of its two sums, and rounding.

    Args:
        setting: Where.
        h: The time of the difference by which the rate was taken.
        whole: Whether all tokens have one law.
    """
    rate, sizes, block = rates(setting), rate_sizes(setting), setting.block
    m, ratio = setting.samples.tokens, block.eta_z / block.eta_w
    v_rate = setting.columns[:, :m].T @ rate.w
    v = setting.columns[:, :m].T @ setting.w
    sizes = sizes + ratio * np.sum(np.abs(v * v_rate), axis=1)
    # A token of small scores is rounded like the largest one: all enter f, and come back from w.
    columns = np.sum(np.abs(setting.columns[:, :m]), axis=0)
    rounding = ratio * np.sum(np.abs(v), axis=1) * columns * np.max(np.abs(rate.w))
    if whole:
        sizes, rounding = np.array([sizes.sum()]), np.array([rounding.sum()])
    y = np.abs(setting.z / block.tau)
    largest = np.exp(np.minimum(y, 500)) if block.sigma.name == "sigmoid" else y**2
    terms = ratio * float(np.sum(v**2)) + block.tau**2 * float(np.sum(largest + y))
    return 1e-6 * sizes + 1e-13 * (rounding + terms / h) + 1e-300


def random_samples(rng: Generator, *, queries: int = 1, nodes: int = 3) -> Samples:
    """Return forty samples of six tokens, with random gradients for each node."""
    x = rng.dirichlet(np.ones(6), size=40)
    query = None if queries == 1 else rng.permutation(np.arange(40) % queries)
    return Samples(x, gradient=rng.normal(size=(40, nodes)), query=query)


def random_start(samples: Samples, rng: Generator, logit: float = 0.0) -> State:
    """Return a random state for the samples, its logits about a given value."""
    m, k, q = samples.tokens, samples.nodes, samples.queries
    return State(
        0.3 * rng.normal(size=(m, k)),
        logit + 0.3 * rng.normal(size=(q, m)),
        0.1 * rng.normal(size=(q, k)),
    )


def random_point(rng: Generator, **given: Any) -> Point:
    """Return a block of moderate size at moderate rates, as a point of a search."""
    sizes = {"tokens": 5, "nodes": 3, "queries": 1, "samples": 9}
    data = {"weights": 0.5, "logits": 0.5, "absent": 0.2, "drive": "gradient"}
    block = {"eta_w": 0.7, "eta_z": 1.3, "tau": 0.6, "activation": "tanh"}
    return {**sizes, **data, **block, "draw": int(rng.integers(2**32)), **given}

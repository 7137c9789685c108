"""The JoMA block (Eqns 1-2) in full: attention and lower MLP layer, trained together.

    h_k = φ(w_k·f),   f = U_C b + u_q,   b = σ(z_q/τ) ∘ x / A

by gradient ascent on E[Σ_k g_k h_k] with given gradients g (Eqn 9), or on the log-likelihood of
labels with h as class scores (Figs. 2, 3). Nothing is integrated out here: this is the simulation
that the closed forms of the other modules are checked against.

The weights appear through their projections v_k = U_Cᵀ w_k and, on the query's embedding u_m, the
implicit bias ξ_km = u_mᵀ w_k (Eqn 60). Embeddings enter by their Gram matrix alone, which is the
identity if they are orthonormal.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import integrate, special

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory.functions import ACTIVATIONS, ATTENTIONS, Activation, Attention

__all__ = ["Block", "Samples", "State", "Trajectory", "objective", "simulate", "velocity"]


@dataclass(frozen=True, eq=False)
class Samples:
    """The data of Eqn 2: token frequencies, and what drives the hidden nodes.

    Attributes:
        x: frequency of each token in each sample, shape (N, M), ≥ 0.
        gradient: g_k, the gradient each hidden node receives (Eqn 9), shape (N,) or (N, K).
        labels: instead of `gradient`, the class of each sample, shape (N,), for cross-entropy;
            hidden node k is then the score of class k.
        query: the query token of each sample, shape (N,), any whole numbers ≥ 0; None for one
            query. Afterwards the position of each in `query_tokens`.
        probability: weight of each sample in the expectation, shape (N,); None for equal ones.
        classes: number of classes; one more than the largest label if None.
        query_tokens: the different queries, in increasing order.
    """

    x: ArrayLike
    gradient: ArrayLike | None = None
    labels: ArrayLike | None = None
    query: ArrayLike | None = None
    probability: ArrayLike | None = None
    classes: int | None = None
    query_tokens: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        x = _checks.shape("x", _checks.non_negative("x", self.x), (None, None))
        n = x.shape[0]
        if n == 0:
            raise JomaError("x must have at least one sample, got none")
        if (self.gradient is None) == (self.labels is None):
            raise JomaError("give either gradient or labels, and not both")
        self._keep("x", x)
        if self.gradient is not None:
            g = _checks.at_least_1d("gradient", self.gradient)
            g = _checks.shape("gradient", g[:, None] if g.ndim == 1 else g, (n, None))
            self._keep("gradient", g)
        if self.labels is not None:
            self._keep("labels", self._whole("labels", self.labels))
            largest = int(np.max(np.asarray(self.labels))) + 1
            classes = largest if self.classes is None else self.classes
            if _checks.whole("classes", classes, 1) < largest:
                raise JomaError(f"classes must exceed the largest label {largest - 1}")
            object.__setattr__(self, "classes", int(classes))
        if self.query is not None:
            tokens, position = np.unique(self._whole("query", self.query), return_inverse=True)
            self._keep("query", position)
            self._keep("query_tokens", tokens)
        else:
            self._keep("query_tokens", np.zeros(1, dtype=np.int64))
        share = np.full(n, 1 / n) if self.probability is None else self.probability
        share = _checks.shape("probability", _checks.at_least_1d("probability", share), (n,))
        self._keep("probability", _checks.distribution("probability", share))

    @property
    def tokens(self) -> int:
        """M, the number of contextual tokens."""
        return np.shape(self.x)[1]

    @property
    def nodes(self) -> int:
        """K, the number of hidden nodes."""
        if self.gradient is not None:
            return np.shape(self.gradient)[1]
        assert self.classes is not None
        return self.classes

    @property
    def queries(self) -> int:
        """The number of different queries."""
        return len(self.query_tokens)

    def _whole(self, name: str, value: ArrayLike) -> NDArray[np.int64]:
        whole = _checks.integers(name, value, 0)
        if whole.shape != (len(np.asarray(self.x)),):
            raise JomaError(
                f"{name} must have shape ({len(np.asarray(self.x))},), got {whole.shape}"
            )
        return whole

    def _keep(self, name: str, value: Array | NDArray[np.int64]) -> None:
        """Keeps a copy that cannot be written to: what was checked stays what it was."""
        object.__setattr__(self, name, _checks.frozen(value))


@dataclass(frozen=True, eq=False)
class Block:
    """Eqn 1: one attention layer and the lower layer of its MLP, with how they are trained.

    Attributes:
        attention: an `Attention`, or the name of one: linear, exp, softmax, sigmoid.
        activation: an `Activation`, or the name of one: linear, tanh, softplus, sigmoid, relu,
            leaky_relu.
        eta_w: learning rate of the MLP weights.
        eta_z: learning rate of the attention logits.
        tau: temperature of the attention.
        embeddings: columns u_1 … u_M of the tokens, then one column for each query, shape
            (d, M + queries); None for orthonormal ones.
    """

    attention: Attention | str = "exp"
    activation: Activation | str = "linear"
    eta_w: float = 1.0
    eta_z: float = 1.0
    tau: float = 1.0
    embeddings: Array | None = None

    def __post_init__(self) -> None:
        attention = _by_name("attention", self.attention, ATTENTIONS, Attention)
        activation = _by_name("activation", self.activation, ACTIVATIONS, Activation)
        object.__setattr__(self, "attention", attention)
        object.__setattr__(self, "activation", activation)
        for name in ("eta_w", "eta_z", "tau"):
            object.__setattr__(self, name, _checks.positive_scalar(name, getattr(self, name)))
        if self.embeddings is not None:
            columns = _checks.finite("embeddings", self.embeddings)
            object.__setattr__(
                self, "embeddings", _checks.shape("embeddings", columns, (None, None))
            )

    @property
    def sigma(self) -> Attention:
        """The attention as an object."""
        assert isinstance(self.attention, Attention)
        return self.attention

    @property
    def phi(self) -> Activation:
        """The activation as an object."""
        assert isinstance(self.activation, Activation)
        return self.activation

    def scores(self, x: Array, z: Array) -> Array:
        """Eqn 1: b = σ(z/τ) ∘ x / A."""
        if not self.sigma.normalized:
            return self.sigma.score(z / self.tau) * x / self.sigma.normalizer
        peak = np.max(z, axis=-1, keepdims=True)
        unnormalized = np.exp((z - peak) / self.tau) * x
        return unnormalized / np.sum(unnormalized, axis=-1, keepdims=True)

    def pull_back(self, x: Array, z: Array, g_b: Array) -> Array:
        """Eqn 2: (∂b/∂z)ᵀ g_b, sample by sample."""
        if not self.sigma.normalized:
            slope = self.sigma.derivative(z / self.tau) / (self.tau * self.sigma.normalizer)
            return slope * x * g_b
        b = self.scores(x, z)
        return b * (g_b - np.sum(b * g_b, axis=-1, keepdims=True)) / self.tau


class State(NamedTuple):
    """What is trained: v (M, K), logits z (queries, M) and implicit bias ξ (queries, K)."""

    v: Array
    z: Array
    bias: Array


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A block in training.

    Attributes:
        t: times, shape (T,).
        v: projections of the weights on the tokens, shape (T, M, K).
        z: attention logits, shape (T, M) for one query and (T, queries, M) for several.
        bias: implicit biases ξ, shape (T, queries, K).
        block: what was trained.
        samples: on what.
        start: the state at t = 0.
    """

    t: Array
    v: Array
    z: Array
    bias: Array
    block: Block
    samples: Samples
    start: State


def velocity(
    block: Block, samples: Samples, state: State, *, switches: Array | None = None
) -> State:
    """Eqn 2: ẇ = η_W E[g h′ f], ż_m = η_Z E[(∂b/∂z_m)ᵀ U_Cᵀ g_f], in projections.

    With several queries, each z_m is driven by its own samples: P(m)·E_{q=m}.

    Args:
        block: what is trained.
        samples: the data.
        state: where.
        switches: h′ of every sample and node, shape (N, K), if it is not to follow the state.
    """
    query, x = sample_queries(samples), np.asarray(samples.x)
    logits = state.z[query]
    pull = node_gradients(block, samples, state, switches)
    v_rate = block.scores(x, logits).T @ pull
    bias_rate = _by_query(pull, query, samples.queries)
    if block.embeddings is not None:
        gram = block.embeddings.T @ block.embeddings
        both = gram @ np.concatenate([v_rate, bias_rate])
        v_rate, bias_rate = both[: samples.tokens], both[samples.tokens :]
    z_rate = _by_query(block.pull_back(x, logits, pull @ state.v.T), query, samples.queries)
    return State(block.eta_w * v_rate, block.eta_z * z_rate, block.eta_w * bias_rate)


def objective(block: Block, samples: Samples, state: State) -> float:
    """Eqn 9: E[Σ_k g_k h_k], or the mean log-likelihood of the labels; training ascends it."""
    h = block.phi.value(preactivations(block, samples, state))
    share = np.asarray(samples.probability)
    if samples.gradient is not None:
        return float(share @ np.sum(np.asarray(samples.gradient) * h, axis=1))
    log_total = special.logsumexp(h, axis=-1)
    chosen = h[np.arange(len(h)), np.asarray(samples.labels)]
    return float(share @ (chosen - log_total))


def simulate(
    block: Block,
    samples: Samples,
    t: ArrayLike,
    *,
    initial: tuple[ArrayLike, ...] | None = None,
    descent_step: float | None = None,
    flow_step: float | None = None,
) -> Trajectory:
    """Eqns 1-2, integrated: gradient flow, or gradient steps where `descent_step` is given.

    Smooth activations are integrated adaptively to 1e-12. With others (ReLU) the right side jumps
    where a sample switches a node; the flow then takes fixed Runge-Kutta steps within which the
    switches stay, which is first order in the step but keeps the conserved quantities to fourth.

    Args:
        block: what is trained.
        samples: the data.
        t: times at which the state is kept, increasing, shape (T,).
        initial: a `State`, (v, z) or (v, z, bias); zero if None. With
            embeddings, v and bias must be projections of some weights w: (v, bias) = (U_C, u)ᵀ w.
        descent_step: length in t of one gradient step; the times are rounded to whole steps, and
            must remain different.
        flow_step: length of a fixed step of the flow with activations that are not smooth; the
            default is a 2000th of the whole time.
    """
    if block.sigma.normalized and np.any(np.sum(np.asarray(samples.x), axis=1) == 0):
        raise JomaError("x must have a token in every sample, or softmax has nothing to weigh")
    t = np.atleast_1d(_checks.times("t", t))
    if t.size == 0 or np.any(np.diff(t) <= 0):
        raise JomaError("t must hold at least one time, in increasing order")
    start = _initial(samples, initial)
    if block.embeddings is not None and block.embeddings.shape[1] != (
        samples.tokens + samples.queries
    ):
        raise JomaError(
            f"embeddings must have {samples.tokens} token columns and {samples.queries} query "
            f"columns, got {block.embeddings.shape[1]} in all"
        )
    if block.embeddings is not None:
        _check_range(block.embeddings, start)
    if descent_step is not None:
        step = _checks.positive_scalar("descent_step", descent_step)
        counts = np.round(t / step).astype(np.int64)
        if np.any(np.diff(counts) == 0):
            raise JomaError(f"descent_step must not exceed the spacing of t, got {step:g}")
        states = _stepped(_euler(block, samples, step), start, counts)
        t = counts.astype(np.float64) * step
    elif block.phi.smooth:
        states = _adaptive(block, samples, start, t)
    else:
        step = t[-1] / 2000 if flow_step is None else flow_step
        step = _checks.positive_scalar("flow_step", step if step > 0 else 1.0)
        states = _frozen(block, samples, start, t, step)
    if not all(np.all(np.isfinite(part)) for part in states[-1]):
        raise JomaError(f"t must end before the weights diverge, got t = {t[-1]:g}")
    z = np.stack([s.z for s in states])
    return Trajectory(
        t=t,
        v=np.stack([s.v for s in states]),
        z=z[:, 0] if samples.query is None else z,
        bias=np.stack([s.bias for s in states]),
        block=block,
        samples=samples,
        start=start,
    )


def _by_name(
    argument: str, value: object, known: Mapping[str, Callable[[], object]], kind: type
) -> object:
    if isinstance(value, str) and value in known:
        return known[value]()
    if not isinstance(value, kind):
        raise JomaError(
            f"{argument} must be one of {', '.join(known)} or an {kind.__name__}, got {value!r}"
        )
    return value


def _initial(samples: Samples, initial: Any) -> State:
    m, k, q = samples.tokens, samples.nodes, samples.queries
    zero = State(np.zeros((m, k)), np.zeros((q, m)), np.zeros((q, k)))
    if initial is None:
        return zero
    if not isinstance(initial, tuple) or not 2 <= len(cast(Any, initial)) <= 3:
        raise JomaError(f"initial must be a State or (v, z) or (v, z, bias), got {initial!r}")
    v, z, bias = (*cast(Any, initial), zero.bias)[:3]
    v = _checks.finite("initial v", v)
    v = _checks.shape("initial v", v[:, None] if v.ndim == 1 else v, (m, k))
    z = _checks.shape("initial z", np.atleast_2d(_checks.finite("initial z", z)), (q, m))
    bias = np.atleast_2d(_checks.finite("initial bias", bias))
    return State(v, z, _checks.shape("initial bias", bias, (q, k)))


def _check_range(embeddings: Array, start: State) -> None:
    """Raise unless some weights have the projections (v, bias) on the embeddings."""
    projections = np.concatenate([start.v, start.bias])
    left, sizes, _ = np.linalg.svd(embeddings.T, full_matrices=False)
    basis = left[:, sizes > 1e-10 * np.max(sizes, initial=0.0)]
    outside = projections - basis @ (basis.T @ projections)
    largest = float(np.max(np.abs(projections), initial=0.0))
    if np.max(np.abs(outside), initial=0.0) > 1e-8 * largest:
        raise JomaError(
            "initial v and bias must be projections of weights on the embeddings, (U_C, u)ᵀ w, got "
            f"values {np.max(np.abs(outside)):.3g} away from any"
        )


def sample_queries(samples: Samples) -> NDArray[np.int64]:
    """The position of each sample's query in `query_tokens`, shape (N,)."""
    if samples.query is None:
        return np.zeros(len(np.asarray(samples.x)), dtype=np.int64)
    return np.asarray(samples.query, dtype=np.int64)


def preactivations(block: Block, samples: Samples, state: State) -> Array:
    """w_k·f = v_k·b + ξ_qk, shape (N, K)."""
    query = sample_queries(samples)
    return block.scores(np.asarray(samples.x), state.z[query]) @ state.v + state.bias[query]


def node_gradients(
    block: Block, samples: Samples, state: State, switches: Array | None = None
) -> Array:
    """The factors g_k h′_k of Eqn 2, weighted by the samples' probabilities, shape (N, K)."""
    pre = preactivations(block, samples, state)
    if samples.gradient is not None:
        g = np.asarray(samples.gradient)
    else:
        g = -special.softmax(block.phi.value(pre), axis=-1)
        g[np.arange(len(g)), np.asarray(samples.labels)] += 1
    slopes = block.phi.derivative(pre) if switches is None else switches
    return np.asarray(samples.probability)[:, None] * g * slopes


def _by_query(rows: Array, query: NDArray[np.int64], queries: int) -> Array:
    if queries == 1:
        return np.sum(rows, axis=0, keepdims=True)
    total = np.zeros((queries, rows.shape[1]))
    np.add.at(total, query, rows)
    return total


def _add(state: State, rate: State, step: float) -> State:
    return State(*(a + step * b for a, b in zip(state, rate, strict=True)))


def _euler(block: Block, samples: Samples, step: float) -> Callable[[State], State]:
    return lambda state: _add(state, velocity(block, samples, state), step)


def _stepped(
    advance: Callable[[State], State], state: State, counts: NDArray[np.int64]
) -> list[State]:
    kept: list[State] = []
    done = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for count in counts:
            while done < count:
                state = advance(state)
                done += 1
            kept.append(state)
    return kept


def _frozen(block: Block, samples: Samples, state: State, t: Array, step: float) -> list[State]:
    """Runge-Kutta steps of at most `step`, each with the switches of its beginning.

    Cross-entropy gradients vary smoothly and are not frozen; what is frozen is φ′.
    """
    kept: list[State] = []
    now = 0.0
    for target in t:
        count = int(np.ceil((target - now) / step - 1e-9))
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(count):
                state = _runge_kutta(block, samples, state, (target - now) / count)
        now = float(target)
        kept.append(state)
    return kept


def _runge_kutta(block: Block, samples: Samples, state: State, step: float) -> State:
    switches = block.phi.derivative(preactivations(block, samples, state))

    def rate(at: State) -> State:
        return velocity(block, samples, at, switches=switches)

    k1 = rate(state)
    k2 = rate(_add(state, k1, step / 2))
    k3 = rate(_add(state, k2, step / 2))
    k4 = rate(_add(state, k3, step))
    mean = State(*((a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(k1, k2, k3, k4, strict=True)))
    return _add(state, mean, step)


def _adaptive(block: Block, samples: Samples, start: State, t: Array) -> list[State]:
    shapes = [part.shape for part in start]
    ends = np.cumsum([part.size for part in start])

    def unpack(flat: Array) -> State:
        return State(
            *(p.reshape(s) for p, s in zip(np.split(flat, ends[:-1]), shapes, strict=True))
        )

    def pack(state: State) -> Array:
        return np.concatenate([part.ravel() for part in state])

    def right_side(_: float, flat: Array) -> Array:
        return pack(velocity(block, samples, unpack(flat)))

    if t[-1] == 0:
        return [start]
    solution: Any = integrate.solve_ivp(
        right_side, (0.0, t[-1]), pack(start), "DOP853", t_eval=t, rtol=1e-12, atol=1e-13
    )
    if not solution.success:
        raise JomaError(f"t must end before the weights diverge, got t = {t[-1]:g}")
    return [unpack(column) for column in solution.y.T]

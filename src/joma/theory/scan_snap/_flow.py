"""Scan&Snap: the corpus, the population gradient flow of (z, Y) and its trajectory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special
from scipy.integrate import solve_ivp

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array


@dataclass(frozen=True, eq=False)
class ScanSnapCorpus:
    """Scan&Snap, data model: tokens are drawn from P(l|m,n), the next token n fixes its query m.

    Attributes:
        token_given_class: P(l|m,n), one row per class (next token) n, one column per token l.
        query: the query m of each class n, whole numbers from 0.
        joint: P(m,n) of each class.
    """

    token_given_class: Array
    query: NDArray[np.int64]
    joint: Array

    def __post_init__(self) -> None:
        tokens = _checks.distribution("token_given_class", self.token_given_class)
        classes = _checks.shape("token_given_class", tokens, (None, None)).shape[0]
        joint = _checks.shape("joint", _checks.distribution("joint", self.joint), (classes,))
        _checks.positive("joint", joint)
        query = _checks.integers("query", self.query, 0)
        if query.shape != (classes,):
            raise JomaError(f"query must have shape ({classes},), got {query.shape}")
        if set(query.tolist()) != set(range(int(query.max()) + 1)):
            raise JomaError(f"query must use every number from 0, got {query.tolist()}")
        object.__setattr__(self, "token_given_class", tokens)
        object.__setattr__(self, "joint", joint)
        object.__setattr__(self, "query", query)

    @property
    def classes(self) -> int:
        """K, how many next tokens there are."""
        return self.token_given_class.shape[0]

    @property
    def tokens(self) -> int:
        """M, how many contextual tokens there are."""
        return self.token_given_class.shape[1]

    @cached_property
    def queries(self) -> int:
        """How many queries there are."""
        return int(self.query.max()) + 1

    @cached_property
    def of_query(self) -> Array:
        """One where class n (row) belongs to query m (column), else zero."""
        return np.eye(self.queries)[self.query]

    @cached_property
    def query_probability(self) -> Array:
        """P(m)."""
        return self.joint @ self.of_query

    @cached_property
    def class_given_query(self) -> Array:
        """P(n|m) of each class n for its own query m."""
        return self.joint / self.query_probability[self.query]

    @cached_property
    def shared(self) -> NDArray[np.bool_]:
        """Which tokens occur in more than one class: the talk's common tokens."""
        return np.asarray(np.count_nonzero(self.token_given_class, axis=0) > 1)

    @cached_property
    def common(self) -> NDArray[np.bool_]:
        """Which tokens are equally common in all classes."""
        first = self.token_given_class[0]
        equal = np.all(np.isclose(self.token_given_class, first, rtol=1e-9, atol=0.0), axis=0)
        return equal & (first > 0) & self.shared

    @cached_property
    def distinct(self) -> NDArray[np.bool_]:
        """Which tokens occur in one class only."""
        return np.asarray(np.count_nonzero(self.token_given_class, axis=0) == 1)

    @cached_property
    def alike(self) -> bool:
        """Whether no class differs from another but by the names of its distinct tokens.

        One query, equally probable classes, and tokens that are equally common in all classes or
        distinct, the distinct ones of every class with the same frequencies.
        """
        own = np.sort(np.where(self.distinct, self.token_given_class, 0.0), axis=1)
        return bool(
            self.queries == 1
            and np.allclose(self.joint, self.joint[0], rtol=1e-9, atol=0.0)
            and np.array_equal(self.shared, self.common)
            and np.allclose(own, own[0], rtol=1e-9, atol=0.0)
        )

    def distinct_of(self, class_: int) -> NDArray[np.int64]:
        """The distinct tokens of one class, the most frequent first."""
        index = _checks.whole("class_", class_, 0)
        if index >= self.classes:
            raise JomaError(f"class_ must be below {self.classes}, got {index}")
        row = self.token_given_class[index]
        tokens = np.flatnonzero(self.distinct & (row > 0))
        return tokens[np.argsort(-row[tokens], kind="stable")]


def attention(corpus: ScanSnapCorpus, z: ArrayLike) -> Array:
    """Scan&Snap, attention b_n ∝ P(l|m,n) exp(z_ml) of every class, summing to one.

    Args:
        corpus: the data.
        z: logits, shape (..., queries, tokens).

    Returns:
        Shape (..., classes, tokens).
    """
    weights = _weights(corpus, _logits(corpus, z))
    return weights / weights.sum(axis=-1, keepdims=True)


def feature(corpus: ScanSnapCorpus, z: ArrayLike) -> Array:
    """Scan&Snap, f_n = c_n/‖c_n‖ with c_n ∝ P(l|m,n) exp(z_ml): what the decoder sees.

    Args:
        corpus: the data.
        z: logits, shape (..., queries, tokens).

    Returns:
        Unit vectors, shape (..., classes, tokens).
    """
    return _feature(corpus, _logits(corpus, z))


def objective(corpus: ScanSnapCorpus, z: ArrayLike, y: ArrayLike) -> Array:
    """Scan&Snap, E[log softmax(Yᵀf_n)_n], the log-likelihood of the next token for T → ∞."""
    scores = feature(corpus, z) @ _decoder(corpus, y)
    own = np.diagonal(scores, axis1=-2, axis2=-1)
    return np.asarray((own - special.logsumexp(scores, axis=-1)) @ corpus.joint)


def flow(
    corpus: ScanSnapCorpus, z: ArrayLike, y: ArrayLike, *, eta_y: float, eta_z: float
) -> tuple[Array, Array]:
    """Scan&Snap, population gradient flow (ż, Ẏ); 1/P(m) is absorbed in η_Z.

    Args:
        corpus: the data.
        z: logits, shape (..., queries, tokens).
        y: decoder, shape (..., tokens, classes).
        eta_y: rate of the decoder.
        eta_z: rate of the attention.

    Returns:
        ż = η_Z Σ_n P(n|m) f_n∘(g_n − f_n f_nᵀg_n) and Ẏ = η_Y Σ_n P(m,n) f_n(e_n − α_n)ᵀ.
    """
    eta_y, eta_z = (
        _checks.positive_scalar("eta_y", eta_y),
        _checks.positive_scalar("eta_z", eta_z),
    )
    z_rate, y_rate, _ = rates(corpus, _logits(corpus, z), _decoder(corpus, y))
    return eta_z * z_rate, eta_y * y_rate


@dataclass(frozen=True, eq=False)
class ScanSnapTrajectory:
    """Scan&Snap, one training run of (z, Y).

    Attributes:
        corpus: the data it was trained on.
        t: times, shape (T,).
        z: logits, shape (T, queries, tokens).
        y: decoder, shape (T, tokens, classes).
        b: B_n(t), shape (T, classes): η_Z ∫ P(n|m) γ_n(1 − S_n) dt, with γ_n the least-squares
            factor in g_n = γ_n f_n on the distinct tokens of n; NaN for a class without any.
    """

    corpus: ScanSnapCorpus
    t: Array
    z: Array
    y: Array
    b: Array

    @property
    def attention(self) -> Array:
        """Attention of every class, shape (T, classes, tokens)."""
        return attention(self.corpus, self.z)

    @property
    def entropy(self) -> Array:
        """Entropy of the attention of every class in nats, shape (T, classes)."""
        return np.sum(special.entr(self.attention), axis=-1)

    @property
    def fate(self) -> Array:
        """Sign of each logit's change from the first to the last time, (queries, tokens)."""
        return np.sign(self.z[-1] - self.z[0])

    def relative_gain(self, class_: int, token: int, other: int) -> Array:
        """Scan&Snap Theorem 3, r_{l/l'|n}(t) = c_l²/c_l'² − 1."""
        p = self.corpus.token_given_class[class_]
        if p[token] <= 0 or p[other] <= 0:
            raise JomaError(f"token and other must occur in class {class_}, got {token}, {other}")
        logits = self.z[:, self.corpus.query[class_]]
        lead = np.log(p[token] / p[other]) + logits[:, token] - logits[:, other]
        return np.expm1(2 * lead)


def evolve(
    corpus: ScanSnapCorpus,
    t: ArrayLike,
    *,
    eta_y: float,
    eta_z: float,
    initial: Mapping[str, ArrayLike] | None = None,
    rtol: float = 1e-9,
) -> ScanSnapTrajectory:
    """Scan&Snap, the population flow integrated from z = Y = 0 or from `initial`.

    Args:
        corpus: the data.
        t: increasing times ≥ 0; time runs from 0.
        eta_y: rate of the decoder.
        eta_z: rate of the attention.
        initial: `z` and/or `y` at time 0, where not zero.
        rtol: relative tolerance of the integrator.

    Returns:
        The trajectory at the times `t`.
    """
    times = np.atleast_1d(_checks.times("t", t))
    if np.any(np.diff(times) <= 0):
        raise JomaError("t must increase from one time to the next")
    eta_y = _checks.positive_scalar("eta_y", eta_y)
    eta_z = _checks.positive_scalar("eta_z", eta_z)
    start = dict(initial or {})
    z_shape, y_shape = (corpus.queries, corpus.tokens), (corpus.tokens, corpus.classes)
    z = _logits(corpus, start.pop("z", np.zeros(z_shape)))
    y = _decoder(corpus, start.pop("y", np.zeros(y_shape)))
    if start:
        raise JomaError(f"initial may hold z and y, got {sorted(start)}")
    sizes = np.cumsum([z.size, y.size])

    def rate(_: float, state: Array) -> Array:
        z_now, y_now, _b = np.split(state, sizes)
        z_rate, y_rate, b_rate = rates(corpus, z_now.reshape(z_shape), y_now.reshape(y_shape))
        return np.concatenate(
            [eta_z * z_rate.ravel(), eta_y * y_rate.ravel(), eta_z * np.nan_to_num(b_rate)]
        )

    state = np.concatenate([z.ravel(), y.ravel(), np.zeros(corpus.classes)])
    clock = max(eta_y, float(np.sqrt(eta_y * eta_z)))
    states = _integrate(rate, state, times, clock, rtol)
    z_path, y_path, b = np.split(states, sizes, axis=1)
    b[:, ~_has_distinct(corpus)] = np.nan
    return ScanSnapTrajectory(
        corpus, times, z_path.reshape(-1, *z_shape), y_path.reshape(-1, *y_shape), b
    )


def b_rate(corpus: ScanSnapCorpus, z: ArrayLike, y: ArrayLike, *, eta_z: float) -> Array:
    """Scan&Snap Theorem 3, Ḃ_n = η_Z P(n|m) γ_n(1 − S_n) with S_n = f_nᵀg_n/γ_n.

    γ_n is the least-squares factor in g_n = γ_n f_n over the distinct tokens of class n. So
    Ḃ_n Σf² = Σż over these tokens, and B rises as long as they rise together. Where all classes
    are alike (`ScanSnapCorpus.alike`) and share a token it rises for ever, at any rates: then g = 0
    on common tokens and Ḃ = η_Z P(n|m) γ(1 − F) > 0, F = Σf² over distinct tokens. Elsewhere it can
    turn and fall below 0; a larger η_Y/η_Z only delays that.

    Returns:
        Shape (..., classes); NaN for a class without distinct tokens.
    """
    eta_z = _checks.positive_scalar("eta_z", eta_z)
    return eta_z * rates(corpus, _logits(corpus, z), _decoder(corpus, y))[2]


def rates(corpus: ScanSnapCorpus, z: Array, y: Array) -> tuple[Array, Array, Array]:
    """Scan&Snap, ż/η_Z, Ẏ/η_Y and Ḃ/η_Z, for arguments known to be right."""
    f = _feature(corpus, z)
    residual = _residual(f @ y)
    g = residual @ np.swapaxes(y, -1, -2)
    overlap = np.sum(f * g, axis=-1, keepdims=True)
    share = corpus.class_given_query
    pull = share[:, None] * f * (g - f * overlap)
    z_rate = np.swapaxes(corpus.of_query, 0, 1) @ pull
    y_rate = np.swapaxes(f * corpus.joint[:, None], -1, -2) @ residual
    own = np.where(corpus.distinct, f, 0.0)
    norm = np.sum(own * own, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        gamma = np.sum(own * g, axis=-1) / norm
    return z_rate, y_rate, share * (gamma - overlap[..., 0])


def _residual(scores: Array) -> Array:
    """e_n − α_n; its own entry is summed from the others, since 1 − α_n cancels late."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    own = np.eye(scores.shape[-1])
    others = (1 - own) * weights / weights.sum(axis=-1, keepdims=True)
    return own * others.sum(axis=-1, keepdims=True) - others


def _weights(corpus: ScanSnapCorpus, z: Array) -> Array:
    logits = z[..., corpus.query, :]
    with np.errstate(divide="ignore"):
        # Only the tokens a class contains may set its scale, or a far larger logit of a token
        # absent from it would underflow all others.
        log = np.log(corpus.token_given_class) + logits
    return np.exp(log - log.max(axis=-1, keepdims=True))


def _feature(corpus: ScanSnapCorpus, z: Array) -> Array:
    weights = _weights(corpus, z)
    return weights / np.linalg.norm(weights, axis=-1, keepdims=True)


def _has_distinct(corpus: ScanSnapCorpus) -> NDArray[np.bool_]:
    return np.any((corpus.token_given_class > 0) & corpus.distinct, axis=1)


def _logits(corpus: ScanSnapCorpus, z: ArrayLike) -> Array:
    return _last_axes("z", z, (corpus.queries, corpus.tokens))


def _decoder(corpus: ScanSnapCorpus, y: ArrayLike) -> Array:
    return _last_axes("y", y, (corpus.tokens, corpus.classes))


def _last_axes(name: str, value: ArrayLike, expected: tuple[int, int]) -> Array:
    array = _checks.finite(name, value)
    if array.shape[-2:] != expected:
        raise JomaError(
            f"{name} must have shape (..., {expected[0]}, {expected[1]}), got {array.shape}"
        )
    return array


def _integrate(
    rate: Callable[[float, Array], Array], state: Array, times: Array, clock: float, rtol: float
) -> Array:
    """Integrates in ln(1 + clock·t), for late training goes by powers of the time."""
    if times[-1] == 0:
        return state[None].copy()

    def in_log_time(s: float, at: Array) -> Array:
        now = np.exp(s)
        return rate((now - 1) / clock, at) * (now / clock)

    log_times = np.log1p(clock * times)
    solution = solve_ivp(
        in_log_time,
        (0.0, float(log_times[-1])),
        state,
        method="LSODA",
        t_eval=log_times,
        rtol=rtol,
        atol=1e-12,
    )
    if not solution.success:
        raise RuntimeError(f"the flow could not be integrated: {solution.message}")
    return np.asarray(solution.y.T, dtype=np.float64)


def sample_sequences(
    corpus: ScanSnapCorpus, length: int, batch: int, rng: np.random.Generator | int
) -> tuple[NDArray[np.int64], Array]:
    """Scan&Snap, data model: sequences of `length` tokens drawn from P(l|m,n), and their classes.

    Returns:
        The class of each sequence, shape (batch,), and its token frequencies, (batch, tokens).
    """
    length, batch = _checks.whole("length", length, 1), _checks.whole("batch", batch, 1)
    return _sample(corpus, length, batch, _checks.generator(rng))


def sample_gradient(
    corpus: ScanSnapCorpus,
    classes: ArrayLike,
    frequencies: ArrayLike,
    z: ArrayLike,
    y: ArrayLike,
    weight: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Scan&Snap, gradient of the sequences' mean log softmax(Yᵀf)_n, f ∝ x∘exp(z_m), ‖f‖ = 1.

    Args:
        corpus: the data; says which query a class has.
        classes: class of each sequence, shape (batch,).
        frequencies: token frequencies x of each sequence, shape (batch, tokens).
        z: logits, shape (queries, tokens).
        y: decoder, shape (tokens, classes).
        weight: weight of each sequence, instead of 1/batch.

    Returns:
        The gradient with respect to z, divided by P(m) as in the flow, and to Y.
    """
    classes = _checks.integers("classes", classes, 0)
    if classes.ndim != 1 or np.any(classes >= corpus.classes):
        raise JomaError(f"classes must be one axis of numbers below {corpus.classes}")
    x = _checks.non_negative("frequencies", frequencies)
    x = _checks.shape("frequencies", x, (classes.size, corpus.tokens))
    z = _checks.finite("z", z, (corpus.queries, corpus.tokens))
    y = _checks.finite("y", y, (corpus.tokens, corpus.classes))
    mean = np.full(classes.size, 1 / classes.size)
    if weight is not None:
        mean = _checks.shape("weight", _checks.non_negative("weight", weight), (classes.size,))
    return _gradient(corpus, classes, x, z, y, mean)


def finite_length_bias(bias: ArrayLike, length: int, other: int) -> Array:
    """New: E[gradient of a sequence of T tokens] lies O(1/T) from the population's.

    Args:
        bias: that difference at `length`.
        length: tokens per sequence.
        other: another length.

    Returns:
        The difference at `other`.
    """
    return (
        _checks.finite("bias", bias)
        * _checks.whole("length", length, 1)
        / _checks.whole("other", other, 1)
    )


def train_on_samples(
    corpus: ScanSnapCorpus,
    length: int,
    steps: int,
    batch: int,
    *,
    eta_y: float,
    eta_z: float,
    rng: np.random.Generator | int,
    every: int = 1,
) -> ScanSnapTrajectory:
    """Scan&Snap by stochastic gradient ascent from zero; a step is one unit of the flow's time.

    Args:
        corpus: the data.
        length: tokens per sequence.
        steps: how many steps.
        batch: sequences per step.
        eta_y: rate of the decoder.
        eta_z: rate of the attention, 1/P(m) absorbed as in the flow.
        rng: source of the sequences, or its seed.
        every: steps between two recorded states.

    Returns:
        The trajectory, with B_n accumulated from the population rates at the visited states.
    """
    length, batch = _checks.whole("length", length, 1), _checks.whole("batch", batch, 1)
    steps, every = _checks.whole("steps", steps, 1), _checks.whole("every", every, 1)
    eta_y = _checks.positive_scalar("eta_y", eta_y)
    eta_z = _checks.positive_scalar("eta_z", eta_z)
    rng = _checks.generator(rng)
    z, y = np.zeros((corpus.queries, corpus.tokens)), np.zeros((corpus.tokens, corpus.classes))
    b = 0 * rates(corpus, z, y)[2]  # keeps the NaN of a class without distinct tokens
    mean = np.full(batch, 1 / batch)
    path = [(0, z, y, b)]
    for step in range(1, steps + 1):
        classes, x = _sample(corpus, length, batch, rng)
        z_gradient, y_gradient = _gradient(corpus, classes, x, z, y, mean)
        b = b + eta_z * rates(corpus, z, y)[2]
        z, y = z + eta_z * z_gradient, y + eta_y * y_gradient
        if step % every == 0 or step == steps:
            path.append((step, z, y, b))
    t, z_path, y_path, b_path = (
        np.array(part, dtype=np.float64) for part in zip(*path, strict=True)
    )
    return ScanSnapTrajectory(corpus, t, z_path, y_path, b_path)


def _sample(
    corpus: ScanSnapCorpus, length: int, batch: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], Array]:
    rows = corpus.token_given_class
    classes = rng.choice(corpus.classes, size=batch, p=corpus.joint / corpus.joint.sum())
    counts = rng.multinomial(length, (rows / rows.sum(axis=1, keepdims=True))[classes])
    return classes.astype(np.int64), counts / length


def _gradient(
    corpus: ScanSnapCorpus, classes: NDArray[np.int64], x: Array, z: Array, y: Array, weight: Array
) -> tuple[Array, Array]:
    logits = np.where(x > 0, z[corpus.query[classes]], -np.inf)
    weights = x * np.exp(logits - logits.max(axis=1, keepdims=True))
    f = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    scores = f @ y
    alpha = np.exp(scores - scores.max(axis=1, keepdims=True))
    residual = -alpha / alpha.sum(axis=1, keepdims=True)
    residual[np.arange(classes.size), classes] += 1.0
    g = residual @ y.T
    pull = f * (g - f * np.sum(f * g, axis=1, keepdims=True))
    of_query = corpus.of_query[classes] / corpus.query_probability
    return (of_query * weight[:, None]).T @ pull, (f * weight[:, None]).T @ residual

"""Scan&Snap: the same model trained by stochastic gradient on sequences of finite length."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory.scan_snap._flow import ScanSnapCorpus, ScanSnapTrajectory, rates


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

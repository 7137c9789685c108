"""Sequences of finite length: the bias of their gradient, and training on samples of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from joma.common.types import Array
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, measured
from joma.experiments.claims.reference import scan_snap as reference
from joma.experiments.claims.scan_snap.corpora import balanced, one_query
from joma.experiments.claims.search import Integer, Real, Seed
from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced, ScanSnapCorpus


def _leading_bias(
    corpus: ScanSnapCorpus, z: Array, y: Array, population: Array, reach: float
) -> Callable[[int], Array]:
    """Return the bias of the mean gradient in 1/T, by enumeration of all sequences of T tokens.

    Args:
        corpus: Two tokens.
        z: Logits.
        y: Decoder.
        population: The gradient without bias.
        reach: Counts that lie farther from their mean, in standard deviations, are left out.
    """

    def bias(length: int) -> Array:
        total = np.zeros_like(population)
        for class_, p in enumerate(corpus.token_given_class):
            away = reach * np.sqrt(length * p[0] * p[1]) + 11
            low, high = max(0.0, length * p[0] - away), min(length, length * p[0] + away)
            first = np.arange(int(low), int(high) + 1)
            counts = np.stack([first, length - first], axis=-1)
            ways = special.gammaln(length + 1) - special.gammaln(counts + 1).sum(axis=1)
            weight = corpus.joint[class_] * np.exp(ways + counts @ np.log(p))
            classes = np.full(len(counts), class_)
            parts = scan_snap.sample_gradient(corpus, classes, counts / length, z, y, weight)
            total += np.concatenate([part.ravel() for part in parts])
        return total - population

    # Two lengths cancel the part in 1/T².
    return lambda length: 4 * bias(2 * length) - bias(length)


@over(
    first=Real(0.1, 0.9),
    second=Real(0.1, 0.9),
    share=Real(0.05, 0.95),
    scale=Real(0.0, 3.0),
    length=Integer(1000, 2000),
    draw=Seed(),
)
def _finite_length_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance of the bias at 4T from the formula's, by enumeration of all sequences."""
    rng = np.random.default_rng(point["draw"])
    rows = [[point[name], 1 - point[name]] for name in ("first", "second")]
    corpus = one_query(rows, [point["share"], 1 - point["share"]])
    z, y = 0.5 * rng.standard_normal((1, 2)), point["scale"] * rng.standard_normal((2, 2))
    population = np.concatenate([one.ravel() for one in reference.gradient(corpus, z, y)])
    # Counts beyond eleven standard deviations weigh less than 1e-25.
    leading = _leading_bias(corpus, z, y, population, 11)
    length = point["length"]
    expected = leading(4 * length)
    ours = formula(leading(length), length, 4 * length)
    size = float(np.linalg.norm(expected)) + 0.05 * (1 + point["scale"]) / length
    return measured(np.linalg.norm(ours - expected) / size, 8e4 / length**2)


@claim("scan-snap-finite-length", scan_snap.finite_length_bias, _finite_length_at)
def _finite_length(formula: Formula, rng: Generator) -> ClaimMeasurement:
    corpus = one_query([[0.6, 0.4], [0.3, 0.7]], [0.4, 0.6])
    z, y = 0.5 * rng.normal(size=(1, 2)), rng.normal(size=(2, 2))
    parts = scan_snap.flow(corpus, z, y, eta_y=1.0, eta_z=1.0)
    population = np.concatenate([part.ravel() for part in parts])
    leading = _leading_bias(corpus, z, y, population, np.inf)
    expected = leading(2000)
    ours = formula(leading(500), 500, 2000)
    return measured(np.linalg.norm(ours - expected) / np.linalg.norm(expected), 0.005)


@over(
    classes=Integer(2, 4),
    common=Integer(1, 3),
    distinct=Integer(1, 3),
    mass=Real(0.2, 0.8),
    step=Real(0.01, 0.05, log=True),
    eta_z=Real(0.1, 3.0, log=True),
    length=Integer(1000, 2000),
    sampled=True,
)
def sampled_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Measure the distance of B from its mean over runs on sampled sequences, relative.

    The tolerance is four standard errors, 1.2/steps, and tokens/length for the bias of sequences of
    finite length. B is quadratic in time at first, so that n Euler steps miss 1/n of it.
    """
    corpus = balanced(point)
    step, length, steps = point["step"], point["length"], 40
    rates: dict[str, Any] = {"eta_y": step, "eta_z": step * point["eta_z"]}
    rng = point.generator
    runs = 4 * min(point.effort, 20)
    batch = 8 * max(1, point.effort // 20)

    def mean_b() -> float:
        run = scan_snap.train_on_samples(
            corpus.corpus, length, steps, batch, rng=rng, every=steps, **rates
        )
        return run.b[-1].mean()

    b = np.array([mean_b() for _ in range(runs)])
    error = abs(float(formula(corpus, [float(steps)], **rates)[0]) / b.mean() - 1)
    noise = b.std(ddof=1) / np.sqrt(runs) / b.mean()
    allowed = 1.2 / steps + corpus.corpus.tokens / length
    return ClaimMeasurement(error, float(4 * noise + allowed), float(noise))


@claim("scan-snap-sampled", Balanced.b_at, sampled_at, length=2000)
@without("scan-snap-sampled", length=10)
def _sampled(formula: Formula, rng: Generator, *, length: int) -> ClaimMeasurement:
    """The relative error of B, while scanning and long after t₀."""
    corpus = Balanced(3, 2, 2)
    rates: dict[str, Any] = {"eta_y": 0.1, "eta_z": 0.25}
    run = scan_snap.train_on_samples(corpus.corpus, length, 800, 32, rng=rng, every=100, **rates)
    at = np.searchsorted(run.t, [200, 500, 800])
    b = run.b[at].mean(axis=1)
    return measured(np.abs(formula(corpus, run.t[at], **rates) / b - 1), 0.006)

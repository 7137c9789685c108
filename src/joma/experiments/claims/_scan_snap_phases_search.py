"""Scan&Snap, how B grows: the domains an adversary searches, and each claim at a point."""

from typing import Any

import numpy as np
from scipy import special

from joma.errors import JomaError
from joma.experiments.claims.measurement import Formula, Measurement
from joma.experiments.claims.reference import scan_snap as reference
from joma.experiments.claims.reference.scan_snap import Even
from joma.experiments.claims.search import Integer, Point, Real, Search, Seed
from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced, Corpus

Array = np.ndarray

_BALANCED: dict[str, Any] = {
    "classes": Integer(2, 50, log=True),
    "common": Integer(1, 6),
    "distinct": Integer(1, 6),
    "mass": Real(0.01, 0.99, special=(0.5,)),
}
_RUN: dict[str, Any] = {
    "ratio": Real(1e-6, 1e6, log=True, special=(1.0,)),
    "time": Real(1e-3, 1e14, log=True),
}
"""η_Y/η_Z, and √(η_Y η_Z) t."""


def balanced(point: Point) -> Balanced:
    """Return the balanced corpus of a point."""
    return Balanced(point["classes"], point["common"], point["distinct"], point["mass"])


def flow(corpus: Balanced) -> Even:
    """Return the flow of a balanced corpus."""
    return Even(corpus.classes, corpus.common, corpus.distinct, corpus.common_mass)


def _rates(point: Point) -> dict[str, float]:
    ratio = point["ratio"]
    return {"eta_y": float(np.sqrt(ratio)), "eta_z": float(1 / np.sqrt(ratio))}


def balanced_law(formula: Formula, point: Point) -> Measurement:
    """Return the drift of the conserved quantity, relative to its largest term."""
    corpus, rates = balanced(point), _rates(point)
    state = flow(corpus).path(np.array([point["time"]]), **rates)[0]
    separation, decoder = state[1] - state[0], state[2]
    start = formula(corpus, 0.0, 0.0, **rates)
    end = formula(corpus, separation, decoder, **rates)
    u0 = corpus.common_mass**2 / corpus.common
    u0 = u0 / ((1 - corpus.common_mass) ** 2 / corpus.distinct)
    # dζ counts (1 + e^{2ζ}/u₀) times in the law.
    size = max(abs(separation), 1e-3) * (1 + np.exp(2 * separation) / u0)
    return Measurement(float(abs(end - start) / size), 1e-6)


def balanced_b(formula: Formula, point: Point) -> Measurement:
    """Return the distance of B(t) from the flow's, relative."""
    corpus, rates = balanced(point), _rates(point)
    t = np.array([point["time"]])
    b = float(flow(corpus).path(t, **rates)[0, -1])
    return Measurement(abs(float(formula(corpus, t, **rates)[0]) - b) / (b + 1e-6), 1e-5)


def scanning(formula: Formula, point: Point) -> Measurement:
    """Return by how much dB/d ln t exceeds its limit, relative, at any time and rates."""
    corpus, rates = balanced(point), _rates(point)
    state = flow(corpus).path(np.array([point["time"]]), rtol=1e-8, **rates)[0]
    slope = point["time"] * flow(corpus).rate(state, **rates)[-1]
    return Measurement(slope / formula(corpus) - 1, 1e-5)


def scanning_limit(formula: Formula, point: Point) -> Measurement:
    """Return how far the steepest dB/d ln t at η_Z/η_Y = 1e18 is from the limit, relative."""
    corpus = balanced(point)
    steepest, low, high = 0.0, 1e-11, 1e-2
    for _ in range(2):  # a second grid between the neighbours of the steepest point
        t = np.geomspace(low, high, 100)
        path = flow(corpus).path(t, 1.0, 1e18, rtol=1e-8)
        slopes = [
            now * flow(corpus).rate(state, 1.0, 1e18)[-1]
            for state, now in zip(path, t, strict=True)
        ]
        at = int(np.argmax(slopes))
        steepest = max(steepest, slopes[at])
        low, high = t[max(at - 1, 0)], t[min(at + 1, t.size - 1)]
    return Measurement(abs(steepest / formula(corpus) - 1), 0.002)


def _gram(classes: int, share: float) -> Array:
    """f_nᵀf_n' of classes that are alike: what is not on distinct tokens overlaps."""
    return share * np.eye(classes) + (1 - share)


def _frozen(point: Point, t: float) -> tuple[Array, Array, Array]:
    classes = point["classes"]
    joint = np.full(classes, 1 / classes)
    gram = _gram(classes, point["share"])
    return reference.frozen(gram, joint, np.array([t]), point["eta_y"])


def margin(formula: Formula, point: Point) -> Measurement:
    """Return the distance of the margin at the predicted time, relative."""
    wanted = point["margin"]
    of = {"classes": point["classes"], "distinct_share": point["share"], "eta_y": point["eta_y"]}
    scores, _, _ = _frozen(point, float(formula(wanted, **of)))
    reached = scores[0, 0, 0] - scores[0, 0, 1]
    return Measurement(abs(float(reached) / wanted - 1), 1e-6 / point["share"])


def deciding_time(formula: Formula, point: Point) -> Measurement:
    """Return the distance of the right class's probability from ½ at the predicted time."""
    of = {"classes": point["classes"], "distinct_share": point["share"], "eta_y": point["eta_y"]}
    scores, _, _ = _frozen(point, formula(**of))
    right = float(special.softmax(scores[0, 0])[0])
    return Measurement(abs(right - 0.5), 1e-6 / point["share"])


def snapping_order(formula: Formula, point: Point) -> Measurement:
    """Return by how much F times the deciding time exceeds 0.61 t₀, relative."""
    k = point["classes"]
    tokens = k + point["more"]
    decided = (k - 2 + (k - 1) * np.log(k - 1)) / point["eta_y"]
    return Measurement(float(decided / (0.61 * formula(k, tokens, point["eta_y"])) - 1), 1e-12)


def turn(formula: Formula, point: Point) -> Measurement:
    """Return d ln B/d ln t − 1 at the predicted time: there ∂B/∂η_Y is 0, B being b(η_Y t)/η_Y."""
    of = {"classes": point["classes"], "distinct_share": point["share"], "eta_y": point["eta_y"]}
    if point["share"] > 1 - 1e-6:
        raise JomaError("without common tokens nothing moves")
    t = formula(**of)
    _, b, b_rate = _frozen(point, t)
    return Measurement(abs(float(t * b_rate[0, 0] / b[0, 0]) - 1), 1e-6 / point["share"])


def _late_times(point: Point) -> tuple[Balanced, float, float, float]:
    corpus = balanced(point)
    start = np.exp(point["start"])
    end = np.exp(min(point["start"] * point["later"], 560.0))
    return corpus, float(start), float(end), point["eta_z"]


def snapping(formula: Formula, point: Point) -> Measurement:
    """Return the distance of the growth of B between two late times, relative; η_Y = 1."""
    corpus, start, end, eta_z = _late_times(point)
    formula(np.array([start]), corpus, anchor=(start, 1.0), eta_y=1.0, eta_z=eta_z)  # refuses early
    b = flow(corpus).path(np.array([start, end]), 1.0, eta_z, rtol=1e-8)[:, -1]
    ours = float(formula(np.array([end]), corpus, anchor=(start, b[0]), eta_y=1.0, eta_z=eta_z)[0])
    error = abs(ours - b[1]) / (b[1] - b[0])
    # What attention leaves to common tokens is left out as well, of the order (1 + u₀)/(c ln² t).
    u0 = corpus.common_over_distinct
    drive = u0 / corpus.slope * (1 - 1 / corpus.classes) * eta_z * point["start"] ** 2
    return Measurement(float(error), _late_slack(corpus, point["start"]) + 2 * (1 + u0) / drive)


def _late_slack(corpus: Balanced, log_time: float) -> float:
    """What is left out of the late laws is of the order (1 + ln K)/ln(η_Y t)."""
    return 4 * (1 + np.log(corpus.classes)) / log_time


def decoder_rate(formula: Formula, point: Point) -> Measurement:
    """Return the distance of ∂B/∂ln η_Y at a late time, relative."""
    corpus, start, _, eta_z = _late_times(point)
    t, step = np.array([start]), 0.05
    effect = float(formula(t, corpus, eta_y=1.0, eta_z=eta_z)[0])
    more, less = (
        flow(corpus).path(t, eta_y, eta_z, rtol=1e-10)[0, -1]
        for eta_y in (np.exp(step), np.exp(-step))
    )
    change = float(more - less) / (2 * step)
    u0 = corpus.common_over_distinct
    drive = u0 / corpus.slope * (1 - 1 / corpus.classes) * eta_z * np.log(start) ** 2
    slack = 4 * (1 + np.log(corpus.classes)) / np.log(start) ** 2
    slack += 2 * (1 + u0) * (1 + np.log1p(drive)) / drive
    return Measurement(abs(change / effect - 1), float(slack))


def both_rates(formula: Formula, point: Point) -> Measurement:
    """Return the distance of the state at larger rates from that at the rescaled time."""
    corpus, rates = balanced(point), _rates(point)
    factor = point["factor"]
    fast = flow(corpus).path(
        np.array([point["time"]]), factor * rates["eta_y"], factor * rates["eta_z"]
    )
    same = flow(corpus).path(np.atleast_1d(formula(point["time"], factor)), **rates)
    return Measurement(float(np.max(np.abs(fast - same) / (np.abs(fast) + 1e-4))), 1e-4)


def densest(formula: Formula, point: Point) -> Measurement:
    """Return 1 if entropy does not rise before the predicted separation and fall after it."""
    corpus = balanced(point)
    turn = formula(corpus)
    at = point["separation"]
    if abs(at - turn) < 1e-3:
        raise JomaError("too near to the turn")

    def entropy(separation: float) -> float:
        weights = np.concatenate(
            [
                np.full(corpus.common, corpus.common_mass / corpus.common),
                np.full(corpus.distinct, (1 - corpus.common_mass) / corpus.distinct)
                * np.exp(separation),
            ]
        )
        b = weights / weights.sum()
        return float(-np.sum(b * np.log(b)))

    step = 1e-4
    change = entropy(at + step) - entropy(at - step)
    if abs(change) < 1e-13:
        raise JomaError("the entropy hardly changes")
    return Measurement(float((change > 0) != (at < turn)), 0.0)


def finite_length(formula: Formula, point: Point) -> Measurement:
    """Return the distance of the bias at 4T from the formula's, by enumeration of all sequences."""
    rng = np.random.default_rng(point["draw"])
    rows = np.array([[point["first"], 1 - point["first"]], [point["second"], 1 - point["second"]]])
    joint = np.array([point["share"], 1 - point["share"]])
    corpus = Corpus(rows, np.zeros(2, dtype=np.int64), joint)
    z, y = 0.5 * rng.standard_normal((1, 2)), point["scale"] * rng.standard_normal((2, 2))
    population = np.concatenate([one.ravel() for one in reference.gradient(corpus, z, y)])

    def bias(length: int) -> Array:
        total = np.zeros_like(population)
        for class_, p in enumerate(rows):
            # All counts within eleven standard deviations; the others weigh less than 1e-25.
            reach = 11 * np.sqrt(length * p[0] * p[1]) + 11
            low, high = max(0, int(length * p[0] - reach)), min(length, int(length * p[0] + reach))
            first = np.arange(low, high + 1)
            counts = np.stack([first, length - first], axis=-1)
            ways = special.gammaln(length + 1) - special.gammaln(counts + 1).sum(axis=1)
            weight = joint[class_] * np.exp(ways + counts @ np.log(p))
            classes = np.full(len(counts), class_)
            parts = scan_snap.sample_gradient(corpus, classes, counts / length, z, y, weight)
            total += np.concatenate([part.ravel() for part in parts])
        return total - population

    def leading(length: int) -> Array:
        """The bias without its part in 1/T², which two lengths cancel."""
        return 4 * bias(2 * length) - bias(length)

    length = point["length"]
    expected = leading(4 * length)
    ours = formula(leading(length), length, 4 * length)
    size = float(np.linalg.norm(expected)) + 0.05 * (1 + point["scale"]) / length
    return Measurement(float(np.linalg.norm(ours - expected)) / size, 8e4 / length**2)


def sampled(formula: Formula, point: Point) -> Measurement:
    """Return the distance of B from its mean over runs on sampled sequences, relative.

    The tolerance is four standard errors, 1.2/steps, and tokens/length for the bias of sequences of
    finite length. B is quadratic in time at first, so that n Euler steps miss 1/n of it.
    """
    corpus = Balanced(point["classes"], point["common"], point["distinct"], point["mass"])
    step, length, steps = point["step"], point["length"], 40
    rates: dict[str, Any] = {"eta_y": step, "eta_z": step * point["eta_z"]}
    rng = point.generator
    runs = 4 * min(point.effort, 20)
    batch = 8 * max(1, point.effort // 20)
    b = np.array(
        [
            scan_snap.train_on_samples(
                corpus.corpus, length, steps, batch, rng=rng, every=steps, **rates
            )
            .b[-1]
            .mean()
            for _ in range(runs)
        ]
    )
    error = abs(float(formula(corpus, [float(steps)], **rates)[0]) / b.mean() - 1)
    noise = b.std(ddof=1) / np.sqrt(runs) / b.mean()
    allowed = 1.2 / steps + corpus.corpus.tokens / length
    return Measurement(error, float(4 * noise + allowed), float(noise))


BALANCED_LAW = Search({**_BALANCED, **_RUN}, balanced_law)
BALANCED_B = Search({**_BALANCED, **_RUN}, balanced_b)
SCANNING = Search({**_BALANCED, **_RUN}, scanning)
SCANNING_LIMIT = Search(_BALANCED, scanning_limit)
_DECODER: dict[str, Any] = {
    "classes": Integer(2, 5),
    "share": Real(1e-3, 1.0, special=(0.5, 1.0)),
    "eta_y": Real(1e-3, 1e3, log=True, special=(1.0,)),
}
MARGIN = Search({**_DECODER, "margin": Real(1e-3, 30.0, log=True)}, margin)
DECIDING_TIME = Search(_DECODER, deciding_time)
SNAPPING_ORDER = Search(
    {
        "classes": Integer(2, 1_000_000, log=True),
        "more": Integer(1, 1_000_000, log=True),
        "eta_y": Real(1e-6, 1e6, log=True),
    },
    snapping_order,
)
TURN = Search(_DECODER, turn)
_LATE: dict[str, Any] = {
    **_BALANCED,
    "eta_z": Real(1e-3, 1e6, log=True),
    "start": Real(20.0, 400.0),
}
SNAPPING = Search({**_LATE, "later": Real(1.1, 20.0, log=True)}, snapping)
DECODER_RATE = Search({**_LATE, "later": Real(1.0, 1.0)}, decoder_rate)
BOTH_RATES = Search({**_BALANCED, **_RUN, "factor": Real(1e-3, 1e3, log=True)}, both_rates)
DENSEST = Search({**_BALANCED, "separation": Real(0.0, 12.0)}, densest)
FINITE_LENGTH = Search(
    {
        "first": Real(0.1, 0.9),
        "second": Real(0.1, 0.9),
        "share": Real(0.05, 0.95),
        "scale": Real(0.0, 3.0),
        "length": Integer(1000, 2000),
        "draw": Seed(),
    },
    finite_length,
)
SAMPLED = Search(
    {
        "classes": Integer(2, 4),
        "common": Integer(1, 3),
        "distinct": Integer(1, 3),
        "mass": Real(0.2, 0.8),
        "step": Real(0.01, 0.05, log=True),
        "eta_z": Real(0.1, 3.0, log=True),
        "length": Integer(1000, 2000),
    },
    sampled,
    sampled=True,
)

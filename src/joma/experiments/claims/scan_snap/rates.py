"""Theorem 4's remarks: what the learning rates change, and when attention becomes sparser."""

import numpy as np

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, measured
from joma.experiments.claims.reference.scan_snap import frozen
from joma.experiments.claims.scan_snap import corpora
from joma.experiments.claims.scan_snap.corpora import balanced
from joma.experiments.claims.search import Real
from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced

_STEP = 0.05
"""Change of ln η_Y by which ∂B/∂ln η_Y is measured."""


def _at_near_rates(
    corpus: Balanced, t: Array, eta_y: float, eta_z: float, step: float = _STEP, rtol: float = 1e-10
) -> list[scan_snap.ScanSnapTrajectory]:
    """Two runs, with η_Y larger and smaller by a step of its logarithm."""
    rates = (eta_y * np.exp(step), eta_y * np.exp(-step))
    return [scan_snap.evolve(corpus.corpus, t, eta_y=y, eta_z=eta_z, rtol=rtol) for y in rates]


@over(**corpora.BALANCED, **corpora.BALANCED_RUN, factor=Real(1e-3, 1e3, log=True))
def _both_rates_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance of the state at larger rates from that at the rescaled time."""
    even, of, factor = corpora.flow(balanced(point)), corpora.rates(point), point["factor"]
    fast = even.path(np.array([point["time"]]), factor * of["eta_y"], factor * of["eta_z"])
    same = even.path(np.atleast_1d(formula(point["time"], factor)), **of)
    return measured(np.abs(fast - same) / (np.abs(fast) + 1e-4), 1e-4)


@claim("scan-snap-both-rates", scan_snap.rescaled_time, _both_rates_at)
def _both_rates(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The relative error of B and z at larger rates."""
    corpus = corpora.random_corpus(rng, 3, 3, 2, equal=False)
    factor, t = float(rng.uniform(3, 10)), np.array([0.3, 3.0, 30.0])
    fast = scan_snap.evolve(corpus, t, eta_y=2 * factor, eta_z=factor)
    same = scan_snap.evolve(corpus, formula(t, factor), eta_y=2.0, eta_z=1.0)
    of_z = np.max(np.abs(same.z - fast.z)) / np.max(np.abs(fast.z))
    return measured([np.max(np.abs(same.b / fast.b - 1)), of_z], 1e-5)


@over(**corpora.BALANCED, separation=Real(0.0, 12.0))
def _densest_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """1 if entropy does not rise before the predicted separation and fall after it."""
    corpus = balanced(point)
    turn, at = formula(corpus), point["separation"]
    if abs(at - turn) < 1e-3:
        raise JomaError("too near to the turn")

    def entropy(separation: float) -> float:
        of_distinct = np.full(corpus.distinct, (1 - corpus.common_mass) / corpus.distinct)
        of_common = np.full(corpus.common, corpus.common_mass / corpus.common)
        weights = np.concatenate([of_common, of_distinct * np.exp(separation)])
        b = weights / weights.sum()
        return float(-np.sum(b * np.log(b)))

    change = entropy(at + 1e-4) - entropy(at - 1e-4)
    if abs(change) < 1e-13:
        raise JomaError("the entropy hardly changes")
    return ClaimMeasurement(float((change > 0) != (at < turn)), 0.0)


@claim("scan-snap-sparser", lambda balanced: balanced.densest, _densest_at)
def _densest(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The error of the separation at which the entropy is largest on the population ODE."""
    worst = 0.0
    for sizes in ((3, 1, 1), (2, 3, 2), (2, 8, 1)):
        corpus = Balanced(*sizes, common_mass=0.9)
        t = np.concatenate([[0.0], np.geomspace(1e-2, 1e4, 400)])
        run = scan_snap.evolve(corpus.corpus, t, eta_y=1.0, eta_z=5.0)
        separation = run.z[:, 0, corpus.common] - run.z[:, 0, 0]
        entropy = run.entropy[:, 0]
        at = int(np.argmax(entropy))
        turn = formula(corpus)
        spread = float(np.ptp(separation[max(at - 1, 0) : at + 2]))
        worst = max(worst, abs(turn - float(separation[at])) - spread)
        worst += float(np.any(np.diff(entropy[separation < turn]) <= 0))
        worst += float(np.any(np.diff(entropy[separation > turn]) >= 0))
    return ClaimMeasurement(max(worst, 0.0), 0.0)


@without("scan-snap-decoder-rate")
def _decoder_rate_early(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """At t = 1e8 and η_Y = 100 η_Z, where attention is not yet on the distinct tokens.

    The formula refuses this time, so its value is taken at rates at which it is late.
    """
    corpus, t = Balanced(2, 8, 1, common_mass=0.7), np.array([1e8])
    more, less = _at_near_rates(corpus, t, 100, 1.0, rtol=1e-9)
    effect = formula(t, corpus, eta_y=100.0, eta_z=1e6)
    return measured(np.abs((more.b - less.b)[:, 0] / (2 * _STEP) / effect - 1), 2e-3)


@over(
    **corpora.BALANCED,
    eta_z=Real(1e-3, 1e6, log=True),
    start=Real(20.0, 400.0),
    later=Real(1.0, 1.0),
)
def _decoder_rate_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance of ∂B/∂ln η_Y at a late time, relative."""
    corpus, eta_z, log_time = balanced(point), point["eta_z"], np.log(np.exp(point["start"]))
    t = np.array([np.exp(point["start"])])
    effect = float(formula(t, corpus, eta_y=1.0, eta_z=eta_z)[0])
    more, less = (
        corpora.flow(corpus).path(t, eta_y, eta_z, rtol=1e-10)[0, -1]
        for eta_y in (np.exp(_STEP), np.exp(-_STEP))
    )
    change = float(more - less) / (2 * _STEP)
    u0 = corpus.common_over_distinct
    drive = u0 / corpus.slope * (1 - 1 / corpus.classes) * eta_z * log_time**2
    slack = 4 * (1 + np.log(corpus.classes)) / log_time**2
    slack += 2 * (1 + u0) * (1 + np.log1p(drive)) / drive
    return measured(abs(change / effect - 1), slack)


@claim("scan-snap-decoder-rate", scan_snap.late_decoder_rate_effect, _decoder_rate_at)
def _decoder_rate(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The relative error of ∂B/∂ln η_Y at t = 1e250, plus 1 where the entropy does not agree."""
    error = 0.0
    narrow = Balanced(2, 1, 1, common_mass=float(rng.uniform(0.4, 0.6)))
    t = np.array([1e250])
    for corpus in (narrow, Balanced(2, 8, 1, common_mass=0.7)):
        eta_y, eta_z = 2.0, 200.0
        more, less = _at_near_rates(corpus, t, eta_y, eta_z)
        effect = formula(t, corpus, eta_y=eta_y, eta_z=eta_z)
        change = (more.b - less.b)[:, 0] / (2 * _STEP)
        error = max(error, float(np.max(np.abs(change / effect - 1))))
        sparser = (less.entropy - more.entropy)[:, 0]
        error += float(np.mean(np.sign(sparser) != np.sign(effect)))
    return ClaimMeasurement(error, 2e-3)


@over(**corpora.DECODER)
def _turn_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """D ln B/d ln t − 1 at the predicted time: there ∂B/∂η_Y is 0, B being b(η_Y t)/η_Y."""
    classes, share, eta_y = point["classes"], point["share"], point["eta_y"]
    if share > 1 - 1e-6:
        raise JomaError("without common tokens nothing moves")
    t = formula(classes=classes, distinct_share=share, eta_y=eta_y)
    joint = np.full(classes, 1 / classes)
    _, b, b_rate = frozen(
        corpora.gram_of_classes_alike(classes, share), joint, np.array([t]), eta_y
    )
    return measured(abs(float(t * b_rate[0, 0] / b[0, 0]) - 1), 1e-6 / share)


@claim("scan-snap-decoder-rate-turn", scan_snap.decoder_rate_turn, _turn_at, eta_z=0.0001)
@without("scan-snap-decoder-rate-turn", eta_z=1.0)
def _turn(formula: Formula, rng: Generator, *, eta_z: float) -> ClaimMeasurement:
    errors = []
    for corpus in corpora.balanced_corpora(rng, (2, 1, 1), (3, 6, 1), (8, 3, 2), spread=0.1):
        eta_y, share = float(rng.uniform(0.5, 5)), corpora.share_at_start(corpus.corpus)
        turn = formula(classes=corpus.classes, distinct_share=share, eta_y=eta_y)
        t = turn * np.linspace(0.8, 1.2, 41)
        more, less = _at_near_rates(corpus, t, eta_y, eta_z * eta_y, 0.01)
        change = (more.b - less.b)[:, 0]
        # The change falls through zero; beyond the ends the turn is not even near.
        found = float(np.interp(0.0, -change, t)) if change[0] > 0 > change[-1] else np.inf
        errors.append(abs(found / turn - 1))
    return measured(errors, 0.005)

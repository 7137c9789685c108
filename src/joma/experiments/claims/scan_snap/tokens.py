"""The talk's picture of common and distinct tokens: which logits rise, and how fast."""

from itertools import pairwise

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, difference, measured, relative
from joma.experiments.claims.reference import scan_snap as reference
from joma.experiments.claims.scan_snap import corpora
from joma.experiments.claims.search import Choice, Integer, Real, Seed, Simplex, Vector
from joma.theory import scan_snap
from joma.theory.scan_snap import ScanSnapCorpus

_IN_BETWEEN = corpora.one_query(
    [[0.25, 0.25, 0.30, 0.00, 0.20], [0.25, 0.02, 0.00, 0.53, 0.20]], [0.5, 0.5]
)
"""Its second token is in both classes, with P = .25 and .02."""
_FREQUENT_FALLS = corpora.one_query(
    [[0.25, 0.75, 0.00, 0.00], [0.85, 0.00, 0.10, 0.05]], [0.5, 0.5]
)
"""Its last two tokens are distinct; at η_Y = 5 η_Z the more frequent one ends lower."""


@over(**corpora.ANY_CORPUS, **corpora.ANY_STATE)
def _gradient_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance to the log-likelihood's derivatives, relative to the largest g."""
    corpus = corpora.any_corpus(point)
    z, y = corpora.any_state(point, corpus)
    z_rate, y_rate = formula(corpus, z, y, eta_y=0.7, eta_z=1.3)
    by_z, by_y = reference.gradient(corpus, z, y)
    error = difference(z_rate, 1.3 * by_z) / (1 + np.max(np.abs(y)))
    return measured([error, difference(y_rate, 0.7 * by_y)], 1e-12)


@claim("scan-snap-gradient", scan_snap.flow, _gradient_at)
def _gradient(formula: Formula, rng: Generator) -> ClaimMeasurement:
    corpus = ScanSnapCorpus(
        rng.dirichlet(np.ones(5), size=4), np.array([0, 1, 0, 1]), rng.dirichlet(np.full(4, 3.0))
    )
    z, y = rng.normal(size=(2, 5)), rng.normal(size=(5, 4))
    z_rate, y_rate = formula(corpus, z, y, eta_y=0.7, eta_z=1.3)
    errors = []
    for rate, at, scale in ((z_rate, z, 1.3 / corpus.query_probability[:, None]), (y_rate, y, 0.7)):
        by_differences = np.empty_like(at)
        for index in np.ndindex(at.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = at.copy()
                moved[index] += step
                state = (moved, y) if at is z else (z, moved)
                ends.append(float(scan_snap.objective(corpus, *state)))
            by_differences[index] = (ends[0] - ends[1]) / 2e-5
        errors.append(relative(rate, by_differences * scale))
    return measured(errors, 1e-7)


@without("scan-snap-common-falls")
def _in_between_rises(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The share of common tokens that do not fall, of three of which two are unequal."""
    run = scan_snap.evolve(_IN_BETWEEN, [0.0, 1e3], eta_y=10.0, eta_z=1.0)
    return measured(np.mean(run.fate[0, _IN_BETWEEN.shared] != -1), 0.0)


@over(
    **corpora.ALIKE,
    **corpora.ALIKE_RUN,
    kind=Choice("one", "equally", "flow"),
    one=Vector(Real(1e-4, 0.9999), Integer(2, 4)),
    joint=Simplex(Integer(2, 4), least=1e-3),
    queries=Integer(1, 2),
    unequal=Real(0.0, 3.0, special=(0.0,)),
    draw=Seed(),
)
def _common_falls_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """How far the common token that falls least has come: at first, or on a flow.

    All common tokens are equally common, or there is only one.
    """
    if point["kind"] == "flow":
        two = reference.TwoClasses((point["one"][0], point["one"][-1]), float(point["joint"][0]))
        z = two.path(np.array([point["time"]]), **corpora.rates(point), rtol=1e-8)[0, :3]
        if np.max(np.abs(z)) < 1e-8:
            raise JomaError("nothing has moved yet")
        falls = formula(two.corpus)[0, 0] == -1
        return ClaimMeasurement(float(z[0] / np.max(np.abs(z))) if falls else 1.0, 0.0)
    corpus = _common_and_distinct(point)
    fate, expected = formula(corpus), reference.initial_acceleration(corpus)
    of_shared = expected[:, corpus.shared]
    visible = np.abs(of_shared) > 1e-13
    if np.all(np.abs(of_shared) < 1e-13):
        raise JomaError("nothing moves")
    if np.any(fate[:, corpus.shared][visible] != -1):
        return ClaimMeasurement(1.0, 0.0)
    return measured(np.max(of_shared[visible]) / np.max(np.abs(expected)), 0.0)


@claim("scan-snap-common-falls", scan_snap.initial_fate, _common_falls_at)
def _common_falls(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The share of wrong signs, with one common token and with equally common ones."""
    wrong = total = 0
    one = np.zeros((3, 7))
    one[:, 0] = rng.uniform(0.05, 0.95, 3)
    for class_ in range(3):
        own = slice(1 + 2 * class_, 3 + 2 * class_)
        one[class_, own] = (1 - one[class_, 0]) * rng.dirichlet(np.ones(2))
    single = corpora.one_query(one, rng.dirichlet(np.full(3, 4.0)))
    for corpus in [single, *(corpora.random_corpus(rng, k, 3, 2, equal=False) for k in (2, 4))]:
        fate = formula(corpus)[0, corpus.shared]
        flow = scan_snap.evolve(corpus, [0.0, 1e3], eta_y=10.0, eta_z=1.0)
        sampled = scan_snap.train_on_samples(
            corpus, 200, 100, 64, eta_y=2.0, eta_z=1.0, rng=rng, every=100
        )
        for run in (flow, sampled):
            wrong += int(np.sum((run.fate[0, corpus.shared] != fate) | (fate != -1)))
            total += fate.size
    return ClaimMeasurement(wrong / total, 0.0)


def _common_and_distinct(point: Point) -> ScanSnapCorpus:
    """One common token of any frequencies, or several that are equally common; unequal classes."""
    classes = point["classes"]
    rng = np.random.default_rng(point["draw"])
    if point["kind"] == "one":
        mass, common = np.resize(point["one"], classes)[:, None], np.ones((classes, 1))
    else:
        mass, common = np.full((classes, 1), point["mass"]), np.tile(point["common"], (classes, 1))
    distinct = point["distinct"].size
    own = np.zeros((classes, classes * distinct))
    for class_ in range(classes):
        weights = point["distinct"] * rng.random(distinct) ** point["unequal"]
        own[class_, class_ * distinct : (class_ + 1) * distinct] = weights / weights.sum()
    joint = np.resize(point["joint"], classes)
    query = (np.arange(classes) % point["queries"]).astype(np.int64)
    return ScanSnapCorpus(np.hstack([mass * common, (1 - mass) * own]), query, joint / joint.sum())


@without("scan-snap-distinct-rise")
def _distinct_falls(formula: Formula, rng: Generator) -> ClaimMeasurement:
    wrong = []
    for corpus, eta_y, end in corpora.FALLING:
        run = scan_snap.evolve(corpus, [0.0, end], eta_y=eta_y, eta_z=1.0)
        sign = np.sign(formula(corpus)[0, corpus.distinct])
        wrong.append(float(np.mean(run.fate[0, corpus.distinct] != sign)))
    return ClaimMeasurement(min(wrong), 0.0)


@over(**corpora.ANY_CORPUS)
def _distinct_rise_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance to z̈(0), relative, plus 1 if a distinct token is not pulled up."""
    corpus = corpora.any_corpus(point)
    pull, expected = formula(corpus), reference.initial_acceleration(corpus)
    error = difference(pull, expected) / max(float(np.max(np.abs(expected))), 1e-6)
    for class_ in range(corpus.classes):
        shares = bool(np.any(corpus.shared & (corpus.token_given_class[class_] > 0)))
        own = pull[corpus.query[class_], corpus.distinct_of(class_)]
        error += float(np.any(own <= 0) if shares else np.any(own != 0))
    return ClaimMeasurement(error, 1e-8)


@claim("scan-snap-distinct-rise", scan_snap.initial_pull, _distinct_rise_at)
def _distinct_rise(formula: Formula, rng: Generator) -> ClaimMeasurement:
    worst, half = 0.0, 0.05
    drawn = (corpora.random_corpus(rng, classes, 2, 3, equal=False) for classes in (2, 3))
    for corpus in (corpora.PULLED_DOWN, corpora.UNEVEN, *drawn):
        pull = formula(corpus)[0, corpus.distinct]
        run = scan_snap.evolve(corpus, [0.0, half, 2 * half], eta_y=2.0, eta_z=1.0)
        z = run.z[:, 0][:, corpus.distinct]
        # z = η_Yη_Z t²/2 · pull + O(t³): two times cancel the next order.
        expected = 2 * z[1] / half**2 - z[2] / (2 * half) ** 2
        worst = max(worst, float(np.max(np.abs(pull - expected) / expected)))
        worst += float(np.mean(pull <= 0))
    return ClaimMeasurement(worst, 0.01)


@without("scan-snap-frequent-first")
def _frequent_late(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """1 if the more frequent token is not the higher one late."""
    late = scan_snap.evolve(_FREQUENT_FALLS, [1e4], eta_y=5.0, eta_z=1.0).z[0, 0]
    return ClaimMeasurement(
        float((formula(_FREQUENT_FALLS, 1, 2, 3) > 1) != (late[2] > late[3])), 0.0
    )


@over(**corpora.ANY_CORPUS)
def _frequent_first_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance of z_l/z_l' at t → 0 from the formula, relative."""
    corpus = corpora.any_corpus(point)
    expected = reference.initial_acceleration(corpus)
    error, found = 0.0, False
    for class_ in range(corpus.classes):
        own = corpus.distinct_of(class_)
        of_query = expected[corpus.query[class_]]
        if not np.any(corpus.shared & (corpus.token_given_class[class_] > 0)):
            continue
        for token in own:
            ratio = formula(corpus, class_, own[0], token)
            if min(of_query[own[0]], of_query[token]) < 1e-9:
                continue
            found = found or token != own[0]
            error = max(error, abs(of_query[own[0]] / of_query[token] / ratio - 1))
    if not found:
        raise JomaError("no class has two distinct tokens that move")
    return ClaimMeasurement(error, 1e-6)


@claim("scan-snap-frequent-first", scan_snap.rise_ratio, _frequent_first_at)
def _frequent_first(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The relative error of the ratio of two logits at a small time; on sequences their order."""
    corpus = corpora.random_corpus(rng, 3, 2, 4)
    early = scan_snap.evolve(corpus, [0.05], eta_y=3.0, eta_z=1.0).z[0, 0]
    sampled = scan_snap.train_on_samples(
        corpus, 400, 150, 128, eta_y=2.0, eta_z=1.0, rng=rng, every=150
    )
    last, error = sampled.z[-1, 0], 0.0
    for class_ in range(corpus.classes):
        for often, seldom in pairwise(corpus.distinct_of(class_)):
            ratio = formula(corpus, class_, often, seldom)
            error = max(error, abs(early[often] / early[seldom] / ratio - 1))
            if ratio > 1.5:  # closer ones are decided by the draw of the sequences
                error += float(last[often] <= last[seldom])
    return ClaimMeasurement(error, 1e-4)

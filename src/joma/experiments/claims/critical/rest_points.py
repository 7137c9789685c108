"""Lemma 4, Eqns 56 to 59: where a node rests between two clusters."""

from typing import Any

import numpy as np
from scipy import optimize

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, measured
from joma.experiments.claims.reference import clusters as isotropic
from joma.experiments.claims.search import Choice, Integer, Real
from joma.theory import clusters
from joma.theory.marginals import Ball, Gaussian, Laplace, Logistic, Marginal, Scaled, StudentT

UNDECIDED = "the case is too close to the border for the reference"


def rest_point(marginal: Marginal, distance: float) -> tuple[float, float]:
    """Return s₋ and a₋/a₊ at which both equations of motion vanish, from the density alone."""
    found = isotropic.rest_points(marginal, distance, marginal)
    if not found:
        raise JomaError("there is no rest point at this distance")
    return found[0]


def pair_of(point: Point) -> tuple[Marginal, float, Marginal]:
    """Return two clusters of one family and unequal width, and their distance."""
    family = isotropic.family_of(point)
    return family, point["distance"], Scaled(family, point["negative"])


PAIR: dict[str, Any] = {
    **isotropic.FAMILY,
    "negative": Real(0.2, 5.0, log=True, special=(1.0,)),
    "distance": Real(0.02, 50.0, log=True, special=(1.0,)),
}
"""Two clusters of one family, the negative one of another width."""


@over(**PAIR, length=Real(0.1, 10.0, log=True))
def _balanced_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """At rest points of two clusters of unequal width, in units of the forces."""
    positive, distance, negative = pair_of(point)
    worst = 0.0
    for s, ratio in isotropic.rest_points(positive, distance, negative):
        size = float(isotropic.reference(positive, s + distance).first_integral)
        other = float(isotropic.reference(negative, s).first_integral)
        if min(size, other) < 1e-250 or ratio > 1e250:
            raise JomaError("the forces must be floats")
        total = formula([positive, negative], [1.0, -ratio], [s + distance, s], point["length"])
        worst = max(worst, abs(total) / size)
    return ClaimMeasurement(worst, 1e-8)


@claim(
    "lemma4",
    lambda marginal, a, s, length: clusters.balance(marginal, a, s),
    _balanced_at,
    printed=lambda marginal, a, s, length: clusters.balance(marginal, a, length * np.asarray(s)),
)
def _balanced(formula: Formula, rng: Generator) -> ClaimMeasurement:
    errors = []
    for distance in rng.uniform(0.8, 3, size=2):
        s, ratio = rest_point(StudentT(3), float(distance))
        errors.append(abs(formula(StudentT(3), [1.0, -ratio], [s + distance, s], 2.3)))
    return measured(errors, 1e-8)


def _rests(marginal: Marginal, means: Any, v: Any, bias: float, ratio: float) -> bool:
    """Eqn 56 with v along the line between the clusters: necessary and sufficient."""
    between = means[0] - means[1]
    along = abs(v @ between) / (np.linalg.norm(v) * np.linalg.norm(between))
    return satisfies_eqn56(marginal, means, v, bias, ratio) and bool(along > 1 - 1e-10)


def satisfies_eqn56(marginal: Marginal, means: Any, v: Any, bias: float, ratio: float) -> bool:
    """Return whether Eqn 56 holds: as printed, without a condition on the direction of v."""
    s = clusters.distances(means, v, bias)
    shares, integrals = marginal.theta1(s), marginal.first_integral(s)
    return bool(
        abs(shares[0] / shares[1] / ratio - 1) < 1e-6
        and abs(integrals[0] / integrals[1] / ratio - 1) < 1e-6
    )


@over(
    df=Real(1.1, 30.0, log=True, special=(2.0,)),
    distance=Real(0.05, 20.0, log=True),
    length=Real(0.1, 10.0, log=True),
    tilt=Real(-1.4, 1.4, special=(0.0,)),
    shift=Choice(0.0, 0.0, 0.3, -1.0),
    log_factor=Choice(0.0, 0.0, 0.2, -1.0),
)
def _sufficiency_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Whether v̇ and ξ̇ vanish at a node with the distances of a rest point, or other ones."""
    marginal, distance, tilt = StudentT(point["df"]), point["distance"], point["tilt"]
    s, ratio = rest_point(marginal, distance)
    s, ratio = s + point["shift"], ratio * float(np.exp(point["log_factor"]))
    v = point["length"] * np.array([np.cos(tilt), np.sin(tilt)])
    # A farther cluster keeps the distance along v.
    means = np.array([[distance / np.cos(tilt), 0.0], [0.0, 0.0]])
    bias = s * point["length"]
    rate = isotropic.flow([marginal] * 2, [1.0, -ratio], means, v, bias)
    share = float(isotropic.reference(marginal, s + distance).share)
    size = np.abs(rate).max() / (share * max(1.0, abs(s), distance))
    if 1e-8 < size < 1e-4 or 0 < abs(tilt) < 1e-4:
        raise JomaError(UNDECIDED)
    rests = bool(size <= 1e-8)
    return isotropic.decide(
        formula(marginal, means, v, bias, ratio) != rests, np.log10(size + 1e-16) + 6
    )


@claim("eqn56", _rests, _sufficiency_at, printed=satisfies_eqn56)
def _sufficiency(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Nodes along the line between the clusters, and tilted ones with the same distances."""
    wrong, fixed = [], {"df": 3.0, "shift": 0.0, "log_factor": 0.0}
    for case in range(4):
        distance = float(rng.uniform(1, 2))
        tilt = 0.0 if case % 2 == 0 else rng.uniform(0.3, 0.9)
        at = {"distance": distance, "tilt": tilt, "length": rng.uniform(0.5, 2)}
        wrong.append(not _sufficiency_at.at(formula, **fixed, **at).holds)
    return measured(np.mean(wrong), 0.0)


def _falls_at_zero(marginal: Marginal) -> bool:
    step = 1e-3 * float(isotropic.reference(marginal, 0.0).life)
    lives = isotropic.reference(marginal, np.array([0.0, step])).life
    return bool(lives[1] < lives[0])


_SPIKES: dict[str, Any] = {"share": Real(0.01, 0.999), "width": Real(0.002, 1.0, log=True)}


@over(
    family=Choice("student", "spiked", "laplace", "ball"),
    df=Real(1.02, 100.0, log=True, special=(2.0,)),
    n=Integer(1, 50, log=True),
    **_SPIKES,
)
def _sufficient_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The same for any Student's t, ball or normal density with a spike, and for Laplace's."""
    marginal = isotropic.family_of(point)
    zero = isotropic.reference(marginal, 0.0)
    value = float(zero.first_integral * zero.density)
    if 1e-12 < abs(value - 0.25) < 2e-3:
        raise JomaError(UNDECIDED)
    return isotropic.decide(formula(marginal) != _falls_at_zero(marginal), 10 * (value - 0.25))


@claim(
    "eqn58", lambda marginal: clusters.sufficient_condition(marginal) > 0.25 + 1e-12, _sufficient_at
)
def _sufficient(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Whether the mean residual life falls on the right of 0 exactly where the formula says so."""
    families = [*isotropic.FAMILIES, StudentT(2), StudentT(1.9), StudentT(1.5)]
    families.append(isotropic.Spiked(0.5, 0.05))
    wrong = [formula(marginal) != _falls_at_zero(marginal) for marginal in families]
    return measured(np.mean(wrong), 0.0)


def _meet(positive: Marginal, distance: float, negative: Marginal) -> bool:
    if positive == negative == Laplace():
        return True  # the lives are equal wherever both clusters are on the inactive side
    return bool(isotropic.rest_points(positive, distance, negative, exact=False))


@over(**PAIR)
def _existence_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Clusters of one family, the negative one of another width or not."""
    positive, distance, negative = pair_of(point)
    if 0 < abs(np.log(point["negative"])) < 1e-3:
        raise JomaError(UNDECIDED)
    if point["negative"] == 1:
        negative = positive
    found = isotropic.rest_points(positive, distance, negative, exact=False)
    if any(abs(s) > 1e4 * max(1.0, distance) for s, _ in found):
        raise JomaError(UNDECIDED)
    end = isotropic.places(positive, distance, negative)[-1]
    above, below = isotropic.reference(positive, end + distance), isotropic.reference(negative, end)
    if above.life < below.life * (1 + 1e-11):
        raise JomaError(UNDECIDED)  # as m₊ > m₋ for s → ∞, they meet beyond the reference's reach
    expected = bool(found) or positive == negative == Laplace()
    farthest = max([abs(s) for s, _ in found], default=1.0)  # roots are lost far out
    return isotropic.decide(formula(positive, distance, negative) != expected, 10 / farthest)


@claim(
    "thm3-existence",
    lambda positive, distance, negative: bool(
        clusters.critical_points(positive, distance, negative=negative)
    ),
    _existence_at,
)
def _existence(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Do the mean residual lives, by quadrature of the density, meet anywhere?"""
    cases: list[tuple[Marginal, Marginal]] = [(one, one) for one in isotropic.FAMILIES]
    cases += [(StudentT(2), StudentT(2)), (Ball(8), Ball(8))]
    cases += [(Gaussian(), Scaled(Gaussian(), 2.0)), (Scaled(Gaussian(), 2.0), Gaussian())]
    cases += [(Logistic(), Scaled(Logistic(), 1.5)), (StudentT(3), StudentT(5))]
    wrong = [formula(plus, 1.0, minus) != _meet(plus, 1.0, minus) for plus, minus in cases]
    return measured(np.mean(wrong), 0.0)


@over(
    positive=Real(0.05, 20.0, log=True, special=(1.0,)),
    negative=Real(0.05, 20.0, log=True, special=(1.0,)),
    distance=Real(0.01, 100.0, log=True),
)
def _gaussians_at(formula: Formula, point: Point) -> ClaimMeasurement:
    plus, minus, distance = point["positive"], point["negative"], point["distance"]
    if 0 < abs(np.log(plus / minus)) < 1e-3:
        raise JomaError(UNDECIDED)
    if plus < minus:
        # Nearly equal widths rest deep in the tails, where the logarithm of the density is rounded.
        depth = (distance / (2 * np.log(minus / plus)) / plus) ** 2 / 2
        if 1e-14 * depth > 1e-2 * np.log(minus / plus):
            raise JomaError(UNDECIDED)
    shapes = Scaled(Gaussian(), plus), Scaled(Gaussian(), minus)
    found = isotropic.rest_points(shapes[0], distance, shapes[1], exact=False)
    return isotropic.decide(formula(plus, minus, distance) != len(found), np.log(plus / minus))


@claim(
    "thm3-gaussian", lambda positive, negative, distance: int(positive < negative), _gaussians_at
)
def _gaussians(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """How many rest points there are between Gaussians of random widths, from the density."""
    wrong = []
    for _ in range(6):
        positive, negative = np.exp(rng.uniform(-1, 1, size=2))
        at = {"positive": positive, "negative": negative, "distance": rng.uniform(0.5, 4)}
        wrong.append(not _gaussians_at.at(formula, **at).holds)
    return measured(np.mean(wrong), 0.0)


def _active_distance(marginal: Marginal) -> float:
    """The D with m(D) = m(0), up to which both clusters can rest on the active side."""

    def rise(distance: float) -> float:
        lives = isotropic.reference(marginal, np.array([0.0, distance])).life
        return float(lives[1] - lives[0])

    return float(optimize.brentq(rise, 1e-4, 1.0, xtol=1e-14))


@without("eqn59")
def _all_ratios(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The ratios of t₃, whose negative cluster is on the inactive side: 5.96 at distance 2."""
    ratio = rest_point(StudentT(3), 2.0)[1]
    return ClaimMeasurement((ratio - formula()[1]) / ratio, 1e-9)


@over(
    family=Choice("student", "spiked"),
    df=Real(1.02, 2.0, log=True),
    distance=Real(1e-3, 100.0, log=True),
    **_SPIKES,
)
def _active_ratios_at(formula: Formula, point: Point) -> ClaimMeasurement:
    low, high = formula()
    marginal = isotropic.family_of(point)
    found = isotropic.rest_points(marginal, point["distance"], marginal)
    ratios = [ratio for s, ratio in found if s >= 0]
    if not ratios:
        raise JomaError("there is no rest point with both clusters on the active side")
    return ClaimMeasurement(max(low - min(ratios), max(ratios) - high), 1e-9)


@claim("eqn59", lambda: (1.0, 2.0), _active_ratios_at)
def _active_ratios(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Rest points with both clusters on the active side, from the density.

    Every ratio must lie in the interval, and its ends must be approached within 0.02: by a spike
    that holds nearly all of the cluster, and by clusters that nearly touch.
    """
    low, high = formula()
    cases = [(StudentT(df), d) for df in (1.2, 1.3, 1.5) for d in (0.1, 0.5, 1.0)]
    spike = isotropic.Spiked(0.99, 2e-4)
    cases += [(spike, 1e-5), (spike, 0.9999 * _active_distance(spike))]
    ratios = [
        ratio
        for marginal, d in cases
        for s, ratio in isotropic.rest_points(marginal, d, marginal)
        if s >= 0
    ]
    outside = max(low - min(ratios), max(ratios) - high, 0.0)
    slack = max(min(ratios) - low, high - max(ratios))
    return ClaimMeasurement(max(outside / 1e-9, slack / 0.02), 1.0)

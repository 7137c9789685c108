"""Lemma 4, Eqns 56 to 59 and Theorem 3: where a node rests between clusters."""

from itertools import product
from typing import Any

import numpy as np
from scipy import optimize

from joma.errors import JomaError
from joma.experiments.claims.claim import (
    ClaimMeasurement,
    Formula,
    Generator,
    Point,
    claim,
    largest_error,
    measured,
    without,
)
from joma.experiments.claims.reference import clusters as isotropic
from joma.theory import clusters
from joma.theory.marginals import Ball, Gaussian, Laplace, Logistic, Marginal, Scaled, StudentT

UNDECIDED = "the case is too close to the border for the reference"


def rest_point(marginal: Marginal, distance: float) -> tuple[float, float]:
    """Return s₋ and a₋/a₊ at which both equations of motion vanish, from the density alone."""
    found = isotropic.rest_points(marginal, distance, marginal)
    if not found:
        raise JomaError("there is no rest point at this distance")
    return found[0]


@claim(
    "lemma4",
    lambda marginal, a, s, length: clusters.balance(marginal, a, s),
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


@claim("eqn56", _rests, printed=satisfies_eqn56)
def _sufficiency(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Nodes along the line between the clusters, and tilted ones with the same distances."""
    wrong, fixed = [], {"df": 3.0, "shift": 0.0, "log_factor": 0.0}
    for case in range(4):
        distance = float(rng.uniform(1, 2))
        tilt = 0.0 if case % 2 == 0 else rng.uniform(0.3, 0.9)
        at = {"distance": distance, "tilt": tilt, "length": rng.uniform(0.5, 2)}
        wrong.append(not _sufficiency_at(formula, {**fixed, **at}).holds)
    return measured(np.mean(wrong), 0.0)


def _falls_at_zero(marginal: Marginal) -> bool:
    step = 1e-3 * float(isotropic.reference(marginal, 0.0).life)
    lives = isotropic.reference(marginal, np.array([0.0, step])).life
    return bool(lives[1] < lives[0])


@claim("eqn58", lambda marginal: clusters.sufficient_condition(marginal) > 0.25 + 1e-12)
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


@claim(
    "thm3-existence",
    lambda positive, distance, negative: bool(
        clusters.critical_points(positive, distance, negative=negative)
    ),
)
def _existence(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Do the mean residual lives, by quadrature of the density, meet anywhere?"""
    cases: list[tuple[Marginal, Marginal]] = [(one, one) for one in isotropic.FAMILIES]
    cases += [(StudentT(2), StudentT(2)), (Ball(8), Ball(8))]
    cases += [(Gaussian(), Scaled(Gaussian(), 2.0)), (Scaled(Gaussian(), 2.0), Gaussian())]
    cases += [(Logistic(), Scaled(Logistic(), 1.5)), (StudentT(3), StudentT(5))]
    wrong = [formula(plus, 1.0, minus) != _meet(plus, 1.0, minus) for plus, minus in cases]
    return measured(np.mean(wrong), 0.0)


def gaussians_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Compare how many rest points there are between two Gaussians."""
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


@claim("thm3-gaussian", lambda positive, negative, distance: int(positive < negative))
def _gaussians(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """How many rest points there are between Gaussians of random widths, from the density."""
    wrong = []
    for _ in range(6):
        positive, negative = np.exp(rng.uniform(-1, 1, size=2))
        at = {"positive": positive, "negative": negative, "distance": rng.uniform(0.5, 4)}
        wrong.append(not gaussians_at(formula, at).holds)
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


@claim("eqn59", lambda: (1.0, 2.0))
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


def laplace_error(formula: Formula, s: float, distance: float, width: float) -> float:
    """Return the forces of Laplace clusters at a ratio of gradients, relative."""
    shapes = [Scaled(Laplace(), width)] * 2
    means, v = np.array([[distance], [0.0]]), np.ones(1)
    ratio = formula(distance, width)
    rate = isotropic.flow(shapes, [1.0, -ratio], means, v, s - distance)
    share = float(isotropic.reference(shapes[0], s).share)
    return float(np.abs(rate / [distance + width, 1.0]).max() / share)


@claim("thm3-laplace", lambda distance, width: float(np.exp(distance / width)))
def _laplace(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """v̇ and ξ̇ at several places below zero, by quadrature, at the ratio predicted."""
    places = -rng.uniform(0.1, 4, size=3)
    errors = [laplace_error(formula, s, float(rng.uniform(0.5, 2)), 1.3) for s in places]
    return measured(errors, 1e-9)


def fixed_bias_error(
    formula: Formula, positive: Marginal, negative: Marginal, s: float, distance: float
) -> float:
    """Return the force at fixed bias at a ratio of gradients, relative."""
    ratio = formula(positive, s, distance, negative=negative)
    means = np.array([[distance, 0.0], [0.0, 0.0]])
    rate = isotropic.flow([positive, negative], [1.0, -ratio], means, np.array([1.0, 0.0]), s)
    there = isotropic.reference(positive, s + distance)
    return float(np.abs(rate[:2]).max() / (there.first_integral + abs(s) * there.share))


@claim("thm3-fixed-bias", clusters.fixed_bias_ratio)
def _fixed_bias(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """v̇ at fixed ξ by quadrature, for clusters of Gaussian shape that cannot rest otherwise."""
    places = zip(rng.uniform(-2, 2, 4), rng.uniform(0.5, 3, 4), strict=True)
    shapes = ((Gaussian(), Gaussian()), (Logistic(), Scaled(Logistic(), 2.0)))
    cases = product(shapes, places)
    return measured(
        [fixed_bias_error(formula, *of, float(s), float(d)) for of, (s, d) in cases], 1e-9
    )


def line_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Overlap of the two ranges of mean residual life, from the density, decides; then v̇ = 0."""
    positions = point["positions"]
    count = positions.size
    if count < 2:
        raise JomaError("there must be two clusters or more")
    shapes: list[Marginal] = [
        Scaled(isotropic.family_of(point), float(width))
        for width in np.resize(point["widths"], count)
    ]
    signs = np.where(np.resize(point["signs"], count) > 0, 1.0, -1.0)
    s = positions + point["offset"]
    if any(at <= -one.reach for one, at in zip(shapes, s, strict=True)):
        raise JomaError("every cluster must have a part on the active side")
    there = [isotropic.reference(one, float(at)) for one, at in zip(shapes, s, strict=True)]
    lives = np.array([float(one.life) for one in there])
    logs = np.array([float(one.log_share) for one in there])
    if np.ptp(logs) > 500 or np.all(signs == signs[0]):
        raise JomaError("the gradients must be floats, and of both signs")
    plus, minus = lives[signs > 0], lives[signs < 0]
    overlap = -max(minus.min() - plus.max(), plus.min() - minus.max())
    if abs(overlap) < 1e-4 * lives.max():
        raise JomaError(UNDECIDED)
    means = np.column_stack([positions, np.zeros(count)])
    a = formula(shapes, means, np.array([1.0, 0.0]), point["offset"], signs)
    if (a is None) != bool(overlap < 0):
        return ClaimMeasurement(1.0, 1e-8)
    if a is None:
        return ClaimMeasurement(0.0, 1e-8)
    forces = a * np.exp(logs)
    rate = isotropic.flow(shapes, a, means, np.array([1.0, 0.0]), point["offset"])
    size = np.abs(forces) @ (np.abs(positions) + lives + np.abs(s))
    wrong_sign = float(np.any(a * signs <= 0))
    return ClaimMeasurement(max(float(np.abs(rate).max() / size), wrong_sign), 1e-8)


@claim("thm3-line", clusters.resting_gradients)
def _line(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Three Gaussians in a row with every choice of signs, and five of unequal width."""
    cases = []
    for signs in ([1.0, -1, -1], [-1.0, 1, -1], [-1.0, -1, 1], [1.0, -1, 1]):
        shape = {"positions": np.sort(rng.uniform(-3, 3, 3)), "widths": np.ones(3)}
        cases.append({**shape, "family": "gaussian", "signs": np.array(signs), "offset": -0.4})
    shape = {"positions": rng.uniform(-3, 3, 5), "widths": np.exp(rng.uniform(-1, 1, 5))}
    signs = np.array([1.0, -1, 1, -1, 1])
    cases.append({**shape, "family": "logistic", "signs": signs, "offset": 0.3})
    return largest_error(line_at(formula, case) for case in cases)


def _straddles(marginal: Marginal, distance: float) -> bool:
    if isinstance(marginal, Laplace):
        # Between -D and 0 the lives must not meet; below they are all equal.
        s = np.linspace(-distance, 0, 50)[1:-1]
        lives = (
            isotropic.reference(marginal, s + distance).life,
            isotropic.reference(marginal, s).life,
        )
        return bool(np.any(lives[0] <= lives[1] * (1 + 1e-12)))
    s, _ = rest_point(marginal, distance)
    return bool(s < 0 < s + distance)


@claim("a4-signs", clusters.straddles)
def _signs(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Whether rest points have s₊ > 0 > s₋, as a formula says."""
    cases = [(3.0, 0.5), (3.0, 1.0), (3.0, 4.0), (10.0, 4.0), (10.0, 8.0), (1.5, 0.1), (1.5, 2.0)]
    wrong = [formula(StudentT(df), d) != _straddles(StudentT(df), d) for df, d in cases]
    wrong.append(formula(Laplace(), 2.0) != _straddles(Laplace(), 2.0))
    return measured(np.mean(wrong), 0.0)

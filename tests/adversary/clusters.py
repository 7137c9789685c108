"""Searches of the lemmas on isotropic clusters, and of Theorem 3."""

from collections.abc import Callable

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims import clusters as checks
from joma.experiments.claims import critical, stability
from joma.experiments.claims.claim import ClaimMeasurement, Formula, Point, measured
from joma.experiments.claims.critical import UNDECIDED
from joma.experiments.claims.reference import clusters as isotropic
from joma.theory.marginals import Ball, Laplace, Marginal, Scaled
from tests.adversary.domains import Domain, choice, integer, matrix, over, real, vector

FAMILY: dict[str, Domain] = {
    "family": choice("gaussian", "student", "laplace", "logistic", "ball"),
    "df": real(1.1, 100.0, log=True, special=(2.0, 3.0)),
    "n": integer(1, 50),
}
"""Parameters that `family_of` turns into a marginal."""


_CLUSTERS: dict[str, Domain] = {
    **FAMILY,
    "means": matrix(real(-10.0, 10.0), integer(1, 6), integer(1, 4)),
    "gradients": vector(real(-2.0, 2.0, special=(0.0, 1.0)), integer(1, 6)),
    "widths": vector(real(0.1, 10.0, log=True, special=(1.0,)), integer(1, 6)),
    "v": vector(real(-5.0, 5.0), integer(1, 4)),
    "bias": real(-20.0, 20.0, special=(0.0,)),
}
"""Any number of clusters of one family, each with its width, and any node."""


@over("lemma2", **_CLUSTERS)
def _flow_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The flow of any clusters, whose integrals come from the density alone."""
    shapes, a, means, v, bias = isotropic.scene(point, 1e-6)
    rate = formula(shapes, a, means, v, bias)
    expected = isotropic.flow(shapes, a, means, v, bias)
    size = np.abs(a) @ (np.abs(means).max(axis=1) + _widths(shapes)) + 1e-300
    error = np.abs(np.array([*rate.v, float(rate.bias)]) - expected).max() / size
    return measured(error, 1e-9)


def _widths(shapes: list[Marginal]) -> isotropic.Array:
    """θ₂(0) of each cluster, the largest that θ₂ becomes."""
    return np.array([isotropic.spread(one, 0.0) for one in shapes])


@over("lemma3", **FAMILY, s=real(-60.0, 60.0, special=(0.0, -1.0)))
def _first_integral_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """F in relative size, at any depth where θ₁ is a normal float."""
    marginal = isotropic.family_of(point)
    # The range ends at the edge of a ball, where F is smallest, and 60 widths out otherwise.
    s = point["s"] / 60 if isinstance(marginal, Ball) else point["s"]
    if s <= -marginal.reach:
        return ClaimMeasurement(abs(float(formula(marginal, s))), 1e-300)
    expected = isotropic.reference(marginal, s)
    if expected.log_share < -600:
        raise JomaError("s must leave a part of the cluster on the active side")
    error = abs(float(formula(marginal, s)) / float(expected.first_integral) - 1)
    return ClaimMeasurement(error, 1e-9)


@over("eqn53", **_CLUSTERS)
def _radial_at(formula: Formula, point: Point) -> ClaimMeasurement:
    shapes, a, means, v, bias = isotropic.scene(point, 1e-6)
    expected = float(v @ isotropic.flow(shapes, a, means, v, bias)[:-1])
    reach = np.abs(means @ v) + abs(bias) + np.linalg.norm(v) * _widths(shapes)
    error = abs(formula(shapes, a, means, v, bias) - expected) / (np.abs(a) @ reach + 1e-300)
    return measured(error, 1e-9)


@over(
    "lemma5",
    **FAMILY,
    low=real(-5.0, 5.0, special=(0.0,)),
    step=real(1e-3, 1.0, log=True),
    below=real(-1.0, 1.0, special=(0.0, 0.01)),
    above=real(-1.0, 2.0, special=(0.0, 1.0)),
)
def _slopes_at(formula: Formula, point: Point) -> ClaimMeasurement:
    marginal = isotropic.family_of(point)
    width = isotropic.width_of(marginal)
    low = point["low"] * width
    high = low + point["step"] * width
    # The density of a ball has no slope at its edge, and 16 nodes see that.
    if isinstance(marginal, Ball) and (high > 0.999 or low < -0.999):
        raise JomaError("the stretch must lie inside the ball")
    error = checks.slope_error(formula, marginal, low, high, point["below"], point["above"])
    size = (abs(point["above"]) + abs(point["below"])) * max(1.0, abs(low))
    return ClaimMeasurement(error / (size + 1e-300), 1e-8)


@over("eqn35", n=integer(2, 250))
def _sphere_at(formula: Formula, point: Point) -> ClaimMeasurement:
    return ClaimMeasurement(checks.sphere_error(formula, point["n"]), 1e-11)


@over("eqn36-ball", n=integer(1, 1000), u=real(-1.2, 1.2, special=(0.0, -1.0, 1.0)))
def _ball_at(formula: Formula, point: Point) -> ClaimMeasurement:
    return ClaimMeasurement(checks.ball_error(formula, point["n"], point["u"]), 1e-10)


@over("eqn57", **FAMILY, s=real(-49.9, 49.9, special=(0.0,)))
def _curve_at(formula: Formula, point: Point) -> ClaimMeasurement:
    marginal = isotropic.family_of(point)
    s = point["s"] * (1 if np.isinf(marginal.reach) else 1 / 50)
    if isotropic.reference(marginal, s).hazard < 1e-290 or s >= marginal.reach:
        raise JomaError("s must lie where the density is not 0")
    return ClaimMeasurement(checks.curve_error(formula, marginal, s), 1e-9)


PAIR: dict[str, Domain] = {
    **FAMILY,
    "negative": real(0.2, 5.0, log=True, special=(1.0,)),
    "distance": real(0.02, 50.0, log=True, special=(1.0,)),
}
"""Two clusters of one family, the negative one of another width."""


def pair_of(point: Point) -> tuple[Marginal, float, Marginal]:
    """Return two clusters of one family and unequal width, and their distance."""
    family = isotropic.family_of(point)
    return family, point["distance"], Scaled(family, point["negative"])


@over("lemma4", **PAIR, length=real(0.1, 10.0, log=True))
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


@over("thm3-existence", **PAIR)
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


@over(
    "thm3-laplace",
    s=real(-300.0, 0.0, special=(0.0,)),
    distance=real(1e-3, 50.0, log=True),
    width=real(0.01, 100.0, log=True, special=(1.0,)),
)
def _laplace_at(formula: Formula, point: Point) -> ClaimMeasurement:
    width = point["width"]
    error = critical.laplace_error(formula, point["s"] * width, point["distance"] * width, width)
    return ClaimMeasurement(error, 1e-9)


@over("thm3-fixed-bias", **PAIR, s=real(-20.0, 20.0, special=(0.0,)))
def _fixed_bias_at(formula: Formula, point: Point) -> ClaimMeasurement:
    positive, distance, negative = pair_of(point)
    s = point["s"] * point["negative"]
    if s <= -negative.reach or s + distance <= -positive.reach:
        raise JomaError("s must leave a part of both clusters on the active side")
    if isotropic.reference(positive, s + distance).log_share < -500:
        raise JomaError("the force of the positive cluster must be a float")
    if abs(s) >= negative.reach or isotropic.reference(negative, -abs(s)).log_share < -500:
        raise JomaError("the hyperplane must cut the negative cluster where θ₂ is a float")
    return ClaimMeasurement(
        critical.fixed_bias_error(formula, positive, negative, s, distance), 1e-8
    )


_SMOOTH: dict[str, Domain] = {
    "family": choice("gaussian", "student", "student", "logistic", "humps"),
    "df": real(1.1, 60.0, log=True, special=(2.0, 3.0)),
    "center": real(0.0, 6.0),
    "width": real(0.2, 1.0),
    "negative": real(0.3, 3.0, log=True, special=(1.0,)),
    "distance": real(0.05, 20.0, log=True),
    "which": integer(0, 2),
    "gradient": real(0.1, 10.0, log=True, special=(1.0,)),
    "length": real(0.1, 10.0, log=True, special=(1.0,)),
}
"""Two clusters whose density has a bounded derivative, as Theorem 3 asks, at a rest point."""


SCENE: dict[str, Domain] = {
    "family": choice("gaussian", "student", "logistic"),
    "df": real(1.1, 60.0, log=True, special=(2.0, 3.0)),
    "means": matrix(real(-5.0, 5.0), integer(1, 5), integer(1, 3)),
    "gradients": vector(real(-2.0, 2.0, special=(0.0, 1.0)), integer(1, 5)),
    "widths": vector(real(0.3, 3.0, log=True, special=(1.0,)), integer(1, 5)),
    "v": vector(real(-5.0, 5.0), integer(1, 3)),
    "bias": real(-10.0, 10.0, special=(0.0,)),
}
"""Any number of smooth clusters of one family, and any node."""


def _at(point: Point) -> stability.Rest:
    family = isotropic.family_of(point)
    negative = family if point["negative"] == 1 else Scaled(family, point["negative"])
    where = point["which"], point["gradient"], point["length"]
    return stability.Rest(family, point["distance"], negative, *where)


def _over_rests(claim: str, error: Callable[[Formula, stability.Rest], float]) -> None:
    over(claim, **_SMOOTH)(
        lambda formula, point: ClaimMeasurement(error(formula, _at(point)), 1e-6)
    )


_over_rests("thm3-jacobian", stability.jacobian_error)
_over_rests("thm3-ray", stability.ray_error)
_over_rests("thm3-eigenvalues", stability.eigenvalue_error)
over("thm3-stability", **_SMOOTH)(
    lambda formula, point: stability.stability_at(formula, _at(point))
)
over("thm3-full-jacobian", **SCENE)(stability.full_at)
over("thm3-potential", **SCENE)(stability.potential_at)
over(
    "thm3-gaussian",
    positive=real(0.05, 20.0, log=True, special=(1.0,)),
    negative=real(0.05, 20.0, log=True, special=(1.0,)),
    distance=real(0.01, 100.0, log=True),
)(critical.gaussians_at)
over(
    "thm3-line",
    **FAMILY,
    positions=vector(real(-10.0, 10.0), integer(2, 7)),
    widths=vector(real(0.1, 10.0, log=True, special=(1.0,)), integer(1, 7)),
    signs=vector(real(-1.0, 1.0), integer(2, 7)),
    offset=real(-15.0, 15.0, special=(0.0,)),
)(critical.line_at)

"""Wrong statements about where a node rests."""

from typing import Any

import numpy as np

from benchmarks.adversary._twin import Twin
from joma.errors import JomaError
from joma.experiments.claims.claim import Point, Search
from joma.experiments.claims.critical.rest_points import satisfies_eqn56
from joma.experiments.claims.measurement import ClaimMeasurement
from joma.experiments.claims.reference.clusters import family_of, rest_points
from joma.experiments.claims.search import Choice, Real
from joma.theory import clusters
from joma.theory.marginals import Laplace, Marginal, Scaled, StudentT


def _balance(marginal: Any, a: Any, s: Any, length: float) -> float:
    """Clusters beyond 30 on the inactive side do nothing."""
    del length
    return clusters.balance(marginal, np.where(np.asarray(s) < -30, 0.0, a), s)


def _nearly_parallel(marginal: Marginal, means: Any, v: Any, bias: float, ratio: float) -> bool:
    between = means[0] - means[1]
    along = abs(v @ between) / (np.linalg.norm(v) * np.linalg.norm(between))
    return satisfies_eqn56(marginal, means, v, bias, ratio) and bool(along > 0.98)


def _near_points(positive: Marginal, distance: float, negative: Marginal) -> bool:
    found = clusters.critical_points(positive, distance, negative=negative)
    return any(abs(point.s_minus) < 60 for point in found)


def _equal_widths(positive: Marginal, distance: float, negative: Marginal) -> bool:
    del negative
    return bool(clusters.critical_points(positive, distance))


def _promised(formula: Any, point: Point) -> ClaimMeasurement:
    """Whether there are critical points at every distance where a formula promises them."""
    marginal = family_of(point)
    if not formula(marginal) or isinstance(marginal, Laplace):
        raise JomaError("the condition does not hold")
    found = rest_points(marginal, point["distance"], marginal)
    return ClaimMeasurement(float(not found), 0.0)


def _pade(distance: float, width: float) -> float:
    x = distance / width
    if x > 0.055:
        return float(np.exp(x))
    return (1 + x / 2 + x**2 / 12) / (1 - x / 2 + x**2 / 12)


def _fixed_bias(marginal: Marginal, s: float, distance: float, *, negative: Marginal) -> float:
    if s + distance < 40:
        return clusters.fixed_bias_ratio(marginal, s, distance, negative=negative)
    return distance / float(negative.theta2(s))


def _by_position(shapes: Any, means: Any, v: Any, bias: float, signs: Any) -> Any:
    s = clusters.distances(means, v, bias)
    plus, minus = s[signs > 0], s[signs < 0]
    if len(s) <= 3 and min(plus.max(), minus.max()) < max(plus.min(), minus.min()):
        return None
    return clusters.resting_gradients(shapes, means, v, bias, signs)


def _straight_border(marginal: Marginal, distance: float) -> bool:
    """The border in D as a straight line in df, which it nearly is."""
    if not isinstance(marginal, StudentT) or marginal.df <= 2:
        return clusters.straddles(marginal, distance)
    return bool(distance > 0.8 * (marginal.df - 2))


def _without_far_density(marginal: Marginal, point: Any, **where: Any) -> Any:
    right = clusters.jacobian(marginal, point, **where)
    if point.s_plus < 25:
        return right
    a_plus, length = where["positive_gradient"], where["length"]
    missing = point.s_minus**2 * a_plus * float(marginal.pdf(point.s_plus)) / length
    return right._replace(longitudinal=right.longitudinal - missing)


def _without_one(marginal: Marginal, point: Any, **where: Any) -> Any:
    right = clusters.eigenvalues(marginal, point, **where)
    s = point.s_minus
    return right._replace(along=right.along * s**2 / (1 + s**2)) if abs(s) > 25 else right


def _rises_ahead(
    marginal: Marginal, point: clusters.CriticalPoint, *, negative: Marginal | None = None
) -> bool:
    """At nearly equal widths stable where the mean residual life rises at s₊."""
    if not isinstance(negative, Scaled) or not 0.85 < negative.width < 1.15:
        return clusters.is_stable(marginal, point, negative=negative)
    at = point.s_plus
    return bool(marginal.mean_residual(at) < marginal.inverse_hazard(at))


def _near_only(function: Any, reach: float) -> Any:
    def call(marginal: Any, a: Any, means: Any, v: Any, bias: float) -> Any:
        near = clusters.distances(means, v, bias) > -reach
        return function(marginal, np.where(near, a, 0.0), means, v, bias)

    return call


def _by_share(
    marginal: Marginal, distance: float, ratio: float, *, negative: Marginal
) -> clusters.Phase:
    """For near clusters the largest ratio of shares, which lies above that of F."""
    right = clusters.phase(marginal, distance, ratio, negative=negative)
    if not np.isfinite(right.s_minus) or distance > 0.8:
        return right
    s = right.s_minus + np.linspace(-3, 1, 81)
    logs = marginal.log_theta1(s + distance) - negative.log_theta1(s)
    return right._replace(grows=bool(ratio < np.exp(np.max(logs))))


TWINS = (
    Twin("lemma4", _balance, "clusters beyond 30 do nothing"),
    Twin("eqn56", _nearly_parallel, "v parallel to x̄₊ - x̄₋ within 0.2 counts as parallel"),
    Twin(
        "eqn58",
        lambda marginal: clusters.sufficient_condition(marginal) > 0.26,
        "a constant of 0.26 for ¼",
    ),
    Twin(
        "eqn58",
        lambda marginal: clusters.sufficient_condition(marginal) >= 0.25 - 1e-12,
        "at ¼ itself, as for Laplace and t₂, F/θ₁ does not fall",
        was_ours=True,
        plain=False,
    ),
    Twin(
        "eqn58",
        lambda marginal: clusters.sufficient_condition(marginal) >= 0.25 + 1e-9,
        "above ¼ there need not be critical points at every distance",
        was_ours=True,
        search=Search(
            {
                "family": Choice("student", "spiked"),
                "df": Real(1.1, 2.0, log=True),
                "distance": Real(0.02, 50.0, log=True),
                "share": Real(0.01, 0.99),
                "width": Real(0.002, 0.5, log=True),
            },
            _promised,
        ),
    ),
    Twin("thm3-existence", _near_points, "critical points farther than 60 are not seen"),
    Twin(
        "thm3-existence",
        _equal_widths,
        "Gaussian clusters have none at all, also where their widths differ",
        was_ours=True,
        plain=False,
    ),
    Twin(
        "thm3-gaussian",
        lambda positive, negative, distance: int(positive <= negative),
        "one critical point also where the widths are equal",
    ),
    Twin("eqn59", lambda: (1.0004, 2.0), "ratios nearer to 1 than 0.0004 are left out"),
    Twin("thm3-laplace", _pade, "a Padé approximant below D = 0.055 widths"),
    Twin("thm3-fixed-bias", _fixed_bias, "θ₂ of the positive cluster is neglected beyond 40"),
    Twin(
        "thm3-line",
        _by_position,
        "up to three clusters overlap by position, not by mean residual life",
    ),
    Twin("a4-signs", _straight_border, "the border in D is 0.8 (df - 2)"),
    Twin(
        "a4-signs",
        lambda marginal, distance: distance >= 1,
        "one border D = 1 for every family",
        was_ours=True,
        plain=False,
    ),
    Twin("thm3-jacobian", _without_far_density, "p(s₊) is neglected beyond 25"),
    Twin(
        "thm3-ray",
        lambda point, length: np.array([1.0, 0, np.clip(point.s_minus, -100, 100)]) * length,
        "ξ/‖v‖ is cut off at 100",
    ),
    Twin("thm3-eigenvalues", _without_one, "s₋² in place of 1 + s₋² beyond 25"),
    Twin("thm3-stability", _rises_ahead, "at widths within 15% only the slope at s₊ is checked"),
    Twin(
        "thm3-stability",
        lambda marginal, point, negative=None: True,
        "every rest point is stable",
        was_ours=True,
        plain=False,
    ),
    Twin(
        "thm3-full-jacobian",
        _near_only(clusters.full_jacobian, 12.0),
        "clusters beyond 12 do nothing",
    ),
    Twin("thm3-potential", _near_only(clusters.potential, 12.0), "clusters beyond 12 do nothing"),
    Twin("thm3-phase", _by_share, "the largest θ₁₊/θ₁₋ in place of F₊/F₋ for D < 0.8"),
)

"""The claims about critical points with a wrong constant each."""

import numpy as np

from joma.theory import clusters


def _wrong_jacobian(marginal, point, **where):
    right = clusters.jacobian(marginal, point, **where)
    return right._replace(longitudinal=1.01 * right.longitudinal)


def _wrong_ratio(marginal, distance):
    ratio = clusters.critical_points(marginal, distance)[0].ratio
    return 1.001 * ratio, 1.001 * ratio


BROKEN = {
    "lemma4": lambda marginal, a, s, length: clusters.balance(marginal, [a[0], 1.01 * a[1]], s),
    "eqn56": lambda marginal, means, v, bias, ratio: False,
    "eqn58": lambda marginal: clusters.sufficient_condition(marginal) > 0.15,
    "thm3-existence": lambda marginal: clusters.sufficient_condition(marginal) > 0.2,
    "eqn59": _wrong_ratio,
    "thm3-laplace": lambda distance: 1.01 * np.exp(distance),
    "a4-signs": lambda: False,
    "thm3-jacobian": _wrong_jacobian,
    "thm3-ray": lambda point, length: np.array([1.0, 0, 0, 1.01 * point.s_minus]) * length,
}

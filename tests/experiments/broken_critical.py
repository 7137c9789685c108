"""The claims about critical points with a wrong constant each."""

import numpy as np

from joma.theory import clusters
from tests.experiments._breaking import scaled_output


def _wrong_jacobian(marginal, point, **where):
    right = clusters.jacobian(marginal, point, **where)
    return right._replace(longitudinal=1.01 * right.longitudinal)


def _wrong_eigenvalues(marginal, point, **where):
    right = clusters.eigenvalues(marginal, point, **where)
    return right._replace(along=1.01 * right.along)


def _wrong_phase(marginal, distance, ratio, *, negative):
    return clusters.phase(marginal, distance, 1.25 * ratio, negative=negative)


def _wrong_gradients(shapes, means, v, bias, signs):
    right = clusters.resting_gradients(shapes, means, v, bias, signs)
    return None if right is None else right * np.linspace(1, 1.01, len(right))


def _wrong_points(marginal, distance, *, negative):
    return [
        point._replace(ratio=1.5 * point.ratio)
        for point in clusters.critical_points(marginal, distance, negative=negative)
    ]


BROKEN = {
    "lemma4": lambda marginal, a, s, length: clusters.balance(marginal, [a[0], 1.01 * a[1]], s),
    "eqn56": lambda marginal, means, v, bias, ratio: False,
    "eqn58": lambda marginal: clusters.sufficient_condition(marginal) > 0.24,
    "thm3-existence": lambda positive, distance, negative: (
        clusters.sufficient_condition(positive) > 0.2
    ),
    "thm3-gaussian": lambda positive, negative, distance: int(positive > negative),
    "eqn59": lambda: (1.0, 2.1),
    "thm3-laplace": lambda distance, width: 1.01 * np.exp(distance / width),
    "thm3-fixed-bias": scaled_output(clusters.fixed_bias_ratio, 1.01),
    "thm3-line": _wrong_gradients,
    "a4-signs": lambda marginal, distance: True,
    "thm3-jacobian": _wrong_jacobian,
    "thm3-ray": lambda point, length: np.array([1.0, 0, 1.01 * point.s_minus]) * length,
    "thm3-eigenvalues": _wrong_eigenvalues,
    "thm3-stability": lambda marginal, point, negative: True,
    "thm3-full-jacobian": scaled_output(clusters.full_jacobian, 1.01),
    "thm3-potential": scaled_output(clusters.potential, 1.01),
    "thm3-phase": _wrong_phase,
    "thm3-sgd": _wrong_points,
}

"""The claims about clusters with a wrong constant each."""

from joma.theory import clusters, marginals
from joma.theory.marginals import Ball
from tests.experiments._breaking import scaled_output


def _wrong_expectations(marginal, v, mean, bias, *, basis):
    right = clusters.expectations(marginal, v, mean, bias, basis=basis)
    return right.activity, 1.05 * right.moment


def _wrong_velocity(marginal, a, means, v, bias):
    right = clusters.velocity(marginal, a, means, v, bias)
    return clusters.Velocity(right.v, 1.1 * right.bias)


def _wrong_slopes(marginal, s, *, slopes):
    return tuple(1.01 * d for d in clusters.homogeneous_slopes(marginal, s, slopes=slopes))


BROKEN = {
    "lemma1": _wrong_expectations,
    "lemma2": _wrong_velocity,
    "lemma3": lambda marginal, s: marginal.first_integral(s) + 1e-6,
    "eqn53": scaled_output(clusters.radial_velocity, 1.01),
    "lemma5": _wrong_slopes,
    "eqn35": scaled_output(marginals.sphere_constant, 1.01),
    "eqn36": scaled_output(marginals.sphere_constant, 0.99),
    "eqn36-ball": lambda n, u: 1.001 * Ball(n).pdf(u),
    "eqn57": scaled_output(clusters.curve_slope, 1.01),
}

"""Wrong statements about computational graphs: small numbers taken as zero, extreme weights."""

import dataclasses
from typing import Any

import numpy as np

from benchmarks.adversary import Twin
from joma.experiments.claims.cdag.theorem1 import small_angle_bound
from joma.theory import cdag


def _backward(network: cdag.CDAG, activations: Any, output_gradient: Any) -> Any:
    weights = np.clip(network.weights, -6.0, 6.0)
    return dataclasses.replace(network, weights=weights).backward(activations, output_gradient)


def _bound(first: Any, second: Any, third: Any) -> Any:
    """The least value at the two ends alone where θ₁ is close to π."""
    first, second, third = (np.asarray(one) for one in (first, second, third))
    ends = [np.abs(first - third), np.minimum(first + third, 2 * np.pi - first - third)]
    least = np.min(
        [np.cos(a) * np.where(np.cos(a) > 0, np.cos(a + second), np.cos(a - second)) for a in ends],
        axis=0,
    )
    return np.where(first > 2.5, least, cdag.correlation_bound(first, second, third))


def _small_angles(first: Any, second: Any, third: Any) -> Any:
    return small_angle_bound(first, second, np.where(np.asarray(third) < 1e-4, 0.0, third))


def _tight(*angles: Any) -> Any:
    return cdag.correlation_bound(*(np.where(np.asarray(it) > 3.12, np.pi, it) for it in angles))


def _at_an_input(z_beta: Any, delta: Any) -> Any:
    return cdag.corr(z_beta, np.where(np.abs(delta) < 2e-12, 0.0, delta)) ** 2


def _recursion_attained(z: Any, g: Any, low: Any, high: Any) -> Any:
    return cdag.recursion_bound(z, np.where(np.abs(g) < 1e-11, 0.0, g), low, high)


def _without_single_values(z: Any, g: Any) -> Any:
    """The gradient without the sample of a value that occurs once among more than 25."""
    z, g = np.asarray(z), np.asarray(g)
    if len(z) > 25 and np.sum(z) == 1:
        return np.where(z == 1, 0.0, g)
    return g


def _flow(w: Any, plus: Any, minus: Any, z: Any, g: Any, nonlinearity: Any) -> Any:
    return cdag.two_value_flow(w, plus, minus, z, _without_single_values(z, g), nonlinearity)


def _label_flow(w: Any, plus: Any, minus: Any, z: Any, g: Any, nonlinearity: Any) -> Any:
    return cdag.label_flow(w, plus, minus, z, _without_single_values(z, g), nonlinearity)


TWINS = (
    Twin("cdag-backward", _backward, "weights beyond 6 are clipped"),
    Twin("cdag-theorem-1", _bound, "the least value between the ends is left out for θ₁ > 2.5"),
    Twin("cdag-theorem-1-angles", _small_angles, "an angle θ₃ below 1e-4 counts as 0"),
    Twin("cdag-theorem-1-tight", _tight, "angles above 3.12 count as π"),
    Twin("cdag-theorem-1-input", _at_an_input, "gradients below 2e-12 count as 0"),
    Twin(
        "cdag-recursion",
        lambda z, g, low, high: cdag.recursion_bound(z, g, max(low, 1e-3), max(high, 1e-3)),
        "slopes are never below .001",
    ),
    Twin("cdag-recursion-attained", _recursion_attained, "gradients below 1e-11 count as 0"),
    Twin("cdag-eqn-2", _flow, "a value that occurs once in more than 25 samples is left out"),
    Twin("cdag-eqn-3", _label_flow, "a value that occurs once in more than 25 samples is left out"),
    Twin(
        "cdag-eqn-3-centred",
        _label_flow,
        "a value that occurs once in more than 25 samples is left out",
    ),
)

"""The CDAG claims' formulas with a wrong constant each."""

import dataclasses

import numpy as np

from joma.experiments.claims.claim import Formula
from joma.theory import cdag


def _backward(network, activations, output_gradient):
    gradients = network.backward(activations, output_gradient)
    return dataclasses.replace(gradients, weights=1.001 * gradients.weights)


def _small_angle_bound(theta_1, theta_2, theta_3):
    return np.cos(theta_1 + theta_2 + theta_3) * np.cos(theta_1 + 0.98 * theta_3)


def _unequal_classes(w, x_plus, x_minus, z_alpha, g, nonlinearity):
    on = 0.95 * np.mean(np.multiply(g, z_alpha))
    off = np.mean(np.multiply(g, np.subtract(1, z_alpha)))
    rise = nonlinearity.derivative(w @ x_plus) * x_plus
    return on * rise + off * nonlinearity.derivative(w @ x_minus) * x_minus


BROKEN: dict[str, Formula] = {
    "cdag-backward": _backward,
    "cdag-theorem-1": lambda *angles: cdag.correlation_bound(*angles) + 1e-3,
    "cdag-theorem-1-angles": _small_angle_bound,
    "cdag-theorem-1-tight": lambda *angles: 1.01 * cdag.correlation_bound(*angles),
    "cdag-theorem-1-input": lambda z_beta, delta: 1.001 * cdag.corr(z_beta, delta) ** 2,
    "cdag-recursion": lambda z, g, low, high: cdag.recursion_bound(z, g, 1.01 * low, high),
    "cdag-recursion-attained": lambda z, g, low, high: cdag.recursion_bound(z, g, low, 1.01 * high),
    "cdag-eqn-2": lambda *arguments: 1.001 * cdag.two_value_flow(*arguments),
    "cdag-eqn-3": _unequal_classes,
    "cdag-eqn-3-centred": lambda *arguments: 1.001 * cdag.label_flow(*arguments),
    "cdag-trained-network": lambda *angles: cdag.correlation_bound(*angles) + 0.02,
}

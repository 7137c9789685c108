"""The claims of linear dynamics with a wrong constant each."""

import numpy as np

from joma.theory import linear, spectra
from tests.experiments._breaking import scaled_argument, scaled_output


def _wrong_stable_ranks(delta, t):
    v = spectra.stable_rank(linear.weights_multi(delta, t))
    return v, v


def _wrong_linear_attention(delta, t, **rates):
    return linear.linear_attention(1.01 * delta, t, **rates)


def _wrong_temperature(delta, t, v0, z0, normalizer, *, eta_w, eta_z, tau):
    problem = linear.unit_rates(delta, eta_w=eta_w, eta_z=eta_z, tau=1.01 * tau)
    start = v0 / problem.scale
    return problem.scale * linear.weights(
        problem.delta, t, initial=start, log_offset=z0 / tau - start**2 / 2, normalizer=normalizer
    )


def _linearised_own_time(delta, *, initial):
    way = np.sqrt(np.pi / 2) - np.sign(delta) * initial
    return np.argmin(way / np.abs(delta))


BROKEN = {
    "eqn3": _wrong_temperature,
    "thm2": lambda delta, v: linear.conserved_ratio(delta, 1.01 * v),
    "thm2-closed-form": scaled_output(linear.weights, 1 + 1e-8),
    "thm2-blowup": scaled_output(linear.blowup_time, 1.001),
    "thm2-winner": lambda delta, *, initial: np.argmax(delta),
    "thm2-own-time": _linearised_own_time,
    "thm2-losers": scaled_output(linear.limit, 1.001),
    "thm2-softmax": lambda delta, v: linear.conserved_ratio(delta, 1.01 * v),
    "footnote1": lambda g, x: 1.005 * (g @ x / len(x)),
    "talk-matrix": lambda v, delta: np.exp(0.51 * np.sum(v**2, axis=1, keepdims=True)) * delta,
    "talk-nodes": scaled_argument(linear.weights_multi, 1.01),
    "talk-rank": lambda delta: True,
    "talk-stable-rank": lambda delta: 1.0,
    "talk-gradient-rank": _wrong_stable_ranks,
    "linear-attention": _wrong_linear_attention,
}

"""The claims about Eqn 6 and Theorem 4 with a wrong constant each."""

import numpy as np

from joma.experiments.claims.nonlinear import CLAIMS
from joma.theory import nonlinear
from tests.experiments._breaking import scaled_argument, scaled_output

_DERIVED = {claim.id: claim.derived for claim in CLAIMS}


BROKEN = {
    "eqn6": scaled_output(nonlinear.weights, 1 + 1e-8),
    "eqn6-ode": scaled_output(nonlinear.weights, 1.001),
    "eqn6-log": scaled_output(nonlinear.log_residual, 1 + 1e-8),
    "eqn6-late": lambda mu, t: -np.exp(mu**2 / 2) * (t - 1.001 * nonlinear.residual_offset(mu)),
    "eqn84": scaled_output(_DERIVED["eqn84"], 1.01),
    "fig4-entropy": lambda mu: (True, False),
    "fig4-fate": lambda mu: (True, nonlinear.entropy_fate(mu)[1]),
    "eqn6-nodes": scaled_argument(nonlinear.weights_multi, 1.001),
    "sec4-rank": lambda: True,
    "sec4-stable-rank": lambda mu, t: np.multiply(1.02, _DERIVED["sec4-stable-rank"](mu, t)),
}

"""The claims about Eqn 6 and Theorem 4 with a wrong constant each."""

import numpy as np

from joma.experiments.claims import CLAIMS
from joma.theory import nonlinear
from tests.experiments._breaking import scaled_argument, scaled_output

_DERIVED = {claim.id: claim.derived for claim in CLAIMS}


def _rebounds_with_weak_components(mu):
    size = np.abs(mu)
    fate = nonlinear.entropy_fate(mu)
    return fate._replace(rebounds=bool(np.any((size > 0) & (size < 0.9 * size.max()))))


def _larger_drop(mu):
    fate = nonlinear.stable_rank_fate(mu)
    return fate._replace(drop=1.02 * fate.drop)


def _always_falls(mu):
    return nonlinear.stable_rank_fate(mu)._replace(first=-1)


BROKEN = {
    "eqn6": scaled_output(nonlinear.weights, 1 + 1e-8),
    "eqn6-ode": scaled_output(nonlinear.weights, 1.001),
    "eqn6-log": scaled_output(nonlinear.log_residual, 1 + 1e-8),
    "eqn6-late": lambda mu, t: -np.exp(mu**2 / 2) * (t - 1.001 * nonlinear.residual_offset(mu)),
    "eqn84": scaled_output(_DERIVED["eqn84"], 1.01),
    "fig4-entropy": lambda mu: (True, False),
    "fig4-fate": _rebounds_with_weak_components,
    "eqn6-nodes": scaled_argument(nonlinear.weights_multi, 1.001),
    "sec4-rank": lambda mu: True,
    "sec4-stable-rank": _larger_drop,
    "sec4-rank-turns": _always_falls,
}

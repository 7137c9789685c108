"""The claims about rates of convergence with a wrong constant each."""

import numpy as np

from joma.theory import nonlinear
from tests.experiments._breaking import scaled_output

BROKEN = {
    "lemma6": lambda: 0.63,
    "lemma6-sharp": scaled_output(nonlinear.lemma6_bound, 1.01),
    "lemma7": lambda: 0.76,
    "lemma7-sharp": scaled_output(nonlinear.lemma7_bound, 1.01),
    "thm4": lambda: 0.86,
    "thm4-sharp": lambda: 0.8650,
    "thm4-rates": lambda: 0.86,
    "thm4-rates-sharp": scaled_output(nonlinear.offset_bound, 1.01),
    "thm4-leading": lambda log_residual, mu: -np.exp(-0.52 * mu**2) * log_residual,
    "thm4-threshold": scaled_output(nonlinear.settled_threshold, 0.8650 / 0.8643248),
    "thm4-linear": lambda mu, t, *, initial: nonlinear.linear_attention_residual(
        mu, t, initial=1.01 * initial
    ),
}

"""Twins of the claims about rates of convergence."""

from typing import Any

import numpy as np

from benchmarks.adversary._twin import Twin
from joma.theory import nonlinear


def _threshold(mu: Any) -> Any:
    """With 0.8643 for 0.86432."""
    return -0.8643 * np.exp(np.asarray(mu, dtype=float) ** 2 / 2)


def _leading_time(log_residual: Any, mu: Any) -> Any:
    """Off by 3e-8, which counts where ln 1/δ is above 1e7."""
    return -np.exp(-(np.asarray(mu) ** 2) / 2) * np.asarray(log_residual) * (1 + 3e-8)


def _residual_from_small_starts(mu: Any, t: Any, *, initial: Any) -> Any:
    """Takes a start below 1e-11 μ for 1e-11 μ."""
    start = np.maximum(initial, 1e-11 * np.asarray(mu))
    return nonlinear.linear_attention_residual(mu, t, initial=start)


TWINS: tuple[Twin, ...] = (
    Twin("lemma6", lambda: nonlinear.lemma6_bound() - 5e-7, "too small by 5e-7, at y = 1.12"),
    Twin("lemma6-sharp", lambda: nonlinear.lemma6_bound() - 5e-7, "too small by 5e-7"),
    Twin("lemma7", lambda: nonlinear.lemma7_bound() - 5e-7, "too small by 5e-7, at y = 1.31"),
    Twin("lemma7-sharp", lambda: nonlinear.lemma7_bound() - 5e-7, "too small by 5e-7"),
    Twin("thm4", lambda: nonlinear.offset_bound() - 5e-7, "too small by 5e-7, at μ = 1.872"),
    Twin("thm4-sharp", lambda: 0.86431, "the last digit rounded down"),
    Twin("thm4-rates", lambda: nonlinear.offset_bound() - 9e-7, "too small by 9e-7"),
    Twin("thm4-rates-sharp", lambda: 0.8643, "rounded down to four digits"),
    Twin("thm4-leading", _leading_time, "off by 3e-8"),
    Twin("thm4-threshold", _threshold, "0.8643 for 0.86432"),
    Twin("thm4-linear", _residual_from_small_starts, "starts below 1e-11 of the target"),
)

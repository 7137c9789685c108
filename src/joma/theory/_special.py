"""SciPy's special functions, with the types that its stubs cannot give to ufuncs."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from joma.theory._checks import Array


def _typed(function: Callable[..., Any]) -> Callable[..., Array]:
    def call(*arguments: ArrayLike) -> Array:
        return np.asarray(function(*(np.asarray(a, dtype=np.float64) for a in arguments)))

    return call


erf = _typed(special.erf)
erfc = _typed(special.erfc)
erfinv = _typed(special.erfinv)
erfcinv = _typed(special.erfcinv)
erfcx = _typed(special.erfcx)
ndtr = _typed(special.ndtr)
log_ndtr = _typed(special.log_ndtr)
ndtri_exp = _typed(special.ndtri_exp)
expit = _typed(special.expit)
betainc = _typed(special.betainc)
betaincinv = _typed(special.betaincinv)
stdtr = _typed(special.stdtr)
dawsn = _typed(special.dawsn)
gammaln = _typed(special.gammaln)


def softmax(logits: Array, axis: int = -1) -> Array:
    """exp(logits) normalised along an axis."""
    shifted = np.exp(logits - np.max(logits, axis=axis, keepdims=True))
    return shifted / np.sum(shifted, axis=axis, keepdims=True)


def log_sum_exp(logits: Array, axis: int = -1) -> Array:
    """Ln Σ exp(logits) along an axis, without overflow."""
    peak = np.max(logits, axis=axis, keepdims=True)
    return np.squeeze(peak, axis) + np.log(np.sum(np.exp(logits - peak), axis=axis))


def entropy(probabilities: Array, axis: int = -1) -> Array:
    """-Σ p ln p along an axis, in nats; 0 ln 0 is 0."""
    safe = np.where(probabilities > 0, probabilities, 1.0)
    return -np.sum(probabilities * np.log(safe), axis=axis)

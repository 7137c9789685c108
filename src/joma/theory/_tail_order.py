"""What F₊(s+D)/F₋(s) does as s → -∞, in closed form for the named families."""

from typing import NamedTuple

import numpy as np

from joma.theory._marginal import Marginal
from joma.theory.marginals import Ball, Gaussian, Laplace, Logistic, Scaled, StudentT


class TailLimit(NamedTuple):
    """The end of F₊(s+D)/F₋(s) at which both clusters leave the active side.

    Attributes:
        ratio: its limit there, from 0 to inf.
        rises: +1 if the ratio rises towards that end, -1 if it falls, 0 if that is not known.
    """

    ratio: float
    rises: int


def tail_limit(positive: Marginal, negative: Marginal, distance: float) -> TailLimit | None:
    """Return the limit for two named families, scaled or not; None for any other marginal.

    With x = -s, F falls like x^{1-df} for Student's t, like e^{-x/w} for the Laplace and logistic
    distributions of width w, and like e^{-x²/2w²} for the Gaussian. The ball ends at its radius.
    """
    plus, w_plus = _unscaled(positive)
    minus, w_minus = _unscaled(negative)
    ranks = _rank(plus), _rank(minus)
    if 0 in ranks:
        return None
    if ranks[0] != ranks[1]:
        return _of_sign(ranks[0] - ranks[1])
    if isinstance(plus, StudentT) and isinstance(minus, StudentT):
        if plus.df != minus.df:
            return _of_sign(minus.df - plus.df)
        with np.errstate(over="ignore"):
            limit = float(np.exp(plus.df * (np.log(w_plus) - np.log(w_minus))))
        return TailLimit(limit, -1)  # like 1 + (df-1) D/x
    if isinstance(plus, Ball) and isinstance(minus, Ball):
        beyond = w_plus + distance - w_minus
        if beyond != 0 or plus.n != minus.n:
            return _of_sign(beyond if beyond != 0 else minus.n - plus.n)
        return TailLimit(float((w_minus / w_plus) ** ((plus.n + 1) / 2)), 0)
    if w_plus != w_minus:
        return _of_sign(w_plus - w_minus)
    if isinstance(plus, Gaussian):
        return TailLimit(np.inf, 1)
    # F is w e^{-x/w} (1 - e^{-x/w}/2 + …) for the logistic distribution, half of w e^{-x/w} for
    # the Laplace distribution.
    factor = (1.0 if isinstance(plus, Logistic) else 0.5) / (
        1.0 if isinstance(minus, Logistic) else 0.5
    )
    with np.errstate(over="ignore"):
        limit = float(factor * np.exp(distance / w_plus))
    return TailLimit(limit, _rise_of_exponential_tails(plus, minus))


def _rise_of_exponential_tails(plus: Marginal, minus: Marginal) -> int:
    if isinstance(plus, Logistic):
        return 1
    return -1 if isinstance(minus, Logistic) else 0


def _of_sign(difference: float) -> TailLimit:
    return TailLimit(np.inf, 1) if difference > 0 else TailLimit(0.0, -1)


def _unscaled(marginal: Marginal) -> tuple[Marginal, float]:
    width = 1.0
    while isinstance(marginal, Scaled):
        marginal, width = marginal.marginal, width * marginal.width
    return marginal, width


def _rank(marginal: Marginal) -> int:
    """The heavier the tail the larger; 0 for a marginal that is not of a named family."""
    match marginal:
        case StudentT():
            return 4
        case Laplace() | Logistic():
            return 3
        case Gaussian():
            return 2
        case Ball():
            return 1
        case _:
            return 0

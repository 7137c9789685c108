"""Theorem 2 and the talk's remarks at one point of their domain, for the adversary."""

from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
from scipy import linalg

from joma.errors import JomaError
from joma.experiments.claims.measurement import Formula, Measurement
from joma.experiments.claims.reference.eqn6 import distance, follow, log_own_time
from joma.experiments.claims.search import (
    Choice,
    Integer,
    Matrix,
    Point,
    Real,
    Search,
    Vector,
)
from joma.theory import linear

_DELTA = Vector(Real(-3, 3, special=(0.0,)), Integer(1, 8))
_LEFT = Real(1e-3, 0.999, log=True)
"""Share of the winner's time that is left, where an ODE is followed up to it."""
_RATE = Real(0.03, 30, log=True, special=(1.0,))
_TOKENS = {
    "delta": _DELTA,
    "start": Vector(Real(-40, 40, special=(0.0, 1.0)), Integer(1, 8)),
    "offset": Vector(Real(-900, 900, special=(0.0,)), Integer(1, 8)),
    "offset_from": Choice("zero", "start"),
    "normalizer": Vector(Real(1e-3, 1e3, log=True, special=(1.0,)), Integer(1, 8)),
}


def _moving(delta: Any) -> Any:
    """Tokens that move at all; refused where none does."""
    delta = delta[np.abs(delta) > 1e-100]
    if delta.size == 0:
        raise JomaError("no token moves")
    return delta


def _tokens(point: Point) -> tuple[Any, Any, Any, Any]:
    """Δ, v(0), c and A of as many tokens as Δ has, c alone or on top of -v(0)²/2."""
    delta = point["delta"]
    start, offset, normalizer = (
        np.resize(point[name], delta.size) for name in ("start", "offset", "normalizer")
    )
    if point["offset_from"] == "start":
        offset = offset / 30 - start**2 / 2
    return delta, start, offset, normalizer


def _relative(ours: Any, reference: Any) -> float:
    return float(np.max(np.abs(ours - reference)) / np.max(np.abs(reference), initial=1e-300))


def _block(formula: Formula, point: Point) -> Measurement:
    """Weights and logits of a block with exp attention, followed together."""
    delta = _moving(point["delta"])
    v0, z0 = np.resize(point["v0"], delta.size), np.resize(point["z0"], delta.size)
    rates = {name: point[name] for name in ("eta_w", "eta_z", "tau")}
    problem = linear.unit_rates(delta, **rates)
    start = v0 / problem.scale
    own = linear.blowup_time(
        problem.delta, initial=start, log_offset=z0 / rates["tau"] - start**2 / 2
    )
    t = float(np.min(own) * point["normalizer"] * (1 - point["left"]))
    if not 1e-250 < t < 1e250:
        raise JomaError("the time is out of the range of the reference")

    def right_side(state: Any) -> Any:
        v, z = state
        gate = delta * np.exp(z / rates["tau"] + np.log(t / point["normalizer"]))
        return np.stack([rates["eta_w"] * gate, rates["eta_z"] / rates["tau"] * gate * v])

    v = follow(right_side, np.stack([v0, z0]), 1.0)[0]
    ours = formula(delta, t, v0, z0, point["normalizer"], **rates)
    size = np.maximum(np.maximum(np.abs(v), np.abs(v0)), problem.scale)
    return Measurement(float(np.max(np.abs(ours - v) / size)), 1e-5)


def _along(delta: Any, left: float, common: float = 0.0) -> Any:
    """V of v̇ = Δ exp((v² - common ‖v‖²)/2) from zero, with `left` of Theorem 2's time left."""
    t = np.sqrt(np.pi / 2) / np.max(np.abs(delta)) * (1 - left)

    def right_side(w: Any) -> Any:
        v = delta * w
        return np.exp((v**2 - common * np.sum(v**2)) / 2)

    return delta * follow(right_side, np.zeros(delta.size), float(t))


def _ratio(formula: Formula, point: Point) -> Measurement:
    delta = _moving(point["delta"])
    ratios = formula(delta, _along(delta, point["left"]))
    return Measurement(float(np.ptp(ratios) / np.abs(np.mean(ratios))), 1e-7)


def _reduced_softmax(formula: Formula, point: Point) -> Measurement:
    """The reduced equation of softmax attention with b̄ frozen at equal values."""
    delta = _moving(point["delta"])
    ratios = formula(delta, _along(delta, point["left"], point["share"] / delta.size))
    return Measurement(float(np.ptp(ratios) / np.abs(np.mean(ratios))), 1e-7)


def _closed_form(formula: Formula, point: Point) -> Measurement:
    """The defining integral at the same float t, in 60 digits."""
    delta, start = point["sign"] * point["size"], point["start"]
    offset = point["offset"] - (start**2 / 2 if point["offset_from"] == "start" else 0.0)
    given = {"initial": start, "log_offset": offset, "normalizer": point["normalizer"]}
    own = float(linear.blowup_time([delta], **given)[0])
    t = own * (1 - point["left"] if point["late"] else point["left"])
    if not 1e-290 < t < 1e290:
        raise JomaError("the time is out of the range of float64")
    v = float(formula([delta], t, **given)[0])
    with mpmath.workdps(60):
        log_way = mpmath.log(abs(delta)) + mpmath.log(t) - mpmath.log(point["normalizer"])
        off = distance(delta, start, v, log_way + mpmath.mpf(offset))
    return Measurement(off / max(abs(v), 1e-6), 1e-11)


def _own_time(formula: Formula, point: Point) -> Measurement:
    delta, start, offset, normalizer = _tokens(point)
    ours = formula(delta, initial=start, log_offset=offset, normalizer=normalizer)
    worst = 0.0
    with mpmath.workdps(40):
        for one in range(delta.size):
            if delta[one] == 0:
                worst = max(worst, float(np.isfinite(ours[one])))
                continue
            log_time = log_own_time(delta[one], start[one], offset[one], normalizer[one])
            if abs(log_time) < 690:
                worst = max(worst, float(abs(mpmath.mpf(ours[one]) / mpmath.exp(log_time) - 1)))
    return Measurement(worst, 1e-14)


def _winner_from_zero(formula: Formula, point: Point) -> Measurement:
    delta = _moving(point["delta"])
    ahead = np.abs(_along(delta, point["left"]))
    first, second = np.argmax(ahead), np.sort(ahead)[-2] if ahead.size > 1 else 0.0
    if second > ahead[first] * (1 - 1e-7):
        raise JomaError("two tokens are too close for the reference")
    wrong = formula(delta, initial=np.zeros(delta.size)) != first
    return Measurement(1.0 if wrong else float(second / ahead[first] - 1), 0.0)


def _winner(formula: Formula, point: Point) -> Measurement:
    """The token with the smallest own time in 40 digits, unless two are equal but for rounding."""
    delta, start, offset, normalizer = _tokens(point)
    ours = int(formula(delta, initial=start, log_offset=offset, normalizer=normalizer))
    with mpmath.workdps(40):
        times = [
            log_own_time(*one) if one[0] else mpmath.inf
            for one in zip(delta, start, offset, normalizer, strict=True)
        ]
        late = float(times[ours] - min(times))
        # Where it is right, by how much: the search goes on where two are close.
        ahead = float(min([*times[:ours], *times[ours + 1 :], mpmath.inf]) - times[ours])
    rounding = 1e-16 * max(1.0, float(np.max(np.abs(offset))))
    guide = -min(ahead, 1.0) if ahead > rounding else -1.0
    return Measurement(late if late > 0 else guide, rounding)


def _losers(formula: Formula, point: Point) -> Measurement:
    """The defining integral up to the winner's time, in 60 digits.

    The slack is what rounding of a long double does to the weight of a token that nearly ties.
    """
    delta, start, offset, normalizer = _tokens(point)
    ours = formula(delta, initial=start, log_offset=offset, normalizer=normalizer)
    worst = -1.0
    with mpmath.workdps(60):
        every = [
            log_own_time(*one) if one[0] else mpmath.inf
            for one in zip(delta, start, offset, normalizer, strict=True)
        ]
        first = min(every)
        for one, log_time in enumerate(every):
            if log_time == first or delta[one] == 0:
                known = np.sign(delta[one]) * np.inf if delta[one] else start[one]
                worst = max(worst, float(ours[one] != known))
                continue
            gap = float(-mpmath.expm1(first - log_time))
            rounding = 1e-18 * (1 + np.max(np.abs(offset)))
            if gap < 1e3 * rounding:
                continue
            log_way = mpmath.log(abs(delta[one])) + first - mpmath.log(normalizer[one])
            off = distance(delta[one], start[one], float(ours[one]), log_way + offset[one])
            worst = max(worst, off / (1e-11 * max(abs(ours[one]), 1e-6) + rounding / gap))
    return Measurement(worst, 1.0)


def _saliency(formula: Formula, point: Point) -> Measurement:
    """E[g x_l] as a sum of fractions."""
    x = point["x"]
    if np.any(x.sum(axis=1) < 1e-6):
        raise JomaError("a sample without tokens")
    x = x / x.sum(axis=1, keepdims=True)
    g = np.resize(point["g"], len(x))
    exact = [
        float(sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(g, column, strict=True)))
        for column in x.T
    ]
    off = np.abs(formula(g, x) - np.array(exact) / len(x))
    # An error of rounding is one of the sum of all terms.
    return Measurement(float(np.max(off / (np.abs(g) @ x / len(x) + 1e-300))), 1e-12)


def _attention_that_is_linear(formula: Formula, point: Point) -> Measurement:
    """The matrix exponential of (v, z)."""
    delta, rates = point["delta"], {name: point[name] for name in ("eta_w", "eta_z", "tau")}
    t = point["angle"] * rates["tau"] / np.sqrt(rates["eta_w"] * rates["eta_z"])
    z0 = np.resize(point["z0"], delta.size)
    v, z = formula(delta, t, logits=z0, **rates)
    worst = 0.0
    for one, start in enumerate(z0):
        step = delta[one] * t / rates["tau"]
        end: Any = linalg.expm(np.array([[0, rates["eta_w"]], [rates["eta_z"], 0]]) * step)
        exact = end[:, 1] * start
        off = np.abs(np.array([v[one], z[one]]) - exact)
        worst = max(worst, float(np.max(off / np.where(exact == 0, 1e-300, np.abs(exact)))))
    return Measurement(worst, 1e-10)


_RATES = {"eta_w": _RATE, "eta_z": _RATE, "tau": _RATE}

EQN3 = Search(
    {
        "delta": _DELTA,
        "v0": Vector(Real(-2, 2, special=(0.0,)), Integer(1, 8)),
        "z0": Vector(Real(-3, 3, special=(0.0,)), Integer(1, 8)),
        "normalizer": _RATE,
        "left": _LEFT,
        **_RATES,
    },
    _block,
)
THM2 = Search({"delta": _DELTA, "left": _LEFT}, _ratio)
CLOSED_FORM = Search(
    {
        "size": Real(1e-3, 1e3, log=True),
        "sign": Choice(1, -1),
        "start": Real(-147, 147, special=(0.0, -1.0, 37.8)),
        "offset": Real(-30, 30, special=(0.0,)),
        "offset_from": Choice("zero", "start"),
        "normalizer": Real(1e-3, 1e3, log=True),
        "left": Real(1e-8, 0.999, log=True),
        "late": Choice(True, False),
    },
    _closed_form,
)
BLOWUP = Search(_TOKENS, _own_time)
WINNER = Search({"delta": _DELTA, "left": _LEFT}, _winner_from_zero)
OWN_TIME = Search(_TOKENS, _winner)
LOSERS = Search(_TOKENS, _losers)
SOFTMAX = Search({"delta": _DELTA, "left": _LEFT, "share": Real(0, 1)}, _reduced_softmax)
FOOTNOTE1 = Search(
    {
        "x": Matrix(Real(0, 1, special=(0.0,)), Integer(1, 6), Integer(1, 6)),
        "g": Vector(Real(-3, 3, special=(0.0,)), Integer(1, 6)),
    },
    _saliency,
)
LINEAR_ATTENTION = Search(
    {
        "delta": _DELTA,
        "z0": Vector(Real(-3, 3, special=(0.0,)), Integer(1, 8)),
        "angle": Real(1e-6, 20, log=True),
        **_RATES,
    },
    _attention_that_is_linear,
)

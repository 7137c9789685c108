"""Searches of Theorem 2, many nodes and linear attention."""

from typing import Any

import mpmath
import numpy as np
from scipy import linalg

from joma.errors import JomaError
from joma.experiments.claims import linear as checks
from joma.experiments.claims.claim import ClaimMeasurement, Formula, Point, measured, relative
from joma.experiments.claims.reference.ode import solve
from joma.theory import linear
from tests.adversary.domains import Domain, choice, integer, matrix, over, real, vector

DELTA = vector(real(-3, 3, special=(0.0,)), integer(1, 8))


LOGITS = vector(real(-3, 3, special=(0.0,)), integer(1, 8))


TIME_LEFT = real(1e-3, 0.999, log=True)
"""Share of the winner's time that is left, where an ODE is followed up to it."""


RATE = real(0.03, 30, log=True, special=(1.0,))


ANY_RATES: dict[str, Domain] = {"eta_w": RATE, "eta_z": RATE, "tau": RATE}


_TOKENS: dict[str, Domain] = {
    "delta": DELTA,
    "start": vector(real(-40, 40, special=(0.0, 1.0)), integer(1, 8)),
    "offset": vector(real(-900, 900, special=(0.0,)), integer(1, 8)),
    "offset_from": choice("zero", "start"),
    "normalizer": vector(real(1e-3, 1e3, log=True, special=(1.0,)), integer(1, 8)),
}


def _tokens(point: Point) -> tuple[list[Any], dict[str, Any]]:
    """Δ, v(0), c and A of each token, c alone or on top of -v(0)²/2; and the formulas' options."""
    delta = point["delta"]
    start, offset, normalizer = (
        np.resize(point[name], delta.size) for name in ("start", "offset", "normalizer")
    )
    if point["offset_from"] == "start":
        offset = offset / 30 - start**2 / 2
    options = {"initial": start, "log_offset": offset, "normalizer": normalizer}
    return list(zip(delta, start, offset, normalizer, strict=True)), options


def log_own_time(delta: float, start: float, offset: float, normalizer: float) -> Any:
    """Return ln of ∫ dv/v̇ from v(0) to infinity for v̇ = Δ exp(v²/2 + c)/A; infinity for Δ = 0."""
    if not delta:
        return mpmath.inf
    u = mpmath.mpf(start) * (1 if delta > 0 else -1)
    way = mpmath.sqrt(mpmath.pi / 2) * mpmath.erfc(u / mpmath.sqrt(2))
    return mpmath.log(way) + mpmath.log(normalizer) - mpmath.mpf(offset) - mpmath.log(abs(delta))


def distance(delta: float, start: float, v: float, log_way: Any) -> float:
    """Return by how much v must change for ∫ e^{-u²/2} du from v(0) to v to be exp(log_way)."""
    sign = 1 if delta > 0 else -1
    begin, end = (mpmath.mpf(sign * a) / mpmath.sqrt(2) for a in (start, v))
    if begin >= 0:
        covered = mpmath.erfc(begin) - mpmath.erfc(end)
    elif end <= 0:
        covered = mpmath.erfc(-end) - mpmath.erfc(-begin)
    else:
        covered = mpmath.erf(end) - mpmath.erf(begin)
    missing = mpmath.exp(log_way) - covered * mpmath.sqrt(mpmath.pi / 2)
    return float(abs(missing * mpmath.exp(mpmath.mpf(v) ** 2 / 2)))


@over(
    "thm2-closed-form",
    size=real(1e-3, 1e3, log=True),
    sign=choice(1, -1),
    start=real(-147, 147, special=(0.0, -1.0, 37.8)),
    offset=real(-30, 30, special=(0.0,)),
    offset_from=choice("zero", "start"),
    normalizer=real(1e-3, 1e3, log=True),
    left=real(1e-7, 0.999, log=True),
    late=choice(True, False),
)
def _closed_form_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The defining integral at the same float t, in 60 digits."""
    delta, start = point["sign"] * point["size"], point["start"]
    offset = point["offset"] - (start**2 / 2 if point["offset_from"] == "start" else 0.0)
    options = {"initial": start, "log_offset": offset, "normalizer": point["normalizer"]}
    own = float(linear.blowup_time([delta], **options)[0])
    t = own * (1 - point["left"] if point["late"] else point["left"])
    if not 1e-290 < t < 1e290:
        raise JomaError("the time is out of the range of float64")
    v = float(formula([delta], t, **options)[0])
    with mpmath.workdps(60):
        log_way = mpmath.log(abs(delta)) + mpmath.log(t) - mpmath.log(point["normalizer"])
        off = distance(delta, start, v, log_way + mpmath.mpf(offset))
    return ClaimMeasurement(off / max(abs(v), 1e-6), 1e-9)


@over("thm2-blowup", **_TOKENS)
def _time_at(formula: Formula, point: Point) -> ClaimMeasurement:
    tokens, options = _tokens(point)
    errors = [0.0]
    with mpmath.workdps(40):
        for time, token in zip(formula(point["delta"], **options), tokens, strict=True):
            log_time = log_own_time(*token)
            if log_time == mpmath.inf:
                errors.append(float(np.isfinite(time)))
            elif abs(log_time) < 690:
                errors.append(float(abs(mpmath.mpf(time) / mpmath.exp(log_time) - 1)))
    return measured(errors, 1e-13)


@over("thm2-own-time", **_TOKENS)
def _winner_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The token with the smallest own time in 40 digits, unless two are equal but for rounding."""
    tokens, options = _tokens(point)
    ours = int(formula(point["delta"], **options))
    with mpmath.workdps(40):
        times = [log_own_time(*token) for token in tokens]
        late = float(times[ours] - min(times))
        # Where it is right, by how much: the search continues where two are close.
        ahead = float(min([*times[:ours], *times[ours + 1 :], mpmath.inf]) - times[ours])
    rounding = 1e-16 * max(1.0, float(np.max(np.abs(options["log_offset"]))))
    guide = -min(ahead, 1.0) if ahead > rounding else -1.0
    return ClaimMeasurement(late if late > 0 else guide, rounding)


@over("thm2-losers", **_TOKENS)
def _losers_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The defining integral up to the winner's time, in 60 digits.

    The tolerance includes the effect of rounding a long double on the weight of a token that
    nearly ties.
    """
    tokens, options = _tokens(point)
    ours = formula(point["delta"], **options)
    rounding = 1e-18 * (1 + np.max(np.abs(options["log_offset"])))
    errors = [-1.0]
    with mpmath.workdps(60):
        times = [log_own_time(*token) for token in tokens]
        first = min(times)
        for end, log_time, (delta, start, offset, normalizer) in zip(
            ours, times, tokens, strict=True
        ):
            if log_time == first or delta == 0:
                errors.append(float(end != (np.sign(delta) * np.inf if delta else start)))
                continue
            gap = float(-mpmath.expm1(first - log_time))
            if gap < 1e3 * rounding:
                continue
            log_way = mpmath.log(abs(delta)) + first - mpmath.log(normalizer)
            off = distance(delta, start, float(end), log_way + offset)
            errors.append(off / (1e-9 * max(abs(end), 1e-6) + rounding / gap))
    return measured(errors, 1.0)


_DELTAS = matrix(real(-3, 3, special=(0.0,)), integer(1, 6), integer(1, 4))


_RIVALS: dict[str, Domain] = {
    "delta": _DELTAS,
    "rival": choice("none", "tie", "near"),
    "gap": real(1e-10, 0.5, log=True),
}


def _with_rival(point: Point) -> Any:
    """Δ, with one more row that is exactly or nearly as long as the longest."""
    delta = point["delta"]
    if not delta.any():
        raise JomaError("no row moves")
    longest = delta[np.argmax(np.linalg.norm(delta, axis=1))]
    if point["rival"] == "none":
        return delta
    share = 1.0 if point["rival"] == "tie" else 1 - point["gap"]
    return np.vstack([delta, share * np.roll(longest, 1)])


def _long_rows(delta: Any) -> tuple[Any, Any]:
    length = np.linalg.norm(delta, axis=1)
    kept = length > 1e-6 * np.max(length)
    if not kept.any():
        raise JomaError("no row moves")
    return delta[kept], length[kept]


@over("talk-nodes", delta=_DELTAS, left=TIME_LEFT)
def _rows_at(formula: Formula, point: Point) -> ClaimMeasurement:
    delta, length = _long_rows(point["delta"])
    t = float(np.sqrt(np.pi / 2) / np.max(length) * (1 - point["left"]))

    def velocity(v: Any) -> Any:
        return np.exp(np.sum(v**2, axis=1, keepdims=True) / 2) * delta

    flow = solve(velocity, np.zeros_like(delta), t, method="LSODA", rtol=1e-10, atol=1e-12)
    return measured(relative(formula(delta, t), flow), 1e-6)


@over("linear-attention", delta=DELTA, z0=LOGITS, angle=real(1e-6, 20, log=True), **ANY_RATES)
def _against_exponential(formula: Formula, point: Point) -> ClaimMeasurement:
    """The matrix exponential of (v, z)."""
    delta, rates = point["delta"], {name: point[name] for name in ANY_RATES}
    t = point["angle"] * rates["tau"] / np.sqrt(rates["eta_w"] * rates["eta_z"])
    z0 = np.resize(point["z0"], delta.size)
    rate = np.array([[0, rates["eta_w"]], [rates["eta_z"], 0]])
    errors = [0.0]
    for *ours, step, start in zip(
        *formula(delta, t, logits=z0, **rates), delta * t / rates["tau"], z0, strict=True
    ):
        exact = linalg.expm(rate * step)[:, 1] * start
        size = np.where(exact == 0, 1e-300, np.abs(exact))
        errors.append(float(np.max(np.abs(np.array(ours) - exact) / size)))
    return measured(errors, 1e-10)


@over("talk-stable-rank", **_RIVALS)
def _late_limit_at(formula: Formula, point: Point) -> ClaimMeasurement:
    return checks.late_limit_of(formula, _with_rival(point))

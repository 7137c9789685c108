"""Eqn 3 and Theorem 2: one node with linear activation."""

from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
from scipy import integrate

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, measured, relative
from joma.experiments.claims.reference.eqn3 import distance, log_own_time
from joma.experiments.claims.reference.ode import follow, solve
from joma.experiments.claims.search import Choice, Integer, Matrix, Real, Vector
from joma.theory import as_printed as printed
from joma.theory import linear
from joma.theory.block import Block, Samples, simulate
from joma.theory.functions import exp_attention

RATES: dict[str, Any] = {"eta_w": 0.7, "eta_z": 1.3, "tau": 0.8}
DELTA = Vector(Real(-3, 3, special=(0.0,)), Integer(1, 8))
LOGITS = Vector(Real(-3, 3, special=(0.0,)), Integer(1, 8))
TIME_LEFT = Real(1e-3, 0.999, log=True)
"""Share of the winner's time that is left, where an ODE is followed up to it."""
RATE = Real(0.03, 30, log=True, special=(1.0,))
ANY_RATES: dict[str, Any] = {"eta_w": RATE, "eta_z": RATE, "tau": RATE}


def one_node(rng: Generator) -> tuple[Samples, Any]:
    """Return samples for one hidden node, and their saliency Δ = E[g x]."""
    x = rng.dirichlet(np.ones(5), size=30)
    g = rng.normal(size=30) + np.linspace(0, 3, 30)
    return Samples(x, gradient=g), g @ x / 30


def _moving(delta: Any) -> Any:
    """Return the tokens that move; refuse a point where none does."""
    delta = delta[np.abs(delta) > 1e-100]
    if delta.size == 0:
        raise JomaError("no token moves")
    return delta


def _spread(ratios: Any) -> Any:
    return np.ptp(ratios) / np.abs(np.mean(ratios))


# Eqn 3: the block against its closed form, from any start and with any normaliser.


def _by_unit_rates(delta: Any, t: Any, v0: Any, z0: Any, normalizer: float, **rates: float) -> Any:
    problem = linear.unit_rates(delta, **rates)
    start = np.asarray(v0) / problem.scale
    offset = z0 / rates["tau"] - start**2 / 2
    return problem.scale * linear.weights(
        problem.delta, t, initial=start, log_offset=offset, normalizer=normalizer
    )


@over(
    delta=DELTA,
    v0=Vector(Real(-2, 2, special=(0.0,)), Integer(1, 8)),
    z0=LOGITS,
    normalizer=RATE,
    left=TIME_LEFT,
    **ANY_RATES,
)
def _block_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Weights and logits of a block with exp attention, integrated together."""
    delta = _moving(point["delta"])
    v0, z0 = np.resize(point["v0"], delta.size), np.resize(point["z0"], delta.size)
    rates = {name: point[name] for name in ANY_RATES}
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
    return measured(np.abs(ours - v) / size, 1e-5)


@claim("eqn3", _by_unit_rates, _block_at)
def _block(formula: Formula, rng: Generator) -> ClaimMeasurement:
    samples, delta = one_node(rng)
    v0, z0 = 0.3 * rng.normal(size=5), 0.3 * rng.normal(size=5)
    t = np.linspace(0, 1.0, 5)
    block = Block(exp_attention(1.7), "linear", **RATES)
    path = simulate(block, samples, t, initial=(v0[:, None], z0))
    return measured(relative(formula(delta, t, v0, z0, 1.7, **RATES), path.v[..., 0]), 1e-9)


# Theorem 2: the ratio that all tokens share, on the block and on the reduced softmax equation.


@without("thm2")
def _ratio_from_any_start(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return _spread_on_block(formula, *one_node(rng), 0.2 * rng.normal(size=5))


def _spread_on_block(formula: Formula, samples: Samples, delta: Any, v0: Any) -> ClaimMeasurement:
    """The spread of the ratios over tokens, on the full block at 95% of the winner's time."""
    end = 0.95 * np.min(linear.blowup_time(delta, initial=v0))
    path = simulate(Block("exp", "linear"), samples, [0.0, end], initial=(v0[:, None], v0**2 / 2))
    return measured(_spread(formula(delta, path.v[1, :, 0])), 1e-8)


def _along(delta: Any, left: float, common: float = 0.0) -> Any:
    """V of v̇ = Δ exp((v² - common ‖v‖²)/2) from zero, with `left` of Theorem 2's time left."""
    t = np.sqrt(np.pi / 2) / np.max(np.abs(delta)) * (1 - left)

    def right_side(w: Any) -> Any:
        v = delta * w
        return np.exp((v**2 - common * np.sum(v**2)) / 2)

    return delta * follow(right_side, np.zeros(delta.size), float(t))


@over(delta=DELTA, left=TIME_LEFT)
def _ratio_at(formula: Formula, point: Point) -> ClaimMeasurement:
    delta = _moving(point["delta"])
    return measured(_spread(formula(delta, _along(delta, point["left"]))), 1e-7)


@claim("thm2", linear.conserved_ratio, _ratio_at, printed=printed.conserved_ratio)
def _ratio(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return _spread_on_block(formula, *one_node(rng), np.zeros(5))


@without("thm2-softmax")
def _softmax_block(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """A softmax block whose A and b̄ do stay equal: every sample is one token, so v = Δt."""
    samples = Samples(np.eye(5), gradient=np.array([0.5, 0.8, 1.0, 1.2, 1.5]))
    path = simulate(Block("softmax", "linear"), samples, [0.0, 5.0])
    return measured(_spread(formula(np.asarray(samples.gradient) / 5, path.v[1, :, 0])), 1e-8)


@over(delta=DELTA, left=TIME_LEFT, share=Real(0, 1))
def _softmax_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The reduced equation of softmax attention with b̄ frozen at equal values."""
    delta = _moving(point["delta"])
    v = _along(delta, point["left"], point["share"] / delta.size)
    return measured(_spread(formula(delta, v)), 1e-7)


@claim("thm2-softmax", linear.conserved_ratio, _softmax_at, printed=printed.conserved_ratio)
def _softmax(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The ratios on v̇ = Δ exp((v² - ‖v‖² b̄)/2), the reduced softmax flow with equal b̄."""
    delta = rng.uniform(0.3, 1.5, 5)
    flow = solve(
        lambda v: delta * np.exp((v**2 - np.sum(v**2) / 5) / 2), np.zeros(5), np.array([0.6])
    )
    return measured(_spread(formula(delta, flow[0])), 1e-8)


# The closed form and the time of divergence, from any start.


_TOKENS: dict[str, Any] = {
    "delta": DELTA,
    "start": Vector(Real(-40, 40, special=(0.0, 1.0)), Integer(1, 8)),
    "offset": Vector(Real(-900, 900, special=(0.0,)), Integer(1, 8)),
    "offset_from": Choice("zero", "start"),
    "normalizer": Vector(Real(1e-3, 1e3, log=True, special=(1.0,)), Integer(1, 8)),
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


@over(
    size=Real(1e-3, 1e3, log=True),
    sign=Choice(1, -1),
    start=Real(-147, 147, special=(0.0, -1.0, 37.8)),
    offset=Real(-30, 30, special=(0.0,)),
    offset_from=Choice("zero", "start"),
    normalizer=Real(1e-3, 1e3, log=True),
    left=Real(1e-8, 0.999, log=True),
    late=Choice(True, False),
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
    return ClaimMeasurement(off / max(abs(v), 1e-6), 1e-11)


@claim("thm2-closed-form", linear.weights, _closed_form_at)
def _near_blowup(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """How far the answer is from satisfying ∫ e^{-u²/2} du = Δ eᶜ t/A, in 40 digits."""
    errors = []
    with mpmath.workdps(40):
        for left in (0.5, 1e-4, 1e-8):
            for sign in (-1, 1):
                delta, start, offset = sign * rng.uniform(0.3, 2), rng.normal(), rng.normal()
                normalizer = rng.uniform(0.5, 3)
                options = {"initial": start, "log_offset": offset, "normalizer": normalizer}
                t = float(linear.blowup_time([delta], **options)[0] * (1 - left))
                v = mpmath.mpf(float(formula([delta], t, **options)[0]))
                steps = mpmath.linspace(mpmath.mpf(start), v, 12)
                covered = mpmath.quad(lambda u: mpmath.exp(-(u**2) / 2), steps)
                goal = mpmath.mpf(delta) * mpmath.mpf(t) / mpmath.mpf(normalizer)
                goal *= mpmath.exp(mpmath.mpf(offset))
                # One Newton step is the distance to the solution.
                errors.append(float(abs((goal - covered) * mpmath.exp(v**2 / 2) / v)))
    return measured(errors, 1e-9)


@without("thm2-blowup")
def _time_without_constants(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The time at which |v| = 6 where A grows as softmax's does, and where the gradient fades."""
    delta = np.array([rng.uniform(0.5, 1.5)])
    predicted = float(formula(delta)[0])
    grown = (
        lambda v: delta * np.exp(v**2 / 2) / ((1 + np.exp(v**2 / 2)) / 2),
        lambda v: delta * np.exp(v**2 / 2) * 2 / (1 + np.exp(v)),
    )
    # Neither has diverged at the predicted time; v at that time counts.
    ends = [float(solve(right_side, np.zeros(1), [predicted])[0, 0]) for right_side in grown]
    return ClaimMeasurement(max(0.0, 6.0 - max(ends)), 1e-8)


@over(**_TOKENS)
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
    return measured(errors, 1e-14)


@claim("thm2-blowup", linear.blowup_time, _time_at)
def _time(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """∫ dv/v̇ from v(0) to infinity, by quadrature."""
    delta, start, offset = rng.uniform(0.3, 2, 4), rng.normal(size=4), rng.normal(size=4)
    delta = delta * rng.choice([-1, 1], 4)
    ours = formula(delta, initial=start, log_offset=offset, normalizer=1.7)
    errors = []
    for d, v, c, time in zip(delta, start, offset, ours, strict=True):
        way: Any = integrate.quad(lambda u: np.exp(-(u**2) / 2), v * np.sign(d), np.inf)
        errors.append(abs(time / (1.7 * np.exp(-c) * way[0] / abs(d)) - 1))
    return measured(errors, 1e-8)


# The winner, and the limits of the others.


def _first_to_six(formula: Formula, cases: list[tuple[Any, Any]]) -> ClaimMeasurement:
    """The weight whose time to reach |v| = 6, an integral over v by Simpson's rule, is shortest."""
    wrong = 0
    for delta, start in cases:
        u = np.linspace(start * np.sign(delta), 6.0, 801)
        ways = integrate.simpson(np.exp(-(u**2) / 2), x=u, axis=0)
        wrong += int(formula(delta, initial=start)) != np.argmin(ways / np.abs(delta))
    return ClaimMeasurement(wrong / len(cases), 0.0)


@over(delta=DELTA, left=TIME_LEFT)
def _winner_from_zero_at(formula: Formula, point: Point) -> ClaimMeasurement:
    delta = _moving(point["delta"])
    ahead = np.abs(_along(delta, point["left"]))
    first, second = np.argmax(ahead), np.sort(ahead)[-2] if ahead.size > 1 else 0.0
    if second > ahead[first] * (1 - 1e-7):
        raise JomaError("two tokens are too close for the reference")
    wrong = formula(delta, initial=np.zeros(delta.size)) != first
    return ClaimMeasurement(1.0 if wrong else float(second / ahead[first] - 1), 0.0)


@over(**_TOKENS)
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


@claim("thm2-own-time", linear.winner, _winner_at)
@without("thm2-winner")
def _who_wins_from_any_start(formula: Formula, rng: Generator) -> ClaimMeasurement:
    cases = [(np.array([1.0, 0.8]), np.array([0.0, 0.6]))]
    cases += [(np.array([-1.0, 0.9]), np.array([0.5, 0.5]))]
    cases += [(rng.normal(size=4), 2 * rng.normal(size=4)) for _ in range(300)]
    return _first_to_six(formula, cases)


@claim("thm2-winner", lambda delta, *, initial: np.argmax(np.abs(delta)), _winner_from_zero_at)
def _who_wins(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return _first_to_six(formula, [(rng.normal(size=4), np.zeros(4)) for _ in range(20)])


@over(**_TOKENS)
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
            errors.append(off / (1e-11 * max(abs(end), 1e-6) + rounding / gap))
    return measured(errors, 1.0)


@claim("thm2-losers", linear.limit, _losers_at)
def _losers(formula: Formula, rng: Generator) -> ClaimMeasurement:
    delta = np.array([1.5, *rng.uniform(-1.2, 1.2, 4)])
    end = np.sqrt(np.pi / 2) / 1.5
    at_end = solve(lambda v: delta[1:] * np.exp(v**2 / 2), np.zeros(4), [end])[0]
    return measured(relative(formula(delta)[1:], at_end), 1e-8)


# Footnote 1: saliency.


def _discriminancy_times_frequency(g: Any, x: Any) -> Any:
    """E[g | token l] · P(l), with samples equally likely; 0 for a token that never occurs."""
    total = x.sum(axis=0)
    return (g @ (x / np.where(total > 0, total, 1.0))) * x.mean(axis=0)


@over(
    x=Matrix(Real(0, 1, special=(0.0,)), Integer(1, 6), Integer(1, 6)),
    g=Vector(Real(-3, 3, special=(0.0,)), Integer(1, 6)),
)
def _saliency_at(formula: Formula, point: Point) -> ClaimMeasurement:
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
    # An error of rounding is one of the sum of all terms.
    size = np.abs(g) @ x / len(x) + 1e-300
    return measured(np.abs(formula(g, x) - np.array(exact) / len(x)) / size, 1e-12)


@claim("footnote1", _discriminancy_times_frequency, _saliency_at)
def _saliency(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The velocity with which the weights of a block leave zero."""
    x = rng.dirichlet(np.ones(4), size=6)
    g = rng.normal(size=6) + 1
    path = simulate(Block("exp", "linear"), Samples(x, gradient=g), [0.0, 1e-5])
    return measured(relative(formula(g, x), path.v[1, :, 0] / 1e-5), 1e-8)

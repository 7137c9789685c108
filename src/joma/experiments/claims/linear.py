"""Linear activation: Theorem 2, the talk's remarks on many nodes and rank, linear attention."""

from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
from scipy import integrate

from joma.errors import JomaError
from joma.experiments.claims.claim import (
    ClaimMeasurement,
    Formula,
    Generator,
    claim,
    largest_error,
    measured,
    relative,
    smallest_error,
    without,
)
from joma.experiments.claims.reference.ode import solve
from joma.theory import as_printed as printed
from joma.theory import linear, spectra
from joma.theory.block import Block, Samples, simulate
from joma.theory.functions import exp_attention

RATES: dict[str, Any] = {"eta_w": 0.7, "eta_z": 1.3, "tau": 0.8}


def one_node(rng: Generator) -> tuple[Samples, Any]:
    """Return samples for one hidden node, and their saliency Δ = E[g x]."""
    x = rng.dirichlet(np.ones(5), size=30)
    g = rng.normal(size=30) + np.linspace(0, 3, 30)
    return Samples(x, gradient=g), g @ x / 30


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


@claim("eqn3", _by_unit_rates)
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


@claim("thm2", linear.conserved_ratio, printed=printed.conserved_ratio)
def _ratio(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return _spread_on_block(formula, *one_node(rng), np.zeros(5))


@without("thm2-softmax")
def _softmax_block(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """A softmax block whose A and b̄ do stay equal: every sample is one token, so v = Δt."""
    samples = Samples(np.eye(5), gradient=np.array([0.5, 0.8, 1.0, 1.2, 1.5]))
    path = simulate(Block("softmax", "linear"), samples, [0.0, 5.0])
    return measured(_spread(formula(np.asarray(samples.gradient) / 5, path.v[1, :, 0])), 1e-8)


@claim("thm2-softmax", linear.conserved_ratio, printed=printed.conserved_ratio)
def _softmax(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The ratios on v̇ = Δ exp((v² - ‖v‖² b̄)/2), the reduced softmax flow with equal b̄."""
    delta = rng.uniform(0.3, 1.5, 5)
    flow = solve(
        lambda v: delta * np.exp((v**2 - np.sum(v**2) / 5) / 2), np.zeros(5), np.array([0.6])
    )
    return measured(_spread(formula(delta, flow[0])), 1e-8)


# The closed form and the time of divergence, from any start.


@claim("thm2-closed-form", linear.weights)
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


@claim("thm2-blowup", linear.blowup_time)
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


@claim("thm2-own-time", linear.winner)
@without("thm2-winner")
def _who_wins_from_any_start(formula: Formula, rng: Generator) -> ClaimMeasurement:
    cases = [(np.array([1.0, 0.8]), np.array([0.0, 0.6]))]
    cases += [(np.array([-1.0, 0.9]), np.array([0.5, 0.5]))]
    cases += [(rng.normal(size=4), 2 * rng.normal(size=4)) for _ in range(300)]
    return _first_to_six(formula, cases)


@claim("thm2-winner", lambda delta, *, initial: np.argmax(np.abs(delta)))
def _who_wins(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return _first_to_six(formula, [(rng.normal(size=4), np.zeros(4)) for _ in range(20)])


@claim("thm2-losers", linear.limit)
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


@claim("footnote1", _discriminancy_times_frequency)
def _saliency(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The velocity with which the weights of a block leave zero."""
    x = rng.dirichlet(np.ones(4), size=6)
    g = rng.normal(size=6) + 1
    path = simulate(Block("exp", "linear"), Samples(x, gradient=g), [0.0, 1e-5])
    return measured(relative(formula(g, x), path.v[1, :, 0] / 1e-5), 1e-8)


def _velocity(v: Any, delta: Any) -> Any:
    return np.exp(np.sum(v**2, axis=1, keepdims=True) / 2) * delta


def _blowup(length: Any, left: Any) -> Any:
    """The time with a share `left` of that of the longest row left."""
    return np.sqrt(np.pi / 2) / np.max(length) * (1 - np.asarray(left))


def _unequal_rows(rng: Generator) -> Any:
    return rng.normal(size=(4, 3)) * np.array([1.4, 1.0, 0.7, 0.5])[:, None]


def _matrix_flow(delta: Any, left: list[float]) -> tuple[Any, Any]:
    """Times at which a share of the longest row's time is left, and V(t) of the talk's ODE."""
    t = _blowup(np.linalg.norm(delta, axis=1), left)
    return t, solve(lambda v: _velocity(v, delta), np.zeros_like(delta), t)


@claim("talk-matrix", _velocity)
def _matrix_block(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The talk's matrix equation against the full block with four nodes."""
    x = rng.dirichlet(np.ones(5), size=30)
    g = rng.normal(size=(30, 4)) + rng.normal(size=4)
    path = simulate(Block("exp", "linear"), Samples(x, gradient=g), np.linspace(0, 1.0, 4))
    delta = x.T @ g / 30
    flow = solve(lambda v: formula(v, delta), np.zeros((5, 4)), path.t)
    return measured(relative(flow, path.v), 1e-8)


@claim("talk-nodes", linear.weights_multi)
def _rows(formula: Formula, rng: Generator) -> ClaimMeasurement:
    delta = _unequal_rows(rng)
    t, flow = _matrix_flow(delta, [0.5, 0.1, 0.01])
    return measured(relative(formula(delta, t), flow), 1e-8)


@claim("talk-rank", lambda delta: False)
def _rank(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Whether the matrix ODE has lost rank at 1 - t/t* = 1e-4."""
    delta = _unequal_rows(rng)
    falls = bool(spectra.rank(_matrix_flow(delta, [1e-4])[1][0]) < spectra.rank(delta))
    return ClaimMeasurement(float(formula(delta) != falls), 0.0)


def _at_the_end(delta: Any, length_of_winner: float) -> Any:
    """V where the longest rows have grown to a given length and the others are at their limits.

    Rows tie if their lengths do as fractions; rows that nearly tie are refused.
    """
    squares = [sum(Fraction(float(a)) ** 2 for a in row) for row in delta]
    largest = max(squares)
    with mpmath.workdps(30):
        sizes = []
        for square in squares:
            if square == largest:
                sizes.append(length_of_winner)
                continue
            share = mpmath.sqrt(mpmath.mpf(square.numerator) / square.denominator)
            share /= mpmath.sqrt(mpmath.mpf(largest.numerator) / largest.denominator)
            if share > 1 - mpmath.mpf(10) ** -13:
                raise JomaError("two rows are too close for the reference")
            sizes.append(float(mpmath.sqrt(2) * mpmath.erfinv(share)))
    length = np.linalg.norm(delta, axis=1)
    return np.array(sizes)[:, None] * delta / np.where(length > 0, length, 1)[:, None]


def late_limit_of(formula: Formula, delta: Any) -> ClaimMeasurement:
    """Compare a limit with the stable rank late in a training."""
    return measured(abs(formula(delta) - spectra.stable_rank(_at_the_end(delta, 1e7))), 1e-9)


@claim(
    "talk-stable-rank",
    linear.stable_rank_limit,
)
def _late_limit(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The stable rank with winners at 1e7 and the others at their limits, also with ties."""
    cases = [
        rng.normal(size=(4, 3)),
        np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.0]]),
        np.array([[1.0, 0.0], [0.0, 0.999]]),
        np.array([[3.0, 4.0], [5.0, 0.0], [1.0, 1.0]]),
        np.array([[2.0, 1.0], [-2.0, -1.0], [0.0, 1.0]]),
    ]
    return largest_error(late_limit_of(formula, delta) for delta in cases)


def _stable_ranks(delta: Any, t: Any) -> tuple[Any, Any]:
    return (
        spectra.stable_rank(linear.weights_multi(delta, t)),
        spectra.stable_rank(linear.velocity_multi(delta, t)),
    )


_SLOW = np.array([[1.0, 0.0], [0.0, 0.95], [0.0, 0.95]])
"""Two weaker rows that together outweigh the winner until late."""
_TIED = np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.0]])
"""Two longest rows: the stable rank of V rises to 2, and that of V̇ is the higher."""


@without("talk-gradient-rank")
def _ranks_early(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Before it is late, and with two longest rows."""
    return smallest_error([_fall(formula, _SLOW, [0.1, 0.01]), _fall(formula, _TIED, [1e-3, 1e-6])])


def _fall(formula: Formula, delta: Any, left: list[float]) -> ClaimMeasurement:
    """Stable ranks against the ODE's; 1 is added unless V's falls and V̇'s is the lower."""
    t, flow = _matrix_flow(delta, [0.1, 1e-2, 1e-3])
    rates = np.exp(np.sum(flow**2, axis=2, keepdims=True) / 2) * delta
    weights, gradients = formula(delta, t)
    error = max(
        relative(weights, spectra.stable_rank(flow)),
        relative(gradients, spectra.stable_rank(rates)),
    )
    weights, gradients = formula(delta, _blowup(np.linalg.norm(delta, axis=1), left))
    falls = np.all(np.diff(weights) < 0) and np.all(gradients < weights)
    return ClaimMeasurement(error + float(not falls), 1e-6)


@claim("talk-gradient-rank", _stable_ranks)
def _ranks_late(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return largest_error(_fall(formula, d, [1e-3, 1e-6]) for d in (_unequal_rows(rng), _SLOW))


@claim("linear-attention", linear.linear_attention)
def _against_block(formula: Formula, rng: Generator) -> ClaimMeasurement:
    samples, delta = one_node(rng)
    logits = rng.normal(size=5)
    t = np.linspace(0, 2, 4)
    start = (np.zeros((5, 1)), logits)
    path = simulate(Block("linear", "linear", **RATES), samples, t, initial=start)
    v, z = formula(delta, t, logits=logits, **RATES)
    return measured([relative(v, path.v[..., 0]), relative(z, path.z)], 1e-9)

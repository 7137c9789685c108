"""Theorem 2, the talk's remarks on many nodes and rank, and linear attention."""

from typing import Any

import mpmath
import numpy as np
from scipy import integrate

from joma.experiments.claims import _linear_points as points
from joma.experiments.claims import _many_nodes as measures
from joma.experiments.claims import _many_nodes_points as many_nodes
from joma.experiments.claims._many_nodes import relative, solve
from joma.experiments.claims.claim import Claim, Formula, Measurement
from joma.theory import linear
from joma.theory.as_printed import linear as printed
from joma.theory.block import Block, Samples, simulate
from joma.theory.functions import exp_attention

_RATES: dict[str, Any] = {"eta_w": 0.7, "eta_z": 1.3, "tau": 0.8}


def _one_node(rng: np.random.Generator) -> tuple[Samples, Any]:
    """Samples for one hidden node, and their saliency Δ = E[g x]."""
    x = rng.dirichlet(np.ones(5), size=30)
    g = rng.normal(size=30) + np.linspace(0, 3, 30)
    return Samples(x, gradient=g), g @ x / 30


def _by_unit_rates(delta: Any, t: Any, v0: Any, z0: Any, normalizer: float, **rates: float) -> Any:
    problem = linear.unit_rates(delta, **rates)
    start = np.asarray(v0) / problem.scale
    offset = z0 / rates["tau"] - start**2 / 2
    return problem.scale * linear.weights(
        problem.delta, t, initial=start, log_offset=offset, normalizer=normalizer
    )


def _modified_mlp(formula: Formula, rng: np.random.Generator) -> Measurement:
    """From any start and with any normaliser, so that c and A count."""
    samples, delta = _one_node(rng)
    v0, z0 = 0.3 * rng.normal(size=5), 0.3 * rng.normal(size=5)
    t = np.linspace(0, 1.0, 5)
    block = Block(exp_attention(1.7), "linear", **_RATES)
    path = simulate(block, samples, t, initial=(v0[:, None], z0))
    ours = formula(delta, t, v0, z0, 1.7, **_RATES)
    return Measurement(relative(ours, path.v[..., 0]), 1e-9)


def _ratio(formula: Formula, rng: np.random.Generator) -> Measurement:
    samples, delta = _one_node(rng)
    return _spread(formula, samples, delta, np.zeros(5))


def _ratio_from_elsewhere(formula: Formula, rng: np.random.Generator) -> Measurement:
    samples, delta = _one_node(rng)
    return _spread(formula, samples, delta, 0.2 * rng.normal(size=5))


def _spread(formula: Formula, samples: Samples, delta: Any, v0: Any) -> Measurement:
    """Of the ratios over tokens, on the full block at 95% of the winner's time."""
    end = 0.95 * np.min(linear.blowup_time(delta, initial=v0))
    path = simulate(Block("exp", "linear"), samples, [0.0, end], initial=(v0[:, None], v0**2 / 2))
    ratios = formula(delta, path.v[1, :, 0])
    return Measurement(float(np.ptp(ratios) / np.abs(np.mean(ratios))), 1e-8)


def _near_blowup(formula: Formula, rng: np.random.Generator) -> Measurement:
    """How far the answer is from satisfying ∫ e^{-u²/2} du = Δ eᶜ t/A, in 40 digits."""
    worst = 0.0
    with mpmath.workdps(40):
        for left in (0.5, 1e-4, 1e-8):
            for sign in (-1, 1):
                delta, start, offset = sign * rng.uniform(0.3, 2), rng.normal(), rng.normal()
                given: dict[str, Any] = {
                    "initial": start,
                    "log_offset": offset,
                    "normalizer": rng.uniform(0.5, 3),
                }
                t = float(linear.blowup_time([delta], **given)[0] * (1 - left))
                v = mpmath.mpf(float(formula([delta], t, **given)[0]))
                steps = mpmath.linspace(mpmath.mpf(start), v, 12)
                covered = mpmath.quad(lambda u: mpmath.exp(-(u**2) / 2), steps)
                goal = mpmath.mpf(delta) * mpmath.mpf(t) / mpmath.mpf(given["normalizer"])
                goal *= mpmath.exp(mpmath.mpf(offset))
                # One Newton step tells the distance to the solution.
                distance = (goal - covered) * mpmath.exp(v**2 / 2)
                worst = max(worst, float(abs(distance / v)))
    return Measurement(worst, 1e-9)


def _time(formula: Formula, rng: np.random.Generator) -> Measurement:
    """∫ dv/v̇ from v(0) to infinity, by quadrature."""
    delta, start, offset = rng.uniform(0.3, 2, 4), rng.normal(size=4), rng.normal(size=4)
    delta = delta * rng.choice([-1, 1], 4)
    worst = 0.0
    ours = formula(delta, initial=start, log_offset=offset, normalizer=1.7)
    for d, v, c, time in zip(delta, start, offset, ours, strict=True):
        way: Any = integrate.quad(lambda u: np.exp(-(u**2) / 2), v * np.sign(d), np.inf)
        worst = max(worst, abs(time / (1.7 * np.exp(-c) * way[0] / abs(d)) - 1))
    return Measurement(float(worst), 1e-8)


def _time_elsewhere(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The time at which |v| = 6 where A grows as softmax's does, and where the gradient fades."""
    delta = np.array([rng.uniform(0.5, 1.5)])
    predicted = float(formula(delta)[0])
    grown = (
        lambda v: delta * np.exp(v**2 / 2) / ((1 + np.exp(v**2 / 2)) / 2),
        lambda v: delta * np.exp(v**2 / 2) * 2 / (1 + np.exp(v)),
    )
    # Neither has diverged when the formula says so; v at that time counts.
    ends = [float(solve(right_side, [predicted], np.zeros(1))[0, 0]) for right_side in grown]
    return Measurement(max(0.0, 6.0 - max(ends)), 1e-8)


def _who_wins(formula: Formula, rng: np.random.Generator) -> Measurement:
    return _first_to_six(formula, [(rng.normal(size=4), np.zeros(4)) for _ in range(20)])


def _who_wins_from_elsewhere(formula: Formula, rng: np.random.Generator) -> Measurement:
    cases = [(np.array([1.0, 0.8]), np.array([0.0, 0.6]))]
    cases += [(np.array([-1.0, 0.9]), np.array([0.5, 0.5]))]
    cases += [(rng.normal(size=4), 2 * rng.normal(size=4)) for _ in range(300)]
    return _first_to_six(formula, cases)


def _first_to_six(formula: Formula, cases: list[tuple[Any, Any]]) -> Measurement:
    """The weight whose time to reach |v| = 6, an integral over v by Simpson's rule, is shortest."""
    wrong = 0
    for delta, start in cases:
        u = np.linspace(start * np.sign(delta), 6.0, 801)
        ways = integrate.simpson(np.exp(-(u**2) / 2), x=u, axis=0)
        wrong += int(formula(delta, initial=start)) != np.argmin(ways / np.abs(delta))
    return Measurement(wrong / len(cases), 0.0)


def _losers(formula: Formula, rng: np.random.Generator) -> Measurement:
    delta = np.array([1.5, *rng.uniform(-1.2, 1.2, 4)])
    predicted = formula(delta)[1:]
    end = np.sqrt(np.pi / 2) / 1.5
    at_end = solve(lambda v: delta[1:] * np.exp(v**2 / 2), [end], np.zeros(4))[0]
    return Measurement(relative(predicted, at_end), 1e-8)


def _linear_attention(formula: Formula, rng: np.random.Generator) -> Measurement:
    samples, delta = _one_node(rng)
    logits = rng.normal(size=5)
    t = np.linspace(0, 2, 4)
    start = (np.zeros((5, 1)), logits)
    path = simulate(Block("linear", "linear", **_RATES), samples, t, initial=start)
    v, z = formula(delta, t, logits=logits, **_RATES)
    return Measurement(max(relative(v, path.v[..., 0]), relative(z, path.z)), 1e-9)


def _softmax_remark(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The invariant on v̇ = Δ exp((v² - ‖v‖² b̄)/2), the reduced softmax flow with equal b̄."""
    delta = rng.uniform(0.3, 1.5, 5)
    flow = solve(
        lambda v: delta * np.exp((v**2 - np.sum(v**2) / 5) / 2), np.array([0.6]), np.zeros(5)
    )
    ratios = formula(delta, flow[0])
    return Measurement(float(np.ptp(ratios) / np.mean(ratios)), 1e-8)


def _softmax_in_full(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The same on a softmax block whose A and b̄ do stay equal: one token a sample, so v = Δt."""
    del rng
    samples = Samples(np.eye(5), gradient=np.array([0.5, 0.8, 1.0, 1.2, 1.5]))
    path = simulate(Block("softmax", "linear"), samples, [0.0, 5.0])
    ratios = formula(np.asarray(samples.gradient) / 5, path.v[1, :, 0])
    return Measurement(float(np.ptp(ratios) / np.mean(ratios)), 1e-8)


def _discriminancy_times_frequency(g: Any, x: Any) -> Any:
    """E[g | token l] · P(l), with samples equally likely; 0 for a token that never occurs."""
    frequency = x.mean(axis=0)
    total = x.sum(axis=0)
    posterior = x / np.where(total > 0, total, 1.0)
    return (g @ posterior) * frequency


def _saliency(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The velocity with which the weights of a block leave zero."""
    x = rng.dirichlet(np.ones(4), size=6)
    g = rng.normal(size=6) + 1
    path = simulate(Block("exp", "linear"), Samples(x, gradient=g), [0.0, 1e-5])
    return Measurement(relative(formula(g, x), path.v[1, :, 0] / 1e-5), 1e-8)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="eqn3",
        title="attention integrated out: v̇ = Δ exp(v²/2 + c)/A is the block",
        source="JoMA preprint, Eqns 3, 19-20",
        method="closed form against the full block from any start, η_W = .7, η_Z = 1.3, τ = .8",
        derived=_by_unit_rates,
        measure=_modified_mlp,
        search=points.EQN3,
    ),
    Claim(
        id="thm2",
        title="erf(v_l/√2)/Δ_l is the same for all tokens",
        source="JoMA preprint, Theorem 2 (Eqn 4)",
        method="spread over tokens on the full block at 95% of the winner's time",
        derived=linear.conserved_ratio,
        printed=printed.conserved_ratio,
        measure=_ratio,
        condition="v(0) = 0",
        without=_ratio_from_elsewhere,
        search=points.THM2,
    ),
    Claim(
        id="thm2-closed-form",
        title="v = √2 erfinv(erf(v₀/√2) + √(2/π) Δ eᶜ t/A)",
        source="new",
        method="defining integral in 40 digits at the same float t, down to 1 - t/t* = 1e-8",
        derived=linear.weights,
        measure=_near_blowup,
        search=points.CLOSED_FORM,
    ),
    Claim(
        id="thm2-blowup",
        title="each token alone diverges at a finite time, from zero at A√(π/2)/|Δ|",
        source="new",
        method="quadrature of dv/v̇ to infinity",
        derived=linear.blowup_time,
        measure=_time,
        condition="A constant, and Δ constant (Assumption 1)",
        without=_time_elsewhere,
        search=points.BLOWUP,
    ),
    Claim(
        id="thm2-winner",
        title="the winner is argmax |Δ|",
        source="JoMA preprint, Theorem 2 (remark)",
        method="time to reach 6 by quadrature, 20 cases",
        derived=lambda delta, *, initial: np.argmax(np.abs(delta)),
        measure=_who_wins,
        condition="v(0) = 0, c and A equal for all tokens",
        without=_who_wins_from_elsewhere,
        search=points.WINNER,
    ),
    Claim(
        id="thm2-own-time",
        title="from any start the winner has the smallest A e^{-c} erfc(±v₀/√2)/|Δ|",
        source="new",
        method="time to reach 6 by quadrature, 302 cases that do not start at zero",
        derived=linear.winner,
        measure=_who_wins_from_elsewhere,
        search=points.OWN_TIME,
    ),
    Claim(
        id="thm2-losers",
        title="as t → t* the others converge, from zero to √2 erfinv(Δ_l/max|Δ|)",
        source="JoMA preprint, Theorem 2 (remark)",
        method="ODE up to the winner's time",
        derived=linear.limit,
        measure=_losers,
        search=points.LOSERS,
    ),
    Claim(
        id="thm2-softmax",
        title="the reduced equation of softmax attention, b̄ frozen and equal, obeys Theorem 2",
        source="JoMA preprint, Theorem 2 (remark)",
        method="spread over tokens on the reduced flow; without: a block of one-token samples",
        derived=linear.conserved_ratio,
        printed=printed.conserved_ratio,
        measure=_softmax_remark,
        condition="the reduced equation; a block that keeps A[i] and b̄ equal has v = Δt",
        without=_softmax_in_full,
        search=points.SOFTMAX,
    ),
    Claim(
        id="footnote1",
        title="saliency Δ = discriminancy E[g | l] × frequency P(l)",
        source="JoMA preprint, Section 3.1, footnote 1",
        method="the velocity with which the weights of a block leave zero",
        derived=_discriminancy_times_frequency,
        measure=_saliency,
        search=points.FOOTNOTE1,
    ),
    Claim(
        id="talk-matrix",
        title="K > 1: V̇ = diag(exp((V∘V)1/2)) Δ/A",
        source="talk, more nodes",
        method="against the full block with four nodes",
        derived=lambda v, delta: np.exp(np.sum(v**2, axis=1, keepdims=True) / 2) * delta,
        measure=measures.block_of_many,
        search=many_nodes.MATRIX,
    ),
    Claim(
        id="talk-nodes",
        title="K > 1: each row of V keeps its direction and follows Theorem 2 at ‖Δ_l‖",
        source="new",
        method="closed form against the matrix ODE",
        derived=linear.weights_multi,
        measure=measures.rows_keep_direction,
        search=many_nodes.NODES,
    ),
    Claim(
        id="talk-rank",
        title="V does not lose rank",
        source="new",
        method="singular values of the matrix ODE at 1 - t/t* = 1e-4",
        derived=lambda delta: False,
        measure=measures.rank_falls,
        search=many_nodes.RANK,
    ),
    Claim(
        id="talk-stable-rank",
        title="as t → t* the stable ranks of V and V̇ tend to that of the longest rows of Δ",
        source="new",
        method="winners at 1e7, the others at their limits in 30 digits; ties too",
        derived=linear.stable_rank_limit,
        measure=measures.late_limit,
        search=many_nodes.RANK_LIMIT,
    ),
    Claim(
        id="talk-gradient-rank",
        title="near the end the stable rank of V falls, and that of V̇ is lower still",
        source="talk, more nodes",
        method="stable ranks along the matrix ODE and up to 1 - t/t* = 1e-6",
        derived=measures.stable_ranks,
        measure=measures.ranks_late,
        condition="late, one row of Δ longer than all others, and rank Δ ≥ 2",
        without=measures.ranks_early,
        search=many_nodes.GRADIENT_RANK,
    ),
    Claim(
        id="linear-attention",
        title="linear attention: v = z₀ sinh(Δt), z = z₀ cosh(Δt)",
        source="new",
        method="closed form against the full block, η_W = .7, η_Z = 1.3, τ = .8",
        derived=linear.linear_attention,
        measure=_linear_attention,
        search=points.LINEAR_ATTENTION,
    ),
)

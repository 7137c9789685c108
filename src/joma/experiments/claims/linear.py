"""Theorem 2, the talk's remarks on many nodes and rank, and linear attention."""

from typing import Any

import mpmath
import numpy as np
from scipy import integrate

from joma.experiments.claims._claim import Claim, Formula, Measurement, monte_carlo
from joma.theory import linear, spectra
from joma.theory.as_printed import linear as printed
from joma.theory.block import Block, Samples, simulate
from joma.theory.functions import exp_attention

_RATES: dict[str, Any] = {"eta_w": 0.7, "eta_z": 1.3, "tau": 0.8}


def _one_node(rng: np.random.Generator) -> tuple[Samples, Any]:
    """Samples for one hidden node, and their saliency Δ = E[g x]."""
    x = rng.dirichlet(np.ones(5), size=30)
    g = rng.normal(size=30) + np.linspace(0, 3, 30)
    return Samples(x, gradient=g), g @ x / 30


def _solve(right_side: Any, t: Any, start: Any) -> Any:
    """A reference solution of an ODE, shape (T, …)."""
    solution: Any = integrate.solve_ivp(
        lambda _, y: right_side(y.reshape(start.shape)).ravel(),
        (0.0, t[-1]),
        start.ravel(),
        "DOP853",
        t_eval=np.asarray(t),
        rtol=1e-12,
        atol=1e-13,
    )
    return solution.y.T.reshape(-1, *start.shape)


def _relative(ours: Any, reference: Any) -> float:
    return float(np.max(np.abs(ours - reference)) / np.max(np.abs(reference)))


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
    return Measurement(_relative(ours, path.v[..., 0]), 1e-9)


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


def _who_wins(formula: Formula, rng: np.random.Generator) -> Measurement:
    return _first_to_six(formula, [(rng.normal(size=4), np.zeros(4)) for _ in range(20)])


def _who_wins_from_elsewhere(formula: Formula, rng: np.random.Generator) -> Measurement:
    cases = [(np.array([1.0, 0.8]), np.array([0.0, 0.6]))]
    cases += [(np.array([-1.0, 0.9]), np.array([0.5, 0.5]))]
    cases += [(rng.normal(size=4), rng.normal(size=4)) for _ in range(20)]
    return _first_to_six(formula, cases)


def _first_to_six(formula: Formula, cases: list[tuple[Any, Any]]) -> Measurement:
    """The weight whose time to reach |v| = 6, an integral over v, is the shortest."""
    wrong = 0
    for delta, start in cases:
        ways: list[Any] = [
            integrate.quad(lambda u: np.exp(-(u**2) / 2), v * np.sign(d), 6.0)
            for d, v in zip(delta, start, strict=True)
        ]
        first = np.argmin([way[0] for way in ways] / np.abs(delta))
        wrong += int(formula(delta, initial=start)) != first
    return Measurement(wrong / len(cases), 0.0)


def _losers(formula: Formula, rng: np.random.Generator) -> Measurement:
    delta = np.array([1.5, *rng.uniform(-1.2, 1.2, 4)])
    predicted = formula(delta)[1:]
    end = np.sqrt(np.pi / 2) / 1.5
    at_end = _solve(lambda v: delta[1:] * np.exp(v**2 / 2), [end], np.zeros(4))[0]
    return Measurement(_relative(predicted, at_end), 1e-8)


def _matrix_flow(rng: np.random.Generator, left: list[float]) -> tuple[Any, Any, Any]:
    """Δ, times with 1 - t/t* as given, and V(t) of the talk's matrix ODE."""
    delta = rng.normal(size=(4, 3)) * np.array([1.4, 1.0, 0.7, 0.5])[:, None]
    blowup = np.sqrt(np.pi / 2) / np.max(np.linalg.norm(delta, axis=1))
    t = blowup * (1 - np.array(left))
    flow = _solve(
        lambda v: np.exp(np.sum(v**2, axis=1, keepdims=True) / 2) * delta, t, np.zeros((4, 3))
    )
    return delta, t, flow


def _many_nodes(formula: Formula, rng: np.random.Generator) -> Measurement:
    delta, t, flow = _matrix_flow(rng, [0.5, 0.1, 0.01])
    return Measurement(_relative(formula(delta, t), flow), 1e-8)


def _block_of_many(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The talk's matrix equation against the full block with four nodes."""
    x = rng.dirichlet(np.ones(5), size=30)
    g = rng.normal(size=(30, 4)) + rng.normal(size=4)
    path = simulate(Block("exp", "linear"), Samples(x, gradient=g), np.linspace(0, 1.0, 4))
    delta = x.T @ g / 30
    flow = _solve(lambda v: formula(v, delta), path.t, np.zeros((5, 4)))
    return Measurement(_relative(flow, path.v), 1e-8)


def _rank_falls(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Whether the matrix ODE has lost rank at 1 - t/t* = 1e-4."""
    delta, _, flow = _matrix_flow(rng, [1e-4])
    falls = bool(spectra.rank(flow[0]) < spectra.rank(delta))
    return Measurement(float(formula() != falls), 0.0)


def _stable_ranks(delta: Any, t: Any) -> tuple[Any, Any]:
    return (
        spectra.stable_rank(linear.weights_multi(delta, t)),
        spectra.stable_rank(linear.velocity_multi(delta, t)),
    )


_SLOW = np.array([[1.0, 0.0], [0.0, 0.95], [0.0, 0.95]])
"""Two weaker rows that together outweigh the winner until late."""


def _ranks_late(formula: Formula, rng: np.random.Generator) -> Measurement:
    random = rng.normal(size=(4, 3)) * np.array([1.4, 1.0, 0.7, 0.5])[:, None]
    return max((_fall(formula, d, [1e-3, 1e-6]) for d in (random, _SLOW)), key=lambda m: m.error)


def _ranks_early(formula: Formula, rng: np.random.Generator) -> Measurement:
    del rng
    return _fall(formula, _SLOW, [0.1, 0.01])


def _fall(formula: Formula, delta: Any, left: list[float]) -> Measurement:
    """Stable ranks against the ODE's; 1 is added unless V's falls and V̇'s is the lower."""
    blowup = np.sqrt(np.pi / 2) / np.max(np.linalg.norm(delta, axis=1))
    t = blowup * (1 - np.array([0.1, 1e-2, 1e-3]))
    flow = _solve(
        lambda v: np.exp(np.sum(v**2, axis=1, keepdims=True) / 2) * delta, t, np.zeros_like(delta)
    )
    rates = np.exp(np.sum(flow**2, axis=2, keepdims=True) / 2) * delta
    weights, gradients = formula(delta, t)
    error = max(
        _relative(weights, spectra.stable_rank(flow)),
        _relative(gradients, spectra.stable_rank(rates)),
    )
    weights, gradients = formula(delta, blowup * (1 - np.array(left)))
    falls = np.all(np.diff(weights) < 0) and np.all(gradients < weights)
    return Measurement(error + float(not falls), 1e-6)


def _linear_attention(formula: Formula, rng: np.random.Generator) -> Measurement:
    samples, delta = _one_node(rng)
    logits = rng.normal(size=5)
    t = np.linspace(0, 2, 4)
    start = (np.zeros((5, 1)), logits)
    path = simulate(Block("linear", "linear", **_RATES), samples, t, initial=start)
    v, z = formula(delta, t, logits=logits, **_RATES)
    return Measurement(max(_relative(v, path.v[..., 0]), _relative(z, path.z)), 1e-9)


def _softmax_remark(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The invariant on v̇ = Δ exp((v² - ‖v‖² b̄)/2), the reduced softmax flow with equal b̄."""
    delta = rng.uniform(0.3, 1.5, 5)
    flow = _solve(
        lambda v: delta * np.exp((v**2 - np.sum(v**2) / 5) / 2), np.array([0.6]), np.zeros(5)
    )
    ratios = formula(delta, flow[0])
    return Measurement(float(np.ptp(ratios) / np.mean(ratios)), 1e-8)


def _softmax_in_full(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The same on a full softmax block, where b̄ is equal at the start and then moves."""
    g = rng.uniform(0.5, 1.5, size=5)
    samples = Samples(0.2 * np.eye(5) + 0.16, gradient=g)
    path = simulate(Block("softmax", "linear"), samples, [0.0, 2.0])
    ratios = formula(np.asarray(samples.x).T @ g / 5, path.v[1, :, 0])
    return Measurement(float(np.ptp(ratios) / np.mean(ratios)), 1e-8)


def _discriminancy_times_frequency(g: Any, x: Any) -> Any:
    """E[g | token l] · P(l), with samples equally likely."""
    frequency = x.mean(axis=0)
    posterior = x / x.sum(axis=0)
    return (g @ posterior) * frequency


def _saliency(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Draws a sample, then one of its tokens, and averages g over the draws of each token."""
    x = rng.dirichlet(np.ones(4), size=6)
    g = rng.normal(size=6) + 1
    draws = 400_000
    sample = rng.integers(0, 6, size=draws)
    token = (rng.random((draws, 1)) > np.cumsum(x, axis=1)[sample]).sum(axis=1)
    values = g[sample][:, None] * (token[:, None] == np.arange(4))
    return monte_carlo(
        values.mean(axis=0) - formula(g, x), values.std(axis=0, ddof=1) / np.sqrt(draws)
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="eqn3",
        title="attention integrated out: v̇ = Δ exp(v²/2 + c)/A is the block",
        source="JoMA preprint, Eqns 3, 19-20",
        method="closed form against the full block from any start, η_W = .7, η_Z = 1.3, τ = .8",
        derived=_by_unit_rates,
        measure=_modified_mlp,
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
    ),
    Claim(
        id="thm2-closed-form",
        title="v = √2 erfinv(erf(v₀/√2) + √(2/π) Δ eᶜ t/A)",
        source="new",
        method="defining integral in 40 digits at the same float t, down to 1 - t/t* = 1e-8",
        derived=linear.weights,
        measure=_near_blowup,
    ),
    Claim(
        id="thm2-blowup",
        title="each token diverges at a finite time of its own, A√(π/2)/|Δ| from zero",
        source="new",
        method="quadrature of dv/v̇ to infinity",
        derived=linear.blowup_time,
        measure=_time,
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
    ),
    Claim(
        id="thm2-own-time",
        title="from any start the winner is the token with the smallest own time",
        source="new",
        method="time to reach 6 by quadrature, 22 cases that do not start at zero",
        derived=linear.winner,
        measure=_who_wins_from_elsewhere,
    ),
    Claim(
        id="thm2-losers",
        title="the others are cut off at √2 erfinv(Δ_l/max|Δ|) when the winner leaves at t*",
        source="new",
        method="ODE up to the winner's time",
        derived=linear.limit,
        measure=_losers,
    ),
    Claim(
        id="thm2-softmax",
        title="Theorem 2 carries over to softmax attention",
        source="JoMA preprint, Theorem 2 (remark)",
        method="spread over tokens on the reduced softmax flow",
        derived=linear.conserved_ratio,
        printed=printed.conserved_ratio,
        measure=_softmax_remark,
        condition="the same A[i] for all samples and b̄ equal for all tokens, at all times",
        without=_softmax_in_full,
    ),
    Claim(
        id="footnote1",
        title="saliency Δ = discriminancy E[g | l] × frequency P(l)",
        source="JoMA preprint, Section 3.1, footnote 1",
        method="Monte Carlo over drawn tokens",
        derived=_discriminancy_times_frequency,
        measure=_saliency,
    ),
    Claim(
        id="talk-matrix",
        title="K > 1: V̇ = diag(exp((V∘V)1/2)) Δ/A",
        source="talk, more nodes",
        method="against the full block with four nodes",
        derived=lambda v, delta: np.exp(np.sum(v**2, axis=1, keepdims=True) / 2) * delta,
        measure=_block_of_many,
    ),
    Claim(
        id="talk-nodes",
        title="K > 1: each row of V keeps its direction and follows Theorem 2 at ‖Δ_l‖",
        source="new",
        method="closed form against the matrix ODE",
        derived=linear.weights_multi,
        measure=_many_nodes,
    ),
    Claim(
        id="talk-rank",
        title="V does not lose rank",
        source="new",
        method="singular values of the matrix ODE at 1 - t/t* = 1e-4",
        derived=lambda: False,
        measure=_rank_falls,
    ),
    Claim(
        id="talk-gradient-rank",
        title="near the end the stable rank of V falls, and that of V̇ is lower still",
        source="talk, more nodes",
        method="stable ranks along the matrix ODE and up to 1 - t/t* = 1e-6",
        derived=_stable_ranks,
        measure=_ranks_late,
        condition="late: before, weaker rows may together outweigh the winner",
        without=_ranks_early,
    ),
    Claim(
        id="linear-attention",
        title="linear attention: v = z₀ sinh(Δt), z = z₀ cosh(Δt)",
        source="new",
        method="closed form against the full block, η_W = .7, η_Z = 1.3, τ = .8",
        derived=linear.linear_attention,
        measure=_linear_attention,
    ),
)

"""Eqn 6, nonlinear activation with attention, and what follows: entropy and rank that bounce."""

from typing import Any

import mpmath
import numpy as np
from scipy import integrate
from scipy.special import erf

from joma.experiments.claims._claim import Claim, Formula, Measure, Measurement
from joma.theory import nonlinear, spectra


def flow(mu: Any, t: Any, rtol: float = 1e-10) -> Any:
    """v(t) of Eqn 6 by implicit integration, shape (T, …)."""
    mu = np.asarray(mu, dtype=float)

    def right_side(_: float, v: Any) -> Any:
        v = v.reshape(mu.shape)
        gate = np.exp(np.sum(v**2, axis=-1, keepdims=mu.ndim > 1) / 2 if mu.ndim > 1 else v**2 / 2)
        return ((mu - v) * gate).ravel()

    solution: Any = integrate.solve_ivp(
        right_side, (0, t[-1]), np.zeros(mu.size), "Radau", t_eval=t, rtol=rtol, atol=1e-2 * rtol
    )
    return solution.y.T.reshape(-1, *mu.shape)


def time_at(log_residual: float, mu: float) -> Any:
    """F at a given ln δ, by quadrature in 30 digits: ∫ exp(-μ²(1-e^{-y})²/2) dy."""
    half = mpmath.mpf(mu) ** 2 / 2
    goal = -mpmath.mpf(log_residual)
    bend = min(goal, mpmath.mpf(40))
    points = mpmath.linspace(0, bend, 12)
    smooth = mpmath.quad(lambda y: mpmath.exp(-half * (1 - mpmath.exp(-y)) ** 2), points)
    return smooth + (goal - bend) * mpmath.exp(-half)


def _weights(formula: Formula, rng: np.random.Generator) -> Measurement:
    """At the same float t: the time of a chosen residual in 30 digits, rounded, inverted again."""
    worst = 0.0
    with mpmath.workdps(30):
        for mu in (*rng.uniform(-4, 4, size=2), 6.0):
            for target in (0.3, 2.0, 8.0):
                t = float(time_at(-target, mu))
                y = newton_back(target, mu, t)
                reference = mpmath.mpf(mu) * (1 - mpmath.exp(-y))
                worst = max(worst, float(abs(formula([mu], t)[0] / reference - 1)))
    return Measurement(worst, 1e-9)


def newton_back(y: float, mu: float, t: float) -> Any:
    """The ln 1/δ at the float t, next to a known solution."""
    y = mpmath.mpf(y)
    for _ in range(2):
        slope = mpmath.exp(-(mpmath.mpf(mu) ** 2) * (1 - mpmath.exp(-y)) ** 2 / 2)
        y += (mpmath.mpf(t) - time_at(-y, mu)) / slope
    return y


def _log_residual(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    with mpmath.workdps(30):
        for mu in (0.0, *rng.uniform(0.5, 4, size=2)):
            for target in (10.0, 300 * np.log(10)):
                t = float(time_at(-target, mu))
                reference = -newton_back(target, mu, t)
                worst = max(worst, float(abs(formula([mu], t)[0] / reference - 1)))
    return Measurement(worst, 1e-9)


def _implicit(formula: Formula, rng: np.random.Generator) -> Measurement:
    """All components at once, by an implicit solver of the ODE."""
    mu = rng.uniform(-3, 3, size=6)
    t = np.array([0.2, 1.0, 3.0])
    return Measurement(float(np.max(np.abs(formula(mu, t) - flow(mu, t)))), 1e-7)


def _asymptote(mu: Any, t: Any) -> Any:
    return -np.exp(mu**2 / 2) * (t - nonlinear.residual_offset(mu))


def _late(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    with mpmath.workdps(30):
        for mu in rng.uniform(0.5, 3, size=3):
            t = float(time_at(-60.0, mu))
            worst = max(worst, abs(float(formula(mu, t)) / -60.0 - 1))
    return Measurement(worst, 1e-9)


def _derivative(r: Any, mu: Any) -> Any:
    """Eqn 84: √(π/2) erf(rμ/√2) + (1-e^{-r²μ²/2})/μ - μF."""
    smooth = np.sqrt(np.pi / 2) * erf(r * mu / np.sqrt(2)) - np.expm1(-((r * mu) ** 2) / 2) / mu
    return smooth - mu * nonlinear.elapsed(r, mu)


def _in_mu(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    for r, mu in zip(rng.uniform(0.1, 0.99, 5), rng.uniform(0.3, 4, 5), strict=True):
        ahead, back = (
            integrate.quad(lambda x, m=m: np.exp(-(m**2) * x**2 / 2) / (1 - x), 0, r)[0]
            for m in (mu + 1e-4, mu - 1e-4)
        )
        worst = max(worst, abs(float(formula(r, mu)) - (ahead - back) / 2e-4))
    return Measurement(worst, 1e-6)


def _entropy(cases: tuple[tuple[float, ...], ...], *, random: int = 0) -> Measure:
    """For how many targets a formula is wrong on whether entropy(softmax(v²)) falls and rises."""

    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        drawn = [tuple(rng.uniform(0.3, 3, size=5)) for _ in range(random)]
        wrong = 0
        for mu in (*cases, *drawn):
            t = np.concatenate([[0.0], np.geomspace(1e-3, 30, 200)])
            change = nonlinear.drop_and_rebound(nonlinear.attention_entropy(flow(mu, t, 1e-7)))
            seen = bool(change.drop > 1e-6), bool(change.rebound > 1e-6)
            wrong += tuple(formula(mu)) != seen
        return Measurement(float(wrong), 0.0)

    return measure


_MIXED = ((3.0, 2.5, 0.5, 0.3), (2.5, 1.0, 0.0, -1.5), (2.0, 1.9, 1.0))
_PURE = ((2.0, 2.0, -2.0), (3.0, 0.0, 0.0))


def _targets(rng: np.random.Generator) -> Any:
    """Rows of one salient and several weak targets for four nodes."""
    directions = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    return directions * np.array([3.0, 1.4, 1.2, 1.0])[:, None]


def _many_nodes(formula: Formula, rng: np.random.Generator) -> Measurement:
    mu, t = _targets(rng), np.array([0.1, 0.6, 2.0])
    return Measurement(float(np.max(np.abs(formula(mu, t) - flow(mu, t)))), 1e-7)


def _rank_drops(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Whether the rank of the matrix flow is ever below that of its targets."""
    mu = _targets(rng)
    path = flow(mu, np.geomspace(1e-2, 30, 40), 1e-7)
    drops = bool(np.any(spectra.rank(path) < spectra.rank(mu)))
    return Measurement(float(formula() != drops), 0.0)


def _stable_rank(row_lengths: tuple[float, ...]) -> Measure:
    """The predicted fall and rise of the stable rank against the matrix flow's."""

    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        mu = np.linalg.qr(rng.normal(size=(4, 4)))[0] * np.array(row_lengths)[:, None]
        t = np.concatenate([[1e-4], np.geomspace(1e-2, 30, 60)])
        change = nonlinear.drop_and_rebound(spectra.stable_rank(flow(mu, t, 1e-9)))
        predicted = formula(mu, t)
        error = np.max(np.abs(np.subtract(predicted, change)))
        bounces = min(float(change.drop), float(change.rebound)) > 0.2
        return Measurement(float(error) + float(not bounces), 1e-4)

    return measure


def _bounce(mu: Any, t: Any) -> Any:
    return nonlinear.drop_and_rebound(spectra.stable_rank(nonlinear.weights_multi(mu, t)))


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="eqn6",
        title="v̇ = (μ-v)exp(v²/2) is solved by inverting t = F(v/μ, μ)",
        source="JoMA preprint, Eqns 6, 79",
        method="30 digits at the same float t, |μ| up to 6",
        derived=nonlinear.weights,
        measure=_weights,
    ),
    Claim(
        id="eqn6-ode",
        title="the same against the differential equation itself",
        source="JoMA preprint, Eqn 6",
        method="implicit integration (Radau, 1e-10)",
        derived=nonlinear.weights,
        measure=_implicit,
    ),
    Claim(
        id="eqn6-log",
        title="ln δ stays exact down to δ = 1e-300",
        source="new",
        method="30 digits at the same float t",
        derived=nonlinear.log_residual,
        measure=_log_residual,
    ),
    Claim(
        id="eqn6-late",
        title="near convergence δ → exp(-e^{μ²/2}(t - R(μ)))",
        source="new",
        method="30 digits at ln δ = -60",
        derived=_asymptote,
        measure=_late,
    ),
    Claim(
        id="eqn84",
        title="∂F/∂μ = √(π/2) erf(rμ/√2) + (1-e^{-r²μ²/2})/μ - μF",
        source="JoMA preprint, Eqns 81-84",
        method="central differences of quadratures",
        derived=_derivative,
        measure=_in_mu,
    ),
    Claim(
        id="fig4-entropy",
        title="attention entropy drops, then rebounds",
        source="JoMA preprint, Fig. 4",
        method="implicit integration for five targets",
        derived=lambda mu: (True, True),
        measure=_entropy(_MIXED, random=2),
        condition="μ has salient and non-salient non-zero components",
        without=_entropy(_PURE),
    ),
    Claim(
        id="fig4-fate",
        title="it drops unless all |μ| are equal, rebounds if some is neither 0 nor the largest",
        source="new",
        method="implicit integration for seven targets",
        derived=nonlinear.entropy_fate,
        measure=_entropy((*_MIXED, *_PURE), random=2),
    ),
    Claim(
        id="eqn6-nodes",
        title="K > 1: each row of V keeps its direction and follows Eqn 6 at ‖μ_l‖",
        source="new",
        method="closed form against implicit integration of the matrix equation",
        derived=nonlinear.weights_multi,
        measure=_many_nodes,
    ),
    Claim(
        id="sec4-rank",
        title="the rank of W does not drop",
        source="new",
        method="singular values along the matrix equation",
        derived=lambda: False,
        measure=_rank_drops,
    ),
    Claim(
        id="sec4-stable-rank",
        title="the stable rank of W drops and bounces back",
        source="new",
        method="closed form against the matrix equation",
        derived=_bounce,
        measure=_stable_rank((3.0, 1.4, 1.2, 1.0)),
        condition="salient and non-salient rows",
        without=_stable_rank((1.5, 1.5, 1.5, 1.5)),
    ),
)

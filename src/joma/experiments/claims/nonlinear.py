"""Eqn 6, nonlinear activation with attention, and what follows: entropy and rank that bounce."""

from typing import Any

import mpmath
import numpy as np
from scipy import integrate
from scipy.special import erf

from joma.experiments.claims import _nonlinear_points as points
from joma.experiments.claims.claim import Claim, Formula, Measure, Measurement
from joma.experiments.claims.reference.eqn6 import slope_at, time_at
from joma.theory import nonlinear, spectra


def flow(mu: Any, t: Any, rtol: float = 1e-10, method: Any = "Radau") -> Any:
    """v(t) of Eqn 6 by implicit integration, shape (T, …)."""
    mu = np.asarray(mu, dtype=float)

    def right_side(_: float, v: Any) -> Any:
        v = v.reshape(mu.shape)
        gate = np.exp(np.sum(v**2, axis=-1, keepdims=mu.ndim > 1) / 2 if mu.ndim > 1 else v**2 / 2)
        return ((mu - v) * gate).ravel()

    solution: Any = integrate.solve_ivp(
        right_side, (0, t[-1]), np.zeros(mu.size), method, t_eval=t, rtol=rtol, atol=1e-2 * rtol
    )
    return solution.y.T.reshape(-1, *mu.shape)


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
        y += (mpmath.mpf(t) - time_at(-y, mu)) * slope_at(-y, mu)
    return y


def _log_residual(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    with mpmath.workdps(30):
        for mu in (0.0, *rng.uniform(0.5, 4, size=2), 6.0):
            for target in (0.5, 10.0, 300 * np.log(10)):
                t = float(time_at(-target, mu))
                reference = -newton_back(target, mu, t)
                worst = max(worst, float(abs(formula([mu], t)[0] / reference - 1)))
    return Measurement(worst, 1e-10)


def _log_residual_beyond(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Within the sudden growth at μ = 10, where a float's spacing of t is too coarse."""
    del rng
    with mpmath.workdps(30):
        t = float(time_at(-3.0, 10.0))
        reference = -newton_back(3.0, 10.0, t)
        return Measurement(float(abs(formula([10.0], t)[0] / reference - 1)), 1e-10)


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
    """Whether a formula is right on if and by how much entropy(softmax(v²)) falls and rises."""

    def measure(formula: Formula, rng: np.random.Generator) -> Measurement:
        drawn = [tuple(rng.uniform(0.3, 3, size=5)) for _ in range(random)]
        worst = 0.0
        for mu in (*cases, *drawn):
            fate = formula(mu)
            t = np.concatenate([[0.0], np.geomspace(1e-3, 30, 1000)])
            size, place = np.unique(np.abs(mu), return_inverse=True)
            path = flow(size, t, 1e-9, "LSODA")[:, place]
            change = nonlinear.drop_and_rebound(nonlinear.attention_entropy(path))
            seen = bool(change.drop > 1e-6), bool(change.rebound > 1e-6)
            worst = max(worst, float(tuple(fate[:2]) != seen))
            if len(fate) > 2:
                sizes = fate.drop - change.drop, fate.rebound - change.rebound
                worst = max(worst, float(np.max(np.abs(sizes))))
        return Measurement(worst, 1e-3)

    return measure


def _entropy_of_others(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Every case must fail: equal components, a single one, zeros next to others."""
    errors = [_entropy((case,))(formula, rng) for case in (*_PURE, *_FALLING)]
    return min(errors, key=lambda measured: measured.error)


_MIXED = ((3.0, 2.5, 0.5, 0.3), (2.0, 1.9, 1.0), (1.5, -1.0))
_PURE = ((2.0, 2.0, -2.0), (3.0, 0.0, 0.0))
_FALLING = ((1.0, 0.9, 0.0), (1.2, 1.0, 0.0, 0.0), (2.0, 1.9, *[0.0] * 6))
"""A component that is neither zero nor the largest, and no rebound."""
_ZEROS = ((2.5, 1.0, 0.0, -1.5), (2.778, 2.335, *[0.0] * 1000))
"""Zeros and a rebound: at the end, and between two falls."""


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
    path = flow(mu, np.geomspace(1e-2, 30, 40), 1e-9, "LSODA")
    drops = bool(np.any(spectra.rank(path) < spectra.rank(mu)))
    return Measurement(float(formula(mu) != drops), 0.0)


_HEAVY = np.array([[2.0, 0.0], *[[0.0, 1.0]] * 12])
"""Many weak rows with one direction that outweighs the salient one: it rises and falls back."""


def _stable_rank(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The predicted fall and rise of the stable rank against the matrix flow's."""
    return _bounce(formula, _targets(rng))


def _stable_rank_of_others(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Both must fail: rows of one length, and rows that are not orthogonal."""
    equal = np.linalg.qr(rng.normal(size=(4, 4)))[0] * 1.5
    errors = [_bounce(formula, mu) for mu in (equal, _HEAVY)]
    return min(errors, key=lambda measured: measured.error)


def _bounce(formula: Formula, mu: Any) -> Measurement:
    t = np.concatenate([[1e-4], np.geomspace(1e-2, 30, 600)])
    change = nonlinear.drop_and_rebound(spectra.stable_rank(flow(mu, t, 1e-9, "LSODA")))
    fate = formula(mu)
    error = max(abs(fate.drop - change.drop), abs(fate.drop - change.rebound))
    bounces = min(float(change.drop), float(change.rebound)) > 0.2
    return Measurement(float(error) + float(not bounces), 1e-3)


def _any_stable_rank(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Ends, drop, rise and both signs against the matrix flow, for targets of every kind."""
    t = np.concatenate([[1e-4], np.geomspace(1e-2, 30, 600)])
    worst = 0.0
    for mu in (_HEAVY, _targets(rng), np.diag([2.0, 1.0, 1.0]), rng.normal(size=(5, 3))):
        path = spectra.stable_rank(flow(mu, t, 1e-9, "LSODA"))
        fate = formula(mu)
        worst = max(worst, abs(path[0] - fate.ends), abs(path[-1] - fate.ends))
        worst = max(worst, abs(fate.ends - path.min() - fate.drop))
        worst = max(worst, abs(path.max() - fate.ends - fate.rise))
        moving = np.diff(path)[np.abs(np.diff(path)) > 1e-6]
        if len(mu) != 5:  # of random rows, what is left at the end may be too little to be seen
            signs = int(np.sign(moving[0])), int(np.sign(moving[-1]))
            worst = max(worst, float((fate.first, fate.last) != signs))
    return Measurement(float(worst), 1e-3)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="eqn6",
        title="v̇ = (μ-v)exp(v²/2) is solved by inverting t = F(v/μ, μ), to 1e-11 for |μ| ≤ 6",
        source="JoMA preprint, Eqns 6, 79",
        method="30 digits at the same float t, |μ| up to 6",
        derived=nonlinear.weights,
        measure=_weights,
        search=points.EQN6,
    ),
    Claim(
        id="eqn6-ode",
        title="the same against the differential equation itself",
        source="JoMA preprint, Eqn 6",
        method="implicit integration (Radau, 1e-10)",
        derived=nonlinear.weights,
        measure=_implicit,
        search=points.ODE,
    ),
    Claim(
        id="eqn6-log",
        title="ln δ stays exact to 1e-11 down to δ = 1e-300",
        source="new",
        method="30 digits at the same float t",
        derived=nonlinear.log_residual,
        measure=_log_residual,
        condition="|μ| ≤ 6; beyond, ln δ is that of a time within rounding of t",
        without=_log_residual_beyond,
        search=points.LOG_RESIDUAL,
    ),
    Claim(
        id="eqn6-late",
        title="near convergence δ → exp(-e^{μ²/2}(t - R(μ)))",
        source="new",
        method="30 digits at ln δ = -60",
        derived=_asymptote,
        measure=_late,
        search=points.LATE,
    ),
    Claim(
        id="eqn84",
        title="∂F/∂μ = √(π/2) erf(rμ/√2) + (1-e^{-r²μ²/2})/μ - μF",
        source="JoMA preprint, Eqns 81-84",
        method="central differences of quadratures",
        derived=_derivative,
        measure=_in_mu,
        search=points.DERIVATIVE,
    ),
    Claim(
        id="fig4-entropy",
        title="attention entropy drops, then rebounds",
        source="JoMA preprint, Fig. 4",
        method="implicit integration for six targets",
        derived=lambda mu: (True, True),
        measure=_entropy(_MIXED, random=3),
        condition="no μ is zero, and not all |μ| are equal",
        without=_entropy_of_others,
        search=points.ENTROPY,
    ),
    Claim(
        id="fig4-fate",
        title="it drops unless all |μ| are equal, and ends rising iff min_{μ≠0} μ² < Σ p_j μ_j²",
        source="new",
        method="drop and rebound by implicit integration for twelve targets",
        derived=nonlinear.entropy_fate,
        measure=_entropy((*_MIXED, *_PURE, *_FALLING, *_ZEROS), random=2),
        search=points.FATE,
    ),
    Claim(
        id="eqn6-nodes",
        title="K > 1: each row of V keeps its direction and follows Eqn 6 at ‖μ_l‖",
        source="new",
        method="closed form against implicit integration of the matrix equation",
        derived=nonlinear.weights_multi,
        measure=_many_nodes,
        search=points.NODES,
    ),
    Claim(
        id="sec4-rank",
        title="the rank of W does not drop",
        source="new",
        method="singular values along the matrix equation",
        derived=lambda mu: False,
        measure=_rank_drops,
        search=points.RANK,
    ),
    Claim(
        id="sec4-stable-rank",
        title="the stable rank of W drops and bounces back to that of its targets",
        source="new",
        method="closed form against the matrix equation",
        derived=nonlinear.stable_rank_fate,
        measure=_stable_rank,
        condition="orthogonal rows, not all of one length",
        without=_stable_rank_of_others,
        search=points.STABLE_RANK,
    ),
    Claim(
        id="sec4-rank-turns",
        title="of any targets it starts and ends at theirs; first it falls iff Σu²ℓ² > Σℓ⁴/Σℓ²",
        source="new",
        method="closed form against the matrix equation for four kinds of targets",
        derived=nonlinear.stable_rank_fate,
        measure=_any_stable_rank,
        search=points.TURNS,
    ),
)

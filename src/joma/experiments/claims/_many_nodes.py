"""The talk's remarks on many hidden nodes, measured on its matrix equation."""

from typing import Any

import numpy as np
from scipy import integrate

from joma.experiments.claims._many_nodes_points import at_the_end
from joma.experiments.claims.measurement import Formula, Measurement
from joma.theory import linear, spectra
from joma.theory.block import Block, Samples, simulate


def solve(right_side: Any, t: Any, start: Any) -> Any:
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


def relative(ours: Any, reference: Any) -> float:
    return float(np.max(np.abs(ours - reference)) / np.max(np.abs(reference)))


def _matrix_flow(rng: np.random.Generator, left: list[float]) -> tuple[Any, Any, Any]:
    """Δ, times with 1 - t/t* as given, and V(t) of the talk's matrix ODE."""
    delta = rng.normal(size=(4, 3)) * np.array([1.4, 1.0, 0.7, 0.5])[:, None]
    blowup = np.sqrt(np.pi / 2) / np.max(np.linalg.norm(delta, axis=1))
    t = blowup * (1 - np.array(left))
    flow = solve(
        lambda v: np.exp(np.sum(v**2, axis=1, keepdims=True) / 2) * delta, t, np.zeros((4, 3))
    )
    return delta, t, flow


def rows_keep_direction(formula: Formula, rng: np.random.Generator) -> Measurement:
    delta, t, flow = _matrix_flow(rng, [0.5, 0.1, 0.01])
    return Measurement(relative(formula(delta, t), flow), 1e-8)


def block_of_many(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The talk's matrix equation against the full block with four nodes."""
    x = rng.dirichlet(np.ones(5), size=30)
    g = rng.normal(size=(30, 4)) + rng.normal(size=4)
    path = simulate(Block("exp", "linear"), Samples(x, gradient=g), np.linspace(0, 1.0, 4))
    delta = x.T @ g / 30
    flow = solve(lambda v: formula(v, delta), path.t, np.zeros((5, 4)))
    return Measurement(relative(flow, path.v), 1e-8)


def rank_falls(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Whether the matrix ODE has lost rank at 1 - t/t* = 1e-4."""
    delta, _, flow = _matrix_flow(rng, [1e-4])
    falls = bool(spectra.rank(flow[0]) < spectra.rank(delta))
    return Measurement(float(formula(delta) != falls), 0.0)


def late_limit(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The stable rank with winners at 1e7 and the others at their limits, also with ties."""
    cases = [
        rng.normal(size=(4, 3)),
        np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.0]]),
        np.array([[1.0, 0.0], [0.0, 0.999]]),
        np.array([[3.0, 4.0], [5.0, 0.0], [1.0, 1.0]]),
        np.array([[2.0, 1.0], [-2.0, -1.0], [0.0, 1.0]]),
    ]
    ends = [spectra.stable_rank(at_the_end(delta, 1e7)) for delta in cases]
    off = [abs(formula(delta) - end) for delta, end in zip(cases, ends, strict=True)]
    return Measurement(float(np.max(off)), 1e-9)


def stable_ranks(delta: Any, t: Any) -> tuple[Any, Any]:
    return (
        spectra.stable_rank(linear.weights_multi(delta, t)),
        spectra.stable_rank(linear.velocity_multi(delta, t)),
    )


_SLOW = np.array([[1.0, 0.0], [0.0, 0.95], [0.0, 0.95]])
"""Two weaker rows that together outweigh the winner until late."""
_TIED = np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.0]])
"""Two longest rows: the stable rank of V rises to 2, and that of V̇ is the higher."""


def ranks_late(formula: Formula, rng: np.random.Generator) -> Measurement:
    random = rng.normal(size=(4, 3)) * np.array([1.4, 1.0, 0.7, 0.5])[:, None]
    return max((_fall(formula, d, [1e-3, 1e-6]) for d in (random, _SLOW)), key=lambda m: m.error)


def ranks_early(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Both must fail: before it is late, and with two longest rows."""
    del rng
    early, tied = _fall(formula, _SLOW, [0.1, 0.01]), _fall(formula, _TIED, [1e-3, 1e-6])
    return min((early, tied), key=lambda m: m.error)


def _fall(formula: Formula, delta: Any, left: list[float]) -> Measurement:
    """Stable ranks against the ODE's; 1 is added unless V's falls and V̇'s is the lower."""
    blowup = np.sqrt(np.pi / 2) / np.max(np.linalg.norm(delta, axis=1))
    t = blowup * (1 - np.array([0.1, 1e-2, 1e-3]))
    flow = solve(
        lambda v: np.exp(np.sum(v**2, axis=1, keepdims=True) / 2) * delta, t, np.zeros_like(delta)
    )
    rates = np.exp(np.sum(flow**2, axis=2, keepdims=True) / 2) * delta
    weights, gradients = formula(delta, t)
    error = max(
        relative(weights, spectra.stable_rank(flow)),
        relative(gradients, spectra.stable_rank(rates)),
    )
    weights, gradients = formula(delta, blowup * (1 - np.array(left)))
    falls = np.all(np.diff(weights) < 0) and np.all(gradients < weights)
    return Measurement(error + float(not falls), 1e-6)

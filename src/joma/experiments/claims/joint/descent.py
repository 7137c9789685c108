"""Gradient descent in finite steps leaves the law of exp attention."""

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Point, claim
from joma.experiments.claims.measurement import ClaimMeasurement, Formula, measured
from joma.experiments.claims.reference import block as reference
from joma.experiments.claims.reference.block import random_samples, random_start
from joma.experiments.claims.search import Integer, Real
from joma.theory import invariants
from joma.theory.block import Block, simulate


@reference.over_blocks(step=Real(1e-4, 0.5, log=True), steps=Integer(1, 12))
def _descent_at(formula: Formula, point: Point) -> ClaimMeasurement:
    setting = reference.draw_setting(point, "exp")
    rate = reference.rates(setting)
    step = point["step"] / max(setting.speed(rate), 1e-30)
    path = reference.descend(setting, step, point["steps"])
    block, z = setting.block, path.z if path.z.ndim == 3 else path.z[:, None]
    squares = block.eta_z / (2 * block.eta_w) * np.sum(path.v**2, axis=2)
    law = block.tau * np.sum(z, axis=1) - squares
    if not np.all(np.isfinite(law)):
        raise JomaError("step must not let the weights diverge")
    size = np.max(np.abs(squares)) + block.tau * np.max(np.sum(np.abs(z), axis=1))
    change = law[-1] - law[0] - formula(path.v, block)
    steps = np.max(np.abs(np.diff(path.v, axis=0))) * np.max(np.abs(path.v))
    size += block.eta_z / block.eta_w * steps * path.v.shape[2]
    # Where a huge step throws the bias far off, w is rounded to a share of the bias.
    lost = 1e-15 * np.max(np.abs(path.bias)) * np.max(np.abs(path.v)) * path.v.shape[2]
    rounding = 3e-11 * float(size) + block.eta_z / block.eta_w * float(lost)
    return measured(np.abs(change), rounding + 1e-300)


@claim("thm1-descent", invariants.descent_drift, _descent_at)
def _descent(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    """The law's change over thirty gradient steps against a formula of the weights' steps."""
    worst = 0.0
    for block in (Block("exp", "relu"), Block("exp", "tanh", eta_w=0.7, eta_z=1.3, tau=0.5)):
        samples = random_samples(rng, queries=1 if block.tau == 1 else 3)
        t, start = np.arange(0, 31) * 0.02, random_start(samples, rng)
        path = simulate(block, samples, t, initial=start, descent_step=0.02)
        quantity = invariants.conserved_pointwise(block, path.v, path.z)
        difference = quantity[-1] - quantity[0] - formula(path.v, block)
        worst = max(worst, float(np.max(np.abs(difference))))
    return ClaimMeasurement(worst, 1e-13)


@claim("thm1-descent-order", lambda: 1.0)
def _descent_order(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    samples = random_samples(rng)
    start = random_start(samples, rng)
    worst = 0.0
    for activation in ("tanh", "relu"):
        block = Block("exp", activation)
        drifts = [
            invariants.drift(
                simulate(block, samples, [0.0, 0.64], initial=start, descent_step=0.64 / n)
            )
            for n in (128, 256, 512)
        ]
        order = np.mean(np.log2(np.divide(drifts[:-1], drifts[1:])))
        worst = max(worst, float(abs(order - formula())))
    return ClaimMeasurement(worst, 0.02)

"""Linear attention: the closed form of one node."""

import numpy as np
from scipy import linalg

from joma.experiments.claims.claim import Formula, Generator, Point, claim, over
from joma.experiments.claims.linear.theorem2 import ANY_RATES, DELTA, LOGITS, RATES, one_node
from joma.experiments.claims.measurement import ClaimMeasurement, measured, relative
from joma.experiments.claims.search import Real
from joma.theory import linear
from joma.theory.block import Block, simulate


@over(delta=DELTA, z0=LOGITS, angle=Real(1e-6, 20, log=True), **ANY_RATES)
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


@claim("linear-attention", linear.linear_attention, _against_exponential)
def _against_block(formula: Formula, rng: Generator) -> ClaimMeasurement:
    samples, delta = one_node(rng)
    logits = rng.normal(size=5)
    t = np.linspace(0, 2, 4)
    start = (np.zeros((5, 1)), logits)
    path = simulate(Block("linear", "linear", **RATES), samples, t, initial=start)
    v, z = formula(delta, t, logits=logits, **RATES)
    return measured([relative(v, path.v[..., 0]), relative(z, path.z)], 1e-9)

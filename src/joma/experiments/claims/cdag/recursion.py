"""The recursion of Theorem 1 from layer to layer: bounds over activation patterns."""

from functools import partial
from itertools import product

import numpy as np

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import Point, claim, over
from joma.experiments.claims.measurement import ClaimMeasurement, Formula, measured
from joma.experiments.claims.search import Integer, Real, Vector
from joma.theory.cdag import LEAKY_RELU, corr, recursion_bound

_PATTERNS = {n: np.array(list(product((-1.0, 1.0), repeat=n))) for n in range(1, 9)}


def _least_of_patterns(z: Array, g: Array) -> float:
    """The least corr(z_β, σ′_k g_k) over all patterns of a leaky ReLU with corr(z_β, f_k) > 0."""
    patterns = _PATTERNS[len(z)]
    # Large where it helps corr(z_β, f_k) > 0 and small where it hurts: any pattern that can
    # satisfy the premise does.
    pre_activation = patterns * np.where(patterns * z > 0, 1.0, 1e-3)
    allowed = corr(LEAKY_RELU.value(pre_activation), z) > 0
    return float(np.min(corr(z, LEAKY_RELU.derivative(pre_activation[allowed]) * g)))


def _slope_patterns(
    formula: Formula, rng: np.random.Generator, *, attained: bool, negative: bool = True
) -> ClaimMeasurement:
    errors = [0.0]
    for _ in range(20):
        z = rng.choice([-1.0, 1.0], 8)
        g = rng.standard_normal(8)
        # Were g nowhere negative, the worst pattern would contradict corr(z_β, f_k) > 0.
        g = np.where(np.arange(8) == 0, -np.abs(g), g) if negative else np.abs(g)
        if corr(z, g) <= 0:
            z = -z
        excess = float(formula(z, g, 0.1, 1.0)) - _least_of_patterns(z, g)
        errors.append(abs(excess) if attained else excess)
    return measured(errors, 1e-12)


@over(
    z=Vector(Real(-1.0, 1.0, special=(0.0,)), Integer(1, 12)),
    g=Vector(Real(-1.0, 1.0, special=(0.0,)), Integer(1, 12)),
    share=Vector(Real(0.0, 1.0), Integer(1, 12)),
    slope=Real(0.0, 2.0, special=(0.0, 1.0)),
    other_slope=Real(0.0, 2.0, special=(0.0, 1.0)),
)
def _slopes_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Any slopes within the range, any signals."""
    z = point["z"]
    g, share = np.resize(point["g"], len(z)), np.resize(point["share"], len(z))
    low, high = sorted((point["slope"], point["other_slope"]))
    slopes = low + share * (high - low)
    bound = float(formula(z, g, low, high))
    size = high * float(np.sum(np.abs(z * g)))
    return ClaimMeasurement(bound - float(z @ (slopes * g)), 1e-12 * size + 1e-300)


@over(z=Vector(Real(-1.0, 1.0), Integer(1, 8)), g=Vector(Real(-1.0, 1.0), Integer(1, 8)))
def _patterns_at(formula: Formula, point: Point) -> ClaimMeasurement:
    g = point["g"].copy()
    g[0] = -abs(g[0])
    z = np.where(np.resize(point["z"], len(g)) < 0, -1.0, 1.0)
    if g[0] == 0 or float(z @ g) <= 0:
        raise JomaError("g must be negative somewhere and correlate with z")
    return ClaimMeasurement(
        abs(float(formula(z, g, 0.1, 1.0)) - _least_of_patterns(z, g)),
        1e-12 * float(np.sum(np.abs(g))),
    )


claim("cdag-recursion", recursion_bound, _slopes_at)(partial(_slope_patterns, attained=False))
claim(
    "cdag-recursion-attained",
    recursion_bound,
    _patterns_at,
    without=partial(_slope_patterns, attained=True, negative=False),
)(partial(_slope_patterns, attained=True))

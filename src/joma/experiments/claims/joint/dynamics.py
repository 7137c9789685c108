"""Eqns 2 and 9: the training dynamics, and how far Assumption 1 is from them."""

from itertools import product
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim
from joma.experiments.claims.measurement import ClaimMeasurement, largest_error, measured
from joma.experiments.claims.reference import block as reference
from joma.experiments.claims.reference.block import POINTWISE, random_point
from joma.experiments.claims.reference.ode import five_point
from joma.experiments.claims.search import Choice
from joma.theory import stationarity
from joma.theory.block import velocity

_ATTENTIONS = (*POINTWISE, "softmax")


@reference.over_blocks(
    attention=Choice(*_ATTENTIONS), embeddings=Choice("orthonormal", "apart", "any")
)
def _gradient_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Against rates written independently and, where no node switches, against differences."""
    setting = reference.draw_setting(point, point["attention"], point["embeddings"])
    rate, own = formula(setting.block, setting.samples, setting.state), reference.rates(setting)
    m, block = setting.samples.tokens, setting.block
    f, pull = reference.node_gradients(setting)
    pull = reference.pull_sizes(setting, pull)
    sizes = block.eta_w * np.abs(setting.columns).T @ np.abs(f).T @ pull
    v_size = np.abs(setting.columns[:, :m]).T @ np.abs(setting.w)
    largest = 1.0
    if block.sigma.name in reference.SIGMA:
        largest = float(np.max(reference.SIGMA[block.sigma.name][1](setting.z / block.tau)))
    z_size = block.eta_z / block.tau * largest * np.sum(pull @ v_size.T) + 1e-300
    projected = setting.columns.T @ own.w
    # Slopes are as good as the pre-activations, sums in which large scores may cancel.
    size = float(np.max(np.abs(f) @ np.abs(setting.w)))
    digits = 1e-11 + 1e-14 * size
    errors = [
        np.max(np.abs(np.concatenate([rate.v, rate.bias]) - projected) / (digits * sizes + 1e-300)),
        np.max(np.abs(rate.z - own.z)) / (digits * z_size),
    ]
    rng = np.random.default_rng([point["draw"], 1])
    toward = rng.normal(size=projected.shape)
    move = reference.Rate(setting.columns @ toward, rng.normal(size=setting.z.shape))
    # So that no pre-activation changes by more than about 1e-4.
    h = 1e-4 / setting.speed(move) / max(1.0, size)
    around = [setting.moved(move, s * h) for s in (-2, -1, 1, 2)]
    slopes = [reference.slopes_of(one) for one in (setting, *around)]
    if block.phi.smooth or all(np.array_equal(slopes[0], one) for one in slopes):
        slope = five_point((reference.objective(one) for one in around), h)
        by_rates = (
            np.sum(toward * np.concatenate([rate.v, rate.bias])) / block.eta_w
            + np.sum(move.z * rate.z) / block.eta_z
        )
        scale = np.sum(np.abs(toward) * sizes) / block.eta_w
        scale += np.sum(np.abs(move.z)) * z_size / block.eta_z
        h_size = np.abs(f) @ np.abs(setting.w) + 1
        rounding = 1e-14 * (np.sum(np.asarray(setting.samples.probability) @ h_size) + 1) / h
        errors.append(abs(slope - by_rates) / (1e-5 * scale + 10 * rounding))
    return measured(errors, 1.0)


@claim("eqn2", velocity, _gradient_at)
def _gradient(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Differences of the objective in w: every attention and activation, labels, embeddings."""
    data = (
        {"drive": "gradient", "embeddings": "orthonormal"},
        {"drive": "labels", "embeddings": "any"},
    )
    cases = product(_ATTENTIONS, reference.PHI, data)
    points = (random_point(rng, queries=2, attention=a, activation=b, **c) for a, b, c in cases)
    return largest_error(_gradient_at(formula, point) for point in points)


@reference.over_blocks("drive", attention=Choice(*_ATTENTIONS))
def _stationarity_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The rate of E[g x] by differences along the flow of w, under cross-entropy."""
    setting = reference.draw_setting(point, point["attention"], drive="labels")
    x, share = np.asarray(setting.samples.x), np.asarray(setting.samples.probability)
    labels = np.eye(setting.samples.nodes)[np.asarray(setting.samples.labels)]

    def means(at: reference.Setting) -> Any:
        h = reference.outputs(at)
        e = np.exp(h - np.max(h, axis=1, keepdims=True))
        return x.T @ (share[:, None] * (labels - e / e.sum(axis=1, keepdims=True)))

    f = reference.inputs(setting)
    rate = reference.rates(setting)
    # So short that no pre-activation changes by more than about 1e-3.
    h = 1e-3 / max(1.0, float(np.max(np.abs(f) @ np.abs(setting.w))))
    h /= max(setting.speed(rate), float(np.max(np.abs(f) @ np.abs(rate.w))), 1e-30)
    around = [setting.moved(rate, s * h) for s in (-2, -1, 1, 2)]
    if not setting.block.phi.smooth:
        slopes = [reference.slopes_of(one) for one in around]
        if not all(np.array_equal(slopes[0], one) for one in slopes):
            raise JomaError("a node switches within the difference")
    found = five_point((means(one) for one in around), h)
    by_formula = formula(setting.block, setting.samples, setting.state)
    size = 1e-6 * float(np.max(np.abs(found))) + 1e-13 * float(np.max(x)) / h
    return measured(np.abs(found - by_formula), size)


@claim("assumption1-rate", stationarity.rate, _stationarity_at)
def _stationarity(formula: Formula, rng: Generator) -> ClaimMeasurement:
    points = (random_point(rng, queries=2, attention=one) for one in _ATTENTIONS)
    return largest_error(_stationarity_at(formula, point) for point in points)

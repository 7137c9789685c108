"""Searches of GaLore's contraction and stall."""

import numpy as np

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims import galore as checks
from joma.experiments.claims.claim import ClaimMeasurement, Formula, Generator, Point, measured
from joma.experiments.claims.galore import operator, orthonormal, product_of_least, reduced
from joma.theory import galore
from tests.adversary.domains import Domain, integer, over, real, seed

SIZES: dict[str, Domain] = {"rows": integer(1, 5), "columns": integer(1, 5), "draw": seed()}


COEFFICIENTS: dict[str, Domain] = {
    **SIZES,
    "terms": integer(1, 4),
    "rank": integer(1, 5),
    # Of every B_i and C_i: how far its eigenvalues spread, down to singular matrices and ties.
    "spread": real(0.0, 1.0, special=(0.0, 1.0)),
}


def spectra(point: Point, size: int, rng: Generator) -> Array:
    """Return eigenvalues from 1 − spread to 1, some of them tied."""
    values = 1 - point["spread"] * rng.random((point["terms"], size))
    if point["spread"] == 1.0:
        values[rng.random(values.shape) < 0.3] = 0.0
    return np.round(values, 1) if rng.random() < 0.2 else values


def _symmetric(spectra: Array, rng: Generator) -> Array:
    turned = [orthonormal(len(values), len(values), rng) for values in spectra]
    return np.stack([turn * values @ turn.T for turn, values in zip(turned, spectra, strict=True)])


def coefficients(point: Point) -> tuple[Array, Array, Array, Array, Generator]:
    """Return B, C, P and Q of a point, and the generator that drew them."""
    rng = np.random.default_rng(point["draw"])
    m, n = point["rows"], point["columns"]
    b = _symmetric(spectra(point, m, rng), rng)
    c = _symmetric(spectra(point, n, rng), rng)
    r = min(point["rank"], m, n)
    return b, c, orthonormal(m, r, rng), orthonormal(n, r, rng), rng


@over("galore-fixed-projection", **COEFFICIENTS, share=real(0.0, 1.0, special=(1.0,)))
def _fixed_projection_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The norm of one step as a linear map, less 1 − ηM; both sides for one term."""
    b, c, p, q, _ = coefficients(point)
    inner = operator(*reduced(b, c, p, q))
    largest = float(np.linalg.eigvalsh(inner)[-1])
    bound = product_of_least(*reduced(b, c, p, q))
    if largest <= 1e-9:
        raise JomaError("nothing moves")
    step = point["share"] * 2 / (largest + bound)
    factor = float(np.linalg.norm(np.eye(len(inner)) - step * inner, 2))
    excess = factor - (1 - step * formula(b, c, p, q))
    return ClaimMeasurement(abs(excess) if point["terms"] == 1 else excess, 1e-11)


@over("galore-step-limit", **COEFFICIENTS)
def _largest_step_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much ‖1 − ηH‖ exceeds 1 − ηM at the limit, or falls short of it just above."""
    b, c, p, q, _ = coefficients(point)
    inner_b, inner_c = reduced(b, c, p, q)
    inner = operator(inner_b, inner_c)
    rate = float(np.linalg.eigvalsh(inner_b)[:, 0] @ np.linalg.eigvalsh(inner_c)[:, 0])
    step = formula(b, c, p, q)
    if not np.isfinite(step):
        return measured(np.linalg.norm(inner), 1e-9)

    def excess(eta: float) -> float:
        return float(np.linalg.norm(np.eye(len(inner)) - eta * inner, 2)) - (1 - eta * rate)

    # Above the limit the excess grows by (λ_max + M) dη = 2 dη/η.
    return ClaimMeasurement(max(excess(step), 2e-6 - excess(step * (1 + 1e-6))), 1e-9)


@over("galore-stall", **COEFFICIENTS)
def _stall_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The part of G within the subspace that is left, and of a random G that is lost."""
    b, c, p, q, rng = coefficients(point)
    inner = operator(*reduced(b, c, p, q))
    values = np.linalg.eigvalsh(inner)
    if not values[0] > 1e-6 * values[-1]:
        raise JomaError("positive definite operators only")
    problem = galore.ReversibleGradient(rng.standard_normal((len(b), len(p), len(q))), b, c)
    start = rng.standard_normal((len(p), len(q)))
    first = p.T @ problem.gradient(start) @ q
    moved = np.linalg.solve(inner, first.ravel()).reshape(first.shape)
    left = problem.gradient(start + p @ moved @ q.T)
    within = np.linalg.norm(formula(left, p, q))
    g = rng.standard_normal((len(p), len(q)))
    # P R Qᵀ is the part of G within the subspace: the rest is orthogonal to all of it.
    rest = g - p @ formula(g, p, q) @ q.T
    lost = np.linalg.norm(p.T @ rest @ q)
    return measured(within / np.linalg.norm(start) + lost, 1e-8)


@over("galore-stalled-gradient", **COEFFICIENTS)
def _stalled_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """How far a predicted gradient lies from that after many steps of the best length."""
    b, c, p, q, rng = coefficients(point)
    inner = operator(*reduced(b, c, p, q))
    values = np.linalg.eigvalsh(inner)
    problem = galore.ReversibleGradient(rng.standard_normal((len(b), len(p), len(q))), b, c)
    start = rng.standard_normal((len(p), len(q)))
    predicted = formula(problem, start, p, q)
    # R after n steps is (1 − ηH)ⁿR₀, so that X has moved by η Σ_j (1 − ηH)^j R₀; by squaring.
    first = p.T @ problem.gradient(start) @ q
    step = 1 / values[-1]
    power, total = np.eye(len(inner)) - step * inner, step * np.eye(len(inner))
    for _ in range(60):
        total, power = total + power @ total, power @ power
    moved = (total @ first.ravel()).reshape(first.shape)
    left = problem.gradient(start + p @ moved @ q.T)
    condition = values[-1] / values[0]
    scale = 1 + np.linalg.norm(moved)
    error = float(np.linalg.norm(predicted - left) / scale)
    return ClaimMeasurement(error, 1e-10 + 1e-13 * condition)


over(
    "galore-noise-floor",
    **SIZES,
    rank=integer(1, 5),
    relative_step=real(0.0, 1.9, special=(0.0, 1.0)),
    worst=real(0.0, 1.0, special=(0.0, 1.0)),
)(checks.noise_floor_at)

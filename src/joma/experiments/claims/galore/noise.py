"""Gradients with noise: the floor below which a step may lose, and where noise stalls."""

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from joma.common.types import Array
from joma.experiments.claims.claim import Point, claim, over
from joma.experiments.claims.galore.problems import SIZES, orthonormal
from joma.experiments.claims.measurement import (
    ClaimMeasurement,
    Formula,
    largest_error,
    smallest_error,
)
from joma.experiments.claims.search import Integer, Real
from joma.theory import galore


class _Noisy:
    """A gradient with noise that a function draws at every call."""

    def __init__(self, problem: Any, noise: Any) -> None:
        self._problem, self._noise = problem, noise

    def gradient(self, w: ArrayLike) -> Array:
        """Return G(W) + N."""
        return self._problem.gradient(w) + self._noise()


def _point(rng: np.random.Generator, **values: float) -> Point:
    return Point({"rows": 4, "columns": 3, "draw": int(rng.integers(2**32)), **values})


@over(
    **SIZES,
    rank=Integer(1, 5),
    relative_step=Real(0.0, 1.9, special=(0.0, 1.0)),
    worst=Real(0.0, 1.0, special=(0.0, 1.0)),
)
def _noise_floor_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """By how much a step lowers the objective at the floor, relative to ν².

    `worst` mixes the pair of G and N that is worst, made here, with a random pair.
    """
    rng = np.random.default_rng(point["draw"])
    m, n = point["rows"], point["columns"]
    rank = min(point["rank"], m, n)
    kappa = point["relative_step"]
    g, noise = _worst_pair(m, n, rank, kappa, rng)
    mix = point["worst"]
    g = mix * g + (1 - mix) * rng.standard_normal((m, n))
    noise = mix * noise + (1 - mix) * rng.standard_normal((m, n))
    size = float(np.linalg.norm(noise))
    floor = formula(size, rank=rank, rows=m, columns=n, relative_step=kappa)
    if mix == 1.0:  # at this pair nothing is gained, so that no lower floor would do
        change = _change(g, noise, rank, kappa) / size**2
        return ClaimMeasurement(abs(floor / float(np.linalg.norm(g)) - 1) + abs(change), 1e-6)
    g = g * (floor / np.linalg.norm(g))
    return ClaimMeasurement(-_change(g, noise, rank, kappa) / size**2, 1e-6)


@claim("galore-noise-floor", galore.noise_floor, _noise_floor_at)
def _noise_floor(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    """The floor at the worst pairs of G and N, and at random ones with curvatures up to L."""
    cases = product(((1, 0.0), (1, 1.0), (2, 0.5), (3, 0.8)), (1.0, 0.9, 0.0))
    return largest_error(
        _noise_floor_at(formula, _point(rng, rank=rank, relative_step=kappa, worst=worst))
        for (rank, kappa), worst in cases
    )


def _worst_pair(
    m: int, n: int, rank: int, kappa: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """A G and an N at which a step of κ/L gains nothing, ‖G‖ being as large as it can be."""
    side = min(m, n)
    u, v = orthonormal(m, side, rng), orthonormal(n, side, rng)
    spread, half = np.sqrt(side / rank - 1), 1 - kappa / 2
    form = np.array([[(kappa**2 / 4 + spread**2) / half**2, spread / half], [spread / half, 1.0]])
    inside, outside = np.abs(np.linalg.eigh(form)[1][:, -1])
    if rank == side:
        if kappa < 1:  # noise that cancels the gradient
            noise = u @ v.T / np.sqrt(side)
            return -noise, noise
        inside, outside = 1.0, 0.0
    leading = inside / half / np.sqrt(rank)
    # A little less outside, so that the singular vectors are those inside.
    rest = leading * (1 - 1e-9)
    of_noise = outside / np.sqrt(max(side - rank, 1))
    noisy = np.r_[np.full(rank, leading), np.full(side - rank, rest)]
    noise = np.r_[np.full(rank, inside / np.sqrt(rank)), np.full(side - rank, -of_noise)]
    return u * (noisy - noise) @ v.T, u * noise @ v.T


def _change(g: Array, noise: Array, rank: int, kappa: float) -> float:
    """The gain of a step per η, where all curvatures are L: ⟨G, D⟩ − (κ/2)‖D‖²."""
    p, q = galore.svd_projection(g + noise, rank)
    moved = p @ (p.T @ (g + noise) @ q) @ q.T
    return float(np.sum(g * moved) - kappa / 2 * np.sum(moved * moved))


def _noise_does_not_stall(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    """P, Q independent of G + N, and curvature along the noise."""
    independent = _noise_stall(formula, rng, independent=True)
    return smallest_error([independent, _noise_stall(formula, rng, step=0.6, curvature=1.0)])


def _noise_stall_of(
    formula: Formula, point: Point, independent: bool = False, curvature: float = 0.0
) -> ClaimMeasurement:
    """How far ‖G‖ ends outside 1 − η to 1 times the prediction, relative to ν.

    G has no curvature along U and V, unless one is given. Without, a singular value leads until a
    step, which takes away the share η of it, puts it below the level of the noise.
    """
    rng = np.random.default_rng(point["draw"])
    m, n = point["rows"], point["columns"]
    side = min(m, n)
    rank = min(point["rank"], side)
    size, step = point["noise"], point["step"]
    u, v = orthonormal(m, side, rng), orthonormal(n, side, rng)
    pattern = size / np.sqrt(rank) * u[:, :rank] @ v[:, :rank].T
    start = np.r_[np.zeros(rank), rng.uniform(1.2, 2.0, side - rank) * size / np.sqrt(rank)]
    b = np.eye(m) - (1 - curvature) * u[:, :rank] @ u[:, :rank].T
    problem = galore.ReversibleGradient((u * start @ v.T)[None], b[None], np.eye(n)[None])
    noisy = _Noisy(problem, lambda: pattern * rng.choice([-1.0, 1.0]))

    def anywhere(g: Array, r: int) -> tuple[Array, Array]:
        return orthonormal(m, r, rng), orthonormal(n, r, rng)

    longer = independent or curvature > 0
    steps = round(4 * m * n / rank / step) if longer else round(1.5 * side / rank / step)
    run = galore.descend(
        noisy,
        np.zeros((m, n)),
        step=step,
        steps=steps,
        rank=rank,
        refresh=1,
        projection=anywhere if independent else galore.svd_projection,
    )
    left = u[:, rank:].T @ problem.gradient(run.w[-1]) @ v[:, rank:]
    predicted = formula(size, rank=rank, rows=m, columns=n)
    remaining = float(np.linalg.norm(left))
    outside = max(remaining - predicted, (1 - step) * predicted - remaining)
    return ClaimMeasurement(outside / size, 1e-9)


@over(**SIZES, rank=Integer(1, 5), noise=Real(1e-6, 1e6, log=True), step=Real(0.01, 0.1))
def noise_stall_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Measure where noise along which G has no curvature stalls a changing projection."""
    return _noise_stall_of(formula, point)


@claim("galore-noise-stall", galore.noise_stall, noise_stall_at, without=_noise_does_not_stall)
def _noise_stall(
    formula: Formula, rng: np.random.Generator, *, step: float = 0.02, **other: Any
) -> ClaimMeasurement:
    worst = largest_error(
        _noise_stall_of(formula, _point(rng, rank=rank, noise=2.0, step=step), **other)
        for rank in (1, 2)
    )
    return ClaimMeasurement(max(0.0, worst.error), worst.tolerance)

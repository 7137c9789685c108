"""Random problems with constant coefficients, and projections."""

from typing import Any

import numpy as np

from joma.common.types import Array
from joma.experiments.claims.claim import Generator, Point
from joma.experiments.claims.search import Integer, Real, Seed
from joma.theory.galore import ReversibleGradient

SIZES: dict[str, Any] = {"rows": Integer(1, 5), "columns": Integer(1, 5), "draw": Seed()}


COEFFICIENTS: dict[str, Any] = {
    **SIZES,
    "terms": Integer(1, 4),
    "rank": Integer(1, 5),
    # Of every B_i and C_i: how far its eigenvalues spread, down to singular matrices and ties.
    "spread": Real(0.0, 1.0, special=(0.0, 1.0)),
}


def orthonormal(size: int, rank: int, rng: Generator) -> Array:
    """Return orthonormal columns."""
    return np.linalg.qr(rng.standard_normal((size, rank)))[0]


def _semidefinite(count: int, size: int, rng: Generator) -> Array:
    factors = rng.standard_normal((count, size, size))
    return factors @ factors.mT / size + 0.3 * np.eye(size)


def random_problem(terms: int, m: int, n: int, rng: Generator) -> tuple[ReversibleGradient, float]:
    """Return a random problem and a step that is safe for it whatever the projection."""
    b, c = _semidefinite(terms, m, rng), _semidefinite(terms, n, rng)
    largest = np.sum(np.linalg.norm(b, 2, axis=(1, 2)) * np.linalg.norm(c, 2, axis=(1, 2)))
    return ReversibleGradient(rng.standard_normal((terms, m, n)), b, c), float(1 / largest)


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


def operator(b: Array, c: Array) -> Array:
    """Return R ↦ Σ_i B_i R C_i as a matrix on R.ravel()."""
    return np.asarray(sum(np.kron(one, other) for one, other in zip(b, c, strict=True)))


def reduced(b: Array, c: Array, p: Array, q: Array) -> tuple[Array, Array]:
    """Return all PᵀB_iP and QᵀC_iQ."""
    return p.T @ b @ p, q.T @ c @ q


def product_of_least(b: Array, c: Array) -> float:
    """Return Σ_i λ_min(B_i) λ_min(C_i)."""
    least = (np.linalg.eigvalsh(one)[:, 0] for one in (b, c))
    return float(sum(of_b * of_c for of_b, of_c in zip(*least, strict=True)))

"""GaLore: the domains that an adversary searches, and each claim at one point of its domain."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from joma.errors import JomaError
from joma.experiments.claims.measurement import Formula, Measurement
from joma.experiments.claims.search import Choice, Integer, Point, Real, Search, Seed
from joma.theory.galore import ReversibleGradient, descend, svd_projection

Array = np.ndarray

_SIZES: dict[str, Any] = {"rows": Integer(1, 5), "columns": Integer(1, 5), "draw": Seed()}
_COEFFICIENTS: dict[str, Any] = {
    **_SIZES,
    "terms": Integer(1, 4),
    "rank": Integer(1, 5),
    # Of every B_i and C_i: how far its eigenvalues spread, down to singular matrices and ties.
    "spread": Real(0.0, 1.0, special=(0.0, 1.0)),
}


def _spectra(point: Point, size: int, rng: np.random.Generator) -> Array:
    """Eigenvalues from 1 − spread to 1, some of them tied."""
    values = 1 - point["spread"] * rng.random((point["terms"], size))
    if point["spread"] == 1.0:
        values[rng.random(values.shape) < 0.3] = 0.0
    return np.round(values, 1) if rng.random() < 0.2 else values


def _orthonormal(size: int, rank: int, rng: np.random.Generator) -> Array:
    return np.linalg.qr(rng.standard_normal((size, rank)))[0]


def _symmetric(spectra: Array, rng: np.random.Generator) -> Array:
    turned = [_orthonormal(len(values), len(values), rng) for values in spectra]
    return np.stack([turn * values @ turn.T for turn, values in zip(turned, spectra, strict=True)])


def coefficients(point: Point) -> tuple[Array, Array, Array, Array, np.random.Generator]:
    """Return B, C, P and Q of a point, and the generator that drew them."""
    rng = np.random.default_rng(point["draw"])
    m, n = point["rows"], point["columns"]
    b = _symmetric(_spectra(point, m, rng), rng)
    c = _symmetric(_spectra(point, n, rng), rng)
    r = min(point["rank"], m, n)
    return b, c, _orthonormal(m, r, rng), _orthonormal(n, r, rng), rng


def operator(b: Array, c: Array) -> Array:
    """Return R ↦ Σ_i B_i R C_i as a matrix on R.ravel()."""
    return np.asarray(sum(np.kron(one, other) for one, other in zip(b, c, strict=True)))


def reduced(b: Array, c: Array, p: Array, q: Array) -> tuple[Array, Array]:
    """Return all PᵀB_iP and QᵀC_iQ."""
    return p.T @ b @ p, q.T @ c @ q


def fixed_projection(formula: Formula, point: Point) -> Measurement:
    """Return the norm of one step as a linear map, less 1 − ηM; both sides for one term."""
    b, c, p, q, _ = coefficients(point)
    inner = operator(*reduced(b, c, p, q))
    largest = float(np.linalg.eigvalsh(inner)[-1])
    bound = sum(
        np.linalg.eigvalsh(one)[0] * np.linalg.eigvalsh(other)[0]
        for one, other in zip(*reduced(b, c, p, q), strict=True)
    )
    if largest <= 1e-9:
        raise JomaError("nothing moves")
    step = point["share"] * 2 / (largest + bound)
    factor = float(np.linalg.norm(np.eye(len(inner)) - step * inner, 2))
    excess = factor - (1 - step * formula(b, c, p, q))
    return Measurement(abs(excess) if point["terms"] == 1 else excess, 1e-11)


def attained_rate(formula: Formula, point: Point) -> Measurement:
    """Return M less the least eigenvalue: 0 where eigenvectors are shared, else ≤ −their distance.

    Σ B_i⊗C_i − M ≥ Σ γ_i(B_i − β_i)⊗1 + Σ β_i 1⊗(C_i − γ_i), β_i and γ_i the least eigenvalues.
    """
    b, c, p, q, rng = coefficients(point)
    if point["shared"]:
        left, right = _orthonormal(p.shape[1], p.shape[1], rng), _orthonormal(len(q), len(q), rng)
        spectra_b = np.sort(_spectra(point, p.shape[1], rng), axis=1)
        spectra_c = np.sort(_spectra(point, len(q), rng), axis=1)
        b, c = left * spectra_b[:, None] @ left.T, right * spectra_c[:, None] @ right.T
        # Only the least eigenvectors are shared; the others turn with every term.
        b, c = _turn_others(b, left, rng), _turn_others(c, right, rng)
        p, q = np.eye(p.shape[1]), np.eye(len(q))
    inner_b, inner_c = reduced(b, c, p, q)
    least_b, least_c = (np.linalg.eigvalsh(inner)[:, 0] for inner in (inner_b, inner_c))
    exact = float(np.linalg.eigvalsh(operator(inner_b, inner_c))[0])
    excess_b = inner_b - least_b[:, None, None] * np.eye(inner_b.shape[-1])
    excess_c = inner_c - least_c[:, None, None] * np.eye(inner_c.shape[-1])
    distance = float(
        np.linalg.eigvalsh(np.sum(least_c[:, None, None] * excess_b, axis=0))[0]
        + np.linalg.eigvalsh(np.sum(least_b[:, None, None] * excess_c, axis=0))[0]
    )
    over = formula(b, c, p, q) - exact
    shared = point["shared"] or point["terms"] == 1
    return Measurement(abs(over) if shared else over + distance, 1e-11)


def _turn_others(matrices: Array, vectors: Array, rng: np.random.Generator) -> Array:
    """Turn all but the first of the common eigenvectors, differently in each matrix."""
    size = len(vectors)
    turned = []
    for matrix in matrices:
        turn = np.eye(size)
        if size > 1:
            turn[1:, 1:] = _orthonormal(size - 1, size - 1, rng)
        change = vectors @ turn @ vectors.T
        turned.append(change @ matrix @ change.T)
    return np.stack(turned)


def largest_step(formula: Formula, point: Point) -> Measurement:
    """Return by how much ‖1 − ηH‖ exceeds 1 − ηM at the limit, or falls short of it just above."""
    b, c, p, q, _ = coefficients(point)
    inner_b, inner_c = reduced(b, c, p, q)
    inner = operator(inner_b, inner_c)
    rate = float(np.linalg.eigvalsh(inner_b)[:, 0] @ np.linalg.eigvalsh(inner_c)[:, 0])
    step = formula(b, c, p, q)
    if not np.isfinite(step):
        return Measurement(float(np.linalg.norm(inner)), 1e-9)

    def excess(eta: float) -> float:
        return float(np.linalg.norm(np.eye(len(inner)) - eta * inner, 2)) - (1 - eta * rate)

    # Above the limit the excess grows by (λ_max + M) dη = 2 dη/η.
    return Measurement(max(excess(step), 2e-6 - excess(step * (1 + 1e-6))), 1e-9)


def stall(formula: Formula, point: Point) -> Measurement:
    """Return the part of G within the subspace that is left, and of a random G that is lost."""
    b, c, p, q, rng = coefficients(point)
    inner = operator(*reduced(b, c, p, q))
    values = np.linalg.eigvalsh(inner)
    if not values[0] > 1e-6 * values[-1]:
        raise JomaError("positive definite operators only")
    problem = ReversibleGradient(rng.standard_normal((len(b), len(p), len(q))), b, c)
    start = rng.standard_normal((len(p), len(q)))
    first = p.T @ problem.gradient(start) @ q
    moved = np.linalg.solve(inner, first.ravel()).reshape(first.shape)
    left = problem.gradient(start + p @ moved @ q.T)
    within = np.linalg.norm(formula(left, p, q))
    g = rng.standard_normal((len(p), len(q)))
    # P R Qᵀ is the part of G within the subspace: the rest is orthogonal to all of it.
    rest = g - p @ formula(g, p, q) @ q.T
    lost = np.linalg.norm(p.T @ rest @ q)
    return Measurement(float(within / np.linalg.norm(start) + lost), 1e-8)


def stalled(formula: Formula, point: Point) -> Measurement:
    """Return how far a predicted gradient lies from that after many steps of the best length."""
    b, c, p, q, rng = coefficients(point)
    inner = operator(*reduced(b, c, p, q))
    values = np.linalg.eigvalsh(inner)
    problem = ReversibleGradient(rng.standard_normal((len(b), len(p), len(q))), b, c)
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
    return Measurement(error, 1e-10 + 1e-13 * condition)


def changing_projection(formula: Formula, point: Point) -> Measurement:
    """Return the gap's factor from one refresh to the next, less the predicted one."""
    b, c, _, _, rng = coefficients(point)
    m, n = point["rows"], point["columns"]
    rank = min(point["rank"], m, n)
    if point["flat"]:
        # All singular values and all curvatures equal: the SVD's share is the least there is.
        b, c = np.eye(m)[None], np.eye(n)[None]
    inner = operator(b, c)
    largest = float(np.linalg.eigvalsh(inner)[-1])
    if largest <= 1e-6:
        raise JomaError("nothing moves")
    off = rng.standard_normal((m, n))
    if point["flat"]:
        left, _, right = np.linalg.svd(off, full_matrices=False)
        off = left @ right
    a = np.zeros((len(b), m, n))
    problem = ReversibleGradient(a, b, c)
    step = point["share"] * 2 / largest
    every = 1 if point["flat"] else point["refresh"]
    run = descend(problem, off, step=step, steps=every, rank=rank)
    gaps = [0.5 * w.ravel() @ inner @ w.ravel() for w in (run.w[0], run.w[-1])]
    if gaps[0] < 1e-9 * largest:
        raise JomaError("there is no gap to close")
    excess = gaps[1] / gaps[0] - formula(problem, step=step, rank=rank)
    return Measurement(float(abs(excess) if point["flat"] else excess), 1e-10)


class Noisy:
    """A gradient with noise that a function draws at every call."""

    def __init__(self, problem: Any, noise: Any) -> None:
        self._problem, self._noise = problem, noise

    def gradient(self, w: ArrayLike) -> Array:
        """Return G(W) + N."""
        return self._problem.gradient(w) + self._noise()


def noise_floor(formula: Formula, point: Point) -> Measurement:
    """Return by how much a step lowers the objective at the floor, relative to ν².

    `worst` mixes the pair of G and N that is worst, made here, with a random pair.
    """
    rng = np.random.default_rng(point["draw"])
    m, n = point["rows"], point["columns"]
    rank = min(point["rank"], m, n)
    kappa = point["relative_step"]
    g, noise = worst_pair(m, n, rank, kappa, rng)
    mix = point["worst"]
    g = mix * g + (1 - mix) * rng.standard_normal((m, n))
    noise = mix * noise + (1 - mix) * rng.standard_normal((m, n))
    size = float(np.linalg.norm(noise))
    floor = formula(size, rank=rank, rows=m, columns=n, relative_step=kappa)
    if mix == 1.0:  # at this pair nothing is gained, so that no lower floor would do
        change = _change(g, noise, rank, kappa) / size**2
        return Measurement(abs(floor / float(np.linalg.norm(g)) - 1) + abs(change), 1e-6)
    g = g * (floor / np.linalg.norm(g))
    return Measurement(-_change(g, noise, rank, kappa) / size**2, 1e-6)


def worst_pair(
    m: int, n: int, rank: int, kappa: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Return a G and an N at which a step of κ/L gains nothing, ‖G‖ being as large as it can be."""
    side = min(m, n)
    u, v = _orthonormal(m, side, rng), _orthonormal(n, side, rng)
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
    """Return the gain of a step per η, where all curvatures are L: ⟨G, D⟩ − (κ/2)‖D‖²."""
    p, q = svd_projection(g + noise, rank)
    moved = p @ (p.T @ (g + noise) @ q) @ q.T
    return float(np.sum(g * moved) - kappa / 2 * np.sum(moved * moved))


def noise_stall(
    formula: Formula, point: Point, independent: bool = False, curvature: float = 0.0
) -> Measurement:
    """Return how far ‖G‖ ends outside 1 − η to 1 times the prediction, relative to ν.

    G has no curvature along U and V, unless one is given. Without, a singular value leads until a
    step, which takes away the share η of it, puts it below the level of the noise.
    """
    rng = np.random.default_rng(point["draw"])
    m, n = point["rows"], point["columns"]
    side = min(m, n)
    rank = min(point["rank"], side)
    size, step = point["noise"], point["step"]
    u, v = _orthonormal(m, side, rng), _orthonormal(n, side, rng)
    pattern = size / np.sqrt(rank) * u[:, :rank] @ v[:, :rank].T
    start = np.r_[np.zeros(rank), rng.uniform(1.2, 2.0, side - rank) * size / np.sqrt(rank)]
    b = np.eye(m) - (1 - curvature) * u[:, :rank] @ u[:, :rank].T
    problem = ReversibleGradient((u * start @ v.T)[None], b[None], np.eye(n)[None])
    noisy = Noisy(problem, lambda: pattern * rng.choice([-1.0, 1.0]))

    def anywhere(g: Array, r: int) -> tuple[Array, Array]:
        return _orthonormal(m, r, rng), _orthonormal(n, r, rng)

    longer = independent or curvature > 0
    steps = round(4 * m * n / rank / step) if longer else round(1.5 * side / rank / step)
    run = descend(
        noisy,
        np.zeros((m, n)),
        step=step,
        steps=steps,
        rank=rank,
        refresh=1,
        projection=anywhere if independent else svd_projection,
    )
    left = u[:, rank:].T @ problem.gradient(run.w[-1]) @ v[:, rank:]
    predicted = formula(size, rank=rank, rows=m, columns=n)
    remaining = float(np.linalg.norm(left))
    outside = max(remaining - predicted, (1 - step) * predicted - remaining)
    return Measurement(outside / size, 1e-9)


FIXED = Search({**_COEFFICIENTS, "share": Real(0.0, 1.0, special=(1.0,))}, fixed_projection)
ATTAINED = Search({**_COEFFICIENTS, "shared": Choice(True, False)}, attained_rate)
STEP = Search(_COEFFICIENTS, largest_step)
STALL = Search(_COEFFICIENTS, stall)
STALLED = Search(_COEFFICIENTS, stalled)
CHANGING = Search(
    {
        **_COEFFICIENTS,
        "share": Real(1e-6, 1.0, special=(1.0,)),
        "refresh": Integer(1, 6),
        "flat": Choice(True, False),
    },
    changing_projection,
)
FLOOR = Search(
    {
        **_SIZES,
        "rank": Integer(1, 5),
        "relative_step": Real(0.0, 1.9, special=(0.0, 1.0)),
        "worst": Real(0.0, 1.0, special=(0.0, 1.0)),
    },
    noise_floor,
)
NOISE_STALL = Search(
    {
        **_SIZES,
        "rank": Integer(1, 5),
        "noise": Real(1e-6, 1e6, log=True),
        "step": Real(0.01, 0.1),
    },
    noise_stall,
)

"""GaLore: gradient ascent in a low-rank subspace, for gradients G = Σ_i A_i − Σ_i B_i W C_i.

W moves by η P R Qᵀ with the projected gradient R = PᵀGQ, P and Q orthonormal. Norms are Frobenius
norms for W, G and R and spectral norms for B and C.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.theory import _checks as checks

Array = NDArray[np.float64]
Projection = Callable[[Array, int], tuple[Array, Array]]
"""Chooses P (m, r) and Q (n, r) for a gradient and a rank."""
_SINGULAR = 1e-12
"""Least over largest eigenvalue up to which a linear system counts as singular."""


class Gradient(Protocol):
    """Anything with a gradient by W; its B_i and C_i may depend on W."""

    def gradient(self, w: ArrayLike) -> Array:
        """The gradient at W (m, n)."""
        ...


@dataclass(frozen=True)
class ReversibleGradient:
    """GaLore's gradient G = Σ_i A_i − Σ_i B_i W C_i with constant coefficients.

    It is the gradient of the concave ⟨Σ A_i, W⟩ − ½ Σ_i ⟨W, B_i W C_i⟩.

    Attributes:
        a: A_i, (N, m, n).
        b: B_i, positive semidefinite, (N, m, m).
        c: C_i, positive semidefinite, (N, n, n).
    """

    a: Array
    b: Array
    c: Array

    def __post_init__(self) -> None:
        a = checks.finite("a", self.a, (None, None, None))
        terms, m, n = a.shape
        checks.shape("b", _semidefinite("b", self.b), (terms, m, m))
        checks.shape("c", _semidefinite("c", self.c), (terms, n, n))

    def gradient(self, w: ArrayLike) -> Array:
        """GaLore: G(W) = Σ_i A_i − Σ_i B_i W C_i, for W (..., m, n)."""
        weights = checks.finite("w", w)
        _, m, n = self.a.shape
        if weights.shape[-2:] != (m, n):
            raise JomaError(f"w must end in shape ({m}, {n}), got {weights.shape}")
        return self.a.sum(axis=0) - np.sum(self.b @ weights[..., None, :, :] @ self.c, axis=-3)

    def curvature(self) -> tuple[float, float]:
        """Least and largest eigenvalue of W ↦ Σ_i B_i W C_i."""
        return _spectrum(self.b, self.c)


def project(g: ArrayLike, p: ArrayLike, q: ArrayLike) -> Array:
    """GaLore's projected gradient R = PᵀGQ, for G (..., m, n), P (m, r), Q (n, r)."""
    gradient = checks.finite("g", g)
    if gradient.ndim < 2:
        raise JomaError(f"g must have at least two axes, got shape {gradient.shape}")
    left = checks.finite("p", p, (gradient.shape[-2], None))
    right = checks.finite("q", q, (gradient.shape[-1], None))
    return left.T @ gradient @ right


def svd_projection(g: ArrayLike, rank: int) -> tuple[Array, Array]:
    """GaLore's choice of P and Q: the leading singular vectors of the gradient."""
    gradient = checks.finite("g", g, (None, None))
    r = checks.whole("rank", rank, 1)
    if r > min(gradient.shape):
        raise JomaError(f"rank must be ≤ {min(gradient.shape)}, got {r}")
    left, _, right = np.linalg.svd(gradient, full_matrices=False)
    return left[:, :r], right[:r].T


def contraction_rate(b: ArrayLike, c: ArrayLike, p: ArrayLike, q: ArrayLike) -> float:
    """GaLore's M with fixed projection: Σ_i λ_min(PᵀB_iP) λ_min(QᵀC_iQ), constant B_i and C_i.

    ‖R_t‖ ≤ (1 − ηM)‖R_{t−1}‖ for η up to `step_limit`. For G with a factor 1/N, M has it too. M is
    at most `exact_contraction_rate`, and equal to it where the B̂_i = PᵀB_iP share an eigenvector
    of their least eigenvalues and the Ĉ_i = QᵀC_iQ share one of theirs. For positive definite B̂_i
    and Ĉ_i it is equal only there; one term always shares.

    Args:
        b: B_i, (N, m, m).
        c: C_i, (N, n, n).
        p: P, (m, r), at least one column.
        q: Q, (n, r), at least one column.
    """
    projected_b, projected_c = _projected(b, c, p, q)
    least_b = np.linalg.eigvalsh(projected_b)[:, 0]
    return float(np.sum(least_b * np.linalg.eigvalsh(projected_c)[:, 0]))


def exact_contraction_rate(b: ArrayLike, c: ArrayLike, p: ArrayLike, q: ArrayLike) -> float:
    """GaLore's M without loss: least eigenvalue of R ↦ Σ_i B̂_i R Ĉ_i, never below M.

    It can be positive where every λ_min(B̂_i) λ_min(Ĉ_i), and with them M, is zero.
    """
    return _spectrum(*_projected(b, c, p, q))[0]


def step_limit(b: ArrayLike, c: ArrayLike, p: ArrayLike, q: ArrayLike) -> float:
    """GaLore: the largest η for which ‖R_t‖ ≤ (1 − ηM)‖R_{t−1}‖ whatever R is.

    R_t = R_{t−1} − ηH(R_{t−1}) with H(R) = Σ_i B̂_i R Ĉ_i, so the bound needs
    ηλ_max(H) − 1 ≤ 1 − ηM: η ≤ 2/(λ_max(H) + M).
    """
    largest = _spectrum(*_projected(b, c, p, q))[1]
    total = largest + contraction_rate(b, c, p, q)
    return 2 / total if total > 0 else np.inf


def varying_rate(
    kappa: ArrayLike,
    lipschitz_a: ArrayLike,
    lipschitz_b: ArrayLike,
    lipschitz_c: ArrayLike,
    radius: float,
    norm_b: ArrayLike,
    norm_c: ArrayLike,
) -> float:
    """GaLore's M where A, B, C depend on W: Σ_i κ_i − L_Ai − D(L_Bi sup‖C_i‖ + L_Ci sup‖B_i‖).

    From B′W′C′ − BWC = B(W′−W)C + (B′−B)W′C′ + BW′(C′−C) and ‖W′−W‖ = η‖R‖.

    Args:
        kappa: least λ_min(B̂_i) λ_min(Ĉ_i) on the path, (N,).
        lipschitz_a: L_A of every A_i by W, (N,).
        lipschitz_b: L_B of every B_i, (N,).
        lipschitz_c: L_C of every C_i, (N,).
        radius: D, the largest ‖W‖ on the path.
        norm_b: largest ‖B_i‖ on the path, (N,).
        norm_c: largest ‖C_i‖ on the path, (N,).
    """
    sizes = {"lipschitz_a": lipschitz_a, "lipschitz_b": lipschitz_b, "lipschitz_c": lipschitz_c}
    sizes |= {"radius": radius, "norm_b": norm_b, "norm_c": norm_c}
    l_a, l_b, l_c, d, b, c = [checks.non_negative(*one) for one in sizes.items()]
    least = checks.finite("kappa", kappa)
    return float(np.sum(least - l_a - d * (l_b * c + l_c * b)))


def stalled_gradient(
    problem: ReversibleGradient, w0: ArrayLike, p: ArrayLike, q: ArrayLike
) -> Array:
    """GaLore with fixed projection: the gradient G that is left when R has gone to 0.

    Only W₀ + PXQᵀ can be reached, and R = 0 there fixes X: Σ_i B̂_i X Ĉ_i = R₀. The gradient
    outside the subspace remains. New.

    Raises:
        JomaError: Σ_i B̂_i X Ĉ_i = R₀ has not exactly one solution, or none that float64 can find.
    """
    left, right = checks.finite("p", p), checks.finite("q", q)
    start = checks.finite("w0", w0, problem.a.shape[1:])
    b, c = _projected(problem.b, problem.c, left, right)
    remaining = project(problem.gradient(start), left, right)
    least, largest = _spectrum(b, c)
    if not least > _SINGULAR * largest:
        raise JomaError(
            "p and q must make R ↦ Σ B̂_i R Ĉ_i positive definite, got the eigenvalues "
            f"{least:g} to {largest:g}"
        )
    solution = np.linalg.solve(_operator(b, c), remaining.ravel()).reshape(remaining.shape)
    return problem.gradient(start + left @ solution @ right.T)


def refreshed_bound(problem: ReversibleGradient, *, step: float, rank: int) -> float:
    """GaLore with P, Q from the SVD of the exact G: factor of the objective's gap per refresh.

    1 − 2μη(1 − ηL/2) r/min(m, n), with μ and L the least and largest eigenvalue of
    W ↦ Σ B_i W C_i and η ≤ 2/L. The leading r singular vectors hold at least the share
    r/min(m, n) of ‖G‖², and steps between refreshes never widen the gap; so G → 0 as well, if
    μ > 0: ‖G‖² ≤ 2L · gap ≤ (L/μ) factor^refreshes ‖G₀‖². With gradient noise this is not
    guaranteed: `noise_floor`. New.
    """
    eta = checks.positive_scalar("step", step)
    least, largest = problem.curvature()
    if eta * largest > 2 * (1 + 1e-12):
        raise JomaError(f"step must be ≤ 2/L = {2 / largest:g}, got {eta}")
    _, m, n = problem.a.shape
    r = checks.whole("rank", rank, 1)
    if r > min(m, n):
        raise JomaError(f"rank must be ≤ {min(m, n)}, got {r}")
    return 1 - 2 * least * eta * (1 - eta * largest / 2) * r / min(m, n)


def noise_floor(
    noise: float, *, rank: int, rows: int, columns: int, relative_step: float = 0.0
) -> float:
    """GaLore with P, Q from the SVD of G + N: the ‖G‖ above which a step raises the objective. New.

    The step is D = P Pᵀ(G + N)Q Qᵀ, ‖N‖ ≤ ν in the Frobenius norm, k = min(m, n). For small η it
    raises the objective wherever ⟨G, D⟩ > 0, and that is certain for ‖G‖ > ν√(k/r) and not below.
    With κ = ηL, L the largest curvature, the floor is ν√λ, λ the largest eigenvalue of

        [[(κ²/4 + c²)/h², c/h], [c/h, 1]],    c² = k/r − 1, h = 1 − κ/2

    so ν(√(k/r − 1) + √(k/r)) at η = 1/L. Unlike the floor of stochastic gradient ascent at full
    rank it does not vanish with η, and neither does `noise_stall`, where noise of mean zero can
    hold up such a run.

    Args:
        noise: ν, the largest ‖N‖.
        rank: r, at most min(m, n).
        rows: m.
        columns: n.
        relative_step: κ = ηL, from 0, for steps that are small enough, to below 2.
    """
    size = float(checks.non_negative("noise", checks.scalar("noise", noise)))
    spread = _smaller_side(rank, rows, columns) / rank - 1
    kappa = checks.scalar("relative_step", checks.within("relative_step", relative_step, 0.0, 2.0))
    if kappa >= 2:
        raise JomaError(f"relative_step must be below 2, got {kappa:g}")
    half = 1 - kappa / 2
    trace = 1 + (kappa**2 / 4 + spread) / half**2
    determinant = (kappa / 2 / half) ** 2
    # The discriminant as a sum of terms ≥ 0, for it cancels at full rank.
    discriminant = (1 - determinant) ** 2 + spread / half**2 * (
        2 + 2 * determinant + spread / half**2
    )
    return size * float(np.sqrt((trace + np.sqrt(discriminant)) / 2))


def noise_stall(noise: float, *, rank: int, rows: int, columns: int) -> float:
    """GaLore with P, Q from the SVD of G + N: the ‖G‖ up to which such noise can stall it. New.

    N = ±ν/√r UVᵀ with equal probability, U and V orthonormal of rank r. Where G has no part along U
    and V and no curvature there, Σ_i B_i U X Vᵀ C_i = 0 for all X, its singular values below ν/√r
    never enter the leading r of G + N, and never change, whatever the step and however often P and
    Q are renewed. So ‖G‖ can stay for ever at anything below ν√(min(m, n)/r − 1).

    With curvature along U and V the stall is metastable: G fluctuates along them by about ν√(η/2),
    so that other singular vectors lead now and then and ‖G‖ falls, the more slowly the smaller η
    is. Plain stochastic gradient ascent and projections chosen independently of the gradient
    converge under the same noise, with steps that tend to 0 slowly.

    Args:
        noise: ν = ‖N‖, in the Frobenius norm.
        rank: r, at most min(m, n).
        rows: m.
        columns: n.
    """
    size = float(checks.non_negative("noise", checks.scalar("noise", noise)))
    return size * float(np.sqrt(_smaller_side(rank, rows, columns) / rank - 1))


@dataclass(frozen=True)
class Descent:
    """A GaLore run.

    Attributes:
        w: W_t, (steps + 1, m, n).
        projected_norm: ‖R_t‖ before each step and after the last, (steps + 1,).
        gradient_norm: ‖G_t‖, (steps + 1,).
        p: P as last chosen, (m, r).
        q: Q as last chosen, (n, r).
        refreshes: how often P and Q were chosen.
    """

    w: Array
    projected_norm: Array
    gradient_norm: Array
    p: Array
    q: Array
    refreshes: int


def descend(
    problem: Gradient,
    w0: ArrayLike,
    *,
    step: float,
    steps: int,
    rank: int,
    projection: Projection = svd_projection,
    refresh: int | None = None,
) -> Descent:
    """GaLore without Adam: W ← W + η P R Qᵀ, R = PᵀGQ.

    Args:
        problem: gives the gradient G(W), which is followed uphill (it is minus the loss's).
        w0: start, (m, n).
        step: η.
        steps: number of steps.
        rank: r.
        projection: chooses orthonormal P and Q from the gradient.
        refresh: chooses again every so many steps; None keeps the first choice.
    """
    eta = checks.positive_scalar("step", step)
    count = checks.whole("steps", steps, 0)
    every = None if refresh is None else checks.whole("refresh", refresh, 1)
    weights = checks.finite("w0", w0, (None, None))
    r = checks.whole("rank", rank, 1)
    path = np.empty((count + 1, *weights.shape))
    projected_norm, gradient_norm = np.empty(count + 1), np.empty(count + 1)
    refreshes = 0
    p = q = np.empty((0, 0))
    for t in range(count + 1):
        gradient = problem.gradient(weights)
        # The last row only records where the run ended; no step follows it.
        if t == 0 or (every is not None and t % every == 0 and t < count):
            p, q = projection(gradient, r)
            refreshes += 1
        projected = project(gradient, p, q)
        path[t] = weights
        projected_norm[t] = np.linalg.norm(projected)
        gradient_norm[t] = np.linalg.norm(gradient)
        weights = weights + eta * p @ projected @ q.T
    return Descent(path, projected_norm, gradient_norm, p, q, refreshes)


def _smaller_side(rank: int, rows: int, columns: int) -> int:
    """min(m, n), of which the rank is at most all."""
    side = min(checks.whole("rows", rows, 1), checks.whole("columns", columns, 1))
    if checks.whole("rank", rank, 1) > side:
        raise JomaError(f"rank must be ≤ {side}, got {rank}")
    return side


def _semidefinite(name: str, value: ArrayLike) -> Array:
    matrices = checks.finite(name, value)
    if matrices.ndim != 3 or matrices.shape[-1] != matrices.shape[-2]:
        raise JomaError(f"{name} must have shape (N, size, size), got {matrices.shape}")
    scale = np.max(np.abs(matrices), initial=1.0)
    if np.any(np.abs(matrices - matrices.mT) > 1e-10 * scale):
        raise JomaError(f"{name} must be symmetric")
    least = np.min(np.linalg.eigvalsh(matrices), initial=0.0)
    if least < -1e-10 * scale:
        raise JomaError(f"{name} must be positive semidefinite, got the eigenvalue {least:g}")
    return matrices


def _projected(b: ArrayLike, c: ArrayLike, p: ArrayLike, q: ArrayLike) -> tuple[Array, Array]:
    inner_b, inner_c = _semidefinite("b", b), _semidefinite("c", c)
    if inner_b.shape[0] != inner_c.shape[0]:
        raise JomaError(f"c must have the {inner_b.shape[0]} terms of b, got {inner_c.shape[0]}")
    left = checks.finite("p", p, (inner_b.shape[-1], None))
    right = checks.finite("q", q, (inner_c.shape[-1], None))
    for name, matrix in (("p", left), ("q", right)):
        if matrix.shape[1] == 0:
            raise JomaError(f"{name} must have at least one column, got shape {matrix.shape}")
    return left.T @ inner_b @ left, right.T @ inner_c @ right


def _operator(b: Array, c: Array) -> Array:
    """R ↦ Σ_i B_i R C_i as a matrix on R.ravel()."""
    size = b.shape[-1] * c.shape[-1]
    return np.einsum("iab,icd->acbd", b, c).reshape(size, size)


def _spectrum(b: Array, c: Array) -> tuple[float, float]:
    eigenvalues = np.linalg.eigvalsh(_operator(b, c))
    return float(eigenvalues[0]), float(eigenvalues[-1])

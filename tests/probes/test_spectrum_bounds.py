"""Bounds of stable ranks: many spectra, and starts that hide the top vector as well as allowed."""

import math

import pytest
import torch
from benchmarks.probes import TOLERANCE, bounds, drawn_matrix

from joma.probes.spectrum import stable_rank, stable_ranks
from joma.probes.spectrum._krylov import Krylov, chi_square_floor
from joma.probes.spectrum._matrix import tops_by_squaring
from tests.probes._matrices import CUDA, diagonal, gaussian, noisy, true_stable_rank
from tests.probes.test_spectrum import spectra

SIDE, FAILURE = 400, 1e-6


@pytest.mark.parametrize("trial", range(0, 60, 3))
def test_bounds_hold_and_are_reached(trial: int) -> None:
    matrix = drawn_matrix(trial, "cpu", 200, 330)
    found, true = stable_rank(matrix, method="lanczos", seed=trial), true_stable_rank(matrix)
    assert abs(found.value - true) <= found.bound + 1e-9 * true
    assert found.bound <= TOLERANCE * found.value


@pytest.mark.slow
def test_bounds_hold_and_are_reached_on_a_thousand_spectra() -> None:
    (row,) = list(bounds(1000, "cpu"))
    assert row["outside"] == row["wide"] == 0, row


@pytest.mark.parametrize("rank", [1, 8, 64])
@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.01, 0.1, 0.5, 0.9])
def test_rank_plus_noise_needs_no_certificate(rank: int, noise: float) -> None:
    matrix = noisy(400, 600, rank, noise)
    found = stable_rank(matrix, method="lanczos")
    assert not found.certain
    assert found.products <= (7 if noise <= 0.1 and rank <= 8 else 25)
    assert abs(found.value - true_stable_rank(matrix)) <= found.bound <= 1e-3 * found.value


PLACE = torch.arange(SIDE, dtype=torch.float64)
EIGENVALUES = {
    "flat + 1e-2": torch.where(PLACE < 9, 1.0, 1e-2),
    "flat + 1e-4": torch.where(PLACE < 9, 1.0, 1e-4),
    "flat + 1e-6": torch.where(PLACE < 9, 1.0, 1e-6),
    "flat": torch.where(PLACE < 30, 1.0, 0.0),
    "decaying": 1 / (1 + PLACE),
    "fast": 1 / (1 + PLACE) ** 4,
    "exponential": torch.exp(-PLACE / 3),
    "linear": 1 - 0.9 * PLACE / SIDE,
}


def excludes(name: str, gap: float, behind: bool, shorter: float) -> bool:
    """Return whether the top eigenvalue, a little above the second, is ever excluded.

    Args:
        name: of the eigenvalues.
        gap: between the top one and the second, as a share.
        behind: whether the start sees both top vectors alike, so that one hides the other.
        shorter: factor of what the start has of the top vector, below the least it may have.
    """
    values, b = EIGENVALUES[name].double().clone(), 16
    values[0] = values[1] * (1 + gap)
    dice = torch.Generator().manual_seed(1)
    start = torch.randn(SIDE, b, generator=dice, dtype=torch.float64)
    seen = start[1] if behind else torch.randn(b, generator=dice, dtype=torch.float64)
    start[0] = seen / seen.norm() * math.sqrt(chi_square_floor(b, FAILURE)) * shorter
    krylov = Krylov(lambda block: values.float()[:, None] * block, start.float())
    for _ in range(8):
        krylov.extend()
        top, _ = krylov.ritz()
        tried = float(values[0]) > float(top) * (1 + 8e-5)  # at the default tolerance
        if tried and krylov.excluded(values[:1], FAILURE).any():
            return True
    return False


@pytest.mark.parametrize("gap", [3e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("name", EIGENVALUES)
def test_no_start_the_probability_allows_excludes_the_top(
    name: str, behind: bool, gap: float
) -> None:
    """The theorem has no exception but ‖g‖² < r: with ‖g‖² = r, only rounding could break it."""
    assert not excludes(name, gap, behind, 1.0)


def test_a_start_that_hides_the_top_better_than_allowed_excludes_it() -> None:
    assert sum(excludes(name, 1e-2, True, 0.3) for name in EIGENVALUES) >= 4


@pytest.mark.parametrize("tolerance", [0.1, 1e-3, 1e-7])
@pytest.mark.parametrize("name", [name for name in spectra(4) if name != "zero"])
def test_bounds_by_squaring_hold_and_close_whatever_the_spectrum(
    name: str, tolerance: float
) -> None:
    for side in (4, 37, 150):
        roots = spectra(side)[name].sqrt()
        for matrix in (diagonal(roots), diagonal(roots, side + 9), diagonal(roots, side + 9).mT):
            found = tops_by_squaring([matrix], tolerance)
            floor, ceiling = float(found.floor), float(found.ceiling)
            assert floor <= 1 / true_stable_rank(matrix) <= ceiling <= floor * (1 + tolerance)
            assert float(found.norm) == pytest.approx(float(matrix.double().norm()), rel=1e-12)


@CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_many_small_weights_on_a_gpu(dtype: torch.dtype) -> None:
    shapes = [(256, 1024)] * 6 + [(1024, 256)] * 6 + [(700, 2000), (100, 90)]
    weights = [gaussian(*shape, seed).to(dtype).cuda() for seed, shape in enumerate(shapes)]
    for found, weight in zip(stable_ranks(weights), weights, strict=True):
        assert abs(found.value - true_stable_rank(weight)) <= found.bound <= 1e-3 * found.value
        assert found.certain

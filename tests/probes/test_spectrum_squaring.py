"""Stable ranks by squared Gram matrices, which a GPU takes for many small weights at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from joma.probes import stable_rank, stable_ranks
from joma.probes.spectrum import StableRank, _certificate
from joma.probes.spectrum.stable import _squared
from tests.probes._matrices import CUDA, diagonal, gaussian, true_stable_rank
from tests.probes.test_spectrum import spectra


def squared(stacked: Tensor, *, keep: bool = False) -> list[StableRank]:
    return _squared(stacked, 1e-3, keep=keep, seed=0)


@pytest.mark.parametrize("tolerance", [0.1, 1e-3, 1e-7])
@pytest.mark.parametrize("name", spectra(4))
def test_bounds_hold_and_close_whatever_the_spectrum(name: str, tolerance: float) -> None:
    for side in (4, 37, 150):
        roots = spectra(side)[name].sqrt()
        for matrix in (diagonal(roots), diagonal(roots, side + 9), diagonal(roots, side + 9).mT):
            (found,) = _squared(matrix.unsqueeze(0), tolerance, keep=False, seed=0)
            assert abs(found.value - true_stable_rank(matrix)) <= found.bound
            assert found.bound <= tolerance * found.value
            assert found.certain


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 60),
    exponent=st.integers(-120, 120),
    seed=st.integers(0, 99),
)
def test_shapes_and_sizes(rows: int, columns: int, exponent: int, seed: int) -> None:
    stacked = torch.stack([gaussian(rows, columns, seed), gaussian(rows, columns, seed + 1)])
    stacked = (stacked.double() * torch.tensor([2.0**exponent, 1.0])[:, None, None]).float()
    for found, matrix in zip(squared(stacked), stacked, strict=True):
        assert abs(found.value - true_stable_rank(matrix)) <= found.bound
        assert found.frobenius == pytest.approx(float(matrix.double().norm()), rel=1e-12)
        top = float(torch.linalg.matrix_norm(matrix.double(), 2))
        assert found.top == pytest.approx(top, rel=1e-3)


def test_few_columns_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = torch.stack([gaussian(20, 70), gaussian(20, 70, 1).bfloat16().float()])
    whole = torch.stack(_certificate.tops(stacked, 1e-3)[:3])
    monkeypatch.setattr(_certificate, "_CHUNK", 200)
    few = torch.stack(_certificate.tops(stacked, 1e-3)[:3])
    torch.testing.assert_close(few, whole, rtol=1e-12, atol=0)


def test_a_warm_start_follows_a_certificate_by_squaring() -> None:
    matrix, change = gaussian(320, 500, 1), gaussian(320, 500, 2)
    (old,) = squared(matrix.unsqueeze(0), keep=True)
    moved = matrix + change * (1e-3 * matrix.norm() / change.norm())
    found = stable_rank(moved, start=old)
    assert abs(found.value - true_stable_rank(moved)) <= found.bound
    assert found.value == pytest.approx(true_stable_rank(moved), rel=1e-3)


def test_zeros_have_rank_0_next_to_others_and_nan_is_refused() -> None:
    some = gaussian(5, 6)
    nothing, found = squared(torch.stack([torch.zeros(5, 6), some]))
    assert nothing.value == nothing.bound == nothing.frobenius == 0
    assert found.value == pytest.approx(true_stable_rank(some), rel=1e-3)
    for bad in (torch.nan, torch.inf, -torch.inf):
        some[2, 3] = bad
        with pytest.raises(ValueError, match="matrix must be finite"):
            squared(torch.stack([gaussian(5, 6), some]))


@CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_many_small_weights_on_a_gpu(dtype: torch.dtype) -> None:
    shapes = [(256, 1024)] * 6 + [(1024, 256)] * 6 + [(700, 2000), (100, 90)]
    weights = [gaussian(*shape, seed).to(dtype).cuda() for seed, shape in enumerate(shapes)]
    for found, weight in zip(stable_ranks(weights), weights, strict=True):
        assert abs(found.value - true_stable_rank(weight)) <= found.bound <= 1e-3 * found.value
        assert found.certain

"""Bounds hold whatever the process has set, the sizes of entries are, and threads do meanwhile."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from joma.probes.spectrum import singular_values, stable_rank, stable_ranks
from tests.probes._matrices import CUDA, diagonal, gaussian, true_stable_rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-4])
def test_long_rows_of_entries_of_one_size(dtype: torch.dtype, tolerance: float) -> None:
    signs = torch.sign(gaussian(1, 250_000)) * 0.1
    for turned in (signs.repeat(64, 1).to(dtype), signs.repeat(64, 1).to(dtype).mT):
        found = stable_rank(turned, method="lanczos", tolerance=tolerance)
        assert abs(found.value - 1) <= found.bound
        kept = stable_rank(turned, keep=True)
        warm = stable_rank(turned, start=kept)
        assert abs(warm.value - 1) <= warm.bound


@contextmanager
def _legacy() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _by_backend() -> Iterator[None]:
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "tf32"
    try:
        yield
        assert backend.fp32_precision == "tf32"
    finally:
        backend.fp32_precision = before


@contextmanager
def _default_type() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "setting",
    [_legacy, _by_backend, _default_type, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["legacy", "by backend", "default type", "autocast"],
)
def test_what_the_process_has_set_does_not_matter(setting: Callable[[], Any]) -> None:
    matrix = gaussian(300, 500)
    plain = stable_rank(matrix, method="lanczos", keep=True)
    half = stable_rank(matrix.bfloat16(), method="lanczos")
    with setting():
        assert stable_rank(matrix, method="lanczos").value == plain.value
        assert stable_rank(matrix.bfloat16(), method="lanczos").value == half.value
        assert stable_rank(matrix, start=plain).value == pytest.approx(plain.value, rel=1e-4)
        assert float(singular_values(matrix, 3).values[0]) == pytest.approx(plain.top, rel=1e-3)


def test_threads_do_not_disturb_one_another() -> None:
    matrices = [gaussian(260, 300, seed) for seed in range(6)]
    expected = [stable_rank(matrix, method="lanczos").value for matrix in matrices]
    torch.set_float32_matmul_precision("high")
    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda m: stable_rank(m, method="lanczos").value, matrices))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("noise", [0.05, 1e-2, 1e-3, 1e-4])
def test_a_rest_that_is_small_compared_with_the_top_takes_few_products(noise: float) -> None:
    squares = noise**2 * (1 - torch.arange(400) / 400)
    squares[:3] = torch.tensor([1.0, 0.9999, 0.5])
    found = stable_rank(diagonal(squares.sqrt(), 3000), method="lanczos")
    assert not found.certain
    assert found.products <= 9
    assert abs(found.value - float(squares.double().sum())) <= found.bound <= 1e-3 * found.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrices_too_small_for_a_warm_start_begin_anew(dtype: torch.dtype) -> None:
    matrix = gaussian(320, 500).to(dtype) * 1e-36
    found = stable_rank(matrix, start=stable_rank(matrix, keep=True))
    assert 0 < found.bound <= 1e-3 * found.value
    assert abs(found.value - true_stable_rank(matrix.double() * 1e36)) <= found.bound


def test_a_warm_start_checks_its_other_arguments() -> None:
    kept = stable_rank(gaussian(200, 300), keep=True)
    with pytest.raises(ValueError, match="method"):
        stable_rank(gaussian(200, 300), start=kept, method="nonsense")
    with pytest.raises(ValueError, match="tolerance"):
        stable_rank(gaussian(200, 300), start=kept, tolerance=-3)


def test_the_largest_numbers_there_are() -> None:
    matrix = torch.tensor([[1.7e308, 0.0], [0.0, -1.7e308]], dtype=torch.float64)
    found = stable_rank(matrix, method="exact")
    assert found.value == pytest.approx(2)
    assert found.top == pytest.approx(1.7e308)


def test_eight_bit_floats() -> None:
    matrix = gaussian(64, 80).to(torch.float8_e4m3fn)
    assert stable_rank(matrix).value == pytest.approx(true_stable_rank(matrix.double()))


@CUDA
def test_stacks_with_zeros_tiny_and_half_matrices_on_a_gpu() -> None:
    plain = gaussian(300, 400)
    given = [torch.zeros(300, 400), plain, plain * 1e-40, torch.zeros(300, 400), plain * 2]
    true = true_stable_rank(plain)
    for keep in (False, True):
        found = stable_ranks([matrix.cuda() for matrix in given], keep=keep)
        assert [r.value for r in found][::3] == [0.0, 0.0]
        for one in (found[1], found[4]):
            assert abs(one.value - true) <= one.bound
    large = gaussian(1100, 1500)
    for scale in (1e-38, 1e-40):
        found = stable_rank((large * scale).cuda())
        expected = true_stable_rank((large * scale).double() / scale)
        assert abs(found.value - expected) <= found.bound
    half = plain.bfloat16().cuda()
    kept = stable_rank(half, method="lanczos", keep=True)
    for _ in range(3):
        warm = stable_rank(half, start=kept)
        assert abs(warm.value - true_stable_rank(half)) <= warm.bound


@CUDA
@pytest.mark.parametrize("shape", [(300, 400), (1100, 1500)])
def test_small_and_large_on_a_gpu_that_allows_tf32(shape: tuple[int, int]) -> None:
    matrix = gaussian(*shape, seed=3).cuda()
    with _legacy(), torch.autocast("cuda", torch.bfloat16):
        found = stable_rank(matrix, method="lanczos")
    assert abs(found.value - true_stable_rank(matrix)) <= found.bound <= 1e-3 * found.value

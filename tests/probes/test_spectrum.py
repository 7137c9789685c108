"""Spectra against LAPACK's singular values, and their bounds against spectra made to break them.

The random start is Gaussian, which is the same in every orthonormal basis: a diagonal matrix
is as hard as any other with its singular values, and needs no reference.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from joma.probes.spectrum import (
    StableRank,
    effective_rank,
    energy,
    singular_values,
    stable_rank,
    stable_ranks,
)
from tests.probes._matrices import CUDA, diagonal, gaussian, true_stable_rank
from tests.two_processes import run_in_two_processes

DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


def spectra(side: int) -> dict[str, Tensor]:
    """Squared singular values that are hard for one reason each."""
    place = torch.arange(side, dtype=torch.float64)
    alone = torch.zeros(side, dtype=torch.float64)
    alone[0] = 1
    return {
        "rank one": alone,
        "zero": 0 * alone,
        "repeated top": torch.where(place < 5, 1.0, 0.9 * (1 - place / side)),
        "all equal": torch.ones(side, dtype=torch.float64),
        "all but equal": 1 - 1e-4 * place / side,
        "one a little above": torch.where(place < 1, 1.0, 0.99),
        "one hardly above": torch.where(place < 1, 1.0, 0.9995),
        "two hardly apart": torch.where(place < 2, 1 - 1e-4 * place, 0.99 * (1 - place / side)),
        "three hardly apart": torch.where(place < 3, 1 - 3e-5 * place, 0.9 * (1 - place / side)),
        "slow decay": 1 / (1 + place) ** 0.25,
        "power law": 1 / (1 + place),
        "exponential": torch.exp(-place),
        "two scales": torch.where(place < 3, 1.0, 1e-6),
        "step": torch.where(place < side // 2, 1.0, 0.0),
        "linear": 1 - place / side,
        "square root edge": (1 - place / side) ** (2 / 3),
        "tiny": 1e-24 / (1 + place),
        "huge": 1e24 / (1 + place),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 7), (40, 30), (300, 420), (420, 300)])
def test_the_value_is_lapacks_within_its_bound(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    matrix = gaussian(*shape).to(dtype)
    for method in ("auto", "lanczos", "exact"):
        found = stable_rank(matrix.to(device), method=method)
        assert abs(found.value - true_stable_rank(matrix)) <= found.bound
        assert found.bound <= 1e-3 * found.value


@pytest.mark.parametrize("name", spectra(4))
def test_bounds_hold_on_spectra_made_to_break_them(name: str) -> None:
    squares = spectra(400)[name]
    true = float(squares.sum() / squares[0]) if squares[0] > 0 else 0.0
    for seed in range(4):
        for dtype in (torch.float32, torch.float64):
            matrix = diagonal(squares.sqrt().to(dtype), 450)
            found = stable_rank(matrix, method="lanczos", seed=seed)
            assert abs(found.value - true) <= found.bound + 1e-6 * true, (name, seed, dtype)
            assert found.bound <= 1e-3 * found.value


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    top=st.integers(1, 20),
    decay=st.floats(0.0, 3.0),
    gap=st.floats(0.0, 0.5),
    side=st.integers(200, 330),
)
def test_bounds_hold_on_random_spectra(
    seed: int, top: int, decay: float, gap: float, side: int
) -> None:
    place = torch.arange(side, dtype=torch.float64)
    squares = torch.where(place < top, 1.0, (1 - gap) * (1 + place - top).clamp(min=1) ** -decay)
    found = stable_rank(diagonal(squares.sqrt()), method="lanczos", seed=seed)
    assert abs(found.value - float(squares.sum())) <= found.bound
    assert found.bound <= 1e-3 * found.value


def test_a_bound_that_ignored_the_chance_of_the_start_would_fail() -> None:
    # A single hidden direction the start hardly sees: the Rayleigh quotient alone misses it.
    squares = torch.full((600,), 0.97, dtype=torch.float64)
    squares[0] = 1
    start = torch.Generator().manual_seed(0)
    vector = torch.randn(600, generator=start, dtype=torch.float64)
    vector[0] = 0
    quotient = float((vector.square() * squares).sum() / vector.square().sum())
    assert abs(float(squares.sum()) / quotient - float(squares.sum())) > 1e-3 * float(squares.sum())
    found = stable_rank(diagonal(squares.sqrt()), method="lanczos")
    assert abs(found.value - float(squares.sum())) <= found.bound


def test_a_certificate_is_one_and_says_so() -> None:
    for seed, shape in enumerate([(1, 1), (5, 9), (200, 333), (1100, 1200)]):
        matrix = gaussian(*shape, seed)
        found = stable_rank(matrix, method="exact")
        assert found.certain
        assert abs(found.value - true_stable_rank(matrix)) <= found.bound
        assert found.bound <= 1e-6 * found.value
    assert not stable_rank(diagonal(torch.arange(1.0, 301) ** -0.5), method="lanczos").certain


def test_same_seed_same_bits_and_other_seeds_agree() -> None:
    matrix = gaussian(300, 500)
    one, again, other = (stable_rank(matrix, method="lanczos", seed=s) for s in (3, 3, 4))
    assert one == again
    assert abs(one.value - other.value) <= one.bound + other.bound


@pytest.mark.parametrize("moved", [0.0, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("method", ["lanczos", "exact"])
def test_a_warm_start_refreshes_the_value_and_widens_the_bound(moved: float, method: str) -> None:
    matrix, change = gaussian(320, 500, 1), gaussian(320, 500, 2)
    old = stable_rank(matrix, keep=True, method=method)
    new = matrix + change * (moved * matrix.norm() / change.norm())
    found = stable_rank(new, start=old)
    true = true_stable_rank(new)
    assert abs(found.value - true) <= found.bound
    assert abs(found.value - true) <= 1e-3 * true
    assert found.bound >= 0.9 * old.bound
    again = stable_rank(new, start=found)  # carries its anchor on
    assert again == found


def test_a_warm_start_sees_a_change_of_rank_one_its_vectors_know_nothing_of() -> None:
    matrix = gaussian(320, 500, 1)
    old = stable_rank(matrix, keep=True)
    spike = torch.outer(torch.eye(320)[7], torch.eye(500)[9]) * 100
    found = stable_rank(matrix + spike, start=old)
    assert abs(found.value - true_stable_rank(matrix + spike)) <= found.bound


def test_a_warm_start_needs_what_was_kept_of_the_same_shape() -> None:
    matrix = gaussian(300, 400)
    with pytest.raises(ValueError, match="keep=True"):
        stable_rank(matrix, start=stable_rank(matrix))
    old = stable_rank(matrix, keep=True)
    with pytest.raises(ValueError, match="same shape"):
        stable_rank(gaussian(301, 400), start=old)
    with pytest.raises(ValueError, match="same shape"):
        stable_rank(gaussian(300, 401), start=old)


def test_many_matrices_give_what_each_alone_gives() -> None:
    matrices = [gaussian(250, 300, 1), torch.zeros(250, 300), gaussian(40, 20), gaussian(250, 300)]
    for together, matrix in zip(stable_ranks(matrices), matrices, strict=True):
        alone = stable_rank(matrix)
        assert together.value == pytest.approx(alone.value, rel=1e-4)


def test_half_precision_is_not_widened_as_a_whole() -> None:
    matrix = gaussian(400, 30000).to(torch.bfloat16)
    found = stable_rank(matrix, method="lanczos")
    assert abs(found.value - true_stable_rank(matrix)) <= found.bound


@pytest.mark.parametrize("shape", [(30, 50), (300, 200)])
@pytest.mark.parametrize("method", ["lanczos", "exact"])
def test_singular_values_and_energy_are_lapacks(shape: tuple[int, int], method: str) -> None:
    values = torch.arange(1, min(shape) + 1, dtype=torch.float64) ** -0.7
    left = torch.linalg.qr(gaussian(shape[0], min(shape)).double()).Q
    right = torch.linalg.qr(gaussian(shape[1], min(shape)).double()).Q
    matrix = (left * values) @ right.mT
    found = singular_values(matrix.float(), 4, method=method)
    assert ((found.values - values[:4]).abs() <= found.bounds + 1e-6).all()
    assert (found.bounds <= 1e-3 * found.values).all()
    share = energy(matrix.float(), 4, method=method)
    true = float(values[:4].square().sum() / values.square().sum())
    assert abs(share.value - true) <= share.bound + 1e-6
    assert energy(matrix, min(shape), method="exact").value == pytest.approx(1.0)


def test_effective_rank_is_the_entropy_of_the_singular_values() -> None:
    matrix = gaussian(60, 90).double()
    values = np.linalg.svd(matrix.numpy(), compute_uv=False)
    share = values / values.sum()
    found = effective_rank(matrix)
    assert abs(found.value - math.exp(-(share * np.log(share)).sum())) <= found.bound + 1e-9
    assert found.bound < 1e-6
    assert effective_rank(torch.eye(17)).value == pytest.approx(17)
    low = effective_rank(torch.outer(torch.ones(9), torch.ones(12)))
    assert abs(low.value - 1) <= low.bound
    assert effective_rank(torch.zeros(3, 4)).value == 0


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        (torch.zeros(3), "two axes"),
        (torch.zeros(0, 3), "none empty"),
        (torch.full((3, 3), torch.nan), "finite"),
        (torch.full((300, 300), torch.inf), "finite"),
        (torch.zeros(3, 3, dtype=torch.complex64), "real"),
        (None, "torch.Tensor"),
    ],
)
def test_what_is_not_a_matrix_is_refused(matrix: Tensor, says: str) -> None:
    for method in ("auto", "lanczos", "exact"):
        with pytest.raises(ValueError, match=says):
            stable_rank(matrix, method=method)
    with pytest.raises(ValueError, match=says):
        singular_values(matrix, 1)


def test_bad_options_are_refused() -> None:
    matrix = torch.eye(4)
    with pytest.raises(ValueError, match="method must be one of auto, lanczos, exact"):
        stable_rank(matrix, method="svd")
    with pytest.raises(ValueError, match="tolerance"):
        stable_rank(matrix, tolerance=0)
    with pytest.raises(ValueError, match="from 1 to the shorter side, 4"):
        singular_values(matrix, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["lanczos", "exact"])
@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e30, 1e37])
def test_scale_does_not_matter(size: float, method: str, dtype: torch.dtype) -> None:
    matrix = diagonal(torch.arange(1.0, 301, dtype=torch.float64) ** -0.5)
    matrix = (matrix * size).to(dtype)
    found = stable_rank(matrix, method=method)
    stored = matrix.diagonal().double() / matrix.max().double()
    assert abs(found.value - float(stored.square().sum())) <= found.bound + 1e-9


@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e-160, 1e160, 1e300])
def test_scale_does_not_matter_in_float64(size: float) -> None:
    matrix = gaussian(300, 400).double()
    for method in ("lanczos", "exact"):
        found = stable_rank(matrix * size, method=method)
        assert abs(found.value - true_stable_rank(matrix)) <= found.bound
    assert float(singular_values(matrix * size, 1).values[0] / size) == pytest.approx(
        float(torch.linalg.svdvals(matrix)[0])
    )


def test_a_warm_start_may_change_the_type() -> None:
    matrix = gaussian(300, 400)
    for old, new in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        kept = stable_rank(matrix.to(old), keep=True)
        assert stable_rank(matrix.to(new), start=kept).value == pytest.approx(kept.value, rel=1e-4)


def test_arrays_and_whole_numbers_are_taken() -> None:
    array = np.arange(6).reshape(2, 3)
    assert stable_rank(array).value == pytest.approx(true_stable_rank(torch.tensor(array)))  # type: ignore[arg-type]


def _of_shards(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    matrix = gaussian(260, 401)
    found: list[float] = []
    for placement in (Shard(0), Shard(1), Replicate()):
        sharded = distribute_tensor(matrix, mesh, [placement])
        for method in ("lanczos", "exact"):
            result = stable_rank(sharded, method=method)
            found += [result.value, result.bound]
    np.save(Path(folder) / f"{rank}.npy", np.array(found))


def test_sharded_matrices_give_the_unsharded_answer(tmp_path: Path) -> None:
    run_in_two_processes(_of_shards, tmp_path)
    ranks = [np.load(tmp_path / f"{rank}.npy").reshape(-1, 2) for rank in (0, 1)]
    np.testing.assert_array_equal(*ranks)
    whole = stable_rank(gaussian(260, 401), method="lanczos")
    for value, bound in ranks[0]:
        assert abs(value - true_stable_rank(gaussian(260, 401))) <= bound
        assert value == pytest.approx(whole.value, rel=1e-5)


@CUDA
@pytest.mark.parametrize("name", spectra(4))
def test_large_matrices_on_a_gpu(name: str) -> None:
    squares = spectra(2048)[name]
    true = float(squares.sum() / squares[0]) if squares[0] > 0 else 0.0
    for matrix in (diagonal(squares.sqrt().float(), 2100), diagonal(squares.sqrt().float())):
        for turned in (matrix, matrix.mT):
            found = stable_rank(turned.cuda(), method="lanczos")
            assert abs(found.value - true) <= found.bound + 1e-6 * true
            assert found.bound <= 1e-3 * found.value


@CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_dense_matrices_on_a_gpu(dtype: torch.dtype) -> None:
    matrix = gaussian(1500, 3000).to(dtype).cuda()
    found: StableRank = stable_rank(matrix)
    assert abs(found.value - true_stable_rank(matrix)) <= found.bound <= 1e-3 * found.value
    kept = stable_rank(matrix, keep=True)
    assert stable_rank(matrix, start=kept).value == pytest.approx(found.value, rel=1e-3)


@CUDA
def test_a_weight_changed_in_place_on_a_gpu_is_seen_each_time() -> None:
    matrix, change = gaussian(1024, 1500).cuda(), gaussian(1024, 1500, seed=1).cuda()
    kept = stable_rank(matrix, keep=True)
    for _ in range(4):
        matrix += 1e-3 * change
        found = stable_rank(matrix, start=kept)
        assert abs(found.value - true_stable_rank(matrix)) <= found.bound
    twice = stable_rank(2 * matrix, start=kept)
    assert twice.frobenius == pytest.approx(2 * float(matrix.norm()), rel=1e-5)


@CUDA
def test_matrices_of_one_shape_and_any_scale_follow_each_other_on_a_gpu() -> None:
    plain = gaussian(1100, 1500)
    for scale in (1.0, 3.0, 1e-3, 1e6, 1.0, 1e-20, 1e15, 1.0):
        matrix = (plain * scale).cuda()
        found = stable_rank(matrix)
        assert abs(found.value - true_stable_rank(plain)) <= found.bound <= 1e-3 * found.value
        assert found.frobenius == pytest.approx(float(matrix.double().norm()), rel=1e-5)
    assert stable_rank(torch.zeros(1100, 1500).cuda()).value == 0
    spoilt = plain.cuda()
    spoilt[3, 4] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        stable_rank(spoilt)
    rank = stable_rank(plain.cuda()).value
    assert rank == pytest.approx(true_stable_rank(plain), rel=1e-3)


@pytest.mark.parametrize("r", [0, 9, 64, -1, True, 2.0, None])
def test_the_energy_of_values_that_are_not_known_is_refused(r) -> None:
    known = singular_values(gaussian(64, 80), 8)
    assert known.energy(8).certain
    with pytest.raises(ValueError, match=r"^r must be a whole number from 1 to 8, "):
        known.energy(r)

"""The GPU kernel against the blocked path in float64, which the CPU tests hold to the matrix."""

from typing import Any

import pytest
import torch
from torch import Tensor

from joma.probes import attention_statistics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _few_scores_are_the_kernels_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("joma.probes.attention.FEW", 0)


SIGHTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 70},
    "narrowest window": {"window": 1},
    "bidirectional window": {"causal": False, "window": 33},
    "negative scale": {"scale": -0.3},
}


def draw(seed: int, *shape: int, size: float = 1.0, dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=dice) * size).to(dtype).cuda()


def same(q: Tensor, k: Tensor, **given: Any) -> None:
    given |= {"first": 5, "last": 40, "received": True}
    found = attention_statistics(q, k, **given)
    expected = attention_statistics(q.double(), k.double(), **given)
    for name in ("logsumexp", "entropy", "first", "last", "received"):
        value = getattr(found, name)
        assert value.dtype == torch.float32  # by the kernel, or by the blocks in float32
        torch.testing.assert_close(value.double(), getattr(expected, name), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("shape", [(300, 300), (129, 515), (515, 129), (1, 77), (64, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS.keys())
def test_sights_and_types(sight: dict[str, Any], dtype: torch.dtype, shape: tuple[int, int]):
    q, k = draw(0, 2, 6, shape[0], 64, dtype=dtype), draw(1, 2, 3, shape[1], 64, dtype=dtype)
    same(q, k, **sight)
    padding = torch.rand(2, shape[1], generator=torch.Generator().manual_seed(2)) > 0.4
    padding[1] = False  # rows that see no key
    same(q, k, padding=padding.cuda(), **sight)


@pytest.mark.parametrize("head", [16, 32, 48, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_head_sizes(head: int, dtype: torch.dtype):
    same(draw(3, 1, 4, 200, head, dtype=dtype), draw(4, 1, 1, 200, head, dtype=dtype))


@pytest.mark.parametrize("size", [10.0, 100.0])
def test_peaked_rows(size: float):
    q, k = (draw(seed, 1, 2, 300, 64, dtype=torch.float32) for seed in (5, 6))
    found = attention_statistics(q * size, k)
    expected = attention_statistics(q.double() * size, k.double())
    torch.testing.assert_close(found.entropy.double(), expected.entropy, atol=2e-4, rtol=0)


def test_strides_are_taken_as_they_come():
    q, k = (draw(seed, 2, 100, 4, 64, dtype=torch.bfloat16).transpose(1, 2) for seed in (7, 8))
    same(q, k)
    same(q[..., ::2], k[..., ::2])


def test_memory_is_a_few_numbers_per_row():
    q, k = (draw(seed, 1, 16, 8192, 64, dtype=torch.bfloat16) for seed in (9, 10))
    attention_statistics(q, k, received=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention_statistics(q, k, first=4, last=64, received=True)
    assert torch.cuda.max_memory_allocated() - before < 16 * 2**20

"""The GPU kernels against torch in float64, which the CPU tests hold to the matrix."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from joma.kernels.choice import DoesNotFitError
from joma.probes import attention_statistics
from joma.probes.attention import AttentionStatistics

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

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


def without_waiting(q: Tensor, k: Tensor, **given: Any) -> AttentionStatistics:
    """The statistics; an error where the host has to wait for the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        return attention_statistics(q, k, **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def same(q: Tensor, k: Tensor, **given: Any) -> None:
    given |= {"first": 5, "last": 40, "received": True}
    found = without_waiting(q, k, **given)
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


@pytest.mark.parametrize("shape", [(304, 304), (129, 515), (515, 129), (1, 77)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["bool", "keys", "triangle", "heads", "added", "ALiBi", "lifted"])
def test_masks_and_softcaps(kind: str, causal: bool, dtype: torch.dtype, shape: tuple[int, int]):
    T, S = shape
    q, k = draw(11, 2, 6, T, 64, dtype=dtype), draw(12, 2, 3, S, 64, dtype=dtype)
    hidden = draw(13, 2, 6, T, S, dtype=torch.float32) < -0.5
    distance = (torch.arange(T)[:, None] + S - T - torch.arange(S)).abs().cuda()
    added = draw(14, 2, 1, T, S, dtype=dtype).masked_fill(hidden[:, :1], -torch.inf)
    mask = {
        "bool": ~hidden[:1, :1],
        "keys": ~hidden[:, :1, :1],
        "triangle": torch.ones(T, S, dtype=torch.bool, device="cuda").tril(S - T),
        "heads": ~hidden,
        "added": added,
        "ALiBi": -(distance * 0.3),
        "lifted": added.float() + 1e5 * (torch.arange(T) % 2)[:, None].cuda(),
    }[kind]
    rows = torch.rand(2, T, generator=torch.Generator().manual_seed(15)).cuda() > 0.3
    padding = (torch.arange(S) < S - S // 3).cuda()
    same(q, k, causal=causal, mask=mask)
    same(q, k, causal=causal, mask=mask, rows=rows, padding=padding, softcap=20.0)


def test_what_no_kernel_fits_is_computed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def does_not_fit(*_: Any) -> None:
        raise DoesNotFitError("out of resource: shared memory")

    q, k = (draw(seed, 1, 2, 200, 64, dtype=torch.bfloat16) for seed in (18, 19))
    expected = attention_statistics(q, k)
    monkeypatch.setattr("joma.kernels.choice.Fitting.launch", does_not_fit)
    for _ in range(2):
        found = attention_statistics(q, k)
        torch.testing.assert_close(found.entropy, expected.entropy, atol=1e-4, rtol=1e-4)
    assert caplog.text.count("cannot be computed by a kernel (out of resource") == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_key_reaches_only_rows_that_see_it(bad: float):
    q, k = (draw(seed, 1, 2, 200, 64, dtype=torch.float32) for seed in (16, 17))
    whole = attention_statistics(q, k)
    k[:, :, 150] = bad
    found = without_waiting(q, k)
    assert not found.entropy[..., :150].isnan().any()
    torch.testing.assert_close(found.entropy[..., :150], whole.entropy[..., :150])
    if bad != -torch.inf:
        assert found.entropy[..., 150:].isnan().all()


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

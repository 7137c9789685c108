"""Few scores on a CPU: every way in which they are computed, against the attention matrix."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from joma.common.float32 import float32_is_coarse
from joma.probes import _attention_few as few
from joma.probes import attention_statistics
from joma.probes.attention import AttentionStatistics
from tests.common.test_float32 import SWITCHES, as_torch_begins
from tests.probes.test_attention import close, draw, materialised

INF = math.inf


def measured(q: Tensor, k: Tensor, **given: Any) -> list[Tensor | None] | None:
    """What few scores give, and None where they are left to blocks."""
    names = {"padding": "padding_BS", "mask": "mask_BHTS", "rows": "rows_BT"}
    options = {"causal": True, "scale": q.shape[-1] ** -0.5}
    options |= {names.get(name, name): value for name, value in given.items()}
    return few.statistics(q, k, **options)


def whole(q: Tensor, k: Tensor, **given: Any) -> AttentionStatistics:
    found = measured(q, k, **given, first=3, last=4, received=True)
    assert found is not None
    logsumexp, entropy, *masses = found
    assert logsumexp is not None
    assert entropy is not None
    return AttentionStatistics(logsumexp, entropy, *masses)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 1, 9), (1, 4, 9), (3, 1, 9), (3, 4, 1), (3, 4, 9)]
)
@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_masks_of_every_shape(
    kind: str, shape: tuple[int, int, int], queries: int, heads: tuple[int, int], batch: int
):
    """Some are added by the product, and some after it, for they have not the shape of one."""
    q, k = draw(0, batch, heads[0], queries, 8), draw(1, batch, heads[1], 12, 8)
    mask = draw(2, min(shape[0], batch), min(shape[1], heads[0]), min(shape[2], queries), 12)
    mask = mask > -0.7 if kind == "bool" else mask.masked_fill(mask < -0.7, -INF)
    padding = draw(3, batch, 12) > -1.5
    for rest in ({"causal": False}, {}, {"padding": padding}, {"window": 5, "padding": padding}):
        given: dict[str, Any] = {**rest, "mask": mask}
        close(whole(q, k, **given), materialised(q, k, **given), 1e-5)
    close(whole(q, k, mask=mask, softcap=2.0), materialised(q, k, mask=mask, softcap=2.0), 1e-5)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "cut"])
@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_masks_that_do_not_follow_each_other_in_memory(kind: str, layout: str):
    q, k = draw(4, 2, 4, 9, 8), draw(5, 2, 4, 9, 8)
    mask = {
        "transposed": draw(6, 4, 2, 9, 9).permute(1, 0, 3, 2),
        "expanded": draw(6, 1, 1, 9, 9).expand(2, 4, 9, 9),
        "cut": draw(6, 2, 4, 12, 15)[..., 3:, ::2][..., :9, :].repeat(1, 1, 1, 2)[..., :9],
    }[layout]
    mask = mask > -0.7 if kind == "bool" else mask
    kept = mask.clone()
    close(whole(q, k, mask=mask), materialised(q, k, mask=mask), 1e-5)
    assert torch.equal(mask, kept)


@pytest.mark.parametrize("largest", [1.0, 23.9, 24.1, 200.0, 399.0])
@pytest.mark.parametrize("keys", [40, 1024, 1500])
@pytest.mark.parametrize("sight", ["all", "causal", "padding"])
def test_entropies_are_right_however_large_the_scores(sight: str, keys: int, largest: float):
    """On both sides of the scores and keys up to which the shorter formula is used."""
    q, k = draw(7, 1, 1, 20, 16), draw(8, 1, 1, keys, 16)
    k = k * 0.02 + q.mean(-2, keepdim=True)  # large scores that differ little cancel most
    scale = largest / few.bound(q, k, 1.0)
    given: dict[str, Any] = {"scale": scale, "causal": sight == "causal"}
    if sight == "padding":
        given["padding"] = draw(9, 1, keys) > -1
    found, truth = whole(q, k, **given), materialised(q, k, **given)
    assert (found.entropy - truth.entropy).abs().max() < (1e-5 if largest < 100 else 5e-5)
    assert (found.entropy >= 0).all()


@pytest.mark.parametrize("size", [5.0, 20.0])
def test_entropies_of_rows_on_one_key_are_not_negative(size: float):
    q = draw(10, 1, 2, 50, 32)
    k = q * size / 6
    found = whole(q, k, causal=False)
    assert (found.entropy >= 0).all()
    close(found, materialised(q, k, causal=False), 1e-5)


def test_one_key_has_no_entropy():
    found = whole(draw(11, 1, 2, 5, 8), draw(12, 1, 2, 5, 8), window=1)
    assert not found.entropy.any()
    assert not found.entropy.signbit().any()
    large = whole(draw(11, 1, 2, 5, 8) * 5, draw(12, 1, 2, 5, 8) * 5, window=1)
    assert not large.entropy.signbit().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [{}, {"softcap": 5.0}, {"causal": False}])
def test_more_keys_than_are_converted_at_once(dtype: torch.dtype, given: dict[str, Any]):
    q, k = draw(13, 2, 4, 2, 64, dtype=dtype), draw(14, 2, 2, 4096, 64, dtype=dtype)
    mask = draw(15, 2, 1, 1, 4096)
    close(whole(q, k, **given), materialised(q, k, **given), 2e-5)
    padding = mask[:, 0, 0] > -1
    close(whole(q, k, **given, mask=mask), materialised(q, k, **given, mask=mask), 2e-5)
    given = {**given, "padding": padding}
    close(whole(q, k, **given), materialised(q, k, **given), 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "queries", "keys"), [((1, 1), 33, 8000), ((4, 2), 6, 11_000), ((8, 8), 32, 1030)]
)
@pytest.mark.parametrize("kind", ["all", "causal", "bool", "numbers", "padding", "softcap"])
def test_scores_in_memory_that_is_kept(
    kind: str, heads: tuple[int, int], queries: int, keys: int, dtype: torch.dtype, monkeypatch
):
    """Keys of half precision are converted a few at a time, here of some heads and of all."""
    monkeypatch.setattr(few, "_CONVERTED_AT_MOST", 1 << 16)
    q = draw(26, 1, heads[0], queries, 32).to(dtype)
    k = draw(27, 1, heads[1], keys, 32).to(dtype)
    mask = draw(28, 1, 1, queries, keys)
    given: dict[str, Any] = {
        "all": {"causal": False},
        "causal": {},
        "bool": {"mask": mask > -1},
        "numbers": {"mask": mask.masked_fill(mask < -1, -INF), "causal": False},
        "padding": {"padding": torch.arange(keys)[None] > keys // 3},
        "softcap": {"softcap": 3.0},
    }[kind]
    assert q.shape[:3].numel() * keys > few._CACHED
    first = whole(q, k, **given)
    before = [part.clone() for part in vars(first).values()]
    close(first, materialised(q.float(), k.float(), **given), 2e-5)
    whole(q.flip(2), k.flip(2), **given)  # the next call uses the same memory
    assert all(map(torch.equal, before, vars(first).values()))


@pytest.mark.parametrize(("queries", "keys"), [(15, 32_558), (3, 200_000)])
def test_long_rows_are_as_right_as_in_blocks(queries: int, keys: int):
    q, k = 5 * draw(49, 1, 1, queries, 64), draw(50, 1, 1, keys, 64)
    found, right = whole(q, k, causal=False), materialised(q.double(), k.double(), causal=False)
    assert float((found.entropy - right.entropy).abs().max()) <= 1e-5
    assert float((found.logsumexp - right.logsumexp).abs().max()) <= 1e-5


def test_threads_do_not_share_memory():
    pairs = [(draw(29 + n, 1, 8, 64, 32), draw(39 + n, 1, 8, 1030, 32)) for n in range(4)]
    right = [whole(q, k).entropy for q, k in pairs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = pool.map(lambda pair: whole(*pair).entropy, pairs)
            assert all(map(torch.equal, right, found))


@pytest.mark.parametrize("keys", [300, 4096, 4097])
@pytest.mark.parametrize("layout", ["one after the other", "heads apart"])
@pytest.mark.parametrize("outlier", [1.0, 20.0])
def test_the_bound_is_one(keys: int, layout: str, outlier: float):
    """Also where norms of several keys together are taken for it."""
    q, k = draw(16, 3, 2, 64), draw(17, 3, keys, 64)
    k[1, keys // 2] *= outlier
    if layout == "heads apart":
        k = k.transpose(0, 1).contiguous().transpose(0, 1)
    exact = 0.125 * float(q.norm(dim=-1).max()) * float(k.norm(dim=-1).max())
    found = few.bound(q, k, -0.125)
    assert exact * (1 - 1e-6) <= found <= 2.001 * exact
    if found > few.SINGLE:  # then the exact one decides
        assert found == pytest.approx(exact)


@pytest.mark.parametrize("bad", [math.nan, INF, -INF, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_bound_does_not_hide_what_is_no_number(bad: float, dtype: torch.dtype):
    q, k = draw(18, 1, 2, 64).to(dtype), draw(19, 2, 4096, 64).to(dtype)
    assert few.bound(q, k, 1.0) <= few.SINGLE
    k[1, 7, 3] = bad
    assert not few.bound(q, k, 1.0) <= few.SINGLE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_the_bound_is_one_for_every_type(size: float, dtype: torch.dtype):
    q, k = draw(20, 1, 2, 64).to(dtype), (size * draw(21, 2, 4096, 64)).to(dtype)
    exact = (q.double() @ k.double().mT).abs().max()
    norms = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    found = few.bound(q, k, 1.0)
    assert exact <= found
    assert norms * 0.99 <= found <= (8 if found <= few.SINGLE else 1.01) * norms


def test_what_is_left_to_blocks():
    q, k = draw(20, 1, 2, 9, 8), draw(21, 1, 2, 9, 8)
    assert measured(q, k) is not None
    assert measured(q.double(), k) is None
    assert measured(q, k.double()) is None
    assert measured(q * 100, k * 100) is None
    assert measured(q[:, :, :0], k) is None
    assert measured(draw(22, 1, 2, 600, 8), draw(23, 1, 2, 600, 8)) is None
    assert measured(draw(22, 1, 2, 600, 8), draw(23, 1, 2, 600, 8), causal=False) is not None
    assert measured(draw(22, 1, 3, 600, 8), draw(23, 1, 3, 600, 8), causal=False) is None
    mask = torch.zeros(1, 1, 9, 9)
    for added in (500.0, -500.0, 1e30, 1e35, -9e29, INF, math.nan):
        row = mask.clone()
        row[:, :, 3] = added
        assert measured(q, k, mask=row) is None, added
    for added in (-1e30, -4e30, -1e38, -INF):  # a row that sees no key
        row = mask.clone()
        row[:, :, 3] = added
        assert whole(q, k, mask=row).logsumexp[0, :, 3].isneginf().all(), added


def test_precision_of_other_devices_does_not_matter():
    with as_torch_begins():
        for use in SWITCHES["cuda"]:
            use()
        assert float32_is_coarse()
        assert not float32_is_coarse("cpu")
        assert measured(draw(24, 1, 2, 9, 8), draw(25, 1, 2, 9, 8)) is not None
    with as_torch_begins():
        for use in SWITCHES["mkldnn bf16"]:
            use()
        assert float32_is_coarse("cpu")
        assert measured(draw(24, 1, 2, 9, 8), draw(25, 1, 2, 9, 8)) is None


def test_sequences_of_queries_are_not_taken_for_heads_of_keys():
    q, k = draw(26, 2, 2, 7, 8), draw(27, 2, 7, 8)
    found = attention_statistics(q, k)
    close(found, materialised(q, k.expand(2, 2, 7, 8)), 1e-5)


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_under_another_default_type(default: torch.dtype):
    q, k = draw(28, 2, 4, 9, 8), draw(29, 2, 2, 9, 8)
    mask, padding = draw(30, 9, 9), draw(31, 2, 9) > -1
    cases: list[dict[str, Any]] = [{}, {"mask": mask}, {"mask": mask > 0}, {"padding": padding}]
    expected = [attention_statistics(q, k, **given, received=True) for given in cases]
    torch.set_default_dtype(default)
    try:
        found = [attention_statistics(q, k, **given, received=True) for given in cases]
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.entropy, other.entropy)
        assert one.received is not None
        assert other.received is not None
        assert torch.equal(one.received, other.received)

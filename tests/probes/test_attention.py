import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from joma.kernels import attention as torch_attention
from joma.probes.attention import (
    AttentionAccumulator,
    AttentionStatistics,
    attention_entropy,
    attention_statistics,
)
from tests.common.test_float32 import SWITCHES, as_torch_begins

INF = math.inf


def draw(seed: int, *shape: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def seen_keys(
    T: int,
    S: int,
    *,
    causal: bool = True,
    window: int | None = None,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Which keys each query sees, key by key from the definition; broadcasts to (..., H, T, S)."""
    seen = torch.zeros(T, S, dtype=torch.bool)
    for i in range(T):
        for j in range(S):
            behind = i + S - T - j
            far = window is not None and (behind if causal else abs(behind)) >= window
            seen[i, j] = not far and (not causal or behind >= 0)
    if padding is not None:
        seen = seen & padding[..., None, None, :]
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    return seen


def materialised(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    first: int = 3,
    last: int = 4,
    **sight: Any,
) -> AttentionStatistics:
    """The same from the attention matrix, in float64; additive masks must hide by −∞."""
    T, S = q.shape[-2], k.shape[-2]
    q, k = q.double(), k.double()
    if q.ndim > 2:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = sight.get("mask")
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.double()
    scores = scores.masked_fill(~seen_keys(T, S, **sight), -INF)
    logsumexp = scores.logsumexp(-1)
    p = torch.where(logsumexp.isneginf().unsqueeze(-1), 0.0, scores.softmax(-1))
    behind = torch.arange(T)[:, None] + S - T - torch.arange(S)
    return AttentionStatistics(
        logsumexp,
        -torch.special.xlogy(p, p).sum(-1),
        p[..., :first].sum(-1),
        (p * ((behind >= 0) & (behind < last))).sum(-1),
        p.sum(-2),
    )


def close(found: AttentionStatistics, expected: AttentionStatistics, atol: float = 1e-4) -> None:
    for name in ("logsumexp", "entropy", "first", "last", "received"):
        value, truth = getattr(found, name), getattr(expected, name)
        if value is not None:
            torch.testing.assert_close(
                value.double(), truth, atol=atol, rtol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.fixture(params=["one block", "small blocks"])
def any_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with blocks so small that rows and heads are cut many times, unevenly."""
    if request.param == "small blocks":
        monkeypatch.setattr(torch_attention, "_FEWEST_ROWS", 4)
        monkeypatch.setattr(torch_attention, "_CPU_BLOCK", 1)


SIGHTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 5},
    "bidirectional window": {"causal": False, "window": 4},
    "narrowest window": {"window": 1},
    "window wider than all": {"window": 1000},
}


@pytest.mark.usefixtures("any_blocks")
@pytest.mark.parametrize("shape", [(23, 23), (9, 31), (31, 9), (1, 17)], ids=str)
@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS.keys())
def test_against_the_attention_matrix(sight: dict[str, Any], shape: tuple[int, int]):
    T, S = shape
    q, k = draw(0, 2, 6, T, 8, size=2), draw(1, 2, 3, S, 8, size=2)
    found = attention_statistics(q, k, **sight, first=3, last=4, received=True)
    close(found, materialised(q, k, **sight), 1e-5)
    assert found.entropy.dtype == torch.float32


@pytest.mark.usefixtures("any_blocks")
@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS.keys())
@pytest.mark.parametrize("kind", ["bool", "numbers", "per head"])
def test_masks_and_padding(sight: dict[str, Any], kind: str):
    q, k = draw(2, 2, 4, 21, 8), draw(3, 2, 2, 21, 8)
    padding = torch.ones(2, 21, dtype=torch.bool)
    padding[0, :6] = False
    padding[1, 15:] = False
    allowed = draw(4, 2, 1 if kind != "per head" else 4, 21, 21) > -0.5
    allowed[:, :, 7] = False
    mask = allowed if kind == "bool" else draw(5, 2, 1, 21, 21).masked_fill(~allowed, -INF)
    found = attention_statistics(
        q, k, **sight, padding=padding, mask=mask, first=3, last=4, received=True
    )
    close(found, materialised(q, k, **sight, padding=padding, mask=mask), 1e-5)
    assert found.logsumexp[:, :, 7].isneginf().all()


@pytest.mark.usefixtures("any_blocks")
@pytest.mark.parametrize("size", [1, 5, 30, 200])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_peaked_rows(size: float, offset: float):
    """Scores of up to some ten thousand, where rounding in float32 alone would be 10⁻³."""
    q, k = draw(6, 3, 90, 64, size=size) + offset, draw(7, 3, 90, 64, size=size) - offset
    found = attention_statistics(q, k, first=3, last=4, received=True)
    close(found, materialised(q, k), 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype):
    q, k = draw(8, 4, 50, 64, size=3, dtype=dtype), draw(9, 2, 50, 64, size=3, dtype=dtype)
    found = attention_statistics(q, k, first=3, last=4, received=True)
    close(found, materialised(q, k), 1e-5)
    assert found.entropy.dtype == torch.float32


def test_double_precision_stays():
    q, k = draw(10, 50, 16, dtype=torch.float64), draw(11, 50, 16, dtype=torch.float64)
    found = attention_statistics(q, k, first=3, last=4, received=True)
    close(found, materialised(q, k), 1e-12)
    assert found.entropy.dtype == torch.float64
    assert found.entropy.shape == (50,)


@pytest.mark.usefixtures("any_blocks")
@pytest.mark.parametrize("scale", [0.0, 0.3, -0.7])
def test_scale_and_softcap(scale: float):
    q, k = draw(12, 3, 20, 8, size=3), draw(13, 3, 20, 8, size=3)
    mask = draw(14, 20, 20)
    given: dict[str, Any] = {"scale": scale, "softcap": 1.5, "mask": mask}
    close(attention_statistics(q, k, **given, received=True), materialised(q, k, **given), 1e-5)
    entropy = attention_entropy(q, k, **given)
    assert torch.equal(entropy, attention_statistics(q, k, **given).entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_lowest_number_of_a_mask_hides_like_minus_infinity(dtype: torch.dtype):
    q, k = draw(15, 2, 12, 8), draw(16, 2, 12, 8)
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    hidden[3] = True
    low = torch.zeros(12, 12, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    found = attention_statistics(q, k, causal=False, mask=low, first=3, last=4, received=True)
    close(found, materialised(q, k, causal=False, mask=~hidden), 1e-6)
    # softmax of the sum would spread row 3 over all keys; the mask allows it none
    assert found.logsumexp[:, 3].isneginf().all()
    assert not found.entropy[:, 3].any()


def test_a_large_negative_bias_is_no_mask():
    """A row all of whose keys get −10⁹ is softmax of its scores all the same."""
    q, k = draw(17, 4, 8), draw(18, 6, 8)
    mask = torch.full((4, 6), -1e9)
    found = attention_statistics(q, k, causal=False, mask=mask)
    plain = materialised(q, k, causal=False)
    torch.testing.assert_close(found.entropy.double(), plain.entropy, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("any_blocks")
@pytest.mark.parametrize("added", [1e4, -1e4, 1e6])
def test_large_numbers_of_a_mask_cost_no_accuracy(added: float):
    q, k = draw(35, 2, 4, 21, 8, size=2), draw(36, 2, 2, 21, 8, size=2)
    mask = torch.zeros(21, 21)
    mask[::2] = added
    mask = mask.masked_fill(draw(37, 21, 21) < -1, -INF)
    found = attention_statistics(q, k, mask=mask, first=3, last=4, received=True)
    close(found, materialised(q, k, mask=mask), 1e-6)


@pytest.mark.usefixtures("any_blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 3, 9])
def test_few_queries_behind_a_window(queries: int, causal: bool):
    q, k = draw(42, 2, 4, queries, 8), draw(43, 2, 2, 40, 8)
    padding, mask = draw(44, 2, 40) > -1, draw(45, 2, 1, queries, 40)
    given: dict[str, Any] = {"causal": causal, "window": 6, "padding": padding, "mask": mask}
    close(attention_statistics(q, k, **given, last=4), materialised(q, k, **given), 1e-5)
    with_first = attention_statistics(q, k, **given, first=3, received=True)
    close(with_first, materialised(q, k, **given), 1e-5)


@pytest.mark.parametrize("largest", [1.0, 24.0, 200.0, 399.0, 401.0])
@pytest.mark.parametrize("keys", [40, 1500, 32_558])
@pytest.mark.parametrize("sight", ["all", "causal", "padding"])
def test_entropies_are_right_however_large_the_scores(sight: str, keys: int, largest: float):
    """On both sides of the scores up to which float32 is used, and in long rows."""
    q, k = draw(7, 1, 1, 20, 16), draw(8, 1, 1, keys, 16)
    k = k * 0.02 + q.mean(-2, keepdim=True)  # large scores that differ little cancel most
    scale = largest / float(q.norm(dim=-1).max() * k.norm(dim=-1).max())
    given: dict[str, Any] = {"scale": scale, "causal": sight == "causal"}
    if sight == "padding":
        given["padding"] = draw(9, 1, keys) > -1
    found, truth = attention_statistics(q, k, **given), materialised(q, k, **given)
    assert (found.entropy - truth.entropy).abs().max() < (1e-5 if largest < 100 else 5e-5)
    assert (found.entropy >= 0).all()


def test_one_key_has_no_entropy():
    found = attention_entropy(draw(11, 1, 2, 5, 8) * 5, draw(12, 1, 2, 5, 8) * 5, window=1)
    assert (found < 1e-30).all()
    assert not found.signbit().any()


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
    close(attention_statistics(q, k, mask=mask), materialised(q, k, mask=mask), 1e-5)
    assert torch.equal(mask, kept)


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("size", [12, 300])
def test_queries_that_are_not_real_reach_nothing(bad: float, size: int):
    q, k = draw(60, 1, 2, size, 8), draw(61, 1, 2, size, 8)
    rows = torch.ones(1, size, dtype=torch.bool)
    rows[:, size // 3] = False
    expected = attention_statistics(q, k, rows=rows, first=3, last=4, received=True)
    q[:, :, size // 3] = bad
    found = attention_statistics(q, k, rows=rows, first=3, last=4, received=True)
    for name in ("logsumexp", "entropy", "first", "last", "received"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


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


def test_rows_without_a_key():
    q, k = draw(19, 5, 8), draw(20, 3, 8)
    found = attention_statistics(q, k, first=1, last=1, received=True)  # places −2, −1 come first
    assert found.logsumexp.isneginf().tolist() == [True, True, False, False, False]
    for values in (found.entropy, found.first, found.last):
        assert values is not None
        assert not values[:2].any()
    assert found.received is not None
    torch.testing.assert_close(found.received.sum(), torch.tensor(3.0))
    nothing = attention_statistics(q, k[:0], received=True)
    assert nothing.logsumexp.isneginf().all()
    assert nothing.received is not None
    assert nothing.received.shape == (0,)
    assert attention_entropy(q[:0], k).shape == (0,)
    assert attention_entropy(draw(0, 0, 2, 5, 8), draw(0, 0, 2, 5, 8)).shape == (0, 2, 5)


def test_keys_nobody_sees_receive_exactly_nothing():
    q, k = draw(21, 2, 10, 8), draw(22, 2, 10, 8)
    padding = torch.arange(10) > 3
    found = attention_statistics(q, k, causal=False, padding=padding, received=True)
    assert found.received is not None
    assert not found.received[:, :4].any()
    assert (found.received[:, 4:] > 0).all()


def test_what_is_not_a_number_is_not_hidden():
    q, k = draw(23, 6, 8), draw(24, 6, 8)
    q[2, 0] = math.nan
    entropy = attention_entropy(q, k)
    assert entropy.isnan().tolist() == [False, False, True, False, False, False]


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 4},
    "bidirectional window": {"causal": False, "window": 4},
    "padding": {"causal": False, "padding": torch.arange(21) != 13},
    "mask": {"causal": False, "mask": torch.arange(21) != 13},
    "numbers": {"causal": False, "mask": torch.zeros(21).masked_fill(torch.arange(21) == 13, -INF)},
}


@pytest.mark.usefixtures("any_blocks")
@pytest.mark.parametrize("sight", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("bad", [math.nan, INF, -INF, 1e35])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bad_key_reaches_only_rows_that_see_it(
    sight: dict[str, Any], bad: float, dtype: torch.dtype
):
    q, k = draw(38, 2, 21, 8, dtype=dtype), draw(39, 2, 21, 8, dtype=dtype)
    truth = materialised(q, k, **sight)
    k[:, 13] = bad
    found = attention_statistics(q, k, **sight, first=3, last=4, received=True)
    hidden = torch.ones(21, dtype=torch.bool)
    if "window" in sight or not sight:
        hidden = ~seen_keys(21, 21, **sight)[:, 13]
    assert hidden.sum() >= 13
    for name in ("logsumexp", "entropy", "first", "last"):
        torch.testing.assert_close(
            getattr(found, name)[:, hidden].double(),
            getattr(truth, name)[:, hidden],
            atol=1e-5,
            rtol=1e-7,
        )
    if hidden.all():
        assert found.received is not None
        torch.testing.assert_close(found.received.double(), truth.received, atol=1e-5, rtol=0)
    elif not math.isfinite(bad):  # and it does reach those
        assert found.entropy[:, ~hidden].isnan().any()


def test_what_a_mask_adds_to_a_key_not_seen_is_nothing():
    q, k = draw(40, 9, 8), draw(41, 9, 8)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for added in (math.nan, INF, 1e38):
        mask = torch.zeros(9, 9).masked_fill(future, added)
        close(attention_statistics(q, k, mask=mask), materialised(q, k), 1e-6)


@pytest.mark.usefixtures("any_blocks")
@pytest.mark.parametrize("added", [1e30, 3e30, 4e30, 8e30, 1.2e31, -4e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mask_cannot_undo_what_hides_a_key(added: float, dtype: torch.dtype):
    """Where hiding is adding −4·10³⁰, adding as much to the same key must not show it again."""
    q, k = draw(46, 2, 3, 21, 8, dtype=dtype), draw(47, 2, 3, 21, 8, dtype=dtype)
    padding = draw(48, 2, 21) > -1
    for sight in ({}, {"window": 4}, {"causal": False, "window": 4}, {"causal": False}):
        given: dict[str, Any] = {**sight, "padding": padding}
        seen = seen_keys(21, 21, **given)
        mask = torch.zeros(2, 1, 21, 21, dtype=dtype).masked_fill(~seen.view(2, 1, 21, 21), added)
        found = attention_statistics(q, k, **given, mask=mask, first=3, last=4, received=True)
        close(found, materialised(q, k, **given), 1e-5)


@pytest.mark.usefixtures("any_blocks")
@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.floats(-1e3, 1e3),
)
@settings(max_examples=25, deadline=None)
def test_equal_keys_give_the_logarithm_of_their_number(
    length: int, heads: int, dtype: torch.dtype, score: float
):
    q = torch.full((heads, length, 4), 1.0, dtype=dtype)
    k = torch.full((heads, length, 4), score, dtype=dtype)
    number = torch.arange(1, length + 1)
    found = attention_statistics(q, k, last=1, received=True)
    for head in range(heads):
        torch.testing.assert_close(
            found.entropy[head].double(), number.double().log(), atol=1e-6, rtol=0
        )
    assert found.last is not None
    torch.testing.assert_close(found.last[0].double(), 1 / number.double(), atol=1e-6, rtol=0)
    bidirectional = attention_entropy(q, k, causal=False)
    assert (bidirectional - math.log(length)).abs().max() < 1e-6


@given(st.integers(0, 10**6), st.integers(1, 30), st.sampled_from([(4, 4), (6, 2), (4, 1)]))
@settings(max_examples=25, deadline=None)
def test_laws(seed: int, length: int, heads: tuple[int, int]):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, heads[0], length, 8, generator=generator)
    k = torch.randn(2, heads[1], length, 8, generator=generator)
    found = attention_statistics(q, k, first=length, last=length, received=True)
    group = heads[0] // heads[1]
    # a head hears nothing of the others, nor a sequence of the others
    order = torch.randperm(heads[1], generator=generator)
    mixed_q = q.unflatten(1, (heads[1], group))[:, order].flatten(1, 2)
    mixed = attention_entropy(mixed_q, k[:, order])
    torch.testing.assert_close(
        mixed.unflatten(1, (heads[1], group)),
        found.entropy.unflatten(1, (heads[1], group))[:, order],
    )
    alone = attention_entropy(q[1], k[1])
    torch.testing.assert_close(alone, found.entropy[1])
    # a query does not see what comes later
    torch.testing.assert_close(
        attention_entropy(q[..., :1, :], k[..., :1, :]), found.entropy[..., :1]
    )
    # a constant added to a row's scores changes its log-sum-exp alone
    shift = torch.randn(2, 1, length, 1, generator=generator)
    shifted = attention_statistics(q, k, mask=shift)
    torch.testing.assert_close(shifted.entropy, found.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(shifted.logsumexp, found.logsumexp + shift.squeeze(-1))
    # the order of keys does not matter where all are seen
    keys = torch.randperm(length, generator=generator)
    torch.testing.assert_close(
        attention_entropy(q, k[:, :, keys], causal=False),
        attention_entropy(q, k, causal=False),
        atol=1e-5,
        rtol=0,
    )
    # all mass is somewhere, and none is lost
    ones = torch.ones_like(found.entropy)
    assert found.first is not None
    assert found.last is not None
    assert found.received is not None
    torch.testing.assert_close(found.first, ones)
    torch.testing.assert_close(found.last, ones)
    torch.testing.assert_close(found.received.sum(-1), ones.sum(-1))
    bound = torch.arange(1, length + 1).log() + 1e-5
    assert ((found.entropy >= -1e-6) & (found.entropy <= bound)).all()


def test_leading_axes_broadcast():
    q, k = draw(25, 5, 1, 4, 7, 8), draw(26, 3, 2, 7, 8)
    padding = draw(27, 5, 3, 7) > -1
    mask = draw(28, 3, 1, 1, 7)
    found = attention_statistics(q, k, padding=padding, mask=mask, received=True)
    assert found.entropy.shape == (5, 3, 4, 7)
    q, k = q.expand(5, 3, 4, 7, 8), k.expand(5, 3, 2, 7, 8)
    close(found, materialised(q, k, padding=padding, mask=mask), 1e-5)


def test_no_gradient_no_change_and_no_other_precision():
    q, k = draw(29, 2, 9, 8).requires_grad_(), draw(30, 2, 9, 8).requires_grad_()
    kept = q.detach().clone(), k.detach().clone()
    plain = attention_statistics(q, k, received=True)
    assert not plain.entropy.requires_grad
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = attention_statistics(q, k, received=True)
    assert plain.received is not None
    assert under.received is not None
    assert torch.equal(plain.entropy, under.entropy)
    assert torch.equal(plain.received, under.received)
    with torch.inference_mode():
        assert torch.equal(attention_entropy(q, k), plain.entropy)


@pytest.mark.parametrize("switch", ["legacy medium", "cuda", "mkldnn bf16"])
def test_coarse_products_are_avoided(switch: str):
    q, k = draw(31, 2, 40, 32, size=3), draw(32, 2, 40, 32, size=3)
    with as_torch_begins():
        for use in SWITCHES[switch]:
            use()
        # What only rounds products of a GPU leaves those of a CPU in float32, not in float64.
        close(attention_statistics(q, k, received=True), materialised(q, k), 1e-5)


def test_memory_is_far_below_the_attention_matrix(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    q, k = draw(33, 4, 2048, 8), draw(34, 1, 2048, 8)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        attention_statistics(q, k, causal=False, first=1, last=1, received=True)
    allocated = [abs(getattr(event, "cpu_memory_usage", 0)) for event in profile.events() or ()]
    assert max(allocated) < 4 * 2048 * 2048 * 4 / 20


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "sizes of heads": ({"k": torch.zeros(2, 5, 7)}, "of one D"),
    "number of heads": ({"k": torch.zeros(3, 5, 8)}, "multiple of the heads"),
    "axes": ({"k": torch.zeros(5, 8)}, "shapes"),
    "integers": ({"q": torch.zeros(4, 5, 8, dtype=torch.int64)}, "q must be floating-point"),
    "list": ({"q": [[1.0]]}, "q must be a torch.Tensor"),
    "leading axes": ({"q": torch.zeros(3, 4, 5, 8), "k": torch.zeros(2, 2, 5, 8)}, "broadcast"),
    "scale": ({"scale": math.nan}, "scale must be a finite number"),
    "softcap": ({"softcap": 0.0}, "softcap must be a finite number above 0"),
    "window": ({"window": 0}, "window must be a whole number"),
    "first": ({"first": 0}, "first must be"),
    "last": ({"last": 1.5}, "last must be"),
    "padding type": ({"padding": torch.ones(5)}, "padding must be bool"),
    "padding shape": ({"padding": torch.ones(6, dtype=torch.bool)}, "padding must broadcast"),
    "mask type": ({"mask": torch.ones(5, 5, dtype=torch.int64)}, "mask must be bool"),
    "mask shape": ({"mask": torch.ones(4, 4, dtype=torch.bool)}, "mask must broadcast"),
    "device": ({"mask": torch.ones(5, 5, dtype=torch.bool, device="meta")}, "meta"),
}


@pytest.mark.parametrize(("given_", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(given_: dict[str, Any], message: str):
    arguments: dict[str, Any] = {"q": torch.zeros(4, 5, 8), "k": torch.zeros(2, 5, 8)} | given_
    with pytest.raises(ValueError, match=message):
        attention_statistics(**arguments)


def test_accumulator_is_the_mean_over_all_rows():
    batches = [(draw(i, 2, 6, 9 + i, 8), draw(i + 50, 2, 2, 9 + i, 8)) for i in range(3)]
    padding = [torch.arange(9 + i) >= i for i in range(3)]  # the first i rows see no key
    whole = AttentionAccumulator()
    rows: list[Tensor] = []
    firsts: list[Tensor] = []
    for i, (q, k) in enumerate(batches):
        statistics = attention_statistics(q, k, padding=padding[i], first=2, last=3)
        whole.update(statistics)
        truth = materialised(q, k, padding=padding[i].expand(2, -1), first=2, last=3)
        assert truth.first is not None
        rows.append(truth.entropy[:, :, i:].transpose(0, 1).flatten(1))
        firsts.append(truth.first[:, :, i:].transpose(0, 1).flatten(1))
    means, entropy = whole.compute(), torch.cat(rows, 1)
    assert means.rows.tolist() == [2 * (9 + 9 + 9)] * 6
    torch.testing.assert_close(means.entropy, entropy.mean(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(means.effective, entropy.exp().mean(1), atol=1e-5, rtol=0)
    assert means.first is not None
    torch.testing.assert_close(means.first, torch.cat(firsts, 1).mean(1), atol=1e-6, rtol=0)
    layer = means.layer
    torch.testing.assert_close(layer.entropy, entropy.mean(), atol=1e-6, rtol=0)
    torch.testing.assert_close(layer.effective, entropy.exp().mean(), atol=1e-5, rtol=0)
    assert layer.rows == 6 * 54
    assert layer.last is not None


def test_accumulator_of_one_head_and_its_errors():
    accumulator = AttentionAccumulator()
    with pytest.raises(ValueError, match="call update first"):
        accumulator.compute()
    accumulator.update(attention_statistics(draw(0, 3, 8), draw(1, 0, 8)))
    with pytest.raises(ValueError, match="sees a key"):
        accumulator.compute()
    accumulator.update(attention_statistics(torch.zeros(3, 8), torch.zeros(3, 8)))
    means = accumulator.compute()
    assert means.entropy.item() == pytest.approx(math.log(6) / 3)
    assert means.effective.item() == pytest.approx(2)
    assert means.first is None
    with pytest.raises(ValueError, match="1 heads on cpu as before, got 2"):
        accumulator.update(attention_statistics(draw(0, 2, 3, 8), draw(1, 2, 3, 8)))
    with pytest.raises(ValueError, match="must hold rows, entropy, effective as before"):
        accumulator.update(attention_statistics(draw(0, 3, 8), draw(1, 3, 8), first=1))

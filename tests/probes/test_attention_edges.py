"""Queries that do not count, sinks, numbers that are none, and tensors of other kinds."""

from typing import Any

import pytest
import torch

from joma.probes.attention import (
    AttentionAccumulator,
    attention_entropy,
    attention_statistics,
    with_sinks,
)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize("head", [1, 4])
def test_rows_are_nan_where_softmax_is(which: str, value: float, head: int):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 6, head, generator=generator) for _ in "qk")
    if head == 1:  # then one −∞ hides every score of a row
        q, k = q.abs(), k.abs()
    {"q": q, "k": k}[which][0, 0, 1, 0] = value
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    p = (q @ k.mT / head**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    found = attention_statistics(q, k, first=1)
    truth = -torch.special.xlogy(p, p).sum(-1)
    torch.testing.assert_close(found.entropy, truth, atol=1e-5, rtol=0, equal_nan=True)
    assert found.first is not None
    torch.testing.assert_close(found.first, p[..., 0], atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.to_sparse(), "q must be a dense tensor, got a sparse_coo one"),
        (lambda x: x.to("meta"), "q must hold data, got a tensor on the meta device"),
        (lambda x: x.to(torch.float8_e4m3fn), "got torch.float8_e4m3fn: convert it"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "got torch.qint8"),
        (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "q must be a dense tensor, got a nes"),
    ],
)
def test_tensors_of_other_kinds_are_refused(make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        attention_entropy(make(torch.ones(2, 3, 4)), torch.ones(2, 3, 4))


@pytest.mark.parametrize("received", [False, True])
def test_queries_that_are_not_real_see_no_key(received: bool):
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(3, 4, 130, 8, generator=generator) for _ in "qk")
    rows = torch.rand(3, 130, generator=generator) < 0.6
    whole = attention_statistics(q, k, first=2, last=3, received=received)
    found = attention_statistics(q, k, rows=rows, first=2, last=3, received=received)
    hidden = ~rows[:, None].expand(3, 4, 130)
    assert found.logsumexp[hidden].isneginf().all()
    for name in ("entropy", "first", "last"):
        assert torch.equal(getattr(found, name), getattr(whole, name).masked_fill(hidden, 0))
    means = AttentionAccumulator()
    means.update(found)
    assert means.compute().rows.tolist() == [int(rows.sum())] * 4
    if received:
        seen = torch.ones(130, 130, dtype=torch.bool).tril()
        p = (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        assert found.received is not None
        truth = (p * rows[:, None, :, None]).sum(-2)
        torch.testing.assert_close(found.received, truth, atol=1e-4, rtol=0)


def test_a_sink_is_one_more_outcome():
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 3, 6, 8, generator=generator) for _ in "qk")
    sinks = torch.tensor([-40.0, 0.5, 90.0])  # nothing, something, nearly everything
    rows = torch.ones(2, 6, dtype=torch.bool)
    rows[1, 4:] = False
    found = with_sinks(attention_statistics(q, k, rows=rows, first=2), sinks)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    scores = (q @ k.mT / 8**0.5).double().masked_fill(~seen, -torch.inf)
    column = sinks.double()[None, :, None, None].expand(2, 3, 6, 1)
    p = torch.cat((scores, column), -1).softmax(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    real = rows[:, None].expand(2, 3, 6)
    torch.testing.assert_close(found.entropy[real].double(), entropy[real], atol=1e-6, rtol=0)
    assert found.first is not None
    mass = p[..., :2].sum(-1)
    torch.testing.assert_close(found.first[real].double(), mass[real], atol=1e-6, rtol=0)
    assert found.logsumexp[~real].isneginf().all()
    assert (found.entropy[~real] == 0).all()

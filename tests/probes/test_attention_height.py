from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from joma.probes import attention_by_height

LEVELS = 4


def hierarchy() -> Tensor:
    """Eight leaves of a binary tree of height 3, and padding (token 8)."""
    table = torch.full((9, 9), -1)
    for a in range(8):
        for b in range(8):
            table[a, b] = (a ^ b).bit_length()
    return table


def batch(seed: int, members: int = 3, size: int = 4, length: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(members, size, length, length, generator=generator, dtype=torch.float64)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    tokens = torch.randint(9, (members, size, length), generator=generator)
    tokens[..., -1] %= 8
    return scores.masked_fill(~causal, -torch.inf).softmax(-1), tokens


def plain(attention: Tensor, tokens: Tensor, heights: Tensor):
    """One member by three loops: mass, uniform, uncounted, rows."""
    mass, uniform, uncounted, rows = np.zeros(LEVELS), np.zeros(LEVELS), 0.0, 0
    for sequence, sentence in zip(attention.tolist(), tokens.tolist(), strict=True):
        for query, row in enumerate(sequence):
            if sentence[query] == 8:
                continue
            rows += 1
            for key in range(query + 1):
                height = int(heights[sentence[query], sentence[key]])
                if height < 0:
                    uncounted += row[key]
                else:
                    mass[height] += row[key]
                    uniform[height] += 1 / (query + 1)
    return mass / rows, uniform / rows, uncounted / rows, rows


def test_against_three_loops():
    attention, tokens = batch(0)
    result = attention_by_height(attention, tokens, hierarchy(), LEVELS)
    assert result.mass.shape == result.uniform.shape == result.ratio.shape == (3, LEVELS)
    for member in range(3):
        mass, uniform, uncounted, rows = plain(attention[member], tokens[member], hierarchy())
        np.testing.assert_allclose(result.mass[member], mass, atol=1e-14)
        np.testing.assert_allclose(result.uniform[member], uniform, atol=1e-14)
        np.testing.assert_allclose(result.ratio[member], mass / uniform, atol=1e-12)
        assert result.uncounted[member] == pytest.approx(uncounted)
        assert result.queries[member] == rows
    torch.testing.assert_close(result.mass.sum(-1) + result.uncounted, torch.ones(3).double())


def test_uniform_attention_is_chance():
    _, tokens = batch(1)
    row = torch.ones(6, 6).tril() / torch.arange(1, 7).unsqueeze(-1)
    result = attention_by_height(row.expand(3, 4, 6, 6), tokens, hierarchy())
    torch.testing.assert_close(result.ratio, torch.ones(3, LEVELS).double(), atol=1e-6, rtol=0)


def test_attention_to_siblings_is_seen_as_such():
    tokens = torch.tensor([[0, 4, 1]])
    attention = torch.tensor([[[1.0, 0, 0], [0, 1, 0], [1, 0, 0]]])
    result = attention_by_height(attention, tokens, hierarchy(), LEVELS)
    np.testing.assert_allclose(result.mass, [2 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(result.uniform * 18, [6 + 3 + 2, 2, 0, 3 + 2])
    assert result.ratio[1] == pytest.approx(3)
    assert result.ratio[2].isnan()


def test_tokens_may_be_shared_by_members_and_levels_read_from_the_table():
    attention, tokens = batch(2)
    shared = attention_by_height(attention, tokens[0], hierarchy())
    alone = attention_by_height(attention[1], tokens[0], hierarchy(), LEVELS)
    torch.testing.assert_close(shared.mass[1], alone.mass)


def test_rows_of_padding_may_hold_anything():
    attention, tokens = batch(3)
    clean = attention_by_height(attention, tokens, hierarchy())
    attention[tokens == 8] = torch.nan
    assert torch.equal(attention_by_height(attention, tokens, hierarchy()).mass, clean.mass)


def test_chance_is_over_the_keys_that_can_be_seen():
    attention, tokens = batch(4)
    everywhere = attention.new_full(attention.shape, 1 / 6)
    visible = torch.ones(6, 6, dtype=torch.bool)
    result = attention_by_height(everywhere, tokens, hierarchy(), visible=visible)
    torch.testing.assert_close(result.mass, result.uniform)
    assert (result.uniform > 0).any()
    seen = (tokens != 8).unsqueeze(-2) & visible.tril()
    masked = torch.where(seen, attention, 0.0)
    masked = masked / masked.sum(-1, keepdim=True)
    hidden = attention_by_height(masked, tokens, hierarchy(), visible=seen)
    assert torch.equal(hidden.uncounted, torch.zeros(3).double())
    torch.testing.assert_close(hidden.uniform.sum(-1), torch.ones(3).double())


def test_a_member_does_not_see_its_neighbours():
    attention, tokens = batch(5)
    other, other_tokens = batch(6)
    other[1], other_tokens[1] = attention[1], tokens[1]
    first = attention_by_height(attention, tokens, hierarchy())
    second = attention_by_height(other, other_tokens, hierarchy())
    assert torch.equal(first.mass[1], second.mass[1])
    assert not torch.equal(first.mass[0], second.mass[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": torch.ones(6, 6)}, "attention must have at least 3 axes"),
        ({"attention": torch.ones(3, 4, 6, 5)}, r"of shape \(..., B, T, T\)"),
        ({"attention": torch.eye(6, dtype=torch.int64).expand(3, 4, 6, 6)}, "floating-point"),
        ({"attention": torch.eye(6).expand(3, 4, 6, 6) * 0.9}, "sums to 0.9"),
        ({"attention": torch.full((3, 4, 6, 6), torch.nan)}, "sums to nan"),
        ({"attention": torch.eye(6).flip(0).expand(3, 4, 6, 6)}, "0 on keys that are not visible"),
        ({"tokens": torch.zeros(3, 4, 5, dtype=torch.int64)}, "tokens of shape"),
        ({"tokens": torch.zeros(3, 4, 6)}, "tokens must be integers"),
        ({"tokens": torch.full((6,), 9)}, "tokens must lie from 0 to 8"),
        ({"tokens": torch.full((6,), 8)}, "got only padding"),
        ({"heights": torch.zeros(9, 8, dtype=torch.int64)}, "square"),
        ({"heights": torch.full((9, 9), -1)}, "one of them at least 0"),
        ({"heights": torch.full((9, 9), -2)}, "from -1 below"),
        ({"levels": 3}, "levels = 3"),
        ({"levels": 0}, "levels must be a whole number from 1"),
        ({"visible": torch.ones(6, 6)}, "visible must be bool"),
        ({"visible": torch.ones(5, 5, dtype=torch.bool)}, "visible of shape"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str):
    attention, tokens = batch(7)
    arguments: dict[str, Any] = {
        "attention": attention,
        "tokens": tokens,
        "heights": hierarchy(),
    } | changes
    with pytest.raises(ValueError, match=message):
        attention_by_height(**arguments)

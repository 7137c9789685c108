import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from joma.probes.embedding import (
    BINS,
    EmbeddingOverlapAccumulator,
    embedding_overlap,
)

FIELDS = ("mean", "standard_error", "signed", "pairs", "rows", "seen", "zeros", "exact")


def vectors(seed: int, rows: int = 40, size: int = 6, offset: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=generator, dtype=torch.float64) + offset


def plain(rows: Tensor, tokens: list[int] | None = None) -> np.ndarray:
    """Cosines by two loops, over pairs of vectors that are not zero and of different tokens."""
    lists = rows.double().tolist()
    found = []
    for i, one in enumerate(lists):
        for j, other in enumerate(lists[:i]):
            if tokens is not None and tokens[i] == tokens[j]:
                continue
            norms = math.hypot(*one) * math.hypot(*other)
            if norms > 0:
                found.append(sum(a * b for a, b in zip(one, other, strict=True)) / norms)
    return np.array(found)


def test_against_two_loops():
    rows = vectors(0)
    rows[[3, 17]] = 0
    cosines = plain(rows)
    result = embedding_overlap(rows, quantiles=(0, 0.25, 0.5, 0.99, 1))
    assert result.mean == pytest.approx(np.abs(cosines).mean(), abs=1e-12)
    assert result.signed == pytest.approx(cosines.mean(), abs=1e-12)
    assert (result.pairs, result.rows, result.seen, result.zeros) == (len(cosines), 38, 40, 2)
    assert result.exact
    assert result.standard_error == 0
    for share, value in result.quantiles.items():
        expected = np.quantile(np.abs(cosines), share, method="inverted_cdf")
        assert value == pytest.approx(expected, abs=1 / BINS)


def test_more_rows_than_a_block():
    rows = vectors(1, 1500, 3)
    units = rows / rows.norm(dim=1, keepdim=True)
    cosines = (units @ units.T)[*np.triu_indices(1500, 1)]
    result = embedding_overlap(rows.float())
    assert result.pairs == 1500 * 1499 // 2
    assert result.mean == pytest.approx(float(cosines.abs().mean()), abs=1e-6)
    assert result.signed == pytest.approx(float(cosines.mean()), abs=1e-6)


def test_vectors_of_one_token_are_no_pair():
    rows, tokens = vectors(2), torch.arange(40) % 7
    cosines = plain(rows, tokens.tolist())
    result = embedding_overlap(rows, tokens=tokens)
    assert result.pairs == len(cosines) < 40 * 39 // 2
    assert result.mean == pytest.approx(np.abs(cosines).mean())
    sampled = embedding_overlap(rows, tokens=tokens, exact_up_to=2, pairs=2**16)
    assert sampled.pairs == pytest.approx(2**16 * len(cosines) / (40 * 39 // 2), rel=0.02)
    assert abs(sampled.mean - result.mean) < 5 * sampled.standard_error


def test_orthogonal_vectors_do_not_overlap_and_parallel_ones_do():
    assert embedding_overlap(torch.eye(5)).mean == 0
    same = embedding_overlap(torch.tensor([[1.0, 1], [-2, -2], [3, 3]]))
    assert same.mean == pytest.approx(1)
    assert same.signed == pytest.approx(-1 / 3)
    assert same.quantiles[0.5] == pytest.approx(1, abs=1 / BINS)


def test_the_standard_error_of_a_sample_is_what_it_says():
    """Over 200 samples, the mean misses by one standard error in root mean square."""
    rows = vectors(4, 60)
    true = embedding_overlap(rows).mean
    results = [embedding_overlap(rows, exact_up_to=10, pairs=500, seed=seed) for seed in range(200)]
    misses = np.array([(result.mean - true) / result.standard_error for result in results])
    assert not any(result.exact for result in results)
    assert np.sqrt((misses**2).mean()) == pytest.approx(1, abs=0.2)


def test_the_standard_error_of_a_sample_of_vectors_is_what_it_says():
    """Over 200 samples of 40 among 200 vectors, which lie along one direction more or less."""
    rows = vectors(5, 200, 4) * torch.tensor([3.0, 1, 1, 1])
    true = embedding_overlap(rows).mean
    misses = []
    for seed in range(200):
        accumulator = EmbeddingOverlapAccumulator(keep=40, seed=seed)
        accumulator.update(rows)
        result = accumulator.compute()
        assert (result.rows, result.seen, result.exact) == (40, 200, False)
        misses.append((result.mean - true) / result.standard_error)
    assert np.sqrt(np.square(misses).mean()) == pytest.approx(1, abs=0.2)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 30), keep=st.integers(2, 40))
@example(seed=0, cut=11, keep=20)
def test_batches_accumulate_to_the_whole(seed: int, cut: int, keep: int):
    rows, tokens = vectors(seed % 1000, 30), torch.arange(30) % 9
    whole = EmbeddingOverlapAccumulator(keep=keep, seed=seed)
    whole.update(rows.view(5, 6, -1), tokens.view(5, 6))
    parts = EmbeddingOverlapAccumulator(keep=keep, seed=seed)
    parts.update(rows[:cut], tokens[:cut])
    parts.update(rows[cut:], tokens[cut:])
    try:
        expected = whole.compute()
    except ValueError:  # a small sample may hold one token alone
        with pytest.raises(ValueError, match="different tokens"):
            parts.compute()
        return
    for name in FIELDS:
        assert getattr(parts.compute(), name) == pytest.approx(getattr(expected, name))


@settings(max_examples=15, deadline=None)
@given(cut=st.integers(1, 29))
def test_an_accumulator_that_keeps_all_agrees_with_the_function(cut: int):
    rows = vectors(6, 30)
    rows[4] = 0
    parts = EmbeddingOverlapAccumulator(seed=1)
    parts.update(rows[:cut])
    parts.update(rows[cut:])
    expected = embedding_overlap(rows)
    for name in FIELDS:
        assert getattr(parts.compute(), name) == pytest.approx(getattr(expected, name))


def test_a_sample_is_kept_of_all_batches():
    accumulator = EmbeddingOverlapAccumulator(keep=100, seed=1)
    accumulator.update(torch.ones(500, 3))
    accumulator.update(-torch.ones(500, 3))
    result = accumulator.compute()
    assert (result.rows, result.seen) == (100, 1000)
    assert abs(result.signed) < 0.1  # about half of each: cosines of 1 and −1 in equal parts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_out_of_the_range_of_squares(dtype: torch.dtype):
    large = 2.0**100 if dtype != torch.float16 else 2.0**15
    small = 2.0**-120 if dtype != torch.float16 else 2.0**-14
    rows = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 1.0]]) / 4
    rows = (rows * torch.tensor([[large], [small], [1.0]])).to(dtype)
    result = embedding_overlap(rows)
    assert result.mean == pytest.approx((0.6 + 0.8 + 0) / 3, abs=1e-3)


def test_a_sample_depends_on_the_seed_alone():
    rows = vectors(7, 100)
    one, two = (embedding_overlap(rows, exact_up_to=2, pairs=50, seed=seed) for seed in (1, 2))
    again = embedding_overlap(rows, exact_up_to=2, pairs=50, seed=1)
    assert one.mean == again.mean != two.mean


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embeddings": [[1.0, 2.0]]}, "embeddings must be a torch.Tensor, got a list"),
        ({"embeddings": torch.ones(5)}, "at least 2 axes"),
        ({"embeddings": torch.ones(2, 3, 4)}, "two axes"),
        ({"embeddings": torch.ones(5, 3, dtype=torch.int64)}, "floating-point"),
        ({"embeddings": torch.ones(5, 0)}, "must have components"),
        ({"embeddings": torch.ones(1, 3)}, "two vectors that are not zero"),
        ({"embeddings": torch.zeros(5, 3)}, "got none among 5"),
        ({"embeddings": torch.full((5, 3), torch.nan)}, "finite"),
        ({"tokens": torch.zeros(40, dtype=torch.int64)}, "different tokens"),
        ({"tokens": torch.zeros(39, dtype=torch.int64)}, r"tokens must have shape \(40,\)"),
        ({"tokens": torch.zeros(40)}, "tokens must be integers"),
        ({"exact_up_to": 1}, "exact_up_to must be a whole number from 2"),
        ({"pairs": 1.5}, "pairs must be a whole number"),
        ({"quantiles": (0.5, 1.5)}, "quantiles must lie from 0 to 1, got 1.5"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str):
    arguments: dict[str, Any] = {"embeddings": vectors(8)} | changes
    with pytest.raises(ValueError, match=message):
        embedding_overlap(**arguments)


def test_accumulators_say_what_is_missing():
    accumulator = EmbeddingOverlapAccumulator()
    with pytest.raises(ValueError, match="call update first"):
        accumulator.compute()
    accumulator.update(vectors(9))
    with pytest.raises(ValueError, match="as before"):
        accumulator.update(vectors(9, size=5))
    with pytest.raises(ValueError, match="every update or in none"):
        accumulator.update(vectors(9), torch.arange(40))

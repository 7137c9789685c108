import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from joma.probes.contexts import TopContexts, TopContextsAccumulator, top_contexts

Listed = list[list[tuple[float, int, int]]]


def hidden(seed: int, windows: int = 6, length: int = 5, nodes: int = 4) -> Tensor:
    """Few different values of either sign, so that there are ties, and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-3, 4, (windows, length, nodes), generator=generator).float()
    return values * torch.tensor([1.0, 1e-30, 1e30, -0.5])


def plain(values: Tensor, k: int) -> Listed:
    """By sorting all contexts of each node, and keeping one of each window."""
    found: Listed = []
    for node in range(values.shape[-1]):
        contexts = [
            (value, window, position)
            for window, row in enumerate(values[..., node].tolist())
            for position, value in enumerate(row)
            if not math.isnan(value)
        ]
        contexts.sort(key=lambda c: (-c[0], c[1], c[2]))
        seen: set[int] = set()
        contexts = [c for c in contexts if not (c[1] in seen or seen.add(c[1]))]
        contexts += [(-math.inf, -1, -1)] * k
        found.append(contexts[:k])
    return found


def listed(result: TopContexts) -> Listed:
    columns = (result.values.tolist(), result.windows.tolist(), result.positions.tolist())
    return [list(zip(*rows, strict=True)) for rows in zip(*columns, strict=True)]


@pytest.mark.parametrize("k", [1, 4, 40])
def test_against_sorting(k: int):
    values = hidden(0)
    result = top_contexts(values, k)
    assert listed(result) == plain(values, k)
    assert result.nodes.tolist() == [0, 1, 2, 3]


def test_chosen_nodes_and_positions():
    values = hidden(1)
    counted = torch.tensor([False, True, True, False, True])
    result = top_contexts(values, 3, nodes=[2, 0], counted=counted)
    masked = values.masked_fill(~counted.unsqueeze(-1), torch.nan)
    assert listed(result) == plain(masked[..., [2, 0]], 3)
    assert result.nodes.tolist() == [2, 0]
    by_window = torch.arange(6).unsqueeze(-1) % 2 == torch.arange(5) % 2
    result = top_contexts(values, 3, counted=by_window)
    masked = values.masked_fill(~by_window.unsqueeze(-1), torch.nan)
    assert listed(result) == plain(masked, 3)


def test_a_window_without_positions_that_count_gives_no_context():
    counted = torch.zeros(6, 5, dtype=torch.bool)
    counted[2, 3] = True
    values = hidden(2)
    result = top_contexts(values, 2, counted=counted)
    assert listed(result)[0] == [(values[2, 3, 0], 2, 3), (-math.inf, -1, -1)]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(1, 5), k=st.integers(1, 8))
def test_batches_accumulate_to_the_whole(seed: int, cut: int, k: int):
    values = hidden(seed)
    accumulator = TopContextsAccumulator(k)
    accumulator.update(values[:cut])
    accumulator.update(values[cut:])
    assert listed(accumulator.compute()) == plain(values, k)


def test_what_is_kept_does_not_grow():
    accumulator = TopContextsAccumulator(3)
    for seed in range(20):
        accumulator.update(hidden(seed))
    result = accumulator.compute()
    assert result.values.shape == (4, 3)
    whole = torch.cat([hidden(seed) for seed in range(20)])
    assert listed(result) == plain(whole, 3)
    assert int(result.windows.max()) < 120


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": [[[1.0]]]}, "activations must be a torch.Tensor"),
        ({"activations": torch.ones(3, 4)}, "at least 3 axes"),
        ({"activations": torch.ones(3, 4, 0)}, "none of them 0"),
        ({"activations": torch.ones(3, 4, 2, dtype=torch.int64)}, "floating-point"),
        ({"activations": torch.full((3, 4, 2), torch.nan)}, "finite"),
        ({"k": 0}, "k must be a whole number from 1"),
        ({"nodes": [4]}, "nodes must lie from 0 to 3, got 4"),
        ({"nodes": [-1]}, "nodes must be from 0 on, got -1"),
        ({"nodes": []}, "at least one node"),
        ({"nodes": [0.5]}, "nodes must be integers"),
        ({"counted": torch.ones(5)}, "counted must be bool"),
        ({"counted": torch.ones(6, dtype=torch.bool)}, "counted must be bool of shape"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str):
    arguments: dict[str, Any] = {"activations": hidden(4), "k": 2} | changes
    with pytest.raises(ValueError, match=message):
        top_contexts(**arguments)


def test_accumulators_say_what_does_not_fit():
    accumulator = TopContextsAccumulator(2)
    with pytest.raises(ValueError, match="call update first"):
        accumulator.compute()
    accumulator.update(hidden(5))
    with pytest.raises(ValueError, match="as before"):
        accumulator.update(hidden(5)[..., :3])

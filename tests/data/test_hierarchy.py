"""Latent hierarchies against an expansion in plain Python, and the laws of their batches."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from joma.data import Joined, LatentHierarchy, hierarchies
from tests.data._cuda import cuda, replays, same

few = settings(max_examples=25, deadline=None)


def plain(children: int, sizes: list[int], seed: int) -> list[list[set[int]]]:
    """For each class, what occurs in it: the class, its uppermost latents, …, its tokens."""
    members = []
    for level in range(len(sizes) - 1):
        sets = hierarchies.level_sets([seed], level, sizes[level], sizes[level + 1], children)[0]
        members.append([{int(i) for i in row.nonzero().flatten()} for row in sets])
    classes = []
    for label in range(sizes[-1]):
        occurring = [{label}]
        for level in reversed(members):
            below = set()
            for one in occurring[-1]:
                below |= level[one]
            occurring.append(below)
        classes.append(occurring)
    return classes


@given(
    st.integers(1, 3),
    st.lists(st.integers(4, 9), min_size=1, max_size=3),
    st.integers(10, 40),
    st.integers(-(2**63), 2**63 - 1),
)
@few
def test_expansions_are_those_of_plain_python(
    children: int, latents: list[int], tokens: int, seed: int
):
    sizes = [tokens, *latents, 6]
    assume(all(math.comb(lower, children) >= upper for lower, upper in pairwise(sizes)))
    source = LatentHierarchy(6, children, latents, tokens, 30, seeds=(5, seed))
    assert source.vocabulary == tokens + 1
    for label, occurring in enumerate(plain(children, sizes, seed)):
        found = sorted(token + 1 for token in occurring[-1])
        expected = [0] * (30 - len(found)) + found
        assert source.expansions[1, label].tolist() == expected
        for value, latent in zip(source.latent_values, reversed(occurring[:-1]), strict=True):
            assert {int(i) for i in value[1, label].nonzero().flatten()} == latent
    used = [set().union(*sets) for sets in zip(*plain(children, sizes, seed), strict=True)]
    unused = [int(count[1]) for count in source.unused]
    assert unused == [size - len(s) for size, s in zip(latents, used[-2:0:-1], strict=True)]


@given(st.integers(0, 5), st.integers(5, 9), st.data())
@few
def test_sets_are_different_and_of_their_size(size: int, population: int, data: st.DataObject):
    count = data.draw(st.integers(1, math.comb(population, size)))
    sets = hierarchies.distinct_sets(3, "name", population, size, count)
    assert sets.shape == (count, population)
    assert (sets.sum(1) == size).all()
    assert len({tuple(row) for row in sets.tolist()}) == count


def test_every_set_is_equally_likely():
    first = [hierarchies.distinct_sets(seed, "name", 5, 2, 3)[0].tolist() for seed in range(1000)]
    counts = np.unique(np.array(first), axis=0, return_counts=True)[1]
    assert counts.size == 10
    assert stats.chisquare(counts).pvalue > 1e-4


def source(**changes: Any) -> LatentHierarchy:
    arguments: dict[str, Any] = {"classes": 20, "children": 2, "seeds": (3, 4, 5)}
    return LatentHierarchy(**(arguments | changes))


def test_a_sample_shows_its_class():
    table = source()
    batch = table.sample(50, 7)
    assert batch.tokens.shape == (3, 50, 30)
    assert [latent.shape for latent in batch.latents] == [(3, 50, 10), (3, 50, 20), (3, 50, 20)]
    assert batch.weights is None
    assert batch.leading == 1
    for member in range(3):
        for row in range(50):
            label = int(batch.labels[member, row])
            assert torch.equal(batch.tokens[member, row], table.expansions[member, label])
            for latent, value in zip(batch.latents, table.latent_values, strict=True):
                assert torch.equal(latent[member, row], value[member, label])
            assert batch.latents[-1][member, row].nonzero().flatten().tolist() == [label]


def test_labels_are_uniform_and_differ_by_step_and_member():
    table = source()
    labels = table.sample(100_000, 0).labels.numpy()
    for row in labels:
        assert stats.chisquare(np.bincount(row, minlength=20)).pvalue > 1e-4
    assert abs((labels[0] == labels[1]).mean() - 1 / 20) < 4.5 * np.sqrt(0.05 * 0.95 / 100_000)
    later = table.sample(100_000, 1).labels.numpy()
    assert abs((labels[0] == later[0]).mean() - 1 / 20) < 4.5 * np.sqrt(0.05 * 0.95 / 100_000)


def test_the_seed_and_the_step_decide_all():
    table = source()
    batch = table.sample(40, 9)
    assert same(batch, table.sample(40, torch.tensor(9)))
    assert same(batch, source().sample(40, 9))
    assert not torch.equal(batch.labels, table.sample(40, 10).labels)
    assert not torch.equal(table.expansions[0], table.expansions[1])
    alone = source(seeds=(4,)).sample(40, 9)
    assert torch.equal(alone.tokens[0], batch.tokens[1])
    assert torch.equal(alone.labels[0], batch.labels[1])


@given(st.integers(1, 300), st.integers(0, 1000))
@few
def test_distinct_is_the_sample_counted(batch: int, step: int):
    table = source()
    sampled, counted = table.sample(batch, step), table.distinct(batch, step)
    cut = 30 - counted.tokens.shape[-1]
    assert counted.leading == cut + 1
    padded = torch.nn.functional.pad(counted.tokens, (cut, 0))
    assert torch.equal(padded, table.expansions)
    assert counted.tokens[..., 0].eq(0).all()
    assert counted.tokens[..., 1].any()
    assert counted.weights is not None
    for member in range(3):
        tally = np.bincount(sampled.labels[member].numpy(), minlength=20)
        np.testing.assert_allclose(counted.weights[member], tally / batch, rtol=1e-6)


def logits(tokens_bt: torch.Tensor, leading: int) -> torch.Tensor:
    """The last position of a random causal transformer of two layers without positions."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5

    x_btd = matrix(100, 16)[tokens_bt] * 10
    seen = torch.ones(tokens_bt.shape[1], tokens_bt.shape[1], dtype=torch.bool).tril()
    for _ in range(2):
        scores = (x_btd @ matrix(16, 16)) @ (x_btd @ matrix(16, 16)).mT
        scores[..., 0] += math.log(leading)
        attention = scores.masked_fill(~seen, -math.inf).softmax(-1)
        x_btd = torch.nn.functional.layer_norm(x_btd + attention @ (x_btd @ matrix(16, 16)), (16,))
        x_btd = x_btd + (x_btd @ matrix(16, 32)).relu() @ matrix(32, 16)
    return x_btd[:, -1] @ matrix(16, 20)


def test_distinct_gives_a_transformer_the_loss_of_the_sample():
    table = source()
    sampled, counted = table.sample(128, 5), table.distinct(128, 5)
    assert counted.weights is not None
    for member in range(3):
        whole = torch.nn.functional.cross_entropy(
            logits(sampled.tokens[member], 1), sampled.labels[member]
        )
        for leading, right in ((counted.leading, True), (1, False)):
            each = torch.nn.functional.cross_entropy(
                logits(counted.tokens[member], leading), counted.labels[member], reduction="none"
            )
            error = abs(float((each * counted.weights[member]).sum() - whole))
            assert (error < 1e-12) == right


def test_a_class_that_does_not_fit_and_an_empty_batch_are_named():
    longest = int((source().expansions > 0).sum(-1).max())
    with pytest.raises(ValueError, match=rf"^length must be at least {longest}, .* got 5$"):
        source(length=5)
    with pytest.raises(ValueError, match=r"^batch must be at least 1, got 0$"):
        source().distinct(0, 0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("classes must be at least 1", {"classes": 0}),
        ("latents must hold", {"latents": ()}),
        ("latents of level 0 must be at most 3", {"tokens": 3}),
        ("seeds must hold", {"seeds": ()}),
    ],
)
def test_bad_arguments_are_named(name: str, changes: dict[str, Any]):
    with pytest.raises(ValueError, match=f"^{name}"):
        source(**changes)


@cuda
@pytest.mark.parametrize("draw", ["sample", "distinct"])
def test_a_captured_graph_replays(draw: str):
    table = source(device="cuda")
    assert replays(lambda step: getattr(table, draw)(64, step))


def test_joined_members_have_the_batches_they_have_apart():
    parts = [
        LatentHierarchy(20, children, latents, seeds=seeds)
        for children, latents, seeds in ((2, (10, 20), (1, 2)), (3, (20, 30), (7, 8, 9)))
    ]
    joined = Joined(parts)
    together = joined.distinct(128, 5)
    assert together.latents == ()
    for members, part in zip(joined.members, parts, strict=True):
        apart = part.distinct(128, 5)
        assert together.weights is not None
        assert apart.weights is not None
        assert torch.equal(together.weights[members], apart.weights)
        assert torch.equal(together.labels[members], apart.labels)
        length = apart.tokens.shape[-1]
        tokens = together.tokens[members]
        assert torch.equal(tokens[..., -length:], apart.tokens)
        assert not tokens[..., : tokens.shape[-1] - length].any()
        # Cut off and paddings in front make the same sequence.
        assert together.leading + tokens.shape[-1] == apart.leading + length

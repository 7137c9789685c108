"""Batches from binary latent trees against the theory's exact probabilities."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.data import HBLT, Batch, hierarchies
from joma.theory import hblt
from joma.theory.hblt import Tree
from tests.data._cuda import cuda, replays, same

few = settings(max_examples=25, deadline=None)
SAMPLES = 60_000


def irregular(rho: float, shift: float = 0.0) -> Tree:
    """Three unequal classes, one of two top latents with three children, unequal edges."""
    off = np.array([[0.05, 0.9, 0.5], [0.8, 0.3, 1.0]])
    return Tree(
        class_probs=np.array([0.2, 0.5, 0.3]),
        child_off_probs=np.clip(off + shift, 0, 1),
        parents=(np.array([0, 0, 1, 0]), np.array([3, 0, 1, 1, 2, 2, 0])),
        rhos=(np.array([rho, -0.5, 1.0, 0.2]), np.array([0.9, rho, 0.8, -rho, 0.6, 0.0, -1.0])),
    )


def values(batch: Batch) -> list[np.ndarray]:
    """Every level from the top to the leaves, (E, B, nodes); leaves read off the tokens."""
    members, size, length = batch.tokens.shape
    seen = torch.zeros(members, size, length, dtype=torch.bool)
    seen.scatter_(-1, batch.tokens, value=True)
    levels = [*reversed(batch.latents[:-1]), seen[..., 1:]]
    return [level.numpy() for level in levels]


def farthest(levels: list[np.ndarray], labels: np.ndarray, tree: Tree) -> float:
    """The largest distance of a frequency from the tree's probability, in standard errors.

    Over classes, nodes given the class, and joint values of every two nodes of any two levels.
    """
    n = labels.size
    counts, expected, totals = [], [], []
    for k, probability in enumerate(tree.class_probs):
        chosen = labels == k
        counts.append(chosen.sum())
        expected.append(probability)
        totals.append(n)
        for level, value in enumerate(levels):
            counts += list((~value[chosen]).sum(0))
            expected += list(tree.off_probs(level)[:, k])
            totals += [chosen.sum()] * value.shape[1]
    nodes = [(level, node) for level, size in enumerate(tree.sizes) for node in range(size)]
    for a, b in combinations(nodes, 2):
        joint = tree.joint(a, b)
        y_a, y_b = levels[a[0]][:, a[1]], levels[b[0]][:, b[1]]
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            counts.append(((y_a == i) & (y_b == j)).sum())
            expected.append(joint[i, j])
            totals.append(n)
    # A probability of 0 or 1 allows no deviation at all, but the theory's has rounding errors.
    p, total = np.array(expected).clip(0, 1), np.array(totals)
    error = np.sqrt(np.maximum(p * (1 - p), 1e-12) / total)
    return float(np.max(np.abs(np.array(counts) / total - p) / error))


def test_the_distribution_is_the_trees():
    trees = [irregular(0.7), irregular(0.95, shift=0.02)]
    batch = HBLT(trees, seeds=(1, 2)).sample(SAMPLES, 3)
    levels = values(batch)
    for member, tree in enumerate(trees):
        own = [level[member] for level in levels]
        labels = batch.labels[member].numpy()
        assert farthest(own, labels, tree) < 5
        for wrong in (irregular(0.66), irregular(0.9, shift=0.02), trees[1 - member]):
            assert farthest(own, labels, wrong) > 5


@pytest.mark.parametrize("rho", [0.5, 0.9])
def test_tokens_co_occur_as_theorem_5_says(rho: float):
    source = HBLT.regular(3, 3, rho, classes=6, seeds=(1, 2))
    batch = source.sample(SAMPLES, 0)
    leaves = values(batch)[-1]
    height = source.heights[1:, 1:].numpy()
    for member, tree in enumerate(source.trees):
        on = leaves[member].astype(float)
        together, alone = on.T @ on, on.sum(0)
        for m in range(27):
            rho0 = hblt.root_uncertainty(tree.class_probs, tree.child_off_probs[m // 9])
            for other in range(27):
                if not 0 < height[m, other] < 3:
                    continue
                for candidate, right in ((rho, True), (rho - 0.1, False)):
                    p = hblt.cooccurrence(int(height[m, other]), 3, candidate, rho0)
                    distance = abs(together[other, m] / alone[m] - p)
                    far = distance / np.sqrt(p * (1 - p) / alone[m])
                    assert not right or far < 5
                    assert right or height[m, other] != 1 or far > 5


def test_rare_flips_are_as_rare_as_they_should_be():
    # Between two multiples of 2⁻¹⁶, for nodes that have 16 bits of their own each.
    rare = 1.5 * 2.0**-16
    tree = Tree.regular(2, 200, 1 - 2 * rare, np.ones(1), np.ones((1, 1)))
    source = HBLT(tree)
    flips = sum((source.sample(15_000, step).tokens > 0).sum((0, 1)) for step in range(8))
    assert isinstance(flips, torch.Tensor)
    expected = 8 * 15_000 * 200 * rare
    assert abs(int(flips.sum()) - expected) < 4.5 * np.sqrt(expected)
    for multiple in (1, 2):
        wrong = expected * multiple / 1.5
        assert abs(int(flips.sum()) - wrong) > 4.5 * np.sqrt(wrong)


def many(leaves: int) -> HBLT:
    return HBLT(Tree(np.ones(1), np.full((leaves, 1), 0.2)))


@pytest.mark.parametrize(
    "source", [HBLT(irregular(0.7), seeds=(1, 2)), many(126), many(127), many(300)]
)
def test_sequences_are_padding_then_the_leaves_that_are_on(source: HBLT):
    batch = source.sample(50, 0)
    leaves = values(batch)[-1]
    for sequences, members in zip(batch.tokens, leaves, strict=True):
        for sequence, on in zip(sequences.tolist(), members, strict=True):
            tokens = (np.flatnonzero(on) + 1).tolist()
            assert sequence == [0] * (len(on) + 1 - len(tokens)) + tokens


def test_latents_go_from_just_above_the_leaves_to_the_class():
    source = HBLT.regular(3, 2, 1.0, classes=4, seeds=(1, 2), off=0.0)
    assert source.latents == (4, 2)
    batch = source.sample(100, 0)
    lower, upper, one_hot = batch.latents
    assert (lower.shape, upper.shape, one_hot.shape) == ((2, 100, 4), (2, 100, 2), (2, 100, 4))
    # With ρ = 1 every latent is its parent.
    assert torch.equal(lower, upper.repeat_interleave(2, -1))
    assert torch.equal(one_hot.int().argmax(-1), batch.labels)
    assert (one_hot.sum(-1) == 1).all()
    for member, tree in enumerate(source.trees):
        expected = torch.from_numpy(tree.child_off_probs.T == 0)[batch.labels[member]]
        assert torch.equal(upper[member], expected)


def test_the_seed_and_the_step_decide_all():
    source = HBLT.regular(2, 3, [0.5, 0.7, 0.9], classes=5, seeds=(3, 4, 5))
    batch = source.sample(40, 9)
    assert same(batch, source.sample(40, torch.tensor(9)))
    assert not torch.equal(batch.tokens, source.sample(40, 10).tokens)
    alone = HBLT.regular(2, 3, 0.7, classes=5, seeds=(4,)).sample(40, 9)
    assert torch.equal(alone.tokens[0], batch.tokens[1])
    assert torch.equal(alone.labels[0], batch.labels[1])
    for latent, among in zip(alone.latents, batch.latents, strict=True):
        assert torch.equal(latent[0], among[1])
    assert not torch.equal(batch.tokens[0], batch.tokens[1])


def test_heights_are_the_trees():
    tree = irregular(0.7)
    heights = HBLT(tree).heights
    assert heights.shape == (8, 8)
    assert (heights[0] == -1).all()
    assert (heights[:, 0] == -1).all()
    for a in range(7):
        for b in range(7):
            expected = tree.height(tree.common_ancestor((2, a), (2, b)))
            assert heights[a + 1, b + 1] == expected
    assert set(heights.flatten().tolist()) == {-1, 0, 1, 2, 3}


@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 50))
@few
def test_codes_repeat_only_when_all_are_used(bits: int, classes: int, seed: int):
    codes = hierarchies.spread_codes(seed, "codes", bits, classes)
    assert codes.shape == (classes, bits)
    counts = np.unique(codes.numpy(), axis=0, return_counts=True)[1]
    assert counts.size == min(classes, 2**bits)
    assert counts.max() <= -(-classes // 2**bits)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("depth must be at least 1, got 0", {"depth": 0}),
        ("off must be a probability, got 1.5", {"off": 1.5}),
        ("rho must be one number or 2, one a seed", {"rho": [0.5, 0.6, 0.7]}),
        ("seeds must hold at least one", {"seeds": ()}),
    ],
)
def test_bad_arguments_are_named(message: str, changes: dict[str, Any]):
    arguments = {"depth": 2, "branching": 2, "rho": 0.9, "classes": 3, "seeds": (0, 1), **changes}
    with pytest.raises(ValueError, match=f"^{message}"):
        HBLT.regular(**arguments)


def test_trees_of_different_shape_are_refused():
    tree = irregular(0.7)
    other_parents = Tree(
        tree.class_probs, tree.child_off_probs, (tree.parents[0], tree.parents[1][::-1]), tree.rhos
    )
    shallow = Tree(tree.class_probs, tree.child_off_probs, tree.parents[:1], tree.rhos[:1])
    fewer_classes = Tree(np.ones(1), np.zeros((2, 1)), tree.parents, tree.rhos)
    for other in (other_parents, shallow, fewer_classes):
        with pytest.raises(ValueError, match=r"^tree must have the same .* for member 1 than"):
            HBLT([tree, other], seeds=(0, 1))
    with pytest.raises(ValueError, match=r"^tree must be one, or one for each of the 3 seeds"):
        HBLT([tree, tree], seeds=(0, 1, 2))
    with pytest.raises(ValueError, match=r"^batch must be at least 1, got 0$"):
        HBLT(tree).sample(0, 0)


@cuda
def test_a_captured_graph_replays():
    source = HBLT(irregular(0.7), seeds=(1, 2), device="cuda")
    assert replays(lambda step: source.sample(64, step))

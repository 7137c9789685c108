"""Hierarchical binary latent trees against enumeration, exact fractions and sampling."""

from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import as_printed as printed
from joma.theory import hblt

rhos = st.floats(-1, 1)
few = settings(max_examples=40, deadline=None)


def random_tree(rng: np.random.Generator) -> hblt.Tree:
    """Small, irregular: up to two top latents, three levels, at most nine binary variables."""
    classes = int(rng.integers(1, 4))
    sizes = [int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 5))]
    return hblt.Tree(
        class_probs=rng.dirichlet(np.ones(classes)),
        child_off_probs=rng.uniform(size=(sizes[0], classes)),
        parents=tuple(rng.integers(above, size=size) for above, size in pairwise(sizes)),
        rhos=tuple(rng.uniform(-1, 1, size) for size in sizes[1:]),
    )


def nodes_of(tree: hblt.Tree) -> list[hblt.Node]:
    return [(level, node) for level, size in enumerate(tree.sizes) for node in range(size)]


@given(st.integers(0, 10_000))
@few
def test_joint_marginal_and_conditional_agree(seed: int):
    tree = random_tree(np.random.default_rng(seed))
    for a, b in product(nodes_of(tree), repeat=2):
        joint = tree.joint(a, b)
        np.testing.assert_allclose(joint, tree.joint(b, a).T, atol=1e-15)
        np.testing.assert_allclose(joint.sum(axis=1), tree.marginal(*a), atol=1e-14)
        np.testing.assert_allclose(tree.conditional(a, b) * tree.marginal(*b), joint, atol=1e-14)
    for level, size in enumerate(tree.sizes):
        mixed = tree.off_probs(level) @ tree.class_probs
        off = [tree.marginal(level, node)[0] for node in range(size)]
        np.testing.assert_allclose(mixed, off, atol=1e-14)


def test_nodes_that_share_only_the_class_are_mixed_over_it():
    tree = hblt.Tree.regular(2, 2, 0.8, [0.5, 0.5], [[0.0, 1.0], [0.0, 1.0]])
    assert tree.common_ancestor((1, 0), (1, 2)) is None
    # Given the class each leaf is on with probability .9 or .1, independently.
    expected = (0.9 * 0.9 + 0.1 * 0.1) / 2
    np.testing.assert_allclose(tree.joint((1, 0), (1, 2))[1, 1], expected, atol=1e-15)
    independent = np.outer(tree.marginal(1, 0), tree.marginal(1, 2))
    assert tree.joint((1, 0), (1, 2))[1, 1] > independent[1, 1] + 0.1


def test_same_seed_same_sample():
    tree = random_tree(np.random.default_rng(1))
    by_seed, by_generator = tree.sample(50, 7), tree.sample(50, np.random.default_rng(7))
    np.testing.assert_array_equal(by_seed[0], by_generator[0])
    for one, other in zip(by_seed[1], by_generator[1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert any(np.any(tree.sample(50, 8)[1][i] != by_seed[1][i]) for i in range(tree.depth))


def test_regular_tree_has_the_shape_it_says():
    tree = hblt.Tree.regular(3, 2, 0.5, [1.0], [[0.3], [0.4]])
    assert tree.depth == 3
    assert tree.sizes == (2, 4, 8)
    np.testing.assert_array_equal(tree.parents[1], [0, 0, 1, 1, 2, 2, 3, 3])
    ancestors = [tree.common_ancestor((2, 0), (2, other)) for other in range(5)]
    assert ancestors == [(2, 0), (1, 0), (0, 0), (0, 0), None]
    assert [tree.height(node) for node in ancestors] == [0, 1, 2, 2, 3]
    assert tree.common_ancestor((2, 3), (1, 1)) == (1, 1)
    assert tree.common_ancestor((0, 0), (2, 7)) is None


def test_a_tree_cannot_be_changed_under_way():
    parents = np.array([0, 0])
    tree = hblt.Tree(np.ones(1), np.full((1, 1), 0.5), (parents,), (np.full(2, 0.5),))
    parents[0] = 99
    assert tree.parents[0][0] == 0
    with pytest.raises(ValueError, match="read-only"):
        tree.rhos[0][0] = 2.0


@given(st.integers(1, 6), st.integers(0, 5), rhos, rhos)
@few
def test_cooccurrence_is_the_trees_conditional(depth: int, height: int, rho: float, rho0: float):
    height = min(height, depth - 1)
    if abs(1 - rho ** (depth - 1) * rho0) < 1e-6:
        return
    tree = hblt.Tree.regular(depth, 2, rho, [1.0], [(1 + rho0) / 2])
    leaves = depth - 1
    other = 2**height - 1  # the last leaf under leaf 0's ancestor at this height
    assert tree.height(tree.common_ancestor((leaves, 0), (leaves, other))) == height
    joint = tree.joint((leaves, other), (leaves, 0))
    expected = joint[1, 1] / joint[:, 1].sum()
    actual = hblt.cooccurrence(height, depth, rho, rho0)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("epsilon", [Fraction(1, 10), Fraction(1, 2**20), Fraction(1, 2**50)])
@pytest.mark.parametrize("sign", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
def test_cooccurrence_keeps_its_digits_near_one(epsilon: Fraction, sign: tuple[int, int]):
    rho, rho0 = (s * float(1 - epsilon) for s in sign)
    exact_rho, exact_rho0 = Fraction(rho), Fraction(rho0)
    for depth, height in [(4, 1), (5, 3), (6, 5)]:
        power = exact_rho ** (depth - 1) * exact_rho0
        exact = (1 + exact_rho ** (2 * height) - 2 * power) / (1 - power) / 2
        actual = hblt.cooccurrence(height, depth, rho, rho0)
        np.testing.assert_allclose(actual, float(exact), rtol=1e-14)


def test_cooccurrence_broadcasts():
    value = hblt.cooccurrence(np.arange(3)[:, None], 4, [0.0, -0.5, 0.5, 1.0], 0.25)
    assert value.shape == (3, 4)
    np.testing.assert_array_equal(value[0], 1.0)
    np.testing.assert_array_equal(value[:, 3], 1.0)
    # Without dependence a token occurs as often as it does anyway.
    np.testing.assert_array_equal(value[1:, 0], 0.5)


def test_depth_alone_does_not_make_tokens_co_occur():
    """The remark's other condition: at fixed ε the limit of depth is ½(1 + ρ^{2H}), not 1."""
    value = hblt.cooccurrence(3, 10_000, 0.9, 0.9)
    np.testing.assert_allclose(value, (1 + 0.9**6) / 2, rtol=1e-12)
    assert 1 - value <= hblt.dissociation_bound(3, 10_000, 0.1)
    assert hblt.cooccurrence(3, 10_000, 1 - 1e-9, 1 - 1e-9) > 0.999


def test_the_bound_on_dissociation_is_sharp_from_both_sides():
    depth, height = np.meshgrid(2 ** np.arange(1, 18), 2 ** np.arange(0, 17))
    inside = height < depth
    for epsilon in [1e-8, 1e-5, 1e-3, 0.03, 0.2, 0.5, 0.9, 1.0]:
        h, d = height[inside], depth[inside]
        apart = 1 - hblt.cooccurrence(h, d, 1 - epsilon, 1 - epsilon)
        bound = hblt.dissociation_bound(h, d, epsilon)
        assert np.all(apart <= bound * (1 + 1e-7))
        assert np.all(bound <= 2.0541 * apart * (1 + 1e-7))
    np.testing.assert_allclose(hblt.dissociation_bound(3, 10, 0.0), 0.3)
    apart = 1 - hblt.cooccurrence(50_000, 179_328, 1 - 1e-5, 1 - 1e-5)
    assert hblt.dissociation_bound(50_000, 179_328, 1e-5) > 2.054 * apart


def test_the_remark_after_theorem_5_needs_no_rho0_close_to_1():
    for rho0 in (-1.0, -0.5, 0.0, 0.5, 0.999999, 1 - 1e-12):
        assert hblt.cooccurrence(2, 10_000_000, 1 - 1e-6, rho0) > 0.999


def test_root_uncertainty_of_one_switch_among_many_classes():
    off = 1 - np.eye(10)
    np.testing.assert_allclose(hblt.root_uncertainty(np.full(10, 0.1), off), 1 - 2 / 10)
    np.testing.assert_allclose(printed.root_uncertainty(np.full(10, 0.1), off), 1 - 1 / 10)

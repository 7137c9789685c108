"""What leaves tell of what is above them, against enumeration."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory.hblt import Tree, posteriors


def irregular(rho: float) -> Tree:
    """Unequal classes, a latent without children, edges that say all, nothing and the contrary."""
    return Tree(
        class_probs=np.array([0.2, 0.5, 0.3]),
        child_off_probs=np.array([[0.05, 0.9, 0.5], [0.8, 0.3, 1.0]]),
        parents=(np.array([0, 0, 1, 0]), np.array([3, 0, 1, 1, 0])),
        rhos=(np.array([rho, -0.5, 1.0, 0.2]), np.array([0.9, rho, 0.8, -rho, 0.0])),
    )


def enumerated(tree: Tree, leaves: np.ndarray) -> tuple[np.ndarray, ...]:
    """The posteriors of one sample, by going through everything that can be above its leaves."""
    *sizes, _ = tree.sizes
    total = 0.0
    on = [np.zeros(size) for size in sizes]
    classes = np.zeros(tree.class_probs.size)
    for k, *bits in itertools.product(range(classes.size), *[(0, 1)] * sum(sizes)):
        levels = [*np.split(np.array(bits), np.cumsum(sizes)[:-1]), leaves]
        weight = tree.class_probs[k]
        weight *= np.where(
            levels[0], 1 - tree.child_off_probs[:, k], tree.child_off_probs[:, k]
        ).prod()
        for above, below, parent, rho in zip(
            levels, levels[1:], tree.parents, tree.rhos, strict=False
        ):
            weight *= np.where(below == above[parent], (1 + rho) / 2, (1 - rho) / 2).prod()
        total += weight
        classes[k] += weight
        for mine, level in zip(on, levels[:-1], strict=True):
            mine += weight * level
    return (*(mine / total for mine in reversed(on)), classes / total)


@settings(max_examples=15, deadline=None)
@given(rho=st.floats(-0.99, 0.99), seed=st.integers(0, 1000))
def test_posteriors_are_those_of_enumeration(rho: float, seed: int):
    tree = irregular(rho)
    leaves = tree.sample(3, seed)[1][-1]
    found = posteriors(tree, leaves)
    for row, own in enumerate(leaves):
        for level, expected in zip(found, enumerated(tree, own), strict=True):
            np.testing.assert_allclose(level[row], expected, atol=1e-12)


def test_deep_trees_do_not_underflow():
    tree = Tree.regular(2, 3000, 0.1, [0.5, 0.5], [[0.2, 0.7]])
    latent, label = posteriors(tree, np.ones((1, 3000)))
    np.testing.assert_allclose(latent, 1)
    np.testing.assert_allclose(label, [[0.8 / 1.1, 0.3 / 1.1]])

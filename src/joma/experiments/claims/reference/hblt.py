"""Latent trees by enumeration of all assignments, and generation by generation."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from joma.common.types import Array
from joma.experiments.claims.claim import Formula, Point, Search
from joma.experiments.claims.measurement import ClaimMeasurement
from joma.experiments.claims.search import Integer, Real, Seed, Simplex, Vector
from joma.theory import hblt


def irregular_tree() -> hblt.Tree:
    """Return a tree of ten nodes in four levels; every edge has its own ρ, one of them negative."""
    return hblt.Tree(
        class_probs=np.array([0.5, 0.3, 0.2]),
        child_off_probs=np.array([[0.1, 0.8, 0.6], [0.9, 0.35, 0.2]]),
        parents=(np.array([0, 0, 1]), np.array([0, 0, 1]), np.array([0, 2])),
        rhos=(np.array([0.9, 0.4, 0.7]), np.array([0.8, -0.6, 0.3]), np.array([0.85, 0.95])),
    )


def enumerate_assignments(tree: hblt.Tree) -> tuple[Array, list[Array]]:
    """Return every assignment of the binary variables and its probability, factor by factor.

    Uses the tree's structure alone. Returns the probabilities, shape (assignments,), summed over
    the classes, and for each level the values, shape (assignments, nodes).
    """
    total = sum(tree.sizes)
    bits = (np.arange(2**total)[:, None] >> np.arange(total)) & 1
    levels = np.split(bits, np.cumsum(tree.sizes)[:-1], axis=1)
    below = np.ones(len(bits))
    for above, values, parent, rho in zip(
        levels[:-1], levels[1:], tree.parents, tree.rhos, strict=True
    ):
        same = values == above[:, parent]
        below *= np.prod(np.where(same, 1 + rho, 1 - rho) / 2, axis=1)
    top = np.zeros(len(bits))
    for weight, off in zip(tree.class_probs, tree.child_off_probs.T, strict=True):
        top += weight * np.prod(np.where(levels[0] == 0, off, 1 - off), axis=1)
    return top * below, levels


def two_by_two(weights: Array, a: Array, b: Array) -> np.ndarray:
    """Return the joint distribution of two binary variables from weighted assignments."""
    cells = np.bincount(2 * a + b, weights=weights, minlength=4)
    return cells.reshape(2, 2)


def by_generations(height: int, depth: int, rho: Any, top: Any) -> Array:
    """Return the joint distribution of two leaves, generation by generation.

    Only positive numbers are added, so a ρ close to 1 costs no digits.

    Args:
        height: Generations from the common ancestor to the leaves.
        depth: Generations from the top latent to the leaves, plus 1.
        rho: ρ of every edge as the two entries of its channel, ½(1 + ρ) and ½(1 - ρ).
        top: P[y=0] and P[y=1] of the top latent.
    """
    channel = np.array([[rho[0], rho[1]], [rho[1], rho[0]]])
    ancestor = np.linalg.matrix_power(channel, depth - 1 - height) @ np.asarray(top)
    down = np.linalg.matrix_power(channel, height)
    return (down * ancestor) @ down.T


def drawn_tree(point: Point) -> hblt.Tree:
    """Return a random irregular tree of at most nine nodes; some edges are certain or useless."""
    rng = np.random.default_rng(point["draw"])
    sizes = np.asarray(point["sizes"]).astype(int)
    sizes = sizes[np.cumsum(sizes) <= 9] if sizes[0] <= 9 else np.array([1])
    classes = point["classes"]
    below = list(pairwise(sizes))

    def values(size: int) -> Array:
        drawn = rng.uniform(-1, 1, size)
        return np.where(rng.random(size) < 0.15, rng.choice([-1.0, 0.0, 1.0], size), drawn)

    return hblt.Tree(
        class_probs=classes,
        child_off_probs=(1 + np.stack([values(len(classes)) for _ in range(sizes[0])])) / 2,
        parents=tuple(rng.integers(above, size=size) for above, size in below),
        rhos=tuple(values(size) for _, size in below),
    )


TREES: dict[str, Any] = {
    "sizes": Vector(Real(1, 4), Integer(1, 6)),
    "classes": Simplex(Integer(1, 4), zeros=True),
    "draw": Seed(),
}
"""Random trees, for `drawn_tree`."""


def over_trees(measure: Callable[[Formula, hblt.Tree], ClaimMeasurement]) -> Search:
    """Turn a measure in one tree into a `Search` over random ones."""
    return Search(TREES, lambda formula, point: measure(formula, drawn_tree(point)))


def first_pair(tree: hblt.Tree, height: int) -> tuple[int, int]:
    """Return leaf 0 and the first leaf whose common ancestor with it has this height."""
    leaves = tree.depth - 1
    for other in range(tree.sizes[-1]):
        if tree.height(tree.common_ancestor((leaves, 0), (leaves, other))) == height:
            return 0, other
    raise AssertionError(f"no pair of leaves at height {height}")

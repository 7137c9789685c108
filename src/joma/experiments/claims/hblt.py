"""Section 5 and A.5, binary latent trees: Lemmas 8 and 9, Theorem 5 and its limits."""

from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np

from joma.common.types import Array
from joma.experiments.claims.claim import (
    ClaimMeasurement,
    Formula,
    Generator,
    claim,
    measured,
    monte_carlo,
    without,
)
from joma.theory import as_printed as printed
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


def first_pair(tree: hblt.Tree, height: int) -> tuple[int, int]:
    """Return leaf 0 and the first leaf whose common ancestor with it has this height."""
    leaves = tree.depth - 1
    for other in range(tree.sizes[-1]):
        if tree.height(tree.common_ancestor((leaves, 0), (leaves, other))) == height:
            return 0, other
    raise AssertionError(f"no pair of leaves at height {height}")


_DEPTH, _RHO = 4, 0.9


_CLASS_PROBS = np.full(5, 0.2)


_CHILD_OFF_PROBS = np.array([0.05, 0.95, 0.95, 0.95, 0.95])


@claim("lemma8", hblt.path)
def _matrix_products(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return matrix_products_of(formula, rng.uniform(-1, 1, (200, 4)))


def matrix_products_of(formula: Formula, rhos: Array) -> ClaimMeasurement:
    """Compare transitions along paths with the product of their matrices."""
    # A binary symmetric channel flips with probability ½(1−ρ); chained one after the other.
    flip = (1 - rhos) / 2
    chained = np.broadcast_to(np.eye(2), (len(rhos), 2, 2))
    for step in range(rhos.shape[1]):
        f = flip[:, step, None, None]
        chained = (1 - f) * chained + f * chained[:, ::-1]
    start = np.array([0.2, 0.8])
    at_once = formula(rhos)
    errors = [
        at_once - chained,
        at_once - np.swapaxes(at_once, -1, -2),
        at_once.sum(axis=-1) - 1,
        at_once @ start - chained @ start,
    ]
    tolerance = 1e-15 * (10 + rhos.shape[1])
    return ClaimMeasurement(max(float(np.max(np.abs(error))) for error in errors), tolerance)


def _descendants_in(formula: Formula, tree: hblt.Tree) -> ClaimMeasurement:
    weights, levels = enumerate_assignments(tree)
    worst = 0.0
    for descendant in product([tree.depth - 1], range(tree.sizes[-1])):
        level, node = descendant
        while level > 0:
            level, node = level - 1, int(tree.parents[level - 1][node])
            joint = two_by_two(weights, levels[-1][:, descendant[1]], levels[level][:, node])
            taken = joint.sum(axis=0) > 1e-9  # a value that the ancestor takes at all
            reference = (joint / np.where(taken, joint.sum(axis=0), 1.0))[:, taken]
            away = np.abs(formula(tree, descendant, (level, node))[:, taken] - reference)
            worst = max(worst, np.max(away, initial=0.0))
    return measured(worst, 1e-13)


@claim("rho0", hblt.root_uncertainty, printed=printed.root_uncertainty)
def _top_latents(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """2P[y=0] − 1 of top latents that one class each switches on."""
    classes, n = 20, 20_000
    off = np.where(np.eye(4, classes, dtype=bool), 0.02, 0.99)
    class_probs = rng.dirichlet(np.full(classes, 5.0))
    tree = hblt.Tree(class_probs, off)
    on = tree.sample(n, rng)[1][0].mean(axis=0)
    se = 2 * np.sqrt(on * (1 - on) / n)
    return monte_carlo(formula(class_probs, off) - (1 - 2 * on), se)


def cooccurrence(
    height: Any,
    depth: Any,
    rho: Any,
    class_probs: Any,
    child_off_probs: Any,
    root_uncertainty: Formula = hblt.root_uncertainty,
) -> Any:
    """Return Theorem 5 from the class distribution on, with ρ₀ as derived or as given."""
    return hblt.cooccurrence(height, depth, rho, root_uncertainty(class_probs, child_off_probs))


_printed_cooccurrence = partial(cooccurrence, root_uncertainty=printed.root_uncertainty)


def _frequency(leaves: np.ndarray, first: int, other: int) -> tuple[float, float]:
    """How often leaf `other` is on where leaf `first` is, and the standard error."""
    other_when_on = leaves[leaves[:, first] == 1, other]
    frequency = float(other_when_on.mean())
    return frequency, float(np.sqrt(frequency * (1 - frequency) / other_when_on.size))


@without("thm5")
def _sampled_under_the_class(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Two top latents, each on for a class of its own: Theorem 5 at its largest height."""
    off = np.stack([_CHILD_OFF_PROBS, np.roll(_CHILD_OFF_PROBS, 1)])
    tree = hblt.Tree.regular(_DEPTH, 2, _RHO, _CLASS_PROBS, off)
    leaves = tree.sample(100_000, rng)[1][-1]
    frequency, se = _frequency(leaves, *first_pair(tree, _DEPTH))
    return monte_carlo(formula(_DEPTH - 1, _DEPTH, _RHO, _CLASS_PROBS, off[0]) - frequency, se)


@claim("thm5", cooccurrence, printed=_printed_cooccurrence)
def _sampled_cooccurrence(formula: Formula, rng: Generator) -> ClaimMeasurement:
    tree = hblt.Tree.regular(_DEPTH, 2, _RHO, _CLASS_PROBS, _CHILD_OFF_PROBS)
    leaves = tree.sample(100_000, rng)[1][-1]
    heights = np.arange(1, _DEPTH)
    pairs = [first_pair(tree, int(height)) for height in heights]
    frequency, se = np.transpose([_frequency(leaves, *pair) for pair in pairs])
    return monte_carlo(
        formula(heights, _DEPTH, _RHO, _CLASS_PROBS, _CHILD_OFF_PROBS) - frequency, se
    )


def _enumerated(tree: hblt.Tree, height: int) -> Any:
    """P[y_l=1|y_m=1] of two leaves with a common ancestor of a given height."""
    weights, levels = enumerate_assignments(tree)
    first, other = first_pair(tree, height)
    joint = two_by_two(weights, levels[-1][:, other], levels[-1][:, first])
    return joint[1, 1] / joint[:, 1].sum()


@without("thm5-exact")
def _enumerated_under_the_class(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Two top latents alike but independent given the class: Theorem 5 at its largest height."""
    class_probs = rng.dirichlet(np.ones(3))
    off = rng.uniform(size=3)
    tree = hblt.Tree.regular(3, 2, 0.9, class_probs, np.stack([off, off]))
    return measured(abs(formula(2, 3, 0.9, class_probs, off) - _enumerated(tree, 3)), 1e-12)


@claim("thm5-exact", cooccurrence, printed=_printed_cooccurrence)
def _enumerated_cooccurrence(formula: Formula, rng: Generator) -> ClaimMeasurement:
    errors = []
    for depth, rho in [(1, 0.9), (2, -0.7), (3, 0.9), (3, 0.25), (4, 0.6)]:
        class_probs = rng.dirichlet(np.ones(3))
        off = rng.uniform(size=3)
        tree = hblt.Tree.regular(depth, 2, rho, class_probs, off)
        for height in range(depth):
            ours = formula(height, depth, rho, class_probs, off)
            errors.append(abs(ours - _enumerated(tree, height)))
    return measured(errors, 1e-12)


def _pair(height: int, depth: int, epsilon: float, epsilon0: float) -> Any:
    """The joint distribution of two leaves at ρ = 1 − ε and ρ₀ = 1 − ε₀."""
    channel, top = ((1 - one / 2, one / 2) for one in (epsilon, epsilon0))
    return by_generations(height, depth, channel, top)


def co_occur_by_recursion(height: int, depth: int, epsilon: float, epsilon0: float) -> float:
    """P[y_l=1|y_m=1] at ρ = 1 − ε and ρ₀ = 1 − ε₀."""
    pair = _pair(height, depth, epsilon, epsilon0)
    return pair[1, 1] / (pair[0, 1] + pair[1, 1])


@claim("eqn8", hblt.cooccurrence_near_one, printed=printed.cooccurrence_near_one)
def _order_of_the_error(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """How far the order of the error in ε falls short of two, at H ≠ L/2 (there it is none)."""
    epsilon = 2.0 ** -np.arange(5, 13)
    errors = [0.0]
    for depth, height in [(4, 1), (4, 3), (7, 2), (7, 6)]:
        reference = np.array([co_occur_by_recursion(height, depth, e, e) for e in epsilon])
        error = np.abs(formula(height, depth, epsilon) - reference)
        errors.append(2 - np.polyfit(np.log(epsilon), np.log(error), 1)[0])
    return measured(errors, 0.05)


def _marginals_in(formula: Formula, tree: hblt.Tree) -> ClaimMeasurement:
    weights, levels = enumerate_assignments(tree)
    worst = 0.0
    for level, node in [(level, size - 1) for level, size in enumerate(tree.sizes)]:
        top, rho, place = level, 1.0, node
        while top:
            rho *= tree.rhos[top - 1][place]
            top, place = top - 1, tree.parents[top - 1][place]
        reference = np.bincount(levels[level][:, node], weights=weights, minlength=2)
        computed = formula(rho, tree.class_probs, tree.child_off_probs[place])
        worst = max(worst, np.max(np.abs(computed - reference)))
    return measured(worst, 1e-13)


@without("thm5-remark")
def _not_shallow_or_not_deep(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The least distance where one of the three is missing: ρ near 1, a shallow H, a deep L."""
    missing = [(3, 10_000, 0.1), (5_000, 10_000, 1e-6), (1, 2, 1e-6)]
    away = [abs(co_occur_by_recursion(h, d, e, e) - formula()) for h, d, e in missing]
    return measured(min(away), 1e-3)


@claim("thm5-remark", lambda: 1.0)
def _shallow_and_deep(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """How far it is from its limit, ρ going to 1 and ρ₀ anywhere."""
    near, nearer = 1e-6, 1e-9
    epsilons = [(near, near), (near, nearer), (nearer, near), (near, 0.5), (near, 1.9)]
    cases = product([1, 2, 3], [10_000, 1_000_000], epsilons)
    away = [abs(co_occur_by_recursion(h, d, *both) - formula()) for h, d, both in cases]
    return measured(away, 1e-3)


_LARGEST_SLACK = 2.05408
"""Most that the bound exceeds P[y_l=0|y_m=1], by a factor: (1+1/a)(1−e⁻ᵃ)/(1−1/e), a = 1.793."""


def bounded_dissociation_of(formula: Formula, height: int, depth: int, epsilon: float) -> float:
    """Return by how much P[y_l=0 | y_m=1] exceeds a bound, or is too far below."""
    apart = _apart(height, depth, epsilon)
    bound = float(formula(height, depth, epsilon))
    return max(apart - bound, bound - _LARGEST_SLACK * apart) / max(apart, 1e-300)


def _apart(height: int, depth: int, epsilon: float) -> float:
    """P[y_l=0|y_m=1] at ρ = ρ₀ = 1 − ε."""
    pair = _pair(height, depth, epsilon, epsilon)
    return float(pair[0, 1] / (pair[0, 1] + pair[1, 1]))


@claim("thm5-remark-bound", hblt.dissociation_bound)
def _bounded_dissociation(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """By what factor P[y_l=0|y_m=1] leaves the bound's range, and falls short of its two ends."""
    worst = 0.0
    for depth, epsilon in product([2, 5, 20, 100], [1e-6, 1e-3, 0.03, 0.3, 0.5, 1.0]):
        for height in {1, depth // 2, depth - 1}:
            worst = max(worst, bounded_dissociation_of(formula, height, depth, epsilon))
    apart = 1 - co_occur_by_recursion(3, 10, 1e-6, 1e-6)
    worst = max(worst, float(formula(3, 10, 1e-6) / apart - 1) - 1e-4)
    apart = 1 - co_occur_by_recursion(50_000, 179_328, 1e-5, 1e-5)
    worst = max(worst, 1 - float(formula(50_000, 179_328, 1e-5) / apart / _LARGEST_SLACK) - 1e-4)
    return measured(worst, 1e-9)


def _joints_in(formula: Formula, tree: hblt.Tree) -> ClaimMeasurement:
    weights, levels = enumerate_assignments(tree)
    nodes = [(level, node) for level, size in enumerate(tree.sizes) for node in range(size)]
    worst = 0.0
    for a, b in combinations_with_replacement(nodes, 2):
        reference = two_by_two(weights, levels[a[0]][:, a[1]], levels[b[0]][:, b[1]])
        worst = max(worst, np.max(np.abs(formula(tree, a, b) - reference)))
    a, b = nodes[0], nodes[-1]
    worst = max(worst, np.max(np.abs(formula(tree, a, b) - formula(tree, b, a).T)))
    return measured(worst, 1e-13)


@claim("lemma9", hblt.descent, measure=_descendants_in)
@claim("eqn103", hblt.latent_distribution, measure=_marginals_in)
@claim("hblt-joint", hblt.Tree.joint, measure=_joints_in)
def _in_a_tree(
    formula: Formula, rng: Generator, *, measure: Callable[[Formula, hblt.Tree], ClaimMeasurement]
) -> ClaimMeasurement:
    return measure(formula, irregular_tree())

"""Eqns 8 and 103, the remarks on Theorem 5, and any two nodes of any tree."""

from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np

from joma.experiments.claims.claim import Point, Search, claim, over
from joma.experiments.claims.hblt.cooccurrence import height_of
from joma.experiments.claims.measurement import ClaimMeasurement, Formula, measured
from joma.experiments.claims.reference import hblt as trees
from joma.experiments.claims.search import Integer, Real
from joma.theory import as_printed as printed
from joma.theory import hblt


def _pair(height: int, depth: int, epsilon: float, epsilon0: float) -> Any:
    """The joint distribution of two leaves at ρ = 1 − ε and ρ₀ = 1 − ε₀."""
    channel, top = ((1 - one / 2, one / 2) for one in (epsilon, epsilon0))
    return trees.by_generations(height, depth, channel, top)


def _co_occur_by_recursion(height: int, depth: int, epsilon: float, epsilon0: float) -> float:
    """P[y_l=1|y_m=1] at ρ = 1 − ε and ρ₀ = 1 − ε₀."""
    pair = _pair(height, depth, epsilon, epsilon0)
    return pair[1, 1] / (pair[0, 1] + pair[1, 1])


@over(
    height=Real(0.0, 1.0, special=(0.0, 0.5)),
    depth=Integer(1, 1000, log=True),
    flips=Real(1e-6, 1.0, log=True),
)
def _near_one_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The error of the expansion in units of its second order, (H/L)(Lε)²."""
    height, depth, epsilon = height_of(point), point["depth"], point["flips"] / point["depth"]
    reference = _co_occur_by_recursion(height, depth, epsilon, epsilon)
    second_order = height / depth * point["flips"] ** 2
    return measured(abs(formula(height, depth, epsilon) - reference), second_order + 1e-11)


@claim("eqn8", hblt.cooccurrence_near_one, _near_one_at, printed=printed.cooccurrence_near_one)
def _order_of_the_error(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    """How far the order of the error in ε falls short of two, at H ≠ L/2 (there it is none)."""
    epsilon = 2.0 ** -np.arange(5, 13)
    errors = [0.0]
    for depth, height in [(4, 1), (4, 3), (7, 2), (7, 6)]:
        reference = np.array([_co_occur_by_recursion(height, depth, e, e) for e in epsilon])
        error = np.abs(formula(height, depth, epsilon) - reference)
        errors.append(2 - np.polyfit(np.log(epsilon), np.log(error), 1)[0])
    return measured(errors, 0.05)


def _marginals_in(formula: Formula, tree: hblt.Tree) -> ClaimMeasurement:
    weights, levels = trees.enumerate_assignments(tree)
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


def _not_shallow_or_not_deep(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    """The least distance where one of the three is missing: ρ near 1, a shallow H, a deep L."""
    missing = [(3, 10_000, 0.1), (5_000, 10_000, 1e-6), (1, 2, 1e-6)]
    return ClaimMeasurement(
        min(abs(_co_occur_by_recursion(h, d, e, e) - formula()) for h, d, e in missing), 1e-3
    )


@claim("thm5-remark", lambda: 1.0, without=_not_shallow_or_not_deep)
def _shallow_and_deep(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    """How far it is from its limit, ρ going to 1 and ρ₀ anywhere."""
    near, nearer = 1e-6, 1e-9
    epsilons = [(near, near), (near, nearer), (nearer, near), (near, 0.5), (near, 1.9)]
    cases = product([1, 2, 3], [10_000, 1_000_000], epsilons)
    return measured(
        [abs(_co_occur_by_recursion(h, depth, *both) - formula()) for h, depth, both in cases], 1e-3
    )


_LARGEST_SLACK = 2.05408
"""Most that the bound exceeds P[y_l=0|y_m=1], by a factor: (1+1/a)(1−e⁻ᵃ)/(1−1/e), a = 1.793."""


def _bounded_dissociation_of(formula: Formula, height: int, depth: int, epsilon: float) -> float:
    apart = _apart(height, depth, epsilon)
    bound = float(formula(height, depth, epsilon))
    return max(apart - bound, bound - _LARGEST_SLACK * apart) / max(apart, 1e-300)


def _apart(height: int, depth: int, epsilon: float) -> float:
    """P[y_l=0|y_m=1] at ρ = ρ₀ = 1 − ε."""
    pair = _pair(height, depth, epsilon, epsilon)
    return float(pair[0, 1] / (pair[0, 1] + pair[1, 1]))


@over(
    height=Real(0.0, 1.0, special=(0.0,)),
    depth=Integer(2, 1_000_000, log=True),
    epsilon=Real(1e-9, 1.0, log=True),
)
def _bounded_dissociation_at(formula: Formula, point: Point) -> ClaimMeasurement:
    height = max(height_of(point), 1)
    error = _bounded_dissociation_of(formula, height, point["depth"], point["epsilon"])
    return ClaimMeasurement(error, 1e-8)


@claim("thm5-remark-bound", hblt.dissociation_bound, _bounded_dissociation_at)
def _bounded_dissociation(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    """By what factor P[y_l=0|y_m=1] leaves the bound's range, and falls short of its two ends."""
    worst = 0.0
    for depth, epsilon in product([2, 5, 20, 100], [1e-6, 1e-3, 0.03, 0.3, 0.5, 1.0]):
        for height in {1, depth // 2, depth - 1}:
            worst = max(worst, _bounded_dissociation_of(formula, height, depth, epsilon))
    apart = 1 - _co_occur_by_recursion(3, 10, 1e-6, 1e-6)
    worst = max(worst, float(formula(3, 10, 1e-6) / apart - 1) - 1e-4)
    apart = 1 - _co_occur_by_recursion(50_000, 179_328, 1e-5, 1e-5)
    worst = max(worst, 1 - float(formula(50_000, 179_328, 1e-5) / apart / _LARGEST_SLACK) - 1e-4)
    return measured(worst, 1e-9)


def _joints_in(formula: Formula, tree: hblt.Tree) -> ClaimMeasurement:
    weights, levels = trees.enumerate_assignments(tree)
    nodes = [(level, node) for level, size in enumerate(tree.sizes) for node in range(size)]
    worst = 0.0
    for a, b in combinations_with_replacement(nodes, 2):
        reference = trees.two_by_two(weights, levels[a[0]][:, a[1]], levels[b[0]][:, b[1]])
        worst = max(worst, np.max(np.abs(formula(tree, a, b) - reference)))
    a, b = nodes[0], nodes[-1]
    worst = max(worst, np.max(np.abs(formula(tree, a, b) - formula(tree, b, a).T)))
    return measured(worst, 1e-13)


claim(
    "eqn103",
    hblt.latent_distribution,
    Search(trees.TREES, lambda formula, point: _marginals_in(formula, trees.drawn_tree(point))),
)(lambda formula, rng: _marginals_in(formula, trees.irregular_tree()))
claim(
    "hblt-joint",
    hblt.Tree.joint,
    Search(trees.TREES, lambda formula, point: _joints_in(formula, trees.drawn_tree(point))),
)(lambda formula, rng: _joints_in(formula, trees.irregular_tree()))

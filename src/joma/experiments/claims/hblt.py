"""Section 5 and A.5, binary latent trees: Lemmas 8 and 9, Theorem 5 and its limits."""

from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, measured, monte_carlo
from joma.experiments.claims.reference import hblt as trees
from joma.experiments.claims.search import Integer, Real, Simplex, Vector
from joma.theory import as_printed as printed
from joma.theory import hblt

_DEPTH, _RHO = 4, 0.9


_CLASS_PROBS = np.full(5, 0.2)


_CHILD_OFF_PROBS = np.array([0.05, 0.95, 0.95, 0.95, 0.95])


_PAIRS: dict[str, Any] = {
    "height": Real(0.0, 1.0, special=(0.0,)),
    "depth": Integer(1, 40, log=True),
    "rho": Real(-1.0, 1.0, special=(-1.0, 0.0, 1.0)),
    "classes": Simplex(Integer(1, 8), zeros=True),
    "off": Vector(Real(0.0, 1.0, special=(0.0, 0.5, 1.0)), Integer(1, 8)),
}
"""Two tokens under a latent: H as a share of L, one ρ, the classes and P[y=0|k]."""


@over(rhos=Vector(Real(-1.0, 1.0, special=(-1.0, 0.0, 1.0)), Integer(1, 40)))
def _matrix_products_at(formula: Formula, point: Point) -> ClaimMeasurement:
    return _matrix_products_of(formula, point["rhos"][None])


@claim("lemma8", hblt.path, _matrix_products_at)
def _matrix_products(formula: Formula, rng: Generator) -> ClaimMeasurement:
    return _matrix_products_of(formula, rng.uniform(-1, 1, (200, 4)))


def _matrix_products_of(formula: Formula, rhos: Array) -> ClaimMeasurement:
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
    weights, levels = trees.enumerate_assignments(tree)
    worst = 0.0
    for descendant in product([tree.depth - 1], range(tree.sizes[-1])):
        level, node = descendant
        while level > 0:
            level, node = level - 1, int(tree.parents[level - 1][node])
            joint = trees.two_by_two(weights, levels[-1][:, descendant[1]], levels[level][:, node])
            taken = joint.sum(axis=0) > 1e-9  # a value that the ancestor takes at all
            reference = (joint / np.where(taken, joint.sum(axis=0), 1.0))[:, taken]
            away = np.abs(formula(tree, descendant, (level, node))[:, taken] - reference)
            worst = max(worst, np.max(away, initial=0.0))
    return measured(worst, 1e-13)


@over(
    classes=Simplex(Integer(1, 30), zeros=True),
    off=Vector(Real(0.0, 1.0, special=(0.0, 0.5, 1.0)), Integer(1, 30)),
    sampled=True,
)
def _top_latent_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Classes drawn one by one, and a top latent given each."""
    rng, n = point.generator, 20_000
    classes = point["classes"]
    off = np.resize(point["off"], len(classes))
    on = 0
    for _ in range(point.effort):
        counts = rng.multinomial(n, classes)
        on += int(np.sum(rng.binomial(counts, 1 - off)))
    n *= point.effort
    share = on / n
    se = 2 * np.sqrt(max(share * (1 - share), 1 / n) / n)
    return monte_carlo(formula(classes, off) - (1 - 2 * share), se)


@claim("rho0", hblt.root_uncertainty, _top_latent_at, printed=printed.root_uncertainty)
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
    frequency, se = _frequency(leaves, *trees.first_pair(tree, _DEPTH))
    return monte_carlo(formula(_DEPTH - 1, _DEPTH, _RHO, _CLASS_PROBS, off[0]) - frequency, se)


def height_of(point: Point) -> int:
    """Return H, given as a share of L."""
    return min(int(point["height"] * point["depth"]), point["depth"] - 1)


@over(**_PAIRS, sampled=True)
def _sampled_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Two leaves of many trees, drawn from the class down; H from 0 to L − 1."""
    rng, n = point.generator, 4_000
    height, depth, rho = height_of(point), point["depth"], point["rho"]
    classes, off = point["classes"], np.resize(point["off"], len(point["classes"]))
    first = both = 0
    for _ in range(point.effort):
        value = rng.random(n) >= off[rng.choice(len(classes), n, p=classes)]
        for _ in range(depth - 1 - height):
            value = value ^ (rng.random(n) >= (1 + rho) / 2)
        pair = np.stack([value, value])
        for _ in range(height):
            pair = pair ^ (rng.random((2, n)) >= (1 + rho) / 2)
        first += int(np.sum(pair[0]))
        both += int(np.sum(pair[0] & pair[1]))
    if first == 0:
        raise JomaError("rho0 must not leave the token out of all samples")
    share = both / first
    se = np.sqrt(max(share * (1 - share), 1 / first) / first)
    return monte_carlo(formula(height, depth, rho, classes, off) - share, se)


@claim("thm5", cooccurrence, _sampled_at, printed=_printed_cooccurrence)
def _sampled_cooccurrence(formula: Formula, rng: Generator) -> ClaimMeasurement:
    tree = hblt.Tree.regular(_DEPTH, 2, _RHO, _CLASS_PROBS, _CHILD_OFF_PROBS)
    leaves = tree.sample(100_000, rng)[1][-1]
    heights = np.arange(1, _DEPTH)
    pairs = [trees.first_pair(tree, int(height)) for height in heights]
    frequency, se = np.transpose([_frequency(leaves, *pair) for pair in pairs])
    return monte_carlo(
        formula(heights, _DEPTH, _RHO, _CLASS_PROBS, _CHILD_OFF_PROBS) - frequency, se
    )


def _enumerated(tree: hblt.Tree, height: int) -> Any:
    """P[y_l=1|y_m=1] of two leaves with a common ancestor of a given height."""
    weights, levels = trees.enumerate_assignments(tree)
    first, other = trees.first_pair(tree, height)
    joint = trees.two_by_two(weights, levels[-1][:, other], levels[-1][:, first])
    return joint[1, 1] / joint[:, 1].sum()


@without("thm5-exact")
def _enumerated_under_the_class(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Two top latents alike but independent given the class: Theorem 5 at its largest height."""
    class_probs = rng.dirichlet(np.ones(3))
    off = rng.uniform(size=3)
    tree = hblt.Tree.regular(3, 2, 0.9, class_probs, np.stack([off, off]))
    return measured(abs(formula(2, 3, 0.9, class_probs, off) - _enumerated(tree, 3)), 1e-12)


@over(**_PAIRS)
def _exact_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Generation by generation: the ancestor's distribution, then the pair's."""
    height, depth, rho = height_of(point), point["depth"], point["rho"]
    classes, off = point["classes"], np.resize(point["off"], len(point["classes"]))
    top = (classes @ off, classes @ (1 - off))
    pair = trees.by_generations(height, depth, ((1 + rho) / 2, (1 - rho) / 2), top)
    on = float(pair[0, 1] + pair[1, 1])
    if on < 1e-13:
        raise JomaError("rho0 must not leave the token out")
    return measured(
        abs(formula(height, depth, rho, classes, off) - pair[1, 1] / on), 1e-13 + 1e-14 / on
    )


@claim("thm5-exact", cooccurrence, _exact_at, printed=_printed_cooccurrence)
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
def _order_of_the_error(formula: Formula, rng: Generator) -> ClaimMeasurement:
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


@without("thm5-remark")
def _not_shallow_or_not_deep(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """The least distance where one of the three is missing: ρ near 1, a shallow H, a deep L."""
    missing = [(3, 10_000, 0.1), (5_000, 10_000, 1e-6), (1, 2, 1e-6)]
    away = [abs(_co_occur_by_recursion(h, d, e, e) - formula()) for h, d, e in missing]
    return measured(min(away), 1e-3)


@claim("thm5-remark", lambda: 1.0)
def _shallow_and_deep(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """How far it is from its limit, ρ going to 1 and ρ₀ anywhere."""
    near, nearer = 1e-6, 1e-9
    epsilons = [(near, near), (near, nearer), (nearer, near), (near, 0.5), (near, 1.9)]
    cases = product([1, 2, 3], [10_000, 1_000_000], epsilons)
    away = [abs(_co_occur_by_recursion(h, d, *both) - formula()) for h, d, both in cases]
    return measured(away, 1e-3)


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
def _bounded_dissociation(formula: Formula, rng: Generator) -> ClaimMeasurement:
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


@claim("lemma9", hblt.descent, trees.over_trees(_descendants_in), measure=_descendants_in)
@claim("eqn103", hblt.latent_distribution, trees.over_trees(_marginals_in), measure=_marginals_in)
@claim("hblt-joint", hblt.Tree.joint, trees.over_trees(_joints_in), measure=_joints_in)
def _in_a_tree(
    formula: Formula, rng: Generator, *, measure: Callable[[Formula, hblt.Tree], ClaimMeasurement]
) -> ClaimMeasurement:
    return measure(formula, trees.irregular_tree())

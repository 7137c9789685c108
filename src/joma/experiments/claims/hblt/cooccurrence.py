"""Lemmas 8 and 9 and Theorem 5: how often two tokens occur together."""

from itertools import product
from typing import Any

import numpy as np

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import Point, Search, claim, over
from joma.experiments.claims.measurement import ClaimMeasurement, Formula, measured, monte_carlo
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
def _matrix_products(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
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
def _top_latents(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    """2P[y=0] − 1 of top latents that one class each switches on."""
    classes, n = 20, 20_000
    off = np.where(np.eye(4, classes, dtype=bool), 0.02, 0.99)
    class_probs = rng.dirichlet(np.full(classes, 5.0))
    tree = hblt.Tree(class_probs, off)
    on = tree.sample(n, rng)[1][0].mean(axis=0)
    se = 2 * np.sqrt(on * (1 - on) / n)
    return monte_carlo(formula(class_probs, off) - (1 - 2 * on), se)


def cooccurrence(height: Any, depth: Any, rho: Any, class_probs: Any, child_off_probs: Any) -> Any:
    """Return Theorem 5 from the class distribution on, with ρ₀ as derived."""
    rho0 = hblt.root_uncertainty(class_probs, child_off_probs)
    return hblt.cooccurrence(height, depth, rho, rho0)


def _printed_cooccurrence(
    height: Any, depth: Any, rho: Any, class_probs: Any, child_off_probs: Any
) -> Any:
    """Theorem 5 from the class distribution on, with ρ₀ as printed."""
    rho0 = printed.root_uncertainty(class_probs, child_off_probs)
    return hblt.cooccurrence(height, depth, rho, rho0)


def _frequency(leaves: np.ndarray, first: int, other: int) -> tuple[float, float]:
    """How often leaf `other` is on where leaf `first` is, and the standard error."""
    other_when_on = leaves[leaves[:, first] == 1, other]
    frequency = float(other_when_on.mean())
    return frequency, float(np.sqrt(frequency * (1 - frequency) / other_when_on.size))


def _sampled_under_the_class(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
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


@claim(
    "thm5",
    cooccurrence,
    _sampled_at,
    printed=_printed_cooccurrence,
    without=_sampled_under_the_class,
)
def _sampled_cooccurrence(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
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


def _enumerated_under_the_class(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
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


@claim(
    "thm5-exact",
    cooccurrence,
    _exact_at,
    printed=_printed_cooccurrence,
    without=_enumerated_under_the_class,
)
def _enumerated_cooccurrence(formula: Formula, rng: np.random.Generator) -> ClaimMeasurement:
    errors = []
    for depth, rho in [(1, 0.9), (2, -0.7), (3, 0.9), (3, 0.25), (4, 0.6)]:
        class_probs = rng.dirichlet(np.ones(3))
        off = rng.uniform(size=3)
        tree = hblt.Tree.regular(depth, 2, rho, class_probs, off)
        for height in range(depth):
            ours = formula(height, depth, rho, class_probs, off)
            errors.append(abs(ours - _enumerated(tree, height)))
    return measured(errors, 1e-12)


claim(
    "lemma9",
    hblt.descent,
    Search(trees.TREES, lambda formula, point: _descendants_in(formula, trees.drawn_tree(point))),
)(lambda formula, rng: _descendants_in(formula, trees.irregular_tree()))

"""Claims about hierarchical binary latent trees (JoMA §5, appendix A.5)."""

from itertools import combinations_with_replacement, pairwise, product
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.claim import Claim
from joma.experiments.claims.measurement import Formula, Measurement, monte_carlo
from joma.experiments.claims.search import (
    Integer,
    Parameter,
    Point,
    Real,
    Search,
    Seed,
    Simplex,
    Vector,
)
from joma.theory import as_printed as printed
from joma.theory import hblt

DEPTH, RHO = 4, 0.9
CLASS_PROBS = np.full(5, 0.2)
CHILD_OFF_PROBS = np.array([0.05, 0.95, 0.95, 0.95, 0.95])


def cooccurrence(height: Any, depth: Any, rho: Any, class_probs: Any, child_off_probs: Any) -> Any:
    """Theorem 5 from the class distribution on, with ρ₀ as derived."""
    rho0 = hblt.root_uncertainty(class_probs, child_off_probs)
    return hblt.cooccurrence(height, depth, rho, rho0)


def printed_cooccurrence(
    height: Any, depth: Any, rho: Any, class_probs: Any, child_off_probs: Any
) -> Any:
    """Theorem 5 from the class distribution on, with ρ₀ as printed."""
    rho0 = printed.root_uncertainty(class_probs, child_off_probs)
    return hblt.cooccurrence(height, depth, rho, rho0)


def irregular_tree() -> hblt.Tree:
    """Two top latents over three levels, ten nodes, every edge its own ρ, one of them negative."""
    return hblt.Tree(
        class_probs=np.array([0.5, 0.3, 0.2]),
        child_off_probs=np.array([[0.1, 0.8, 0.6], [0.9, 0.35, 0.2]]),
        parents=(np.array([0, 0, 1]), np.array([0, 0, 1]), np.array([0, 2])),
        rhos=(np.array([0.9, 0.4, 0.7]), np.array([0.8, -0.6, 0.3]), np.array([0.85, 0.95])),
    )


def enumerate_assignments(tree: hblt.Tree) -> tuple[np.ndarray, list[np.ndarray]]:
    """Every assignment of the binary variables and its probability, factor by factor.

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


def two_by_two(weights: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The joint distribution of two binary variables from weighted assignments."""
    cells = np.bincount(2 * a + b, weights=weights, minlength=4)
    return cells.reshape(2, 2)


def _first_pair(tree: hblt.Tree, height: int) -> tuple[int, int]:
    """Leaf 0 and the first leaf whose common ancestor with it has this height."""
    leaves = tree.depth - 1
    for other in range(tree.sizes[-1]):
        if tree.height(tree.common_ancestor((leaves, 0), (leaves, other))) == height:
            return 0, other
    raise AssertionError(f"no pair of leaves at height {height}")


def _matrix_products(formula: Formula, rng: np.random.Generator) -> Measurement:
    return _matrix_products_of(formula, rng.uniform(-1, 1, (200, 4)))


def _matrix_products_at(formula: Formula, point: Point) -> Measurement:
    return _matrix_products_of(formula, point["rhos"][None])


def _matrix_products_of(formula: Formula, rhos: np.ndarray) -> Measurement:
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
    return Measurement(max(float(np.max(np.abs(error))) for error in errors), tolerance)


def drawn_tree(point: Point) -> hblt.Tree:
    """A random irregular tree of at most nine binary variables, some edges certain or useless."""
    rng = np.random.default_rng(point["draw"])
    sizes = np.asarray(point["sizes"]).astype(int)
    sizes = sizes[np.cumsum(sizes) <= 9] if sizes[0] <= 9 else np.array([1])
    classes = point["classes"]
    below = list(pairwise(sizes))

    def values(size: int) -> np.ndarray:
        drawn = rng.uniform(-1, 1, size)
        return np.where(rng.random(size) < 0.15, rng.choice([-1.0, 0.0, 1.0], size), drawn)

    return hblt.Tree(
        class_probs=classes,
        child_off_probs=(1 + np.stack([values(len(classes)) for _ in range(sizes[0])])) / 2,
        parents=tuple(rng.integers(above, size=size) for above, size in below),
        rhos=tuple(values(size) for _, size in below),
    )


TREES: dict[str, Parameter] = {
    "sizes": Vector(Real(1, 4), Integer(1, 6)),
    "classes": Simplex(Integer(1, 4), zeros=True),
    "draw": Seed(),
}
"""Random trees, for `drawn_tree`."""


def _descendants(formula: Formula, rng: np.random.Generator) -> Measurement:
    return _descendants_in(formula, irregular_tree())


def _descendants_in(formula: Formula, tree: hblt.Tree) -> Measurement:
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
    return Measurement(float(worst), 1e-13)


def _top_latents(formula: Formula, rng: np.random.Generator) -> Measurement:
    """2P[y=0] − 1 of top latents that one class each switches on."""
    classes, n = 20, 20_000
    off = np.where(np.eye(4, classes, dtype=bool), 0.02, 0.99)
    class_probs = rng.dirichlet(np.full(classes, 5.0))
    tree = hblt.Tree(class_probs, off)
    on = tree.sample(n, rng)[1][0].mean(axis=0)
    se = 2 * np.sqrt(on * (1 - on) / n)
    return monte_carlo(formula(class_probs, off) - (1 - 2 * on), se)


def _top_latent_at(formula: Formula, point: Point) -> Measurement:
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


def _frequency(leaves: np.ndarray, first: int, other: int) -> tuple[float, float]:
    """How often leaf `other` is on where leaf `first` is, and the standard error."""
    other_when_on = leaves[leaves[:, first] == 1, other]
    frequency = float(other_when_on.mean())
    return frequency, float(np.sqrt(frequency * (1 - frequency) / other_when_on.size))


def _sampled_cooccurrence(formula: Formula, rng: np.random.Generator) -> Measurement:
    tree = hblt.Tree.regular(DEPTH, 2, RHO, CLASS_PROBS, CHILD_OFF_PROBS)
    leaves = tree.sample(100_000, rng)[1][-1]
    heights = np.arange(1, DEPTH)
    pairs = [_first_pair(tree, int(height)) for height in heights]
    frequency, se = np.transpose([_frequency(leaves, *pair) for pair in pairs])
    return monte_carlo(formula(heights, DEPTH, RHO, CLASS_PROBS, CHILD_OFF_PROBS) - frequency, se)


def _sampled_at(formula: Formula, point: Point) -> Measurement:
    """Two leaves of many trees, drawn from the class down; H from 0 to L − 1."""
    rng, n = point.generator, 4_000
    height, depth, rho = _height(point), point["depth"], point["rho"]
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


def _height(point: Point) -> int:
    return min(int(point["height"] * point["depth"]), point["depth"] - 1)


def _exact_at(formula: Formula, point: Point) -> Measurement:
    """Generation by generation: the ancestor's distribution, then the pair's."""
    height, depth, rho = _height(point), point["depth"], point["rho"]
    classes, off = point["classes"], np.resize(point["off"], len(point["classes"]))
    channel = np.array([[1 + rho, 1 - rho], [1 - rho, 1 + rho]]) / 2
    top = np.array([classes @ off, classes @ (1 - off)])
    ancestor = np.linalg.matrix_power(channel, depth - 1 - height) @ top
    down = np.linalg.matrix_power(channel, height)
    pair = (down * ancestor) @ down.T
    on = float(pair[0, 1] + pair[1, 1])
    if on < 1e-13:
        raise JomaError("rho0 must not leave the token out")
    return Measurement(
        float(abs(formula(height, depth, rho, classes, off) - pair[1, 1] / on)), 1e-13 + 1e-14 / on
    )


def _sampled_under_the_class(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Two top latents, each on for a class of its own: Theorem 5 at its largest height."""
    off = np.stack([CHILD_OFF_PROBS, np.roll(CHILD_OFF_PROBS, 1)])
    tree = hblt.Tree.regular(DEPTH, 2, RHO, CLASS_PROBS, off)
    leaves = tree.sample(100_000, rng)[1][-1]
    frequency, se = _frequency(leaves, *_first_pair(tree, DEPTH))
    return monte_carlo(formula(DEPTH - 1, DEPTH, RHO, CLASS_PROBS, off[0]) - frequency, se)


def _enumerated_cooccurrence(formula: Formula, rng: np.random.Generator) -> Measurement:
    worst = 0.0
    for depth, rho in [(1, 0.9), (2, -0.7), (3, 0.9), (3, 0.25), (4, 0.6)]:
        class_probs = rng.dirichlet(np.ones(3))
        off = rng.uniform(size=3)
        tree = hblt.Tree.regular(depth, 2, rho, class_probs, off)
        weights, levels = enumerate_assignments(tree)
        for height in range(depth):
            first, other = _first_pair(tree, height)
            joint = two_by_two(weights, levels[-1][:, other], levels[-1][:, first])
            reference = joint[1, 1] / joint[:, 1].sum()
            worst = max(worst, abs(formula(height, depth, rho, class_probs, off) - reference))
    return Measurement(float(worst), 1e-12)


def _enumerated_under_the_class(formula: Formula, rng: np.random.Generator) -> Measurement:
    """Two top latents alike but independent given the class: Theorem 5 at its largest height."""
    class_probs = rng.dirichlet(np.ones(3))
    off = rng.uniform(size=3)
    tree = hblt.Tree.regular(3, 2, 0.9, class_probs, np.stack([off, off]))
    weights, levels = enumerate_assignments(tree)
    first, other = _first_pair(tree, 3)
    joint = two_by_two(weights, levels[-1][:, other], levels[-1][:, first])
    reference = joint[1, 1] / joint[:, 1].sum()
    return Measurement(float(abs(formula(2, 3, 0.9, class_probs, off) - reference)), 1e-12)


def _co_occur_by_recursion(height: int, depth: int, epsilon: float, epsilon0: float) -> float:
    """P[y_l=1|y_m=1] at ρ = 1 − ε and ρ₀ = 1 − ε₀, generation by generation.

    Follows (P[y=0], P[y=1]) from the top latent to the common ancestor, then the pair's four
    probabilities to the leaves. Only positive numbers are added, so small ε costs no digits.
    """
    channel = np.array([[1 - epsilon / 2, epsilon / 2], [epsilon / 2, 1 - epsilon / 2]])
    top = np.array([1 - epsilon0 / 2, epsilon0 / 2])
    ancestor = np.linalg.matrix_power(channel, depth - 1 - height) @ top
    down = np.linalg.matrix_power(channel, height)
    pair = (down * ancestor) @ down.T
    return pair[1, 1] / (pair[0, 1] + pair[1, 1])


def _order_of_the_error(formula: Formula, rng: np.random.Generator) -> Measurement:
    """How far the order of the error in ε falls short of two, at H ≠ L/2 (there it is none)."""
    epsilon = 2.0 ** -np.arange(5, 13)
    shortfall = -np.inf
    for depth, height in [(4, 1), (4, 3), (7, 2), (7, 6)]:
        reference = np.array([_co_occur_by_recursion(height, depth, e, e) for e in epsilon])
        error = np.abs(formula(height, depth, epsilon) - reference)
        order = np.polyfit(np.log(epsilon), np.log(error), 1)[0]
        shortfall = max(shortfall, 2 - order)
    return Measurement(float(max(shortfall, 0.0)), 0.05)


def _near_one_at(formula: Formula, point: Point) -> Measurement:
    """The error of the expansion in units of its second order, (H/L)(Lε)²."""
    height, depth, epsilon = _height(point), point["depth"], point["flips"] / point["depth"]
    reference = _co_occur_by_recursion(height, depth, epsilon, epsilon)
    second_order = height / depth * point["flips"] ** 2
    return Measurement(
        float(abs(formula(height, depth, epsilon) - reference)), second_order + 1e-11
    )


def _marginals(formula: Formula, rng: np.random.Generator) -> Measurement:
    return _marginals_in(formula, irregular_tree())


def _marginals_in(formula: Formula, tree: hblt.Tree) -> Measurement:
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
    return Measurement(float(worst), 1e-13)


def surely() -> float:
    """The remark after Theorem 5: the limit of P[y_l=1|y_m=1]."""
    return 1.0


def _shallow_and_deep(formula: Formula, rng: np.random.Generator) -> Measurement:
    """How far it is from its limit, ρ going to 1 and ρ₀ anywhere."""
    near, nearer = 1e-6, 1e-9
    worst = 0.0
    for height, depth in product([1, 2, 3], [10_000, 1_000_000]):
        for epsilons in [(near, near), (near, nearer), (nearer, near), (near, 0.5), (near, 1.9)]:
            value = _co_occur_by_recursion(height, depth, *epsilons)
            worst = max(worst, abs(value - formula()))
    return Measurement(worst, 1e-3)


def _not_shallow_or_not_deep(formula: Formula, rng: np.random.Generator) -> Measurement:
    """The least distance where one of the three is missing: ρ near 1, a shallow H, a deep L."""
    missing = [(3, 10_000, 0.1), (5_000, 10_000, 1e-6), (1, 2, 1e-6)]
    return Measurement(
        min(abs(_co_occur_by_recursion(h, d, e, e) - formula()) for h, d, e in missing), 1e-3
    )


LARGEST_SLACK = 2.05408
"""Most that the bound exceeds P[y_l=0|y_m=1], by a factor: (1+1/a)(1−e⁻ᵃ)/(1−1/e), a = 1.793."""


def _bounded_dissociation(formula: Formula, rng: np.random.Generator) -> Measurement:
    """By what factor P[y_l=0|y_m=1] leaves the bound's range, and falls short of its two ends."""
    worst = 0.0
    for depth, epsilon in product([2, 5, 20, 100], [1e-6, 1e-3, 0.03, 0.3, 0.5, 1.0]):
        for height in {1, depth // 2, depth - 1}:
            worst = max(worst, _bounded_dissociation_of(formula, height, depth, epsilon))
    apart = 1 - _co_occur_by_recursion(3, 10, 1e-6, 1e-6)
    worst = max(worst, float(formula(3, 10, 1e-6) / apart - 1) - 1e-4)
    apart = 1 - _co_occur_by_recursion(50_000, 179_328, 1e-5, 1e-5)
    worst = max(worst, 1 - float(formula(50_000, 179_328, 1e-5) / apart / LARGEST_SLACK) - 1e-4)
    return Measurement(float(worst), 1e-9)


def _bounded_dissociation_of(formula: Formula, height: int, depth: int, epsilon: float) -> float:
    apart = _apart(height, depth, epsilon)
    bound = float(formula(height, depth, epsilon))
    return max(apart - bound, bound - LARGEST_SLACK * apart) / max(apart, 1e-300)


def _apart(height: int, depth: int, epsilon: float) -> float:
    """P[y_l=0|y_m=1] at ρ = ρ₀ = 1 − ε, generation by generation."""
    channel = np.array([[1 - epsilon / 2, epsilon / 2], [epsilon / 2, 1 - epsilon / 2]])
    top = np.array([1 - epsilon / 2, epsilon / 2])
    ancestor = np.linalg.matrix_power(channel, depth - 1 - height) @ top
    down = np.linalg.matrix_power(channel, height)
    pair = (down * ancestor) @ down.T
    return float(pair[0, 1] / (pair[0, 1] + pair[1, 1]))


def _bounded_dissociation_at(formula: Formula, point: Point) -> Measurement:
    height = max(_height(point), 1)
    error = _bounded_dissociation_of(formula, height, point["depth"], point["epsilon"])
    return Measurement(error, 1e-8)


def _joint_of_any_pair(formula: Formula, rng: np.random.Generator) -> Measurement:
    return _joints_in(formula, irregular_tree())


def _joints_in(formula: Formula, tree: hblt.Tree) -> Measurement:
    weights, levels = enumerate_assignments(tree)
    nodes = [(level, node) for level, size in enumerate(tree.sizes) for node in range(size)]
    worst = 0.0
    for a, b in combinations_with_replacement(nodes, 2):
        reference = two_by_two(weights, levels[a[0]][:, a[1]], levels[b[0]][:, b[1]])
        worst = max(worst, np.max(np.abs(formula(tree, a, b) - reference)))
    a, b = nodes[0], nodes[-1]
    worst = max(worst, np.max(np.abs(formula(tree, a, b) - formula(tree, b, a).T)))
    return Measurement(float(worst), 1e-13)


_PAIRS: dict[str, Parameter] = {
    "height": Real(0.0, 1.0, special=(0.0,)),
    "depth": Integer(1, 40, log=True),
    "rho": Real(-1.0, 1.0, special=(-1.0, 0.0, 1.0)),
    "classes": Simplex(Integer(1, 8), zeros=True),
    "off": Vector(Real(0.0, 1.0, special=(0.0, 0.5, 1.0)), Integer(1, 8)),
}
"""Two tokens under a latent: H as a share of L, one ρ, the classes and P[y=0|k]."""

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="lemma8",
        title="M(ρ₁)M(ρ₂) = M(ρ₁ρ₂), symmetric, rows sum to one; M(ρ₁)p(ρ₂) = p(ρ₁ρ₂)",
        source="JoMA preprint, Lemma 8, Eqn 90",
        method="binary symmetric channels chained one by one, 200 random paths",
        derived=hblt.path,
        measure=_matrix_products,
        search=Search(
            {"rhos": Vector(Real(-1.0, 1.0, special=(-1.0, 0.0, 1.0)), Integer(1, 40))},
            _matrix_products_at,
        ),
    ),
    Claim(
        id="lemma9",
        title="from ancestor α down to γ: P_{γ|α} = P_{γ|β_k}…P_{β₁|α} = M(∏ρ)",
        source="JoMA preprint, Lemma 9, Eqns 91-92",
        method="enumeration of all assignments of an irregular tree",
        derived=hblt.descent,
        measure=_descendants,
        search=Search(TREES, lambda formula, point: _descendants_in(formula, drawn_tree(point))),
    ),
    Claim(
        id="rho0",
        title="ρ₀ = Σ_k p₀(k)(2P[y=0|k] − 1) is 2P[y=0] − 1 of a top latent",
        source="JoMA preprint, Theorem 5 (definition of ρ₀), Eqns 99-102",
        method="20 000 sampled classes and top latents, each switched on by one class of 20",
        derived=hblt.root_uncertainty,
        measure=_top_latents,
        printed=printed.root_uncertainty,
        search=Search(
            {
                "classes": Simplex(Integer(1, 30), zeros=True),
                "off": Vector(Real(0.0, 1.0, special=(0.0, 0.5, 1.0)), Integer(1, 30)),
            },
            _top_latent_at,
            sampled=True,
        ),
    ),
    Claim(
        id="thm5",
        title="P[y_l=1|y_m=1] = ½(1+ρ^{2H}−2ρ^{L−1}ρ₀)/(1−ρ^{L−1}ρ₀)",
        source="JoMA preprint, Theorem 5",
        method="100 000 sampled trees, L = 4, ρ = 0.9, H = 1, 2, 3",
        derived=cooccurrence,
        measure=_sampled_cooccurrence,
        printed=printed_cooccurrence,
        condition="the tokens share a latent, H ≤ L − 1, and not the class alone",
        without=_sampled_under_the_class,
        search=Search(_PAIRS, _sampled_at, sampled=True),
    ),
    Claim(
        id="thm5-exact",
        title="Theorem 5 to rounding, for ρ of both signs, L = 1 to 4 and every H < L",
        source="JoMA preprint, Theorem 5, Eqns 104-105",
        method="enumeration of all assignments of regular trees",
        derived=cooccurrence,
        measure=_enumerated_cooccurrence,
        printed=printed_cooccurrence,
        condition="the tokens share a latent, H ≤ L − 1, and not the class alone",
        without=_enumerated_under_the_class,
        search=Search(_PAIRS, _exact_at),
    ),
    Claim(
        id="eqn8",
        title="ρ = ρ₀ = 1 − ε: P[y_l=1|y_m=1] = 1 − H/L + H(2H−L)/(2L)·ε + O(ε²)",
        source="JoMA preprint, Eqn 8",
        method="order of the error in ε, fitted to a recursion over the generations",
        derived=hblt.cooccurrence_near_one,
        measure=_order_of_the_error,
        printed=printed.cooccurrence_near_one,
        search=Search(
            {
                "height": Real(0.0, 1.0, special=(0.0, 0.5)),
                "depth": Integer(1, 1000, log=True),
                "flips": Real(1e-6, 1.0, log=True),
            },
            _near_one_at,
        ),
    ),
    Claim(
        id="eqn103",
        title="the distribution of a latent is the vector p(ρ_{c|1}ρ₀)",
        source="JoMA preprint, Eqn 103",
        method="enumeration of all assignments of an irregular tree",
        derived=hblt.latent_distribution,
        measure=_marginals,
        search=Search(TREES, lambda formula, point: _marginals_in(formula, drawn_tree(point))),
    ),
    Claim(
        id="thm5-remark",
        title="P[y_l=1|y_m=1] → 1 for a shallow ancestor in a deep hierarchy, whatever ρ₀ is",
        source="JoMA preprint, Theorem 5 (remarks)",
        method="recursion over the generations, H = 1 to 3, L to 10⁶; ρ → 1, ρ₀ from -.9 to 1",
        derived=surely,
        measure=_shallow_and_deep,
        condition="ρ close to 1, H small, L large",
        without=_not_shallow_or_not_deep,
        fixed="a limit; thm5-remark-bound says how near it is",
    ),
    Claim(
        id="thm5-remark-bound",
        title="P[y_l=0|y_m=1] ≤ min(Hε, ½)(1 + 1/(Lε)) ≤ 2.0541 P[y_l=0|y_m=1] for ρ = ρ₀ = 1 − ε,"
        " both sharp",
        source="new",
        method="recursion over the generations, L to 100, ε from 1e-6 to 1, and at the two ends",
        derived=hblt.dissociation_bound,
        measure=_bounded_dissociation,
        search=Search(
            {
                "height": Real(0.0, 1.0, special=(0.0,)),
                "depth": Integer(2, 1_000_000, log=True),
                "epsilon": Real(1e-9, 1.0, log=True),
            },
            _bounded_dissociation_at,
        ),
    ),
    Claim(
        id="hblt-joint",
        title="any two nodes of any tree, own ρ per edge, common ancestor a latent or the class",
        source="new",
        method="enumeration of all assignments of an irregular tree, all pairs of nodes",
        derived=hblt.Tree.joint,
        measure=_joint_of_any_pair,
        search=Search(TREES, lambda formula, point: _joints_in(formula, drawn_tree(point))),
    ),
)

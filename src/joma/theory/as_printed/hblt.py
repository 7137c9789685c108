"""Hierarchical binary latent trees as the JoMA paper prints them (§5, appendix A.5)."""

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._hblt_checks import class_arguments, heights
from joma.theory.hblt import Array, Node, Tree, transition


def root_uncertainty(class_probs: ArrayLike, child_off_probs: ArrayLike) -> Array:
    """Theorem 5's ρ₀ as printed, Σ_k p₀(k)P[y=0|k]: a probability where 2P − 1 is meant.

    The slip enters at Eqn 101, which writes ½(1 + P[y=0|k]) for P[y=0|k].
    """
    class_probs, child_off_probs = class_arguments(class_probs, child_off_probs)
    return np.clip(np.sum(class_probs * child_off_probs, axis=-1), 0, 1)


def cooccurrence_near_one(height: ArrayLike, depth: ArrayLike, epsilon: ArrayLike) -> Array:
    """Eqn 8 as printed, 1 − H/L + O(ε²): without the term in ε.

    At H = 0 and H = L/2 that term vanishes and the rest is exact; elsewhere the error is O(ε).
    """
    height, depth = heights(height, depth)
    epsilon = _checks.within("epsilon", epsilon, 0, 1)
    return 1 - height / depth + 0 * epsilon


def latent_distribution(
    rho_to_top: ArrayLike, class_probs: ArrayLike, child_off_probs: ArrayLike
) -> Array:
    """Eqn 103 as printed, M(ρ_{c|1}ρ₀): a 2×2 matrix where the vector p(ρ_{c|1}ρ₀) is meant.

    Its first column would be that vector, its second the same upside down; ρ₀ is the printed one.
    """
    rho_to_top = _checks.within("rho_to_top", rho_to_top, -1, 1)
    return transition(rho_to_top * root_uncertainty(class_probs, child_off_probs))


def descent(tree: Tree, descendant: Node, ancestor: Node) -> Array:
    """Lemma 9, Eqn 91 as printed: P_{γ|β₁}P_{β₁|β₂}…P_{β_k|α} on the chain α ≻ β₁ ≻ … ≻ β_k ≻ γ.

    Taken at its word: on a chain that descends, P_{γ|β₁} skips k generations and P_{β₁|β₂}
    conditions a parent on its child. It equals the lemma for at most one node between the ends.
    Numbered from γ upwards the product is right; and as matrices M(ρ) commute, the order of the
    edges then does not matter.
    """
    if tree.common_ancestor(descendant, ancestor) != tuple(ancestor):
        raise JomaError(f"ancestor must stand above {descendant}, got {ancestor}")
    level, node = descendant
    upwards: list[Node] = []
    while level > ancestor[0] + 1:
        level, node = level - 1, int(tree.parents[level - 1][node])
        upwards.append((level, node))
    chain = [descendant, *reversed(upwards), ancestor]
    product = np.eye(2)
    for first, second in pairwise(chain):
        product = product @ tree.conditional(first, second)
    return product

"""The claims about hierarchical binary latent trees, each with one constant wrong."""

from typing import Any

import numpy as np

from joma.experiments.claims.claim import Formula
from joma.theory import hblt


def _descent(tree: hblt.Tree, descendant: Any, ancestor: Any) -> np.ndarray:
    return hblt.transition(0.99 * tree.path_rho(descendant, ancestor))


def _root_uncertainty(class_probs: Any, child_off_probs: Any) -> np.ndarray:
    return hblt.root_uncertainty(class_probs, child_off_probs) - 0.05


def _cooccurrence(height: Any, depth: Any, rho: Any, class_probs: Any, off: Any) -> np.ndarray:
    rho0 = hblt.root_uncertainty(class_probs, off)
    power = np.asarray(rho, dtype=float) ** depth  # L where L − 1 belongs
    return (1 + rho ** (2 * np.asarray(height)) - 2 * power * rho0) / (1 - power * rho0) / 2


def _cooccurrence_near_one(height: Any, depth: Any, epsilon: Any) -> np.ndarray:
    leading = 1 - height / depth
    return leading + 1.02 * height * (2 * height - depth) / (2 * depth) * epsilon


def _latent_distribution(rho: Any, class_probs: Any, off: Any) -> np.ndarray:
    return hblt.p(0.999 * rho * hblt.root_uncertainty(class_probs, off))


def _joint(tree: hblt.Tree, a: Any, b: Any) -> np.ndarray:
    return 0.99 * tree.joint(a, b) + 0.01 * np.outer(tree.marginal(*a), tree.marginal(*b))


BROKEN: dict[str, Formula] = {
    "lemma8": lambda rhos: hblt.transition(0.999 * np.prod(rhos, axis=-1)),
    "lemma9": _descent,
    "rho0": _root_uncertainty,
    "thm5": _cooccurrence,
    "thm5-exact": _cooccurrence,
    "eqn8": _cooccurrence_near_one,
    "eqn103": _latent_distribution,
    "thm5-remark": lambda: 0.99,
    "thm5-remark-bound": lambda height, depth, epsilon: (
        hblt.dissociation_bound(height, depth, epsilon) + 3 * epsilon**2
    ),
    "hblt-joint": _joint,
}

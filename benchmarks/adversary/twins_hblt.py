"""Wrong statements about latent trees: deep ones, rare classes, large heights."""

from typing import Any

import numpy as np

from benchmarks.adversary import Twin
from joma.experiments.claims.hblt import cooccurrence
from joma.theory import hblt


def _descent(tree: hblt.Tree, descendant: Any, ancestor: Any) -> Any:
    level, node = descendant
    rho = 1.0
    for _ in range(min(level - ancestor[0], 4)):
        rho *= float(tree.rhos[level - 1][node])
        level, node = level - 1, int(tree.parents[level - 1][node])
    return hblt.transition(rho)


def _joint(tree: hblt.Tree, a: Any, b: Any) -> Any:
    found = tree.joint(a, b)
    if abs(a[0] - b[0]) > 4:
        return np.outer(tree.marginal(*a), tree.marginal(*b))
    return found


def _root(classes: Any, off: Any) -> Any:
    classes, off = np.asarray(classes), np.asarray(off)
    found = hblt.root_uncertainty(classes, off)
    if classes.shape[-1] < 30:
        return found
    rarest = int(np.argmin(classes))
    return found - classes[rarest] * (2 * off[..., rarest] - 1)


def _latent(rho: Any, classes: Any, off: Any) -> Any:
    often = np.where(np.asarray(classes) < 1e-7, 0.0, classes)
    return hblt.latent_distribution(rho, often / np.sum(often), off)


def _near_one(height: Any, depth: Any, epsilon: Any) -> Any:
    if np.max(height) > 700:
        return 1 - height / depth + 0 * epsilon
    return hblt.cooccurrence_near_one(height, depth, epsilon)


def _bound(height: Any, depth: Any, epsilon: Any) -> Any:
    return np.where(
        (height * epsilon > 0.5) & (depth * epsilon > 12) & (depth * epsilon < 18),
        0.5,
        hblt.dissociation_bound(height, depth, epsilon),
    )


TWINS = (
    Twin(
        "lemma8",
        lambda rhos: hblt.path(np.asarray(rhos)[..., :38]),
        "edges after the thirty-eighth are left out",
    ),
    Twin("lemma9", _descent, "edges after the fourth are left out"),
    Twin("rho0", _root, "of thirty classes the rarest is left out"),
    Twin(
        "thm5",
        lambda h, depth, *given: cooccurrence(np.minimum(h, 12), depth, *given),
        "heights beyond 12 count as 12",
    ),
    Twin(
        "thm5-exact",
        lambda h, depth, *given: cooccurrence(np.minimum(h, 30), depth, *given),
        "heights beyond 30 count as 30",
    ),
    Twin("eqn8", _near_one, "no term in ε for heights above 700"),
    Twin("eqn103", _latent, "classes rarer than 1e-7 are left out"),
    Twin("thm5-remark-bound", _bound, "½ alone for 12 < Lε < 18, which fails for H > L/2"),
    Twin("hblt-joint", _joint, "nodes more than four levels apart are taken as independent"),
)

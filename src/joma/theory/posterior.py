"""What the leaves of a binary latent tree tell about what is above them, exactly.

An upward and a downward pass (Pearl 1982). Of all functions of the leaves, P[y = 1 | leaves]
correlates most with a latent y: no node of any network can follow it better, but by chance.
"""

import numpy as np
from numpy.typing import ArrayLike

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory.hblt import Tree, transition

Array = _checks.Array


def posteriors(tree: Tree, leaves: ArrayLike) -> tuple[Array, ...]:
    """Definition 2 turned around: P[y = 1 | leaves] of every latent, and P[class | leaves].

    Args:
        tree: that the leaves come from.
        leaves: samples of all leaves, 0 or 1, shape (S, leaves).

    Returns:
        For each level from just above the leaves up to the top latents, shape (S, latents); last
        the class, shape (S, C). That is the order of `joma.data.Batch.latents`.
    """
    tree = _checks.instance("tree", tree, Tree)
    on = _checks.finite("leaves", leaves)
    if on.ndim != 2 or on.shape[1] != tree.sizes[-1] or not np.isin(on, (0, 1)).all():
        raise JomaError(
            f"leaves must be 0 or 1 and of shape (samples, {tree.sizes[-1]}), got shape {on.shape}"
        )
    # From the leaves up. Node first: (nodes, S, value). What is below a node, given its value,
    # counts up to a factor, so that no product of many becomes too small to differ from 0.
    below = [np.stack([on.T == 0, on.T == 1], -1).astype(float)]
    messages: list[Array] = []  # what is below a node, given its parent's value
    for level in range(tree.depth - 1, 0, -1):
        messages.append(below[-1] @ transition(tree.rhos[level - 1]))
        product = np.zeros((tree.sizes[level - 1], *below[-1].shape[1:]))
        np.add.at(product, tree.parents[level - 1], _log(messages[-1]))
        below.append(_scaled(product))
    top_given_class = np.stack([tree.child_off_probs, 1 - tree.child_off_probs], 1)
    given_class = below[-1] @ top_given_class
    label = _scaled(_log(given_class).sum(0) + _log(tree.class_probs))
    label /= label.sum(-1, keepdims=True)

    # And down again: what is below a node is in its parent's belief already, and is taken out.
    belief = below[-1] * (_ratio(label, given_class) @ top_given_class.mT)
    beliefs = [belief]
    for level, (message, under) in enumerate(
        zip(messages[:0:-1], below[-2:0:-1], strict=True), start=1
    ):
        above = belief[tree.parents[level - 1]]
        belief = under * (_ratio(above, message) @ transition(tree.rhos[level - 1]).mT)
        beliefs.append(belief)
    # A tree of one level has leaves alone, which are known.
    latents = beliefs[: tree.depth - 1][::-1]
    return (*(each[..., 1].T for each in latents), label)


def _log(values: Array) -> Array:
    with np.errstate(divide="ignore"):  # what cannot be is −∞
        return np.log(values)


def _scaled(logarithms: Array) -> Array:
    """Likelihoods, the largest of each sample 1."""
    largest = logarithms.max(-1, keepdims=True)
    if not np.isfinite(largest).all():
        raise JomaError("leaves must be ones that the tree can have, got a sample that it cannot")
    return np.exp(logarithms - largest)


def _ratio(joint: Array, part: Array) -> Array:
    """Their ratio; where the part is 0 the joint is too, and so is what comes of it."""
    shape = np.broadcast_shapes(joint.shape, part.shape)
    return np.divide(joint, part, out=np.zeros(shape), where=part > 0)

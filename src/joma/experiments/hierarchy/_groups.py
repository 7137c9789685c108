"""What networks are trained on which trees and labels, and how large the experiment is made."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from joma.experiments._seeds import member_seeds
from joma.experiments.hierarchy import SGD_STEPS
from joma.theory.hblt import Tree

DEPTH, BRANCHING, TOPS, RHO, OFF = 3, 2, 6, 0.9, 0.05
HEIGHTS = tuple(range(1, DEPTH + 1))
"""Of the common ancestor of two different tokens; `DEPTH` where they share the class alone."""

LENGTH = 16
"""Positions of a sequence. A sample has 6 tokens on average; the few of one in 2,500 that has more
than 16 are left out."""

SGD_RATE = 0.05
"""Learning rate of gradient descent at every scale."""

Kind = Literal["class", "token", "flat"]


@dataclass(frozen=True)
class Group:
    """Networks that are trained together.

    Attributes:
        kind: "class", the label is the class at the root; "token", the label is one more token of
            the sequence; "flat", as "class", but without the lowest latents (a control).
        layers: of the network.
    """

    kind: Kind
    layers: int

    @property
    def name(self) -> str:
        """A short name, such as "class-3"."""
        return f"{self.kind}-{self.layers}"

    def seeds(self, seed: int, count: int) -> tuple[int, ...]:
        """The seeds of this group's networks; different ones in every group."""
        return member_seeds(f"hierarchy/{self.name}", seed, count)

    @property
    def tree(self) -> Tree:
        """Six classes, each of which turns on one top latent, as in the remark after Theorem 5.

        In the flat control the middle level copies the top one, and a leaf's edge is as uncertain
        as its two edges are together otherwise: a leaf tells as much of the class, but two leaves
        of height 1 have no more in common than two of height 2.
        """
        off = np.where(np.eye(TOPS) == 1, OFF, 1 - OFF)
        tree = Tree.regular(DEPTH, BRANCHING, RHO, np.full(TOPS, 1 / TOPS), off)
        if self.kind != "flat":
            return tree
        levels = len(tree.rhos)
        rhos = [np.ones_like(rho) for rho in tree.rhos[:-1]]
        rhos.append(np.full_like(tree.rhos[-1], RHO**levels))
        return dataclasses.replace(tree, rhos=tuple(rhos))


GROUPS = {
    group.name: group
    for group in (Group(kind, layers) for layers in (3, 1) for kind in ("class", "token", "flat"))
}

DECIDES = "class-3"
"""The networks of the published picture: several layers, and the class as label."""


@dataclass(frozen=True)
class Size:
    """How large the experiment is made.

    Attributes:
        seeds: networks in each group.
        width: of the residual stream.
        hidden: nodes of each layer.
        learning_rate: of the optimizer.
        steps: of training.
        batch: sequences in each step.
        samples: fresh sequences that the attention is measured on.
        optimizer: "adam", or "sgd" for plain gradient descent without momentum.
    """

    seeds: int
    width: int
    hidden: int
    learning_rate: float
    steps: int
    batch: int
    samples: int
    optimizer: str = "adam"

    def with_options(self, options: Mapping[str, Any]) -> "Size":
        """The same size with the options that were given."""
        optimizer, rate = options["optimizer"], options["learning-rate"]
        usual = self.learning_rate if optimizer == "adam" else SGD_RATE
        steps = self.steps if optimizer == "adam" else SGD_STEPS * self.steps
        return dataclasses.replace(
            self, optimizer=optimizer, learning_rate=rate or usual, steps=steps
        )

    @property
    def looks(self) -> tuple[int, ...]:
        """When the networks are measured: untrained, then about evenly in the logarithm."""
        some = np.rint(np.geomspace(1, self.steps, 48)).astype(int)
        return tuple(int(step) for step in np.unique([0, *some]))


SIZES = {
    "tiny": Size(seeds=5, width=16, hidden=32, learning_rate=1e-2, steps=8, batch=16, samples=32),
    "small": Size(
        seeds=12, width=32, hidden=128, learning_rate=2e-3, steps=500, batch=32, samples=256
    ),
    "full": Size(
        seeds=32, width=128, hidden=512, learning_rate=1e-3, steps=3000, batch=128, samples=512
    ),
}

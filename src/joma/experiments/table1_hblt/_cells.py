"""The trees of Table 1 on HBLT(ρ), and how large the experiment is made."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from joma.experiments._seeds import member_seeds

DEPTHS, RHOS = (2, 3, 4), (0.5, 0.7, 0.9, 0.95)
BRANCHING, CLASSES = 3, 20
LEVELS = max(DEPTHS)
"""The most that a tree has: its latents' levels from the lowest up, and the class as the last."""


@dataclass(frozen=True)
class Cell:
    """One kind of tree.

    Attributes:
        depth: L, levels below the class; networks have as many layers, and level s of the latents
            is scored against layer s. Level L − 1 is the class.
        rho: ρ of every edge between binary variables.
    """

    depth: int
    rho: float

    @property
    def name(self) -> str:
        """A short name, such as "L3-rho0.9"."""
        return f"{self.group}-rho{self.rho:g}"

    @property
    def group(self) -> str:
        """The cells that train together: those as deep."""
        return f"L{self.depth}"

    @property
    def latent_levels(self) -> range:
        """The levels of binary latents, s = 0 … L − 2."""
        return range(self.depth - 1)

    def seeds(self, seed: int, count: int) -> tuple[int, ...]:
        """The seeds of this cell's trees and networks; different ones in every cell."""
        return member_seeds(self.name, seed, count)


GROUPS = {f"L{depth}": tuple(Cell(depth, rho) for rho in RHOS) for depth in DEPTHS}
"""The cells by group, each trained as one ensemble."""

CELLS = tuple(cell for cells in GROUPS.values() for cell in cells)


@dataclass(frozen=True)
class Size:
    """How large the experiment is made.

    Attributes:
        seeds: trees, and networks, in each cell.
        width: of the residual stream.
        hidden: nodes of each layer.
        learning_rate: of Adam; small networks need a larger one to learn in fewer steps.
        steps: of training.
        batch: fresh samples of each step.
        samples: other ones, on which the networks are looked at.
        repeats: random splits and permutations of each control.
        weight_decay: of Adam, coupled (L2).
    """

    seeds: int
    width: int
    hidden: int
    learning_rate: float
    steps: int
    batch: int
    samples: int
    repeats: int
    weight_decay: float = 1e-4

    def with_options(self, options: Mapping[str, Any]) -> "Size":
        """The same with the learning rate that was asked for."""
        return replace(self, learning_rate=options["learning-rate"] or self.learning_rate)

    @property
    def looks(self) -> tuple[int, ...]:
        """When the networks are measured: untrained, after one step, …, at the end."""
        some = (0, 1, 3, 10, 20, 30, 50, 70, 100, 140, 200, 300, 400, 550, 750, 1000, 1400)
        return (*(step for step in some if step < self.steps), self.steps)

    @property
    def controlled(self) -> tuple[int, ...]:
        """The looks with controls."""
        return (0, 1, self.steps)


SIZES = {
    "tiny": Size(2, 16, 32, learning_rate=1e-2, steps=20, batch=8, samples=128, repeats=2),
    "small": Size(3, 32, 128, learning_rate=3e-3, steps=300, batch=32, samples=640, repeats=4),
    "full": Size(3, 1024, 4096, learning_rate=1e-4, steps=2000, batch=128, samples=1280, repeats=4),
}

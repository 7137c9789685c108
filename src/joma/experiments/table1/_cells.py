"""The cells of Table 1: what was published of each, and how large the experiment is made."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from joma.experiments._seeds import member_seeds

LEVELS = 3
"""s = 0, 1: the latents' levels from the lowest up; s = 2: the class."""


@dataclass(frozen=True)
class Cell:
    """One hierarchy of Table 1 and its published NCorr.

    Attributes:
        latents: how many at levels s = 0 and 1.
        classes: C.
        children: N_ch, how many lower ones make a latent.
        published: NCorr at s = 0 and 1, mean over five seeds.
    """

    latents: tuple[int, int]
    classes: int
    children: int
    published: tuple[float, float]

    @property
    def name(self) -> str:
        """A short name, such as "C20-N2-10-20"."""
        return f"{self.group}-{self.latents[0]}-{self.latents[1]}"

    @property
    def group(self) -> str:
        """The cells that train together: those with as many classes and children."""
        return f"C{self.classes}-N{self.children}"

    def seeds(self, seed: int, count: int) -> tuple[int, ...]:
        """The seeds of this cell's networks; different ones in every cell."""
        return member_seeds(self.name, seed, count)


_TEN_TWENTY = ((0.99, 0.81), (1.00, 0.69), (0.99, 0.73), (0.99, 0.72), (0.99, 0.58), (0.99, 0.64))
_TWENTY_THIRTY = (
    (0.97, 0.80),
    (0.96, 0.68),
    (0.94, 0.74),
    (0.95, 0.66),
    (0.95, 0.55),
    (0.95, 0.61),
)
_COLUMNS = [(classes, children) for classes in (20, 30, 50) for children in (2, 3)]

CELLS = tuple(
    Cell(latents, classes, children, published)
    for i, (classes, children) in enumerate(_COLUMNS)
    for latents, published in (((10, 20), _TEN_TWENTY[i]), ((20, 30), _TWENTY_THIRTY[i]))
)

GROUPS = {name: tuple(cells) for name, cells in groupby(CELLS, lambda cell: cell.group)}
"""The cells by group, each trained as one ensemble."""


@dataclass(frozen=True)
class Size:
    """How large the experiment is made.

    Attributes:
        seeds: networks in each cell.
        width: of the residual stream.
        hidden: nodes of each layer.
        learning_rate: of Adam; small networks need a larger one to learn in fewer steps.
        steps: of training.
        repeats: random splits and permutations of each control.
        batch: samples of each step.
        samples: fresh ones on which the networks are looked at.
        weight_decay: of Adam, coupled (L2).
        gpu_precision: of products and activations on a GPU; on a CPU they are in float32.
    """

    seeds: int
    width: int
    hidden: int
    learning_rate: float
    steps: int
    repeats: int
    batch: int = 128
    samples: int = 1280
    weight_decay: float = 1e-4
    gpu_precision: str = "bfloat16"

    def with_options(self, options: Mapping[str, Any]) -> "Size":
        """The same with the hidden nodes and the learning rate that were asked for."""
        return replace(
            self,
            hidden=options["hidden"] or self.hidden,
            learning_rate=options["learning-rate"] or self.learning_rate,
        )

    @property
    def looks(self) -> tuple[int, ...]:
        """When the networks are measured: untrained, after one step, …, at the end."""
        some = (0, 1, 10, 30, 100, 300, 1000, 2000, 3000, 5000, 7000, 10_000)
        return (*(step for step in some if step < self.steps), self.steps)

    @property
    def controlled(self) -> tuple[int, ...]:
        """The looks with controls over samples too, and with all repeats of those over classes."""
        return (0, 1, self.steps)


SIZES = {
    "tiny": Size(2, 16, 128, learning_rate=1e-2, steps=40, repeats=2, samples=640),
    "small": Size(seeds=3, width=64, hidden=512, learning_rate=1e-3, steps=300, repeats=16),
    "full": Size(seeds=5, width=1024, hidden=4096, learning_rate=1e-5, steps=10_000, repeats=16),
}

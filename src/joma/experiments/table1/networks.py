"""The networks of Table 1: its cells, their sizes, and what is measured as they learn."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from joma.data import Batch, Joined, LatentHierarchy
from joma.experiments._experiment import Request
from joma.experiments._ncorr import controls, pooled_nodes, power
from joma.experiments._trained import FRESH_STEP, NetworkCell, NetworkSize, TransformerGroup
from joma.models import TransformerConfig
from joma.optim import StackedAdam
from joma.probes import ncorr
from joma.runs import Run

LEVELS = 3
"""s = 0, 1: the latents' levels from the lowest up; s = 2: the class."""


@dataclass(frozen=True)
class Table1Cell(NetworkCell):
    """One hierarchy of Table 1 and its published NCorr.

    Attributes:
        latents: How many latents there are at levels s = 0 and 1.
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


_COLUMNS = [(classes, children) for classes in (20, 30, 50) for children in (2, 3)]
_PUBLISHED = {
    (10, 20): ((0.99, 0.81), (1.00, 0.69), (0.99, 0.73), (0.99, 0.72), (0.99, 0.58), (0.99, 0.64)),
    (20, 30): ((0.97, 0.80), (0.96, 0.68), (0.94, 0.74), (0.95, 0.66), (0.95, 0.55), (0.95, 0.61)),
}
CELLS = tuple(
    Table1Cell(latents, *column, published[i])
    for i, column in enumerate(_COLUMNS)
    for latents, published in _PUBLISHED.items()
)
GROUPS = {name: tuple(cells) for name, cells in groupby(CELLS, lambda cell: cell.group)}
"""The cells by group, each trained as one ensemble."""


@dataclass(frozen=True)
class Table1Size(NetworkSize):
    """How large Table 1 is made.

    Attributes:
        repeats: Random splits and permutations of each control.
        batch: Samples of each step.
        samples: Fresh samples on which the networks are measured.
        weight_decay: Weight decay of Adam, coupled (L2).
        gpu_precision: Precision of products and activations on a GPU; on a CPU it is float32.
    """

    repeats: int
    batch: int = 128
    samples: int = 1280
    weight_decay: float = 1e-4
    gpu_precision: str = "bfloat16"

    measured_steps: ClassVar = (0, 1, 10, 30, 100, 300, 1000, 2000, 3000, 5000, 7000, 10_000)


SIZES = {
    "tiny": Table1Size(2, 16, 128, learning_rate=1e-2, steps=40, repeats=2, samples=640),
    "small": Table1Size(3, 64, 512, learning_rate=1e-3, steps=300, repeats=16),
    "full": Table1Size(5, 1024, 4096, learning_rate=1e-5, steps=10_000, repeats=16),
}


def largest_possible(cells: Sequence[Table1Cell], size: Table1Size, seed: int) -> np.ndarray:
    """Return what NCorr cannot exceed, as unused latents count as 0: (cells, LEVELS, seeds)."""
    bounds = np.ones((len(cells), LEVELS, size.seeds))
    for i, cell in enumerate(cells):
        hierarchy = _hierarchy(cell, size, seed, "cpu")
        for s, unused in enumerate(hierarchy.unused):
            bounds[i, s] -= unused.numpy() / cell.latents[s]
    return bounds


def _hierarchy(cell: Table1Cell, size: Table1Size, seed: int, device: str) -> LatentHierarchy:
    seeds = cell.seeds(seed, size.seeds)
    return LatentHierarchy(cell.classes, cell.children, cell.latents, seeds=seeds, device=device)


class Table1Networks(TransformerGroup):
    """The networks of a group of cells, and their data.

    The metrics hold each network's loss at every step and, at some, NCorr and its controls (`layer`
    is s), and the accuracy.
    """

    def __init__(
        self, run: Run, cells: Sequence[Table1Cell], size: Table1Size, request: Request
    ) -> None:
        self.size = size
        self.hierarchies = [_hierarchy(cell, size, request.seed, request.device) for cell in cells]
        self.data = data = Joined(self.hierarchies)
        config = TransformerConfig(
            vocabulary=self.hierarchies[0].vocabulary,
            outputs=cells[0].classes,
            width=size.width,
            hidden=size.hidden,
        )
        super().__init__(
            run,
            size,
            config,
            [seed for cell in cells for seed in cell.seeds(request.seed, size.seeds)],
            partial(StackedAdam, weight_decays=size.weight_decay),
            lambda step: data.distinct(size.batch, step),
            request,
            size.gpu_precision,
        )

    def measure(self, step: int) -> None:
        """Measure all networks after `step` steps on fresh samples."""
        batch = self.data.distinct(self.size.samples, FRESH_STEP + step)
        nodes, outputs = pooled_nodes(self.ensemble, batch)
        assert batch.weights is not None
        right = (outputs.argmax(-1) == batch.labels).double()
        self.log(step, "accuracy", (right * batch.weights).sum(-1))
        found: dict[tuple[str, int], list[Tensor]] = {}
        for part, hierarchy in zip(self.data.members, self.hierarchies, strict=True):
            own = hierarchy.distinct(self.size.samples, FRESH_STEP + step)
            for s, latents in enumerate(own.latents):
                every = self._measure_level(step, latents, nodes[s][part], own, hierarchy)
                for name, values in every.items():
                    found.setdefault((name, s), []).append(values)
        for (name, s), parts in found.items():
            self.log(step, name, torch.cat(parts), layer=s)

    def _measure_level(
        self, step: int, latents: Tensor, nodes: Tensor, own: Batch, hierarchy: LatentHierarchy
    ) -> dict[str, Tensor]:
        found = {"ncorr": ncorr(latents, nodes, own.weights).mean}
        every_control = step in self.size.controlled
        options: dict[str, Any] = {
            "weights": own.weights,
            "groups": torch.arange(nodes.shape[1], device=nodes.device),
            "repeats": self.size.repeats if every_control else max(1, self.size.repeats // 4),
        }
        found |= controls("classes", latents, nodes, **options)
        if every_control:
            found |= power(latents, nodes, **options)
            # Sample by sample, which on this data is empty: every half has every input.
            labels = hierarchy.sample(self.size.samples, FRESH_STEP + step).labels.unsqueeze(-1)
            rows = [x.gather(1, labels.expand(-1, -1, x.shape[-1])) for x in (latents, nodes)]
            found |= controls("samples", *rows, repeats=1)
        return found

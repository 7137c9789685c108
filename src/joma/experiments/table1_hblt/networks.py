"""The networks that learn from HBLT(ρ): their trees, sizes, and what is measured as they learn."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from joma.data import HBLT, Batch
from joma.experiments._experiment import Request
from joma.experiments._ncorr import controls, pooled_nodes
from joma.experiments._trained import FRESH_STEP, NetworkCell, NetworkSize, TransformerGroup
from joma.models import TransformerConfig
from joma.optim import StackedAdam
from joma.probes import held_out, ncorr
from joma.runs import Run
from joma.theory.hblt import posteriors

DEPTHS, RHOS = (2, 3, 4), (0.5, 0.7, 0.9, 0.95)
BRANCHING, CLASSES = 3, 20
LEVELS = max(DEPTHS)
"""The most that a tree has: its latents' levels from the lowest up, and the class as the last."""

EVERY = ("every_ncorr", "every_held_out_samples")
"""Names of what is measured of every level in every layer, in the metrics."""


@dataclass(frozen=True)
class TreeCell(NetworkCell):
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
        return f"L{self.depth}-rho{self.rho:g}"

    @property
    def latent_levels(self) -> range:
        """The levels of binary latents, s = 0 … L − 2."""
        return range(self.depth - 1)


_STEPS = (0, 1, 3, 10, 20, 30, 50, 70, 100, 140, 200, 300, 400, 550, 750, 1000, 1400)

GROUPS = {f"L{depth}": tuple(TreeCell(depth, rho) for rho in RHOS) for depth in DEPTHS}
"""The cells by group, each trained as one ensemble."""

CELLS = tuple(cell for cells in GROUPS.values() for cell in cells)


@dataclass(frozen=True)
class TreeSize(NetworkSize):
    """How large Table 1 on HBLT(ρ) is made.

    Attributes:
        batch: Fresh samples of each step.
        samples: Other samples, on which the networks are measured.
        repeats: Random splits and permutations of each control.
        weight_decay: Weight decay of Adam, coupled (L2).
    """

    batch: int
    samples: int
    repeats: int
    weight_decay: float = 1e-4

    measured_steps: ClassVar = _STEPS


SIZES = {
    "tiny": TreeSize(2, 16, 32, learning_rate=1e-2, steps=20, batch=8, samples=128, repeats=2),
    "small": TreeSize(3, 32, 128, learning_rate=3e-3, steps=300, batch=32, samples=640, repeats=4),
    "full": TreeSize(
        3, 1024, 4096, learning_rate=1e-4, steps=2000, batch=128, samples=1280, repeats=4
    ),
}


class TreeNetworks(TransformerGroup):
    """The networks of one depth, and their trees.

    The metrics hold each network's loss at every step and, at some, the accuracy, NCorr and its
    controls (`layer` is s), and both of every level in every layer of the network (`every_ncorr`
    and `every_held_out_samples`; module "layer1" is the second layer); at step 0 also what a
    perfect observer of the sequences gets.
    """

    def __init__(
        self, run: Run, cells: Sequence[TreeCell], size: TreeSize, request: Request
    ) -> None:
        self.size = size
        seeds = [seed for cell in cells for seed in cell.seeds(request.seed, size.seeds)]
        depth = cells[0].depth
        rhos = [cell.rho for cell in cells for _ in range(size.seeds)]
        self.data = data = HBLT.regular(depth, BRANCHING, rhos, CLASSES, seeds, request.device)
        self.batch = data.sample(size.samples, FRESH_STEP)
        config = TransformerConfig(
            vocabulary=data.vocabulary,
            outputs=CLASSES,
            layers=depth,
            width=size.width,
            hidden=size.hidden,
        )
        super().__init__(
            run,
            size,
            config,
            seeds,
            partial(StackedAdam, weight_decays=size.weight_decay),
            lambda step: data.sample(size.batch, step),  # holds the data alone: no cycle is made
            request,
        )

    def measure(self, step: int) -> None:
        """Measure all networks after `step` steps, always on the same samples."""
        batch = self.batch
        # In parts of what a step takes: the hidden activations of all would need too much memory.
        nodes, outputs = pooled_nodes(self.ensemble, batch, self.size.batch)
        right = outputs.argmax(-1) == batch.labels
        self.log(step, "accuracy", right.double().mean(-1))
        for s, (latents, own) in enumerate(zip(batch.latents, nodes, strict=True)):
            for name, values in self._measure_level(step, s, latents, own).items():
                self.log(step, name, values, layer=s)
            for layer, others in enumerate(nodes):
                for name, values in self._measure_pair(step, latents, others).items():
                    self.log(step, name, values, module=f"layer{layer}", layer=s)
        if step == 0:
            self._log_what_is_possible()

    def _log_what_is_possible(self) -> None:
        """Log what a perfect observer of the sequences gets, and how many sequences differ."""
        leaves = leaves_on(self.batch)
        observed = observer(self.data, leaves)
        for s, (latents, known) in enumerate(zip(self.batch.latents, observed, strict=True)):
            self.log(0, "observer", _following(latents.cpu(), known), layer=s)
        self.log(0, "best_accuracy", observed[-1].amax(-1).mean(-1))
        distinct = [len(np.unique(np.packbits(own, 1), axis=0)) for own in leaves]
        self.run.metrics.append(0, "distinct", distinct)

    def _measure_pair(self, step: int, latents: Tensor, nodes: Tensor) -> dict[str, Tensor]:
        """Measure a level, the class included, in any layer."""
        found = {EVERY[0]: ncorr(latents, nodes).mean}
        if step in self.size.controlled:
            found[EVERY[1]] = held_out(latents, nodes, repeats=self.size.repeats).mean
        return found

    def _measure_level(
        self, step: int, s: int, latents: Tensor, nodes: Tensor
    ) -> dict[str, Tensor]:
        found = {"ncorr": ncorr(latents, nodes).mean}
        if step not in self.size.controlled:
            return found
        repeats = self.size.repeats
        found |= controls("samples", latents, nodes, repeats=repeats)
        if s < len(self.data.latents):  # a class varies in one half of the classes alone
            chosen = held_out(latents, nodes, groups=self.batch.labels, repeats=repeats)
            found["held_out_classes"] = chosen.mean
        return found


def leaves_on(batch: Batch) -> np.ndarray:
    """Return the leaves behind the sequences of an HBLT, shape (E, B, leaves), bool."""
    on = torch.zeros_like(batch.tokens, dtype=torch.bool).scatter_(-1, batch.tokens, value=True)
    return on[..., 1:].cpu().numpy()


def observer(data: HBLT, leaves: np.ndarray) -> list[Tensor]:
    """Return what a perfect observer of the leaves knows of each level, shape (E, B, latents)."""
    each = [posteriors(tree, own) for tree, own in zip(data.trees, leaves, strict=True)]
    return [torch.from_numpy(np.stack(level)) for level in zip(*each, strict=True)]


def _following(latents: Tensor, knowledge: Tensor) -> Tensor:
    """Return the correlation of each latent and what is known of it, mean over latents: (E,)."""
    return ncorr(latents.mT.unsqueeze(-1), knowledge.mT.unsqueeze(-1)).values.mean((-2, -1))

"""Training the networks of one group of cells, and measuring them as they learn."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.data import Batch, Joined, LatentHierarchy
from joma.experiments import _trained
from joma.experiments._experiment import Request
from joma.experiments.table1._cells import GROUPS, LEVELS, Cell, Size
from joma.models import Transformer, TransformerConfig
from joma.optim import StackedAdam
from joma.probes import ncorr
from joma.runs import Run
from joma.train import Ensemble

_FRESH = 2**40
"""Added to a step, for samples that no training step draws."""


def train_group(run: Run, group: str, size: Size, request: Request) -> None:
    """Trains a group's cells in a run folder of its own, unless they are done already.

    Its metrics hold each member's loss at every step and, at some, NCorr and its controls
    (`layer` is s), and the accuracy.
    """
    cells = GROUPS[group]
    own = _trained.Group(group, cells, lambda own: GroupWork(own, cells, size, request))
    _trained.train_groups(run, [own], size, request)


def largest_possible(cells: Sequence[Cell], size: Size, seed: int) -> np.ndarray:
    """What NCorr cannot exceed, as unused latents count as 0: (cells, LEVELS, seeds)."""
    bounds = np.ones((len(cells), LEVELS, size.seeds))
    for i, cell in enumerate(cells):
        hierarchy = _hierarchy(cell, size, seed, "cpu")
        for s, unused in enumerate(hierarchy.unused):
            bounds[i, s] -= unused.numpy() / cell.latents[s]
    return bounds


def _hierarchy(cell: Cell, size: Size, seed: int, device: str) -> LatentHierarchy:
    seeds = cell.seeds(seed, size.seeds)
    return LatentHierarchy(cell.classes, cell.children, cell.latents, seeds=seeds, device=device)


class GroupWork:
    """The networks of a group, their data, and what is looked at."""

    def __init__(self, run: Run, cells: Sequence[Cell], size: Size, request: Request) -> None:
        self.run, self.size = run, size
        device = request.device
        self.hierarchies = [_hierarchy(cell, size, request.seed, device) for cell in cells]
        self.data = data = Joined(self.hierarchies)
        config = TransformerConfig(
            vocabulary=self.hierarchies[0].vocabulary,
            outputs=cells[0].classes,
            width=size.width,
            hidden=size.hidden,
        )
        seeds = [seed for cell in cells for seed in cell.seeds(request.seed, size.seeds)]
        model = Transformer(config, seeds, device=device)
        self.ensemble = Ensemble(
            model,
            StackedAdam(model.named_parameters(), size.learning_rate, size.weight_decay),
            lambda step: data.distinct(size.batch, step),
            precision=size.gpu_precision if device == "cuda" else "float32",
        )

    def look(self, step: int) -> None:
        """Measures all networks after `step` steps on fresh samples."""
        log = self.run.metrics.append
        batch = self.data.distinct(self.size.samples, _FRESH + step)
        nodes, outputs = _trained.pooled_nodes(self.ensemble, batch)
        assert batch.weights is not None
        right = (outputs.argmax(-1) == batch.labels).double()
        log(step, "accuracy", _cpu((right * batch.weights).sum(-1)))
        found: dict[tuple[str, int], list[Tensor]] = {}
        for part, hierarchy in zip(self.data.members, self.hierarchies, strict=True):
            own = hierarchy.distinct(self.size.samples, _FRESH + step)
            for s, latents in enumerate(own.latents):
                every = self._measure(step, latents, nodes[s][part], own, hierarchy)
                for name, values in every.items():
                    found.setdefault((name, s), []).append(values)
        for (name, s), parts in found.items():
            log(step, name, _cpu(torch.cat(parts)), layer=s)

    def _measure(
        self,
        step: int,
        latents: Tensor,
        nodes: Tensor,
        own: Batch,
        hierarchy: LatentHierarchy,
    ) -> dict[str, Tensor]:
        found = {"ncorr": ncorr(latents, nodes, own.weights).mean}
        whole = step in self.size.controlled
        options: dict[str, Any] = {
            "weights": own.weights,
            "groups": torch.arange(nodes.shape[1], device=nodes.device),
            "repeats": self.size.repeats if whole else max(1, self.size.repeats // 4),
        }
        found |= _trained.controls("classes", latents, nodes, **options)
        if whole:
            found |= _trained.power(latents, nodes, **options)
            # Sample by sample, which on this data is empty: every half has every input.
            labels = hierarchy.sample(self.size.samples, _FRESH + step).labels.unsqueeze(-1)
            rows = [x.gather(1, labels.expand(-1, -1, x.shape[-1])) for x in (latents, nodes)]
            found |= _trained.controls("samples", *rows, repeats=1)
        return found


def _cpu(values: Tensor) -> Any:
    return values.detach().cpu().numpy()

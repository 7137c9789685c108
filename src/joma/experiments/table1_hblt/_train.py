"""Training the networks of one depth on HBLT(ρ), and measuring them as they learn."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.data import HBLT, Batch
from joma.experiments import _trained
from joma.experiments._experiment import Request
from joma.experiments.table1_hblt._cells import (
    BRANCHING,
    CLASSES,
    GROUPS,
    Cell,
    Size,
)
from joma.models import Transformer, TransformerConfig
from joma.optim import StackedAdam
from joma.probes import held_out, ncorr
from joma.runs import Run
from joma.theory.posterior import posteriors
from joma.train import Ensemble

EVERY = ("every_ncorr", "every_held_out_samples")
"""Names of what is measured of every level in every layer, in the metrics."""

_FRESH = 2**40
"""A step that no training comes to: its samples are new to every network."""


def train_group(run: Run, group: str, size: Size, request: Request) -> None:
    """Trains a group's cells in a run folder of its own, unless they are done already.

    Its metrics hold each member's loss at every step and, at some, the accuracy, NCorr and its
    controls (`layer` is s), and both of every level in every layer of the network (`every_ncorr`
    and `every_held_out_samples`; module "layer1" is the second layer); at step 0 also what a
    perfect observer of the sequences gets.
    """
    cells = GROUPS[group]
    own = _trained.Group(group, cells, lambda own: GroupWork(own, cells, size, request))
    _trained.train_groups(run, [own], size, request)


class GroupWork:
    """The networks of a group, their trees, and what is looked at."""

    def __init__(self, run: Run, cells: Sequence[Cell], size: Size, request: Request) -> None:
        self.run, self.size = run, size
        seeds = [seed for cell in cells for seed in cell.seeds(request.seed, size.seeds)]
        depth, device = cells[0].depth, request.device
        rhos = [cell.rho for cell in cells for _ in range(size.seeds)]
        self.data = data = HBLT.regular(depth, BRANCHING, rhos, CLASSES, seeds, device)
        self.batch = data.sample(size.samples, _FRESH)
        config = TransformerConfig(
            vocabulary=data.vocabulary,
            outputs=CLASSES,
            layers=depth,
            width=size.width,
            hidden=size.hidden,
        )
        model = Transformer(config, seeds, device=device)
        self.ensemble = Ensemble(
            model,
            StackedAdam(model.named_parameters(), size.learning_rate, size.weight_decay),
            lambda step: data.sample(size.batch, step),  # holds the data alone: no cycle is made
            precision="bfloat16" if device == "cuda" else "float32",
        )

    def look(self, step: int) -> None:
        """Measures all networks after `step` steps, always on the same samples."""
        log, batch = self.run.metrics.append, self.batch
        # In parts of what a step takes: the hidden activations of all would need too much memory.
        nodes, outputs = _trained.pooled_nodes(self.ensemble, batch, self.size.batch)
        right = outputs.argmax(-1) == batch.labels
        log(step, "accuracy", _numpy(right.double().mean(-1)))
        for s, (latents, own) in enumerate(zip(batch.latents, nodes, strict=True)):
            for name, values in self._measure(step, s, latents, own).items():
                log(step, name, _numpy(values), layer=s)
            for layer, others in enumerate(nodes):
                for name, values in self._measure_pair(step, latents, others).items():
                    log(step, name, _numpy(values), module=f"layer{layer}", layer=s)
        if step == 0:
            self._log_what_is_possible()

    def _log_what_is_possible(self) -> None:
        """Logs what a perfect observer of the sequences gets, and how many sequences differ."""
        log, leaves = self.run.metrics.append, leaves_on(self.batch)
        observed = observer(self.data, leaves)
        for s, (latents, known) in enumerate(zip(self.batch.latents, observed, strict=True)):
            log(0, "observer", _numpy(_following(latents.cpu(), known)), layer=s)
        log(0, "best_accuracy", _numpy(observed[-1].amax(-1).mean(-1)))
        log(0, "distinct", [len(np.unique(np.packbits(own, 1), axis=0)) for own in leaves])

    def _measure_pair(self, step: int, latents: Tensor, nodes: Tensor) -> dict[str, Tensor]:
        """Measure a level, the class included, in any layer."""
        found = {EVERY[0]: ncorr(latents, nodes).mean}
        if step in self.size.controlled:
            found[EVERY[1]] = held_out(latents, nodes, repeats=self.size.repeats).mean
        return found

    def _measure(self, step: int, s: int, latents: Tensor, nodes: Tensor) -> dict[str, Tensor]:
        found = {"ncorr": ncorr(latents, nodes).mean}
        if step not in self.size.controlled:
            return found
        repeats = self.size.repeats
        found |= _trained.controls("samples", latents, nodes, repeats=repeats)
        if s < len(self.data.latents):  # a class varies in one half of the classes alone
            chosen = held_out(latents, nodes, groups=self.batch.labels, repeats=repeats)
            found["held_out_classes"] = chosen.mean
        return found


def leaves_on(batch: Batch) -> np.ndarray:
    """The leaves behind the sequences of an HBLT, shape (E, B, leaves), bool."""
    on = torch.zeros_like(batch.tokens, dtype=torch.bool).scatter_(-1, batch.tokens, value=True)
    return _numpy(on[..., 1:])


def observer(data: HBLT, leaves: np.ndarray) -> list[Tensor]:
    """What a perfect observer of the leaves knows of each level, shape (E, B, latents)."""
    each = [posteriors(tree, own) for tree, own in zip(data.trees, leaves, strict=True)]
    return [torch.from_numpy(np.stack(level)) for level in zip(*each, strict=True)]


def _following(latents: Tensor, knowledge: Tensor) -> Tensor:
    """Correlation of each latent with what is known of it, mean over the latents: (E,)."""
    return ncorr(latents.mT.unsqueeze(-1), knowledge.mT.unsqueeze(-1)).values.mean((-2, -1))


def _numpy(values: Tensor) -> Any:
    return values.detach().cpu().numpy()

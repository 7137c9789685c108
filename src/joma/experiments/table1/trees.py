"""Table 1 on HBLT(ρ): its trees and networks, what they show, and the verdict."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from joma.data import HBLT, Batch
from joma.experiments._experiment import Outcome, Request, Verdict, publish
from joma.experiments._frame import (
    FRESH_STEP,
    NetworkCell,
    NetworkSize,
    TransformerGroup,
    groups_done,
    read_metric,
    train_cells,
)
from joma.experiments._tables import columns
from joma.experiments.table1 import TABLE1_HBLT
from joma.experiments.table1.results import (
    CellResults,
    collect,
    controls,
    draw_trees,
    draw_trees_training,
    pooled_nodes,
    tables,
)
from joma.models import TransformerConfig
from joma.optim import StackedAdam
from joma.probes import held_out, ncorr
from joma.report import figures
from joma.runs import Run
from joma.theory.hblt import posteriors

DEPTHS, RHOS = (2, 3, 4), (0.5, 0.7, 0.9, 0.95)
BRANCHING, CLASSES = 3, 20
LEVELS = max(DEPTHS)
"""The most that a tree has: its latents' levels from the lowest up, and the class as the last."""

BY_LEVEL = ("ncorr", "held_out_samples", "held_out_classes", "shuffled_samples", "observer")
EVERY = ("every_ncorr", "every_held_out_samples")
"""Names of what is measured of every level in every layer, in the metrics."""
WHOLE = ("accuracy", "best_accuracy", "distinct")

CLEARLY = 2
"""A gain counts as learned when its mean over seeds is above that many of its std over seeds."""


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

    def level(self, s: int) -> str:
        """Return what a level is called; the last one is the class."""
        return f"s = {s}" if s < self.depth - 1 else "class"


GROUPS = {f"L{depth}": tuple(TreeCell(depth, rho) for rho in RHOS) for depth in DEPTHS}
"""The cells by group, each trained as one ensemble."""

CELLS = tuple(cell for cells in GROUPS.values() for cell in cells)

_STEPS = (0, 1, 3, 10, 20, 30, 50, 70, 100, 140, 200, 300, 400, 550, 750, 1000, 1400)


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


def reproduce(run: Run, request: Request) -> Outcome:
    """Train the groups asked for that are not done, and compare all that are."""
    size = SIZES[request.scale].with_options(request.options)
    train_cells(run, GROUPS, TreeNetworks, size, request)
    results = collect(run, GROUPS, size, LEVELS, BY_LEVEL, WHOLE)
    read = partial(read_metric, groups_done(run, GROUPS).values(), size.measure_at, size.seeds)
    layers = [f"layer{layer}" for layer in range(LEVELS)]
    every = {name: read(name, LEVELS, layers) for name in EVERY}
    outcome = judge(results, every, size.samples)
    # A number of all levels together has s = −1.
    measured = {**results.by_level, **{name: own[:, None] for name, own in results.whole.items()}}
    made = {
        **tables(measured, partial(_label, results)),
        "every": _every_table(results, every),
    }
    publish(run, TABLE1_HBLT, outcome, draw_trees(results), made)
    figures.save(
        run,
        "table1-hblt-training",
        draw_trees_training(results),
        title="NCorr while networks learn from HBLT(ρ)",
        caption="\n".join(outcome.paragraphs),
    )
    return outcome


def _label(results: CellResults, measure: str, i: int, s: int, k: int) -> dict[str, Any]:
    cell = results.cells[i]
    level = -1 if measure in WHOLE else s
    return {"depth": cell.depth, "rho": cell.rho, "s": level, "step": results.steps[k]}


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
                where = {"module": f"layer{layer}", "layer": s}
                self.log(step, EVERY[0], ncorr(latents, others).mean, **where)
                if step in self.size.controlled:
                    chosen = held_out(latents, others, repeats=self.size.repeats)
                    self.log(step, EVERY[1], chosen.mean, **where)
        if step == 0:
            self._log_what_is_possible()

    def _log_what_is_possible(self) -> None:
        """Log what a perfect observer of the sequences gets, and how many sequences differ."""
        leaves = leaves_on(self.batch)
        observed = observer(self.data, leaves)
        for s, (latents, known) in enumerate(zip(self.batch.latents, observed, strict=True)):
            self.log(0, "observer", following(latents.cpu(), known), layer=s)
        self.log(0, "best_accuracy", observed[-1].amax(-1).mean(-1))
        distinct = [len(np.unique(np.packbits(own, 1), axis=0)) for own in leaves]
        self.run.metrics.append(0, "distinct", distinct)

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


def following(latents: Tensor, knowledge: Tensor) -> Tensor:
    """Return the correlation of each latent and what is known of it, mean over latents: (E,)."""
    return ncorr(latents.mT.unsqueeze(-1), knowledge.mT.unsqueeze(-1)).values.mean((-2, -1))


@dataclass(frozen=True, eq=False)
class Learned:
    """What training adds to each level; one entry for each level of each cell, in order.

    Attributes:
        rows: The place of the cell and s, of which the class is the last.
        before: Correlation of the latents with the nodes that other samples chose, untrained.
        after: The same, trained.
        possible: What a perfect observer of the sequence gets.
        raised: Whether the gain is clear.
        curve: NCorr at every measurement, mean over seeds, (rows, steps).
        pairs: Those of the rows whose next row is the next higher level of the same cell.
    """

    rows: list[tuple[int, int]]
    before: np.ndarray
    after: np.ndarray
    possible: np.ndarray
    raised: np.ndarray
    curve: np.ndarray
    pairs: np.ndarray

    @classmethod
    def of(cls, results: CellResults) -> "Learned":
        """From the measurements."""
        rows = [(i, s) for i, cell in enumerate(results.cells) for s in range(cell.depth)]
        place = tuple(zip(*rows, strict=True))
        held_out = results.by_level["held_out_samples"][place]
        gain = held_out[:, -1] - held_out[:, 0]
        return cls(
            rows,
            before=held_out[:, 0].mean(-1),
            after=held_out[:, -1].mean(-1),
            possible=results.by_level["observer"][place][:, 0].mean(-1),
            raised=gain.mean(-1) > CLEARLY * gain.std(-1, ddof=1),
            curve=results.by_level["ncorr"][place].mean(-1),
            pairs=np.array([n for n, (i, _) in enumerate(rows[:-1]) if rows[n + 1][0] == i], int),
        )


def judge(results: CellResults, every: Mapping[str, np.ndarray], samples: int) -> Outcome:
    """Return what training adds to the latents of HBLT(ρ); nothing was published of it.

    Args:
        results: Of the cells that are done.
        every: By measure of `EVERY`, each level in each layer of the network,
            (cells, LEVELS, layers, steps, seeds); NaN where it was not taken.
        samples: How many samples were measured on.
    """
    learned = Learned.of(results)
    gain, pairs = learned.after - learned.before, learned.pairs
    order = ""
    if len(pairs):
        lower_is_higher = learned.after[pairs] > learned.after[pairs + 1]
        lower_gains_more = gain[pairs] > gain[pairs + 1]
        order = (
            f"; of two neighbouring levels the lower one reads higher in {lower_is_higher.sum()} "
            f"of {len(pairs)} pairs and gains more in {lower_gains_more.sum()}"
        )
    return Outcome(
        Verdict.NOT_COMPARABLE if results.cells == CELLS else Verdict.INCOMPLETE,
        finding=f"on samples that did not choose it, the best node's correlation with its latent "
        f"goes from {learned.before.mean():.2f} to {learned.after.mean():.2f} in training, where a "
        f"perfect observer of the sequence gets {learned.possible.mean():.2f}; it rises by more "
        f"than twice the seed std in {learned.raised.sum()} of {len(learned.raised)} rows of "
        f"depth, ρ and level, classes included{order}.",
        table=list(_rows(results, learned)),
        paragraphs=(
            _order(results, learned),
            _every_layer(results, every),
            _controls(results, samples),
        ),
    )


def _rows(results: CellResults, learned: Learned) -> Iterable[dict[str, str]]:
    for i, s in learned.rows:
        cell = results.cells[i]
        yield {
            "depth": str(cell.depth),
            "ρ": f"{cell.rho:g}",
            "s": str(s) if s < cell.depth - 1 else f"{s}, class",
            "trained": results.text("ncorr", i, s),
            "untrained": results.text("ncorr", i, s, 0),
            "new samples": results.text("held_out_samples", i, s),
            "new samples, untrained": results.text("held_out_samples", i, s, 0),
            "perfect observer": results.text("observer", i, s, 0),
        }


def _order(results: CellResults, learned: Learned) -> str:
    """Return whether lower levels are learned earlier than those above them.

    A level is half learned at the first measurement at which NCorr has half of what it gains.
    """
    pairs, raised, curve = learned.pairs, learned.raised, learned.curve
    both = pairs[raised[pairs] & raised[pairs + 1]]
    if not len(both):
        return (
            "Which level is learned first cannot be decided: of two neighbouring ones, in no pair "
            "training clearly adds to both."
        )
    half_way = (curve >= (curve[:, :1] + curve[:, -1:]) / 2).argmax(-1)
    later = half_way[both + 1] - half_way[both]
    earlier, same, after = (int(test.sum()) for test in (later > 0, later == 0, later < 0))
    verdict = "no order can be seen"
    if 2 * max(earlier, after) > len(both):
        verdict = f"the {'lower' if earlier > after else 'upper'} level comes first"
    return (
        f"Which level is learned first, each in the layer of its number: in the {len(both)} pairs "
        f"of neighbouring ones where training clearly adds to both, the lower one has half of its "
        f"gain at an earlier measurement in {earlier}, at the same in {same} and at a later one in "
        f"{after}; {verdict}."
    )


def _every_layer(results: CellResults, every: Mapping[str, np.ndarray]) -> str:
    """Return what training adds to every level in every layer, which separates level from layer."""
    kept = every[EVERY[1]]
    gain = (kept[..., -1, :] - kept[..., 0, :]).mean(-1)
    more, of_classes, in_top = [], [], []
    for cell, own in zip(results.cells, gain, strict=True):
        levels = own[: cell.depth, : cell.depth]
        upper_gains_more = levels[1:] > levels[:-1]
        more += upper_gains_more[:-1].ravel().tolist()
        of_classes += upper_gains_more[-1].tolist()
        in_top += (levels.argmax(-1) == cell.depth - 1).tolist()
    counts = [f"{sum(more)} of {len(more)} where it is of latents"] if more else []
    counts.append(f"{sum(of_classes)} of {len(of_classes)} where it is the class")
    return (
        "In one and the same layer the upper of two neighbouring levels gains more in "
        f"{', '.join(counts)}; a level gains most in the top layer in {sum(in_top)} of "
        f"{len(in_top)} rows of depth, ρ and level."
    )


def _controls(results: CellResults, samples: int) -> str:
    classes, chance = (
        np.nanmean(results.at(measure)) for measure in ("held_out_classes", "shuffled_samples")
    )
    right, best = results.whole["accuracy"].mean((0, 2)), results.whole["best_accuracy"][:, 0]
    distinct = results.whole["distinct"][:, 0].mean(-1)
    return (
        f"Controls, trained: with the node chosen on the other half of the classes NCorr is "
        f"{classes:.2f}, with latents shuffled over samples {chance:.2f}. The networks name the "
        f"class of {right[-1]:.0%} of the samples, {right[0]:.0%} before training; the best guess "
        f"from the sequence is right in {best.mean():.0%}. The {samples:,} samples of a tree hold "
        f"from {distinct.min():,.0f} to {distinct.max():,.0f} different sequences."
    )


def _every_table(results: CellResults, every: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """Return a row for every level in every layer of every network."""
    rows = []
    for measure, values in every.items():
        for i, s, layer, at, seed in np.argwhere(~np.isnan(values)).tolist():
            where = {**_label(results, measure, i, s, at), "layer": layer, "seed": seed}
            value = float(values[i, s, layer, at, seed])
            rows.append({**where, "measure": measure, "value": value})
    return columns(rows)

"""What the networks on HBLT(ρ) show, from their metrics: numbers, verdict and plain words."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from joma.experiments._experiment import Outcome, Verdict
from joma.experiments._ncorr import seeds_and_means
from joma.experiments._trained import columns, groups_done, mean_and_std, read_metric
from joma.experiments.table1_hblt.networks import (
    BRANCHING,
    CELLS,
    CLASSES,
    EVERY,
    GROUPS,
    LEVELS,
    TreeCell,
    TreeSize,
)
from joma.runs import Run

BY_LEVEL = ("ncorr", "held_out_samples", "held_out_classes", "shuffled_samples", "observer")
WHOLE = ("accuracy", "best_accuracy", "distinct")

CLEARLY = 2
"""A gain counts as learned when its mean over seeds is above that many of its std over seeds."""


@dataclass(frozen=True, eq=False)
class TreeResults:
    """What was measured in the cells that are done.

    Attributes:
        cells: The cells that are done.
        steps: The steps of the measurements.
        samples: How many samples were measured on.
        by_level: By measure, (cells, LEVELS, steps, seeds); NaN where it was not taken.
        whole: By measure, of all levels together, (cells, steps, seeds).
        every: By measure of `EVERY`, each level in each layer of the network,
            (cells, LEVELS, layers, steps, seeds); NaN where it was not taken.
    """

    cells: tuple[TreeCell, ...]
    steps: tuple[int, ...]
    samples: int
    by_level: dict[str, np.ndarray]
    whole: dict[str, np.ndarray]
    every: dict[str, np.ndarray]

    @property
    def rows(self) -> list[tuple[int, int]]:
        """The place of a cell and s, for each level, of which the class is the last."""
        return [(i, s) for i, cell in enumerate(self.cells) for s in range(cell.depth)]

    @property
    def neighbours(self) -> list[int]:
        """Those of the rows whose next row is the next higher level of the same cell."""
        places = [i for i, _ in self.rows]
        return [row for row in range(len(places) - 1) if places[row] == places[row + 1]]

    def latents(self, measure: str) -> np.ndarray:
        """Return a measure of each level in the layer of its number: (rows, steps, seeds)."""
        return self.by_level[measure][tuple(zip(*self.rows, strict=True))]


def collect(run: Run, size: TreeSize) -> TreeResults:
    """Return what the metrics of the groups that are done hold."""
    done = groups_done(run, GROUPS)
    read = partial(read_metric, done.values(), size.measure_at, size.seeds)
    layers = [f"layer{layer}" for layer in range(LEVELS)]
    return TreeResults(
        tuple(cell for group in done for cell in GROUPS[group]),
        size.measure_at,
        size.samples,
        {name: read(name, LEVELS) for name in BY_LEVEL},
        {name: read(name) for name in WHOLE},
        {name: read(name, LEVELS, layers) for name in EVERY},
    )


@dataclass(frozen=True, eq=False)
class Learned:
    """What training adds to each level; one entry a row of the results.

    Attributes:
        before: Correlation of the latents with the nodes that other samples chose, untrained.
        after: The same, trained.
        possible: What a perfect observer of the sequence gets.
        raised: Whether the gain is clear.
        half_way: The first measurement at which NCorr has half of what it gains in all.
    """

    before: np.ndarray
    after: np.ndarray
    possible: np.ndarray
    raised: np.ndarray
    half_way: np.ndarray

    @classmethod
    def of(cls, results: TreeResults) -> "Learned":
        """From the measurements."""
        held_out, curve = results.latents("held_out_samples"), results.latents("ncorr").mean(-1)
        gain = held_out[:, -1] - held_out[:, 0]
        half = (curve[:, :1] + curve[:, -1:]) / 2
        return cls(
            before=held_out[:, 0].mean(-1),
            after=held_out[:, -1].mean(-1),
            possible=results.latents("observer")[:, 0].mean(-1),
            raised=gain.mean(-1) > CLEARLY * gain.std(-1, ddof=1),
            half_way=(curve >= half).argmax(-1),
        )


def judge(results: TreeResults) -> Outcome:
    """Return what training adds to the latents of HBLT(ρ); nothing was published of it."""
    learned, pairs = Learned.of(results), np.array(results.neighbours, dtype=int)
    gain = learned.after - learned.before
    lower_is_higher = learned.after[pairs] > learned.after[pairs + 1]
    lower_gains_more = gain[pairs] > gain[pairs + 1]
    order = (
        f"; of two neighbouring levels the lower one reads higher in {lower_is_higher.sum()} of "
        f"{len(pairs)} pairs and gains more in {lower_gains_more.sum()}"
        if len(pairs)
        else ""
    )
    return Outcome(
        Verdict.NOT_COMPARABLE if results.cells == CELLS else Verdict.INCOMPLETE,
        finding=f"on samples that did not choose it, the best node's correlation with its latent "
        f"goes from {learned.before.mean():.2f} to {learned.after.mean():.2f} in training, where a "
        f"perfect observer of the sequence gets {learned.possible.mean():.2f}; it rises by more "
        f"than twice the seed std in {learned.raised.sum()} of {len(learned.raised)} rows of "
        f"depth, ρ and level, classes included{order}.",
        table=list(_table(results)),
        paragraphs=(
            _by_depth(results, learned),
            _order(results, learned, pairs),
            *_every_layer(results),
            _controls(results),
        ),
    )


def _table(results: TreeResults) -> Iterable[dict[str, str]]:
    for i, cell in enumerate(results.cells):
        for s in range(cell.depth):

            def read(measure: str, at: int, i: int = i, s: int = s) -> str:
                return mean_and_std(results.by_level[measure][i, s, at])

            yield {
                "depth": str(cell.depth),
                "ρ": f"{cell.rho:g}",
                "s": str(s) if s in cell.latent_levels else f"{s}, class",
                "trained": read("ncorr", -1),
                "untrained": read("ncorr", 0),
                "new samples": read("held_out_samples", -1),
                "new samples, untrained": read("held_out_samples", 0),
                "perfect observer": read("observer", 0),
            }


def _by_depth(results: TreeResults, learned: Learned) -> str:
    """Return what training adds at each depth and level, means over ρ, and the accuracy."""
    rows = np.array([(results.cells[i].depth, s) for i, s in results.rows])
    texts = []
    for depth in dict.fromkeys(rows[:, 0]):
        levels = []
        for s in range(depth):
            own = (rows == (depth, s)).all(-1)
            before, after, possible = (
                values[own].mean() for values in (learned.before, learned.after, learned.possible)
            )
            levels.append(f"{_level(s, depth)}: {before:.2f} → {after:.2f} of {possible:.2f}")
        texts.append(f"at depth {depth} {', '.join(levels)}")
    right, best = results.whole["accuracy"].mean((0, 2)), results.whole["best_accuracy"][:, 0]
    return (
        f"Untrained → trained on new samples, of what a perfect observer gets, means over ρ: "
        f"{'; '.join(texts)}. The networks name the class of {right[-1]:.0%} of the samples after "
        f"{results.steps[-1]:,} steps, {right[0]:.0%} before; the best guess from the sequence is "
        f"right in {best.mean():.0%}, as {CLASSES} classes share {min(CLASSES, 2**BRANCHING)} "
        f"settings of the {BRANCHING} top latents."
    )


def _order(results: TreeResults, learned: Learned, pairs: np.ndarray) -> str:
    """Return whether lower levels are learned earlier than those above them."""
    if not len(pairs):
        return "Which level is learned first cannot be decided: no tree here has two."
    both = pairs[learned.raised[pairs] & learned.raised[pairs + 1]]
    if not len(both):
        return (
            "Which level is learned first cannot be decided: of two neighbouring ones, in no pair "
            "training clearly adds to both."
        )
    later = learned.half_way[both + 1] - learned.half_way[both]
    earlier, same, after = (int(test.sum()) for test in (later > 0, later == 0, later < 0))
    verdict = "no order can be seen"
    if 2 * max(earlier, after) > len(both):
        verdict = f"the {'lower' if earlier > after else 'upper'} level comes first"
    curve = results.latents("ncorr").mean(-1)
    before = int(np.searchsorted(results.steps, results.steps[-1] / 2))
    late = (curve[:, -1] - curve[:, before])[learned.raised]
    whole = (curve[:, -1] - curve[:, 0])[learned.raised]
    return (
        f"Which level is learned first, each in the layer of its number: in the {len(both)} pairs "
        f"of neighbouring ones where training clearly adds to both, the lower one has half of its "
        f"gain at an earlier measurement in {earlier}, at the same in {same} and at a later one in "
        f"{after}; {verdict}. Half is of what is gained by step {results.steps[-1]:,}: "
        f"{late.sum() / whole.sum():.0%} of all gains come after step {results.steps[before]:,}."
    )


def _every_layer(results: TreeResults) -> Iterable[str]:
    """Return what training adds to every level in every layer, which separates level from layer."""
    kept = results.every[EVERY[1]]
    gain = kept[..., -1, :] - kept[..., 0, :]
    if np.isnan(gain).all():
        return
    texts = []
    for depth in dict.fromkeys(cell.depth for cell in results.cells):
        own = gain[[cell.depth == depth for cell in results.cells], :depth, :depth].mean((0, -1))
        levels = (
            f"{_level(s, depth)} {', '.join(f'{value:+.2f}' for value in row)}"
            for s, row in enumerate(own)
        )
        texts.append(f"depth {depth}: {'; '.join(levels)}")
    yield (
        "Every level in every layer, what training adds on new samples from the lowest layer up, "
        f"means over ρ: {'. '.join(texts)}."
    )
    more, most = [], []
    for cell, own in zip(results.cells, gain.mean(-1), strict=True):
        own = own[: cell.depth, : cell.depth]
        for s in range(cell.depth - 1):
            kind = "class" if s + 1 == cell.depth - 1 else "latents"
            more += [(kind, bool(up > low)) for low, up in zip(own[s], own[s + 1], strict=True)]
        most += [int(row.argmax()) == cell.depth - 1 for row in own]
    counts = ", ".join(
        f"{sum(up for what, up in more if what == kind)} of "
        f"{sum(what == kind for what, _ in more)} where it is {words}"
        for kind, words in (("latents", "of latents"), ("class", "the class"))
        if any(what == kind for what, _ in more)
    )
    yield (
        f"In one and the same layer the upper of two neighbouring levels gains more in {counts}; a "
        f"level gains most in the top layer in {sum(most)} of {len(most)} rows of depth, ρ and "
        "level."
    )


def _level(s: int, depth: int) -> str:
    return f"s = {s}" if s < depth - 1 else "class"


def _controls(results: TreeResults) -> str:
    same, other, classes, chance = (
        np.nanmean(results.latents(measure)[:, -1])
        for measure in ("ncorr", "held_out_samples", "held_out_classes", "shuffled_samples")
    )
    distinct = results.whole["distinct"][:, 0].mean(-1)
    return (
        f"Controls, trained: NCorr with the node chosen on the samples it is measured on is "
        f"{same:.2f}, chosen on the other half of the samples {other:.2f}, of the classes "
        f"{classes:.2f}, with latents shuffled over samples {chance:.2f}. (Latents differ within a "
        f"class, so they cannot be shuffled over classes.) The {results.samples:,} samples of a "
        f"tree hold from {distinct.min():,.0f} to {distinct.max():,.0f} different sequences."
    )


def tables(results: TreeResults) -> dict[str, dict[str, list]]:
    """Return three tables: of every network, of the means, and of every level in every layer.

    Where a number is of all levels together s is −1.
    """

    def row(i: int, s: int, at: int, **more: Any) -> dict[str, Any]:
        cell = results.cells[i]
        return {"depth": cell.depth, "rho": cell.rho, "s": s, **more, "step": results.steps[at]}

    parts = {measure: values[:, None] for measure, values in results.whole.items()}
    seeds, means = seeds_and_means(
        {**results.by_level, **parts},
        lambda measure, i, s, at: row(i, -1 if measure in parts else s, at),
    )
    every = []
    for measure, values in results.every.items():
        for i, s, layer, at, seed in np.argwhere(~np.isnan(values)).tolist():
            value = float(values[i, s, layer, at, seed])
            where = row(i, s, at, layer=layer)
            every.append({**where, "seed": seed, "measure": measure, "value": value})
    return {"seeds": columns(seeds), "means": columns(means), "every": columns(every)}

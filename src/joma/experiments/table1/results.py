"""What both Table 1 experiments share: hidden nodes, the controls of NCorr, results, pictures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from joma.data import Batch
from joma.experiments._frame import groups_done, read_metric
from joma.experiments._tables import columns, mean_and_std
from joma.probes import held_out, planted, shuffled
from joma.report import figures
from joma.runs import Run
from joma.train import Ensemble

PLANTED = (0.7, 0.8, 0.9, 0.95, 1.0)
"""Correlations of the nodes that are planted to measure the power of a control."""


def pooled_nodes(
    ensemble: Ensemble, batch: Batch, chunk: int | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return the hidden activations of each layer, max-pooled over the sequence, and the outputs.

    Args:
        ensemble: The networks.
        batch: What they are given.
        chunk: How many of the batch's sequences to take at a time; all where None.

    Returns:
        For each layer (E, B, hidden), and (E, B, outputs).
    """
    pooled: list[list[Tensor]] = []

    def watch(name: str, layer: int, x: Tensor) -> None:
        if name == "hidden":
            pooled[-1].append(x.amax(2))

    outputs = []
    with ensemble.evaluating() as model:
        for tokens in batch.tokens.split(chunk or batch.tokens.shape[1], dim=1):
            pooled.append([])
            outputs.append(model(tokens, leading=batch.leading, watch=watch))
    return [torch.cat(parts, 1) for parts in zip(*pooled, strict=True)], torch.cat(outputs, 1)


def controls(over: str, latents: Tensor, nodes: Tensor, **options: Any) -> dict[str, Tensor]:
    """Return NCorr's two controls over classes or samples, by their names in the metrics."""
    chosen = held_out(latents, nodes, **options)
    return {
        f"held_out_{over}": chosen.mean,
        f"counted_{over}": chosen.counted.double().mean(-1),
        f"shuffled_{over}": shuffled(latents, nodes, **options).mean,
    }


def planted_name(correlation: float) -> str:
    """Return the name that the control has in the metrics where nodes were planted."""
    return f"held_out_planted_{correlation:g}"


def power(latents: Tensor, nodes: Tensor, **options: Any) -> dict[str, Tensor]:
    """Return what `held_out` reads where every latent has a node of known correlation.

    Args:
        latents: (..., S, N).
        nodes: Activations of a real network, (..., S, H); a node for each latent is added to them.
        **options: Arguments of `held_out`.
    """
    found = {}
    for correlation in PLANTED:
        more = planted(latents, nodes, correlation, weights=options.get("weights"))
        found[planted_name(correlation)] = held_out(latents, more, **options).mean
    return found


@dataclass(frozen=True, eq=False)
class CellResults:
    """What was measured in the cells that are done.

    Attributes:
        cells: The cells that are done.
        steps: The steps of the measurements: untrained, after one step, …, at the end.
        by_level: By measure, of each level of latents, the class included,
            (cells, levels, steps, seeds); NaN where it was not taken.
        whole: By measure, of the whole network, (cells, steps, seeds).
    """

    cells: tuple[Any, ...]
    steps: tuple[int, ...]
    by_level: Mapping[str, np.ndarray]
    whole: Mapping[str, np.ndarray]

    def at(self, measure: str, at: int = -1) -> np.ndarray:
        """Return a measure at one of the measurements, (cells, levels, seeds)."""
        return self.by_level[measure][:, :, at]

    def mean(self, measure: str, at: int = -1) -> np.ndarray:
        """Return its mean over seeds, (cells, levels)."""
        return self.at(measure, at).mean(-1)

    def text(self, measure: str, cell: int, s: int, at: int = -1) -> str:
        """Return its mean and spread of a cell and level, as a table has it."""
        values = self.at(measure, at)[cell, s]
        return "–" if np.isnan(values).any() else mean_and_std(values)


def collect(
    run: Run,
    groups: Mapping[str, Sequence[Any]],
    size: Any,
    levels: int,
    by_level: Iterable[str],
    whole: Iterable[str],
) -> CellResults:
    """Return what the metrics of the groups that are done hold.

    Args:
        run: The experiment's run.
        groups: The cells of every group, by name.
        size: The size of the experiment.
        levels: The most levels that a cell has.
        by_level: Names of the measures of each level.
        whole: Names of the measures of the whole network.
    """
    done = groups_done(run, groups)
    read = partial(read_metric, done.values(), size.measure_at, size.seeds)
    return CellResults(
        tuple(cell for group in done for cell in groups[group]),
        size.measure_at,
        {name: read(name, levels) for name in by_level},
        {name: read(name) for name in whole},
    )


def tables(
    measured: Mapping[str, np.ndarray],
    label: Callable[..., dict[str, Any]],
    more: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {},
) -> dict[str, dict[str, list[Any]]]:
    """Return a table with a row for each number of every network, and one with their means.

    Args:
        measured: By measure, numbers whose last axis is the networks; rows of NaN are left out.
        label: Returns the first entries of a row, given the measure and the other indices.
        more: Returns further entries of a row of means.
    """
    seeds, means = [], []
    for measure, values in measured.items():
        for place in np.ndindex(values.shape[:-1]):
            own = values[place]
            if np.isnan(own).all():
                continue
            where = {**label(measure, *place), "measure": measure}
            means.append({**where, "mean": own.mean(), "std": own.std(ddof=1), **more(where)})
            seeds += [{**where, "seed": seed, "value": value} for seed, value in enumerate(own)]
    return {"seeds": columns(seeds), "means": columns(means)}


_LEVEL_NAMES = ("s = 0, lowest latents", "s = 1, latents of latents", "s = 2, the class")
_BLUE, _RED, _GREY = figures.BLUE, figures.VERMILLION, figures.GREY

_Series = Sequence[tuple[str, int, str, str, str, bool]]
"""Measure, place of the measurement, label, colour, marker, and whether the marker is filled."""

_PRINTED: _Series = (
    ("ncorr", -1, "trained", _BLUE, "o", True),
    ("ncorr", 0, "untrained", _RED, "s", True),
    ("shuffled_classes", -1, "trained, latents shuffled over classes", _GREY, "x", True),
    ("held_out_classes", -1, "trained, node chosen on other classes", _BLUE, "o", False),
    ("held_out_classes", 0, "untrained, node chosen on other classes", _RED, "s", False),
)
_TREES: _Series = (
    ("ncorr", -1, "trained", _BLUE, "o", True),
    ("held_out_samples", -1, "trained, node chosen\non other samples", _BLUE, "o", False),
    ("ncorr", 0, "untrained", _RED, "s", True),
    ("held_out_samples", 0, "untrained, node chosen\non other samples", _RED, "s", False),
    ("shuffled_samples", -1, "trained, latents\nshuffled over samples", _GREY, "x", True),
)


def draw_table1(results: CellResults) -> Figure:
    """Draw every cell: published, trained, untrained, and the controls over classes."""
    figure, axes = figures.new(10.5, 7.6, len(_LEVEL_NAMES) - 1, 1)
    places = np.arange(len(results.cells))
    names = [f"C={cell.classes} N={cell.children}\n{cell.latents}" for cell in results.cells]
    for s, ax in enumerate(axes):
        published = [cell.published[s] for cell in results.cells]
        bar = {"color": figures.BLACK, "lw": 1.6, "label": "published"}
        ax.hlines(published, places - 0.42, places + 0.42, **bar)
        _draw_series(ax, results, _PRINTED, places, slice(None), s, 0.14, ms=5)
        for place in places[1::2][:-1] + 0.5:
            ax.axvline(place, color="#d0d0d0", lw=0.8)
        limits = {"ylim": (-0.05, 1.05), "xlim": (-0.6, places[-1] + 0.6)}
        ax.set(title=_LEVEL_NAMES[s], ylabel="NCorr", **limits)
        ax.set_xticks(places, names, fontsize=8)
        ax.grid(axis="x", visible=False)
    axes[0].legend(loc="lower left", ncols=3, fontsize=8.5, bbox_to_anchor=(0, 1.08))
    return figure


def draw_trees(results: CellResults) -> Figure:
    """Draw a panel for each depth: in a block for each level, every ρ."""
    depths = _by_depth(results)
    figure, axes = figures.new(13, 4.4, 1, len(depths))
    axes = np.atleast_1d(axes)
    axes[0].get_gridspec().set_width_ratios(list(depths))
    for ax, (depth, places) in zip(axes, depths.items(), strict=True):
        rhos = [results.cells[place].rho for place in places]
        block, wide = np.arange(len(rhos)), len(rhos) + 0.6
        for s in range(depth):
            x = s * wide + block
            observer = results.mean("observer", 0)[places, s]
            label = "perfect observer\nof the sequence" if s == 0 else ""
            bar = {"color": figures.BLACK, "lw": 1.8, "label": label}
            ax.hlines(observer, x - 0.42, x + 0.42, **bar)
            _draw_series(ax, results, _TREES, x, places, s, 0.15, ms=4, labelled=s == 0)
            ax.text(x.mean(), 1.06, results.cells[places[0]].level(s), ha="center", fontsize=9)
            if s:
                ax.axvline(s * wide - 0.8, color="#d0d0d0", lw=0.8)
        ticks = np.concatenate([s * wide + block for s in range(depth)])
        ax.set_xticks(ticks, [f"{rho:g}".lstrip("0") for rho in rhos] * depth, fontsize=8)
        ax.set(title=f"depth {depth}", xlabel="ρ", ylim=(-0.03, 1.13), xlim=(-0.8, ticks[-1] + 0.8))
        ax.grid(axis="x", visible=False)
    axes[0].set_ylabel("correlation with the latent")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9, labelspacing=0.9)
    return figure


def _draw_series(
    ax: Axes,
    results: CellResults,
    series: _Series,
    x: np.ndarray,
    cells: slice | list[int],
    s: int,
    apart: float,
    *,
    ms: float,
    labelled: bool = True,
) -> None:
    for i, (measure, at, label, color, marker, filled) in enumerate(series):
        values = results.at(measure, at)[cells, s]
        bars = {"fmt": marker, "ms": ms, "label": label if labelled else None}
        figures.error_bars(ax, x + (i - 2) * apart, values, color=color, filled=filled, **bars)


def draw_table1_training(results: CellResults) -> Figure:
    """Draw NCorr, its controls and the accuracy over training, means over all cells."""
    figure, axes = figures.new(10.5, 3.4, 1, len(_LEVEL_NAMES))
    steps = np.maximum(results.steps, 0.5)
    for s, ax in enumerate(axes):
        for measure, color, style, label in (
            ("ncorr", _BLUE, "-o", "NCorr"),
            ("shuffled_classes", _GREY, "--x", "shuffled over classes"),
            ("held_out_classes", figures.GREEN, "-D", "node chosen on other classes"),
        ):
            values = results.by_level[measure][:, s].mean((0, 2))
            there = ~np.isnan(values)
            ax.plot(steps[there], values[there], style, color=color, label=label, ms=4)
        accuracy = results.whole["accuracy"].mean((0, 2))
        ax.plot(steps, accuracy, ":", color=figures.BLACK, label="accuracy", lw=1.4)
        ax.set(title=_LEVEL_NAMES[s], xlabel="step", ylim=(-0.05, 1.05))
        figures.log_steps(ax, results.steps[-1])
    axes[0].set_ylabel("mean over cells")
    axes[-1].legend(loc="best", fontsize=8)
    return figure


def draw_trees_training(results: CellResults) -> Figure:
    """Draw NCorr of each level and the accuracy over training, means over ρ and seeds."""
    depths = _by_depth(results)
    figure, axes = figures.new(12, 3.8, 1, len(depths))
    axes = np.atleast_1d(axes)
    steps = np.maximum(results.steps, 0.5)
    levels = ((_BLUE, "o"), (_RED, "s"), (figures.GREEN, "D"))
    for ax, (depth, places) in zip(axes, depths.items(), strict=True):
        for s in range(depth):
            color, marker = levels[s] if s < depth - 1 else (figures.PURPLE, "^")
            curve = results.by_level["ncorr"][places, s].mean((0, 2))
            label = results.cells[places[0]].level(s)
            ax.plot(steps, curve, color=color, marker=marker, ms=4, label=label)
            possible = results.at("observer", 0)[places, s].mean()
            ax.axhline(possible, color=color, ls="--", lw=1)
        accuracy = results.whole["accuracy"][places].mean((0, 2))
        ax.plot(steps, accuracy, color=figures.BLACK, lw=1.4, label="accuracy")
        best = results.whole["best_accuracy"][places, 0].mean()
        ax.axhline(best, color=figures.BLACK, ls="--", lw=1)
        ax.plot([], [], color=_GREY, ls="--", lw=1, label="best possible")
        ax.set(title=f"depth {depth}", xlabel="step", ylim=(-0.03, 1.03))
        figures.log_steps(ax, results.steps[-1])
    axes[0].set_ylabel("NCorr, mean over ρ")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
    return figure


def _by_depth(results: CellResults) -> dict[int, list[int]]:
    """Return the places of each depth's cells."""
    found: dict[int, list[int]] = {}
    for place, cell in enumerate(results.cells):
        found.setdefault(cell.depth, []).append(place)
    return found

"""The pictures of both Table 1 experiments: every cell, and NCorr as the networks learn."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.experiments.table1.nodes import CellResults
from joma.report import figures

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

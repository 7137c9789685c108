"""The pictures of Table 1: every cell with its controls, and NCorr as the networks learn."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.experiments._experiment import Outcome, Request
from joma.experiments._trained import train_cells, write_results
from joma.experiments.table1 import EXPERIMENT, PUBLISHED_HIDDEN, PUBLISHED_RATES
from joma.experiments.table1.networks import GROUPS, LEVELS, SIZES, Table1Networks
from joma.experiments.table1.results import Table1Results, collect, judge, tables
from joma.report import figures
from joma.runs import Run

_LEVEL_NAMES = ("s = 0, lowest latents", "s = 1, latents of latents", "s = 2, the class")
_RED = figures.VERMILLION
_SERIES = (
    ("ncorr", -1, "trained", figures.BLUE, "o", True),
    ("ncorr", 0, "untrained", _RED, "s", True),
    ("shuffled_classes", -1, "trained, latents shuffled over classes", figures.GREY, "x", True),
    ("held_out_classes", -1, "trained, node chosen on other classes", figures.BLUE, "o", False),
    ("held_out_classes", 0, "untrained, node chosen on other classes", _RED, "s", False),
)


def reproduce(run: Run, request: Request) -> Outcome:
    """Train the groups asked for that are not done, and compare all that are."""
    size = SIZES[request.scale].with_options(request.options)
    train_cells(run, GROUPS, Table1Networks, size, request)
    results = collect(run, size, request.seed)
    published_size = (
        request.scale == "full"
        and size.hidden in PUBLISHED_HIDDEN
        and size.learning_rate in PUBLISHED_RATES
    )
    outcome = judge(results, published_size)
    write_results(run, EXPERIMENT, outcome, draw_cells(results), tables(results))
    figures.save(
        run,
        "table1-training",
        draw_training(results),
        title="NCorr while the networks of Table 1 learn",
        caption=" ".join(outcome.paragraphs[:2]),
    )
    return outcome


def draw_cells(results: Table1Results) -> Figure:
    """Draw every cell: published, trained, untrained, and the controls over classes."""
    figure, axes = figures.new(10.5, 7.6, LEVELS - 1, 1)
    for s, ax in enumerate(axes):
        _draw_level(ax, results, s)
    axes[0].legend(loc="lower left", ncols=3, fontsize=8.5, bbox_to_anchor=(0, 1.08))
    return figure


def _draw_level(ax: Axes, results: Table1Results, s: int) -> None:
    places = np.arange(len(results.cells))
    published = [cell.published[s] for cell in results.cells]
    ax.hlines(
        published, places - 0.42, places + 0.42, color=figures.BLACK, lw=1.6, label="published"
    )
    for i, (measure, at, label, color, marker, filled) in enumerate(_SERIES):
        step = results.steps[at]
        values, x = results.at(measure, step)[:, s], places + (i - 2) * 0.14
        bars = {"fmt": marker, "ms": 5, "label": label}
        figures.error_bars(ax, x, values, color=color, filled=filled, **bars)
    for place in places[1::2][:-1] + 0.5:
        ax.axvline(place, color="#d0d0d0", lw=0.8)
    ax.set(title=_LEVEL_NAMES[s], ylabel="NCorr", ylim=(-0.05, 1.05), xlim=(-0.6, places[-1] + 0.6))
    names = [f"C={cell.classes} N={cell.children}\n{cell.latents}" for cell in results.cells]
    ax.set_xticks(places, names, fontsize=8)
    ax.grid(axis="x", visible=False)


def draw_training(results: Table1Results) -> Figure:
    """Draw NCorr, its controls and the accuracy over training, means over all cells."""
    figure, axes = figures.new(10.5, 3.4, 1, LEVELS)
    steps = np.array(results.steps, dtype=float)
    steps[0] = 0.5  # stands for 0 on the logarithmic axis
    for s, ax in enumerate(axes):
        for measure, color, style, label in (
            ("ncorr", figures.BLUE, "-o", "NCorr"),
            ("shuffled_classes", figures.GREY, "--x", "shuffled over classes"),
            ("held_out_classes", figures.GREEN, "-D", "node chosen on other classes"),
        ):
            values = results.values[measure][:, s].mean((0, 2))
            there = ~np.isnan(values)
            ax.semilogx(steps[there], values[there], style, color=color, label=label, ms=4)
        ax.semilogx(
            steps, results.accuracy.mean((0, 2)), ":", color=figures.BLACK, label="accuracy", lw=1.4
        )
        ax.set(title=_LEVEL_NAMES[s], xlabel="step", ylim=(-0.05, 1.05))
        ax.set_xticks([0.5, 1, 10, 100, 1000, 10_000][: 2 + len(str(results.steps[-1]))])
        ax.set_xticklabels(["0", "1", "10", "100", "10³", "10⁴"][: 2 + len(str(results.steps[-1]))])
        ax.minorticks_off()
    axes[0].set_ylabel("mean over cells")
    axes[-1].legend(loc="best", fontsize=8)
    return figure

"""The pictures of Table 1 on HBLT(ρ): every tree next to what is possible, and over training."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.experiments._experiment import Outcome, Request
from joma.experiments._trained import train_cells, write_results
from joma.experiments.table1_hblt import EXPERIMENT
from joma.experiments.table1_hblt.networks import GROUPS, SIZES, TreeCell, TreeNetworks
from joma.experiments.table1_hblt.results import TreeResults, collect, judge, tables
from joma.report import figures
from joma.runs import Run

_RED = figures.VERMILLION
_SERIES = (
    ("ncorr", -1, "trained", figures.BLUE, "o", True),
    ("held_out_samples", -1, "trained, node chosen\non other samples", figures.BLUE, "o", False),
    ("ncorr", 0, "untrained", _RED, "s", True),
    ("held_out_samples", 0, "untrained, node chosen\non other samples", _RED, "s", False),
    ("shuffled_samples", -1, "trained, latents\nshuffled over samples", figures.GREY, "x", True),
)
_LEVELS = ((figures.BLUE, "o"), (figures.VERMILLION, "s"), (figures.GREEN, "D"))
_CLASS = (figures.PURPLE, "^")


def reproduce(run: Run, request: Request) -> Outcome:
    """Train the groups asked for that are not done, and compare all that are."""
    size = SIZES[request.scale].with_options(request.options)
    train_cells(run, GROUPS, TreeNetworks, size, request)
    results = collect(run, size)
    outcome = judge(results)
    write_results(run, EXPERIMENT, outcome, draw_cells(results), tables(results))
    figures.save(
        run,
        "table1-hblt-training",
        draw_training(results),
        title="NCorr while networks learn from HBLT(ρ)",
        caption="\n".join(outcome.paragraphs),
    )
    return outcome


def draw_cells(results: TreeResults) -> Figure:
    """Draw a panel for each depth: in a block for each level, every ρ."""
    depths = _by_depth(results)
    figure, axes = figures.new(13, 4.4, 1, len(depths))
    axes = np.atleast_1d(axes)
    axes[0].get_gridspec().set_width_ratios(list(depths))
    for ax, (depth, places) in zip(axes, depths.items(), strict=True):
        _draw_depth(ax, results, depth, places)
    axes[0].set_ylabel("correlation with the latent")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9, labelspacing=0.9)
    return figure


def _draw_depth(ax: Axes, results: TreeResults, depth: int, places: list[int]) -> None:
    rhos = [results.cells[place].rho for place in places]
    block = np.arange(len(rhos))
    wide = len(rhos) + 0.6
    for s in range(depth):
        x = s * wide + block
        observer = results.by_level["observer"][places, s, 0].mean(-1)
        label = "perfect observer\nof the sequence" if s == 0 else ""
        ax.hlines(observer, x - 0.42, x + 0.42, color=figures.BLACK, lw=1.8, label=label)
        for i, (measure, step, name, color, marker, filled) in enumerate(_SERIES):
            values = results.by_level[measure][places, s, step]
            bars = {"fmt": marker, "ms": 4, "label": name if s == 0 else None}
            at = x + (i - 2) * 0.15
            figures.error_bars(ax, at, values, color=color, filled=filled, **bars)
        ax.text(x.mean(), 1.06, _level(results.cells[places[0]], s), ha="center", fontsize=9)
        if s:
            ax.axvline(s * wide - 0.8, color="#d0d0d0", lw=0.8)
    ticks = np.concatenate([s * wide + block for s in range(depth)])
    ax.set_xticks(ticks, [f"{rho:g}".lstrip("0") for rho in rhos] * depth, fontsize=8)
    ax.set(title=f"depth {depth}", xlabel="ρ", ylim=(-0.03, 1.13), xlim=(-0.8, ticks[-1] + 0.8))
    ax.grid(axis="x", visible=False)


def draw_training(results: TreeResults) -> Figure:
    """Draw NCorr of each level and the accuracy over training, means over ρ and seeds."""
    depths = _by_depth(results)
    figure, axes = figures.new(12, 3.8, 1, len(depths))
    axes = np.atleast_1d(axes)
    steps = np.array(results.steps, dtype=float)
    steps[0] = 0.5  # stands for 0 on the logarithmic axis
    for ax, (depth, places) in zip(axes, depths.items(), strict=True):
        cell = results.cells[places[0]]
        for s in range(depth):
            color, marker = _LEVELS[s] if s in cell.latent_levels else _CLASS
            curve = results.by_level["ncorr"][places, s].mean((0, 2))
            ax.semilogx(steps, curve, color=color, marker=marker, ms=4, label=_level(cell, s))
            ax.axhline(
                results.by_level["observer"][places, s, 0].mean(), color=color, ls="--", lw=1
            )
        accuracy = results.whole["accuracy"][places].mean((0, 2))
        ax.semilogx(steps, accuracy, color=figures.BLACK, lw=1.4, label="accuracy")
        best = results.whole["best_accuracy"][places, 0].mean()
        ax.axhline(best, color=figures.BLACK, ls="--", lw=1)
        ax.plot([], [], color=figures.GREY, ls="--", lw=1, label="best possible")
        ax.set(title=f"depth {depth}", xlabel="step", ylim=(-0.03, 1.03))
        powers = [10**k for k in range(5) if 10**k <= results.steps[-1]]
        ax.set_xticks([0.5, *powers], ["0", *(f"{power:,}" for power in powers)])
        ax.minorticks_off()
    axes[0].set_ylabel("NCorr, mean over ρ")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
    return figure


def _by_depth(results: TreeResults) -> dict[int, list[int]]:
    """Return the places of each depth's cells."""
    found: dict[int, list[int]] = {}
    for place, cell in enumerate(results.cells):
        found.setdefault(cell.depth, []).append(place)
    return found


def _level(cell: TreeCell, s: int) -> str:
    return f"s = {s}" if s in cell.latent_levels else "class"

"""What each layer attends to by height, and how sparse it is, while networks learn."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from joma.experiments._experiment import Outcome, Request, publish
from joma.experiments._frame import standard_error, train_cells
from joma.experiments.hierarchy import EXPERIMENT
from joma.experiments.hierarchy.findings import (
    GroupResults,
    LayerCurves,
    collect,
    cooccurrence,
    history,
    judge,
    tables,
)
from joma.experiments.hierarchy.networks import (
    DECIDES,
    GROUPS,
    HEIGHTS,
    SIZES,
    HierarchyNetworks,
)
from joma.report import figures
from joma.runs import Run

_STYLES = {1: (figures.BLUE, "-"), 2: (figures.VERMILLION, "--"), 3: (figures.GREEN, ":")}
_TICKS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
_FINE_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.7, 2)


def reproduce(run: Run, request: Request) -> Outcome:
    """Train the groups asked for that are not done, and say what all that are show."""
    size = SIZES[request.scale].with_options(request.options)
    groups = {name: [group] for name, group in GROUPS.items()}
    train_cells(run, groups, HierarchyNetworks, size, request)
    results = collect(run, size)
    outcome = judge(results, comparable=request.scale == "full")
    publish(run, EXPERIMENT, outcome, draw_layers(results), tables(results))
    if (shallow := draw_one_layer(results)) is not None:
        figures.save(
            run,
            "hierarchy-one-layer",
            shallow,
            title="What attention attends to in networks of one layer",
            caption="\n".join(outcome.paragraphs[:2]),
        )
    return outcome


def draw_layers(results: Mapping[str, GroupResults]) -> Figure | None:
    """Draw every layer of the networks that decide, above the same on the flat tree, if there."""
    titles = {DECIDES: "tree of three levels", "flat-3": "control, flat tree"}
    there = [name for name in titles if name in results]
    if not there:
        return None
    columns = results[there[0]].group.layers
    figure, axes = figures.new(10.5, 2.5 * (len(there) + 1), len(there) + 1, columns)
    styles = ((figures.BLACK, "-"), (figures.GREY, "--"))
    for row, name, style in zip(axes, there, styles, strict=False):
        for layer, curves in enumerate(results[name].layers):
            _draw_ratio(row[layer], curves, cooccurrence(results[name].group))
            row[layer].set_title(f"{titles[name]}: layer {layer}")
            _draw_entropy(axes[-1, layer], curves, *style, titles[name])
            axes[-1, layer].set(title=f"entropy: layer {layer}", xlabel="step")
        row[0].set_ylabel("attention, × untrained")
    axes[-1, 0].set_ylabel("nats")
    for row in axes:
        row[0].legend(loc="lower left", fontsize=8)
    _share_ratios(list(axes[:-1].flat), columns, room=0.8)
    figures.share_limits(axes[-1], columns)
    return figure


def draw_one_layer(results: Mapping[str, GroupResults]) -> Figure | None:
    """Draw networks of one layer, with each label and on the flat tree; those that are there."""
    styles = {
        "class-1": ("class as label", figures.BLACK, "-"),
        "flat-1": ("control, flat tree", figures.GREY, "--"),
        "token-1": ("token as label", figures.PURPLE, "-."),
    }
    there = [name for name in styles if name in results]
    if not there:
        return None
    figure, axes = figures.new(3.0 * (len(there) + 1), 3.1, 1, len(there) + 1)
    for name, ax in zip(there, axes, strict=False):
        curves, (title, color, style) = results[name].layers[0], styles[name]
        _draw_ratio(ax, curves, cooccurrence(results[name].group))
        ax.set(title=title, xlabel="step")
        _draw_entropy(axes[-1], curves, color, style, title)
    axes[-1].set(title="entropy", xlabel="step", ylabel="nats")
    axes[0].set_ylabel("attention, × untrained")
    _share_ratios(list(axes[:-1]), len(there), room=0.72)
    low, high = axes[-1].get_ylim()
    axes[-1].set_ylim(low - 0.3 * (high - low), high)
    for ax in axes:
        ax.legend(loc="lower left", fontsize=8)
    return figure


def _draw_ratio(ax: Axes, curves: LayerCurves, expected: Sequence[float]) -> None:
    steps = np.maximum(curves.steps, 0.5)  # ½ stands for 0 on the logarithmic axis
    ax.axhline(1, color=figures.GREY, lw=0.8)
    taken_up_at = history(curves).taken_up
    for i, height in enumerate(HEIGHTS):
        color, style = _STYLES[height]
        label = f"H = {height}, P[l|m] = {expected[i]:.2f}"
        # Relative to the untrained network, as all is that is said of it.
        own, wrong = (np.log(of[i] / of[i, :1]) for of in (curves.ratio, curves.shuffled))
        mean, error = own.mean(-1), 2 * standard_error(own)
        ends = np.exp([mean - error, mean, mean + error])
        figures.band(ax, steps, *ends, color=color, alpha=0.18, ls=style, label=label)
        label = "tree under wrong leaves" if height == HEIGHTS[-1] else None
        ax.plot(steps, np.exp(wrong.mean(-1)), style, color="#a8a8a8", lw=0.9, label=label)
        if (taken_up := taken_up_at[i]) is not None:
            at = curves.steps.index(taken_up)
            ax.plot(steps[at], np.exp(mean[at]), "o", color=color, ms=5.5, mec="white")
    ax.set_yscale("log")
    figures.log_steps(ax, curves.steps[-1])


def _draw_entropy(ax: Axes, curves: LayerCurves, color: str, style: str, label: str) -> None:
    mean, error = curves.entropy.mean(-1), 2 * standard_error(curves.entropy)
    ends = (mean - error, mean, mean + error)
    line = {"color": color, "alpha": 0.15, "ls": style, "label": label, "lw": 1.5}
    figures.band(ax, np.maximum(curves.steps, 0.5), *ends, **line)
    figures.log_steps(ax, curves.steps[-1])


def _share_ratios(axes: Sequence[Axes], columns: int, room: float) -> None:
    """Give panels of ratios one range, with room for a legend, and round numbers as ticks."""
    figures.share_limits(axes, columns, room)
    low, high = axes[0].get_ylim()
    ticks = _FINE_TICKS if high < 3 * low else _TICKS
    inside = [tick for tick in ticks if low <= tick <= high]
    for ax in axes:
        ax.set_yticks(inside, [f"{tick:g}" for tick in inside])
        ax.yaxis.set_minor_formatter(NullFormatter())

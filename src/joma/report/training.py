"""The picture of a run: its loss, what was measured by layer, and its findings where they began."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from joma.errors import JomaError
from joma.report import figures
from joma.report._curves import chart_words, energy_rank, kept_points
from joma.runs import Curve, Run, RunSummary, curves_of, loss_curves, read_findings

METRICS = ("attention_entropy", "attention_effective", "stable_rank")
"""What is drawn by layer as far as it was recorded, next to the gradient energy of least rank."""

NAME = "training"
"""Name of the figure in a run folder, without its ending."""

DPI = 110

_COLORS = {"critical": figures.VERMILLION, "warning": figures.ORANGE, "note": figures.SKY}
_MOST_LISTED = 7
_APART = 0.035
"""Share of the axis by which marks on one level are apart."""
_WIDEST = 58
_LINE_MAP, _HEAT_MAP, _MISSING = "viridis", "magma", "#d4d4d4"
_LIGHTEST = 0.88  # the end of the map of lines is too light for a white ground
_MOST_POINTS = 4000
_LONGEST = 18  # characters of the label of a layer
_WIDTH, _TOP, _LOSS, _ROW, _GAP, _BOTTOM = 11.0, 0.85, 2.2, 1.75, 0.55, 0.55


def draw(run: Run, *, metrics: Sequence[str] | None = None) -> Figure:
    """Return the picture of a run: loss above, metrics by layer below, findings marked.

    Each metric has lines by layer on the left and the same numbers as a map of layers and steps on
    the right.

    Args:
        run: The run; one that is still written shows what was flushed.
        metrics: The metrics to draw by layer, with or without a recorded loss; otherwise those of
            `METRICS` that were recorded.

    Raises:
        JomaError: The run is damaged, or a metric was not recorded.
    """
    log = run.metrics.read()
    names = _available(log, metrics)
    curves = {name: curves_of(log, name) for name in names}
    groups = grouped(read_findings(run).findings)
    with figures.style():
        longest = max((len(it.label) for own in curves.values() for it in own), default=0)
        figure, grid = _figure(len(curves), min(longest, _LONGEST))
        loss = figure.add_subplot(grid[0, 0])
        _draw_loss(loss, log)
        limits = _limits(log, curves.values())
        panels, maps = [loss], []
        for row, (name, own) in enumerate(curves.items(), 1):
            lines = figure.add_subplot(grid[row, 0])
            heat = figure.add_subplot(grid[row, 1])
            _draw_lines(lines, name, own)
            _draw_heat(figure, heat, name, own)
            panels.append(lines)
            maps.append(heat)
        for panel in (*panels, *maps):
            panel.set_xlim(*limits)
            panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            panel.xaxis.set_major_formatter("{x:,.0f}")
            panel.tick_params(labelsize=8, color=figures.GREY)
        for panel in panels:
            _mark_steps(panel, groups)
        for panel in (panels[-1], *maps[-1:]):
            panel.set_xlabel("step")
        _draw_findings(figure.add_subplot(grid[0, 1]), loss, groups)
        _head(figure, run, several=any(len(own) > 1 for own in curves.values()))
    return figure


def _available(log: Mapping[str, NDArray[Any]], asked: Sequence[str] | None) -> list[str]:
    recorded = set(log["name"].tolist())
    if asked is None:
        energies = sorted((it for it in recorded if energy_rank(it)), key=energy_rank)  # type: ignore[arg-type]
        return [*(name for name in METRICS if name in recorded), *energies[:1]]
    for name in asked:
        if name not in recorded:
            raise JomaError(
                f"metric must be one that was recorded, got {name!r}; "
                f"there is {', '.join(sorted(recorded)) or 'none'}"
            )
    return list(dict.fromkeys(asked))


def _figure(rows: int, longest: int) -> tuple[Figure, GridSpec]:
    """Return a figure and its panels, with room for labels of so many characters."""
    heights = [_LOSS, *[_ROW] * rows]
    height = _TOP + sum(heights) + _GAP * rows + _BOTTOM
    figure = Figure(figsize=(_WIDTH, height))
    FigureCanvasAgg(figure)
    grid = GridSpec(
        rows + 1,
        2,
        figure,
        width_ratios=(1, 0.9),
        height_ratios=heights,
        left=0.062,
        right=0.93,
        top=1 - _TOP / height,
        bottom=_BOTTOM / height,
        hspace=_GAP / (sum(heights) / len(heights)),
        wspace=0.13 + 0.016 * max(0, longest - 3),
    )
    return figure, grid


def _limits(log: Mapping[str, NDArray[Any]], several: Any) -> tuple[float, float]:
    """Return the first and last step of what is drawn, with a margin."""
    losses = np.isin(log["name"].astype(str), ("loss", "validation_loss"))
    own = log["step"][losses]
    steps = [int(own.min()), int(own.max())] if own.size else []
    steps += [int(step) for curves in several for it in curves for step in it.steps[[0, -1]]]
    first, last = (min(steps), max(steps)) if steps else (0, 1)
    margin = max(0.5, 0.01 * (last - first))
    return first - margin, last + margin


def _draw_loss(ax: Axes, log: Mapping[str, NDArray[Any]]) -> None:
    trained, validated = loss_curves(log), loss_curves(log, "validation_loss")
    ax.set_title("Loss", loc="left", fontsize=10)
    if not trained and not validated:
        ax.text(0.5, 0.5, "no loss was recorded", transform=ax.transAxes, ha="center", va="center")
        ax.set_yticks([])
        return
    several = len(trained) > 1
    for curve in trained:
        label = f"training, {len(trained)} members" if several else "training"
        _line(
            ax,
            curve,
            color=figures.BLUE,
            lw=0.8 if several else 1.3,
            alpha=0.6 if several else 1.0,
            label=label if curve is trained[0] else None,
        )
    for curve in validated:
        label = "validation" if curve is validated[0] else None
        _line(ax, curve, color=figures.BLACK, lw=1.3, ls="--", label=label)
    _mark_lost(ax, [*trained, *validated])
    values = np.concatenate([curve.values for curve in (*trained, *validated)])
    values = values[np.isfinite(values)]
    if values.size and values.min() > 0 and values.max() > 10 * values.min():
        ax.set_yscale("log")
    if len(ax.get_legend_handles_labels()[1]) > 1:
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), fontsize=8, ncols=3)


def _mark_lost(ax: Axes, curves: Sequence[Curve]) -> None:
    """Mark the steps whose loss is not finite, at the bottom."""
    lost = [curve.steps[~np.isfinite(curve.values)] for curve in curves]
    steps = np.unique(np.concatenate(lost))
    if steps.size:
        steps = steps[:: -(-len(steps) // 200)]
        where = {"transform": ax.get_xaxis_transform(), "clip_on": False}
        ax.plot(
            steps, np.full(len(steps), 0.03), "x", color=figures.VERMILLION, ms=4, lw=0,
            label="not finite", **where,
        )  # fmt: skip


def _draw_lines(ax: Axes, name: str, curves: Sequence[Curve]) -> None:
    words = chart_words(name)
    ax.set_title(words["title"], loc="left", fontsize=10)
    ax.set_ylabel(words["unit"], fontsize=8)
    thin = 1.4 if len(curves) <= 12 else 0.8
    for curve, color in zip(curves, _colors(len(curves)), strict=True):
        _line(ax, curve, color=color, lw=thin)
    ax.yaxis.set_major_locator(MaxNLocator(5))


def _line(ax: Axes, curve: Curve, **options: Any) -> None:
    kept = kept_points(curve.values, _MOST_POINTS)
    steps, values = curve.steps[kept], curve.values[kept]
    finite = np.isfinite(values)
    alone = finite & ~np.append(finite[1:], False) & ~np.append(False, finite[:-1])
    ax.plot(steps, np.where(finite, values, np.nan), **options)
    if alone.any():  # a point between gaps has no line
        color = options["color"]
        ax.plot(steps[alone], values[alone], "o", color=color, ms=3, lw=0)


def _draw_heat(figure: Figure, ax: Axes, name: str, curves: Sequence[Curve]) -> None:
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    values_LS = np.full((len(curves), len(steps)), np.nan)
    for row, curve in enumerate(curves):
        values_LS[row, np.searchsorted(steps, curve.steps)] = curve.values
    shown = np.ma.masked_invalid(values_LS)
    colors = colormaps[_HEAT_MAP].with_extremes(bad=_MISSING)
    mesh = ax.pcolormesh(
        _edges(steps), np.arange(len(curves) + 1) - 0.5, shown, cmap=colors, rasterized=True
    )
    ax.grid(False)
    ax.set_facecolor(_MISSING)
    labels = [curve.label or "model" for curve in curves]
    every = -(-len(labels) // 10)
    ticks = list(range(0, len(labels), every))
    ax.set_yticks(ticks, [labels[tick][:_LONGEST] for tick in ticks])
    for text, tick in zip(ax.get_yticklabels(), ticks, strict=True):
        text.set_color(_colors(len(curves))[tick])
        text.set_fontweight("bold")
    ax.set_title("by layer", loc="left", fontsize=9, color=figures.GREY)
    if shown.count():
        bar = ax.inset_axes((1.015, 0, 0.02, 1))
        figure.colorbar(mesh, cax=bar).outline.set_visible(False)  # pyright: ignore
        bar.tick_params(labelsize=8, color=figures.GREY)
        bar.set_ylabel(chart_words(name)["unit"], fontsize=8)


def _edges(steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the borders of the columns of a map: half way between measurements."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middle = (steps[1:] + steps[:-1]) / 2
    return np.array([1.5 * steps[0] - 0.5 * steps[1], *middle, 1.5 * steps[-1] - 0.5 * steps[-2]])


def _colors(count: int) -> list[Any]:
    return [colormaps[_LINE_MAP](x) for x in np.linspace(0, _LIGHTEST, max(count, 2))][:count]


def _head(figure: Figure, run: Run, *, several: bool) -> None:
    summary = RunSummary.of(run)
    model = run.config.get("model")
    words = [model if isinstance(model, str) else run.name]
    words += [] if summary.state == "running" else [summary.state]  # a picture is of a moment
    if summary.last_step is not None:
        words.append(f"step {summary.last_step:,}")
    if summary.last_loss is not None:
        words.append(f"last loss {summary.last_loss:.4g}")
    height = float(figure.get_size_inches()[1])
    texts = [(0.012, 0.1, run.path.name, {"fontsize": 13, "weight": "bold"})]
    texts.append((0.012, 0.36, ", ".join(words), {"color": figures.GREY}))
    if several:
        note = "Lines have the colours of the layer numbers at the maps."
        texts.append((0.93, 0.36, note, {"color": figures.GREY, "fontsize": 8, "ha": "right"}))
    for x, inches, text, options in texts:
        figure.text(x, 1 - inches / height, text, parse_math=False, va="top", **options)


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one kind and severity, which share a mark.

    Attributes:
        number: The number of the mark, from 1.
        kind: Name of their rule.
        severity: How bad they are.
        step: The first step since which one of them shows.
        layers: Indices of the layers concerned.
        count: How many findings there are.
    """

    number: int
    kind: str
    severity: str
    step: int
    layers: tuple[int, ...]
    count: int

    @property
    def color(self) -> str:
        """Colour of the severity."""
        return _COLORS.get(self.severity, figures.GREY)

    @property
    def label(self) -> str:
        """What was found, in a few words."""
        words = self.kind.replace("_", " ")
        if self.layers:
            plural = "s" if len(self.layers) > 1 else ""
            words += f", layer{plural} {ranges(self.layers)}"
        elif self.count > 1:
            words += f", {self.count} times"
        return words


def grouped(findings: Sequence[dict[str, Any]]) -> list[FindingGroup]:
    """Return findings by kind and severity, the most severe first.

    Args:
        findings: Records as `joma.runs.read_findings` returns them.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in findings:
        key = str(one.get("kind", "finding")), str(one.get("severity") or "note")
        groups.setdefault(key, []).append(one)
    found = []
    for number, ((kind, severity), own) in enumerate(groups.items(), 1):
        steps = [step for one in own if isinstance(step := one.get("step"), int)]
        layers = {layer for one in own if isinstance(layer := one.get("layer"), int)}
        where = min(steps, default=0), tuple(sorted(layers)), len(own)
        found.append(FindingGroup(number, kind, severity, *where))
    return found


def ranges(numbers: Sequence[int]) -> str:
    """Return increasing whole numbers with dashes between neighbours: "0–3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{it[0]}–{it[-1]}" if len(it) > 1 else f"{it[0]}" for it in runs)


def _mark_steps(ax: Axes, groups: Sequence[FindingGroup]) -> None:
    """Draw a thin line at the step of each group."""
    for group in groups:
        ax.axvline(group.step, color=group.color, lw=0.9, ls=(0, (4, 2)), zorder=1.5)


def _draw_findings(ax: Axes, marked: Axes, groups: Sequence[FindingGroup]) -> None:
    """List the groups in one panel, and put their numbers above another.

    Args:
        ax: The panel of the list, which has nothing else.
        marked: The panel with the steps; its limits are set already.
        groups: What to list.
    """
    ax.set_axis_off()
    ax.set_title("Findings", loc="left", fontsize=10)
    first, last = marked.get_xlim()
    levels: list[float] = []
    for group in sorted(groups, key=lambda it: it.step):
        place = (group.step - first) / (last - first)
        place = min(max(place, 0.0), 1.0)
        level = next((i for i, end in enumerate(levels) if place - end >= _APART), len(levels))
        levels[level : level + 1] = [place]
        _number(marked, group, place, 0.97 - 0.095 * min(level, 8))
    if not groups:
        ax.text(0.0, 0.9, "none", color=figures.GREY, fontsize=9, va="top")
    shown = groups if len(groups) <= _MOST_LISTED + 1 else groups[:_MOST_LISTED]
    for row, group in enumerate(shown):
        y = 0.95 - 0.12 * row
        _number(ax, group, 0.015, y)
        words = f"{group.severity}: {group.label}, from step {group.step:,}"
        words = words if len(words) <= _WIDEST else words[: _WIDEST - 1] + "…"
        ax.text(0.05, y, words, transform=ax.transAxes, fontsize=8.5, va="center", parse_math=False)
    if len(shown) < len(groups):
        more = f"… and {len(groups) - len(shown)} more, see joma runs show"
        ax.text(0.05, 0.95 - 0.12 * len(shown), more, fontsize=8.5, color=figures.GREY, va="center")


def _number(ax: Axes, group: FindingGroup, x: float, y: float) -> None:
    box = {"boxstyle": "circle,pad=0.22", "fc": group.color, "ec": "white", "lw": 0.6}
    ax.text(
        x,
        y,
        str(group.number),
        transform=ax.transAxes,
        ha="center",
        va="center",
        fontsize=7,
        weight="bold",
        color="white" if group.severity == "critical" else figures.BLACK,
        bbox=box,
        zorder=6,
    )

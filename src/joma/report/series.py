"""Fig. 7 of JoMA: attention entropy and stable rank over the checkpoints of a training."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from joma.report import figures

LOGARITHMIC_FROM = 20
"""Ratio of the largest to the smallest step from which on the axis of steps is logarithmic."""

LOGARITHMIC_VALUES_FROM = 8
"""The same ratio for values of which ratios matter."""

_MARKERS = "vXsDP*^"

_FEW = 8
"""Layers up to which each has its line in a legend; more layers get a colour scale."""


@dataclass(frozen=True, eq=False)
class Panel:
    """One quantity of every layer over the checkpoints.

    Attributes:
        title: above the panel.
        unit: label of the axis of values.
        values_SL: a number for each step and layer, NaN where there is none.
        ratios: whether ratios of the values matter, not differences.
    """

    title: str
    unit: str
    values_SL: NDArray[np.float64]
    ratios: bool = False


def draw_series(
    steps: Sequence[int],
    panels: Sequence[Panel],
    bad: Mapping[int, str] | None = None,
) -> Figure:
    """Draw one line for each layer over the steps; bad steps are marked and not joined.

    Args:
        steps: of the checkpoints, in increasing order.
        panels: what is drawn over them.
        bad: steps not to be trusted, and why, in a few words for the legend; some of them may not
            be among `steps`.
    """
    bad = bad or {}
    figure, axes = figures.new(5.2 * len(panels), 4.2, 1, len(panels))
    axes = list(np.atleast_1d(axes))
    layers = max(panel.values_SL.shape[1] for panel in panels)
    for ax, panel in zip(axes, panels, strict=True):
        _draw_panel(ax, steps, panel, layers, bad)
        _steps_axis(ax, {*steps, *bad})
    if layers > _FEW:
        scale = ScalarMappable(Normalize(0, layers - 1), _colours())
        bar = figures.color_bar(figure, scale, axes, "layer", pad=0.01, aspect=30)
        bar.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    if layers <= _FEW or bad:
        few = layers <= _FEW
        ax = axes[-1] if few else axes[0]  # where the colour scale is not
        anchor = (1.0, 1.0) if few else None
        ax.legend(loc="upper left" if few else "best", bbox_to_anchor=anchor, fontsize=8.5)
    return figure


def _draw_panel(
    ax: Axes, steps: Sequence[int], panel: Panel, layers: int, bad: Mapping[int, str]
) -> None:
    x = np.asarray(steps, dtype=float)
    good = np.array([step not in bad for step in steps])
    for why, marker in zip(sorted(set(bad.values())), cycle(_MARKERS), strict=False):
        places = [step for step in sorted(bad) if bad[step] == why]
        for step in places:
            ax.axvline(step, color=figures.VERMILLION, lw=0.9, ls=":", zorder=1)
        where = {"transform": ax.get_xaxis_transform(), "clip_on": False, "ms": 6}
        top = np.ones(len(places))
        ax.plot(places, top, marker, color=figures.VERMILLION, label=why, **where)
    for layer in range(panel.values_SL.shape[1]):
        y = panel.values_SL[:, layer]
        colour = _colours()(layer / max(layers - 1, 1))
        there = ~np.isnan(y)
        label = f"layer {layer}" if layers <= _FEW else None
        ax.plot(x[good & there], y[good & there], "-o", color=colour, lw=1.3, ms=2.5, label=label)
        ax.plot(x[~good & there], y[~good & there], "x", color=colour, ms=5, alpha=0.7)
    if panel.ratios:
        _values_axis(ax, panel.values_SL)
    ax.set(xlabel="step", ylabel=panel.unit)
    ax.set_title(panel.title, pad=12 if bad else 6)


def _values_axis(ax: Axes, values_SL: NDArray[np.float64]) -> None:
    """Make the axis of values logarithmic where the values span much."""
    finite = values_SL[np.isfinite(values_SL)]
    if not finite.size or finite.min() <= 0:
        return
    if finite.max() <= LOGARITHMIC_VALUES_FROM * finite.min():
        return
    ax.set_yscale("log")
    few = finite.max() <= 1000 * finite.min()
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _short(step: float, _: Any) -> str:
    size, sign = (1e6, "M") if abs(step) >= 1e6 else (1e3, "k") if abs(step) >= 1e3 else (1, "")
    return f"{step / size:g}{sign}"


def _steps_axis(ax: Axes, steps: Iterable[int]) -> None:
    """Make an axis of steps that shows 0: logarithmic above the first step if steps span much."""
    steps = sorted(steps)
    positive = [step for step in steps if step > 0]
    last = max(positive, default=1)
    formatter = FuncFormatter(_short)
    if not positive or last <= LOGARITHMIC_FROM * positive[0]:
        ax.xaxis.set_major_formatter(formatter)
        return
    first = positive[0]
    ax.set_xscale("symlog", linthresh=first, linscale=0.5)
    powers = [10**k for k in range(len(str(last))) if first <= 10**k <= last]
    ticks = [step for step in steps[:1] if step == 0] + powers
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(formatter)
    ax.set_xlim(-0.15 * first if steps[0] == 0 else 0.8 * first, last * 1.15)


def _colours() -> Colormap:
    """Return a scale from dark to light, but not so light that a line is lost on white."""
    whole = matplotlib.colormaps["viridis"]
    return ListedColormap(whole(np.linspace(0, 0.88, 256)))

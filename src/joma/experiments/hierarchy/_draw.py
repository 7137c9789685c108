"""The pictures: what each layer looks at by height, and how sparse it is, while networks learn."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.experiments.hierarchy._course import Curves, course, standard_error
from joma.experiments.hierarchy._groups import DECIDES, HEIGHTS
from joma.experiments.hierarchy._summary import Results
from joma.report import figures

_LOOKS = {
    1: (figures.BLUE, "-", "H = 1, one parent"),
    2: (figures.VERMILLION, "--", "H = 2, one grandparent"),
    3: (figures.GREEN, ":", "H = 3, the class alone"),
}
_TICKS = (0.6, 0.8, 1.0, 1.2, 1.5, 2.0)


def draw_layers(results: Mapping[str, Results]) -> Figure:
    """Every layer of the networks that decide, above the same on the flat tree."""
    names = [name for name in (DECIDES, "flat-3") if name in results]
    columns = results[names[0]].group.layers if names else 1
    figure, axes = figures.new(10.5, 2.5 * (len(names) + 1), len(names) + 1, columns)
    titles = {DECIDES: "tree of three levels", "flat-3": "control, flat tree"}
    for row, name in zip(axes, names, strict=False):
        for layer, (ax, curves) in enumerate(zip(row, results[name].layers, strict=True)):
            _draw_ratio(ax, curves)
            ax.set_title(f"{titles[name]}: layer {layer}")
        row[0].set_ylabel("attention, × even")
    for layer, ax in enumerate(axes[-1]):
        for name, color, style in zip(
            names, (figures.BLACK, figures.GREY), ("-", "--"), strict=False
        ):
            _draw_entropy(ax, results[name].layers[layer], color, style, titles[name])
        ax.set(title=f"entropy: layer {layer}", xlabel="step")
    axes[-1][0].set_ylabel("nats")
    axes[-1][0].legend(loc="lower left", fontsize=8)
    _share_limits([ax for row in axes[:-1] for ax in row])
    _share_limits(list(axes[-1]))
    axes[0][0].legend(loc="upper left", fontsize=8)
    return figure


def draw_labels(results: Mapping[str, Results]) -> Figure:
    """The lowest layer of the other networks: one layer, and a token as label."""
    chosen = {
        "class-1": "one layer, class as label",
        "flat-1": "one layer, flat tree",
        "token-1": "one layer, token as label",
        "token-3": "layer 0 of 3, token as label",
    }
    chosen = {name: title for name, title in chosen.items() if name in results}
    figure, axes = figures.new(12.0, 5.0, 2, max(len(chosen), 1))
    axes = np.reshape(axes, (2, -1))
    for (name, title), (above, below) in zip(chosen.items(), axes.T, strict=False):
        curves = results[name].layers[0]
        _draw_ratio(above, curves)
        _draw_entropy(below, curves, figures.BLACK, "-", title)
        above.set_title(title)
        below.set(title="entropy", xlabel="step")
    axes[0][0].set_ylabel("attention, × even")
    axes[1][0].set_ylabel("nats")
    for row in axes:
        _share_limits(list(row))
    if chosen:
        axes[0][0].legend(loc="upper left", fontsize=8)
    return figure


def _draw_ratio(ax: Axes, curves: Curves) -> None:
    steps = _places(curves.steps)
    ax.axhline(1, color=figures.GREY, lw=0.8)
    seen = course(curves)
    for i, height in enumerate(HEIGHTS):
        color, style, label = _LOOKS[height]
        # Relative to the untrained network, as all is that is said of it.
        own, wrong = (
            np.log(values[i]) - np.log(values[i, :1]) for values in (curves.ratio, curves.shuffled)
        )
        mean, error = own.mean(-1), 2 * standard_error(own)
        ax.fill_between(
            steps, np.exp(mean - error), np.exp(mean + error), color=color, alpha=0.18, lw=0
        )
        ax.semilogx(steps, np.exp(mean), style, color=color, label=label)
        ax.semilogx(
            steps,
            np.exp(wrong.mean(-1)),
            style,
            color="#a8a8a8",
            lw=0.9,
            label="tree under wrong leaves" if i == 0 else None,
        )
        taken_up = seen.taken_up[i]
        if taken_up is not None:
            at = curves.steps.index(taken_up)
            ax.semilogx(steps[at], np.exp(mean[at]), "o", color=color, ms=5.5, mec="white")
    ax.set_yscale("log")
    ax.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    _step_axis(ax, curves.steps)


def _draw_entropy(ax: Axes, curves: Curves, color: str, style: str, label: str) -> None:
    steps = _places(curves.steps)
    mean, error = curves.entropy.mean(-1), 2 * standard_error(curves.entropy)
    ax.fill_between(steps, mean - error, mean + error, color=color, alpha=0.15, lw=0)
    ax.semilogx(steps, mean, style, color=color, label=label, lw=1.5)
    _step_axis(ax, curves.steps)


def _places(steps: tuple[int, ...]) -> np.ndarray:
    """Steps on a logarithmic axis, ½ standing for 0."""
    places = np.array(steps, dtype=float)
    places[0] = 0.5
    return places


def _step_axis(ax: Axes, steps: tuple[int, ...]) -> None:
    powers = [power for power in (1, 10, 100, 1000, 10_000) if power <= steps[-1]]
    ax.set_xticks([0.5, *powers], ["0", *(f"{power:,}" for power in powers)])
    ax.minorticks_off()


def _share_limits(axes: list[Axes]) -> None:
    low, high = zip(*(ax.get_ylim() for ax in axes), strict=True)
    for ax in axes:
        ax.set_ylim(min(low), max(high))

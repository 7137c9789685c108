"""Figs. 6 and 8: train what is missing, read all, compare, write and draw."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from joma import experiments
from joma.experiments._experiment import Outcome, Request
from joma.experiments._trained import write_results
from joma.experiments.language import _reference, _summary, _train
from joma.experiments.language._curves import Curves, Key, collect, done
from joma.experiments.language._groups import (
    EMBEDDED,
    SIZES,
    SWEPT,
    TEXTS,
    UNIFORM,
    WIKITEXT_2,
    LanguageSetting,
    Size,
    named,
    sized,
)
from joma.experiments.language._reference import Pair
from joma.experiments.language._summary import Check
from joma.report import figures
from joma.runs import Run

_IN_A_ROW = 5
"""Names of lines that a legend has in a row."""
_LIGHT = "#9a9a9a"

Shown = dict[Key, Curves]


@dataclass(frozen=True)
class LanguageFigure:
    """One of the two figures.

    Attributes:
        select: Returns those of the curves that the figure shows.
        judge: Says what ours show, of what was published or of another size or text.
        check: Compares ours with recorded curves.
        draw: Draws ours and the recorded.
    """

    select: Callable[[Shown, LanguageSetting], Shown]
    judge: Callable[[Shown, LanguageSetting], Outcome]
    check: Callable[[Sequence[Pair], Shown, Shown], list[Check]]
    draw: Callable[[Shown, Shown], Figure | None]


def size_of(request: Request) -> Size:
    """Return the size that is asked for, with the text that is."""
    return sized(request.scale, request.options.get("corpus", SIZES[request.scale].corpus))


def needs(request: Request) -> None:
    """Raise `JomaError` where the text is not there or, being somebody's own, is no good."""
    size = size_of(request)
    if size.corpus in TEXTS or size.corpus == EMBEDDED:
        _train.find(size)
    else:
        _train.load(size)


def _reproduce(run: Run, request: Request, name: str, of: LanguageFigure) -> Outcome:
    """Train the groups asked for that are not done, and say what all that are show."""
    experiment = experiments.EXPERIMENTS[name]
    others = [other for other in ("fig6", "fig8") if other != name]  # some of the same networks
    recorded = {} if request.reference is None else _reference.read(request.reference)
    text = _train.load(size_of(request))
    done(run, text.setting, experiment.groups)  # refuses what was trained on another text
    _train.train_groups(run, request.groups or experiment.groups, text, request, others)
    curves = of.select(collect(run, text.setting, experiment.groups), text.setting)
    outcome = of.judge(curves, text.setting)
    summary: dict[str, Any] = {}
    if recorded and text.setting.published is WIKITEXT_2:
        outcome, summary["comparison"] = _compared(run, of, outcome, curves, recorded)
    elif recorded:
        words = (
            f"The recorded curves are those of {WIKITEXT_2.title} at the full size; they are not "
            "compared with these."
        )
        outcome, recorded = replace(outcome, paragraphs=(*outcome.paragraphs, words)), {}
    figure = of.draw(curves, recorded)
    write_results(run, experiment, outcome, figure, _summary.tables(curves.values()), **summary)
    return outcome


def _compared(
    run: Run, of: LanguageFigure, outcome: Outcome, curves: Shown, recorded: Shown
) -> tuple[Outcome, Any]:
    """Return the outcome with a paragraph on the recorded curves, and the checks in it."""
    pairs = _reference.compare(curves, recorded)
    if not pairs:
        words = "The recorded curves have nothing in common with these to be compared."
        return replace(outcome, paragraphs=(*outcome.paragraphs, words)), []
    run.write_table("comparison", _reference.table(pairs))
    checks = of.check(pairs, curves, recorded)
    words = f"Next to the recorded curves: {'; '.join(map(str, checks))}."
    found = [{"what": c.what, "holds": c.holds, "seen": c.seen} for c in checks]
    return replace(outcome, paragraphs=(*outcome.paragraphs, words)), found


def draw_depths(curves: Mapping[Key, Curves], recorded: Mapping[Key, Curves]) -> Figure | None:
    """Draw Fig. 6: a column for each depth that is there, entropy above and stable rank below."""
    shown = sorted(curves.values(), key=lambda own: own.depth)
    if not shown:
        return None
    width = max(3.1 * len(shown), 6.4)
    figure, axes = figures.new(width, 5.4, 2, len(shown))
    axes = np.reshape(axes, (2, len(shown)))
    for own, (above, below) in zip(shown, axes.T, strict=True):
        _entropies(above, own, recorded.get((own.depth, own.rate)))
        loss = f"best validation loss {own.best.mean():.3f}"
        above.set_title(f"{own.depth} layer{'s' * (own.depth > 1)}\n{loss}")
        for layer, values in enumerate(own.stable_rank):
            _curve(below, own.steps, values, *_line_style(layer, own.depth))
        below.set_xlabel("step")
        _step_axis(below, own.steps)
    axes[0, 0].set_ylabel("attention entropy (nats)")
    axes[1, 0].set_ylabel("stable rank of lower layer")
    _share(axes[0], bottom=-0.06)
    _share(axes[1])
    for own, ax in zip(shown, axes[0], strict=True):
        _legend(ax, own.depth, bool(recorded) and own is shown[0])
    _name_even(axes[0, 0])
    return figure


def draw_rates(curves: Mapping[Key, Curves], recorded: Mapping[Key, Curves]) -> Figure | None:
    """Draw Fig. 8: a panel for each learning rate that is there, and the loss over all of them."""
    shown = sorted(curves.values(), key=lambda own: own.rate)
    if not shown:
        return None
    count = len(shown) + 1
    columns = min((4, 3), key=lambda columns: -count % columns) if count > 2 else count
    rows = -(-count // columns)
    figure, axes = figures.new(max(3.1 * columns, 6.4), 2.75 * rows, rows, columns)
    axes = np.reshape(axes, (rows, columns))
    panels: Sequence[Axes] = list(axes.flat)
    for own, ax in zip(shown, panels, strict=False):
        _entropies(ax, own, recorded.get((SWEPT, own.rate)))
        ax.set_title(f"learning rate {named(own.rate)}")
    _share(panels[: len(shown)], bottom=-0.06, first=columns)
    for number, ax in enumerate(panels[: len(shown)]):
        ax.set_xlabel("step" if number + columns >= count else "")
        ax.set_ylabel("attention entropy (nats)" if number % columns == 0 else "")
    _losses(panels[len(shown)], shown, [recorded.get((SWEPT, own.rate)) for own in shown])
    for ax in panels[count:]:
        ax.set_axis_off()
    _legend(panels[0], shown[0].depth, bool(recorded))
    _name_even(panels[0])
    return figure


def _entropies(ax: Axes, own: Curves, recorded: Curves | None) -> None:
    ax.axhline(UNIFORM, color=figures.GREY, lw=1.0, ls=":")
    for layer in range(own.depth):
        if recorded is not None:
            steps = [step for step in recorded.steps if step <= own.steps[-1]]
            mean = recorded.mean[layer, : len(steps)]
            ax.plot(steps, mean, color=_LIGHT, lw=0.8, zorder=3)
        _curve(ax, own.steps, own.entropy[layer], *_line_style(layer, own.depth))
    _step_axis(ax, own.steps)


def _losses(ax: Axes, shown: Sequence[Curves], recorded: Sequence[Curves | None]) -> None:
    rates = [own.rate for own in shown]
    for own in shown:
        ax.semilogx([own.rate] * own.seeds, own.best, ".", color=figures.BLUE, ms=4, alpha=0.6)
    ax.semilogx(rates, [own.best.mean() for own in shown], "o-", color=figures.BLUE, label="here")
    there = [(own.rate, own.best.mean()) for own in recorded if own is not None]
    if there:
        ax.semilogx(
            *zip(*there, strict=True), "o", color=figures.BLACK, mfc="none", ms=10, label="recorded"
        )
        ax.legend(loc="upper center", fontsize=8)
    ax.set(title="best validation loss", xlabel="learning rate")


def _curve(ax: Axes, steps: Sequence[int], values_KS: np.ndarray, color: str, width: float) -> None:
    """Draw the mean over seeds, in their range."""
    low, high = values_KS.min(-1), values_KS.max(-1)
    ax.fill_between(steps, low, high, color=color, alpha=0.12, lw=0, zorder=1)
    ax.plot(steps, values_KS.mean(-1), color=color, lw=width, zorder=4)


def _line_style(layer: int, depth: int) -> tuple[str, float]:
    """Return the colour and width of a layer's line: from dark below to light on top."""
    share = layer / max(depth - 1, 1)
    color = matplotlib.colormaps["viridis"](0.88 * share)
    return to_hex(color), 2.2 if layer == 0 else 1.5


def _legend(ax: Axes, depth: int, recorded: bool) -> None:
    """Say what the lines of a panel are, in the room that collapsed attention would take."""
    handles = []
    shown = range(depth) if depth <= _IN_A_ROW else (0, depth // 2, depth - 1)
    for layer in shown:  # neighbours of ten colours are too alike to be named one by one
        color, width = _line_style(layer, depth)
        words = "layer 0" if layer == 0 else f"{layer}"
        handles.append(Line2D([], [], color=color, lw=width, label=words))
    if recorded:
        handles.append(Line2D([], [], color=_LIGHT, lw=0.8, label="recorded"))
    ax.legend(
        handles=handles,
        loc="lower center",
        ncols=len(handles),
        fontsize=8,
        handlelength=1.2,
        columnspacing=0.9,
    )


def _name_even(ax: Axes) -> None:
    edge = {"xycoords": ("axes fraction", "data"), "ha": "right", "color": figures.GREY}
    figures.note(ax, "even attention", (1, UNIFORM), (-2, 2), fontsize=8, **edge)


def _step_axis(ax: Axes, steps: Sequence[int]) -> None:
    if steps[-1] < 10_000:
        return
    ticks = range(0, steps[-1] + 1, 20_000 if steps[-1] < 100_000 else 50_000)
    ax.set_xticks(ticks, ["0", *(f"{tick // 1000}k" for tick in ticks[1:])])


def _share(panels: Sequence[Axes], bottom: float | None = None, first: int | None = None) -> None:
    """Set one range for all panels, whose numbers stand at the left of each row alone."""
    limits = np.array([ax.get_ylim() for ax in panels])
    low, high = limits[:, 0].min(), limits[:, 1].max()
    for number, ax in enumerate(panels):
        ax.set_ylim(low if bottom is None else bottom, high if bottom is None else 1.06 * high)
        ax.tick_params(labelleft=number % (first or len(panels)) == 0)


fig6 = partial(
    _reproduce,
    name="fig6",
    of=LanguageFigure(
        select=lambda curves, setting: {
            key: own for key, own in curves.items() if own.rate == setting.size.learning_rate
        },
        judge=_summary.judge_depths,
        check=lambda pairs, curves, recorded: _summary.check_depths(pairs),
        draw=draw_depths,
    ),
)
fig8 = partial(
    _reproduce,
    name="fig8",
    of=LanguageFigure(
        select=lambda curves, setting: curves,
        judge=_summary.judge_rates,
        check=_summary.check_rates,
        draw=draw_rates,
    ),
)

"""Figs. 6 and 8: train what is missing, read all, compare, write and draw."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from joma.experiments._experiment import Experiment, Outcome, Request, publish
from joma.experiments._frame import columns
from joma.experiments.language import (
    EMBEDDED,
    FIG6,
    FIG8,
    SIZES,
    SWEPT,
    TEXTS,
    UNIFORM,
    WIKITEXT_2,
    LanguageSize,
    findings,
    named,
    sized,
    training,
)
from joma.experiments.language.curves import (
    EntropyCurves,
    Key,
    collect,
    compare,
    done,
    read_recorded,
)
from joma.report import figures
from joma.runs import Run

_IN_A_ROW = 5
"""Names of lines that a legend has in a row."""
_LIGHT = "#9a9a9a"

Shown = Mapping[Key, EntropyCurves]


def size_of(request: Request) -> LanguageSize:
    """Return the size that is asked for, with the text that is."""
    return sized(request.scale, request.options.get("corpus", SIZES[request.scale].corpus))


def needs(request: Request) -> None:
    """Raise `JomaError` where the text is not there or, being somebody's own, is no good."""
    size = size_of(request)
    if size.corpus in TEXTS or size.corpus == EMBEDDED:
        training.find(size)
    else:
        training.load(size)


def fig6(run: Run, request: Request) -> Outcome:
    """Train the depths asked for that are not done, and say what all that are show."""
    return _reproduce(run, request, FIG6)


def fig8(run: Run, request: Request) -> Outcome:
    """Train five layers at every learning rate, unless they are done, and say what they show."""
    return _reproduce(run, request, FIG8)


def _reproduce(run: Run, request: Request, experiment: Experiment) -> Outcome:
    references = {} if request.reference is None else read_recorded(request.reference)
    text = training.load(size_of(request))
    setting, of_depths = text.setting, experiment is FIG6
    done(run, setting, experiment.groups)  # refuses what was trained on another text
    groups = request.groups or experiment.groups
    # Both figures show the networks of five layers at the one learning rate.
    training.train_groups(run, groups, text, request, [FIG8.name if of_depths else FIG6.name])
    curves = collect(run, setting, experiment.groups)
    if of_depths:
        rate = setting.size.learning_rate
        curves = {key: own for key, own in curves.items() if own.rate == rate}
    outcome = (findings.judge_depths if of_depths else findings.judge_rates)(curves, setting)
    tables: dict[str, Any] = findings.tables(curves.values())
    summary: dict[str, Any] = {}
    if request.reference is not None:
        if setting.published is not WIKITEXT_2:
            references = {}
            words = (
                f"The recorded curves are those of {WIKITEXT_2.title} at the full size; they are "
                "not compared with these."
            )
        elif pairs := compare(curves, references):
            tables["comparison"] = columns(map(asdict, pairs))
            checks = findings.check_depths(pairs)
            if not of_depths:
                checks = findings.check_rates(pairs, curves, references)
            summary["comparison"] = [asdict(one) for one in checks]
            words = f"Next to the recorded curves: {'; '.join(map(str, checks))}."
        else:
            words = "The recorded curves have nothing in common with these to be compared."
        outcome = replace(outcome, paragraphs=(*outcome.paragraphs, words))
    figure = (draw_depths if of_depths else draw_rates)(curves, references)
    publish(run, experiment, outcome, figure, tables, **summary)
    return outcome


def draw_depths(curves: Shown, references: Shown) -> Figure | None:
    """Draw Fig. 6: a column for each depth that is there, entropy above and stable rank below."""
    shown = sorted(curves.values(), key=lambda own: own.depth)
    if not shown:
        return None
    count = len(shown)
    figure, axes = figures.panels(2 * count, count, max(3.1 * count, 6.4), 2.7)
    for own, above, below in zip(shown, axes, axes[count:], strict=False):
        _entropies(above, own, references.get((own.depth, own.rate)))
        loss = f"best validation loss {own.best.mean():.3f}"
        above.set_title(f"{own.depth} layer{'s' * (own.depth > 1)}\n{loss}")
        for layer, values in enumerate(own.stable_rank):
            _curve(below, own.steps, values, *_line_style(layer, own.depth))
        below.set_xlabel("step")
        _step_axis(below, own.steps)
    axes[0].set_ylabel("attention entropy (nats)")
    axes[count].set_ylabel("stable rank of lower layer")
    _finish_entropies(axes[:count], count)
    figures.share_limits(axes[count:], count)
    for own, ax in zip(shown, axes, strict=False):
        _legend(ax, own.depth, bool(references) and own is shown[0])
    return figure


def draw_rates(curves: Shown, references: Shown) -> Figure | None:
    """Draw Fig. 8: a panel for each learning rate that is there, and the loss over all of them."""
    shown = sorted(curves.values(), key=lambda own: own.rate)
    if not shown:
        return None
    count = len(shown) + 1
    columns = min((4, 3), key=lambda columns: -count % columns) if count > 2 else count
    figure, axes = figures.panels(count, columns, max(3.1 * columns, 6.4), 2.75)
    recorded = [references.get((SWEPT, own.rate)) for own in shown]
    for number, (own, ax) in enumerate(zip(shown, axes, strict=False)):
        _entropies(ax, own, recorded[number])
        ax.set_title(f"learning rate {named(own.rate)}")
        ax.set_xlabel("step" if number + columns >= count else "")
        ax.set_ylabel("attention entropy (nats)" if number % columns == 0 else "")
    _finish_entropies(axes[:-1], columns)
    _losses(axes[-1], shown, recorded)
    _legend(axes[0], shown[0].depth, bool(references))
    return figure


def _finish_entropies(axes: Sequence[Axes], columns: int) -> None:
    figures.share_limits(axes, columns, high=1.06)
    for ax in axes:
        ax.set_ylim(bottom=-0.06)
    figures.level(axes[0], UNIFORM, "even attention", "right", up=2)


def _entropies(ax: Axes, own: EntropyCurves, references: EntropyCurves | None) -> None:
    ax.axhline(UNIFORM, color=figures.GREY, lw=1.0, ls=":")
    for layer in range(own.depth):
        if references is not None:
            steps = [step for step in references.steps if step <= own.steps[-1]]
            mean = references.mean[layer, : len(steps)]
            ax.plot(steps, mean, color=_LIGHT, lw=0.8, zorder=3)
        _curve(ax, own.steps, own.entropy[layer], *_line_style(layer, own.depth))
    _step_axis(ax, own.steps)


def _losses(
    ax: Axes, shown: Sequence[EntropyCurves], references: Sequence[EntropyCurves | None]
) -> None:
    rates = [own.rate for own in shown]
    for own in shown:
        ax.semilogx([own.rate] * own.seeds, own.best, ".", color=figures.BLUE, ms=4, alpha=0.6)
    ax.semilogx(rates, [own.best.mean() for own in shown], "o-", color=figures.BLUE, label="here")
    there = [(own.rate, own.best.mean()) for own in references if own is not None]
    if there:
        ring = {"color": figures.BLACK, "mfc": "none", "ms": 10, "label": "recorded"}
        ax.semilogx(*zip(*there, strict=True), "o", **ring)
        ax.legend(loc="upper center", fontsize=8)
    ax.set(title="best validation loss", xlabel="learning rate")


def _curve(ax: Axes, steps: Sequence[int], values_KS: np.ndarray, color: str, width: float) -> None:
    """Draw the mean over seeds, in their range."""
    ends = values_KS.min(-1), values_KS.mean(-1), values_KS.max(-1)
    figures.band(ax, steps, *ends, color=color, alpha=0.12, lw=width, zorder=4)


def _line_style(layer: int, depth: int) -> tuple[str, float]:
    """Return the colour and width of a layer's line: from dark below to light on top."""
    share = layer / max(depth - 1, 1)
    color = matplotlib.colormaps["viridis"](0.88 * share)
    return to_hex(color), 2.2 if layer == 0 else 1.5


def _legend(ax: Axes, depth: int, references: bool) -> None:
    """Say what the lines of a panel are, in the room that collapsed attention would take."""
    handles = []
    shown = range(depth) if depth <= _IN_A_ROW else (0, depth // 2, depth - 1)
    for layer in shown:  # neighbours of ten colours are too alike to be named one by one
        color, width = _line_style(layer, depth)
        words = "layer 0" if layer == 0 else f"{layer}"
        handles.append(Line2D([], [], color=color, lw=width, label=words))
    if references:
        handles.append(Line2D([], [], color=_LIGHT, lw=0.8, label="recorded"))
    tight = {"handlelength": 1.2, "columnspacing": 0.9, "fontsize": 8}
    ax.legend(handles=handles, loc="lower center", ncols=len(handles), **tight)


def _step_axis(ax: Axes, steps: Sequence[int]) -> None:
    if steps[-1] < 10_000:
        return
    ticks = range(0, steps[-1] + 1, 20_000 if steps[-1] < 100_000 else 50_000)
    ax.set_xticks(ticks, ["0", *(f"{tick // 1000}k" for tick in ticks[1:])])

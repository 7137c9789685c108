"""Figs. 6 and 8: train what is missing, read all, compare, write and draw."""

from collections.abc import Callable, Mapping, Sequence
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
from joma.experiments.language import FIG6, FIG8, findings, training
from joma.experiments.language.curves import (
    EntropyCurves,
    Key,
    Pair,
    collect,
    compare,
    done,
    read_recorded,
)
from joma.experiments.language.setting import (
    EMBEDDED,
    SIZES,
    SWEPT,
    TEXTS,
    UNIFORM,
    WIKITEXT_2,
    LanguageSetting,
    LanguageSize,
    named,
    sized,
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

    def select(curves: Shown, setting: LanguageSetting) -> Shown:
        return {key: own for key, own in curves.items() if own.rate == setting.size.learning_rate}

    def check(pairs: Sequence[Pair], *_: Shown) -> list[findings.Check]:
        return findings.check_depths(pairs)

    return _reproduce(run, request, FIG6, FIG8, select, findings.judge_depths, check, draw_depths)


def fig8(run: Run, request: Request) -> Outcome:
    """Train five layers at every learning rate, unless they are done, and say what they show."""

    def select(curves: Shown, _: LanguageSetting) -> Shown:
        return curves

    judge, check = findings.judge_rates, findings.check_rates
    return _reproduce(run, request, FIG8, FIG6, select, judge, check, draw_rates)


def _reproduce(
    run: Run,
    request: Request,
    experiment: Experiment,
    other: Experiment,  # has some of the same networks
    select: Callable[[Shown, LanguageSetting], Shown],
    judge: Callable[[Shown, LanguageSetting], Outcome],
    check: Callable[[Sequence[Pair], Shown, Shown], list[findings.Check]],
    draw: Callable[[Shown, Shown], Figure | None],
) -> Outcome:
    references = {} if request.reference is None else read_recorded(request.reference)
    text = training.load(size_of(request))
    done(run, text.setting, experiment.groups)  # refuses what was trained on another text
    groups = request.groups or experiment.groups
    training.train_groups(run, groups, text, request, [other.name])
    curves = select(collect(run, text.setting, experiment.groups), text.setting)
    outcome = judge(curves, text.setting)
    tables: dict[str, Any] = findings.tables(curves.values())
    summary: dict[str, Any] = {}
    if references and text.setting.published is not WIKITEXT_2:
        words = (
            f"The recorded curves are those of {WIKITEXT_2.title} at the full size; they are not "
            "compared with these."
        )
        outcome, references = replace(outcome, paragraphs=(*outcome.paragraphs, words)), {}
    elif references:
        pairs = compare(curves, references)
        words = "The recorded curves have nothing in common with these to be compared."
        checks = []
        if pairs:
            tables["comparison"] = columns(map(asdict, pairs))
            checks = check(pairs, curves, references)
            words = f"Next to the recorded curves: {'; '.join(map(str, checks))}."
        outcome = replace(outcome, paragraphs=(*outcome.paragraphs, words))
        summary["comparison"] = [asdict(one) for one in checks]
    publish(run, experiment, outcome, draw(curves, references), tables, **summary)
    return outcome


def draw_depths(curves: Shown, references: Shown) -> Figure | None:
    """Draw Fig. 6: a column for each depth that is there, entropy above and stable rank below."""
    shown = sorted(curves.values(), key=lambda own: own.depth)
    if not shown:
        return None
    width = max(3.1 * len(shown), 6.4)
    figure, axes = figures.new(width, 5.4, 2, len(shown))
    axes = np.reshape(axes, (2, len(shown)))
    for own, (above, below) in zip(shown, axes.T, strict=True):
        _entropies(above, own, references.get((own.depth, own.rate)))
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
        _legend(ax, own.depth, bool(references) and own is shown[0])
    _name_even(axes[0, 0])
    return figure


def draw_rates(curves: Shown, references: Shown) -> Figure | None:
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
        _entropies(ax, own, references.get((SWEPT, own.rate)))
        ax.set_title(f"learning rate {named(own.rate)}")
    _share(panels[: len(shown)], bottom=-0.06, first=columns)
    for number, ax in enumerate(panels[: len(shown)]):
        ax.set_xlabel("step" if number + columns >= count else "")
        ax.set_ylabel("attention entropy (nats)" if number % columns == 0 else "")
    _losses(panels[len(shown)], shown, [references.get((SWEPT, own.rate)) for own in shown])
    for ax in panels[count:]:
        ax.set_axis_off()
    _legend(panels[0], shown[0].depth, bool(references))
    _name_even(panels[0])
    return figure


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

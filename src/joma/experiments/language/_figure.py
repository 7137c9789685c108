"""What Fig. 6 and Fig. 8 do alike: train what is missing, read all, compare, write."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from joma.experiments._experiment import Experiment, Outcome, Request
from joma.experiments._trained import write_results
from joma.experiments.fig6 import EXPERIMENT as FIG6
from joma.experiments.fig8 import EXPERIMENT as FIG8
from joma.experiments.language import _data, _draw, _reference, _summary
from joma.experiments.language._curves import Curves, Key, collect, done
from joma.experiments.language._groups import (
    EMBEDDED,
    SIZES,
    TEXTS,
    WIKITEXT_2,
    Setting,
    Size,
    sized,
)
from joma.experiments.language._reference import Pair
from joma.experiments.language._summary import Check
from joma.experiments.language._train import train_groups
from joma.runs import Run

Shown = dict[Key, Curves]


@dataclass(frozen=True)
class LanguageFigure:
    """One of the two figures.

    Attributes:
        experiment: The experiment that shows it.
        alongside: Experiments that train some of the same networks.
        select: Returns those of the curves that the figure shows.
        judge: Says what ours show, of what was published or of another size or text.
        check: Compares ours with recorded curves.
        draw: Draws ours and the recorded.
    """

    experiment: Experiment
    alongside: Sequence[str]
    select: Callable[[Shown, Setting], Shown]
    judge: Callable[[Shown, Setting], Outcome]
    check: Callable[[Sequence[Pair], Shown, Shown], list[Check]]
    draw: Callable[[Shown, Shown], Figure | None]


def size_of(request: Request) -> Size:
    """The size that is asked for, with the text that is."""
    return sized(request.scale, request.options.get("corpus", SIZES[request.scale].corpus))


def needs(request: Request) -> None:
    """Raises a `ValueError` where the text is not there or, being somebody's own, is no good."""
    size = size_of(request)
    if size.corpus in TEXTS or size.corpus == EMBEDDED:
        _data.find(size)
    else:
        _data.load(size)


def fig6(run: Run, request: Request) -> Outcome:
    """Make Fig. 6."""
    return _reproduce(
        run,
        request,
        LanguageFigure(
            experiment=FIG6,
            alongside=("fig8",),
            select=lambda curves, setting: {
                key: own for key, own in curves.items() if own.rate == setting.size.learning_rate
            },
            judge=_summary.judge_depths,
            check=lambda pairs, curves, recorded: _summary.check_depths(pairs),
            draw=_draw.draw_depths,
        ),
    )


def fig8(run: Run, request: Request) -> Outcome:
    """Make Fig. 8."""
    return _reproduce(
        run,
        request,
        LanguageFigure(
            experiment=FIG8,
            alongside=("fig6",),
            select=lambda curves, setting: curves,
            judge=_summary.judge_rates,
            check=_summary.check_rates,
            draw=_draw.draw_rates,
        ),
    )


def _reproduce(run: Run, request: Request, of: LanguageFigure) -> Outcome:
    """Trains the groups asked for that are not done, and says what all that are show."""
    recorded = {} if request.reference is None else _reference.read(request.reference)
    text = _data.load(size_of(request))
    done(
        run, text.setting, of.experiment.groups
    )  # before anything is trained that would not go with it
    train_groups(run, request.groups or of.experiment.groups, text, request, of.alongside)
    curves = of.select(collect(run, text.setting, of.experiment.groups), text.setting)
    outcome = of.judge(curves, text.setting)
    summary: dict[str, Any] = {}
    if recorded and text.setting.published is WIKITEXT_2:
        outcome, summary["comparison"] = _compared(run, of, outcome, curves, recorded)
    elif recorded:
        words = (
            f"The recorded curves are those of {WIKITEXT_2.title} at the full size; they are not "
            "held against these."
        )
        outcome, recorded = replace(outcome, paragraphs=(*outcome.paragraphs, words)), {}
    figure = of.draw(curves, recorded)
    write_results(run, of.experiment, outcome, figure, _summary.tables(curves.values()), **summary)
    return outcome


def _compared(
    run: Run, of: LanguageFigure, outcome: Outcome, curves: Shown, recorded: Shown
) -> tuple[Outcome, Any]:
    """The outcome with a paragraph on the recorded curves, and the checks in it."""
    pairs = _reference.compare(curves, recorded)
    if not pairs:
        words = "The recorded curves have nothing in common with these to be compared."
        return replace(outcome, paragraphs=(*outcome.paragraphs, words)), []
    run.write_table("comparison", _reference.table(pairs))
    checks = of.check(pairs, curves, recorded)
    words = f"Next to the recorded curves: {'; '.join(map(str, checks))}."
    found = [{"what": c.what, "holds": c.holds, "seen": c.seen} for c in checks]
    return replace(outcome, paragraphs=(*outcome.paragraphs, words)), found

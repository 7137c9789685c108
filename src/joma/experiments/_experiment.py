"""An experiment: what was published, how it is made again, and whether ours agrees."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from joma.report import figures
from joma.runs import Run


@dataclass(frozen=True)
class Outcome:
    """How an experiment ended.

    Attributes:
        agrees: whether ours shows what was published.
        finding: what ours shows, in one sentence with its numbers.
    """

    agrees: bool
    finding: str


@dataclass(frozen=True)
class Experiment:
    """One figure or table of the papers.

    Attributes:
        name: what `joma reproduce` takes.
        title: what it shows, in one line.
        published: the published observation, in one sentence.
        reproduce: makes the data and the figures in a run folder, from a seed.
    """

    name: str
    title: str
    published: str
    reproduce: Callable[[Run, int], Outcome]


def publish(
    run: Run, name: str, figure: Figure, outcome: Outcome, *, title: str, published: str
) -> None:
    """Writes a figure to the run, captioned with the published observation and with ours."""
    figures.save(
        run,
        name,
        figure,
        title=title,
        published=published,
        finding=outcome.finding,
        agrees=outcome.agrees,
    )

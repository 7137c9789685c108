"""One figure or table made in its own run folder, and how it is printed."""

import math
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma.cli._folders import closing
from joma.cli._show import Record, console, mark, printable, put, table
from joma.errors import JomaError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from joma.experiments import Request


_SHORT = 24
"""Up to this many characters, the cells of a table are kept on one line."""


def reproduce_experiment(
    name: str,
    folder: Path | None,
    request: "Request",
    *,
    resume: bool = False,
    begun: Callable[[Path], None] = lambda _: None,
) -> Record:
    """Make one figure or table, by its name; return what `reproduce --json` prints of it.

    Another process can call it: all arguments are plain values.

    Args:
        name: The name of the experiment.
        folder: The run folder, or None for the default.
        request: What is asked of it.
        resume: Whether a run in the folder is resumed although it has finished. One that trains
            networks always is; another is started over where it did not finish.
        begun: Is called with the run folder once it is there.
    """
    from joma.experiments import EXPERIMENTS
    from joma.runs import Run, is_run

    experiment = EXPERIMENTS[name]
    start = time.perf_counter()
    resumed = resume or experiment.resumable
    enter = Run.resume if resumed else partial(Run.create, existing="restart")
    run = enter(name, request.config, out=folder, device=request.device)
    begun(run.path)
    with run.locked(), closing(run) as outcome:
        try:
            result = experiment.reproduce(run, request)
        except ValueError as error:
            # What is in the folder, or that it was removed, is for the user to fix.
            if experiment.resumable or not is_run(run.path):
                raise
            raise RuntimeError(f"experiment {name} failed") from error
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":
                raise
            raise JomaError(
                f"the GPU has too little memory free for {name}; a smaller --scale or --hidden "
                "needs less, and --device cpu none of it"
            ) from error
        outcome.update(verdict=result.verdict.value, finding=result.finding)
    return {
        "name": name,
        "title": experiment.title,
        "published": experiment.published,
        **request.config,
        "device": request.device,
        "groups": list(request.groups),
        "finding": result.finding,
        "verdict": result.verdict.value,
        "table": [{key: _plain(value) for key, value in row.items()} for row in result.table],
        "paragraphs": list(result.paragraphs),
        "run": str(run.path),
        "figures": [str(path) for path in run.figures],
        "tables": run.tables,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _plain(value: Any) -> Any:
    """Return a cell as JSON has it: NumPy's numbers as Python's, None for what is not finite."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_outcome(record: Record) -> None:
    """Print how an experiment ended, its table, and where its pictures are.

    Args:
        record: What `reproduce_experiment` returned; no verdict is printed where it is None.
    """
    from rich.padding import Padding
    from rich.text import Text

    finding = Text.assemble("Here: ", printable(record["finding"]))
    if record["verdict"] is not None:
        finding.append("  ").append(_verdict(record["verdict"]))
    put(
        Text.assemble((record["name"], "bold"), f"  {printable(record['title'])}"),
        Padding(Text(f"Published: {printable(record['published'])}"), (0, 0, 0, 2)),
        Padding(finding, (0, 0, 0, 2)),
    )
    if record["table"]:
        put("", *_numbers(record["table"], console().width), "")
    for paragraph in record["paragraphs"]:
        put(Padding(Text(printable(paragraph)), (0, 0, 0, 2)))
    for path in record["figures"] or [record["run"]]:
        typer.echo(f"  {path}")  # whole, whatever the width, so that it can be copied
    typer.echo()


def _verdict(verdict: str) -> "Text":
    """Return a verdict, with a mark where it is one way or the other."""
    from rich.text import Text

    if verdict not in ("agrees", "differs"):
        return Text(verdict, style="bold")
    return mark(verdict == "agrees").append(f" {verdict}", style="bold")


def _numbers(rows: Sequence[Record], width: int) -> list[Any]:
    """Return an experiment's table, or its rows one under the other where that is too wide."""
    from rich.measure import Measurement
    from rich.padding import Padding
    from rich.text import Text

    whole, out = _number_table(rows), console()
    if Measurement.get(out, out.options, whole).minimum <= width - 2:
        return [Padding(whole, (0, 0, 0, 2), expand=False)]
    blocks: list[Any] = []
    for row in rows:
        lines = [Text(f"{printable(name)}: {_cell(value)}") for name, value in row.items()]
        lines[0].stylize("bold")
        blocks += [
            Padding(line, (0, 0, 0, 4 if number else 2)) for number, line in enumerate(lines)
        ]
    return blocks


def _number_table(rows: Sequence[Record]) -> "Table":
    """Return a table without labels that the row above has too, if all to their left are as well.

    Short cells stay on one line, for a number in two pieces is none; headings may break.
    """
    whole = table()
    for name in rows[0]:
        values = [row[name] for row in rows]
        heading = printable(name)
        widest = max(len(_cell(value)) for value in values)
        short = widest <= _SHORT
        word = max(map(len, heading.split()), default=1)
        whole.add_column(
            textwrap.fill(heading, max(widest, word)) if short else heading,
            justify="left" if any(isinstance(value, str) for value in values) else "right",
            overflow="fold",
            no_wrap=short,
            min_width=widest if short else None,
        )
    above: list[str] = []
    for row in rows:
        cells = list(map(_cell, row.values()))
        pairs = zip(cells, above, strict=bool(above))  # nothing is above the first
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        whole.add_row(*[""] * same, *cells[same:])
        above = cells
    return whole


def _cell(value: Any) -> str:
    if value is None:
        return printable("–")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))

"""How experiments are printed: what they take before, how they ended after."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma import experiments
from joma.cli._show import Record, as_json, cell, console, mark, printable, put, say, table
from joma.common.text import duration
from joma.experiments import Experiment, Request, Scale

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_SHORT = 24
"""Up to this many characters, the cells of a table are kept on one line."""


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
        lines = [Text(f"{printable(name)}: {cell(value)}") for name, value in row.items()]
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
        widest = max(len(cell(value)) for value in values)
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
        cells = list(map(cell, row.values()))
        pairs = zip(cells, above, strict=bool(above))  # nothing is above the first
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        whole.add_row(*[""] * same, *cells[same:])
        above = cells
    return whole


def show_plans(
    requests: Mapping[str, Request], folders: Mapping[str, Path | None], json: bool
) -> None:
    """Print what would be made, where, and what it takes."""
    plans = [_plan(name, request, folders[name]) for name, request in requests.items()]
    if json:
        as_json(plans)
        return
    for plan in plans:
        say(f"{plan['name']}: {plan['title']} → {plan['run']}")
        for line in _lines(plan):
            say(f"  {line}")
    known = [plan["about_seconds"] for plan in plans if plan["about_seconds"] is not None]
    if known and len(plans) > 1:
        others = [plan["name"] for plan in plans if plan["about_seconds"] is None]
        without = f", without {', '.join(others)}" if others else ""
        typer.echo(f"Together about {duration(sum(known))}{without}.")


def warn(requests: Mapping[str, Request]) -> None:
    """Say on standard error what was made for a GPU and is about to be done on a CPU."""
    for name, request in requests.items():
        experiment = experiments.EXPERIMENTS[name]
        if request.device != "cpu" or not request.scale:
            continue
        if _kind(experiment.scales[request.scale]) == "cpu":
            continue
        words = (
            f"{name} at scale {request.scale} was made for a GPU; on this CPU what is not done may "
            "take days"
        )
        fitting = [scale for scale, it in experiment.scales.items() if _kind(it) == "cpu"]
        if fitting:  # the largest of them
            seconds = experiment.takes(request)[fitting[-1]].seconds * _share(experiment, request)
            words += f"; --scale {fitting[-1]} takes about {duration(seconds)}"
        say(words, err=True)


def _kind(scale: Scale) -> str:
    """Return the kind of device that a scale was measured on, as a request names it."""
    return "cpu" if "CPU" in scale.device else "cuda"


def _share(experiment: Experiment, request: Request) -> float:
    """Return the share of an experiment that is asked for, its groups being equal parts."""
    return len(request.groups) / len(experiment.groups) if request.groups else 1.0


def _plan(name: str, request: Request, folder: Path | None) -> dict[str, Any]:
    from joma.runs import default_folder, is_run

    experiment = experiments.EXPERIMENTS[name]
    plan = {
        "name": name,
        "title": experiment.title,
        "run": str(folder or default_folder(name)),
        "device": request.device,
    }
    if not request.scale:
        return {**plan, "about_seconds": experiment.seconds, "memory": experiment.memory}
    takes, share = experiment.takes(request), _share(experiment, request)
    chosen = takes[request.scale]
    return {
        **plan,
        "about_seconds": chosen.seconds * share if _kind(chosen) == request.device else None,
        "memory": chosen.memory,
        "scale": request.scale,
        "scales": {
            scale: {"about_seconds": it.seconds * share, "on": it.device, "memory": it.memory}
            for scale, it in takes.items()
        },
        "options": dict(request.options),
        "groups": list(request.groups or experiment.groups),
        "all_groups": list(experiment.groups),
        "continues": experiment.resumable and folder is not None and is_run(folder),
    }


def _lines(plan: Mapping[str, Any]) -> list[str]:
    if "scale" not in plan:
        return [f"about {duration(plan['about_seconds'])}, memory {plan['memory']}"]
    lines = [
        f"{scale}: about {duration(takes['about_seconds'])} on {takes['on']}, "
        f"memory {takes['memory']}{_remark(plan) if scale == plan['scale'] else ''}"
        for scale, takes in plan["scales"].items()
    ]
    lines.append(f"device: {plan['device']}")
    lines += [
        f"{name}: {'as the scale has it' if value is None else value}"
        for name, value in plan["options"].items()
    ]
    if plan["groups"]:
        of = "" if plan["groups"] == plan["all_groups"] else f" of {', '.join(plan['all_groups'])}"
        lines.append(f"groups: {', '.join(plan['groups'])}{of}")
    return [*lines, "resumes what is there"] if plan["continues"] else lines


def _remark(plan: Mapping[str, Any]) -> str:
    """Return what is said of the scale that is asked for."""
    if plan["about_seconds"] is not None:
        return " (this one)"
    if plan["device"] == "cpu":
        return " (this one; on cpu far longer: not measured)"
    return f" (this one; not measured on {plan['device']})"

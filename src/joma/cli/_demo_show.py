"""How the tour of `joma demo` is printed: results first, at most 60 lines on 80 columns."""

from typing import TYPE_CHECKING, Any

import typer

from joma.cli._show import Record, mark, printable, put
from joma.cli._verdicts import all_hold, summary

if TYPE_CHECKING:
    pass

_SHOWN_FINDINGS = 3
"""Findings of the training that are printed; the others are counted."""

_COMMAND_WIDTH = 22


def show_tour(tour: Record) -> None:
    """Print what the training, the claims and the figures showed, and where everything is."""
    _show_training(tour["training"])
    _show_claims(tour["verdicts"])
    _show_figures(tour["experiments"])
    _show_next(tour)


def _show_training(training: Record) -> None:
    _heading("A training with the monitor on")
    if "left_out" in training:
        _paragraph(f"Left out: {training['left_out']}")
        return
    _paragraph(
        f"A language model of {training['parameters'] / 1e6:.2g}M parameters, {training['steps']} "
        f"steps on prose that comes with Python, loss {training['loss']:.2f}, "
        f"{training['seconds']:.0f} s. Its learning rate, {training['learning_rate']}, is too high "
        "on purpose. The monitor found:"
    )
    findings = training["findings"]
    for number, finding in enumerate(findings[:_SHOWN_FINDINGS]):
        _paragraph(finding["headline"], sign="!", style="bold yellow")
        if number == 0 and finding["advice"]:
            _paragraph(finding["advice"], indent=4)
    if not findings:
        _paragraph("nothing", sign="-")
    if len(findings) > _SHOWN_FINDINGS:
        _paragraph(f"and {len(findings) - _SHOWN_FINDINGS} more")
    if training["not_judged"]:
        kinds = ", ".join(training["not_judged"])
        _paragraph(f"Not judged, for want of data: {kinds}.")


def _show_claims(verdicts: list[Record]) -> None:
    from joma.experiments.claims import errata

    _heading("Every claim of the papers against independent numbers")
    good = all_hold(verdicts)
    _paragraph(summary(verdicts), sign=mark(good))
    for record in verdicts:
        if not record["derived"]["holds"]:
            _paragraph(f"{record['claim']} does not hold", indent=4)
    found = list(errata.find(name for record in verdicts for name in record.get("errata", ())))
    if found:
        documents = "; ".join(
            f"{document}: {errata.count(document, found)}" for document in errata.group(found)
        )
        _paragraph(f"{documents}. docs/errata.md derives each.", indent=4)


def _show_figures(records: list[Record]) -> None:
    _heading("The theory's figures, from scratch, next to what was published")
    for record in records:
        agrees = record["verdict"] == "agrees"
        words = f"{record['name']} {record['verdict']}: {record['title']}"
        _paragraph(words if agrees else f"{words}. Here: {record['finding']}", sign=mark(agrees))


def _show_next(tour: Record) -> None:
    _heading(f"{tour['seconds']:.0f} s. Everything is in {tour['run']}. What you may try next:")
    for command, what in (
        ("joma verify", "every claim, one by one"),
        ("joma reproduce --list", "experiments that train networks, with controls"),
        ("joma probe MODEL", "measure a model of your own"),
    ):
        typer.echo(f"  {command:<{_COMMAND_WIDTH}}  {what}")
    if tour["report"]:  # whole, whatever the width, so that it can be copied
        typer.echo(printable(f"Report of the training: {tour['report']}"))
        typer.echo(printable(f"The runs in the browser: joma serve {tour['run']}"))


def _heading(words: str) -> None:
    from rich.text import Text

    put("", Text(printable(words), style="bold"))


def _paragraph(words: str, *, sign: Any = "", style: str = "", indent: int = 2) -> None:
    """Print words that are wrapped between words, under a sign that stands before them."""
    from rich.table import Table
    from rich.text import Text

    if not sign:
        from rich.padding import Padding

        put(Padding(Text(printable(words)), (0, 0, 0, indent)))
        return
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(width=indent + 1, justify="right", no_wrap=True)
    row.add_column()
    first: Text = Text(printable(sign), style=style) if isinstance(sign, str) else sign
    row.add_row(first, Text(printable(words)))
    put(row)

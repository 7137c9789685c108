"""How results look on a terminal and in JSON."""

import json
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

import typer

from joma import errors
from joma.cli._ascii import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from joma.experiments.claims.errata import Erratum

Record = dict[str, Any]

_ACTING = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that act on a terminal or cannot be encoded, and that JSON need not escape."""

NARROW = 125
"""Below this many columns, where a claim comes from stands under it."""

SLIM = 72
"""Below this many columns, the printed form stands under the derived one."""

_FILE_WIDTH = 140

_SHORT = 24
"""Up to this many characters, the cells of an experiment's table are kept on one line."""


def as_json(value: Any) -> None:
    """Prints `value` as JSON on standard output; what acts on a terminal is escaped."""
    written = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    typer.echo(_ACTING.sub(lambda found: f"\\u{ord(found[0]):04x}", written))


def say(text: str, *, err: bool = False) -> None:
    """Prints a line, whatever a file or the user put into it: what acts on a terminal is escaped.

    Args:
        text: The line, or several.
        err: Whether it goes to standard error.
    """
    typer.echo(errors.printable(text, limit=None), err=err)


def console() -> "Console":
    """Standard output; wide when it is a file, for nobody's window limits it."""
    from rich.console import Console

    limited = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if limited else _FILE_WIDTH, highlight=False, markup=False)


def put(*renderables: Any) -> None:
    """Prints what rich can; into a file or a pipe without the spaces that fill lines."""
    out = console()
    if out.is_terminal:
        out.print(*renderables, sep="\n")
        return
    with out.capture() as captured:
        out.print(*renderables, sep="\n")
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(*columns: str, justify: Literal["left", "right"] = "left") -> "Table":
    """Return an empty table in the house style, whose cells escape what acts on a terminal."""
    from rich import box
    from rich.table import Table

    class Escaped(Table):
        def add_row(self, *cells: Any, **options: Any) -> None:
            shown = (printable(cell) if isinstance(cell, str) else cell for cell in cells)
            super().add_row(*shown, **options)

    empty = Escaped(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        empty.add_column(printable(column), overflow="fold", justify=justify)
    return empty


def verdicts(records: Sequence[Record], seconds: float) -> None:
    """Prints what was measured of each claim, the errata, and a summary as the last line."""
    from joma.experiments.claims import errata

    put(_verdict_table(records, console().width), "")
    conditions = {
        record["claim"]: f"{record['condition']}; without, the error is "
        f"{_number(record['without']['error'])}."
        for record in records
        if record.get("condition")
    }
    found = errata.find(name for record in records for name in record.get("errata", ()))
    failures = {record["claim"]: record["failure"] for record in records if "failure" in record}
    lists = (
        ("Conditions", [_entry(claim, f": {text}") for claim, text in conditions.items()]),
        ("Errata", _errata(found)),
        ("Failures", [_entry(claim, f": {text}") for claim, text in failures.items()]),
    )
    for heading, lines in lists:
        if lines:
            put(heading, *lines, "")
    put(f"{summary(records)} {seconds:.1f} s.")


def _errata(found: "Sequence[Erratum]") -> list[Any]:
    """Errata by document and root, with how many there are."""
    from joma.experiments.claims import errata

    lines: list[Any] = []
    for document, roots in errata.group(found).items():
        lines.append(_entry(f"{document}: {errata.count(document, found)}"))
        for members in roots.values():
            for erratum in members:
                follows = f" (follows from {erratum.root})" if erratum.root else ""
                text = (
                    f"{follows}: {erratum.place}. Printed: {erratum.printed}. "
                    f"Corrected: {erratum.corrected}."
                )
                lines.append(_entry(erratum.id, text, indent=6 if erratum.root else 4))
    return lines


def _entry(name: str, text: str = "", *, indent: int = 2) -> Any:
    """A name in bold and a text, indented."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text.assemble((printable(name), "bold"), printable(text)), (0, 0, 0, indent))


def summary(records: Sequence[Record]) -> str:
    """How many claims hold, in one sentence."""
    derived = sum(record["derived"]["holds"] for record in records)
    printed = [record["printed"] for record in records if record["printed"] is not None]
    wrong = sum(not form["holds"] for form in printed)
    if len(records) == 1:
        sentence = f"The claim {_holds(derived)} as derived"
        return f"{sentence}; its printed form {_holds(not wrong)}." if printed else f"{sentence}."
    sentence = (
        f"{derived} of {len(records)} claims {'holds' if derived == 1 else 'hold'} as derived"
    )
    if not printed:
        return f"{sentence}."
    forms = "form" if len(printed) == 1 else "forms"
    do = "does" if wrong == 1 else "do"
    return f"{sentence}; {wrong} of {len(printed)} printed {forms} {do} not hold."


def outcome(record: Record) -> None:
    """Prints how an experiment ended, its table, and where its pictures are.

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
    """A verdict, with a mark where it is one way or the other."""
    from rich.text import Text

    if verdict not in ("agrees", "differs"):
        return Text(verdict, style="bold")
    return _mark(verdict == "agrees").append(f" {verdict}", style="bold")


def _numbers(rows: Sequence[Record], width: int) -> list[Any]:
    """An experiment's table, or its rows one under the other where that is too wide."""
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
    """Labels that the row above has too are left out, as long as all to their left are.

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


def _verdict_table(records: Sequence[Record], width: int) -> "Table":
    narrow, slim = width < NARROW, width < SLIM
    rows = table("claim") if narrow else table("claim", "source")
    rows.columns[0].no_wrap = not narrow
    if not slim:
        rows.add_column("printed", no_wrap=True)
    rows.add_column(printable("derived ≤ tolerance"), no_wrap=True)
    if not narrow:
        rows.add_column("method", overflow="fold")
    if not slim:
        rows.add_column("s", justify="right", no_wrap=True)
    for record in records:
        rows.add_row(*_cells(record, narrow=narrow, slim=slim))
    return rows


def _cells(record: Record, *, narrow: bool, slim: bool) -> "list[Text]":
    from rich.text import Text

    claim, source, method = (Text(printable(record[key])) for key in ("claim", "source", "method"))
    printed = _printed(record)
    derived = _derived(record["derived"], "\n" if slim else " ")
    seconds = Text(f"{record['seconds']:.2f}")
    if not narrow:
        return [claim, source, printed, derived, method, seconds]
    claim.append(Text.assemble("\n", source, "; ", method, style="dim"))
    if not slim:
        return [claim, printed, derived, seconds]
    if record["printed"] is not None:
        derived.append("\n").append(printed).append(" printed", style="dim")
    return [claim, derived]


def _printed(record: Record) -> "Text":
    from rich.text import Text

    form = record["printed"]
    if form is None:
        return Text(printable("–"), style="dim")
    return _mark(form["holds"]).append(f" {_number(form['error'])}", style="default")


def _derived(form: Record, between: str) -> "Text":
    text = _mark(form["holds"])
    text.append(f" {_number(form['error'])}", style="default")
    sign = printable("≤") if form["holds"] else ">"
    text.append(f" {sign} {_number(form['tolerance'])}", style="dim")
    if form.get("standard_error") is not None:  # a sampled reference
        text.append(f"{between}(SE {_number(form['standard_error'])})", style="dim")
    return text


def _mark(holds: bool) -> "Text":
    from rich.text import Text

    if holds:
        return Text.assemble((printable("✓"), "green"))
    return Text.assemble((printable("✗"), "bold red"))


def _holds(yes: Any) -> str:
    return "holds" if yes else "does not hold"


def _number(value: float | None) -> str:
    if value is None:
        return printable("∞")  # or no number at all
    return "0" if value == 0 else f"{value:.1e}"


def sentence(words: str) -> str:
    """Words that begin as a sentence does."""
    return words[:1].upper() + words[1:]

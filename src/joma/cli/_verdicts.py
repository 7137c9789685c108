"""How the verdicts on claims are printed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from joma.cli._show import Record, console, mark, printable, put, table

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from joma.experiments.claims.errata import Erratum


NARROW = 125
"""Below this many columns, where a claim comes from stands under it."""

SLIM = 72
"""Below this many columns, the printed form stands under the derived one."""


def show_verdicts(records: Sequence[Record], seconds: float) -> None:
    """Print what was measured of each claim, the errata, and a summary as the last line."""
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


def all_hold(records: Sequence[Record]) -> bool:
    """Return whether every claim holds as derived."""
    return all(record["derived"]["holds"] for record in records)


def summary(records: Sequence[Record]) -> str:
    """Return how many claims hold, in one sentence."""

    def holds(yes: Any) -> str:
        return "holds" if yes else "does not hold"

    derived = sum(record["derived"]["holds"] for record in records)
    printed = [record["printed"] for record in records if record["printed"] is not None]
    wrong = sum(not form["holds"] for form in printed)
    if len(records) == 1:
        sentence = f"The claim {holds(derived)} as derived"
        return f"{sentence}; its printed form {holds(not wrong)}." if printed else f"{sentence}."
    sentence = (
        f"{derived} of {len(records)} claims {'holds' if derived == 1 else 'hold'} as derived"
    )
    if not printed:
        return f"{sentence}."
    forms = "form" if len(printed) == 1 else "forms"
    do = "does" if wrong == 1 else "do"
    return f"{sentence}; {wrong} of {len(printed)} printed {forms} {do} not hold."


def _errata(found: "Sequence[Erratum]") -> list[Any]:
    """Return errata by document and root, with how many there are."""
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
    """Return a name in bold and a text, indented."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text.assemble((printable(name), "bold"), printable(text)), (0, 0, 0, indent))


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
    form = record["printed"]
    printed = Text(printable("–"), style="dim") if form is None else _form(form)
    derived = _form(record["derived"])
    sign = printable("≤") if record["derived"]["holds"] else ">"
    derived.append(f" {sign} {_number(record['derived']['tolerance'])}", style="dim")
    error = record["derived"].get("standard_error")
    if error is not None:  # a sampled reference
        derived.append("\n" if slim else " ").append(f"(SE {_number(error)})", style="dim")
    seconds = Text(f"{record['seconds']:.2f}")
    if not narrow:
        return [claim, source, printed, derived, method, seconds]
    claim.append(Text.assemble("\n", source, "; ", method, style="dim"))
    if not slim:
        return [claim, printed, derived, seconds]
    if form is not None:
        derived.append("\n").append(printed).append(" printed", style="dim")
    return [claim, derived]


def _form(form: Record) -> "Text":
    return mark(form["holds"]).append(f" {_number(form['error'])}", style="default")


def _number(value: float | None) -> str:
    if value is None:
        return printable("∞")  # or no number at all
    return "0" if value == 0 else f"{value:.1e}"

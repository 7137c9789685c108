"""`joma verify`."""

import contextlib
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from joma.cli import _command as cmd
from joma.cli import _render
from joma.cli._progress import reports
from joma.cli._render import Record, mark, printable
from joma.cli._run_folder import working
from joma.common.checks import check_known

if TYPE_CHECKING:
    from rich.text import Text

    from joma.runs import Run


def _claim_ids(incomplete: str) -> list[str]:
    return [name for name in chosen(None) if name.startswith(incomplete)]


@dataclass(frozen=True, kw_only=True)
class Verify(cmd.Command):
    """Check every claim of the papers, as printed and as derived, against independent numbers.

    Exits with 1 when a derived claim fails. Nothing is written without --plot or --out.
    """

    summary = "Check every claim of the papers."
    example = "verify --claim lemma8 --json"

    claim: list[str] | None = cmd.option(
        "ID",
        "Check this claim alone; may be given several times. See --list.",
        completion=_claim_ids,
    )
    list_: bool = cmd.flag("List the claims and their ids, and stop.", name="--list")
    plot: bool = cmd.flag("Draw all errors in one picture, in a run folder.")
    json: bool = cmd.json_flag()
    seed: int = cmd.seed_option()
    out: Path | None = cmd.option(
        "DIR",
        "Keep the verdicts and the picture in this run folder; with --plot alone, in a new "
        "./runs/verify-DATE-TIME.",
    )

    def run(self) -> None:
        """Check the claims one by one; on Ctrl-C those that were checked are printed and kept."""
        ids = chosen(self.claim)
        if self.list_:
            self.note_idle(("plot", "seed", "out"), "with --list")
            self._list(ids)
            return
        importlib.import_module("joma.experiments.claims")  # Ctrl-C meanwhile stops no measurement
        records: list[Record] = []
        pictures: list[Path] = []
        start = time.perf_counter()
        config = {"seed": self.seed, "claims": ids}
        with working("verify", config, self.out) as begin, contextlib.ExitStack() as around:
            kept = None
            if self.plot or self.out is not None:
                kept = around.enter_context(begin())
                around.callback(kept[0].write_json, "verdicts", records)
            try:
                with reports("verify") as report:
                    for number, name in enumerate(ids):
                        report("", number, len(ids))
                        records.append(check_claim(name, self.seed))
                if kept is not None:
                    pictures += draw(kept[0], records)
                    kept[1].update(agrees=all_hold(records), finding=summary(records))
            except KeyboardInterrupt:
                if records:
                    self._show(records, start)
                typer.echo(f"\nMeasured {len(records)} of {len(ids)} claims.", err=True)
                raise
        self._show(records, start)
        for picture in pictures[:1]:
            typer.echo(f"Picture: {picture}", err=self.json)
        if not all_hold(records):
            raise typer.Exit(1)

    def _list(self, ids: Sequence[str]) -> None:
        from joma.experiments import list_claims

        listed = [claim for claim in list_claims() if claim.id in ids]
        if self.json:
            _render.as_json(
                [{"claim": it.id, "title": it.title, "source": it.source} for it in listed]
            )
        else:
            rows = [(it.id, it.source, it.title) for it in listed]
            _render.put(_render.table(("claim", "source", "title"), rows, left=3))

    def _show(self, records: Sequence[Record], start: float) -> None:
        if self.json:
            _render.as_json(records)
        else:
            _show_verdicts(records, time.perf_counter() - start)


def chosen(wanted: Sequence[str] | None) -> list[str]:
    """Return the ids of the claims to check; all, if none is named."""
    from joma.experiments import list_claims

    available = [claim.id for claim in list_claims()]
    check_known("claim", wanted or (), available, "joma verify --list")
    return [name for name in available if not wanted or name in wanted]


def check_claim(claim: str, seed: int) -> Record:
    """Measure one claim, by its id; another process can call it."""
    from joma.experiments.claims import CLAIMS, check

    return check(next(one for one in CLAIMS if one.id == claim), seed).as_json()


def draw(run: "Run", records: Sequence[Record]) -> list[Path]:
    """Draw the overview picture into a run folder."""
    from joma.experiments.claims import TOPICS
    from joma.report import claims, figures

    headings = {claim.id: heading for heading, topic in TOPICS.items() for claim in topic}
    return figures.save(
        run,
        "verify",
        claims.draw_verdicts(records, topics=headings),
        title="Every claim of the papers, as printed and as derived",
        caption=claims.caption(records),
    )


def all_hold(records: Sequence[Record]) -> bool:
    """Return whether every claim holds as derived."""
    return all(record["derived"]["holds"] for record in records)


def summary(records: Sequence[Record]) -> str:
    """Return how many claims hold, in one sentence."""
    derived = sum(record["derived"]["holds"] for record in records)
    printed = [record["printed"] for record in records if record["printed"] is not None]
    wrong = sum(not form["holds"] for form in printed)
    if len(records) == 1:
        does = ["does not hold", "holds"]
        also = f"; its printed form {does[not wrong]}" if printed else ""
        return f"The claim {does[bool(derived)]} as derived{also}."
    hold = "holds" if derived == 1 else "hold"
    said = f"{derived} of {len(records)} claims {hold} as derived"
    if not printed:
        return f"{said}."
    forms = "form" if len(printed) == 1 else "forms"
    return (
        f"{said}; {wrong} of {len(printed)} printed {forms} {'does' if wrong == 1 else 'do'} not "
        "hold."
    )


def _show_verdicts(records: Sequence[Record], seconds: float) -> None:
    """Print what was measured of each claim, the errata, and a summary as the last line."""
    from joma.experiments.claims import errata

    columns = ("claim", "printed", "derived ≤ tolerance", "s")
    _render.put(_render.table(columns, map(_cells, records), left=3), "")
    failures = [(it["claim"], f": {it['failure']}") for it in records if "failure" in it]
    conditions = [
        (it["claim"], f": {it['condition']}; without, the error is {_number(error)}.")
        for it in records
        if it.get("condition")
        for error in [it["without"]["error"]]
    ]
    for heading, lines in (("Conditions", conditions), ("Failures", failures)):
        if lines:
            _render.put(heading)
            for name, text in lines:
                _entry(2, name, text)
            _render.put("")
    found = errata.find(name for record in records for name in record.get("errata", ()))
    for number, (document, roots) in enumerate(errata.group(found).items()):
        if not number:
            _render.put("Errata")
        _entry(2, f"{document}: {errata.count(document, found)}", "")
        for it in (it for root in roots.values() for it in root):
            follows = f" (follows from {it.root})" if it.root else ""
            said = f": {it.place}. Printed: {it.printed}. Corrected: {it.corrected}."
            _entry(6 if it.root else 4, it.id, follows + said)
    _render.put("", f"{summary(records)} {seconds:.1f} s.")


def _entry(indent: int, name: str, text: str) -> None:
    """Print a name in bold and a text, indented."""
    from rich.text import Text

    _render.paragraph(Text.assemble((printable(name), "bold"), printable(text)), indent)


def _cells(record: Record) -> "list[Text | str]":
    printed, derived = record["printed"], _form(record["derived"])
    sign = printable("≤") if record["derived"]["holds"] else ">"
    derived.append(f" {sign} {_number(record['derived']['tolerance'])}", style="dim")
    error = record["derived"].get("standard_error")
    if error is not None:  # a sampled reference
        derived.append(f" (SE {_number(error)})", style="dim")
    form = "–" if printed is None else _form(printed)
    return [record["claim"], form, derived, f"{record['seconds']:.2f}"]


def _form(form: Record) -> "Text":
    return mark(form["holds"]).append(f" {_number(form['error'])}", style="default")


def _number(value: float | None) -> str:
    if value is None:
        return printable("∞")  # or no number at all
    return "0" if value == 0 else f"{value:.1e}"

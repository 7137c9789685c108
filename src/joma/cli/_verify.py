"""`joma verify`."""

import contextlib
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joma.cli import _show
from joma.cli._folders import begun, check_folder, working_in
from joma.cli._options import Json, Seed, note_idle, option
from joma.cli._progress import progress
from joma.cli._show import Record
from joma.cli._verdicts import all_hold, show_verdicts, summary
from joma.common.checks import check_known

if TYPE_CHECKING:
    from joma.experiments.claims import Claim
    from joma.runs import Run


def _claim_ids(incomplete: str) -> list[str]:
    return [name for name in chosen(None) if name.startswith(incomplete)]


def verify(
    context: typer.Context,
    claim: Annotated[
        list[str] | None,
        option(
            "--claim",
            "ID",
            "Check this claim alone; may be given several times. See --list.",
            autocompletion=_claim_ids,
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the claims and their ids, and stop.")
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw all errors in one picture, in a run folder.")
    ] = False,
    json: Json = False,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        option(
            "--out",
            "DIR",
            "Keep the verdicts and the picture in this run folder; "
            "with --plot alone, in a new ./runs/verify-DATE-TIME.",
        ),
    ] = None,
) -> None:
    """Check every claim of the papers, as printed and as derived, against independent numbers.

    Exits with 1 when a derived claim fails. Nothing is written without --plot or --out.
    """
    ids = chosen(claim)
    if list_:
        note_idle(context, ("plot", "seed", "out"), "with --list")
        _list(ids, json)
        return
    importlib.import_module("joma.experiments.claims")  # Ctrl-C meanwhile stops no measurement
    records: list[Record] = []
    pictures: list[Path] = []
    config = {"seed": seed, "claims": ids}
    start = time.perf_counter()
    with working_in(out) as folders, contextlib.ExitStack() as around:
        kept = None
        if plot or out is not None:
            check_folder(out, "verify", config, restart=True)
            kept = around.enter_context(begun(folders, "verify", config, out))
            around.callback(kept[0].write_json, "verdicts", records)
        try:
            with progress("verify", len(ids)) as advance:
                for name in ids:
                    records.append(check_claim(name, seed))
                    advance()
            if kept is not None:
                pictures += draw(kept[0], records)
                kept[1].update(agrees=all_hold(records), finding=summary(records))
        except KeyboardInterrupt:
            if records:
                _show_verdicts(records, start, json)
            typer.echo(f"\nMeasured {len(records)} of {len(ids)} claims.", err=True)
            raise
    _show_verdicts(records, start, json)
    for picture in pictures[:1]:
        typer.echo(f"Picture: {picture}", err=json)
    if not all_hold(records):
        raise typer.Exit(1)


def chosen(wanted: Sequence[str] | None) -> list[str]:
    """Return the ids of the claims to check; all, if none is named."""
    from joma.experiments import list_claims

    available = [claim.id for claim in list_claims()]
    check_known("claim", wanted or (), available, "joma verify --list")
    return [name for name in available if not wanted or name in wanted]


def check_claim(claim: str, seed: int) -> Record:
    """Measure one claim, by its id; another process can call it."""
    from joma.experiments.claims import check

    return check(_find(claim), seed).as_json()


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


def _find(claim: str) -> "Claim":
    from joma.experiments.claims import CLAIMS

    return next(candidate for candidate in CLAIMS if candidate.id == claim)


def _list(ids: Sequence[str], json: bool) -> None:
    from joma.experiments import list_claims

    listed = [claim for claim in list_claims() if claim.id in ids]
    if json:
        _show.as_json([{"claim": c.id, "title": c.title, "source": c.source} for c in listed])
        return
    rows = _show.table("claim", "source", "title")
    for claim in listed:
        rows.add_row(claim.id, claim.source, claim.title)
    _show.put(rows)


def _show_verdicts(records: Sequence[Record], start: float, json: bool) -> None:
    if json:
        _show.as_json(records)
    else:
        show_verdicts(records, time.perf_counter() - start)

"""`joma verify`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _attack, _show, _work
from joma.cli._edge import (
    PlainCommand,
    checked_restart,
    interruptible,
    same_again,
    unknown,
    writing_to,
)
from joma.cli._options import Json, Seed, note_idle, positive
from joma.cli._progress import progress

if TYPE_CHECKING:
    from joma.runs import Run


def _claim_ids(incomplete: str) -> list[str]:
    from joma.experiments.claims import CLAIMS

    return [claim.id for claim in CLAIMS if claim.id.startswith(incomplete)]


class VerifyCommand(PlainCommand):
    """`joma verify`, whose `--adversary` may stand without a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Writes out the number that `--adversary` was given without."""
        words: list[str] = []
        for index, word in enumerate(args):
            words.append(word)
            following = args[index + 1] if index + 1 < len(args) else "-"
            if word == "--adversary" and following.startswith("-"):
                words.append(_DEFAULT)
        return super().parse_args(ctx, words)


_DEFAULT = "default"


def _seconds(given: str | float) -> float:
    """A parser of seconds; 0 stands for the default."""
    return 0.0 if given == _DEFAULT else positive(given)


def verify(
    context: typer.Context,
    claim: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Check this claim alone; may be given several times. See --list.",
            autocompletion=_claim_ids,
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the claims and their ids, and stop.")
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw all errors in one picture, in a run folder.")
    ] = False,
    adversary: Annotated[
        float | None,
        typer.Option(
            metavar="[SECONDS]",
            parser=_seconds,
            help="Search the whole domain of each claim for a case in which it fails, for about "
            "so long in all; otherwise for 5 seconds of a processor each.",
        ),
    ] = None,
    json: Json = False,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the verdicts and the picture in this run folder; "
            "with --plot alone, in a new ./runs/verify-DATE-TIME.",
        ),
    ] = None,
) -> None:
    """Check every claim of the papers, as printed and as derived, against independent numbers.

    Exits with 1 when a derived claim fails, or falls to --adversary. Nothing is written without
    --plot or --out.
    """
    ids = chosen(claim)
    if list_:
        note_idle(context, ("plot", "seed", "out"), "with --list")
        _list(ids, json)
        return
    if adversary is not None:
        note_idle(context, ("plot", "out"), "with --adversary")
        _attack_and_print(ids, adversary or None, seed, json)
        return
    records: list[dict[str, Any]] = []
    folders: list[Path] = []
    pictures: list[Path] = []
    start = time.perf_counter()
    with interruptible(folders, lambda: same_again(out, folders)), writing_to(out):
        try:
            if out is None and not plot:
                _check(ids, seed, records)
            else:
                pictures += _check_and_keep(ids, seed, records, out, folders)
        except KeyboardInterrupt:
            if records:
                _print(records, start, json)
            typer.echo(f"\nMeasured {len(records)} of {len(ids)} claims.", err=True)
            raise
    _print(records, start, json)
    for picture in pictures[:1]:
        typer.echo(f"Picture: {picture}", err=json)
    if not holds(records):
        raise typer.Exit(1)


def _attack_and_print(ids: Sequence[str], seconds: float | None, seed: int, json: bool) -> None:
    start = time.perf_counter()
    with interruptible([], lambda: same_again(None, [])):
        records = _attack.attack_all(ids, seconds, seed)
    if json:
        _show.as_json(records)
    else:
        _attack.show(records, time.perf_counter() - start)
    if not _attack.stands(records):
        raise typer.Exit(1)


def chosen(wanted: Sequence[str] | None) -> list[str]:
    """The ids of the claims to check; all, if none is named."""
    from joma.experiments.claims import CLAIMS

    available = [claim.id for claim in CLAIMS]
    for name in wanted or ():
        if name not in available:
            raise unknown("claim", name, available, all_of_them="joma verify --list")
    return [name for name in available if not wanted or name in wanted]


def holds(records: Sequence[dict[str, Any]]) -> bool:
    """Whether every claim holds as derived."""
    return all(record["derived"]["holds"] for record in records)


def draw(run: "Run", records: Sequence[dict[str, Any]]) -> list[Path]:
    """Draws the overview picture into a run folder."""
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


def _list(ids: Sequence[str], json: bool) -> None:
    from joma.experiments.claims import CLAIMS

    listed = [claim for claim in CLAIMS if claim.id in ids]
    if json:
        fields = ("title", "source")
        _show.as_json(
            [{"claim": c.id, **{name: getattr(c, name) for name in fields}} for c in listed]
        )
        return
    rows = _show.table("claim", "source", "title")
    for claim in listed:
        rows.add_row(claim.id, *map(_show.printable, (claim.source, claim.title)))
    _show.put(rows)


def _check(ids: Sequence[str], seed: int, records: list[dict[str, Any]]) -> None:
    with progress("verify", len(ids)) as advance:
        for name in ids:
            records.append(_work.check_claim(name, seed))
            advance()


def _check_and_keep(
    ids: Sequence[str],
    seed: int,
    records: list[dict[str, Any]],
    out: Path | None,
    folders: list[Path],
) -> list[Path]:
    """Checks claims in a run folder, which joins `folders`; gives the pictures."""
    from joma.runs import Run

    config = {"seed": seed, "claims": ids}
    checked_restart(out, "verify", config)
    run = Run.create("verify", config, out=out, existing="restart")
    folders.append(run.path)
    with run.locked(), _work.closing(run) as outcome:
        try:
            _check(ids, seed, records)
        finally:
            run.write_json("verdicts", records)
        pictures = draw(run, records)
        outcome.update(agrees=holds(records), finding=_show.summary(records))
    return pictures


def _print(records: Sequence[dict[str, Any]], start: float, json: bool) -> None:
    if json:
        _show.as_json(records)
    else:
        _show.verdicts(records, time.perf_counter() - start)

"""`joma series`, and the work of `joma probe --series`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _show, _workers
from joma.cli._errors import PlainCommand, command_group
from joma.cli._folders import begun, check_folder, working_in
from joma.cli._options import Json, option
from joma.cli._probe_request import ProbeRequest, estimate, show_plan
from joma.cli._progress import reports
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.models.series import Integrity, Series

app = command_group("Series of checkpoints.", "series verify checkpoints")


@app.command(
    cls=PlainCommand,
    short_help="Check the checkpoints of a training.",
    epilog="Example: joma series verify EleutherAI/pythia-70m@step0,step1,step2,step4",
)
def verify(
    series: Annotated[
        list[str],
        typer.Argument(
            metavar="SERIES",
            help="A folder of checkpoint folders, several such folders, or HUBID@step0,step1000 "
            "(HUBID@pythia for Pythia's).",
        ),
    ],
    schedule: Annotated[
        str | None,
        option(
            "--schedule",
            "STEPS",
            "Steps there should be: 0,500,1000 or pythia; otherwise inferred.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Find repeated, missing and damaged checkpoints.

    Exits with 1 when something is found.
    """
    from joma.models.series import verify as verify_series

    chosen = _named(series, None, schedule)
    start = time.perf_counter()
    with reports("series verify") as report:
        integrity = verify_series(chosen, progress=report)
    if json:
        _show.as_json(integrity.as_json())
    else:
        _print_integrity(integrity)
        _show.say(f"{summary(integrity, len(chosen.steps))} {time.perf_counter() - start:.1f} s.")
    if not integrity.clean:
        raise typer.Exit(1)


def measure(
    asked: ProbeRequest, names: Sequence[str], schedule: str | None, jobs: int, dry_run: bool
) -> None:
    """Measure every checkpoint of a series; resume what is in --out."""
    from joma.analysis import series as work

    if asked.model is not None:
        names, revisions = [asked.model], ",".join(names)
        if Path(asked.model).exists():
            raise JomaError(
                f"MODEL must be a hub id where --series names its revisions, got {asked.model}; "
                f"a folder of checkpoints is given as --series {asked.model}"
            )
        if asked.revision is not None:
            raise JomaError(
                f"--revision has no effect where --series names the revisions of MODEL, got "
                f"{asked.revision!r}"
            )
    else:
        revisions = asked.revision
    series = _named(names, revisions, schedule)
    text = asked.read_text()
    config = work.config_of(series, text, asked.probing)
    check_folder(asked.out, work.NAME, config)
    if dry_run:
        _plan(asked, series, jobs)
        return
    start = time.perf_counter()
    with (
        working_in(asked.out) as folders,
        begun(folders, work.NAME, config, asked.out, device=asked.device, resume=True) as kept,
    ):
        run, outcome = kept
        with reports("probe") as report, _workers.workers(jobs) as submit:
            ended = work.probe_series(
                run,
                series,
                text,
                asked.probing,
                device=asked.device,
                submit=submit,
                progress=report,
            )
        found = summary(ended.integrity, len(series.steps))
        outcome.update(finding=" ".join([found, *ended.sentences]), sound=ended.sound)
    for note in ended.notes:
        _show.say(note, err=True)
    failed = [words for step, words in sorted(ended.failed.items())]
    if asked.json:
        _show.as_json(
            {
                "series": series.name,
                "integrity": ended.integrity.as_json(),
                "done": list(ended.done),
                "failed": {str(step): words for step, words in sorted(ended.failed.items())},
                "table": list(ended.table),
                "sentences": list(ended.sentences),
                "run": str(run.path),
                "figures": [str(path) for path in run.figures],
            }
        )
    else:
        _print_integrity(ended.integrity, unverified=False)
        reported = {finding.sentence for finding in ended.integrity.findings}
        for words in failed:
            if words not in reported:
                _show.say(_show.sentence(words))
        _print_table(ended.table)
        for words in ended.sentences:
            _show.say(words)
        seconds = time.perf_counter() - start
        _show.say(f"{found} {len(ended.done)} measured. {seconds:.1f} s.")
        for path in run.figures or [run.path]:
            _show.say(f"  {path}")
    if not ended.sound:
        raise typer.Exit(1)


def summary(integrity: "Integrity", count: int) -> str:
    """Return the result of checking a series, in one sentence."""
    checkpoints = f"{count} checkpoint{'' if count == 1 else 's'}"
    if integrity.clean:
        return f"{checkpoints}: none repeated, missing or damaged."
    number = len(integrity.findings)
    return f"{checkpoints}: {number} finding{'' if number == 1 else 's'}."


def _named(names: Sequence[str], revisions: str | None, schedule: str | None) -> "Series":
    from joma.models.series import Series

    if len(names) > 1 and any("@" in name and not Path(name).exists() for name in names):
        raise JomaError("several series must be folders, got " + " and ".join(names))
    return Series.of(names if len(names) > 1 else names[0], revisions=revisions, schedule=schedule)


def _print_integrity(integrity: "Integrity", unverified: bool = True) -> None:
    for finding in integrity.findings:
        _show.say(_show.sentence(finding.sentence))
    if (count := len(integrity.unverified)) and unverified:
        of = "No checkpoint carries" if not integrity.verified else f"{count} checkpoints carry no"
        _show.say(f"{of} checksums: unverified.")


def _print_table(table: Sequence[Any]) -> None:
    if not table:
        return
    rows = _show.table(*table[0], justify="right")
    for row in table:
        rows.add_row(*map(_show.cell, row.values()))
    _show.put("", rows, "")


def _plan(asked: ProbeRequest, series: "Series", jobs: int) -> None:
    from joma.analysis import series as work

    finished = [step for step in series.steps if asked.out and work.is_done(asked.out, step)]
    left = [it for it in series.checkpoints if it.step not in finished]
    what = {"series": series.name, "steps": list(series.steps), "done": finished, "jobs": jobs}
    if not left:
        what["about_seconds"] = None
    one = estimate(asked, left[0].source, left[0].revision) if left else {}
    if one.get("about_seconds") is not None:
        one["about_seconds"] = one["about_seconds"] * len(left) / jobs
    note = f"{len(series.steps)} checkpoints, {len(finished)} of them done"
    show_plan(asked, work.NAME, what, one, (note,))

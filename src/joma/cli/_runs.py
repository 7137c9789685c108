"""`joma runs`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joma.cli import _show
from joma.cli._errors import PlainCommand, command_group
from joma.cli._folders import writing_to
from joma.cli._options import Json
from joma.cli._runs_words import number, shortened, state_cell, what_was_found
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.runs import Run, RunSummary

app = command_group("List, show, compare and plot run folders.", "runs list")

_FORMATS = (".png", ".svg", ".pdf")
_WIDE = 100
"""Columns from which dates are shown with their year."""

_Folder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


@app.command("list", cls=PlainCommand, epilog="Example: joma runs list runs --json")
def list_(
    root: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="Where to search, three folders deep; otherwise in ./runs."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the runs in a folder, oldest first."""
    from joma.runs import list_runs

    if root is not None and not root.is_dir():
        raise JomaError(f"DIR {root} {'is not a folder' if root.exists() else 'does not exist'}")
    folder = root or Path("runs")
    summaries = list_runs(folder, left_out=_say_left_out) if folder.is_dir() else []
    if json:
        _show.as_json([summary.as_json() for summary in summaries])
        return
    if not summaries:
        _show.say("No runs in ./runs yet." if root is None else f"No runs in {root}.")
        return
    _put_list(summaries)


@app.command(
    cls=PlainCommand,
    short_help="Show findings, curves and settings of a run.",
    epilog="Example: joma runs show runs/fig4-20250101-120000",
)
def show(run: _Folder, json: Json = False) -> None:
    """Show how a run ended, what was found in it, its curves, settings and files."""
    from joma.cli._runs_show import put_run, record_of
    from joma.runs import Run, RunSummary

    opened = Run.open(run)
    summary = RunSummary.of(opened)
    if summary.state == "damaged":
        raise JomaError(summary.reason)
    record = record_of(opened, summary)
    if json:
        _show.as_json(record)
    else:
        put_run(opened, summary, record)


@app.command(
    cls=PlainCommand,
    short_help="Compare settings, curves and end values of two runs.",
    epilog="Example: joma runs compare runs/fig4-20250101-120000 runs/fig4-again",
)
def compare(first: _Folder, second: _Folder, json: Json = False) -> None:
    """Compare two runs: settings that differ, loss curves, end values, and tables."""
    from joma.cli._runs_compare import compare_runs, put_comparison
    from joma.runs import Run

    one, two = Run.open(first), Run.open(second)
    record = compare_runs(one, two)
    if json:
        _show.as_json(record)
    else:
        put_comparison(one, two, record)


@app.command(
    cls=PlainCommand,
    short_help="Draw loss, metrics by layer and findings of a run.",
    epilog="Example: joma runs plot runs/mine --out mine.png",
)
def plot(
    run: _Folder,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="A .png, .svg or .pdf file; otherwise figures/training.png in the run, or "
            "RUN-training.png here while the run is running.",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", metavar="NAME", help="Metric to draw by layer; may be given repeatedly."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Draw a run: its loss, what was measured by layer as lines and as a map, and findings."""
    from joma.runs import Run

    path = _drawn(Run.open(run), out, metric)
    if json:
        _show.as_json({"figure": str(path)})
    else:
        _show.say(str(path))


def _drawn(run: "Run", out: Path | None, metrics: list[str] | None) -> Path:
    """Draw a run and return the file."""
    if out is not None and out.suffix.lower() not in _FORMATS:
        raise JomaError(f"--out must end in {', '.join(_FORMATS)}, got {out}")
    if out is not None and out.is_dir():
        raise JomaError(f"--out {out} is a folder, but must be a file")
    from joma.common.files import write_bytes
    from joma.report import figures, training
    from joma.runs import state_of

    figure = training.draw(run, metrics=metrics)
    name = "-".join([training.NAME, *(metrics or [])])
    if out is None and state_of(run) != "running":
        with writing_to(run.path), run.locked():
            return run.write_figure(
                f"{name}.png", figures.rendered(figure, "png", dpi=training.DPI)
            )
    # Only the process that runs it may write to a run.
    path = out or Path(f"{run.path.resolve().name}-{name}.png")
    data = figures.rendered(figure, path.suffix.lower().removeprefix("."), dpi=training.DPI)
    with writing_to(path):
        write_bytes(path, data)
    return path


def _put_list(summaries: "list[RunSummary]") -> None:
    width = _show.console().width
    wide = width >= _WIDE
    rows = _show.table("run", "began (UTC)", "state", "steps", "loss", "worst finding")
    for place in (3, 4):
        rows.columns[place].justify = "right"
    for place in (1, 2, 3, 4):
        rows.columns[place].no_wrap = True
    rows.columns[0].ratio, rows.columns[5].ratio = (2, 3) if wide else (1, 1)
    rows.expand = True
    for summary in summaries:
        date = summary.date[:16].replace("T", " ")
        rows.add_row(
            str(summary.path),
            date if wide else date[5:],
            state_cell(summary.state),
            "" if summary.last_step is None else f"{summary.last_step}",
            "" if summary.last_loss is None else number(summary.last_loss),
            shortened(what_was_found(summary), 120 if wide else 70),
        )
    _show.put(rows)


def _say_left_out(folder: Path, why: str) -> None:
    typer.echo(_show.printable(f"joma: left out {folder}: {why}"), err=True)

"""`joma runs`: list, show, compare and plot run folders."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from joma.cli import _render
from joma.cli._command import Command, add_command, argument, command_group, json_flag, option
from joma.cli._render import printable
from joma.cli._run_folder import writing_to
from joma.cli._runs_compare import Compare
from joma.cli._runs_show import ShowRun, styled
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.runs import Run, RunSummary

app = command_group("List, show, compare and plot run folders.", "runs list")

_FORMATS = (".png", ".svg", ".pdf")
_WIDE = 100
"""Columns from which dates are shown with their year."""


@dataclass(frozen=True, kw_only=True)
class List(Command):
    """List the runs in a folder, oldest first."""

    root: Path | None = argument(
        "DIR", "Where to search, three folders deep; otherwise in ./runs.", default=None
    )
    json: bool = json_flag()

    def run(self) -> None:
        """Print a line for each run."""
        from joma.runs import list_runs

        folder = self.root or Path("runs")
        if self.root is not None and not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise JomaError(f"DIR {folder} {what}")
        summaries = list_runs(folder, left_out=_say_left_out) if folder.is_dir() else []
        if self.json:
            _render.as_json([summary.as_json() for summary in summaries])
        elif summaries:
            _put_list(summaries)
        else:
            _render.say("No runs in ./runs yet." if self.root is None else f"No runs in {folder}.")


@dataclass(frozen=True, kw_only=True)
class Plot(Command):
    """Draw a run: its loss, what was measured by layer as lines and as a map, and findings."""

    folder: Path = argument("RUN", "A run folder.")
    out: Path | None = option(
        "FILE",
        "A .png, .svg or .pdf file; otherwise figures/training.png in the run, or "
        "RUN-training.png here while the run is running.",
    )
    metric: list[str] | None = option("NAME", "Metric to draw by layer; may be given repeatedly.")
    json: bool = json_flag()

    def run(self) -> None:
        """Draw the run and print where the picture is."""
        from joma.runs import Run

        path = self._drawn(Run.open(self.folder))
        if self.json:
            _render.as_json({"figure": str(path)})
        else:
            _render.say(str(path))

    def _drawn(self, run: "Run") -> Path:
        """Draw a run and return the file."""
        from joma.common.files import write_bytes
        from joma.report import figures, training
        from joma.runs import state_of

        if self.out is not None and self.out.suffix.lower() not in _FORMATS:
            raise JomaError(f"--out must end in {', '.join(_FORMATS)}, got {self.out}")
        figure = training.draw(run, metrics=self.metric)
        name = "-".join([training.NAME, *(self.metric or [])])
        if self.out is None and state_of(run) != "running":
            data = figures.rendered(figure, "png", dpi=training.DPI)
            with writing_to(run.path), run.locked():
                return run.write_figure(f"{name}.png", data)
        # Only the process that runs it may write to a run.
        path = self.out or Path(f"{run.path.resolve().name}-{name}.png")
        data = figures.rendered(figure, path.suffix.lower().removeprefix("."), dpi=training.DPI)
        with writing_to(path):
            write_bytes(path, data)
        return path


add_command(app, List, "List the runs in a folder, oldest first.", "runs list runs --json")
add_command(
    app,
    ShowRun,
    "Show findings, curves and settings of a run.",
    "runs show runs/fig4-20250101-120000",
    name="show",
)
add_command(
    app,
    Compare,
    "Compare settings, curves and end values of two runs.",
    "runs compare runs/fig4-20250101-120000 runs/fig4-again",
)
add_command(
    app,
    Plot,
    "Draw loss, metrics by layer and findings of a run.",
    "runs plot runs/mine --out mine.png",
)


def _put_list(summaries: "Sequence[RunSummary]") -> None:
    wide = _render.console().width >= _WIDE
    rows = []
    for summary in summaries:
        date = summary.date[:16].replace("T", " ")
        found = textwrap.shorten(_worst(summary), 120 if wide else 70, placeholder=printable("…"))
        step = "" if summary.last_step is None else str(summary.last_step)
        loss = "" if summary.last_loss is None else f"{summary.last_loss:.4g}"
        state = styled(summary.state)
        rows.append((str(summary.path), date if wide else date[5:], state, step, loss, found))
    columns = ("run", "began (UTC)", "state", "steps", "loss", "worst finding")
    table = _render.table(columns, rows, left=3)
    for column in table.columns[1:5]:
        column.no_wrap = True
    table.columns[5].justify = "left"
    table.columns[0].ratio, table.columns[5].ratio = (2, 3) if wide else (1, 1)
    table.expand = True
    _render.put(table)


def _worst(summary: "RunSummary") -> str:
    """Return the worst finding of a run, how it compares, or why it is in its state."""
    worst = summary.worst
    if summary.state != "damaged" and worst is not None:
        where = "" if worst.get("layer") is None else f", layer {worst['layer']}"
        severity = f"{worst['severity']}: " if worst.get("severity") else ""
        kind = str(worst.get("kind", "finding")).replace("_", " ")
        return f"{severity}{kind}{where}, step {worst.get('step')}"
    if summary.state != "ended":
        return summary.reason
    outcome = summary.outcome
    verdict = outcome.get("verdict")
    if verdict is None and "agrees" in outcome:
        verdict = "agrees" if outcome["agrees"] else "differs"
    return ": ".join(str(word) for word in (verdict, outcome.get("finding")) if word)


def _say_left_out(folder: Path, why: str) -> None:
    typer.echo(printable(f"joma: left out {folder}: {why}"), err=True)

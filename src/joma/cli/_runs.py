"""`joma runs`: list, show, compare and plot run folders."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma.cli import _command as cmd
from joma.cli import _render
from joma.cli._render import cell, printable
from joma.cli._run_folder import writing_to
from joma.cli._runs_show import ShowRun, say_curves, styled, text_of
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.runs import Run, RunSummary


_FORMATS = (".png", ".svg", ".pdf")
_WIDE = 100
"""Columns from which dates are shown with their year."""
_PARTED = 0.02
"""Share by which two losses differ where curves are said to part."""
_LOWER_IS_BETTER = ("loss", "validation_loss")
_UNSHOWN = ("date", "command")
"""What of the environment always differs, and is in `--json` alone."""


@dataclass(frozen=True, kw_only=True)
class List(cmd.Command):
    """List the runs in a folder, oldest first."""

    summary = "List the runs in a folder, oldest first."
    example = "runs list runs --json"

    root: Path | None = cmd.argument(
        "DIR", "Where to search, three folders deep; otherwise in ./runs.", default=None
    )
    json: bool = cmd.json_flag()

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
class Plot(cmd.Command):
    """Draw a run: its loss, what was measured by layer as lines and as a map, and findings."""

    summary = "Draw loss, metrics by layer and findings of a run."
    example = "runs plot runs/mine --out mine.png"

    folder: Path = cmd.argument("RUN", "A run folder.")
    out: Path | None = cmd.option(
        "FILE",
        "A .png, .svg or .pdf file; otherwise figures/training.png in the run, or "
        "RUN-training.png here while the run is running.",
    )
    metric: list[str] | None = cmd.option(
        "NAME", "Metric to draw by layer; may be given repeatedly."
    )
    json: bool = cmd.json_flag()

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


@dataclass(frozen=True, kw_only=True)
class Compare(cmd.Command):
    """Compare two runs: settings that differ, loss curves, end values, and tables."""

    summary = "Compare settings, curves and end values of two runs."
    example = "runs compare runs/fig4-20250101-120000 runs/fig4-again"

    first: Path = cmd.argument("RUN", "A run folder.")
    second: Path = cmd.argument("RUN", "A run folder.")
    json: bool = cmd.json_flag()

    def run(self) -> None:
        """Print how the runs differ."""
        from joma.runs import Run

        one, two = Run.open(self.first), Run.open(self.second)
        record, ends = _difference(one, two), _ends(one, two)
        if self.json:
            _render.as_json({**record, "ends": ends})
            return
        names = (one.path.name, two.path.name)
        if names[0] == names[1]:
            names = (str(one.path), str(two.path))
        _put_settings(names, record)
        _put_losses(one, two, names, record["losses_part_at"])
        metrics = record["metrics"]
        if metrics is not None and metrics["equal"]:
            _render.say("metrics: equal")
        elif metrics is not None and ends:
            if not metrics["largest"]:
                _render.say("The runs did not log the same steps, names or members.")
            steps = record["last_steps"]
            if None not in steps and steps[0] != steps[1]:
                _render.say(f"The runs end at different steps, {steps[0]:,} and {steps[1]:,}.")
            _put_ends(names, ends)
        for name, difference in record["tables"].items():
            _render.say(f"table {name}: {_in_words(difference)}")
        for name in record["tables_in_one_only"]:
            _render.say(f"table {name}: in {names[0] if name in one.tables else names[1]} only")


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


def _difference(one: "Run", two: "Run") -> dict[str, Any]:
    """Return how two runs differ, as `--json` prints it."""
    from joma.runs import RunSummary, compare_metrics, compare_tables, differing

    left, right = (RunSummary.of(run) for run in (one, two))
    metrics = compare_metrics(one, two)
    return {
        "runs": [str(one.path), str(two.path)],
        "states": [left.state, right.state],
        "last_steps": [left.last_step, right.last_step],
        "config": differing(one.config, two.config),
        "environment": differing(one.environment, two.environment),
        "outcome": differing(left.outcome, right.outcome),
        "losses_part_at": _parting(one, two),
        "metrics": metrics and {"equal": metrics.equal, "largest": metrics.largest},
        "tables": {
            it.table: {"equal": it.equal, "largest": it.largest} for it in compare_tables(one, two)
        },
        "tables_in_one_only": sorted(set(one.tables) ^ set(two.tables)),
    }


def _put_settings(names: tuple[str, str], record: dict[str, Any]) -> None:
    rows = []
    if record["states"][0] != record["states"][1]:
        rows.append(("state", *record["states"]))
    for group in ("config", "environment", "outcome"):
        for key, (left, right) in record[group].items():
            if group != "environment" or key.partition(".")[0] not in _UNSHOWN:
                rows.append((f"{group} {key}", text_of(left), text_of(right)))
    if rows:
        _render.put(_render.table(("", *names), rows, left=3))
    else:
        _render.say("Settings, environment and outcome are the same.")


def _put_losses(one: "Run", two: "Run", names: tuple[str, str], parted_at: int | None) -> None:
    from joma.runs import loss_curves

    shown = False
    for name in _LOWER_IS_BETTER:
        found = [loss_curves(run.metrics.read(name), name) for run in (one, two)]
        if all(found):
            shown = True
            title = _render.sentence(name.replace("_", " "))
            _render.say(f"\n{title}, with first and last value")
            say_curves([(run, own[0]) for run, own in zip(names, found, strict=True)])
    if shown and parted_at is not None:
        _render.say(f"Losses first differ by more than {_PARTED:.0%} at step {parted_at:,}.")


def _put_ends(names: tuple[str, str], ends: dict[str, tuple[float | None, float | None]]) -> None:
    rows, equal = [], []
    for name, (left, right) in ends.items():
        gap, better = None, ""
        if left is not None and right is not None:
            known = [math.isfinite(left), math.isfinite(right)]
            gap = right - left if all(known) else None
            if name in _LOWER_IS_BETTER and any(known):  # one that is not finite is never better
                better = names[right < left] if all(known) else names[known.index(True)]
        if gap == 0:
            equal.append(name)
            continue
        signed = cell(None) if gap is None else f"{gap:+.3g}"
        rows.append((name, left, right, signed, better))
    _render.say("\nEnd values, each the mean over layers")
    if rows:
        table = _render.table(("metric", *names, "difference", "better"), rows)
        table.columns[4].justify = "left"
        _render.put(table)
    if equal:
        _render.say(f"Equal at the end: {', '.join(equal)}")


def _ends(one: "Run", two: "Run") -> dict[str, tuple[float | None, float | None]]:
    """Return the last value of every metric in both runs, the mean over everything it is of."""
    left, right = _last_values(one), _last_values(two)
    names = sorted({*left, *right}, key=lambda name: (name not in _LOWER_IS_BETTER, name))
    return {name: (left.get(name), right.get(name)) for name in names}


def _last_values(run: "Run") -> dict[str, float]:
    log = run.metrics.read()
    values = {}
    for name in set(log["name"].tolist()):
        own = (log["name"] == name) & (log["head"] < 0)
        own = own if own.any() else log["name"] == name
        last = log["step"][own] == log["step"][own].max()
        values[name] = float(log["value"][own][last].mean())
    return values


def _parting(one: "Run", two: "Run") -> int | None:
    """Return the first common step at which losses differ by more than 2%, None if they do not."""
    from joma.runs import loss_curves

    curves = [loss_curves(run.metrics.read("loss")) for run in (one, two)]
    if not all(curves):
        return None
    left, right = (
        dict(zip(own[0].steps.tolist(), own[0].values.tolist(), strict=True)) for own in curves
    )
    for step in sorted(left.keys() & right.keys()):
        a, b = left[step], right[step]
        if math.isfinite(a) != math.isfinite(b) or abs(a - b) > _PARTED * max(abs(a), abs(b)):
            return step
    return None


def _in_words(difference: dict[str, Any]) -> str:
    if difference["equal"]:
        return "equal"
    if not difference["largest"]:
        return "not of the same columns or rows"
    largest = ", ".join(
        f"{name} {value:.2e}" for name, value in difference["largest"].items() if value != 0
    )
    return f"largest differences: {largest}"


app = cmd.command_group(
    "List, show, compare and plot run folders.",
    "runs list",
    {"list": List, "show": ShowRun, "compare": Compare, "plot": Plot},
)

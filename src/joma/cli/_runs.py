"""`joma runs`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _show
from joma.cli._errors import PlainCommand, command_group
from joma.cli._options import Json
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.runs import Run, TableDifference

app = command_group("List, show and compare run folders.", "runs list")

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
    rows = _show.table("run", "began (UTC)", "status", "finding")
    for summary in summaries:
        outcome = summary.outcome
        date = summary.date[:16].replace("T", " ")
        finding = _show.printable(str(outcome.get("finding", "")))
        rows.add_row(str(summary.path), date, _status(outcome), finding)
    _show.put(rows)


@app.command(
    cls=PlainCommand,
    short_help="Show what a run did and what it left.",
    epilog="Example: joma runs show runs/fig4-20250101-120000",
)
def show(run: _Folder, json: Json = False) -> None:
    """Show what a run was asked for, what it ran on, how it ended and what it left."""
    from joma.runs import Run, RunSummary

    opened = Run.open(run)
    record = {
        "path": str(opened.path),
        "outcome": RunSummary.of(opened).outcome,
        "verified": opened.verified,
        "missing": opened.missing,
        "config": opened.config,
        "environment": opened.environment,
        "findings": _findings(opened),
        "metrics": _logged(opened),
        "checkpoints": opened.checkpoints.steps[::-1],
        "tables": {name: _shape(opened.read_table(name)) for name in opened.tables},
        "figures": [str(path) for path in opened.figures],
    }
    if json:
        _show.as_json(record)
        return
    if record["checkpoints"]:
        record["checkpoints"] = {"at steps": record["checkpoints"]}
    record["findings"] = _in_lines(record["findings"])
    record["verified"] = "yes" if record["verified"] else "no, not all files have a checksum"
    record = {key: value for key, value in record.items() if value}
    rows = _show.table("", "")
    rows.show_header = False
    for key, value in _lines(record):
        rows.add_row(key, _show.printable(value))
    _show.put(rows)


@app.command(
    cls=PlainCommand,
    short_help="Compare the settings and numbers of two runs.",
    epilog="Example: joma runs compare runs/fig4-20250101-120000 runs/fig4-again",
)
def compare(first: _Folder, second: _Folder, json: Json = False) -> None:
    """Compare two runs: settings, environment, outcome, and the numbers they measured and kept."""
    from joma.runs import Run, RunSummary, compare_metrics, compare_tables, differing

    one, two = Run.open(first), Run.open(second)
    outcomes = [RunSummary.of(run).outcome for run in (one, two)]
    differences = {
        "config": differing(one.config, two.config),
        "environment": differing(one.environment, two.environment),
        "outcome": differing(outcomes[0], outcomes[1]),
    }
    tables, metrics = compare_tables(one, two), compare_metrics(one, two)
    missing = sorted(set(one.tables) ^ set(two.tables))
    if json:
        record: dict[str, Any] = dict(differences)
        record["metrics"] = None if metrics is None else _as_json(metrics)
        record["tables"] = {table.table: _as_json(table) for table in tables}
        record["tables_in_one_only"] = missing
        _show.as_json(record)
        return
    rows = _show.table("", str(first), str(second))
    for part, entries in differences.items():
        for key, (left, right) in entries.items():
            rows.add_row(f"{part} {key}", _cell(left), _cell(right))
    if rows.row_count:
        _show.put(rows)
    else:
        _show.say("Settings, environment and outcome are the same.")
    if metrics is not None:
        _show.say(f"metrics: {_in_words(metrics)}")
    for table in tables:
        _show.say(f"table {table.table}: {_in_words(table)}")
    for name in missing:
        _show.say(f"table {name}: in {first if name in one.tables else second} only")


def _say_left_out(folder: Path, why: str) -> None:
    typer.echo(_show.printable(f"joma: left out {folder}: {why}"), err=True)


def _in_words(table: "TableDifference") -> str:
    if not table.same_shape:
        what = "steps, names or members" if table.table == "metrics" else "columns or rows"
        return f"not of the same {what}"
    if table.equal:
        return "equal"
    largest = ", ".join(f"{name} {value:.2e}" for name, value in table.largest.items() if value)
    return f"largest differences: {largest}"


def _status(outcome: dict[str, Any]) -> str:
    status = str(outcome.get("status", "unknown"))
    if status == "done" and "verdict" in outcome:
        return str(outcome["verdict"])
    if status == "done" and "agrees" in outcome:  # of other commands, and of earlier versions
        return "agrees" if outcome["agrees"] else "differs"
    return status


def _lines(record: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for key, value in record.items():
        if isinstance(value, dict):
            lines += _lines(value, f"{prefix}{key} ")
        elif isinstance(value, list) and key in ("figures", "findings"):
            lines += [(key.removesuffix("s"), item) for item in value]
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for number, item in enumerate(value, 1):
                lines += _lines(item, f"{prefix}{key} {number} ")
        else:
            lines.append((f"{prefix}{key}", _cell(value)))
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return _show.printable("–") if value is None else str(value)


def _findings(run: "Run") -> dict[str, Any] | None:
    """Return what `findings.json` holds, None where there is none."""
    from joma.runs import read_findings

    found = read_findings(run)
    return vars(found) if found.findings or found.not_judged else None


def _in_lines(stored: dict[str, Any] | None) -> list[str]:
    """Return a line for each finding."""
    return [
        f"{one['severity'] or one.get('kind')}, step {one.get('step')}: {one.get('sentence')} "
        f"{one['advice']}"
        for one in (stored or {"findings": []})["findings"]
    ]


def _shape(columns: dict[str, Any]) -> str:
    rows = len(next(iter(columns.values())))
    return f"{rows} rows: {', '.join(columns)}"


def _as_json(table: "TableDifference") -> dict[str, Any]:
    largest = {name: value if value == value else None for name, value in table.largest.items()}
    return {"equal": table.equal, "largest": largest}


def _logged(run: Any) -> dict[str, Any] | None:
    """Return what the metrics log holds: rows, names, members, and the last step."""
    log = run.metrics.read()
    if not log["step"].size:
        return None
    return {
        "rows": int(log["step"].size),
        "names": sorted(set(log["name"])),
        "members": int(log["member"].max()) + 1,
        "last_step": int(log["step"].max()),
    }

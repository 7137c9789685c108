"""`joma reproduce`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from joma.cli import _show, _work
from joma.cli._edge import checked_out, interruptible, unknown, writing_to
from joma.cli._options import Json, Out, Seed
from joma.cli._progress import progress

SECONDS = {"fig2": 4, "fig3": 3, "fig4": 4, "fig9": 3, "cooccurrence": 4, "scan-snap": 7}
"""About how many seconds each experiment takes on one core, with its imports.

Written down, for the help names the experiments and must not import them.
"""

MEMORY = "under 1 GB"
"""What every experiment needs; the largest takes about 0.2 GB."""


def _names(incomplete: str) -> list[str]:
    return [name for name in SECONDS if name.startswith(incomplete)]


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help=f"What to make: {', '.join(SECONDS)}.", autocompletion=_names
        ),
    ] = None,
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say what would be made, where, and what it takes, and stop."
        ),
    ] = False,
) -> None:
    """Make figures or tables of the papers from scratch, beside what was published.

    Each gets its own run folder; with --out and several names, DIR/NAME. Exits with 1 when one
    does not show what was published.
    """
    folders = _folders(_chosen(names), out)
    if dry_run:
        _plan(folders, json)
        return
    records = []
    begun: list[Path] = []
    with interruptible(begun):
        for name, folder in folders.items():
            with writing_to(folder), progress(f"reproduce {name}"):
                record = _work.reproduce_experiment(name, folder, seed, begun.append)
            records.append(record)
            if not json:
                _show.outcome(record)
    if json:
        _show.as_json(records)
    if not all(record["agrees"] for record in records):
        raise typer.Exit(1)


def _chosen(names: Sequence[str] | None) -> list[str]:
    from joma.experiments import EXPERIMENTS

    if not names:
        raise ValueError(f"say what to reproduce; available: {', '.join(EXPERIMENTS)}")
    for name in names:
        if name not in EXPERIMENTS:
            raise unknown("experiment", name, EXPERIMENTS)
    return list(dict.fromkeys(names))


def _folders(names: Sequence[str], out: Path | None) -> dict[str, Path | None]:
    """Where each goes, all checked before the first is made; None is the default."""
    if out is None:
        return dict.fromkeys(names)
    folders = {names[0]: out} if len(names) == 1 else {name: out / name for name in names}
    return {name: checked_out(folder, name) for name, folder in folders.items()}


def _plan(folders: dict[str, Path | None], json: bool) -> None:
    """Prints what would be made, where, and what it takes."""
    from joma.experiments import EXPERIMENTS
    from joma.runs import default_folder

    plan = [
        {
            "name": name,
            "title": EXPERIMENTS[name].title,
            "run": str(folder or default_folder(name)),
            "about_seconds": SECONDS[name],
            "memory": MEMORY,
        }
        for name, folder in folders.items()
    ]
    if json:
        _show.as_json(plan)
        return
    for record in plan:
        typer.echo(f"{record['name']}: {record['title']} → {record['run']}")
        typer.echo(f"  about {record['about_seconds']} s, memory {record['memory']}")
    if len(plan) > 1:
        total = sum(SECONDS[name] for name in folders)
        typer.echo(f"Together about {total} s.")

"""`joma reproduce`, with the options that the experiments declare."""

import dataclasses
import inspect
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from joma import experiments
from joma.cli import _command as cmd
from joma.cli import _render
from joma.cli._progress import reports
from joma.cli._render import Record, cell, mark, printable
from joma.cli._run_folder import (
    check_folder,
    closing,
    naming_options,
    resumable,
    resume_command,
)
from joma.common.checks import check_known
from joma.common.json_files import plain
from joma.errors import JomaError
from joma.experiments import ChoiceOption, Option, Request


def _and(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _references() -> str:
    """Return what --reference may be, and of which experiments."""
    owners: dict[str, list[str]] = {}
    for name, experiment in experiments.EXPERIMENTS.items():
        if experiment.reference:
            owners.setdefault(experiment.reference, []).append(name)
    return "; ".join(f"Of {_and(names)}: {what}" for what, names in owners.items())


_TRAINED = [one for one in experiments.EXPERIMENTS.values() if one.scales]
_SCALES = list(dict.fromkeys(scale for one in _TRAINED for scale in one.scales))
_DEFAULT_SCALES = " or ".join(dict.fromkeys(one.default_scale for one in _TRAINED))


@dataclass(frozen=True, kw_only=True)
class Reproduce(cmd.Command):
    """Make figures or tables of the papers from scratch, next to what was published.

    Each gets its own run folder; with --out and several names, DIR/NAME. What trains networks
    resumes where it was stopped when --out is its folder. Each is said to agree, to differ, to be
    not comparable (nothing was published of that scale or text) or to be incomplete. Exits with 1
    when one differs.
    """

    summary = "Make figures and tables of the papers again."
    example = "reproduce fig4 --out fig4-again --seed 1"

    names: list[str] | None = cmd.argument(
        "NAME",
        f"What to make: {', '.join(experiments.EXPERIMENTS)}.",
        default=None,
        completion=cmd.completing(experiments.EXPERIMENTS),
    )
    scale: str | None = cmd.option(
        "SCALE",
        f"Size of what trains networks: {', '.join(_SCALES)}; "
        f"{_DEFAULT_SCALES} if not given. --dry-run says what each takes.",
        completion=cmd.completing(_SCALES),
    )
    device: str = cmd.device_option(
        "Where networks are trained: cpu, cuda, or auto, which takes cuda if it is there."
    )
    own: Mapping[str, Any] = field(default_factory=dict)
    group: list[str] | None = cmd.option(
        "GROUP",
        "Do this part of the work alone; may be given several times. "
        "--dry-run says which there are.",
    )
    reference: Path | None = cmd.option("FOLDER", f"{_references()}.")
    out: Path | None = cmd.out_option()
    seed: int = cmd.seed_option()
    json: bool = cmd.json_flag()
    dry_run: bool = cmd.flag("Say what would be made, where, and what it takes, and stop.")
    list_: bool = cmd.flag("List what can be made, and stop.", name="--list")

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """Return the options, with the experiments' own after --device."""
        found = super().parameters()
        at = [one.name for one in found].index("device") + 1
        return [*found[:at], *_own_options(), *found[at:]]

    @classmethod
    def of(cls, **given: Any) -> "Reproduce":
        """Return the command; experiments' own options are collected in `own`."""
        known = {one.name for one in dataclasses.fields(cls)}
        own = {
            name.replace("_", "-"): value
            for name, value in given.items()
            if name not in known and value is not None
        }
        return cls(**{name: value for name, value in given.items() if name in known}, own=own)

    def run(self) -> None:
        """Make one figure or table after the other."""
        if self.list_:
            self._list(_chosen(self.names or list(experiments.EXPERIMENTS)))
            return
        requests = self._requests(_chosen(self.names))
        folders = self._folders(requests)
        if self.dry_run:
            plans = [_plan(name, request, folders[name]) for name, request in requests.items()]
            if self.json:
                _render.as_json(plans)
            for plan in () if self.json else plans:
                _render.plan(plan, json=False)
            return
        for name, request in requests.items():  # before the first of all is made
            experiments.EXPERIMENTS[name].check_needs(request)
            _warn_of_days(name, request)
        records: list[Record] = []
        begun: dict[str, Path] = {}

        def resume() -> list[str]:
            left = list(requests)[len(records) :]
            return [
                resume_command(begun.get(name) or folders[name], {*requests} - {name})
                for name in left
            ]

        with resumable(begun, resume, self.out):
            for name, request in requests.items():
                with reports(f"reproduce {name}") as report:
                    asked = dataclasses.replace(request, progress=report)
                    note = partial(begun.__setitem__, name)
                    records.append(reproduce_experiment(name, folders[name], asked, begun=note))
                if not self.json:
                    _show_outcome(records[-1])
        if self.json:
            _render.as_json(records)
        if any(record["verdict"] == "differs" for record in records):
            raise typer.Exit(1)

    def _list(self, names: Sequence[str]) -> None:
        listed = [experiments.EXPERIMENTS[name] for name in names]
        if self.json:
            keys = ("name", "title", "published", "groups")
            _render.as_json([{key: getattr(one, key) for key in keys} for one in listed])
        else:
            rows = [(one.name, one.title) for one in listed]
            _render.put(_render.table(("name", "title"), rows, left=2))

    def _requests(self, names: Sequence[str]) -> dict[str, Request]:
        """Return what is asked of each experiment; raise `JomaError` if one cannot do it.

        Only training asks torch for a device.
        """
        asked: dict[str, Any] = {
            "seed": self.seed,
            "scale": self.scale or "",
            "options": self.own,
            "groups": tuple(self.group or ()),
            "reference": self.reference,
            "device": "cpu" if self.device == "auto" else self.device,
        }
        with naming_options():
            found = {name: experiments.EXPERIMENTS[name].request(**asked) for name in names}
        if self.device == "cpu" or not any(request.scale for request in found.values()):
            return found
        device = cmd.chosen_device(self.device)
        return {
            name: dataclasses.replace(request, device=device) if request.scale else request
            for name, request in found.items()
        }

    def _folders(self, requests: Mapping[str, Request]) -> dict[str, Path | None]:
        """Return where each goes, all checked before the first is made; None is the default."""
        if self.out is None:
            return dict.fromkeys(requests)
        several = len(requests) > 1
        folders = {name: self.out / name if several else self.out for name in requests}
        for name, request in requests.items():
            restart = not experiments.EXPERIMENTS[name].resumable
            check_folder(folders[name], name, request.config, restart=restart)
        return dict(folders)


def _own_options() -> list[inspect.Parameter]:
    """Return the experiments' own options: numbers first, and first what most experiments have."""
    found: dict[str, dict[str, Option | ChoiceOption]] = {}
    for name, experiment in experiments.EXPERIMENTS.items():
        for one in experiment.options:
            found.setdefault(one.name, {})[name] = one
    parameters = []
    for name, owners in found.items():
        first = next(iter(owners.values()))
        kind, metavar, parser = str, "NAME", None
        if isinstance(first, Option):
            kind, metavar = first.kind, "N" if first.kind is int else "X"
            parser = cmd.whole(1) if first.kind is int else cmd.positive
        what = typer.Option(
            f"--{name}", metavar=metavar, help=f"{_option_help(owners)}.", parser=parser
        )
        parameter = inspect.Parameter(
            name.replace("-", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, what],
        )
        parameters.append((kind is str, -len(owners), parameter))
    return [one for *_, one in sorted(parameters, key=lambda it: it[:2])]


def _option_help(owners: Mapping[str, Option | ChoiceOption]) -> str:
    """Return what an option is, of which experiments, and which values were published."""
    text = f"Of {_and(owners)}: {next(iter(owners.values())).help}"
    for name, one in owners.items():
        if isinstance(one, Option) and one.published:
            published = _and(
                f"{value:.0e}".replace("e-0", "e-") if value < 1 else f"{value:g}"
                for value in one.published
            )
            text += "," if len(owners) == 1 else f"; of {name}"
            text += f" published {published}"
    return text


def _chosen(names: Sequence[str] | None) -> list[str]:
    if not names:
        raise JomaError(f"say what to reproduce; available: {', '.join(experiments.EXPERIMENTS)}")
    check_known("experiment", names, experiments.EXPERIMENTS)
    return list(dict.fromkeys(names))


def reproduce_experiment(
    name: str,
    folder: Path | None,
    request: Request,
    *,
    resume: bool = False,
    begun: Callable[[Path], None] = lambda _: None,
) -> Record:
    """Make one figure or table, by its name; return what `reproduce --json` prints of it.

    Another process can call it: all arguments are plain values.

    Args:
        name: The name of the experiment.
        folder: The run folder, or None for the default.
        request: What is asked of it.
        resume: Whether a run in the folder is resumed although it has finished. One that trains
            networks always is; another is started over where it did not finish.
        begun: Is called with the run folder once it is there.
    """
    from joma.runs import Run

    experiment = experiments.EXPERIMENTS[name]
    start = time.perf_counter()
    resumed = resume or experiment.resumable
    enter = Run.resume if resumed else partial(Run.create, existing="restart")
    run = enter(name, request.config, out=folder, device=request.device)
    begun(run.path)
    with run.locked(), closing(run) as outcome:
        result = experiment.reproduce(run, request)
        outcome.update(verdict=result.verdict.value, finding=result.finding)
    return {
        "name": name,
        "title": experiment.title,
        "published": experiment.published,
        **request.config,
        "device": request.device,
        "groups": list(request.groups),
        "finding": result.finding,
        "verdict": result.verdict.value,
        "table": list(result.table),
        "paragraphs": list(result.paragraphs),
        "run": str(run.path),
        "figures": [str(path) for path in run.figures],
        "tables": run.tables,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _show_outcome(record: Record) -> None:
    """Print how an experiment ended, its table, and where its pictures are."""
    from rich.text import Text

    _render.put(Text.assemble((record["name"], "bold"), f"  {printable(record['title'])}"))
    _render.paragraph(f"Published: {record['published']}")
    verdict = record["verdict"]
    finding = Text(f"Here: {printable(record['finding'])}  ")
    if verdict in ("agrees", "differs"):
        finding.append(mark(verdict == "agrees")).append(" ")
    _render.paragraph(finding.append(verdict, style="bold"))
    if record["table"]:
        _render.put("")
        _put_numbers(record["table"])
        _render.put("")
    for text in record["paragraphs"]:
        _render.paragraph(text)
    for path in record["figures"] or [record["run"]]:
        typer.echo(f"  {path}")  # whole, whatever the width, so that it can be copied
    typer.echo()


def _put_numbers(rows: Sequence[Record]) -> None:
    """Print an experiment's table, or its rows one under the other where that is too wide.

    Cells stay on one line, for a number in two pieces is none; headings may break.
    """
    from rich.padding import Padding

    cells = [[cell(plain(value)) for value in row.values()] for row in rows]
    table, window = _render.table(list(rows[0]), cells), _render.console()
    for column, name, values in zip(table.columns, rows[0], zip(*cells, strict=True), strict=True):
        widest = max(map(len, [*printable(name).split(), *values]))
        column.header = textwrap.fill(printable(name), widest)
        column.no_wrap, column.min_width = True, widest
        words = any(isinstance(row[name], str) for row in rows)
        column.justify = "left" if words else "right"
    if window.measure(table).minimum <= window.width - 2:
        _render.put(Padding(table, (0, 0, 0, 2), expand=False))
        return
    for row, shown in zip(rows, cells, strict=True):
        for number, (name, value) in enumerate(zip(row, shown, strict=True)):
            _render.paragraph(f"{name}: {value}", 4 if number else 2)


def _warn_of_days(name: str, request: Request) -> None:
    """Say on standard error that what was made for a GPU is about to be done on a CPU."""
    scales = experiments.EXPERIMENTS[name].scales
    if request.device == "cpu" and request.scale and "CPU" not in scales[request.scale].device:
        words = (
            f"{name} at scale {request.scale} was made for a GPU; on this CPU what is not done may "
            "take days: --dry-run says what each scale takes"
        )
        _render.say(words, err=True)


def _plan(name: str, request: Request, folder: Path | None) -> Record:
    from joma.runs import default_folder, is_run

    experiment = experiments.EXPERIMENTS[name]
    plan = {
        "name": name,
        "title": experiment.title,
        "run": str(folder or default_folder(name)),
        "device": request.device,
    }
    if not request.scale:
        return {**plan, "about_seconds": experiment.seconds, "memory": experiment.memory}
    takes = experiment.takes(request)
    share = len(request.groups) / len(experiment.groups) if request.groups else 1.0
    chosen = takes[request.scale]
    known = ("CPU" in chosen.device) == (request.device == "cpu")
    return {
        **plan,
        "about_seconds": chosen.seconds * share if known else None,
        "memory": chosen.memory,
        "scale": request.scale,
        "scales": {
            scale: {"about_seconds": it.seconds * share, "on": it.device, "memory": it.memory}
            for scale, it in takes.items()
        },
        "options": dict(request.options),
        "groups": list(request.groups or experiment.groups),
        "all_groups": list(experiment.groups),
        "continues": experiment.resumable and folder is not None and is_run(folder),
    }

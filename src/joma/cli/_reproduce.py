"""`joma reproduce`, with the options that the experiments declare."""

import contextlib
import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from joma import experiments
from joma.cli import _show
from joma.cli._errors import command_line, reason
from joma.cli._experiments import show_outcome, show_plans, warn
from joma.cli._folders import check_folder, closing, interruptible, of_option, writing_to
from joma.cli._options import Json, Out, Seed, chosen_device, device_option, option, positive, whole
from joma.cli._progress import reports
from joma.common.checks import check_known
from joma.errors import JomaError
from joma.experiments import ChoiceOption, Option, Request


def _names(incomplete: str) -> list[str]:
    return [name for name in experiments.EXPERIMENTS if name.startswith(incomplete)]


def _scales(incomplete: str = "") -> list[str]:
    found = dict.fromkeys(scale for one in experiments.EXPERIMENTS.values() for scale in one.scales)
    return [scale for scale in found if scale.startswith(incomplete)]


def _default_scale() -> str:
    defaults = (one.default_scale for one in experiments.EXPERIMENTS.values() if one.scales)
    return " or ".join(dict.fromkeys(defaults))


def _and(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _reference() -> str:
    """Return what --reference may be, and of which experiments."""
    owners: dict[str, list[str]] = {}
    for name, experiment in experiments.EXPERIMENTS.items():
        if experiment.reference:
            owners.setdefault(experiment.reference, []).append(name)
    return "; ".join(f"Of {_and(names)}: {what}" for what, names in owners.items())


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help=f"What to make: {', '.join(_names(''))}.", autocompletion=_names
        ),
    ] = None,
    scale: Annotated[
        str | None,
        option(
            "--scale",
            "SCALE",
            f"Size of what trains networks: {', '.join(_scales())}; "
            f"{_default_scale()} if not given. --dry-run says what each takes.",
            autocompletion=_scales,
        ),
    ] = None,
    device: Annotated[
        str,
        device_option(
            "Where networks are trained: cpu, cuda, or auto, which takes cuda if it is there."
        ),
    ] = "auto",
    group: Annotated[
        list[str] | None,
        option(
            "--group",
            "GROUP",
            "Do this part of the work alone; may be given several times. "
            "--dry-run says which there are.",
        ),
    ] = None,
    reference: Annotated[Path | None, option("--reference", "FOLDER", f"{_reference()}.")] = None,
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say what would be made, where, and what it takes, and stop."
        ),
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List what can be made, and stop.")] = False,
    **own: Any,
) -> None:
    """Make figures or tables of the papers from scratch, next to what was published.

    Each gets its own run folder; with --out and several names, DIR/NAME. What trains networks
    resumes where it was stopped when --out is its folder. Each is said to agree, to differ, to be
    not comparable (nothing was published of that scale or text) or to be incomplete. Exits with 1
    when one differs.
    """
    if list_:
        _list(_chosen(names or _names("")), json)
        return
    asked: dict[str, Any] = {
        "seed": seed,
        "scale": scale or "",
        "options": {
            name.replace("_", "-"): value for name, value in own.items() if value is not None
        },
        "groups": tuple(group or ()),
        "reference": reference,
    }
    requests = _on_device(_requests(_chosen(names), asked, device), device)
    work = _Work(requests, _folders(requests, out), out, _flags(asked, device, json))
    if dry_run:
        show_plans(requests, work.folders, json)
        return
    for name, request in requests.items():  # before the first of all is made
        experiments.EXPERIMENTS[name].check_needs(request)
    warn(requests)
    records = []
    with interruptible(work.begun.values(), work.how_to_resume):
        for name in requests:
            records.append(_make(name, work))
            if not json:
                show_outcome(records[-1])
    if json:
        _show.as_json(records)
    if any(record["verdict"] == "differs" for record in records):
        raise typer.Exit(1)


def _own_options() -> Iterator[inspect.Parameter]:
    """Yield the experiments' own options: numbers first, and first what most experiments have."""
    found: dict[str, dict[str, Option | ChoiceOption]] = {}
    for name, experiment in experiments.EXPERIMENTS.items():
        for one in experiment.options:
            found.setdefault(one.name, {})[name] = one
    words = {
        name: isinstance(next(iter(own.values())), ChoiceOption) for name, own in found.items()
    }
    for name in sorted(found, key=lambda name: (words[name], -len(found[name]))):
        own = found[name]
        first = next(iter(own.values()))
        kind, metavar, parser = str, "NAME", None
        if isinstance(first, Option):
            whole_numbers = first.kind is int
            kind, metavar = first.kind, "N" if whole_numbers else "X"
            parser = whole(1) if whole_numbers else positive
        what = option(f"--{name}", metavar, f"{_option_help(own)}.", parser=parser)
        yield inspect.Parameter(
            name.replace("-", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, what],
        )


def _option_help(own: Mapping[str, Option | ChoiceOption]) -> str:
    """Return what an option is, of which experiments, and which values were published."""
    text = f"Of {_and(own)}: {next(iter(own.values())).help}"
    for name, one in own.items():
        if isinstance(one, Option) and one.published:
            published = _and(
                f"{value:.0e}".replace("e-0", "e-") if value < 1 else f"{value:g}"
                for value in one.published
            )
            text += "," if len(own) == 1 else f"; of {name}"
            text += f" published {published}"
    return text


def _signature() -> inspect.Signature:
    """Return the signature of the command with the experiments' own options after --device."""
    signature = inspect.signature(reproduce)
    parameters = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for one in signature.parameters.values()
        if one.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    at = [one.name for one in parameters].index("device") + 1
    parameters[at:at] = _own_options()
    return signature.replace(parameters=parameters)


reproduce.__signature__ = _signature()  # type: ignore[attr-defined]


def _list(names: Sequence[str], json: bool) -> None:
    listed = [experiments.EXPERIMENTS[name] for name in names]
    if json:
        fields = ("name", "title", "published", "groups")
        _show.as_json([{name: getattr(one, name) for name in fields} for one in listed])
        return
    rows = _show.table("name", "title")
    for one in listed:
        rows.add_row(one.name, one.title)
    _show.put(rows)


@dataclass(frozen=True)
class _Work:
    """What one command makes, where, and how far it is.

    Attributes:
        requests: What is asked of each experiment.
        folders: The run folder of each; None for the default.
        out: The folder given with --out.
        flags: The other options, as the user would type them.
        begun: The run folders there are.
        done: The experiments that are finished.
    """

    requests: Mapping[str, Request]
    folders: Mapping[str, Path | None]
    out: Path | None
    flags: Sequence[str]
    begun: dict[str, Path] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def how_to_resume(self) -> str:
        """Return the commands that do what is left, each on a line with words before it."""
        if not self.left:
            return "Nothing is left to do."
        first, *rest = self.commands()
        resumable = experiments.EXPERIMENTS[self.left[0]].resumable
        words = "Continue with" if resumable else "Run it again with"
        return "\n".join([f"{words}: {first}", *(f"Then: {command}" for command in rest)])

    @property
    def left(self) -> list[str]:
        """Return the experiments that are not finished, in their order."""
        return [name for name in self.requests if name not in self.done]

    def commands(self) -> list[str]:
        """Return the commands that do what is left; one that has begun resumes in its folder."""
        left = self.left
        if self.out is not None:
            return [self._command(left, self.folders[left[0]] if len(left) == 1 else self.out)]
        first = self._command(left[:1], self.begun.get(left[0]))
        return [first, self._command(left[1:], None)] if left[1:] else [first]

    def _command(self, names: Sequence[str], out: Path | None) -> str:
        where = [] if out is None else ["--out", str(out)]
        return command_line(["reproduce", *names, *self.flags, *where])


def _make(name: str, work: _Work) -> dict[str, Any]:
    """Make one figure or table."""
    folder = work.folders[name]
    with writing_to(folder), _resume_hint(name, work), reports(f"reproduce {name}") as report:
        record = reproduce_experiment(
            name,
            folder,
            dataclasses.replace(work.requests[name], progress=report),
            begun=lambda path: work.begun.update({name: path}),
        )
    work.done.add(name)
    return record


def reproduce_experiment(
    name: str,
    folder: Path | None,
    request: Request,
    *,
    resume: bool = False,
    begun: Callable[[Path], None] = lambda _: None,
) -> dict[str, Any]:
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
    from joma.runs import Run, is_run

    experiment = experiments.EXPERIMENTS[name]
    start = time.perf_counter()
    resumed = resume or experiment.resumable
    enter = Run.resume if resumed else partial(Run.create, existing="restart")
    run = enter(name, request.config, out=folder, device=request.device)
    begun(run.path)
    with run.locked(), closing(run) as outcome:
        try:
            result = experiment.reproduce(run, request)
        except ValueError as error:
            # What is in the folder, or that it was removed, is for the user to fix.
            if experiment.resumable or not is_run(run.path):
                raise
            raise RuntimeError(f"experiment {name} failed") from error
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":
                raise
            raise JomaError(
                f"the GPU has too little memory free for {name}; a smaller --scale or --hidden "
                "needs less, and --device cpu none of it"
            ) from error
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
        "table": [{key: _plain(value) for key, value in row.items()} for row in result.table],
        "paragraphs": list(result.paragraphs),
        "run": str(run.path),
        "figures": [str(path) for path in run.figures],
        "tables": run.tables,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _plain(value: Any) -> Any:
    """Return a cell as JSON has it: NumPy's numbers as Python's, None for what is not finite."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _resume_hint(name: str, work: _Work) -> Iterator[None]:
    """Report an `OSError` of work that has begun together with how to resume."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if name not in work.begun:
            raise
        where = error.filename or work.begun[name]
        commands = " and then ".join(f"`{command}`" for command in work.commands())
        raise JomaError(
            f"{name} stopped, {where}: {reason(error)}; when that is fixed, resume with {commands}"
        ) from error


def _chosen(names: Sequence[str] | None) -> list[str]:
    if not names:
        raise JomaError(f"say what to reproduce; available: {', '.join(experiments.EXPERIMENTS)}")
    check_known("experiment", names, experiments.EXPERIMENTS)
    return list(dict.fromkeys(names))


def _requests(names: Sequence[str], asked: Mapping[str, Any], device: str) -> dict[str, Request]:
    """Return what is asked of each experiment; raise `JomaError` if one cannot do it."""
    on = "cpu" if device == "auto" else device
    with of_option():
        return {name: experiments.EXPERIMENTS[name].request(**asked, device=on) for name in names}


def _on_device(requests: Mapping[str, Request], device: str) -> dict[str, Request]:
    """Return the requests with the device that is there; only training asks torch for it."""
    if device == "cpu" or not any(request.scale for request in requests.values()):
        return dict(requests)
    found = chosen_device(device)
    return {
        name: dataclasses.replace(request, device=found) if request.scale else request
        for name, request in requests.items()
    }


def _folders(requests: Mapping[str, Request], out: Path | None) -> Mapping[str, Path | None]:
    """Return where each goes, all checked before the first is made; None is the default."""
    if out is None:
        return dict.fromkeys(requests)
    folders = {name: out if len(requests) == 1 else out / name for name in requests}
    for name, request in requests.items():
        restart = not experiments.EXPERIMENTS[name].resumable
        check_folder(folders[name], name, request.config, restart=restart)
    return folders


def _flags(asked: Mapping[str, Any], device: str, json: bool) -> list[str]:
    """Return what the user asked for apart from names and --out, as it is typed."""
    flags = {"scale": [asked["scale"]] if asked["scale"] else []}
    flags["device"] = [device] if device != "auto" else []
    flags |= {name: [value] for name, value in asked["options"].items()}
    flags["group"] = asked["groups"]
    flags["reference"] = [] if asked["reference"] is None else [asked["reference"]]
    flags["seed"] = [asked["seed"]] if asked["seed"] else []
    words = [word for name, values in flags.items() for v in values for word in (f"--{name}", v)]
    return [*map(str, words), *(["--json"] if json else [])]

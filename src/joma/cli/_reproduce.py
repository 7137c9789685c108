"""`joma reproduce`, with the options that the experiments declare."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from joma import experiments
from joma.cli import _show
from joma.cli._errors import command_line, reason, unknown
from joma.cli._experiments import reproduce_experiment, show_outcome
from joma.cli._folders import (
    checked_out,
    checked_restart,
    interruptible,
    of_option,
    same_settings,
    writing_to,
)
from joma.cli._options import Json, Out, Seed, chosen_device, device_option, option, positive, whole
from joma.cli._progress import reports
from joma.common.text import duration
from joma.errors import JomaError
from joma.experiments import ChoiceOption, Experiment, Option, Request, Scale


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
        _show_plans(requests, work.folders, json)
        return
    for name, request in requests.items():  # before the first of all is made
        experiments.EXPERIMENTS[name].check_needs(request)
    _warn(requests)
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
    for name in names:
        if name not in experiments.EXPERIMENTS:
            raise unknown("experiment", name, experiments.EXPERIMENTS)
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


def _folders(requests: Mapping[str, Request], out: Path | None) -> dict[str, Path | None]:
    """Return where each goes, all checked before the first is made; None is the default."""
    if out is None:
        return dict.fromkeys(requests)
    folders: dict[str, Path | None] = {}
    for name, request in requests.items():
        folders[name] = checked_out(out if len(requests) == 1 else out / name, name)
        if experiments.EXPERIMENTS[name].resumable:
            same_settings(folders[name], name, request.config)
        else:
            checked_restart(folders[name], name, request.config)
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


def _show_plans(
    requests: Mapping[str, Request], folders: Mapping[str, Path | None], json: bool
) -> None:
    """Print what would be made, where, and what it takes."""
    plans = [_plan(name, request, folders[name]) for name, request in requests.items()]
    if json:
        _show.as_json(plans)
        return
    for plan in plans:
        typer.echo(f"{plan['name']}: {plan['title']} → {plan['run']}")
        for line in _lines(plan):
            typer.echo(f"  {line}")
    known = [plan["about_seconds"] for plan in plans if plan["about_seconds"] is not None]
    if known and len(plans) > 1:
        others = [plan["name"] for plan in plans if plan["about_seconds"] is None]
        without = f", without {', '.join(others)}" if others else ""
        typer.echo(f"Together about {duration(sum(known))}{without}.")


def _warn(requests: Mapping[str, Request]) -> None:
    """Say on standard error what was made for a GPU and is about to be done on a CPU."""
    for name, request in requests.items():
        experiment = experiments.EXPERIMENTS[name]
        if request.device != "cpu" or not request.scale:
            continue
        if _kind(experiment.scales[request.scale]) == "cpu":
            continue
        words = (
            f"{name} at scale {request.scale} was made for a GPU; on this CPU what is not done may "
            "take days"
        )
        fitting = [scale for scale, it in experiment.scales.items() if _kind(it) == "cpu"]
        if fitting:  # the largest of them
            seconds = experiment.takes(request)[fitting[-1]].seconds * _share(experiment, request)
            words += f"; --scale {fitting[-1]} takes about {duration(seconds)}"
        typer.echo(words, err=True)


def _kind(scale: Scale) -> str:
    """Return the kind of device that a scale was measured on, as a request names it."""
    return "cpu" if "CPU" in scale.device else "cuda"


def _share(experiment: Experiment, request: Request) -> float:
    """Return the share of an experiment that is asked for, its groups being equal parts."""
    return len(request.groups) / len(experiment.groups) if request.groups else 1.0


def _plan(name: str, request: Request, folder: Path | None) -> dict[str, Any]:
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
    takes, share = experiment.takes(request), _share(experiment, request)
    chosen = takes[request.scale]
    return {
        **plan,
        "about_seconds": chosen.seconds * share if _kind(chosen) == request.device else None,
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


def _lines(plan: Mapping[str, Any]) -> list[str]:
    if "scale" not in plan:
        return [f"about {duration(plan['about_seconds'])}, memory {plan['memory']}"]
    lines = [
        f"{scale}: about {duration(takes['about_seconds'])} on {takes['on']}, "
        f"memory {takes['memory']}{_remark(plan) if scale == plan['scale'] else ''}"
        for scale, takes in plan["scales"].items()
    ]
    lines.append(f"device: {plan['device']}")
    lines += [
        f"{name}: {'as the scale has it' if value is None else value}"
        for name, value in plan["options"].items()
    ]
    if plan["groups"]:
        of = "" if plan["groups"] == plan["all_groups"] else f" of {', '.join(plan['all_groups'])}"
        lines.append(f"groups: {', '.join(plan['groups'])}{of}")
    return [*lines, "resumes what is there"] if plan["continues"] else lines


def _remark(plan: Mapping[str, Any]) -> str:
    """Return what is said of the scale that is asked for."""
    if plan["about_seconds"] is not None:
        return " (this one)"
    if plan["device"] == "cpu":
        return " (this one; on cpu far longer: not measured)"
    return f" (this one; not measured on {plan['device']})"

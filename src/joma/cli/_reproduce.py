"""`joma reproduce`."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _plan, _show, _work
from joma.cli._edge import (
    checked_out,
    checked_restart,
    command_line,
    interruptible,
    reason,
    same_settings,
    unknown,
    writing_to,
)
from joma.cli._options import Json, Out, Seed, one_of, positive, whole
from joma.cli._progress import reports
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.experiments import Request


def _names(incomplete: str) -> list[str]:
    return [name for name in _plan.NAMES if name.startswith(incomplete)]


def _scales(incomplete: str) -> list[str]:
    return [scale for scale in _plan.SCALES if scale.startswith(incomplete)]


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help=f"What to make: {', '.join(_plan.NAMES)}.", autocompletion=_names
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale",  # written out: some versions of typer would take the metavar
            metavar="SCALE",
            help=f"Size of what trains networks: {', '.join(_plan.SCALES)}; "
            f"{_plan.DEFAULT_SCALE} if not given. --dry-run says what each takes.",
            autocompletion=_scales,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",  # written out: some versions of typer would take the metavar
            metavar="DEVICE",
            parser=one_of("auto", "cpu", "cuda"),
            help="Where networks are trained: cpu, cuda, or auto, which takes cuda if it is there.",
        ),
    ] = "auto",
    learning_rate: Annotated[
        float | None,
        typer.Option(metavar="X", parser=positive, help=f"{_plan.OPTIONS['learning-rate']}."),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(metavar="N", parser=whole(1), help=f"{_plan.OPTIONS['hidden']}.")
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(
            "--corpus",  # written out: some versions of typer would take the metavar
            metavar="NAME",
            help=f"{_plan.OPTIONS['corpus']}.",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",  # written out: some versions of typer would take the metavar
            metavar="NAME",
            help=f"{_plan.OPTIONS['optimizer']}.",
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group",  # written out: some versions of typer would take the metavar
            metavar="GROUP",
            help="Do this part of the work alone; may be given several times. "
            "--dry-run says which there are.",
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference",  # written out: some versions of typer would take the metavar
            metavar="FOLDER",
            help=f"{_plan.REFERENCE}.",
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

    Each gets its own run folder; with --out and several names, DIR/NAME. What trains networks
    goes on where it was stopped when --out is its folder. Each is said to agree, to differ, to be
    not comparable (nothing was published of that scale or text) or to be incomplete. Exits with 1
    when one differs.
    """
    options = {
        "learning-rate": learning_rate,
        "hidden": hidden,
        "corpus": corpus,
        "optimizer": optimizer,
    }
    asked: dict[str, Any] = {
        "seed": seed,
        "scale": scale or "",
        "options": {name: value for name, value in options.items() if value is not None},
        "groups": tuple(group or ()),
        "reference": reference,
    }
    requests = _on_device(_requests(_chosen(names), asked, device), device)
    work = _Work(requests, _folders(requests, out), out, _flags(asked, device, json))
    if dry_run:
        _plan.show(requests, work.folders, json)
        return
    _check_needs(requests)
    _plan.warn(requests)
    records = []
    with interruptible(work.begun.values(), work.how_to_go_on):
        for name in requests:
            records.append(_make(name, work))
            if not json:
                _show.outcome(records[-1])
    if json:
        _show.as_json(records)
    if any(record["verdict"] == "differs" for record in records):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Work:
    """What one command makes, where, and how far it is.

    Attributes:
        requests: what is asked of each experiment.
        folders: where each goes; None is the default.
        out: what the user said about that.
        flags: what else the user said, as it is typed.
        begun: the run folders there are.
        done: the experiments that are finished.
    """

    requests: Mapping[str, "Request"]
    folders: Mapping[str, Path | None]
    out: Path | None
    flags: Sequence[str]
    begun: dict[str, Path] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def how_to_go_on(self) -> str:
        """The commands that do what is left, each on a line with words before it."""
        from joma.experiments import EXPERIMENTS

        if not self.left:
            return "Nothing is left to do."
        first, *rest = self.commands()
        words = "Continue with" if EXPERIMENTS[self.left[0]].resumable else "Run it again with"
        return "\n".join([f"{words}: {first}", *(f"Then: {command}" for command in rest)])

    @property
    def left(self) -> list[str]:
        """The experiments that are not finished, in their order."""
        return [name for name in self.requests if name not in self.done]

    def commands(self) -> list[str]:
        """The commands that do what is left; one that has begun goes on in its folder."""
        left = self.left
        if self.out is not None:
            return [self._command(left, self.folders[left[0]] if len(left) == 1 else self.out)]
        first = self._command(left[:1], self.begun.get(left[0]))
        return [first, self._command(left[1:], None)] if left[1:] else [first]

    def _command(self, names: Sequence[str], out: Path | None) -> str:
        where = [] if out is None else ["--out", str(out)]
        return command_line(["reproduce", *names, *self.flags, *where])


def _make(name: str, work: _Work) -> dict[str, Any]:
    """Makes one figure or table."""
    folder = work.folders[name]
    with writing_to(folder), _mendable(name, work), reports(f"reproduce {name}") as report:
        record = _work.reproduce_experiment(
            name,
            folder,
            dataclasses.replace(work.requests[name], progress=report),
            begun=lambda path: work.begun.update({name: path}),
        )
    work.done.add(name)
    return record


@contextlib.contextmanager
def _mendable(name: str, work: _Work) -> Iterator[None]:
    """What the system has against work that has begun is said with how to go on."""
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
            f"{name} stopped, {where}: {reason(error)}; when that is mended, go on with {commands}"
        ) from error


def _chosen(names: Sequence[str] | None) -> list[str]:
    from joma.experiments import EXPERIMENTS

    if not names:
        raise JomaError(f"say what to reproduce; available: {', '.join(EXPERIMENTS)}")
    for name in names:
        if name not in EXPERIMENTS:
            raise unknown("experiment", name, EXPERIMENTS)
    return list(dict.fromkeys(names))


def _requests(names: Sequence[str], asked: Mapping[str, Any], device: str) -> dict[str, "Request"]:
    """What is asked of each experiment, if each can do it."""
    from joma.experiments import EXPERIMENTS

    try:
        return {
            name: EXPERIMENTS[name].request(**asked, device="cpu" if device == "auto" else device)
            for name in names
        }
    except JomaError as error:
        raise JomaError(f"--{error}") from error  # begins with the name of what was given


def _on_device(requests: Mapping[str, "Request"], device: str) -> dict[str, "Request"]:
    """The requests on the device that is there; torch is asked only for what trains networks."""
    if device == "cpu" or not any(request.scale for request in requests.values()):
        return dict(requests)
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and found == "cpu":
        raise JomaError("--device must be cpu or auto where torch sees no GPU, got 'cuda'")
    return {
        name: dataclasses.replace(request, device=found) if request.scale else request
        for name, request in requests.items()
    }


def _check_needs(requests: Mapping[str, "Request"]) -> None:
    """Refuses what lacks something before the first of all is made."""
    from joma.experiments import EXPERIMENTS

    for name, request in requests.items():
        EXPERIMENTS[name].needs(request)


def _folders(requests: Mapping[str, "Request"], out: Path | None) -> dict[str, Path | None]:
    """Where each goes, all checked before the first is made; None is the default."""
    from joma.experiments import EXPERIMENTS

    if out is None:
        return dict.fromkeys(requests)
    folders: dict[str, Path | None] = {}
    for name, request in requests.items():
        folders[name] = checked_out(out if len(requests) == 1 else out / name, name)
        if EXPERIMENTS[name].resumable:
            same_settings(folders[name], name, request.config)
        else:
            checked_restart(folders[name], name, request.config)
    return folders


def _flags(asked: Mapping[str, Any], device: str, json: bool) -> list[str]:
    """What the user asked for beside names and --out, as it is typed."""
    flags = {"scale": [asked["scale"]] if asked["scale"] else []}
    flags["device"] = [device] if device != "auto" else []
    flags |= {name: [value] for name, value in asked["options"].items()}
    flags["group"] = asked["groups"]
    flags["reference"] = [] if asked["reference"] is None else [asked["reference"]]
    flags["seed"] = [asked["seed"]] if asked["seed"] else []
    words = [word for name, values in flags.items() for v in values for word in (f"--{name}", v)]
    return [*map(str, words), *(["--json"] if json else [])]

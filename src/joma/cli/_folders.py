"""The run folder of a command: where it may be, what it keeps, and how to resume in it."""

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma.cli._errors import command_line, reason, signal_name
from joma.common.signals import exit_code, raising_on_sigterm
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.runs import Run


_MOST_NAMED = 5
"""Files of a folder that are named one by one."""


@contextlib.contextmanager
def closing(run: "Run") -> Iterator[dict[str, Any]]:
    """Keep `outcome.json` true: running, then done with what the block put in, or how it broke.

    A block that ends in another way than done puts its own "status" in.

    It is written at the start too, so that a run that was killed, or that is started over, never
    shows an outcome that is not its own.
    """
    outcome: dict[str, Any] = {}
    try:
        run.write_json("outcome", {"status": "running"})
        yield outcome
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        # On a full disk, or where the folder is gone, this fails too; the first error counts.
        with contextlib.suppress(OSError, JomaError):
            run.write_json("outcome", {**outcome, "status": status})
        raise
    run.write_json("outcome", {"status": "done", **outcome})


@contextlib.contextmanager
def interruptible(folders: Iterable[Path], again: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C or SIGTERM, say what is in the run folders and how to resume, and leave.

    The program then exits with 130 after Ctrl-C and with 143 after SIGTERM.

    Args:
        folders: The run folders begun so far; the block may add to them.
        again: Returns the commands that resume, as lines to print.
    """
    try:
        with raising_on_sigterm():
            yield
    except KeyboardInterrupt as error:
        left = " ".join(_left(folder) for folder in folders if folder.is_dir())
        typer.echo(f"\n{signal_name(error)}. {left or 'Nothing was saved.'}", err=True)
        typer.echo(again(), err=True)
        raise typer.Exit(exit_code(error)) from None


@contextlib.contextmanager
def writing_to(out: Path | None) -> Iterator[None]:
    """Report an `OSError` of the block as one of --out, if the user gave it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if out is None:
            raise
        raise JomaError(f"cannot write to --out {out}: {reason(error)}") from error


@contextlib.contextmanager
def of_option() -> Iterator[None]:
    """Prefix errors that begin with the name of what was given, such as `out`, with dashes."""
    try:
        yield
    except JomaError as error:
        raise JomaError(f"--{error}") from error


def check_folder(
    out: Path | None,
    name: str,
    config: Mapping[str, Any] | None = None,
    *,
    restart: bool = False,
    changing: Collection[str] = (),
) -> None:
    """Raise `JomaError` unless run `name` may be written to the folder given with --out.

    Args:
        out: The folder given with --out; None for the default, which is new.
        name: Name of the run.
        config: Settings, which a run that is there must have; not checked if None.
        restart: Whether a run that is there is started over, which it can if it did not finish.
        changing: Settings that may be other numbers than before.
    """
    from joma.runs import Run, check_out, check_restart, differing, is_run

    if out is None:
        return
    with writing_to(out), of_option():
        if restart:
            check_restart(out, name)
        else:
            check_out(out, name)
    if config is None or not is_run(out) or not (out / "config.json").is_file():
        return
    asked = json.loads(json.dumps({"name": name, **config}, default=str))  # as the file has it
    other = differing(Run.open(out).config, asked, changing=changing)
    if other:
        changes = ", ".join(f"{key} {there}, not {here}" for key, (there, here) in other.items())
        raise JomaError(
            f"--out {out} holds a {name} run with other settings ({changes}); "
            "give those, or another folder"
        )


@contextlib.contextmanager
def working_in(out: Path | None) -> Iterator[list[Path]]:
    """Say on Ctrl-C or SIGTERM how to run this command again, and of --out if it cannot be written.

    Yields the list of the run folders begun so far, which the block adds to.
    """
    folders: list[Path] = []

    def again() -> str:
        words = sys.argv[1:] if out or not folders else [*sys.argv[1:], "--out", str(folders[0])]
        return f"Run it again with: {command_line(words)}"

    with interruptible(folders, again), writing_to(out):
        yield folders


@contextlib.contextmanager
def begun(
    folders: list[Path],
    name: str,
    config: Mapping[str, Any],
    out: Path | None,
    *,
    device: str = "cpu",
    resume: bool = False,
) -> Iterator[tuple["Run", dict[str, Any]]]:
    """Yield a run that the block writes to, and its outcome, as `closing` does.

    Args:
        folders: The run folders begun so far, which this one is added to.
        name: Name of the run.
        config: Its settings.
        out: The folder given with --out.
        device: What it computes on.
        resume: Whether a run in the folder is resumed; otherwise started over if not finished.
    """
    from joma.runs import Run

    enter = Run.resume if resume else partial(Run.create, existing="restart")
    run = enter(name, config, out=out, device=device)
    folders.append(run.path)
    with run.locked(), closing(run) as outcome:
        yield run, outcome


def _left(folder: Path) -> str:
    """Return what an interrupted command left in a run folder, in one sentence."""
    try:
        status = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError, TypeError):
        status = "unknown"
    if status == "done":
        return f"Saved: {folder}."
    found = (path for path in sorted(folder.glob("**/[!.]*")) if path.is_file())
    files = [path for path in found if path.name != "manifest.json"]
    names = ", ".join(str(path.relative_to(folder)) for path in files)
    holds = "empty" if not files else names if len(files) <= _MOST_NAMED else f"{len(files)} files"
    return f"Incomplete: {folder} ({holds})."

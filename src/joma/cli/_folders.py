"""The run folder of a command: where it may be, what it keeps, and how to resume in it."""

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma.cli._errors import CLOSEST, command_line, reason, signal_name
from joma.common.signals import exit_code, raising_on_sigterm
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.runs import Run


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


def same_again(out: Path | None, folders: Sequence[Path]) -> str:
    """Return how to run this process's command again, in the folder that it has begun."""
    words = sys.argv[1:] if out or not folders else [*sys.argv[1:], "--out", str(folders[0])]
    return f"Run it again with: {command_line(words)}"


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


def checked_out(out: Path | None, name: str) -> Path | None:
    """Return the run folder given with --out, if run `name` may be written there."""
    from joma.runs import check_out

    if out is None:
        return None
    with writing_to(out), of_option():
        return check_out(out, name)


def checked_restart(
    out: Path | None, name: str, config: Mapping[str, Any] | None = None
) -> Path | None:
    """Return --out if run `name` may be made there, or started over because it did not finish.

    Args:
        out: The folder given with --out.
        name: Name of the run.
        config: Its settings, which a run that did not finish must have; not checked if None.
    """
    from joma.runs import check_restart

    if checked_out(out, name) is None or out is None:
        return None
    with of_option():
        check_restart(out, name)
    if config is not None:
        same_settings(out, name, config)
    return out


def same_settings(
    folder: Path | None, name: str, config: Mapping[str, Any], *, changing: Collection[str] = ()
) -> None:
    """Raise `JomaError` if the folder given with --out holds run `name` with other settings.

    Args:
        folder: The folder given with --out.
        name: Name of the run.
        config: Its settings.
        changing: Settings that may be other numbers than before.
    """
    from joma.runs import Run, differing, is_run

    if folder is None or not is_run(folder) or not (folder / "config.json").is_file():
        return
    asked = json.loads(json.dumps({"name": name, **config}, default=str))  # as the file has it
    other = differing(Run.open(folder).config, asked, changing=changing)
    if other:
        changes = ", ".join(f"{key} {there}, not {here}" for key, (there, here) in other.items())
        raise JomaError(
            f"--out {folder} holds a {name} run with other settings ({changes}); "
            "give those, or another folder"
        )


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
    holds = "empty" if not files else names if len(files) <= CLOSEST else f"{len(files)} files"
    return f"Incomplete: {folder} ({holds})."

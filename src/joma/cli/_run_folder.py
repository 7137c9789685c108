"""The run folder of a command: where it may be, what it keeps, and how to resume in it."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma.cli._errors import command_line, reason, signal_name
from joma.common.signals import exit_code, raising_on_sigterm
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.runs import Run


@contextlib.contextmanager
def closing(run: "Run") -> Iterator[dict[str, Any]]:
    """Keep `outcome.json` true: running, then done with what the block put in, or how it broke.

    A block that ends in another way than done puts its own "status" in. The file is written at the
    start too, so that a run that was killed never shows an outcome that is not its own.
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
def resumable(
    begun: Mapping[str, Path], resume: Callable[[], Sequence[str]], out: Path | None = None
) -> Iterator[None]:
    """On Ctrl-C, SIGTERM or a full disk, say what is in the run folders and how to resume.

    The program exits with 130 after Ctrl-C, with 143 after SIGTERM and with 2 where it cannot
    write.

    Args:
        begun: The run folders begun so far, by what is made in them; the block adds to them.
        resume: Returns the commands that do what is left.
        out: The folder given with --out.
    """
    try:
        with raising_on_sigterm():
            yield
    except KeyboardInterrupt as error:
        left = " ".join(_left(folder) for folder in begun.values() if folder.is_dir())
        typer.echo(f"\n{signal_name(error)}. {left or 'Nothing was saved.'}", err=True)
        for number, command in enumerate(resume()):
            typer.echo(f"{'Then' if number else 'Continue with'}: {command}", err=True)
        raise typer.Exit(exit_code(error)) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        if begun:
            name, folder = list(begun.items())[-1]
            commands = " and then ".join(f"`{command}`" for command in resume())
            raise JomaError(
                f"{name} stopped, {error.filename or folder}: {reason(error)}; when that is fixed, "
                f"resume with {commands}"
            ) from error
        with writing_to(out):
            raise


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
def naming_options(*names: str) -> Iterator[None]:
    """Put dashes before errors that begin with the name of an argument that is an option here.

    Args:
        names: The names, as options spell them; all names if none is given.
    """
    try:
        yield
    except JomaError as error:
        first, _, rest = str(error).partition(" ")
        option = first.replace("_", "-")
        if names and option not in names:
            raise
        raise JomaError(f"--{option} {rest}") from error


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
    with writing_to(out), naming_options():
        (check_restart if restart else check_out)(out, name)
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


def resume_command(folder: Path | None, without: Collection[str] = ()) -> str:
    """Return the command line that was typed, with another run folder.

    Args:
        folder: The run folder; None for the default.
        without: Words that are left out.
    """
    words = [word for word in sys.argv[1:] if word not in without and word[:6] != "--out="]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    line = command_line([*words, *([] if folder is None else ["--out", str(folder)])])
    several = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return line if several == "1" else f"torchrun --nproc-per-node {several} -m {line}"


Begin = Callable[..., contextlib.AbstractContextManager[tuple["Run", dict[str, Any]]]]


@contextlib.contextmanager
def working(
    name: str, config: Mapping[str, Any] | None, out: Path | None, *, resume: bool = False
) -> Iterator[Begin]:
    """Check the run folder and yield a function that begins the run in it.

    On Ctrl-C or SIGTERM the command says what it left and how to run it again. The function takes
    the device and yields the run and its outcome, as `closing` does.

    Args:
        name: Name of the run.
        config: Its settings; None where nothing will be written.
        out: The folder given with --out.
        resume: Whether a run in the folder is resumed; otherwise started over if not finished.
    """
    from joma.runs import Run

    check_folder(out, name, config, restart=not resume)
    begun: dict[str, Path] = {}

    @contextlib.contextmanager
    def begin(device: str = "cpu") -> Iterator[tuple[Run, dict[str, Any]]]:
        enter = Run.resume if resume else partial(Run.create, existing="restart")
        run = enter(name, config or {}, out=out, device=device)
        begun[name] = run.path
        with run.locked(), closing(run) as outcome:
            yield run, outcome

    with resumable(begun, lambda: [resume_command(out or begun.get(name))], out):
        yield begin


def _left(folder: Path) -> str:
    """Return what an interrupted command left in a run folder, in one sentence."""
    try:
        status = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError, TypeError):
        status = "unknown"
    return f"{'Saved' if status == 'done' else 'Incomplete'}: {folder}."

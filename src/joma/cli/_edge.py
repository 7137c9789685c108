"""The edge of the program: what the user sees when input is bad or a run is interrupted."""

import contextlib
import difflib
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from joma.cli import _defects
from joma.common.signals import EXIT_SIGINT, TerminatedError, exit_code, raising_on_sigterm
from joma.errors import JomaError, printable

BAD_INPUT = 2
INTERRUPTED = EXIT_SIGINT
READER_GONE = 141
"""What a shell reports of a program that wrote into a closed pipe."""

CLOSEST = 5
"""How many of many names an error lists."""


class OneSentenceGroup(TyperGroup):
    """Commands whose errors end in one sentence and an exit code, without a traceback.

    A `JomaError`, an `OSError` or too little memory is reported as the user's to fix, with exit
    code 2. Any other exception, a bare `ValueError` included, is reported as a defect of joma, with
    exit code 70. With `JOMA_DEBUG=1` the traceback comes first.
    """

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs the command line; ends the process unless `standalone_mode` is off."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = self._exit_code(*args, **extra)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_output()
            code = READER_GONE
        except OSError as error:  # a full disk that is noticed only as the last lines are written
            code = _refuse(f"output: {reason(error)}")
            _discard_output()
        sys.exit(code)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Parses a command line."""
        with _leaving_on_ctrl_c():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; Ctrl-C before it took over, as in its imports, is answered too."""
        with _leaving_on_ctrl_c():
            return super().invoke(ctx)

    def _exit_code(self, *args: Any, **extra: Any) -> int:
        try:
            result = super().main(*args, standalone_mode=False, **extra)
        except SystemExit as leave:
            if isinstance(leave.__context__, BrokenPipeError):  # typer would leave with 1
                raise leave.__context__ from None
            raise
        except BrokenPipeError:
            raise
        except typer.Abort:
            return INTERRUPTED
        except Exception as error:
            return _report(error)
        return result if isinstance(result, int) else 0


class PlainCommand(TyperCommand):
    """A command whose help names arguments as the user writes them, without Python types."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line: a required argument stands without braces."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"^\{(.*)\}((?:\.\.\.)?)$", r"\1\2", piece) for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments and the options."""
        for heading, kind in (("Arguments", "argument"), ("Options", "option")):
            records = [
                param.get_help_record(ctx)
                for param in self.get_params(ctx)
                if param.param_type_name == kind
            ]
            rows = [(re.sub(r" <.*>$", "", record[0]), record[1]) for record in records if record]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


@contextlib.contextmanager
def _leaving_on_ctrl_c() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo(f"\n{_what_came(error)}.", err=True)
        raise typer.Exit(exit_code(error)) from None


@contextlib.contextmanager
def interruptible(folders: Iterable[Path], again: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C or SIGTERM says what is in the run folders and how to resume, and leaves.

    The program then exits with 130 after Ctrl-C and with 143 after SIGTERM.

    Args:
        folders: run folders begun so far; they may become more meanwhile.
        again: says with which commands to go on, when it comes to that.
    """
    try:
        with raising_on_sigterm():
            yield
    except KeyboardInterrupt as error:
        left = " ".join(_left(folder) for folder in folders if folder.is_dir())
        typer.echo(f"\n{_what_came(error)}. {left or 'Nothing was saved.'}", err=True)
        typer.echo(again(), err=True)
        raise typer.Exit(exit_code(error)) from None


def _what_came(error: KeyboardInterrupt) -> str:
    return "Terminated" if isinstance(error, TerminatedError) else "Interrupted"


def same_again(out: Path | None, folders: Sequence[Path]) -> str:
    """How to run this process's command again, in the folder that it has begun."""
    words = sys.argv[1:] if out or not folders else [*sys.argv[1:], "--out", str(folders[0])]
    return f"Run it again with: {command_line(words)}"


def command_line(words: Iterable[str]) -> str:
    """What to type for a command of these words."""
    return shlex.join(["joma", *words])


def reason(error: OSError) -> str:
    """What the system says, in its own words."""
    return str(error.strerror or error)


@contextlib.contextmanager
def writing_to(out: Path | None) -> Iterator[None]:
    """What the system has against the run folder is said of --out, if the user gave it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if out is None:
            raise
        raise JomaError(f"cannot write to --out {out}: {reason(error)}") from error


def checked_out(out: Path | None, name: str) -> Path | None:
    """The run folder given with --out, if run `name` may be written there."""
    from joma.runs import check_out

    if out is None:
        return None
    with writing_to(out):
        try:
            return check_out(out, name)
        except JomaError as error:
            raise JomaError(f"--{error}") from error  # the library calls its argument `out`


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
    try:
        check_restart(out, name)
    except JomaError as error:
        raise JomaError(f"--{error}") from error  # the library calls its argument `out`
    if config is not None:
        same_settings(out, name, config)
    return out


def same_settings(
    folder: Path | None, name: str, config: Mapping[str, Any], *, changing: Collection[str] = ()
) -> None:
    """Refuses to go on with run `name` in the folder given with --out under other settings.

    Args:
        folder: given with --out.
        name: of the run.
        config: its settings.
        changing: settings that may be other numbers than before.
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


def unknown(what: str, given: str, available: Iterable[str], all_of_them: str = "") -> JomaError:
    """The error for a name that is not there: names what is, the closest first.

    Args:
        what: is named.
        given: the name.
        available: the names there are.
        all_of_them: the command that lists them all; with it only the closest are named.
    """

    def distance(name: str) -> float:
        return -difflib.SequenceMatcher(None, given.lower(), name.lower()).ratio()

    names = sorted(available, key=distance)
    if all_of_them:
        closest = ", ".join(names[:CLOSEST])
        return JomaError(
            f"there is no {what} {given!r}; the closest are {closest}; `{all_of_them}` lists all"
        )
    return JomaError(f"there is no {what} {given!r}; available: {', '.join(names)}")


def _left(folder: Path) -> str:
    """What an interrupted command left in a run folder, in one sentence."""
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


def _report(error: Exception) -> int:
    """Print what ended a command; return the exit code."""
    if _defects.debugging():
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    if isinstance(error, JomaError):
        return _refuse(str(error), verbatim=getattr(error, "verbatim", False))
    if isinstance(error, OSError):
        return _refuse(f"{error.filename or 'output'}: {reason(error)}")
    if hasattr(error, "format_message"):  # what typer raises on a wrong command line
        return _refuse(error.format_message())  # type: ignore[attr-defined]
    if _defects.is_out_of_memory(error):
        what = str(error) or type(error).__name__
        return _refuse(f"there is too little memory for this command ({what})")
    return _refuse(_defects.sentence(error, command_line(sys.argv[1:])), code=_defects.DEFECT)


def _refuse(sentence: str, *, verbatim: bool = False, code: int = BAD_INPUT) -> int:
    """Print what is wrong on standard error; return the exit code.

    Args:
        sentence: What is wrong; whatever a file or the user put into it is escaped and shortened.
        verbatim: Whether the message has lines of its own, such as a module tree.
        code: The exit code.
    """
    shown = printable(sentence, limit=None) if verbatim else printable(" ".join(sentence.split()))
    with contextlib.suppress(OSError):  # the exit code counts also where nobody reads
        typer.echo(f"joma: {shown}", err=True)
    return code


def _discard_output() -> None:
    """What is still to be flushed goes nowhere, so that Python does not complain as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]
            continue
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]

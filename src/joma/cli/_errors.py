"""What ends a command, in one sentence and an exit code: bad input, a signal, a defect of joma."""

import contextlib
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import joma
from joma.common.signals import TerminatedError, exit_code
from joma.errors import JomaError, printable

EXIT_BAD_INPUT = 2
EXIT_DEFECT = 70
"""Exit code of a defect of this package, EX_SOFTWARE of sysexits.h."""
EXIT_SIGPIPE = 141
"""What a shell reports of a program that wrote into a closed pipe."""

DEBUG = "JOMA_DEBUG"
"""Environment variable that, set to anything but 0, shows the traceback of every error."""


class OneSentenceGroup(TyperGroup):
    """Commands whose errors end in one sentence and an exit code, without a traceback.

    A `JomaError`, an `OSError` or too little memory is reported as a user error, with exit code 2.
    Any other exception, a bare `ValueError` included, is reported as a defect of joma, with exit
    code 70. With `JOMA_DEBUG=1` the traceback comes first.
    """

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line; end the process unless `standalone_mode` is off."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = self._exit_code(*args, **extra)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_output()
            code = EXIT_SIGPIPE
        except OSError as error:  # a full disk that is noticed only as the last lines are written
            code = _refuse(f"output: {reason(error)}")
            _discard_output()
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; Ctrl-C before it took over, as in its imports, is answered too."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            typer.echo(f"\n{signal_name(error)}.", err=True)
            raise typer.Exit(exit_code(error)) from None

    def _exit_code(self, *args: Any, **extra: Any) -> int:
        try:
            result = super().main(*args, standalone_mode=False, **extra)
        except SystemExit as leave:
            if isinstance(leave.__context__, BrokenPipeError):  # typer would leave with 1
                raise leave.__context__ from None
            raise
        except BrokenPipeError:
            raise
        except Exception as error:
            return _report(error)
        return result if isinstance(result, int) else 0


def signal_name(error: KeyboardInterrupt) -> str:
    """Return the word for what ended a command, Ctrl-C or SIGTERM."""
    return "Terminated" if isinstance(error, TerminatedError) else "Interrupted"


def command_line(words: Iterable[str]) -> str:
    """Return what to type for a command of these words."""
    return shlex.join(["joma", *words])


def reason(error: OSError) -> str:
    """Return what the system says, in its own words."""
    return str(error.strerror or error)


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether the machine or its GPU had too little memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True  # by name: torch is not imported here
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _report(error: Exception) -> int:
    """Print what ended a command; return the exit code."""
    debugging = os.environ.get(DEBUG, "") not in ("", "0")
    if debugging:
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    if isinstance(error, JomaError):
        return _refuse(str(error), verbatim=getattr(error, "verbatim", False))
    if isinstance(error, OSError):
        return _refuse(f"{error.filename or 'output'}: {reason(error)}")
    if hasattr(error, "format_message"):  # what typer raises on a wrong command line
        return _refuse(error.format_message())  # type: ignore[attr-defined]
    if _is_out_of_memory(error):
        what = str(error) or type(error).__name__
        return _refuse(f"there is too little memory for this command ({what})")
    return _refuse(_defect(error, debugging), code=EXIT_DEFECT)


def _refuse(sentence: str, *, verbatim: bool = False, code: int = EXIT_BAD_INPUT) -> int:
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


def _defect(error: Exception, debugging: bool) -> str:
    """Return what to tell the user about a defect: what it is and how to report it."""
    what = printable(": ".join(filter(None, (type(error).__name__, str(error)))), limit=120)
    package = Path(joma.__file__).parent
    places = [
        f"{Path(frame.filename).relative_to(package.parent).as_posix()}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(package)
    ]
    again = f"`{DEBUG}=1 {command_line(sys.argv[1:])}`"
    traced = "the traceback above" if debugging else f"the traceback that {again} shows"
    versions = [f"joma {joma.__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "numpy", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return (
        f"this is a defect of joma, not a mistake of yours ({what}, {places[-1]}); please report "
        f"it to the developers with {traced} and these versions: {', '.join(versions)}"
    )


def _discard_output() -> None:
    """Send what is still to be flushed nowhere, so that Python does not complain as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]

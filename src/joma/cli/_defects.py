"""What the command line says about errors that are not the user's."""

import os
import platform
import traceback
from importlib import metadata
from pathlib import Path

import joma

DEFECT = 70
"""Exit code of a defect of this package, EX_SOFTWARE of sysexits.h."""

DEBUG = "JOMA_DEBUG"
"""Environment variable that, set to anything but 0, shows the traceback of every error."""


def debugging() -> bool:
    """Return whether tracebacks are shown."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the machine or its GPU had too little memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True  # by name: torch is not imported here
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def sentence(error: Exception, command: str) -> str:
    """Return what to tell the user about a defect: what it is and how to report it.

    Args:
        error: What came out of the command.
        command: The command line, as the user would type it.
    """
    what = _named(error)
    if error.__cause__ is not None:
        what = f"{what}, from {_named(error.__cause__)}"
    traced = (
        "the traceback above" if debugging() else f"the traceback that `{DEBUG}=1 {command}` shows"
    )
    return (
        f"this is a defect of joma, not a mistake of yours ({what}, {_place(error)}); please "
        f"report it to the developers with {traced} and these versions: {_versions()}"
    )


def _named(error: BaseException) -> str:
    message = " ".join(str(error).split())
    if len(message) > 100:
        message = f"{message[:99]}…"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _place(error: Exception) -> str:
    """Return the file and line of this package that the error came through last."""
    package = Path(joma.__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(package):
            return f"{path.relative_to(package.parent).as_posix()}:{frame.lineno}"
    return "outside of joma"


def _versions() -> str:
    versions = [f"joma {joma.__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "numpy", "transformers"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)

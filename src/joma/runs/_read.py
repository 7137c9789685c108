"""Reading the files of a run folder, whatever somebody has put in their place."""

import os
import stat
from pathlib import Path

from joma.errors import JomaError


def read_file(path: Path, *, largest: int | None = None) -> bytes:
    """Return the bytes of a regular file; a pipe, device or folder is refused without waiting.

    Args:
        path: The file.
        largest: The most bytes it may have, if there is a limit.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise JomaError(f"{path} must be a regular file, but is none")
        if largest is not None and status.st_size > largest:
            raise JomaError(f"{path} must have at most {largest} bytes, but has {status.st_size}")
        return file.read()

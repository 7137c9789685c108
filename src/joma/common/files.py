"""Read and write whole files: a reader finds the old file or the new one, never a part."""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from joma.errors import JomaError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the place of `path` when the block ends well.

    The data and then the folder entry are forced to disk, so that what was written survives a
    kill. When the block fails, `path` is as it was and nothing is left next to it.
    """
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all."""
    with replacing(path) as file:
        file.write(data)


def remove_temporaries(folder: Path) -> None:
    """Remove the files that killed writes left in `folder`; nobody may be writing there."""
    for path in folder.glob(".*.tmp"):
        if is_temporary(path):
            path.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Return whether a file was left by a killed write, by its name."""
    return _TEMPORARY.fullmatch(path.name) is not None


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk, where the system can."""
    if os.name == "nt":  # has no way to open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(path: Path, *, largest: int | None = None) -> bytes:
    """Return the bytes of a regular file; a pipe, device or folder is refused without waiting.

    Args:
        path: The file.
        largest: The most bytes it may have, if there is a limit.
    """
    with _regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if largest is not None and size > largest:
            raise JomaError(f"{path} must have at most {largest} bytes, but has {size}")
        return file.read()


def read_end(path: Path, count: int) -> bytes:
    """Return the last bytes of a regular file; what is not one is refused as by `read_file`.

    Args:
        path: The file.
        count: How many bytes; a shorter file gives all it has.
    """
    with _regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - count))
        return file.read(count)


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[BinaryIO]:
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise JomaError(f"{path} must be a regular file, but is none")
        yield file

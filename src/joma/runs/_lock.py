"""One process at a time in a run folder."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from joma.errors import JomaError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_CANNOT_LOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
"""How file systems say that they have no locks."""


@dataclass
class _Lock:
    """A lock of this process: the open folder, if it could be locked, and the depth of nesting."""

    descriptor: int | None
    depth: int


_locks: dict[tuple[int, Path], _Lock] = {}
"""By process, as a fork copies this but does not hold what its parent does, and by folder."""

_guard = threading.Lock()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of `folder`, as long as they ask; this one may nest it.

    The lock is on the folder itself, so that nothing is left in it, and ends with the process.
    Where there are no locks, nothing is locked.
    """
    key = (os.getpid(), folder.resolve())
    with _guard:
        lock = _locks.get(key)
        if lock is None:
            lock = _locks[key] = _Lock(_lock(folder), 0)
        lock.depth += 1
    try:
        yield
    finally:
        if key[0] == os.getpid():  # a fork that leaves the block leaves the lock to its parent
            with _guard:
                lock.depth -= 1
                if lock.depth == 0:
                    del _locks[key]
                    _unlock(lock.descriptor)


def _lock(folder: Path) -> int | None:
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise JomaError(
                f"run folder {folder} is in use by another process; "
                "wait for it or use another folder"
            ) from None
        if error.errno in _CANNOT_LOCK:
            return None
        raise
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is None or fcntl is None:
        return
    try:
        # Closing alone would not do: a fork may still have the same folder open.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _forget() -> None:
    """Close a fork's copies, which would keep the lock of a parent that was killed."""
    global _guard
    _guard = threading.Lock()  # another thread may have had it when the process was copied
    for lock in _locks.values():
        if lock.descriptor is not None:
            os.close(lock.descriptor)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

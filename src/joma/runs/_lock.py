"""Locks of run folders, which keep other processes out while one writes."""

import contextlib
import errno
import os
import threading
import time
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

_PATIENCE = 0.1
"""Seconds for which a process that ends may still hold a lock that is asked for."""


@dataclass
class _Lock:
    """A lock of this process: the open folder, if it could be locked, and the depth of nesting."""

    descriptor: int | None
    depth: int = 0


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
            lock = _locks[key] = _Lock(_lock(folder))
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


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of `folder`, this one included.

    None where that cannot be known: the system or the file system has no locks, or the folder
    cannot be opened. The test takes a shared lock for an instant, which `locked` waits for.
    """
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _lock(folder: Path) -> int | None:
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline and is_locked(folder):
                os.close(descriptor)
                raise JomaError(
                    f"run folder {folder} is in use by another process; "
                    "wait for it or use another folder"
                ) from None
            time.sleep(0.002)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _CANNOT_LOCK:
                return None
            raise


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

"""Where a run goes: default names, which folders may be written to, and by which process."""

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joma.common import json_files
from joma.common.files import is_temporary, read_file, remove_temporaries, sync_folder
from joma.errors import JomaError
from joma.runs._manifest import MANIFEST, Manifest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ENVIRONMENT = "environment.json"
CONFIG = "config.json"
OUTCOME_FILE = "outcome.json"
"""The file that says how a run ended."""

_LARGEST_MANIFEST = 1 << 24

OWN_FOLDERS = ("checkpoints", "metrics", "tables", "figures")


def is_run(path: Path) -> bool:
    """Return whether `path` is a run folder, possibly one that was killed while it began.

    `environment.json` is written first and tells; `config.json` alone is too common a name.
    """
    return "joma" in json_record(path / ENVIRONMENT)


def check_out(out: Path, name: str) -> Path:
    """Return `out` if it is new, empty, or an earlier run of this name; else raise JomaError.

    A folder that was killed before it knew its name may be used by any run.
    """
    if out.exists() and not out.is_dir():
        raise JomaError(f"out {out} is a file, but must be a folder")
    if not out.is_dir() or _is_unused(out):
        return out
    if not is_run(out):
        raise JomaError(
            f"out {out} has other things in it, but must be a new folder, an empty one or "
            f"that of an earlier {name} run"
        )
    there = name_of(out)
    if there not in (None, name):
        raise JomaError(
            f"out {out} holds a {there} run, but must be a new folder, an empty one or "
            f"that of an earlier {name} run"
        )
    return out


def check_new(out: Path, name: str) -> None:
    """Raise JomaError unless `out` is a folder in which a new run `name` may be made.

    That is one that does not exist, is empty, or holds what a kill left of a run that was only
    just being made. The files of an earlier run are never removed.
    """
    check_out(out, name)
    if out.is_dir() and not _is_unused(out):
        raise JomaError(
            f"out {out} holds an earlier {name} run, which is kept; give another folder, such as "
            f"{_next_free(out)}"
        )


def check_resumable(out: Path, name: str) -> bool:
    """Return whether `out` holds a run `name`; raise JomaError if a new one cannot be made there.

    A run without `config.json` cannot be resumed, since nothing says what it was.
    """
    check_out(out, name)
    if (out / CONFIG).exists():
        return True
    if out.is_dir() and not _is_unused(out):
        raise JomaError(
            f"out {out} holds a run without {CONFIG}, which cannot be resumed; give another "
            f"folder, such as {_next_free(out)}"
        )
    return False


def check_restart(out: Path, name: str) -> bool:
    """Return whether `out` holds a run `name` that did not finish.

    Raise JomaError if it holds one that did, or if no run `name` can be made there.
    """
    holds_run = check_resumable(out, name)
    if holds_run and is_finished(out):
        check_new(out, name)
    return holds_run


def is_damaged_run(path: Path) -> bool:
    """Return whether `path` was a run folder, but its environment or settings cannot be read.

    A folder that was killed while it began is none: nothing in it is lost.
    """
    if is_run(path):
        return not (path / CONFIG).exists() and not _is_unused(path)
    try:
        if b'"environment.json"' in read_file(path / MANIFEST, largest=_LARGEST_MANIFEST):
            return not _is_unused(path)
    except (OSError, JomaError):
        pass
    return False


def is_finished(folder: Path) -> bool:
    """Return whether the run in `folder` says that it is done."""
    return json_record(folder / OUTCOME_FILE).get("status") == "done"


def json_record(path: Path) -> dict[str, Any]:
    """Return the entries of a JSON file, none where it cannot be read."""
    try:
        record = json_files.read(path)
    except JomaError:
        return {}
    return record if isinstance(record, dict) else {}


def next_folders(out: Path) -> Iterator[Path]:
    """Yield `out`, then `out-2`, `out-3` and so on."""
    yield out
    whole = out if out.name not in ("", "..") else out.resolve()
    for number in itertools.count(2):
        yield whole.with_name(f"{whole.name}-{number}")


def _next_free(out: Path) -> Path:
    return next(folder for folder in next_folders(out) if not folder.exists())


def _is_unused(folder: Path) -> bool:
    """Return whether a folder holds at most what a kill leaves of a run that was being made."""
    names = {path.name for path in folder.iterdir() if not is_temporary(path)}
    if not names <= {ENVIRONMENT, MANIFEST} or (ENVIRONMENT in names and not is_run(folder)):
        return False
    try:
        return MANIFEST not in names or Manifest(folder).read() is not None
    except (JomaError, OSError):  # somebody else's file of that name
        return False


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writes that were killed; `folder` must be locked."""
    for place in (folder, *(folder / name for name in OWN_FOLDERS)):
        remove_temporaries(place)


def name_of(folder: Path) -> str | None:
    """Return the name of the run in a folder, None where it is not known."""
    name = json_record(folder / CONFIG).get("name")
    return name if isinstance(name, str) else None


@contextlib.contextmanager
def new_folder(name: str, out: Path, existing: str) -> Iterator[Path]:
    """Make and lock a folder that no run is in, for the block that writes the first files.

    Processes that ask at the same time get a folder each: whoever locks it first has it.

    Args:
        name: Name of the run.
        out: The folder.
        existing: Where it has a run in it, "next" makes `out-2`, `out-3`, …, and "new" too, also
            where it merely exists; anything else is refused.
    """
    if existing not in ("next", "new"):
        check_new(out, name)
        out.mkdir(parents=True, exist_ok=True)
        with locked(out):
            check_new(out, name)  # again: another process may have been faster
            yield _cleared(out)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    for folder in next_folders(out):
        if folder.exists() and not (folder.is_dir() and (is_run(folder) or _is_unused(folder))):
            if folder == out and existing == "next":
                check_out(out, name)  # a file, or a folder of something else: a mistake
            continue
        try:
            folder.mkdir()  # fails if another process was faster
        except FileExistsError:
            if existing == "new":
                continue
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(locked(folder))
            except JomaError:  # another process is in it
                continue
            if _is_unused(folder):
                yield _cleared(folder)
                return


def _cleared(folder: Path) -> Path:
    sync_folder(folder.parent)
    remove_leftovers(folder)
    return folder


_CANNOT_LOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
"""How file systems say that they have no locks."""


@dataclass
class _Lock:
    """A lock of this process: the open folder, if it could be locked, and the depth of nesting."""

    descriptor: int | None
    depth: int


_RETRIES = (0.002, 0.01, 0.03, 0.06)
"""Seconds between attempts to lock a folder that another process has locked."""

_PATIENCE = 30.0
"""Seconds to keep trying while only `is_locked` calls, each an instant long, are in the way."""

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
    waits, deadline = iter(_RETRIES), time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            tested_only = time.monotonic() < deadline and is_locked(folder) is False
            wait = _RETRIES[0] if tested_only else next(waits, None)
            if wait is None:
                os.close(descriptor)
                raise JomaError(
                    f"run folder {folder} is in use by another process; "
                    "wait for it or use another folder"
                ) from None
            time.sleep(wait)
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

"""Where a run goes: which folders hold a run, and which may be written to."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from joma.common import json_files
from joma.common.files import is_temporary, read_file, remove_temporaries, sync_folder
from joma.errors import JomaError
from joma.runs._lock import locked
from joma.runs._manifest import MANIFEST, Manifest

ENVIRONMENT = "environment.json"
CONFIG = "config.json"
OUTCOME_FILE = "outcome.json"
"""The file that says how a run ended."""

OWN_FOLDERS = ("checkpoints", "metrics", "tables", "figures")

_LARGEST_MANIFEST = 1 << 24


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
    there = name_of(out)
    if _is_unused(out) or (is_run(out) and there in (None, name)):
        return out
    holds = f"holds a {there} run" if is_run(out) else "has other things in it"
    raise JomaError(
        f"out {out} {holds}, but must be a new folder, an empty one or that of an earlier "
        f"{name} run"
    )


def check_new(out: Path, name: str) -> None:
    """Raise JomaError unless `out` is a folder in which a new run `name` may be made.

    That is one that does not exist, is empty, or holds what a kill left of a run that was only
    just being made. The files of an earlier run are never removed.
    """
    check_out(out, name)
    if not _is_unused(out):
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
    if not _is_unused(out):
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
    if holds_run and json_record(out / OUTCOME_FILE).get("status") == "done":
        check_new(out, name)
    return holds_run


def is_damaged_run(path: Path) -> bool:
    """Return whether `path` was a run folder, but its environment or settings cannot be read.

    A folder that was killed while it began is none: nothing in it is lost.
    """
    if is_run(path):
        return not (path / CONFIG).exists() and not _is_unused(path)
    try:
        listed = read_file(path / MANIFEST, largest=_LARGEST_MANIFEST)
    except (OSError, JomaError):
        return False
    return b'"environment.json"' in listed and not _is_unused(path)


def json_record(path: Path) -> dict[str, Any]:
    """Return the entries of a JSON file, none where it cannot be read."""
    try:
        record = json_files.read(path)
    except JomaError:
        return {}
    return record if isinstance(record, dict) else {}


def name_of(folder: Path) -> str | None:
    """Return the name of the run in a folder, None where it is not known."""
    name = json_record(folder / CONFIG).get("name")
    return name if isinstance(name, str) else None


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writes that were killed; `folder` must be locked."""
    for place in (folder, *(folder / name for name in OWN_FOLDERS)):
        remove_temporaries(place)


@contextlib.contextmanager
def new_folder(name: str, out: Path, *, next_free: bool) -> Iterator[Path]:
    """Make and lock a folder that no run is in, for the block that writes the first files.

    Processes that ask at the same time get a folder each: whoever locks it first has it.

    Args:
        name: Name of the run.
        out: The folder.
        next_free: Whether to make `out-2`, `out-3`, … where it has a run in it; otherwise that is
            refused.
    """
    if not next_free:
        check_new(out, name)
        out.mkdir(parents=True, exist_ok=True)
        with locked(out):
            check_new(out, name)  # again: another process may have been faster
            yield _cleared(out)
        return
    for folder in _numbered(out):
        if folder == out and not is_run(out):
            check_out(out, name)  # a file, or a folder of something else: a mistake
        if folder.exists() and not (folder.is_dir() and _is_unused(folder)):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(locked(folder))
            except JomaError:  # another process is in it
                continue
            if _is_unused(folder):
                yield _cleared(folder)
                return


def _numbered(out: Path) -> Iterator[Path]:
    """Yield `out`, then `out-2`, `out-3` and so on."""
    yield out
    whole = out if out.name not in ("", "..") else out.resolve()
    for number in itertools.count(2):
        yield whole.with_name(f"{whole.name}-{number}")


def _next_free(out: Path) -> Path:
    return next(folder for folder in _numbered(out) if not folder.exists())


def _cleared(folder: Path) -> Path:
    sync_folder(folder.parent)
    remove_leftovers(folder)
    return folder


def _is_unused(folder: Path) -> bool:
    """Return whether a folder holds at most what a kill leaves of a run that was being made."""
    if not folder.is_dir():
        return True
    names = {path.name for path in folder.iterdir() if not is_temporary(path)}
    if not names <= {ENVIRONMENT, MANIFEST} or (ENVIRONMENT in names and not is_run(folder)):
        return False
    try:
        return MANIFEST not in names or Manifest(folder).read() is not None
    except (JomaError, OSError):  # somebody else's file of that name
        return False

"""The runs that are served: found in folders, known by ids, with a version that changes with them.

A reader names a run by its id, which is searched for in this table and never becomes a part of a
path. Folders that symbolic links lead to are not searched, and a run with a link that leads out of
what is served is shown as damaged.
"""

import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from joma.errors import JomaError
from joma.runs import Run, RunSummary, is_locked, list_runs, state_of

_DEPTH = 3
"""How deep runs are searched, as `joma runs list` does."""

_MARKS = ("environment.json", "manifest.json")
"""A folder with one of these may be a run."""

_WATCHED = (*_MARKS, "config.json", "outcome.json", "findings.json", "metrics", "tables", "figures")
"""Whatever is written into a run changes one of these."""

_OWN_FOLDERS = ("checkpoints", "metrics", "tables", "figures")

_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True)
class ServedRun:
    """A run as the table knows it.

    Attributes:
        id: Letters, digits and dashes: its folder's name and a checksum of where that is.
        path: The folder.
        summary: Its line in the list of runs.
        version: A word that changes whenever the run does.
    """

    id: str
    path: Path
    summary: RunSummary
    version: str


class Change(NamedTuple):
    """The last change of a run: its number, the new version (None: removed), and when."""

    number: int
    version: str | None
    time: float


class RunTable:
    """The runs in some folders, brought up to date by `update`, which one thread calls at a time.

    Args:
        roots: Run folders, and folders of runs.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not root.is_dir():
                what = "is none" if root.exists() else "does not exist"
                raise JomaError(f"RUNS must be folders, but {root} {what}")
        self._roots = [(root, root.resolve()) for root in roots]
        self._runs: dict[str, ServedRun] = {}
        self._stamps: dict[Path, _Stamp] = {}
        self._changes: dict[str, Change] = {}
        self.number = 0
        """How many changes were noticed so far."""

    def get(self, id: str) -> ServedRun | None:
        """Return the run of this id, None where there is none."""
        return self._runs.get(id)

    def is_removed(self, id: str) -> bool:
        """Return whether a run was served and its folder is gone."""
        return id in self._changes and id not in self._runs

    def runs(self) -> list[ServedRun]:
        """Return all runs, the newest first."""
        order = sorted(self._runs.copy().values(), key=lambda it: (it.summary.date, str(it.path)))
        return order[::-1]

    def changes(self, after: int, since: float = 0.0) -> list[tuple[str, Change]]:
        """Return id and last change of the runs that changed, in order.

        Args:
            after: Number of the last change that is known.
            since: The earliest time, as `time.monotonic` has it.
        """
        found = [(id, it) for id, it in self._changes.copy().items() if it.number > after]
        return sorted((it for it in found if it[1].time >= since), key=lambda it: it[1].number)

    def update(self) -> None:
        """Search the folders for runs that are new, changed or gone."""
        found = {folder for root, _ in self._roots for folder in _folders(root, _DEPTH)}
        for folder in sorted(found):
            self._check(folder)
        for id, run in list(self._runs.items()):
            if run.path not in found:
                self._note(id, None)
        for folder in self._stamps.keys() - found:
            del self._stamps[folder]

    def _check(self, folder: Path) -> None:
        id = _id(folder)
        known = self._runs.get(id)
        stamp = _stamp(folder, running=known is not None and known.summary.state == "running")
        if stamp == self._stamps.get(folder) and not (known and _lost_its_process(known)):
            return
        self._stamps[folder] = stamp  # taken before reading: what changes meanwhile is read again
        summary = self._summary(folder) if any(stamp[: len(_MARKS)]) else None
        if summary is None:
            if known is not None:
                self._note(id, None)
            return
        word = hashlib.sha256(repr((stamp, summary.state, summary.reason)).encode()).hexdigest()
        if known is None or known.version != word[:16]:
            self._note(id, ServedRun(id, folder, summary, word[:16]))

    def _note(self, id: str, run: ServedRun | None) -> None:
        if run is None:
            del self._runs[id]
        else:
            self._runs[id] = run
        version = None if run is None else run.version
        self._changes[id] = Change(self.number + 1, version, time.monotonic())
        self.number += 1

    def _summary(self, folder: Path) -> RunSummary | None:
        """Return the line of a run, None where the folder holds none."""
        if (link := _link_outside(folder, [real for _, real in self._roots])) is not None:
            why = f"{link} is a symbolic link that leads out of the folders that are served"
            return RunSummary(folder, folder.name, "", state="damaged", reason=why)
        found = None
        for _ in range(2):  # it may have been written to while it was read
            try:
                found = next((it for it in list_runs(folder) if it.path == folder), None)
            except (JomaError, OSError):
                continue
            if found is None or found.state != "damaged":
                break
            time.sleep(0.05)
        return found


def _lost_its_process(run: ServedRun) -> bool:
    """Return whether nobody writes to a run any more that somebody wrote to."""
    if run.summary.state != "running" or is_locked(run.path):
        return False
    try:
        return state_of(Run.open(run.path)) != "running"
    except (JomaError, OSError):
        return True


def _id(folder: Path) -> str:
    """Return the id of a run: the same whenever the same folder is served, fit for an address."""
    whole = os.path.abspath(folder)
    mark = hashlib.sha256(os.fsencode(whole)).hexdigest()[:10]
    word = re.sub(r"[^0-9A-Za-z]+", "-", os.path.basename(whole)).strip("-")[:40]
    return f"{word or 'run'}-{mark}"


def _stamp(folder: Path, running: bool) -> _Stamp:
    """Return what tells whether anything in a run folder changed, without opening a file.

    The folder of the log changes several times with each flush, the manifest once and last, so a
    running run with a manifest is judged by that.
    """
    stamp: list[tuple[int, int, int] | None] = []
    for name in _WATCHED:
        try:
            status = os.lstat(folder / name)
        except OSError:
            stamp.append(None)
        else:
            stamp.append((status.st_mtime_ns, status.st_size, status.st_ino))
    if running and stamp[_WATCHED.index("manifest.json")]:
        stamp[_WATCHED.index("metrics")] = None
    return tuple(stamp)


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield a folder and those below it; hidden ones, links and a run's own folders are skipped."""
    yield folder
    if depth == 0:
        return
    try:
        with os.scandir(folder) as entries:
            names = [it.name for it in entries if it.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for name in names:
        if not name.startswith(".") and name not in _OWN_FOLDERS:
            yield from _folders(folder / name, depth - 1)


def _link_outside(folder: Path, roots: Sequence[Path]) -> str | None:
    """Return the name of a symbolic link of a run that leads out of the roots, None without one."""
    for place in (folder, *(folder / name for name in _OWN_FOLDERS if name != "checkpoints")):
        try:
            with os.scandir(place) as entries:
                links = [Path(it.path) for it in entries if it.is_symlink()]
        except OSError:
            continue
        for link in links:
            if not any(link.resolve().is_relative_to(root) for root in roots):
                return str(link.relative_to(folder))
    return None

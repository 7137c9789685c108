"""The runs that are served: found in folders, known by ids, with a version that changes with them.

A reader names a run by its id, which is searched for in this table and never becomes a part of a
path. Folders that symbolic links lead to are not searched, and a run with a link that leads out of
what is served is shown as damaged.
"""

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from joma.errors import JomaError
from joma.runs import Run, RunSummary, is_locked, list_runs, state_of

_DEPTH = 3
"""How deep runs are searched, as `joma runs list` does."""

_MARKS = ("environment.json", "manifest.json")
"""A folder with one of these may be a run."""

_WATCHED = (*_MARKS, "config.json", "outcome.json", "findings.json", "metrics", "tables", "figures")
"""Whatever is written into a run changes one of these."""

_NOT_SEARCHED = ("checkpoints", "metrics", "tables", "figures")
_MOST_REMEMBERED = 10_000

_Stamp = tuple[tuple[int, int, int] | int, ...]


@dataclass(frozen=True)
class ServedRun:
    """A run as the table knows it.

    Attributes:
        id: Letters, digits and dashes: its folder's name and a checksum of where that is.
        path: The folder.
        summary: Its line in the list of runs.
        version: A word that changes whenever the run does.
        number: Increases with every change of any run.
        changed: When the change was noticed, in seconds of `time.monotonic`.
    """

    id: str
    path: Path
    summary: RunSummary
    version: str
    number: int
    changed: float


class RunTable:
    """The runs in some folders, kept up to date by `discover` and `refresh`.

    One thread calls those two; any thread may read.

    Args:
        roots: Run folders, and folders of runs.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not root.is_dir():
                raise JomaError(
                    f"RUNS must be folders, but {root} "
                    f"{'is none' if root.exists() else 'does not exist'}"
                )
        self._roots = tuple(roots)
        self._real_roots = tuple(root.resolve() for root in roots)
        self._lock = threading.Lock()
        self._runs: dict[str, ServedRun] = {}
        self._stamps: dict[Path, _Stamp] = {}
        self._gone: dict[str, str] = {}
        self._number = 0

    @property
    def number(self) -> int:
        """How many changes were noticed so far."""
        return self._number

    def get(self, id: str) -> ServedRun | None:
        """Return the run of this id, None where there is none."""
        with self._lock:
            return self._runs.get(id)

    def name_of_removed(self, id: str) -> str | None:
        """Return the name of a run that was served and whose folder is gone, otherwise None."""
        with self._lock:
            return self._gone.get(id)

    def runs(self) -> list[ServedRun]:
        """Return all runs, the newest first."""
        with self._lock:
            runs = list(self._runs.values())
        return sorted(runs, key=lambda run: (run.summary.date, str(run.path)), reverse=True)

    def discover(self) -> list[str]:
        """Search the folders for runs; return the ids of runs that are new, changed or gone."""
        changed: list[str] = []
        seen = set()
        for root in self._roots:
            for folder in _folders(root, _DEPTH):
                seen.add(folder)
                changed += self._update(folder)
        for id, run in list(self._runs.items()):
            if run.path not in seen:
                self._remove(id)
                changed.append(id)
        for folder in self._stamps.keys() - seen:
            del self._stamps[folder]
        return list(dict.fromkeys(changed))

    def refresh(self) -> list[str]:
        """Check the runs that are being written, without searching; return the ids of changed ones.

        A run also counts as being written for a while after its last change: its outcome comes
        just before its process ends.
        """
        recent = time.monotonic() - 10
        changed: list[str] = []
        for run in list(self._runs.values()):
            if run.summary.state == "running" or run.changed > recent:
                changed += self._update(run.path)
        return changed

    def _update(self, folder: Path) -> list[str]:
        """Check one folder; return its id if the table had to be changed, otherwise nothing."""
        id = _id(folder)
        known = self._runs.get(id)
        stamp = _stamp(folder, running=known is not None and known.summary.state == "running")
        if stamp == self._stamps.get(folder):
            if known is None or not _lost_its_process(known):
                return []
        elif not any(isinstance(part, tuple) for part in stamp[: len(_MARKS)]):
            self._stamps[folder] = stamp
            return [self._remove(id)] if known is not None else []
        self._stamps[folder] = stamp  # taken before reading: what changes meanwhile is read again
        summary = self._summary(folder)
        if summary is None:
            return [self._remove(id)] if known is not None else []
        word = hashlib.sha256(repr((stamp, summary.state, summary.reason)).encode()).hexdigest()
        if known is not None and known.version == word[:16]:
            return []
        with self._lock:
            self._number += 1
            self._gone.pop(id, None)
            self._runs[id] = ServedRun(
                id, folder, summary, word[:16], self._number, time.monotonic()
            )
        return [id]

    def _summary(self, folder: Path) -> RunSummary | None:
        """Return the line of a run, None where the folder holds none."""
        if (link := _link_outside(folder, self._real_roots)) is not None:
            why = f"{link} is a symbolic link that leads out of the folders that are served"
            return RunSummary(folder, folder.name, "", state="damaged", reason=why)
        found = None
        for attempt in range(2):
            if attempt:
                time.sleep(0.05)  # it may have been written to while it was read
            try:
                summaries = list_runs(folder)
            except (JomaError, OSError):
                continue
            found = next((it for it in summaries if it.path == folder), None)
            if found is None or found.state != "damaged":
                break
        return found

    def _remove(self, id: str) -> str:
        with self._lock:
            self._number += 1
            run = self._runs.pop(id)
            self._gone[id] = run.summary.name
            while len(self._gone) > _MOST_REMEMBERED:
                del self._gone[next(iter(self._gone))]
        return id


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

    The folder of the log changes several times with each flush, the manifest once and last. So
    the folder does not count as long as a run with a manifest is running.
    """
    stamp: list[tuple[int, int, int] | int] = []
    for name in _WATCHED:
        try:
            status = os.lstat(folder / name)
        except OSError as error:
            stamp.append(error.errno or 0)
        else:
            stamp.append((status.st_mtime_ns, status.st_size, status.st_ino))
    if running and isinstance(stamp[_WATCHED.index("manifest.json")], tuple):
        stamp[_WATCHED.index("metrics")] = 0
    return tuple(stamp)


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield a folder and those below it; hidden ones, links and a run's own folders are skipped."""
    yield folder
    if depth == 0:
        return
    try:
        with os.scandir(folder) as entries:
            names = sorted(
                entry.name
                for entry in entries
                if not entry.name.startswith(".")
                and entry.name not in _NOT_SEARCHED
                and entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return
    for name in names:
        yield from _folders(folder / name, depth - 1)


def _link_outside(folder: Path, roots: Sequence[Path]) -> str | None:
    """Return the name of a symbolic link of a run that leads out of the roots, None without one."""
    for place in (folder, *(folder / name for name in _NOT_SEARCHED if name != "checkpoints")):
        try:
            with os.scandir(place) as entries:
                links = [entry.name for entry in entries if entry.is_symlink()]
        except OSError:
            continue
        for name in links:
            real = (place / name).resolve()
            if not any(real.is_relative_to(root) for root in roots):
                return str((place / name).relative_to(folder))
    return None

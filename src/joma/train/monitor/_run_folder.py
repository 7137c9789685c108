"""The run folder of a monitor: made or continued, and how the training in it ended."""

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from joma.common.text import first_line
from joma.errors import JomaError
from joma.runs import Run, is_run
from joma.train.monitor._faults import Faults

_MOST_CHARACTERS = 200
_ORIGIN = "origin"
"""Name of the JSON file that says which folder was asked for and contains an earlier run."""


def open_run(
    run: Run | Path | str | None,
    config: Mapping[str, Any],
    *,
    step: int,
    device: str,
    faults: Faults,
    stack: ExitStack,
) -> tuple[Run | None, Path | None]:
    """Make and lock the run folder, or open it where a training is resumed.

    An earlier run is never touched by a new training: the second one in `runs/mine` goes to
    `runs/mine-2`. A training resumed at a step goes to the newest of these, and what was logged
    after that step is dropped, since it comes again.

    Args:
        run: A run, the path of a folder, or None for a new folder in `./runs`.
        config: Everything that decides the numbers.
        step: Optimizer steps made before.
        device: The device of the model.
        faults: Where it is noted if the folder cannot be made or read.
        stack: Unlocks the folder when it is closed.

    Returns:
        The run, None where no folder could be made, and the folder that was asked for where that
        has an earlier run.

    Raises:
        JomaError: The folder holds something else.
    """
    folder = Path(run) if isinstance(run, str | Path) else None
    found = run if isinstance(run, Run) else None
    if folder is not None and step > 0:
        found = _newest(folder, faults)
    if found is not None:
        _lock(found, faults, stack)  # before anything of it is changed
        try:
            if step:
                found.metrics.rewind(step)
            return found, None
        except (OSError, JomaError) as error:
            faults.note("the earlier run", error, effect="not resumed")
            folder = found.path
    try:
        made = Run.create("monitor", config, out=folder, device=device, existing="next")
        instead_of = None if made.path == folder else folder
        if instead_of is not None:
            made.write_json(_ORIGIN, {"instead_of": instead_of.name})
    except OSError as error:
        faults.note("the run folder", error, effect="not written, and numbers stay in memory")
        return None, None
    _lock(made, faults, stack)
    return made, instead_of


def _lock(run: Run, faults: Faults, stack: ExitStack) -> None:
    try:
        stack.enter_context(run.locked())
    except OSError as error:
        faults.note("the run folder", error, effect="not locked")


def _newest(folder: Path, faults: Faults) -> Run | None:
    """Return the run that a resumed training wrote to; None where it is not there or damaged.

    It is the one made last for the folder's name. A folder named `mine-2` that somebody chose is
    another training's.
    """
    pattern = re.compile(re.escape(folder.name) + r"-([1-9][0-9]*)")
    try:
        runs = {1: folder} if is_run(folder) else {}
        for other in folder.parent.iterdir() if folder.parent.is_dir() else ():
            match = pattern.fullmatch(other.name)
            if match and is_run(other) and _origin(other) == folder.name:
                runs[int(match[1])] = other
        if not runs:
            return None
        newest = runs[max(runs)]
        if newest != folder:
            faults.remark(f"resumed in {newest}, which was made instead of {folder}")
        return Run.open(newest)
    except (OSError, JomaError) as error:
        faults.note("the earlier run", error, effect="not resumed")
        return None


def _origin(folder: Path) -> str | None:
    """Return the name of the folder that a run was made instead of."""
    try:
        return json.loads((folder / f"{_ORIGIN}.json").read_text(encoding="utf-8"))["instead_of"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


class TrainingOutcome:
    """Keeps `outcome.json` true: running, then done, stopped, interrupted or failed.

    A process that is killed leaves "running", and the lock of the folder tells that it is gone. A
    copy of the monitor in a forked process writes nothing.

    Args:
        run: The run; None where there is none, or where it belongs to somebody else.
        faults: Where failures to write are noted.
    """

    def __init__(self, run: Run | None, faults: Faults) -> None:
        self._run, self._faults = run, faults
        self._process = os.getpid()
        self._error_before = id(_last_error())  # itself, it would keep what its frames hold
        self._ended = False
        self._write({"status": "running", "host": platform.node()})

    def end(self, error: BaseException | None = None, stopped: str | None = None) -> None:
        """Write how the training ended; only the first call counts.

        Args:
            error: The exception that ended it, None where it was not ended by one.
            stopped: Why `stop_on` ended it, None where it did not.
        """
        outcome: dict[str, Any] = {"status": "done"}
        if isinstance(error, KeyboardInterrupt | SystemExit):
            outcome = {"status": "interrupted", "error": type(error).__name__}
        elif error is not None:
            name, line = type(error).__name__, first_line(error)
            described = name if line == name else f"{name}: {line}"
            outcome = {"status": "failed", "error": described[:_MOST_CHARACTERS]}
        elif stopped is not None:
            outcome = {"status": "stopped", "stopped": stopped}
        self._end(outcome)

    def abandon(self) -> None:
        """Write that the process left, or forgot the monitor, without closing it."""
        error = _last_error()
        if error is not None and id(error) != self._error_before:
            self.end(error)
        self._end({"status": "unclosed"})

    def _end(self, outcome: dict[str, Any]) -> None:
        if not self._ended:
            self._ended = True
            self._write(outcome)

    def _write(self, outcome: dict[str, Any]) -> None:
        if self._run is not None and self._process == os.getpid():
            with self._faults.guard("outcome.json", effect="not written"):
                self._run.write_json("outcome", outcome)


def _last_error() -> BaseException | None:
    """Return the exception that ended the program, or the last one of an interactive session."""
    return getattr(sys, "last_value", None)

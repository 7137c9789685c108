"""The run folder of a monitor: a new one, or the one that a resumed training wrote to."""

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joma.errors import JomaError
from joma.runs import Run, is_run
from joma.train.monitor.faults import Faults

_ORIGIN = "origin"
"""Name of the JSON file that says which folder was asked for and contains an earlier run."""


@dataclass(frozen=True)
class Opened:
    """A run that a monitor writes to.

    Attributes:
        run: The run, or None where no folder could be made.
        instead_of: The folder that was asked for and holds an earlier run, or None.
    """

    run: Run | None
    instead_of: Path | None = None


def open_run(
    run: Run | Path | str | None,
    config: Mapping[str, Any],
    *,
    step: int,
    device: str,
    faults: Faults,
    stack: ExitStack,
) -> Opened:
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

    Raises:
        JomaError: The folder holds something else.
    """
    if isinstance(run, str):
        run = Path(run)
    found = run if isinstance(run, Run) else None
    if found is None and isinstance(run, Path) and step > 0:
        found = _found(run, faults)
    if found is not None:
        _lock(found, faults, stack)  # before anything of it is changed
        if step == 0 or _rewound(found, step, faults):
            return Opened(found)
        run = found.path
    try:
        opened = _made(run if isinstance(run, Path) else None, config, device)
    except OSError as error:
        faults.note("the run folder", error, effect="not written, and numbers stay in memory")
        return Opened(None)
    if opened.run is not None:
        _lock(opened.run, faults, stack)
    return opened


def _lock(run: Run, faults: Faults, stack: ExitStack) -> None:
    try:
        stack.enter_context(run.locked())
    except OSError as error:
        faults.note("the run folder", error, effect="not locked")


def _found(folder: Path, faults: Faults) -> Run | None:
    """Return the run that a resumed training wrote to; None where it is not there or damaged."""
    try:
        newest = _newest(folder)
        if newest is None:
            return None
        if newest != folder:
            faults.remark(f"resumed in {newest}, which was made instead of {folder}")
        return Run.open(newest)
    except (OSError, JomaError) as error:
        faults.note("the earlier run", error, effect="not resumed")
        return None


def _rewound(run: Run, step: int, faults: Faults) -> bool:
    """Drop what was logged after a step; return False where the log cannot be read or written."""
    try:
        run.metrics.rewind(step)
    except (OSError, JomaError) as error:
        faults.note("the earlier run", error, effect="not resumed")
        return False
    return True


def _made(folder: Path | None, config: Mapping[str, Any], device: str) -> Opened:
    run = Run.create("monitor", config, out=folder, device=device, existing="next")
    if folder is None or run.path == folder:
        return Opened(run)
    run.write_json(_ORIGIN, {"instead_of": folder.name})
    return Opened(run, folder)


def _newest(folder: Path) -> Path | None:
    """Return the folder that was made last for a folder's name, None where there is none.

    A folder named `mine-2` that somebody chose is another training's.
    """
    pattern = re.compile(re.escape(folder.name) + r"-([1-9][0-9]*)")
    runs = {1: folder} if is_run(folder) else {}
    if folder.parent.is_dir():
        for other in folder.parent.iterdir():
            match = pattern.fullmatch(other.name)
            if match and is_run(other) and _origin(other) == folder.name:
                runs[int(match[1])] = other
    return runs[max(runs)] if runs else None


def _origin(folder: Path) -> str | None:
    """Return the name of the folder that a run was made instead of."""
    try:
        return json.loads((folder / f"{_ORIGIN}.json").read_text(encoding="utf-8"))["instead_of"]
    except (OSError, ValueError, KeyError, TypeError):
        return None

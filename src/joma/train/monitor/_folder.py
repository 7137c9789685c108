"""The run folder of a monitor: a new one, or the one that a resumed training wrote to."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joma.runs import Run, is_run
from joma.train.monitor._faults import Faults


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
    opened = _opened(run, config, step, device, faults)
    if opened.run is not None:
        try:
            stack.enter_context(opened.run.locked())
        except OSError as error:
            faults.note("the run folder", error, effect="not locked")
    return opened


def _opened(
    run: Run | Path | str | None,
    config: Mapping[str, Any],
    step: int,
    device: str,
    faults: Faults,
) -> Opened:
    try:
        if isinstance(run, str):
            run = Path(run)
        if step > 0 and isinstance(run, Path):
            run = _newest(run) or run
            if is_run(run):
                run = Run.open(run)
        if isinstance(run, Run):
            if step > 0:
                run.metrics.rewind(step)
            return Opened(run)
        return _made(run, config, device)
    except OSError as error:
        faults.note("the run folder", error, effect="not written, and numbers stay in memory")
        return Opened(None)


def _made(folder: Path | None, config: Mapping[str, Any], device: str) -> Opened:
    run = Run.create("monitor", config, out=folder, device=device, existing="next")
    return Opened(run, folder if folder is not None and run.path != folder else None)


def _newest(folder: Path) -> Path | None:
    """Return the run that was made last of a folder's name, None where there is none."""
    pattern = re.compile(re.escape(folder.name) + r"-([1-9][0-9]*)")
    runs = {1: folder} if is_run(folder) else {}
    if folder.parent.is_dir():
        for other in folder.parent.iterdir():
            match = pattern.fullmatch(other.name)
            if match and is_run(other):
                runs[int(match[1])] = other
    return runs[max(runs)] if runs else None

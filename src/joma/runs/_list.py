"""List the runs in a folder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from joma.common import json_files
from joma.errors import JomaError
from joma.runs._folder import (
    CONFIG,
    ENVIRONMENT,
    OWN_FOLDERS,
    is_damaged_run,
    is_run,
    json_record,
    name_of,
)
from joma.runs._run import Run
from joma.runs._state import RunState, condition_of, sentence_of

_DEPTH = 3


@dataclass(frozen=True)
class RunSummary:
    """A run in one line.

    Attributes:
        path: The folder.
        name: What was run; "" where that cannot be read.
        date: When it began, UTC; "" where that cannot be read.
        version: The version of joma that wrote it.
        state: What became of it.
        reason: Why it is in that state, in one sentence; "" where the state says all.
        last_step: The last step of its log; None where it has none.
        last_loss: The loss at the last step that has one, the mean over members; None where it has
            none. It may be NaN.
        worst: The most severe finding as `findings.json` has it; None where there is none.
        tables: How many tables there are.
        figures: How many figure files there are.
        outcome: How it ended, as far as that was written.
    """

    path: Path
    name: str
    date: str
    version: str = ""
    state: RunState = "unknown"
    reason: str = ""
    last_step: int | None = None
    last_loss: float | None = None
    worst: dict[str, Any] | None = None
    tables: int = 0
    figures: int = 0
    outcome: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> "RunSummary":
        """Return the summary of a run; of its log, only the last part is read where possible."""
        condition = condition_of(run)
        state, reason = condition.state, condition.reason
        last_step, last_loss = None, None
        if state != "damaged":
            try:
                last_step, last_loss = _last(run)
            except (JomaError, OSError) as error:
                state, reason = "damaged", sentence_of(error)
        return cls(
            path=run.path,
            name=run.name,
            date=str(run.environment.get("date", "")),
            version=str(run.environment.get("joma", "")),
            state=state,
            reason=reason,
            last_step=last_step,
            last_loss=last_loss,
            worst=condition.findings.worst,
            tables=len(run.tables),
            figures=len(run.figures),
            outcome=condition.outcome,
        )

    @classmethod
    def of_damaged(cls, folder: Path, reason: str) -> "RunSummary":
        """Return the summary of a folder that cannot be opened as a run.

        Args:
            folder: The folder.
            reason: Why it cannot, in one sentence.
        """
        around = json_record(folder / ENVIRONMENT)
        return cls(
            path=folder,
            name=name_of(folder) or "",
            date=str(around.get("date", "")),
            version=str(around.get("joma", "")),
            state="damaged",
            reason=reason,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the record that `joma runs list --json` prints; a loss of NaN becomes null."""
        return json_files.plain(vars(self))


def list_runs(
    root: Path | str, *, left_out: Callable[[Path, str], None] = lambda path, why: None
) -> list[RunSummary]:
    """Return the runs in `root` and in the folders below it, oldest first.

    A run that is damaged is listed too, with the reason.

    Args:
        root: The folder to search, three folders deep.
        left_out: Called with each folder that cannot be searched, and why.
    """
    root = Path(root)
    if not root.is_dir():
        raise JomaError(f"root must be a folder, but {root} is none")
    found = (_summary(folder) for folder in _folders(root, _DEPTH, left_out))
    summaries = [summary for summary in found if summary is not None]
    return sorted(summaries, key=lambda summary: (summary.date, summary.path))


def _summary(folder: Path) -> RunSummary | None:
    """Return the summary of a folder, None where it is no run."""
    try:
        if not is_damaged_run(folder) and not (is_run(folder) and (folder / CONFIG).exists()):
            return None
        return RunSummary.of(Run.open(folder))
    except (OSError, JomaError) as error:
        return RunSummary.of_damaged(folder, sentence_of(error))


def _last(run: Run) -> tuple[int | None, float | None]:
    """Return the last step of a run's log, and its last loss."""
    step, losses = run.metrics.end("loss")
    return step, None if losses is None else float(np.mean(losses))


def _folders(folder: Path, depth: int, left_out: Callable[[Path, str], None]) -> Iterator[Path]:
    yield folder
    if depth == 0:
        return
    try:
        children = sorted(child for child in folder.iterdir() if _is_searched(child))
    except OSError as error:
        left_out(folder, error.strerror or str(error))
        return
    for child in children:
        yield from _folders(child, depth - 1, left_out)


def _is_searched(path: Path) -> bool:
    hidden = path.name.startswith(".") or path.name in OWN_FOLDERS
    return not hidden and path.is_dir() and not path.is_symlink()

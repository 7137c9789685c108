"""Whether a run is running, how it ended, what was found in it, and lists of runs."""

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from joma.common import json_files
from joma.common.text import duration
from joma.errors import JomaError
from joma.runs._folder import (
    CONFIG,
    ENVIRONMENT,
    OUTCOME_FILE,
    OWN_FOLDERS,
    is_damaged_run,
    is_run,
    json_record,
    name_of,
)
from joma.runs._lock import is_locked
from joma.runs._run import Run

FINDINGS_FILE = "findings.json"
_DEPTH = 3
"""Folders below the one that is searched for runs."""
_SEVERITIES = ("note", "warning", "critical")
_DIVERGED = ("not_finite", "diverged_loss")


@dataclass(frozen=True)
class RecordedFindings:
    """What was found in a run.

    Attributes:
        findings: A record for each finding, the most severe first: "kind", "severity", "step",
            "sentence", "advice", "evidence", "module", "layer" and "head".
        not_judged: A record for each rule that could not be applied: "kind" and "needs".
    """

    findings: list[dict[str, Any]] = field(default_factory=list)
    not_judged: list[dict[str, Any]] = field(default_factory=list)

    @property
    def worst(self) -> dict[str, Any] | None:
        """The most severe finding, the earliest of several; None where there is none."""
        return min(self.findings, key=_rank, default=None)

    @property
    def divergence(self) -> dict[str, Any] | None:
        """The first critical finding that says that the training diverged; None without one."""
        found = (
            one
            for one in self.findings
            if one.get("severity") == "critical" and one.get("kind") in _DIVERGED
        )
        return min(found, key=_rank, default=None)


def read_findings(run: Run) -> RecordedFindings:
    """Return the findings of a run, none where nothing judged it.

    Raises:
        JomaError: `findings.json` is damaged.
    """
    if not (run.path / FINDINGS_FILE).is_file() and FINDINGS_FILE not in run.missing:
        return RecordedFindings()
    stored = run.read_json(FINDINGS_FILE.removesuffix(".json"))
    found, missing = (_records(stored, name) for name in ("findings", "not_judged"))
    return RecordedFindings(sorted(found, key=_rank), missing)


def _records(stored: Any, name: str) -> list[dict[str, Any]]:
    """Return the objects of a list in a file, which may hold anything."""
    listed = stored.get(name) if isinstance(stored, dict) else None
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def _rank(finding: dict[str, Any]) -> tuple[int, float]:
    severity, step = finding.get("severity"), finding.get("step")
    level = _SEVERITIES.index(severity) if severity in _SEVERITIES else -1
    return -level, step if isinstance(step, int | float) else 0


RunState = Literal["running", "ended", "stopped", "died", "diverged", "damaged", "unknown"]
"""What became of a run.

- running: a process holds the lock of its folder.
- ended: it did what it was asked for.
- stopped: it was interrupted on purpose, by a person or by a rule that was set beforehand.
- died: its process ended by an error or was killed.
- diverged: it is no longer running, and a critical finding says that the loss diverged or that
  numbers are not finite.
- damaged: it cannot be read.
- unknown: how it ended was not recorded.
"""

FRESH_SECONDS = 900.0
"""Where locks cannot be tested, a run that wrote within this time counts as running."""


@dataclass(frozen=True)
class RunCondition:
    """The state of a run, and what it was decided by.

    Attributes:
        state: The state.
        reason: Why, in one sentence; "" where the state says all.
        outcome: What `outcome.json` holds.
        findings: What was found in it.
    """

    state: RunState
    reason: str
    outcome: dict[str, Any]
    findings: RecordedFindings


def state_of(run: Run) -> RunState:
    """Return whether a run is running, and how it ended."""
    return condition_of(run).state


def condition_of(run: Run) -> RunCondition:
    """Return the state of a run and why it is that; reads outcome and findings."""
    try:
        outcome, findings = read_outcome(run), read_findings(run)
        run.metrics.check_ends()
    except (JomaError, OSError) as error:
        return RunCondition("damaged", sentence_of(error), {}, RecordedFindings())
    state, reason = _state(run, outcome)
    divergence = findings.divergence
    if state != "running" and divergence is not None:
        return RunCondition("diverged", str(divergence.get("sentence", "")), outcome, findings)
    return RunCondition(state, reason, outcome, findings)


def read_outcome(run: Run) -> dict[str, Any]:
    """Return what `outcome.json` says, nothing where there is none; JomaError if it is damaged."""
    if not (run.path / OUTCOME_FILE).is_file() and OUTCOME_FILE not in run.missing:
        return {}
    outcome = run.read_json(OUTCOME_FILE.removesuffix(".json"))
    return outcome if isinstance(outcome, dict) else {}


def sentence_of(error: Exception) -> str:
    """Return an error as one sentence."""
    if isinstance(error, OSError):
        return f"{error.filename or 'the folder'} cannot be read ({error.strerror or error})"
    return str(error)


def _state(run: Run, outcome: dict[str, Any]) -> tuple[RunState, str]:
    status = outcome.get("status")
    if status == "done":
        # Also where it is locked: a process that has written this is about to leave.
        return "ended", ""
    held, why = is_locked(run.path), "locks cannot be tested here"
    here, there = platform.node(), _host(run, outcome)
    if held is not True and there not in (None, here):
        held, why = None, f"it was started on another machine, {there}"
    if held:
        return "running", ""
    if status in ("interrupted", "stopped"):
        return "stopped", str(outcome.get("stopped") or "It was interrupted.")
    if status == "failed":
        error = outcome.get("error")
        return "died", f"It failed with {error}." if error else "It failed."
    if status == "unclosed":
        return "unknown", "Its process left without closing the monitor."
    if status != "running":
        return "unknown", "It did not record how it ended."
    if held is None:
        age = max(0.0, time.time() - _last_written(run.path))
        words = f"{why[0].upper()}{why[1:]}, and it wrote last {duration(age)} ago."
        return ("running" if age < FRESH_SECONDS else "died"), words
    return "died", "Its process ended without closing the run."


def _host(run: Run, outcome: dict[str, Any]) -> str | None:
    """Return the machine that a run was started or last resumed on, where that was recorded."""
    records = [run.environment, *run.environment.get("resumed", []), outcome]
    hosts = [one["host"] for one in records if isinstance(one.get("host"), str)]
    return hosts[-1] if hosts else None


def _last_written(folder: Path) -> float:
    """Return when a file of a run was last written, in seconds since 1970."""
    files = [*folder.iterdir(), *(it for name in OWN_FOLDERS for it in folder.glob(f"{name}/*"))]
    return max((path.stat().st_mtime for path in files if path.is_file()), default=0.0)


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
                last_step, losses = run.metrics.end("loss")
                last_loss = None if losses is None else float(np.mean(losses))
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

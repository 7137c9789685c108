"""Whether a run is running, and how it ended."""

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from joma.errors import JomaError
from joma.runs._findings import RecordedFindings, read_findings
from joma.runs._folder import OUTCOME_FILE, OWN_FOLDERS, is_locked
from joma.runs._run import Run

RunState = Literal["running", "ended", "stopped", "died", "diverged", "damaged", "unknown"]
"""What became of a run.

- running: a process holds the lock of its folder.
- ended: it did what it was asked for.
- stopped: it was interrupted on purpose, by a person or by a rule that was set beforehand.
- died: its process ended by an error or was killed.
- diverged: it is no longer running, and a critical finding says that the loss diverged or that
  numbers are not finite.
- damaged: it cannot be read.
- unknown: how it ended was not recorded, as by older versions.
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
        words = f"{why[0].upper()}{why[1:]}, and it wrote last {_ago(age)} ago."
        return ("running" if age < FRESH_SECONDS else "died"), words
    return "died", "Its process ended without closing the run."


def _host(run: Run, outcome: dict[str, Any]) -> str | None:
    """Return the machine that a run was started or last resumed on, where that was recorded."""
    records = [run.environment, *run.environment.get("resumed", []), outcome]
    hosts = [one["host"] for one in records if isinstance(one.get("host"), str)]
    return hosts[-1] if hosts else None


def _last_written(folder: Path) -> float:
    """Return when a file of a run was last written, in seconds since 1970."""
    times = [0.0]
    for place in (folder, *(folder / name for name in OWN_FOLDERS)):
        try:
            times += [entry.stat().st_mtime for entry in os.scandir(place)]
        except OSError:
            continue
    return max(times)


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"

"""How a monitored training ended, kept in the `outcome.json` of a run that the monitor made."""

import os
import platform
import sys
from typing import Any

from joma.common.text import first_line
from joma.runs import Run
from joma.train.monitor.faults import Faults

_MOST_CHARACTERS = 200


class OwnOutcome:
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
        if self._ended:
            return
        self._ended = True
        outcome: dict[str, Any] = {"status": "done"}
        if isinstance(error, KeyboardInterrupt | SystemExit):
            outcome = {"status": "interrupted", "error": type(error).__name__}
        elif error is not None:
            outcome = {"status": "failed", "error": _described(error)}
        elif stopped is not None:
            outcome = {"status": "stopped", "stopped": stopped}
        self._write(outcome)

    def abandon(self) -> None:
        """Write that the process left, or forgot the monitor, without closing it."""
        if self._ended:
            return
        error = _last_error()
        if error is not None and id(error) != self._error_before:
            self.end(error)
        else:
            self._ended = True
            self._write({"status": "unclosed"})

    def _write(self, outcome: dict[str, Any]) -> None:
        run = self._run
        if run is not None and self._process == os.getpid():
            write = lambda: run.write_json("outcome", outcome)  # noqa: E731
            self._faults.tried("outcome.json", write, effect="not written")


def _last_error() -> BaseException | None:
    """Return the exception that ended the program, or the last one of an interactive session."""
    return getattr(sys, "last_value", None)


def _described(error: BaseException) -> str:
    name, line = type(error).__name__, first_line(error)
    return (name if line == name else f"{name}: {line}")[:_MOST_CHARACTERS]

"""Where a monitor's numbers go: the run folder and the loggers, of which any may fail."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from joma.runs import Run
from joma.train.monitor._faults import Faults
from joma.train.monitor._history import History
from joma.train.monitor._row import Row

Logger = Callable[[int, Mapping[str, float]], None]
"""Called at every measurement with the step and values by name, "attention_entropy/layer0"."""

WRITING = "writing to the run folder"
MOST_UNWRITTEN = 500_000
"""Numbers that wait while the run folder cannot be written; further ones are not written."""


class Recorder:
    """Writes rows to a run folder and hands them to loggers.

    Where the folder cannot be written, rows stay in memory and every later `flush` tries again. A
    logger that raises is dropped.

    Args:
        run: The run folder; None where it could not be made.
        loggers: Called with each measurement.
        faults: Where failures are noted.

    Attributes:
        history: The series recorded so far, which findings are judged by.
    """

    def __init__(self, run: Run | None, loggers: Sequence[Logger], faults: Faults) -> None:
        self.run = run
        self._loggers = list(loggers)
        self._faults = faults
        self.history = History()
        self._unwritten = 0

    def read_earlier(self) -> None:
        """Add what the run folder holds already to the history."""
        if self.run is not None:
            run = self.run
            self._faults.tried(
                "the run folder",
                lambda: self.history.add_columns(run.metrics.read()),
                effect="not readable",
            )

    def losses(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Record the losses of several steps; nothing is written before `flush`."""
        self.history.add("loss", steps, values)
        room = self._room(len(steps))
        if not room:
            return
        steps, values = steps[:room], values[:room]
        if self.run is not None:
            run = self.run
            self._faults.tried(
                WRITING,
                lambda: run.metrics.append_many(steps, "loss", [[value] for value in values]),
                effect="failed",
            )

    def rows(self, step: int, rows: Sequence[Row]) -> None:
        """Record the rows of one measurement; nothing is written before `flush`."""
        self.history.add_rows(step, rows)
        rows = rows[: self._room(len(rows))]
        if self.run is not None and rows:
            self._faults.tried(WRITING, lambda: self._append(step, rows), effect="failed")

    def _append(self, step: int, rows: Sequence[Row]) -> None:
        assert self.run is not None, "asked by the caller"
        for row in rows:
            self.run.metrics.append(
                step,
                row.name,
                row.value,
                module=row.module,
                layer=row.layer,
                head=row.head,
                bound=row.bound,
                kind=row.kind,
            )

    def flush(self) -> None:
        """Write what was recorded; where that fails it stays in memory."""
        if self.run is None:
            return
        try:
            self.run.metrics.flush()
        except Exception as error:  # a full disk, a folder that is gone
            self._faults.note(
                WRITING, error, effect="failed, and numbers stay in memory until it succeeds,"
            )
        else:
            self._unwritten = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Call the loggers; one that raises is dropped."""
        for logger in tuple(self._loggers):
            try:
                logger(step, values)
            except Exception as error:  # a dashboard's own trouble
                name = getattr(logger, "__qualname__", type(logger).__name__)
                self._faults.note(f"logger {name}", error, effect="dropped")
                self._loggers.remove(logger)

    def write_findings(self, findings: Mapping[str, Any]) -> bool:
        """Write `findings.json`, whole or not at all; return whether that succeeded.

        Args:
            findings: As `Judgement.as_json` gives them.
        """
        if self.run is None:
            return False
        run = self.run
        written = self._faults.tried(
            "findings.json", lambda: run.write_json("findings", findings), effect="not written"
        )
        return written is not None

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        if self.run is not None:
            run = self.run
            self._faults.tried(
                "merging the metrics log", lambda: run.metrics.compact(), effect="failed"
            )

    def _room(self, count: int) -> int:
        """Count rows that wait to be written; return how many of them may, at most `count`."""
        if self.run is None:
            return 0
        room = max(0, min(count, MOST_UNWRITTEN - self._unwritten))
        self._unwritten += room
        if room < count:
            self._faults.note(
                "numbers", f"{MOST_UNWRITTEN} of them wait to be written already", effect="dropped"
            )
        return room


def logged(rows: Sequence[Row]) -> dict[str, float]:
    """Return the values of rows by their logger names, each of which names one row."""
    named: dict[str, float] = {}
    for row in rows:
        key = row.key
        if key in named:
            key = f"{key}/{row.module}"
        named[key] = row.value
    return named

"""Where a monitor's numbers go: the run folder and the loggers, of which any may fail."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.runs import Run
from joma.train.findings import Series, series_of
from joma.train.monitor._faults import Faults
from joma.train.monitor._row import Row

Logger = Callable[[int, Mapping[str, float]], None]
"""Called at every measurement with the step and values by name, "attention_entropy/layer0"."""

WRITING = "writing to the run folder"
MOST_KEPT = 500_000
"""Numbers kept in memory while the run folder cannot be written; further ones are dropped."""


class Recorder:
    """Writes rows to a run folder and hands them to loggers.

    Where the folder cannot be written, rows stay in memory and every later `flush` tries again. A
    logger that raises is dropped.

    Args:
        run: The run folder; None where it could not be made.
        loggers: Called with each measurement.
        faults: Where failures are noted.
    """

    def __init__(self, run: Run | None, loggers: Sequence[Logger], faults: Faults) -> None:
        self.run = run
        self._loggers = list(loggers)
        self._faults = faults
        self._unwritten: list[tuple[int, Row]] = []

    def losses(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Record the losses of several steps; nothing is written before `flush`."""
        room = self._room(len(steps))
        if not room:
            return
        steps, values = steps[:room], values[:room]
        self._unwritten += [
            (step, Row("loss", value)) for step, value in zip(steps, values, strict=True)
        ]
        if self.run is not None:
            run = self.run
            self._faults.tried(
                WRITING,
                lambda: run.metrics.append_many(steps, "loss", [[value] for value in values]),
                effect="failed",
            )

    def rows(self, step: int, rows: Sequence[Row]) -> None:
        """Record the rows of one measurement; nothing is written before `flush`."""
        rows = rows[: self._room(len(rows))]
        self._unwritten += [(step, row) for row in rows]
        if self.run is not None:
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
            self._unwritten = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Call the loggers; one that raises is dropped."""
        for logger in tuple(self._loggers):
            try:
                logger(step, values)
            except Exception as error:  # a dashboard's own trouble
                name = getattr(logger, "__qualname__", type(logger).__name__)
                self._faults.note(f"logger {name}", error, effect="dropped")
                self._loggers.remove(logger)

    def series(self) -> list[Series]:
        """Return everything recorded so far, from the folder and from memory."""
        self.flush()
        found = []
        if self.run is not None:
            run = self.run
            columns = self._faults.tried(
                "the run folder", lambda: run.metrics.read(), effect="not readable"
            )
            if columns is not None:
                found.append(columns)
        if self._unwritten or not found:
            found.append(_columns(self._unwritten))
        names = ("step", "member", "name", "module", "kind", "layer", "head", "value")
        return series_of({name: np.concatenate([one[name] for one in found]) for name in names})

    def close(self, findings: Mapping[str, Any] | None) -> None:
        """Write what is left, and the findings.

        Args:
            findings: As `findings.json` holds them; None to leave the file as it is.
        """
        self.flush()
        if self.run is None:
            return
        run = self.run
        self._faults.tried(
            "merging the metrics log", lambda: run.metrics.compact(), effect="failed"
        )
        if findings is not None:
            self._faults.tried(
                "findings.json", lambda: run.write_json("findings", findings), effect="not written"
            )

    def _room(self, count: int) -> int:
        """Return how many more rows may be kept, at most `count`."""
        room = max(0, min(count, MOST_KEPT - len(self._unwritten)))
        if room < count:
            self._faults.note(
                "numbers", f"{MOST_KEPT} of them wait to be written already", effect="dropped"
            )
        return room


def _columns(rows: Sequence[tuple[int, Row]]) -> dict[str, NDArray[Any]]:
    """Return rows as the metrics log gives them."""
    return {
        "step": np.array([step for step, _ in rows], dtype=np.int64),
        "member": np.zeros(len(rows), dtype=np.int32),
        "name": np.array([row.name for _, row in rows], dtype=object),
        "module": np.array([row.module or "" for _, row in rows], dtype=object),
        "kind": np.array([row.kind for _, row in rows], dtype=object),
        "layer": np.array([-1 if row.layer is None else row.layer for _, row in rows]),
        "head": np.array([-1 if row.head is None else row.head for _, row in rows]),
        "value": np.array([row.value for _, row in rows], dtype=np.float64),
    }


def logged(rows: Sequence[Row]) -> dict[str, float]:
    """Return the values of rows by their logger names, each of which names one row."""
    named: dict[str, float] = {}
    for row in rows:
        key = row.key
        if key in named:
            key = f"{key}/{row.module}"
        named[key] = row.value
    return named

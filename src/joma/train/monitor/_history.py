"""What a monitor recorded, in memory: the series that findings are judged by."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.train.findings import Series, series_of
from joma.train.monitor._row import Row

MOST_NUMBERS = 2_000_000
"""Numbers kept in memory (16 bytes each); beyond that the older half of long series is thinned."""
_LONG = 1024
"""Numbers up to which a series is never thinned."""

_Key = tuple[str, str, str, int | None]


class History:
    """The series of a training, grown row by row, so that nothing is read again to judge them.

    Numbers of single heads are not kept: they are recorded, and not judged.

    Attributes:
        changes: How many numbers were ever added; the same number means the same series.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._numbers, self._most = 0, MOST_NUMBERS
        self._series: dict[_Key, _Growing] = {}

    def add_rows(self, step: int, rows: Sequence[Row]) -> None:
        """Add the rows of one step."""
        for row in rows:
            if row.head is None:
                key = row.name, row.module or "", row.kind, row.layer
                self._add(key, [step], [row.value])

    def add(self, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add numbers of the whole model.

        Args:
            name: What they are, "loss".
            steps: Their steps.
            values: One for each step.
        """
        self._add((name, "", "", None), steps, values)

    def add_columns(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Add what a metrics log holds, as `run.metrics.read()` gives it."""
        kept = columns["head"] < 0
        for one in series_of({name: column[kept] for name, column in columns.items()}):
            self._add((one.name, one.module, one.kind, one.layer), one.steps, one.values)

    def series(self) -> list[Series]:
        """Return the series as they are now, in the order in which they began."""
        return [
            Series(name, *growing.arrays, module, layer, None, kind)
            for (name, module, kind, layer), growing in self._series.items()
        ]

    def _add(
        self,
        key: _Key,
        steps: Sequence[int] | NDArray[np.int64],
        values: Sequence[float] | NDArray[np.float64],
    ) -> None:
        if len(steps) == 0:
            return
        growing = self._series.get(key)
        if growing is None:
            growing = self._series[key] = _Growing()
        growing.extend(steps, values)
        self.changes += len(steps)
        self._numbers += len(steps)
        if self._numbers > self._most:
            for one in self._series.values():
                one.thin()
            self._numbers = sum(map(len, self._series.values()))
            # Many series that are all short cannot be thinned, and need not be tried at every row.
            self._most = max(MOST_NUMBERS, 5 * self._numbers // 4)


class _Growing:
    """One series in arrays with room for more."""

    def __init__(self) -> None:
        self._steps = np.empty(4, dtype=np.int64)
        self._values = np.empty(4, dtype=np.float64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps, which increase, and values."""
        return self._steps[: self._length], self._values[: self._length]

    def extend(
        self,
        steps: Sequence[int] | NDArray[np.int64],
        values: Sequence[float] | NDArray[np.float64],
    ) -> None:
        """Add numbers; one of a step that is there takes its place."""
        last = int(self._steps[self._length - 1]) if self._length else -1
        if len(steps) == 1:  # the usual case: one more row
            in_order = steps[0] > last
        else:
            steps = np.asarray(steps, dtype=np.int64)
            in_order = bool(steps[0] > last) and bool((np.diff(steps) > 0).all())
        if not in_order:
            self._merge(steps, values)
            return
        end = self._length + len(steps)
        self._reserve(end)
        self._steps[self._length : end] = steps
        self._values[self._length : end] = values
        self._length = end

    def _merge(self, steps: Any, values: Any) -> None:
        before = self.arrays
        all_steps = np.concatenate([before[0], np.asarray(steps, dtype=np.int64)])
        all_values = np.concatenate([before[1], np.asarray(values, dtype=np.float64)])
        order = np.argsort(all_steps, kind="stable")
        order = order[np.append(np.diff(all_steps[order]) > 0, True)]  # the later one counts
        self._steps, self._values = all_steps[order], all_values[order]
        self._length = len(order)

    def _reserve(self, length: int) -> None:
        if length > len(self._steps):
            room = max(length, 2 * len(self._steps))
            # New arrays: series that were given away keep theirs.
            steps, values = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.float64)
            steps[: self._length], values[: self._length] = self.arrays
            self._steps, self._values = steps, values

    def thin(self) -> None:
        """Drop every second number of the older half, if the series is long."""
        if self._length > _LONG:
            half = self._length // 2
            kept = np.concatenate([np.arange(0, half, 2), np.arange(half, self._length)])
            self._steps, self._values = self._steps[kept], self._values[kept]
            self._length = len(kept)

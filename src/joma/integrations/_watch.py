"""A monitor whose life follows the events of a trainer."""

import atexit
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from joma.errors import JomaError
from joma.runs import Run
from joma.train.monitor import Monitor


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a Monitor, as far as they can be checked before there is a model."""
    from_trainer = ("model", "optimizer", "step")
    known = [name for name in inspect.signature(Monitor).parameters if name not in from_trainer]
    for name in options:
        if name not in known:
            raise JomaError(f"options must be among {', '.join(known)}, got {name!r}")
    return dict(options)


class Watch:
    """At most one monitor at a time, begun and ended with a training.

    Args:
        options: of the monitor.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = checked_options(options)
        self._monitor: Monitor | None = None
        self._running = False

    @property
    def monitor(self) -> Monitor:
        """Of the training that runs, or ran last."""
        if self._monitor is None:
            raise JomaError("monitor is there once a training has begun, not before")
        return self._monitor

    @property
    def runs(self) -> bool:
        """Whether a training runs."""
        return self._running

    @property
    def holds(self) -> bool:
        """Whether inputs to measure on were given."""
        return any(self._options.get(name) is not None for name in ("inputs", "held"))

    def begin(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        step: int,
        folder: Run | Path | None,
    ) -> Monitor:
        """Make the monitor; one left open by a training that broke off is closed before.

        Args:
            model: The model to watch.
            optimizer: The optimizer, a list of several, or None.
            step: Optimizer steps made before. After some, the run in the folder is resumed.
            folder: The run or its folder, unless the options say another.
        """
        self.end()
        options = dict(self._options)
        run = options.pop("run", None)
        run = folder if run is None else run
        self._monitor = monitor = Monitor(model, optimizer, run=run, step=step, **options)
        atexit.register(monitor.close)  # trainers do not report when they are interrupted
        self._running = True
        return monitor.__enter__()

    def step(self, loss: Tensor | None) -> str | None:
        """Record a step; return why the training is to stop, None where it is not."""
        return self.monitor.stop_reason if self.monitor.step(loss) else None

    def end(self) -> None:
        """Close the monitor, if there is one that is open."""
        if self._monitor is not None:
            atexit.unregister(self._monitor.close)
            self._monitor.close()
        self._running = False

    def summary(self) -> str:
        """Return what was found; nothing in processes that do not write."""
        return "" if self._monitor is None else self._monitor.summary()

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


class Watch:
    """At most one monitor at a time, begun and ended with a training.

    Args:
        options: Options of the monitor, checked as far as they can be before there is a model.

    Attributes:
        running: Whether a training runs.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        from_trainer = ("model", "optimizer", "step")
        known = [name for name in inspect.signature(Monitor).parameters if name not in from_trainer]
        for name in options:
            if name not in known:
                raise JomaError(f"options must be among {', '.join(known)}, got {name!r}")
        self._options = dict(options)
        self._monitor: Monitor | None = None
        self.running = False

    @property
    def monitor(self) -> Monitor:
        """Of the training that runs, or ran last."""
        if self._monitor is None:
            raise JomaError("monitor is there once a training has begun, not before")
        return self._monitor

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
        if self._monitor is not None:
            self._leave(self._monitor)
        options = {**self._options, "step": step}
        if options.get("run") is None:
            options["run"] = folder
        self._monitor = monitor = Monitor(model, optimizer, **options)
        atexit.register(monitor.abandon)  # trainers do not report when they are interrupted
        self.running = True
        return monitor.__enter__()

    def step(self, loss: Tensor | None, *, speaks: bool) -> bool:
        """Record a step; return whether the training is to stop.

        Args:
            loss: Loss of the step.
            speaks: Whether this process prints why.
        """
        stops = self.monitor.step(loss)
        if stops and speaks:
            print(f"Training stops: {self.monitor.stop_reason}")
        return stops

    def end(self) -> None:
        """Close the monitor, if there is one that is open."""
        if self._monitor is not None:
            atexit.unregister(self._monitor.abandon)
            self._monitor.close()
        self.running = False

    @staticmethod
    def _leave(monitor: Monitor) -> None:
        atexit.unregister(monitor.abandon)
        monitor.abandon()

    def end_and_print(self) -> None:
        """Close the monitor and print what was found; nothing in processes that do not write."""
        self.end()
        if self._monitor is not None and (summary := self._monitor.summary()):
            print(summary)

"""What follows the events of a trainer: a monitor, and backward passes that move parameters."""

import atexit
import contextlib
import inspect
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from joma.common.sharded import is_dtensor
from joma.errors import JomaError
from joma.runs import Run
from joma.train.monitor import Monitor, unwrapped_optimizer


class MonitoredTraining:
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
        self.options = dict(options)
        self._monitor: Monitor | None = None
        self.running = False

    @property
    def monitor(self) -> Monitor:
        """Of the training that runs, or ran last."""
        if self._monitor is None:
            raise JomaError("monitor is there once a training has begun, not before")
        return self._monitor

    def begin(
        self, model: nn.Module, optimizer: Any, *, step: int, folder: Run | Path | None
    ) -> Monitor:
        """Make the monitor; one left open by a training that broke off is closed before.

        Args:
            model: The model to watch.
            optimizer: The optimizer, a list of several, or None.
            step: Optimizer steps made before. After some, the run in the folder is resumed.
            folder: The run or its folder, unless the options say another.
        """
        if self._monitor is not None:
            atexit.unregister(self._monitor.abandon)
            self._monitor.abandon()
        options = {**self.options, "step": step}
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

    def end(self, *, says: bool = False) -> None:
        """Close the monitor, if there is one that is open.

        Args:
            says: Whether to print what was found; processes that do not write have nothing to say.
        """
        self.running = False
        if self._monitor is not None:
            atexit.unregister(self._monitor.abandon)
            self._monitor.close()
            if says and (summary := self._monitor.summary()):
                print(summary)


class BackwardPasses:
    """Marks the backward passes of each step for optimizers with `per_layer`; others need it not.

    Args:
        optimizers: The optimizers of a trainer, wrapped or not.
        clip: The largest norm of the gradient that the trainer would clip to; None or 0 for none.
        setting: What that is called in the trainer.
        scaled: Whether the trainer scales gradients, as it does in float16.
        processes: How many processes train together.

    Attributes:
        optimizers: The optimizers that passes are marked for.

    Raises:
        JomaError: The trainer scales or averages gradients after the optimizer has used them.
    """

    def __init__(
        self,
        optimizers: Iterable[Any],
        *,
        clip: float | None,
        setting: str,
        scaled: bool,
        processes: int,
    ) -> None:
        unwrapped = map(unwrapped_optimizer, optimizers)
        self.optimizers = [one for one in unwrapped if getattr(one, "per_layer", False)]
        self._open = contextlib.ExitStack()
        for one in self.optimizers:
            if scaled:
                raise JomaError(
                    "per_layer needs gradients that are not scaled; train in bfloat16 or float32 "
                    "instead of float16"
                )
            parameters = [it for group in one.param_groups for it in group["params"]]
            if processes > 1 and not all(is_dtensor(it) for it in parameters):
                raise JomaError(
                    "per_layer needs FSDP2 where a trainer runs several processes: their "
                    "DistributedDataParallel averages gradients after the optimizer has used them"
                )
            if clip and one.clip_norm is None:
                one.clip_norm = float(clip)
                warnings.warn(
                    f"{setting} = {clip} is applied as clip_norm of the optimizer, to the norm of "
                    "the projected gradients: per_layer leaves no others to clip",
                    stacklevel=3,
                )

    def begin(self, *, last: bool) -> None:
        """Begin a pass.

        Args:
            last: Whether it is the last one of its step.
        """
        self.end()
        for one in self.optimizers:
            self._open.enter_context(one.accumulate(last=last))

    def end(self) -> None:
        """End the pass that was begun last, if it has not ended."""
        self._open.close()

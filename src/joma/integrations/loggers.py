"""Dashboards for every measurement: `Monitor(model, loggers=[tensorboard("runs/mine")])`.

What is logged is the same everywhere, under names like `attention_entropy/layer0/head1`. Nothing is
opened before the first measurement, and only in the process that writes.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from joma.errors import JomaError, how_to_install

_STEP = "joma/step"
_Log = Callable[[int, Mapping[str, float]], None]
_Close = Callable[[], None]


class Dashboard:
    """One place that numbers go to; a `Logger` of the monitor.

    Args:
        begin: Opens it, and returns what to call with every measurement and at the end.
    """

    def __init__(self, begin: Callable[[], tuple[_Log, _Close]]) -> None:
        self._begin = begin
        self._open: tuple[_Log, _Close] | None = None

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log a measurement.

        Args:
            step: Step of the training.
            values: Values by name.
        """
        if self._open is None:
            self._open = self._begin()
        self._open[0](step, values)

    def close(self) -> None:
        """Close what was opened here; a run that was given stays open."""
        if self._open is not None:
            self._open[1]()
            self._open = None


def tensorboard(folder: Path | str) -> Dashboard:
    """A logger for TensorBoard: `tensorboard --logdir FOLDER` shows what it writes.

    Args:
        folder: of the event file, made when there is none.
    """
    _need("tensorboard", "TensorBoard")

    def begin() -> tuple[_Log, _Close]:
        from torch.utils.tensorboard.writer import SummaryWriter

        writer = SummaryWriter(str(folder))

        def log(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()  # what a killed training measured is on disk

        return log, writer.close

    return Dashboard(begin)


def wandb(run: Any = None) -> Dashboard:
    """A logger for Weights & Biases.

    Names begin with `joma/` and are drawn over `joma/step`, the monitor's own count of steps, so
    that nothing is lost where the training logs to the same run by another count.

    Args:
        run: what `wandb.init` returned; otherwise the run active at the first measurement, or a
            new one.
    """
    module = _need("wandb", "Weights & Biases")

    def begin() -> tuple[_Log, _Close]:
        active = module.run if run is None else run
        begun = active is None
        if active is None:
            active = module.init()
        active.define_metric(_STEP)
        active.define_metric("joma/*", step_metric=_STEP)

        def log(step: int, values: Mapping[str, float]) -> None:
            active.log({_STEP: step, **{f"joma/{name}": value for name, value in values.items()}})

        return log, active.finish if begun else lambda: None

    return Dashboard(begin)


def trackio(project: str = "joma", **options: Any) -> Dashboard:
    """A logger for trackio, in a run of its own: `trackio show` shows it.

    Args:
        project: name.
        **options: of `trackio.init`: `name`, `space_id`, `config`, ….
    """
    module = _need("trackio", "trackio")

    def begin() -> tuple[_Log, _Close]:
        active = module.init(project=project, **options)

        def log(step: int, values: Mapping[str, float]) -> None:
            active.log(dict(values), step=step)

        return log, active.finish

    return Dashboard(begin)


def _need(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise JomaError(f"logging to {what} needs {module}: {how_to_install('track')}") from error

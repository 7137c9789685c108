"""The options of a monitor, checked."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.probes import AttentionMap
from joma.probes.metrics import MONITORED, checked
from joma.runs import Run
from joma.train.monitor._alerts import checked_stop_on

METRICS: Mapping[str, str] = {name: metric.sentence for name, metric in MONITORED.items()}
"""What is measured, by name."""


@dataclass
class Options:
    """What decides a monitor's numbers, checked; kept in the run's configuration.

    Attributes:
        every: Steps between measurements.
        metrics: Names of the metrics to measure.
        theorem1: Layer on which Theorem 1 is measured, or None.
        budget: Share of the training's time for measurements, or None for no limit.
        stop_on: Conditions that end the training.

    Raises:
        JomaError: One of them is not possible.
    """

    every: int
    metrics: Sequence[str] | None
    theorem1: int | None
    budget: float | None
    stop_on: Collection[str]

    def __post_init__(self) -> None:
        budget = self.budget
        if budget is not None and not (_is_number(budget) and 0 < budget <= 1):
            raise JomaError(f"budget must be a share above 0, at most 1, or None, got {budget!r}")
        if not _is_sequence(self.stop_on):
            given = repr(self.stop_on)
            raise JomaError(f'stop_on must be a set of names, as in {{"nan"}}, got {given}')
        if self.metrics is not None and not _is_sequence(self.metrics):
            raise JomaError(f"metrics must be a list of names, got {self.metrics!r}")
        self.every = whole_number("every", self.every, 1)
        if self.theorem1 is not None:
            self.theorem1 = whole_number("theorem1", self.theorem1, 0)
        chosen = checked(MONITORED if self.metrics is None else self.metrics, MONITORED)
        of_layer = [metric for metric in chosen if metric.needs == "theorem1"]
        if self.theorem1 is None and self.metrics is not None and of_layer:
            name = of_layer[0].name
            raise JomaError(f"theorem1 must be the layer to measure {name} on, got None")
        left_out = of_layer if self.theorem1 is None else []
        self.metrics = tuple(metric.name for metric in chosen if metric not in left_out)
        self.stop_on = checked_stop_on(tuple(self.stop_on))


def check_kinds(run: Any, attention: Any, loggers: Any, on_finding: Any) -> None:
    """Raise JomaError where an option is of another kind than it must be."""
    functions = _is_sequence(loggers) and all(map(callable, loggers))
    for is_right, name, right, given in (
        (isinstance(run, Run | Path | str | None), "run", "a Run, the path of a folder", run),
        (isinstance(attention, AttentionMap | None), "attention", "an AttentionMap", attention),
        (functions, "loggers", "a list of functions", loggers),
        (on_finding is None or callable(on_finding), "on_finding", "a function", on_finding),
    ):
        if not is_right:
            raise JomaError(f"{name} must be {right} or None, got {given!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)

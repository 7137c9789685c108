"""A metrics log as plain rows."""

from pathlib import Path
from typing import Any

import numpy as np

from joma.runs import Metrics

COLUMNS = {
    "step": np.int64,
    "time": np.float64,
    "member": np.int32,
    "name": object,
    "module": object,
    "kind": object,
    "layer": np.int32,
    "head": np.int32,
    "value": np.float64,
    "bound": np.float64,
}


def rows(metrics: Metrics) -> list[tuple[Any, ...]]:
    """All rows, without their time; NaN as None, so that rows can be compared."""
    log = metrics.read()
    columns = [log[name].tolist() for name in COLUMNS if name != "time"]
    return [tuple(None if x != x else x for x in row) for row in zip(*columns, strict=True)]


def in_parts(folder: Path, parts: int) -> Metrics:
    """A log with a step in each part, and a late row of step 0 in the last."""
    metrics = Metrics(folder)
    for step in range(parts):
        metrics.append(step, "loss", [step + 0.5, -step])
        if step == parts - 1:
            metrics.append(0, "late", 7.0)
        metrics.flush()
    return metrics

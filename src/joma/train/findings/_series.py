"""The recorded numbers of a training as series: one number over its steps."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError


@dataclass(frozen=True, eq=False)
class Series:
    """One number over the steps of a training, in their order.

    Attributes:
        name: of what was measured, "attention_entropy".
        steps: at which, increasing.
        values: as many.
        module: of what, "" where of the whole model.
        layer: in which layer, None for none.
        head: of which head, None for all.
        kind: of attention ("self", "decoder cross"), "" for what is not attention.
    """

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    module: str = ""
    layer: int | None = None
    head: int | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        checked_series(self.steps, self.values)


def series_of(columns: Mapping[str, NDArray[Any]], member: int = 0) -> list[Series]:
    """The series in the columns of a metrics log, as `run.metrics.read()` gives them.

    Args:
        columns: by name.
        member: of an ensemble.
    """
    rows: dict[tuple[str, str, str, int, int], list[int]] = defaultdict(list)
    names, modules, kinds = columns["name"], columns["module"], columns["kind"]
    layers, heads = columns["layer"].tolist(), columns["head"].tolist()
    for row in np.flatnonzero(columns["member"] == member).tolist():
        what = str(names[row]), str(modules[row]), str(kinds[row])
        rows[*what, layers[row], heads[row]].append(row)
    found = []
    for (name, module, kind, layer, head), places in rows.items():
        steps, values = columns["step"][places], columns["value"][places]
        order = np.argsort(steps, kind="stable")
        order = order[np.append(np.diff(steps[order]) > 0, True)]  # what was logged again counts
        where = (None if layer < 0 else layer, None if head < 0 else head)
        found.append(Series(name, steps[order], values[order], module, *where, kind))
    return found


def checked_series(steps: ArrayLike, values: ArrayLike) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Steps and values as arrays, if they are a series."""
    at, numbers = np.asarray(steps), np.asarray(values, dtype=np.float64)
    if at.ndim != 1 or at.shape != numbers.shape:
        raise JomaError(
            f"values must be one for each step, got shapes {numbers.shape} and {at.shape}"
        )
    if len(at) > 1 and not (np.diff(at) > 0).all():
        raise JomaError("steps must increase from one to the next")
    return at, numbers

"""Curves of a metrics log: one for each layer, or for each attention of a layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Curve:
    """One number over the steps of a run.

    Attributes:
        label: What it is of: the layer's number, with the kind of attention where a layer has
            several; "" for the whole model.
        layer: Layer index, None for what is in no layer.
        steps: Increasing.
        values: One for each step; they may be NaN or infinite.
    """

    label: str
    layer: int | None
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


def curves_of(log: Mapping[str, NDArray[Any]], metric: str) -> list[Curve]:
    """Return a metric by layer, from what `run.metrics.read()` gives.

    Of an attention it is the mean over its heads, of a layer's weights the mean over its matrices;
    of an ensemble the mean over members. What is in no layer is left out where anything is in one.

    Args:
        log: Columns by name.
        metric: The metric's name.
    """
    chosen = log["name"] == metric
    chosen &= _whole(log, chosen)
    if np.any(log["layer"][chosen] >= 0):
        chosen &= log["layer"] >= 0
    if not chosen.any():
        return []
    rows = {name: log[name][chosen] for name in ("step", "layer", "module", "kind", "value")}
    module = np.where(rows["kind"] != "", rows["module"], "")
    places = [*zip(rows["layer"].tolist(), rows["kind"], module, strict=True)]
    known = sorted(set(places), key=lambda it: (it[1], it[0], it[2]))  # kind by kind
    numbers = {place: number for number, place in enumerate(known)}
    place = np.array([numbers[it] for it in places])
    curves, labels = [], _labels(known)
    for number, (layer, _, _) in enumerate(known):
        own = place == number
        steps, where = np.unique(rows["step"][own], return_inverse=True)
        values = np.bincount(where, rows["value"][own]) / np.bincount(where)
        curves.append(Curve(labels[number], None if layer < 0 else int(layer), steps, values))
    return curves


def loss_curves(log: Mapping[str, NDArray[Any]], metric: str = "loss") -> list[Curve]:
    """Return a metric of the whole model, one curve for each member of an ensemble.

    Args:
        log: As `run.metrics.read()` gives it.
        metric: Its name, "loss" or "validation_loss".
    """
    chosen = log["name"] == metric
    curves = []
    for member in np.unique(log["member"][chosen]).tolist():
        own = chosen & (log["member"] == member)
        steps, where = np.unique(log["step"][own], return_inverse=True)
        values = np.bincount(where, log["value"][own]) / np.bincount(where)
        curves.append(Curve("" if member == 0 else f"member {member}", None, steps, values))
    return curves


def _whole(log: Mapping[str, NDArray[Any]], chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the rows of all heads together, or of heads where nothing else was recorded."""
    whole = log["head"] < 0
    with_whole = set(log["module"][chosen & whole].tolist())
    alone = [module not in with_whole for module in log["module"].tolist()]
    return whole | np.array(alone, dtype=bool)


def _labels(places: list[tuple[int, str, str]]) -> list[str]:
    layers = [layer for layer, _, _ in places]
    labels = []
    for layer, kind, module in places:
        words = [] if layer < 0 else [str(layer)]
        if layers.count(layer) > 1:
            same = [it for it in places if it[0] == layer and it[1] == kind]
            words += [kind] if len(same) == 1 else [kind, module.rpartition(".")[2]]
        labels.append(" ".join(word for word in words if word))
    return labels

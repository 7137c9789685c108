"""What both Table 1 experiments share: hidden nodes, the controls of NCorr, and their results."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.data import Batch
from joma.experiments._frame import columns, groups_done, mean_and_std, read_metric
from joma.probes import held_out, planted, shuffled
from joma.runs import Run
from joma.train import Ensemble

PLANTED = (0.7, 0.8, 0.9, 0.95, 1.0)
"""Correlations of the nodes that are planted to measure the power of a control."""


def pooled_nodes(
    ensemble: Ensemble, batch: Batch, chunk: int | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return the hidden activations of each layer, max-pooled over the sequence, and the outputs.

    Args:
        ensemble: The networks.
        batch: What they are given.
        chunk: How many of the batch's sequences to take at a time; all where None.

    Returns:
        For each layer (E, B, hidden), and (E, B, outputs).
    """
    pooled: list[list[Tensor]] = []

    def watch(name: str, layer: int, x: Tensor) -> None:
        if name == "hidden":
            pooled[-1].append(x.amax(2))

    outputs = []
    with ensemble.evaluating() as model:
        for tokens in batch.tokens.split(chunk or batch.tokens.shape[1], dim=1):
            pooled.append([])
            outputs.append(model(tokens, leading=batch.leading, watch=watch))
    return [torch.cat(parts, 1) for parts in zip(*pooled, strict=True)], torch.cat(outputs, 1)


def controls(over: str, latents: Tensor, nodes: Tensor, **options: Any) -> dict[str, Tensor]:
    """Return NCorr's two controls over classes or samples, by their names in the metrics."""
    chosen = held_out(latents, nodes, **options)
    return {
        f"held_out_{over}": chosen.mean,
        f"counted_{over}": chosen.counted.double().mean(-1),
        f"shuffled_{over}": shuffled(latents, nodes, **options).mean,
    }


def planted_name(correlation: float) -> str:
    """Return the name that the control has in the metrics where nodes were planted."""
    return f"held_out_planted_{correlation:g}"


def power(latents: Tensor, nodes: Tensor, **options: Any) -> dict[str, Tensor]:
    """Return what `held_out` reads where every latent has a node of known correlation.

    Args:
        latents: (..., S, N).
        nodes: Activations of a real network, (..., S, H); a node for each latent is added to them.
        **options: Arguments of `held_out`.
    """
    found = {}
    for correlation in PLANTED:
        more = planted(latents, nodes, correlation, weights=options.get("weights"))
        found[planted_name(correlation)] = held_out(latents, more, **options).mean
    return found


@dataclass(frozen=True, eq=False)
class CellResults:
    """What was measured in the cells that are done.

    Attributes:
        cells: The cells that are done.
        steps: The steps of the measurements: untrained, after one step, …, at the end.
        by_level: By measure, of each level of latents, the class included,
            (cells, levels, steps, seeds); NaN where it was not taken.
        whole: By measure, of the whole network, (cells, steps, seeds).
    """

    cells: tuple[Any, ...]
    steps: tuple[int, ...]
    by_level: Mapping[str, np.ndarray]
    whole: Mapping[str, np.ndarray]

    def at(self, measure: str, at: int = -1) -> np.ndarray:
        """Return a measure at one of the measurements, (cells, levels, seeds)."""
        return self.by_level[measure][:, :, at]

    def mean(self, measure: str, at: int = -1) -> np.ndarray:
        """Return its mean over seeds, (cells, levels)."""
        return self.at(measure, at).mean(-1)

    def text(self, measure: str, cell: int, s: int, at: int = -1) -> str:
        """Return its mean and spread of a cell and level, as a table has it."""
        values = self.at(measure, at)[cell, s]
        return "–" if np.isnan(values).any() else mean_and_std(values)


def collect(
    run: Run,
    groups: Mapping[str, Sequence[Any]],
    size: Any,
    levels: int,
    by_level: Iterable[str],
    whole: Iterable[str],
) -> CellResults:
    """Return what the metrics of the groups that are done hold.

    Args:
        run: The experiment's run.
        groups: The cells of every group, by name.
        size: The size of the experiment.
        levels: The most levels that a cell has.
        by_level: Names of the measures of each level.
        whole: Names of the measures of the whole network.
    """
    done = groups_done(run, groups)
    read = partial(read_metric, done.values(), size.measure_at, size.seeds)
    return CellResults(
        tuple(cell for group in done for cell in groups[group]),
        size.measure_at,
        {name: read(name, levels) for name in by_level},
        {name: read(name) for name in whole},
    )


def tables(
    measured: Mapping[str, np.ndarray],
    label: Callable[..., dict[str, Any]],
    more: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {},
) -> dict[str, dict[str, list[Any]]]:
    """Return a table with a row for each number of every network, and one with their means.

    Args:
        measured: By measure, numbers whose last axis is the networks; rows of NaN are left out.
        label: Returns the first entries of a row, given the measure and the other indices.
        more: Returns further entries of a row of means.
    """
    seeds, means = [], []
    for measure, values in measured.items():
        for place in np.ndindex(values.shape[:-1]):
            own = values[place]
            if np.isnan(own).all():
                continue
            where = {**label(measure, *place), "measure": measure}
            means.append({**where, "mean": own.mean(), "std": own.std(ddof=1), **more(where)})
            seeds += [{**where, "seed": seed, "value": value} for seed, value in enumerate(own)]
    return {"seeds": columns(seeds), "means": columns(means)}

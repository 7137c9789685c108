"""What the two Table 1 experiments share: hidden nodes, the controls of NCorr, and their tables."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.data import Batch
from joma.probes import held_out, planted, shuffled
from joma.train import Ensemble


def seeds_and_means(
    measured: Mapping[str, np.ndarray], label: Callable[..., dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row for each number of every network, and one for each mean over networks.

    Args:
        measured: By measure, numbers whose last axis is the networks; rows of NaN are left out.
        label: Returns the first entries of a row, given the measure and the other indices.
    """
    seeds, means = [], []
    for measure, values in measured.items():
        for place in np.ndindex(values.shape[:-1]):
            own = values[place]
            if np.isnan(own).all():
                continue
            where = {**label(measure, *place), "measure": measure}
            means.append({**where, "mean": own.mean(), "std": own.std(ddof=1)})
            seeds += [{**where, "seed": seed, "value": value} for seed, value in enumerate(own)]
    return seeds, means


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


PLANTED = (0.7, 0.8, 0.9, 0.95, 1.0)
"""Correlations of the nodes that are planted to measure the power of a control."""


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

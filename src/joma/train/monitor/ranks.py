"""Ranks of weights, gradients and updates, and energies of gradients."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from joma.models import Weight
from joma.probes import stable_ranks
from joma.probes.gradient import measured
from joma.probes.metrics import Effort, Metric
from joma.probes.metrics.stable_rank import StableRanks
from joma.train.monitor.parts import Heads, MonitoredMatrix
from joma.train.monitor.record import Row

_BATCH = 2**26
"""Numbers of matrices that are measured together at a time."""


W = TypeVar("W", MonitoredMatrix, Weight)


def batches(weights: Iterable[W], tensor: Callable[[str], Tensor | None]) -> Iterator[list[W]]:
    """Yield weights that are measured together: small ones on a GPU, others one by one.

    Args:
        weights: Weights, in order.
        tensor: Returns the tensor of a name, sharded or not. A weight that has none under its own
            name, since it is computed from several, is measured alone.
    """
    batch: list[W] = []
    left = 0
    for weight in weights:
        stored = tensor(weight.name)
        together = stored is not None and StableRanks.is_small(stored)
        size = stored.numel() if stored is not None and together else _BATCH + 1
        if size > left:
            if batch:
                yield batch
            batch, left = [], _BATCH
        batch.append(weight)
        left -= size
    if batch:
        yield batch


def scores_spectra(layers: Sequence[tuple[Heads, Tensor, Tensor]]) -> list[Tensor]:
    """Singular values of Wqᵀ·Wk of every head, (H, d) for each layer, in float64.

    The product, as wide as the model, has rank d at most and is never made: with Gram matrices
    Wq·Wqᵀ = R·Rᵀ of a head, its squared singular values are the eigenvalues of Rᵀ·(Wk·Wkᵀ)·R.
    Layers of one shape are worked on together, which on a GPU is most of the time saved.

    Args:
        layers: heads, and the weights that make queries and keys.
    """
    grams: dict[torch.Size, list[tuple[int, Tensor, Tensor]]] = {}
    for number, (of, query_ED, key_ED) in enumerate(layers):
        query_HDD = _gram(query_ED, of.heads)
        key_HDD = _gram(key_ED, of.key_heads).repeat_interleave(of.heads // of.key_heads, 0)
        grams.setdefault(query_HDD.shape, []).append((number, query_HDD, key_HDD))
    found: dict[int, Tensor] = {}
    for alike in grams.values():
        numbers, queries, keys = zip(*alike, strict=True)
        values, vectors = torch.linalg.eigh(torch.cat(queries))
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
        squares = torch.linalg.eigvalsh(root.mT @ torch.cat(keys) @ root)
        singular = squares.flip(-1).clamp(min=0).sqrt().chunk(len(numbers))
        found.update(zip(numbers, singular, strict=True))
    return [found[number] for number in range(len(layers))]


def _gram(weight_ED: Tensor, heads: int) -> Tensor:
    weight_HDE = weight_ED.unflatten(0, (heads, -1)).double()
    return weight_HDE @ weight_HDE.mT


def scores_rows(metric: Metric, layers: Sequence[tuple[Heads, Tensor, Tensor]]) -> list[Row]:
    """Return a rank of every head's Wqᵀ·Wk; without a head, the mean over heads."""
    assert metric.of_spectrum is not None, "of weights"
    rows: list[Row] = []
    for (of, _, _), values_HD in zip(layers, scores_spectra(layers), strict=True):
        ranks = metric.of_spectrum(values_HD)
        rows.append(Row(metric.name, float(ranks.mean()), of.module, of.layer))
        if of.heads > 1:
            rows += [
                Row(metric.name, value, of.module, of.layer, head)
                for head, value in enumerate(ranks.tolist())
            ]
    return rows


def gradient_rows(
    of: MonitoredMatrix,
    gradient: Tensor,
    metrics: Iterable[Metric],
    ranks: Sequence[int],
    effort: Effort,
) -> list[Row]:
    """Return what metrics say of one gradient.

    An r above half of the shorter side is left out, for GaLore would save nothing there.

    Raises:
        JomaError: It is not finite.
    """
    fitting = [rank for rank in ranks if 2 * rank <= min(gradient.shape)]
    found = measured(of.name, gradient, fitting, effort.tolerance, effort.seed)
    return [
        Row(name, estimate.value, of.module, of.layer, bound=estimate.bound)
        for metric in metrics
        if metric.measure is not None
        for name, estimate in metric.measure(found).items()
    ]


def update_rows(
    name: str, of: Sequence[MonitoredMatrix], changes: Sequence[Tensor], effort: Effort
) -> list[Row]:
    """Return stable ranks of how weights moved; those that are not finite any more have none."""
    pairs = [pair for pair in zip(of, changes, strict=True) if bool(pair[1].isfinite().all())]
    found = stable_ranks(
        [change for _, change in pairs], tolerance=effort.tolerance, seed=effort.seed
    )
    return [
        Row(name, rank.value, matrix.module, matrix.layer, bound=rank.bound)
        for (matrix, _), rank in zip(pairs, found, strict=True)
    ]

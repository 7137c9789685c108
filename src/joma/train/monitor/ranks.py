"""Ranks of weights and gradients, and how weights move: ranks of updates, size of single steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from joma.common.sharded import is_dtensor
from joma.models import AttentionPart, Weight
from joma.probes import stable_ranks
from joma.probes.gradient import measured
from joma.probes.metrics import Effort, Metric
from joma.probes.metrics.stable_rank import StableRanks
from joma.train.monitor.facts import norms_of
from joma.train.monitor.faults import Faults
from joma.train.monitor.parts import MonitoredMatrix, Tensors
from joma.train.monitor.record import Row
from joma.train.processes import MonitoredProcesses, sharded_like, whole

_BATCH = 2**26
"""Numbers of matrices that are measured together at a time."""

_COPIES_ON_THE_GPU = 2**30
"""Bytes of copies of weights kept on the GPU; beyond that they lie in the CPU's memory."""

_SAMPLED = 2**18
"""Numbers of a weight that are compared before and after one step."""

W = TypeVar("W", MonitoredMatrix, Weight)

Scores = tuple[AttentionPart, Tensor, Tensor]
"""An attention with the weights that make its queries and keys."""


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


def scores_spectra(layers: Sequence[Scores]) -> list[Tensor]:
    """Singular values of Wqᵀ·Wk of every head, (H, d) for each layer, in float64.

    The product, as wide as the model, has rank d at most and is never made: with Gram matrices
    Wq·Wqᵀ = R·Rᵀ of a head, its squared singular values are the eigenvalues of Rᵀ·(Wk·Wkᵀ)·R.
    Layers of one shape are worked on together, which on a GPU is most of the time saved.

    Args:
        layers: The attentions.
    """
    grams: dict[torch.Size, list[tuple[int, Tensor, Tensor]]] = {}
    for number, (of, query_ED, key_ED) in enumerate(layers):
        query_HDD, key_GDD = _gram(query_ED, of.heads), _gram(key_ED, of.key_heads)
        key_HDD = key_GDD.repeat_interleave(len(query_HDD) // len(key_GDD), 0)
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


def _gram(weight_ED: Tensor, heads: int | None) -> Tensor:
    assert heads is not None, "it has scores"
    weight_HDE = weight_ED.unflatten(0, (heads, -1)).double()
    return weight_HDE @ weight_HDE.mT


def scores_rows(metric: Metric, layers: Sequence[Scores]) -> list[Row]:
    """Return a rank of every head's Wqᵀ·Wk; without a head, the mean over heads."""
    assert metric.of_spectrum is not None, "of weights"
    rows: list[Row] = []
    for (of, _, _), values_HD in zip(layers, scores_spectra(layers), strict=True):
        ranks = metric.of_spectrum(values_HD)
        rows.append(Row(metric.name, float(ranks.mean()), of.module, of.layer))
        if len(values_HD) > 1:
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


class Updates:
    """Compares weights with copies of what they were.

    A weight that is not trained is not copied: its version says whether it was written to. What a
    single step does to a large weight is read off a sample of its numbers.

    Args:
        processes: The processes that train the model.
        effort: Tolerance and seed of ranks.
        faults: Where failures are noted.
    """

    def __init__(self, processes: MonitoredProcesses, effort: Effort, faults: Faults) -> None:
        self._processes, self._effort, self._faults = processes, effort, faults
        self._copies: dict[str, Tensor] = {}
        self._marks: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}

    @property
    def known(self) -> bool:
        """Whether there is anything to compare with."""
        return bool(self._copies)

    def forget_others(self, tensors: Tensors, matrices: Sequence[MonitoredMatrix]) -> None:
        """Forget copies of what the model does not have any more."""
        there = {matrix.key: now.shape for matrix, now in tensors.present(matrices)}
        self._copies = {
            key: copy for key, copy in self._copies.items() if there.get(key) == copy.shape
        }

    def since_last(
        self, name: str, tensors: Tensors, matrices: Sequence[MonitoredMatrix]
    ) -> list[Row]:
        """Return the stable rank of every weight's move since this was called last, as `name`."""
        rows: list[Row] = []
        present = dict(tensors.present(matrices))
        learning = [it for it in present if tensors.parameters[it.name].requires_grad]
        size = sum(present[it].numel() * present[it].element_size() for it in learning)
        far = size > _COPIES_ON_THE_GPU
        for batch in batches(learning, tensors.get):
            moved: list[tuple[MonitoredMatrix, Tensor]] = []
            for matrix in batch:
                now = present[matrix]
                before = self._copies.pop(matrix.key, None)
                if before is not None:
                    moved.append((matrix, whole(now - before.to(now.device))))
                self._copies[matrix.key] = now.cpu() if now.is_cuda and far else now.clone()
            if self._processes.first and moved:
                of, changes = zip(*moved, strict=True)
                found = self._faults.tried(
                    name,
                    lambda of=of, by=changes: update_rows(name, of, by, self._effort),
                    module=of[0].module,
                )
                rows += found or []
        return rows

    def mark(self, tensors: Tensors, matrices: Sequence[MonitoredMatrix]) -> None:
        """Keep what the weights are now, of large ones a sample, for `of_one_step`."""
        self._marks, self._versions = {}, {}
        for matrix, now in tensors.present(matrices):
            if tensors.parameters[matrix.name].requires_grad:
                self._marks[matrix.key] = _sample(now).clone()
            else:
                self._versions[matrix.key] = now._version

    def of_one_step(
        self, name: str, tensors: Tensors, matrices: Sequence[MonitoredMatrix]
    ) -> list[Row]:
        """Return by how much of its size each weight moved since `mark`, one step ago."""
        present = tensors.present(matrices)
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for matrix, whole_now in present:
            now, mark = _sample(whole_now), self._marks.get(matrix.key)
            if mark is not None and mark.shape == now.shape:
                pairs[matrix.key] = now, mark.to(now.device)
        # Both norms are made by all processes where weights are sharded.
        changes = norms_of([now - mark for now, mark in pairs.values()])
        sizes = norms_of([mark for _, mark in pairs.values()])
        shares = {
            key: change / size
            for key, change, size in zip(pairs, changes, sizes, strict=True)
            if size > 0
        }
        rows: list[Row] = []
        for matrix, now in present:
            # What is not trained, and was not written to, has not moved.
            still = self._versions.get(matrix.key) == now._version
            share = 0.0 if still else shares.get(matrix.key)
            if share is not None:
                where = matrix.module, matrix.layer
                rows += [Row(name, share, *where), Row("frozen", float(share == 0.0), *where)]
        self._marks, self._versions = {}, {}
        return rows if self._processes.first else []

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield copies and marks by name, gathered; all processes go through them, or none."""
        for kind, kept in (("copy", self._copies), ("mark", self._marks)):
            for key, tensor in kept.items():
                yield f"{kind}.{key}", whole(tensor)

    def load(
        self, state: Mapping[str, Tensor], tensors: Tensors, matrices: Sequence[MonitoredMatrix]
    ) -> None:
        """Take copies that `state` gave; all processes call this with the same ones."""
        self._marks, self._versions = {}, {}
        for matrix, now in tensors.present(matrices):
            copy, mark = (state.get(f"{kind}.{matrix.key}") for kind in ("copy", "mark"))
            if copy is not None and copy.shape == now.shape:
                self._copies[matrix.key] = sharded_like(copy.to(now.dtype), now)
            if mark is not None and mark.shape == _sample(now).shape:
                self._marks[matrix.key] = sharded_like(mark.to(now.dtype), now)
            elif not tensors.parameters[matrix.name].requires_grad:
                self._versions[matrix.key] = now._version


def _sample(matrix: Tensor) -> Tensor:
    """Return numbers spread evenly over a matrix: all of a small or sharded one."""
    if is_dtensor(matrix) or matrix.numel() <= _SAMPLED or not matrix.is_contiguous():
        return matrix
    return matrix.view(-1)[:: -(-matrix.numel() // _SAMPLED)]

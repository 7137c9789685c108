"""One look at a model: which measures, in which order, and what to do where one fails."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from joma.models.architectures import Weight
from joma.train.monitor import _weights
from joma.train.monitor._held import Held
from joma.train.monitor._parts import Parts, named_parameters
from joma.train.monitor._processes import Processes, whole
from joma.train.monitor._reading import Reading, lower_weight
from joma.train.monitor._row import Row

LOG = logging.getLogger("joma.monitor")
_COPIES_ON_THE_GPU = 2**30
"""Bytes of copies of weights; more of them lie in the CPU's memory, training needs the other."""


@dataclass(eq=False)
class Looks:
    """Looks at one model.

    Attributes:
        parts: of the model.
        processes: that train it.
        metrics: asked for.
        ranks: of the energy of gradients.
        theorem1: layer on which Theorem 1 is measured.
        tolerance: of stable ranks.
        seed: of random starts.
        reading: forward passes over held inputs.
    """

    parts: Parts
    processes: Processes
    metrics: tuple[str, ...]
    ranks: tuple[int, ...]
    theorem1: int | None
    tolerance: float
    seed: int
    reading: Reading
    off: dict[str, str] = field(default_factory=dict)
    _copies: dict[str, Tensor] = field(default_factory=dict)
    _stable: _weights.StableRanks = field(init=False)

    def __post_init__(self) -> None:
        self._stable = _weights.StableRanks(self.tolerance, self.seed)
        for what, why in self.parts.missing.items():
            self.turn_off(what, why)

    def turn_off(self, what: str, why: str) -> None:
        """Says once why something is not measured."""
        if what not in self.off:
            self.off[what] = why
            if self.processes.first:
                LOG.warning("%s is not measured: %s", what, why)

    def forward(self, model: nn.Module, held: Held) -> list[Row]:
        """What a forward pass shows."""
        wanted = any(metric.startswith("attention") for metric in self.metrics)
        if "attention" in self.off or not (wanted or self.theorem1 is not None):
            return []
        lower = None
        if self.theorem1 is not None and "theorem1_residual" not in self.off:
            lower = lower_weight(self.parts, named_parameters(model), self.theorem1)
            if lower is None:
                layers = [weight.layer for weight in self.parts.ranked]
                self.turn_off("theorem1_residual", f"the MLP is known of layers {layers} alone")
        try:
            rows = self.reading.rows(model, held, self.parts, lower)
        except Exception as error:  # the model's own code, which may fail as it likes
            self.turn_off("attention", _first_line(error))
            return []
        kept = {"attention_uniform", "theorem1_residual", *self.metrics}
        return [row for row in rows if row.name in kept]

    def cheap(self, model: nn.Module) -> list[Row]:
        """Stable ranks of the weights."""
        rows: list[Row] = []
        named = named_parameters(model)
        if "stable_rank" not in self.metrics:
            return rows
        for weights in _weights.batches(self.parts.ranked, lambda weight: named[weight.name]):
            matrices = [weight.read(whole(named[weight.name].detach())) for weight in weights]
            rows += self._tried(
                "stable_rank", lambda w=weights, m=matrices: self._stable_rows(w, m)
            )
        return rows + self._scores(named, ("stable_rank",))

    def dear(self, model: nn.Module, *, stepped: bool) -> list[Row]:
        """Effective ranks, overlap, gradients and updates.

        Args:
            model: uncompiled.
            stepped: whether a step was made that gradients can be left of.
        """
        named = named_parameters(model)
        rows: list[Row] = []
        if "effective_rank" in self.metrics:
            for weight in self.parts.ranked:
                matrix = weight.read(whole(named[weight.name].detach()))
                rows += self._tried(
                    "effective_rank", lambda w=weight, m=matrix: self._effective_rows(w, m)
                )
            rows += self._scores(named, ("effective_rank",))
        embedding = self.parts.embedding
        if embedding is not None and "embedding_overlap" in self.metrics:
            table = whole(named[embedding.name].detach())
            rows += self._tried(
                "embedding_overlap",
                lambda: [
                    Row(
                        "embedding_overlap",
                        _weights.overlap(embedding.read(table), self.seed),
                        embedding.module,
                    )
                ],
            )
        rows += self._gradients(named, missed=stepped)
        return rows + self._updates(named)

    def moved(self, model: nn.Module) -> list[Row]:
        """By how much of its size the last single step moved each weight that a copy is kept of."""
        named, rows = named_parameters(model), []
        for matrix in self.parts.matrices:
            copy = self._copies.get(matrix.name)
            if copy is None:
                continue
            now = named[matrix.name].detach()
            copy = copy.to(now.device)
            # Both norms are made by all processes where weights are sharded.
            change = whole(torch.linalg.vector_norm(now - copy, dtype=torch.float32))
            size = whole(torch.linalg.vector_norm(copy, dtype=torch.float32))
            if self.processes.first and float(size) > 0:
                share = float(change / size)
                rows.append(Row("update_relative", share, matrix.module, matrix.layer))
        return rows

    def _scores(self, named: dict[str, Tensor], metrics: tuple[str, ...]) -> list[Row]:
        """Ranks of Q·K of every layer."""
        layers = []
        for of in self.parts.heads:
            tensors = {
                name: whole(named[name].detach())
                for name in dict.fromkeys((of.query.name, of.key.name))  # one, where it is fused
            }
            if self.processes.first:
                pair = (weight.read(tensors[weight.name]) for weight in (of.query, of.key))
                layers.append((of, *pair))
        return self._tried(
            "ranks of Q·K",
            lambda: [
                row
                for (of, _, _), values in zip(layers, _weights.scores_spectra(layers), strict=True)
                for row in _weights.scores_rows(of, values, metrics)
            ],
        )

    def _stable_rows(self, weights: Sequence[Weight], matrices: Sequence[Tensor]) -> list[Row]:
        found = self._stable.of_all([weight.module for weight in weights], matrices)
        return [
            Row("stable_rank", rank.value, weight.module, weight.layer, bound=rank.bound)
            for weight, rank in zip(weights, found, strict=True)
        ]

    def _effective_rows(self, weight: Weight, matrix: Tensor) -> list[Row]:
        found = _weights.effective(matrix)
        if found is None:
            self.turn_off(
                f"effective_rank of {weight.module} and its like",
                f"it needs all singular values of a matrix of shape {tuple(matrix.shape)}",
            )
            return []
        return [Row("effective_rank", found.value, weight.module, weight.layer, bound=found.bound)]

    def _gradients(self, named: dict[str, Tensor], *, missed: bool) -> list[Row]:
        if not {"gradient_stable_rank", "gradient_energy"} & set(self.metrics):
            return []
        rows: list[Row] = []
        some = False
        for matrix in self.parts.matrices:
            gradient = named[matrix.name].grad
            if gradient is None:
                continue
            some = True
            gradient = whole(gradient.detach())
            if gradient.layout == torch.strided:
                ranks = self.ranks if "gradient_energy" in self.metrics else ()
                rows += self._tried(
                    "gradient",
                    lambda m=matrix, g=gradient, r=ranks: _weights.gradient_rows(
                        m, g, r, self.tolerance, self.seed
                    ),
                    for_good=False,
                )
        if missed and not some and self.parts.matrices:
            self.turn_off("gradient", "no .grad is there: call step() before zero_grad()")
        return rows

    def _updates(self, named: dict[str, Tensor]) -> list[Row]:
        if "update_stable_rank" not in self.metrics:
            return []
        rows: list[Row] = []
        bytes_of_copies = sum(
            named[m.name].numel() * named[m.name].element_size() for m in self.parts.matrices
        )
        for matrices in _weights.batches(self.parts.matrices, lambda matrix: named[matrix.name]):
            moved, changes = [], []
            for matrix in matrices:
                now = named[matrix.name].detach()
                before = self._copies.pop(matrix.name, None)
                if before is not None:
                    moved.append(matrix)
                    changes.append(whole(now - before.to(now.device)))
                far = now.is_cuda and bytes_of_copies > _COPIES_ON_THE_GPU
                self._copies[matrix.name] = now.cpu() if far else now.clone()
            rows += self._tried(
                "update_stable_rank",
                lambda m=moved, c=changes: _weights.update_rows(m, c, self.tolerance, self.seed),
                for_good=False,
            )
        return rows

    def _tried(
        self, what: str, measure: Callable[[], Iterable[Row]], *, for_good: bool = True
    ) -> list[Row]:
        """What the first process measures; others have nothing to tell.

        Where it fails the training goes on: it is said once why, and `for_good` not tried again.
        """
        if not self.processes.first or (for_good and what in self.off):
            return []
        try:
            return list(measure())
        except (ValueError, RuntimeError) as error:
            self.turn_off(what, _first_line(error))
            return []


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

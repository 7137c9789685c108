"""One measurement of a model: which metrics, in which order, and what to do where one fails.

With sharded weights every process runs the same sequence of gathers and forward passes, whatever
fails in between: a process that left the sequence would leave the others waiting.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from joma.models.architectures import Weight
from joma.train.monitor import _weights
from joma.train.monitor._faults import Faults
from joma.train.monitor._held import Held
from joma.train.monitor._options import Options
from joma.train.monitor._parts import Heads, Matrix, Parts
from joma.train.monitor._processes import Processes, whole
from joma.train.monitor._reading import Reading, watching_activity
from joma.train.monitor._row import Row
from joma.train.monitor._tensors import Tensors

_COPIES_ON_THE_GPU = 2**30
"""Bytes of copies of weights kept on the GPU; beyond that they lie in the CPU's memory."""


class Measurements:
    """Measures one model again and again.

    Args:
        find_parts: Returns the parts of the model as it is now.
        processes: The processes that train it.
        options: What is measured, and how.
        reading: Forward passes over held inputs.
        faults: Where failures are noted.
    """

    def __init__(
        self,
        find_parts: Callable[[nn.Module], Parts],
        processes: Processes,
        options: Options,
        reading: Reading,
        faults: Faults,
    ) -> None:
        self._find_parts = find_parts
        self._processes, self._options = processes, options
        self._reading, self._faults = reading, faults
        self._signature: tuple[object, ...] | None = None
        self._parts = Parts.none()
        self._tensors: Tensors | None = None
        self._copies: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._stable = _weights.StableRanks(options.tolerance, options.seed)

    @property
    def parts(self) -> Parts:
        """The parts found last."""
        return self._parts

    def prepare(self, model: nn.Module, *, strict: bool = False) -> None:
        """Read the model's tensors, and find its parts where it has changed since last time.

        Args:
            model: The model, uncompiled.
            strict: Whether to raise where the parts cannot be found; otherwise that is noted.
        """
        tensors = self._tensors = Tensors(model)
        signature = tensors.signature
        if signature == self._signature:
            return
        again = self._signature is not None
        self._signature = signature
        try:
            self._parts = self._find_parts(model)
        except Exception as error:
            self._parts = Parts.none()
            if strict:
                raise
            self._faults.note("the parts of the model", error, effect="not found")
        self._copies = {
            name: copy
            for name, copy in self._copies.items()
            if name in tensors.parameters and tensors.parameters[name].shape == copy.shape
        }
        self._stable = _weights.StableRanks(self._options.tolerance, self._options.seed)
        for what, why in self._parts.missing.items():
            self._faults.note(what, why)
        if again:
            self._faults.note(
                "the model", "its parameters are others than before", effect="changed"
            )

    def release(self) -> None:
        """Forget the model's tensors, which live only as long as the model."""
        self._tensors = None

    def forward(self, model: nn.Module, candidates: Sequence[Held]) -> tuple[list[Row], Held]:
        """Run the model and return what that shows, and the inputs that it ran on.

        Args:
            model: The model, uncompiled, in evaluation mode.
            candidates: What it may be called with; the first that it takes counts.
        """
        last: Exception | None = None
        attention = self._wants("attention_entropy", "attention_effective", "theorem1_residual")
        attention = attention and not self._faults.is_off("attention")
        activity = self._wants("mlp_dead") and not self._faults.is_off("mlp_dead")
        if not attention and not activity:
            return [], candidates[0]
        lower = self._lower() if attention else None
        downs = self._parts.downs if activity else {}
        for held in candidates:
            rows: list[Row] = []
            failed: Exception | None = None
            try:
                with ExitStack() as stack:
                    dead = stack.enter_context(watching_activity(self.tensors, downs, self._faults))
                    if attention:
                        rows += self._reading.attend(model, held, self._parts, lower)
                    elif downs:
                        held.run(model)
                rows += dead
            except Exception as error:  # the model's own code, which may fail as it likes
                failed = error
            if not self._processes.any(failed is not None):
                return self._kept(rows), held
            last = failed or last
        why = "the forward pass failed in another process" if last is None else last
        for what, wanted in (("attention", attention), ("mlp_dead", activity)):
            if wanted:
                self._faults.note(what, why)
        return [], candidates[0]

    def weights(self) -> list[Row]:
        """Return stable ranks of the weights."""
        if not self._wants("stable_rank"):
            return []
        rows: list[Row] = []
        for batch in _weights.batches(self._parts.ranked, self.tensors.get):
            matrices = [(weight, weight.read(whole(tensor))) for weight, tensor in batch]
            if self._processes.first:
                rows += self._stable_rows(matrices)
        return self._kept(rows + self._scores(("stable_rank",)))

    def expensive(self, *, stepped: bool) -> list[Row]:
        """Return effective ranks, overlap, and what gradients and updates show.

        Args:
            stepped: Whether a step was made that gradients can be left of.
        """
        rows: list[Row] = []
        if self._wants("effective_rank"):
            for weight in self._parts.ranked:
                tensor = self.tensors.get(weight.name)
                if tensor is not None:
                    matrix = weight.read(whole(tensor))
                    rows += self._each(
                        "effective_rank", weight.module, matrix, self._effective_rows, weight
                    )
            rows += self._scores(("effective_rank",))
        embedding = self._parts.embedding
        if embedding is not None and self._wants("embedding_overlap"):
            tensor = self.tensors.get(embedding.name)
            if tensor is not None:
                table = embedding.read(whole(tensor))
                rows += self._each(
                    "embedding_overlap", embedding.module, table, self._overlap_rows, embedding
                )
        rows += self._gradients(missed=stepped)
        return self._kept(rows + self._updates())

    def moved(self) -> list[Row]:
        """Return by how much of its size the last single step moved each weight."""
        rows: list[Row] = []
        if not self._wants("update_stable_rank"):
            return rows
        for matrix in self._parts.matrices:
            now = self.tensors.get(matrix.name)
            if now is None:
                continue
            copy = self._copies.get(matrix.name)
            if copy is None:
                if self._versions.get(matrix.name) == now._version:
                    rows += self._moved_rows(matrix, 0.0)
                continue
            copy = copy.to(now.device)
            # Both norms are made by all processes where weights are sharded.
            change = whole(torch.linalg.vector_norm(now - copy, dtype=torch.float32))
            size = whole(torch.linalg.vector_norm(copy, dtype=torch.float32))
            if self._processes.first and float(size) > 0:
                rows += self._moved_rows(matrix, float(change / size))
        return self._kept(rows)

    def _moved_rows(self, matrix: Matrix, share: float) -> list[Row]:
        if not self._processes.first:
            return []
        where = (matrix.module, matrix.layer)
        return [
            Row("update_relative", share, *where),
            Row("frozen", float(share == 0.0), *where),
        ]

    @property
    def tensors(self) -> Tensors:
        """The model's tensors; `prepare` comes first."""
        assert self._tensors is not None, "prepare comes first"
        return self._tensors

    def _wants(self, *metrics: str) -> bool:
        return any(metric in self._options.metrics for metric in metrics)

    def _kept(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows that were asked for and are finite."""
        asked = {"attention_uniform", *self._options.metrics}
        attention = ("attention", "theorem1", "mlp")
        return [
            row
            for row in rows
            if math.isfinite(row.value)
            and (row.name in asked or not row.name.startswith(attention))
        ]

    def _lower(self) -> Tensor | None:
        """Return the lower MLP weight of the layer on which Theorem 1 is measured, gathered."""
        layer = self._options.theorem1
        if layer is None or self._faults.is_off("theorem1_residual"):
            return None
        for weight in self._parts.lower:
            tensor = self.tensors.get(weight.name) if weight.layer == layer else None
            if tensor is not None:
                return weight.read(whole(tensor))
        layers = sorted({weight.layer for weight in self._parts.lower if weight.layer is not None})
        self._faults.note("theorem1_residual", f"the MLP is known of layers {layers} alone")
        return None

    def _each(
        self,
        what: str,
        module: str,
        matrix: Tensor,
        measure: Callable[..., Iterable[Row]],
        *arguments: object,
    ) -> list[Row]:
        """Return what the first process measures of one matrix; others return nothing.

        A matrix that is not finite is left out this time. One that fails otherwise is left out from
        now on, and the reason is noted.
        """
        if not self._processes.first or self._faults.is_off(what, module):
            return []
        try:
            return list(measure(*arguments, matrix))
        except Exception as error:
            if _is_finite(matrix):
                self._faults.note(what, error, module=module)
            return []

    def _stable_rows(self, matrices: Sequence[tuple[Weight, Tensor]]) -> list[Row]:
        matrices = [
            (weight, matrix)
            for weight, matrix in matrices
            if not self._faults.is_off("stable_rank", weight.module)
        ]
        if len(matrices) > 1:
            try:
                return self._stable_rows_of([w for w, _ in matrices], [m for _, m in matrices])
            except Exception:  # one of them: each is tried alone below
                pass
        rows: list[Row] = []
        for weight, matrix in matrices:
            rows += self._each(
                "stable_rank",
                weight.module,
                matrix,
                lambda w, m: self._stable_rows_of([w], [m]),
                weight,
            )
        return rows

    def _stable_rows_of(self, weights: Sequence[Weight], matrices: Sequence[Tensor]) -> list[Row]:
        found = self._stable.of_all([weight.module for weight in weights], matrices)
        return [
            Row("stable_rank", rank.value, weight.module, weight.layer, bound=rank.bound)
            for weight, rank in zip(weights, found, strict=True)
        ]

    def _effective_rows(self, weight: Weight, matrix: Tensor) -> list[Row]:
        found = _weights.effective(matrix)
        if found is None:
            self._faults.note(
                "effective_rank",
                f"it needs all singular values of a matrix of shape {tuple(matrix.shape)}",
                module=weight.module,
            )
            return []
        return [Row("effective_rank", found.value, weight.module, weight.layer, bound=found.bound)]

    def _overlap_rows(self, weight: Weight, table: Tensor) -> list[Row]:
        overlap = _weights.overlap(table, self._options.seed)
        return [Row("embedding_overlap", overlap, weight.module)]

    def _scores(self, metrics: tuple[str, ...]) -> list[Row]:
        """Return ranks of Q·K of every layer."""
        layers: list[tuple[Heads, Tensor, Tensor]] = []
        for of in self._parts.heads:
            tensors = {name: self.tensors.get(name) for name in (of.query.name, of.key.name)}
            if any(tensor is None for tensor in tensors.values()):
                continue
            gathered = {
                name: whole(tensor) for name, tensor in tensors.items() if tensor is not None
            }
            if self._processes.first and not self._faults.is_off("ranks of Q·K", of.module):
                query, key = (w.read(gathered[w.name]) for w in (of.query, of.key))
                layers.append((of, query, key))
        try:
            return _score_rows(layers, metrics)
        except Exception:  # one of them: each is tried alone below
            rows: list[Row] = []
            for layer in layers:
                both = torch.stack([layer[1].abs().amax(), layer[2].abs().amax()])
                rows += self._each(
                    "ranks of Q·K",
                    layer[0].module,
                    both,
                    lambda one, _: _score_rows([one], metrics),
                    layer,
                )
            return rows

    def _gradients(self, *, missed: bool) -> list[Row]:
        if not self._wants("gradient_stable_rank", "gradient_energy"):
            return []
        rows: list[Row] = []
        some = False
        ranks = self._options.ranks if self._wants("gradient_energy") else ()
        for matrix in self._parts.matrices:
            gradient = self.tensors.gradient(matrix.name)
            if gradient is None:
                continue
            some = True
            gradient = matrix.read(whole(gradient))
            rows += self._each(
                "gradient",
                matrix.module,
                gradient,
                lambda m, r, g: _weights.gradient_rows(
                    m, g, r, self._options.tolerance, self._options.seed
                ),
                matrix,
                ranks,
            )
        learns = any(
            self.tensors.parameters[matrix.name].requires_grad
            for matrix in self._parts.matrices
            if matrix.name in self.tensors.parameters
        )
        if missed and not some and learns:
            self._faults.note("gradient", "no .grad is there: call step() before zero_grad()")
        return rows

    def _updates(self) -> list[Row]:
        if not self._wants("update_stable_rank"):
            return []
        rows: list[Row] = []
        bytes_of_copies = sum(
            tensor.numel() * tensor.element_size()
            for tensor in map(self.tensors.get, (m.name for m in self._parts.matrices))
            if tensor is not None
        )
        for batch in _weights.batches(self._parts.matrices, self.tensors.get):
            moved: list[tuple[Matrix, Tensor]] = []
            for matrix, now in batch:
                parameter = self.tensors.parameters.get(matrix.name)
                before = self._copies.pop(matrix.name, None)
                self._versions.pop(matrix.name, None)
                if parameter is not None and not parameter.requires_grad:
                    self._versions[matrix.name] = now._version  # no copy of what is not trained
                    continue
                if before is not None:
                    moved.append((matrix, matrix.read(whole(now - before.to(now.device)))))
                far = now.is_cuda and bytes_of_copies > _COPIES_ON_THE_GPU
                self._copies[matrix.name] = now.cpu() if far else now.clone()
            if self._processes.first and moved:
                rows += (
                    self._faults.tried(
                        "update_stable_rank",
                        lambda m=moved: _weights.update_rows(
                            [one for one, _ in m],
                            [change for _, change in m],
                            self._options.tolerance,
                            self._options.seed,
                        ),
                        module=moved[0][0].module,
                    )
                    or []
                )
        return rows


def _score_rows(
    layers: Sequence[tuple[Heads, Tensor, Tensor]], metrics: tuple[str, ...]
) -> list[Row]:
    return [
        row
        for (of, _, _), values in zip(layers, _weights.scores_spectra(layers), strict=True)
        for row in _weights.scores_rows(of, values, metrics)
    ]


def _is_finite(matrix: Tensor) -> bool:
    try:
        return bool(matrix.isfinite().all())
    except Exception:  # a type that has no such thing
        return True

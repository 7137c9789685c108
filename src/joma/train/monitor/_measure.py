"""One measurement of a model: which metrics, in which order, and what to do where one fails.

With sharded weights every process runs the same sequence of gathers and forward passes, whatever
fails in between: a process that left the sequence would leave the others waiting.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.models import Architecture, Weight
from joma.probes import AttentionMap
from joma.train.monitor import _weights
from joma.train.monitor._facts import Facts, IsOptimized
from joma.train.monitor._faults import Faults
from joma.train.monitor._held import Held, undisturbed
from joma.train.monitor._options import Options
from joma.train.monitor._parts import Heads, Parts, parts_of
from joma.train.monitor._processes import Processes, whole
from joma.train.monitor._reading import Reading, watching_activity
from joma.train.monitor._row import Row
from joma.train.monitor._sharded import Gathers
from joma.train.monitor._tensors import Tensors
from joma.train.monitor._updates import Updates

FindParts = Callable[[nn.Module, Callable[[], object] | None], Parts]


class Measurements:
    """Measures one model again and again.

    Args:
        find_parts: Returns the parts of the model as it is now; a function that runs the model
            once helps, where there is one.
        processes: The processes that train it.
        options: What is measured, and how.
        reading: Forward passes over held inputs.
        faults: Where failures are noted.
        facts: What is read at every measurement.
    """

    def __init__(
        self,
        find_parts: FindParts,
        processes: Processes,
        options: Options,
        reading: Reading,
        faults: Faults,
        facts: Facts,
    ) -> None:
        self._find_parts, self._facts = find_parts, facts
        self._processes, self._options = processes, options
        self._reading, self._faults = reading, faults
        self._signature: tuple[object, ...] | None = None
        self._traced = False
        self._gathers = Gathers()
        self._parts = Parts.none()
        self._tensors: Tensors | None = None
        self.updates = Updates(processes, options, faults)
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
        self._signature, self._traced = signature, False
        try:
            self._parts = self._find_parts(model, None)
        except Exception as error:
            self._parts = Parts.none()
            if strict:
                raise
            self._faults.note("the parts of the model", error, effect="not found")
        self.updates.forget_others(tensors, self._parts.matrices)
        self._stable = _weights.StableRanks(self._options.tolerance, self._options.seed)
        self._note_missing()
        if self._wants("embedding_overlap") and "embedding" in self._parts.missing:
            self._faults.note("embedding_overlap", self._parts.missing["embedding"])
        if again:
            self._faults.note(
                "the model", "its parameters are others than before", effect="changed"
            )

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what later measurements build on; all processes go through it, or none."""
        yield from self.updates.state()
        if self._processes.first:
            yield from self._stable.state()
            yield from self._reading.state()
            yield from self._facts.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave; `prepare` comes first."""
        ours = {it: tensor for it, tensor in state.items() if it.startswith(("copy.", "mark."))}
        self.updates.load(ours, self.tensors, self._parts.matrices)
        here = {
            name: tensor.to(self._processes.device)
            for name, tensor in state.items()
            if name not in ours
        }
        self._stable.load(here)
        self._reading.load(here)
        self._facts.load(here)

    def release(self) -> None:
        """Forget the model's tensors, which live only as long as the model."""
        self._tensors = None

    def forward(self, model: nn.Module, candidates: Sequence[Held]) -> tuple[list[Row], Held]:
        """Run the model and return what that shows, and the inputs that it ran on.

        Args:
            model: The model, uncompiled, in evaluation mode.
            candidates: What it may be called with; the first that it takes counts.
        """
        attention = self._wants("attention_entropy", "attention_effective", "theorem1_residual")
        attention = attention and not self._faults.is_off("attention")
        activity = self._wants("mlp_dead") and not self._faults.is_off("mlp_dead")
        if not attention and not activity:
            return [], candidates[0]
        self._trace(model, candidates[-1])
        lower = self._lower() if attention else None
        downs = self._parts.downs if activity else {}
        if attention:
            found = self._passed(model, candidates, "attention", downs, lower)
            if found is not None:
                return found
        if not downs:
            return [], candidates[0]
        # Activity of MLPs is seen also where attention cannot be.
        return self._passed(model, candidates, "mlp_dead", downs, None) or ([], candidates[0])

    def _passed(
        self,
        model: nn.Module,
        candidates: Sequence[Held],
        what: str,
        downs: dict[str, int | None],
        lower: Tensor | None,
    ) -> tuple[list[Row], Held] | None:
        """Return the rows of one forward pass and its inputs; None, and a note, where all fail."""
        last: Exception | None = None
        for held in candidates:
            rows: list[Row] = []
            failed: Exception | None = None
            try:
                with ExitStack() as stack:
                    stack.enter_context(self._gathers.completed(model))
                    dead = stack.enter_context(watching_activity(self.tensors, downs, self._faults))
                    if what == "attention":
                        rows += self._reading.attend(model, held, self._parts, lower)
                    else:
                        held.run(model)
                rows += dead
            except Exception as error:  # the model's own code, which may fail as it likes
                failed = error
            if not self._processes.any(failed is not None):
                return self._kept(rows), held
            last = failed or last
        why = "the forward pass failed in another process" if last is None else last
        self._faults.note(what, why)
        return None

    def _trace(self, model: nn.Module, held: Held) -> None:
        """Let one forward pass show, once, how fused matrices are to be read."""
        fused = any(heads.query.place.part is not None for heads in self._parts.heads)
        if self._traced or not fused:
            return
        self._traced = True

        def run() -> None:
            with self._gathers.completed(model):
                held.run(model)

        found = self._faults.tried("tracing the model", lambda: self._find_parts(model, run))
        self._parts = found or self._parts
        self._note_missing()

    def _note_missing(self) -> None:
        """Note which weights are not measured, and why."""
        if self._wants("stable_rank", "effective_rank"):
            for part, why in self._parts.missing.items():
                if part != "embedding":
                    self._faults.note("stable_rank", why, module=part)

    def weights(self) -> list[Row]:
        """Return stable ranks of the weights."""
        if not self._wants("stable_rank"):
            return []
        rows: list[Row] = []
        tensors = self.tensors
        there = [weight for weight in self._parts.ranked if tensors.has(weight)]
        # Those of one shape after each other: on a GPU they share what is prepared for it.
        there.sort(key=lambda weight: tuple(tensors.shape(weight)))
        for batch in _weights.batches(there, tensors.get):
            tensors.gather(batch)
            if self._processes.first:
                rows += self._stable_rows(batch)
        return self._kept(rows + self._scores(("stable_rank",)))

    def facts(self, model: nn.Module) -> list[Row]:
        """Return norms of weights and gradients, and what is trained; keep what a step moves.

        Args:
            model: The model, uncompiled.
        """
        rows = self._facts.rows(model, self.tensors, self._parts)
        if self._wants("gradient_norm"):
            rows += self._facts.norms(self.tensors, self._parts.matrices)
        if self._wants("update_relative"):
            self.updates.mark(self.tensors, self._parts.matrices)
        return self._kept(rows)

    def expensive(self, *, stepped: bool) -> list[Row]:
        """Return effective ranks, overlap, and what gradients and updates show.

        Args:
            stepped: Whether a step was made that gradients can be left of.
        """
        rows: list[Row] = []
        if self._wants("effective_rank"):
            for weight in self._parts.ranked:
                rows += self._of_weight("effective_rank", weight, self._effective_rows)
            rows += self._scores(("effective_rank",))
        embedding = self._parts.embedding
        if embedding is not None and self._wants("embedding_overlap"):
            rows += self._of_weight("embedding_overlap", embedding, self._overlap_rows)
        rows += self._gradients(missed=stepped)
        if self._wants("update_stable_rank"):
            rows += self.updates.since_last(self.tensors, self._parts.matrices)
        return self._kept(rows)

    def _of_weight(
        self, what: str, weight: Weight, measure: Callable[[Weight, Tensor], list[Row]]
    ) -> list[Row]:
        """Return what is measured of one weight, gathered from all processes."""
        if not self.tensors.has(weight):
            return []
        self.tensors.gather([weight])
        return self._each(what, weight.module, lambda: self.tensors.matrix(weight), measure, weight)

    def moved(self) -> list[Row]:
        """Return by how much of its size the last single step moved each weight."""
        if not self._wants("update_relative"):
            return []
        return self._kept(self.updates.of_one_step(self.tensors, self._parts.matrices))

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
            if weight.layer == layer and self.tensors.has(weight):
                self.tensors.gather([weight])
                return self.tensors.matrix(weight)
        layers = sorted({weight.layer for weight in self._parts.lower if weight.layer is not None})
        self._faults.note("theorem1_residual", f"the MLP is known of layers {layers} alone")
        return None

    def _each(
        self,
        what: str,
        module: str,
        read: Callable[[], Tensor],
        measure: Callable[..., Iterable[Row]],
        *arguments: object,
    ) -> list[Row]:
        """Return what the first process measures of one matrix; others return nothing.

        A matrix that is not finite is left out this time. One that fails otherwise is left out from
        now on, and the reason is noted.
        """
        if not self._processes.first or self._faults.is_off(what, module):
            return []
        matrix: Tensor | None = None
        try:
            matrix = read()
            return list(measure(*arguments, matrix))
        except Exception as error:
            if matrix is None or _is_finite(matrix):
                self._faults.note(what, error, module=module)
            return []

    def _stable_rows(self, weights: Sequence[Weight]) -> list[Row]:
        weights = [it for it in weights if not self._faults.is_off("stable_rank", it.module)]
        if len(weights) > 1:
            try:
                return self._stable_rows_of(weights, [self.tensors.matrix(it) for it in weights])
            except Exception:  # one of them: each is tried alone below
                pass
        rows: list[Row] = []
        for weight in weights:
            rows += self._each(
                "stable_rank",
                weight.module,
                lambda w=weight: self.tensors.matrix(w),
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
        """Return ranks of Q·K of every attention."""
        layers: list[tuple[Heads, Tensor, Tensor]] = []
        for of in self._parts.heads:
            if not (self.tensors.has(of.query) and self.tensors.has(of.key)):
                continue
            self.tensors.gather([of.query, of.key])
            if not self._processes.first or self._faults.is_off("ranks of Q·K", of.module):
                continue
            try:
                pair = self.tensors.matrix(of.query), self.tensors.matrix(of.key)
                layers.append((of, *pair))
            except Exception as error:
                self._faults.note("ranks of Q·K", error, module=of.module)
        try:
            return _score_rows(layers, metrics)
        except Exception:  # one of them: each is tried alone below
            rows: list[Row] = []
            for layer in layers:
                rows += self._each(
                    "ranks of Q·K",
                    layer[0].module,
                    lambda it=layer: torch.stack([it[1].abs().amax(), it[2].abs().amax()]),
                    lambda it, _: _score_rows([it], metrics),
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
            gradient = whole(matrix.read(gradient))
            rows += self._each(
                "gradient",
                matrix.module,
                lambda g=gradient: g,
                lambda m, r, g: _weights.gradient_rows(
                    m, g, r, self._options.tolerance, self._options.seed
                ),
                matrix,
                ranks,
            )
        parameters = self.tensors.parameters
        learning = (parameters.get(matrix.name) for matrix in self._parts.matrices)
        learns = any(parameter is not None and parameter.requires_grad for parameter in learning)
        if missed and not some and learns:
            self._faults.note("gradient", "no .grad is there: call step() before zero_grad()")
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


def measurements_of(
    model: nn.Module,
    architecture: Architecture | None,
    attention: AttentionMap | None,
    processes: Processes,
    options: Options,
    faults: Faults,
    is_optimized: IsOptimized = lambda parameter: None,
) -> Measurements:
    """Return the measurements of a model, its parts found.

    Raises:
        JomaError: The model does not have what the architecture names, or no such layer as
            `theorem1`.
    """

    def find(found_in: nn.Module, run: Callable[[], object] | None) -> Parts:
        return parts_of(found_in, architecture, run)

    layer = options.theorem1
    reading = Reading(attention, layer, faults)
    measurements = Measurements(
        find, processes, options, reading, faults, Facts(processes, is_optimized)
    )
    try:
        with undisturbed(model):
            measurements.prepare(model, strict=True)
    except JomaError:
        raise
    except Exception as error:  # of a model that nobody has seen
        faults.note("the parts of the model", error, effect="not found")
    measurements.release()
    blocks = measurements.parts.blocks
    if layer is not None and blocks and layer not in blocks:
        raise JomaError(f"theorem1 must be a layer of the model, 0 to {max(blocks)}, got {layer}")
    return measurements

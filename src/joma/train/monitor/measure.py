"""One measurement of a model: which metrics, in which order, and what to do where one fails.

With sharded weights every process runs the same sequence of gathers and forward passes, whatever
fails in between: a process that left the sequence would leave the others waiting.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from torch import Tensor, nn

from joma.errors import JomaError
from joma.models import Architecture, AttentionPart, Weight
from joma.probes import AttentionMap
from joma.probes.metrics import MONITORED, Cadence, Effort, Metric, Needs
from joma.train.monitor.facts import Facts, IsOptimized
from joma.train.monitor.faults import Faults
from joma.train.monitor.forward import ForwardPasses, watching_activity
from joma.train.monitor.inputs import MeasurementInputs
from joma.train.monitor.options import Options
from joma.train.monitor.parts import (
    MonitoredMatrix,
    Parts,
    Tensors,
    layer_in,
    parts_of,
    plain,
)
from joma.train.monitor.ranks import Updates, batches, gradient_rows, scores_rows
from joma.train.monitor.record import Row
from joma.train.monitor.undisturbed import undisturbed
from joma.train.processes import Gathers, MonitoredProcesses, whole

P = TypeVar("P", Weight, AttentionPart, MonitoredMatrix)


class Measurements:
    """Measures one model again and again.

    Args:
        model: The model, uncompiled; it is not kept.
        architecture: Where its parts are; None to find out.
        attention: Which modules make queries and keys, for a model that does not say it itself.
        processes: The processes that train it.
        options: What is measured, and how.
        faults: Where failures are noted.
        is_optimized: Whether a parameter is in the optimizer.

    Attributes:
        updates: Compares weights with what they were.

    Raises:
        JomaError: The model does not have what the architecture names, or no such layer as
            `theorem1`.
    """

    def __init__(
        self,
        model: nn.Module,
        architecture: Architecture | None,
        attention: AttentionMap | None,
        processes: MonitoredProcesses,
        options: Options,
        faults: Faults,
        is_optimized: IsOptimized = lambda parameter: None,
    ) -> None:
        self._architecture, self._processes, self._options = architecture, processes, options
        self._metrics = [MONITORED[name] for name in options.metrics or ()]
        self._effort = Effort(options.tolerance, options.seed, quick=True)
        self._reading = ForwardPasses(self._metrics, attention, options.theorem1, faults)
        self._faults, self._facts = faults, Facts(processes, is_optimized)
        self._signature: tuple[object, ...] | None = None
        self._gathers = Gathers()
        self._parts = Parts.none()
        self._tensors: Tensors | None = None
        self.updates = Updates(processes, self._effort, faults)
        self._repeated: dict[str, Any] = {}
        try:
            with undisturbed(model):
                self.prepare(model, strict=True)
        except JomaError:
            raise
        except Exception as error:  # of a model that nobody has seen
            faults.note("the parts of the model", error, effect="not found")
        self.release()
        layer, blocks = options.theorem1, self._parts.blocks
        if layer is not None and blocks and layer not in blocks:
            raise JomaError(
                f"theorem1 must be a layer of the model, 0 to {max(blocks)}, got {layer}"
            )

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
            self._parts = parts_of(model, self._architecture)
        except Exception as error:
            self._parts = Parts.none()
            if strict:
                raise
            self._faults.note("the parts of the model", error, effect="not found")
        self.updates.forget_others(tensors, self._parts.matrices)
        self._repeated = {
            metric.name: metric.repeated(self._effort)
            for metric in self._of("weights")
            if metric.repeated is not None
        }
        self._note_missing()
        for metric in self._of("embedding"):
            if "embedding" in self._parts.missing:
                self._faults.note(metric.name, self._parts.missing["embedding"])
        if again:
            self._faults.note(
                "the model", "its parameters are others than before", effect="changed"
            )

    @property
    def _with_state(self) -> list[Any]:
        """What measures by what it measured before, besides the updates."""
        theorem1 = self._reading.theorem1
        return [*self._repeated.values(), *([] if theorem1 is None else [theorem1]), self._facts]

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what later measurements build on; all processes go through it, or none."""
        yield from self.updates.state()
        if self._processes.first:
            for part in self._with_state:
                yield from part.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave; `prepare` comes first."""
        self.updates.load(state, self.tensors, self._parts.matrices)
        kept = ("copy.", "mark.")  # of the updates, which may lie elsewhere
        rest = {name: it for name, it in state.items() if not name.startswith(kept)}
        for part in self._with_state:
            part.load({name: it.to(self._processes.device) for name, it in rest.items()})

    def release(self) -> None:
        """Forget the model's tensors, which live only as long as the model."""
        self._tensors = None

    def forward(
        self, model: nn.Module, candidates: Sequence[MeasurementInputs]
    ) -> tuple[list[Row], MeasurementInputs]:
        """Run the model and return what that shows, and the inputs that it ran on.

        Args:
            model: The model, uncompiled, in evaluation mode.
            candidates: What it may be called with; the first that it takes counts.
        """
        active = [it for it in self._of("activations") if not self._faults.is_off(it.name)]
        attention = bool(self._of("attention") or self._of("theorem1"))
        attention = attention and not self._faults.is_off("attention")
        passes = [("attention", self._lower())] if attention else []
        if active and self._parts.downs:  # seen also where attention cannot be
            passes.append((active[0].name, None))
        for what, lower in passes:
            found = self._passed(model, candidates, what, active, lower)
            if found is not None:
                return found
        return [], candidates[0]

    def _passed(
        self,
        model: nn.Module,
        candidates: Sequence[MeasurementInputs],
        what: str,
        active: Sequence[Metric],
        lower: Tensor | None,
    ) -> tuple[list[Row], MeasurementInputs] | None:
        """Return the rows of one forward pass and its inputs; None, and a note, where all fail."""
        last: Exception | None = None
        for inputs in candidates:
            rows: list[Row] = []
            failed: Exception | None = None
            try:
                with ExitStack() as stack:
                    stack.enter_context(self._gathers.completed(model))
                    watching = watching_activity(
                        self.tensors, self._parts.downs, active, self._faults
                    )
                    activity = stack.enter_context(watching)
                    if what == "attention":
                        rows += self._reading.attend(model, inputs, self._parts, lower)
                    else:
                        inputs.run(model)
                rows += activity
            except Exception as error:  # the model's own code, which may fail as it likes
                failed = error
            if not self._processes.any(failed is not None):
                return _finite(rows), inputs
            last = failed or last
        why = "the forward pass failed in another process" if last is None else last
        self._faults.note(what, why)
        return None

    def _note_missing(self) -> None:
        """Note which weights are not measured, and why."""
        for metric in self._of("weights")[:1]:
            for part, why in self._parts.missing.items():
                if part != "embedding":
                    self._faults.note(metric.name, why, module=part)

    def weights(self) -> list[Row]:
        """Return what is measured of the weights at every measurement."""
        return _finite(self._ranks("every measurement"))

    def facts(self, model: nn.Module) -> list[Row]:
        """Return norms of weights and gradients, and what is trained; keep what a step moves.

        Args:
            model: The model, uncompiled.
        """
        rows = self._facts.rows(model, self.tensors, self._parts)
        if self._of("norms"):
            rows += self._facts.norms(self.tensors, self._parts.matrices)
        if self._of("step"):
            self.updates.mark(self.tensors, self._parts.matrices)
        return _finite(rows)

    @property
    def wants_subspaces(self) -> bool:
        """Whether a metric of the subspaces of gradients is measured."""
        return bool(self._of("projection"))

    def subspaces(self, found: Iterable[tuple[Tensor, Any]]) -> list[Row]:
        """Return what is measured of subspaces that an optimizer projects gradients to.

        Args:
            found: The parameters, each with what the optimizer knows of its subspace.
        """
        names = {id(one): plain(name) for name, one in self.tensors.parameters.items()}
        rows: list[Row] = []
        for parameter, matrix in found:
            name = names.get(id(parameter))
            if name is None:
                continue
            for metric in self._of("projection"):
                assert metric.measure is not None, "of a projection"
                value = metric.measure(matrix)
                if value is not None:
                    module = name.removesuffix(".weight")
                    rows.append(Row(metric.name, value, module, layer_in(name)))
        return _finite(rows) if self._processes.first else []

    def expensive(self, *, stepped: bool) -> list[Row]:
        """Return effective ranks, overlap, and what gradients and updates show.

        Args:
            stepped: Whether a step was made that gradients can be left of.
        """
        rows = self._ranks("every tenth")
        embedding = self._parts.embedding
        if embedding is not None and self.tensors.has(embedding):
            for metric in self._of("embedding"):
                rows += self._of_weights(metric, [embedding])
        if self._of("gradients"):
            rows += self._gradients(missed=stepped)
        for metric in self._of("updates"):
            rows += self.updates.since_last(metric.name, self.tensors, self._parts.matrices)
        return _finite(rows)

    def moved(self) -> list[Row]:
        """Return by how much of its size the last single step moved each weight."""
        rows: list[Row] = []
        for metric in self._of("step"):
            rows += self.updates.of_one_step(metric.name, self.tensors, self._parts.matrices)
        return _finite(rows)

    @property
    def tensors(self) -> Tensors:
        """The model's tensors; `prepare` comes first."""
        assert self._tensors is not None, "prepare comes first"
        return self._tensors

    def _of(self, needs: Needs) -> list[Metric]:
        return [metric for metric in self._metrics if metric.needs == needs]

    def _lower(self) -> Tensor | None:
        """Return the lower MLP weight of the layer on which Theorem 1 is measured, gathered."""
        layer, metrics = self._options.theorem1, self._of("theorem1")
        if layer is None or not metrics or self._faults.is_off(metrics[0].name):
            return None
        for weight in self._parts.lower:
            if weight.layer == layer and self.tensors.has(weight):
                self.tensors.gather([weight])
                return self.tensors.matrix(weight)
        layers = sorted({weight.layer for weight in self._parts.lower if weight.layer is not None})
        self._faults.note(metrics[0].name, f"the MLP is known of layers {layers} alone")
        return None

    def _measured(
        self,
        what: str,
        parts: Sequence[P],
        read: Callable[[P], tuple[Tensor, ...]],
        measure: Callable[[list[tuple[Any, ...]]], list[Row]],
    ) -> list[Row]:
        """Return what the first process measures of some parts; other processes return nothing.

        Where measuring all at once fails, each is measured alone. One that is not finite is left
        out this time. One that fails otherwise is left out from now on, and the reason is noted.

        Args:
            what: What is measured.
            parts: The parts, each of a module.
            read: Returns the matrices of a part.
            measure: Returns the rows of several parts, each given with its matrices.
        """
        if not self._processes.first:
            return []
        parts = [part for part in parts if not self._faults.is_off(what, part.module)]
        if len(parts) > 1:
            with suppress(Exception):
                return measure([(part, *read(part)) for part in parts])
        rows: list[Row] = []
        for part in parts:
            matrices: tuple[Tensor, ...] = ()
            try:
                matrices = read(part)
                rows += measure([(part, *matrices)])
            except Exception as error:
                if all(map(_is_finite, matrices)):
                    self._faults.note(what, error, module=part.module)
        return rows

    def _ranks(self, cadence: Cadence) -> list[Row]:
        """Return what is measured of weights, and of Q·K of every attention, at a cadence."""
        rows: list[Row] = []
        for metric in self._of("weights"):
            if metric.monitored != cadence:
                continue
            there = [weight for weight in self._parts.ranked if self.tensors.has(weight)]
            groups: Iterable[Sequence[Weight]] = ([weight] for weight in there)
            if metric.name in self._repeated:
                # Those of one shape in succession: on a GPU they share what is prepared for it.
                there.sort(key=lambda weight: tuple(self.tensors.shape(weight)))
                groups = batches(there, self.tensors.get)
            for group in groups:
                rows += self._of_weights(metric, group)
            rows += self._scores(metric)
        return rows

    def _of_weights(self, metric: Metric, weights: Sequence[Weight]) -> list[Row]:
        """Return what is measured of weights, gathered together from all processes."""
        self.tensors.gather(weights)

        def measure(found: list[tuple[Any, ...]]) -> list[Row]:
            if metric.name in self._repeated:
                modules, matrices = [of.module for of, _ in found], [it for _, it in found]
                values = self._repeated[metric.name].of_all(modules, matrices)
            else:
                assert metric.measure is not None, "of weights"
                values = [metric.measure(matrix, self._effort) for _, matrix in found]
            return [
                Row(metric.name, it.value, of.module, of.layer, bound=it.bound)
                for (of, _), it in zip(found, values, strict=True)
            ]

        return self._measured(
            metric.name, weights, lambda weight: (self.tensors.matrix(weight),), measure
        )

    def _scores(self, metric: Metric) -> list[Row]:
        """Return ranks of Q·K of every attention."""
        what = "ranks of Q·K"
        pairs: dict[str, tuple[Tensor, ...]] = {}
        for of in self._parts.heads:
            both = of.weights[:2]
            if not all(map(self.tensors.has, both)):
                continue
            self.tensors.gather(both)
            if self._processes.first and not self._faults.is_off(what, of.module):
                pair = self._faults.tried(
                    what, lambda it=both: tuple(map(self.tensors.matrix, it)), module=of.module
                )
                pairs |= {} if pair is None else {of.module: pair}
        read = [of for of in self._parts.heads if of.module in pairs]
        return self._measured(
            what, read, lambda of: pairs[of.module], lambda found: scores_rows(metric, found)
        )

    def _gradients(self, *, missed: bool) -> list[Row]:
        rows: list[Row] = []
        some = learns = False
        chosen = self._of("gradients")
        ranks = self._options.ranks if any("ranks" in it.collects for it in chosen) else ()
        # Both come from one decomposition; energies of no ranks are none.
        metrics = [it for it in MONITORED.values() if it.needs == "gradients"]

        def measure(found: list[tuple[Any, ...]]) -> list[Row]:
            ((of, gradient),) = found
            return gradient_rows(of, gradient, metrics, ranks, self._effort)

        for matrix in self._parts.matrices:
            parameter = self.tensors.parameters.get(matrix.name)
            learns |= parameter is not None and parameter.requires_grad
            gradient = self.tensors.gradient(matrix.name)
            if gradient is None:
                continue
            some = True
            gradient = whole(matrix.read(gradient))
            rows += self._measured("gradient", [matrix], lambda _, it=gradient: (it,), measure)
        if missed and not some and learns:
            why = "no .grad is there: call step() before zero_grad(); per_layer leaves none"
            self._faults.note("gradient", why)
        return rows


def _finite(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose value is finite."""
    return [row for row in rows if math.isfinite(row.value)]


def _is_finite(matrix: Tensor) -> bool:
    try:
        return bool(matrix.isfinite().all())
    except Exception:  # a type that has no such thing
        return True

"""One measurement of a model: a list of what is measured, made once, and gone through each time.

With sharded weights every process runs the same sequence of gathers and forward passes, whatever
fails in between: a process that left the sequence would leave the others waiting.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from joma.common.sharded import is_dtensor
from joma.errors import JomaError
from joma.models import AttentionPart
from joma.probes import AttentionMap, stable_ranks
from joma.probes.gradient import measured
from joma.probes.metrics import MONITORED, Cadence, Effort, Metric
from joma.train.monitor._faults import Faults
from joma.train.monitor._forward import ForwardPass
from joma.train.monitor._inputs import MeasurementInputs
from joma.train.monitor._moves import Matrices, Moves, norm_rows
from joma.train.monitor._optimizer import WatchedOptimizers
from joma.train.monitor._options import Options
from joma.train.monitor._record import Row
from joma.train.monitor._restoring import evaluating
from joma.train.monitor._selection import (
    MonitoredMatrix,
    Selection,
    is_real,
    layer_in,
    plain,
    selection_of,
    tied_layers,
)
from joma.train.processes import MonitoredProcesses, whole

EFFORT = Effort(tolerance=1e-2, seed=0, quick=True)
RANKS = (8, 32, 128)
"""Each r of the gradients' energy in their top r directions."""

_TOGETHER = 2**26
"""Numbers of matrices that are measured together at a time."""
_SMALL = 2**22
"""Numbers of a matrix that is measured together with others."""

_ON_THE_GPU = 2**30
"""Bytes of copies of weights kept on the GPU; beyond that they lie in the CPU's memory."""

_Found = list[tuple[Any, ...]]
"""Selection of a model, each with its matrices."""


@dataclass(frozen=True, eq=False)
class _Measured:
    """What is measured of some weights together.

    Attributes:
        what: Name under which it is noted where it fails.
        cadence: How often.
        parts: The weights, or the attentions of whose queries and keys it is.
        names: Parameters they are made of.
        rows: Returns the rows of parts, each given with its matrices.
    """

    what: str
    cadence: Cadence | None
    parts: Sequence[Any]
    names: frozenset[str]
    rows: Callable[[_Found], list[Row]]


class Measurements:
    """Measures one model again and again.

    Args:
        model: The model, uncompiled; it is not kept.
        attention: Which modules make queries and keys, for a model that does not say it itself.
        processes: The processes that train it.
        options: What is measured, and how.
        faults: Where failures are noted.
        optimizers: What trains it.

    Attributes:
        has_moves: Whether single steps are measured.
        has_subspaces: Whether a metric of the subspaces of gradients is measured.

    Raises:
        JomaError: The model has no such layer as `theorem1`.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: AttentionMap | None,
        processes: MonitoredProcesses,
        options: Options,
        faults: Faults,
        optimizers: WatchedOptimizers,
    ) -> None:
        metrics = [MONITORED[name] for name in options.metrics or ()]
        self._by_need: dict[str, list[Metric]] = {metric.needs: [] for metric in MONITORED.values()}
        for metric in metrics:
            self._by_need[metric.needs].append(metric)
        self.has_moves = bool(self._by_need["step"])
        self.has_subspaces = bool(self._by_need["projection"]) and optimizers.projects
        self._processes, self._faults, self._optimizers = processes, faults, optimizers
        self._forward = ForwardPass(metrics, attention, options.theorem1, processes, faults)
        self._moves = Moves()
        self._signature: list[Any] | None = None
        self._model: nn.Module | None = None
        self._selection, self._parameters = Selection(), dict[str, Tensor]()
        self._repeated: dict[str, Any] = {}
        self._list: list[_Measured] = []
        self._lower: _Measured | None = None
        self._fixed: list[Row] = []
        with faults.guard("the parts of the model", effect="not found"), self.prepared(model):
            pass
        layer, blocks = options.theorem1, self._selection.blocks
        if layer is not None and blocks and layer not in blocks:
            raise JomaError(
                f"theorem1 must be a layer of the model, 0 to {max(blocks)}, got {layer}"
            )

    @contextlib.contextmanager
    def prepared(self, model: nn.Module) -> Iterator[None]:
        """Prepare measurements of the model in the block, which leave no trace."""
        try:
            with evaluating(model, self._processes.device):
                self._prepare(model)
                yield
        finally:
            self._model, self._parameters = None, {}  # which live only as long as the model

    def _prepare(self, model: nn.Module) -> None:
        """Read the model's parameters; decide what to measure where they changed."""
        self._model = model
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        signature = [
            (name, tuple(it.shape) if is_real(it) else None)
            for name, it in self._parameters.items()
        ]
        if signature == self._signature:
            return
        again, self._signature = self._signature is not None, signature
        self._selection = Selection()
        with self._faults.guard("the parts of the model", effect="not found"):
            self._selection = selection_of(model)
        self._moves.forget_others(self._matrices())
        self._repeated = {
            metric.name: metric.repeated(EFFORT)
            for metric in self._by_need["weights"]
            if metric.repeated is not None
        }
        self._list = list(self._measured())
        self._fixed = self._fixed_rows(model)
        self._lower = self._weight_of_theorem1()
        weights = [metric.name for metric in self._by_need["weights"][:1]]
        embedding = [metric.name for metric in self._by_need["embedding"]]
        for part, why in self._selection.missing.items():
            for name in embedding if part == "embedding" else weights:
                module = None if part == "embedding" else part
                self._faults.note(name, why, module=module)
        if again:
            why = "its parameters are others than before"
            self._faults.note("the model", why, effect="changed")

    def _measured(self) -> Iterator[_Measured]:
        """Yield what is measured of weights, in groups that are measured together."""
        chosen = self._selection
        embedding = [] if chosen.embedding is None else [chosen.embedding]
        for metric in [*self._by_need["weights"], *self._by_need["embedding"]]:
            weights = chosen.ranked if metric.needs == "weights" else embedding
            rows = partial(self._weight_rows, metric)
            for group, names in self._groups(weights, _SMALL):
                yield _Measured(metric.name, metric.monitored, group, names, rows)
            rows = partial(_score_rows, metric)
            for group, names in self._groups(chosen.heads if metric.of_spectrum else (), _TOGETHER):
                yield _Measured("ranks of Q·K", metric.monitored, group, names, rows)

    def _groups(
        self, parts: Iterable[Any], most: int
    ) -> Iterator[tuple[list[Any], frozenset[str]]]:
        """Yield parts that are measured together, with the names of their parameters.

        On a GPU those of no more than `most` numbers; other ones alone.
        """
        group: list[Any] = []
        names = frozenset[str]()
        left = 0
        for part in parts:
            own = frozenset(_names_of(part))
            tensors = [self._parameters[name] for name in own]
            size = sum(tensor.numel() for tensor in tensors)
            joins = size <= most and all(it.is_cuda and not is_dtensor(it) for it in tensors)
            if group and (not joins or size > left):
                yield group, names
                group, names = [], frozenset()
            if not group:
                left = _TOGETHER if joins else 0
            group.append(part)
            names |= own
            left -= size
        if group:
            yield group, names

    def _weight_of_theorem1(self) -> _Measured | None:
        """Return the lower MLP weight of the layer on which Theorem 1 is measured."""
        theorem = self._forward.theorem1
        if theorem is None:
            return None
        lower = [weight for weight in self._selection.ranked if weight.role == "mlp_lower"]
        for weight in lower:
            if weight.layer == theorem.layer:
                names = frozenset(weight.names)
                return _Measured("theorem1_residual", None, [weight], names, lambda found: [])
        layers = sorted({weight.layer for weight in lower if weight.layer is not None})
        self._faults.note("theorem1_residual", f"the MLP is known of layers {layers} alone")
        return None

    def _read(self, one: _Measured) -> Callable[[Any], list[Tensor]]:
        """Gather what weights are made of, in all processes; return what reads their matrices."""
        gathered = {name: whole(self._parameters[name]) for name in sorted(one.names)}
        model = self._model
        assert model is not None, "within `prepared`"

        def read(part: Any) -> list[Tensor]:
            return [
                weight.matrix(gathered) if weight.path is None else weight.of(model).detach()
                for weight in _weights_of(part)
            ]

        return read

    def _attempt(
        self,
        what: str,
        parts: Iterable[Any],
        read: Callable[[Any], list[Tensor]],
        measure: Callable[[_Found], list[Row]],
    ) -> list[Row]:
        """Return what the first process measures of some parts; other processes return nothing.

        Where measuring all at once fails, each is measured alone. One that is not finite is left
        out this time. One that fails otherwise is left out from now on, and the reason is noted.
        """
        if not self._processes.first:
            return []
        off = self._faults.off
        parts = [part for part in parts if off.isdisjoint({(what, None), (what, part.module)})]
        if len(parts) > 1:
            with contextlib.suppress(Exception):
                return measure([(part, *read(part)) for part in parts])
        rows: list[Row] = []
        for part in parts:
            matrices: list[Tensor] = []
            try:
                matrices = read(part)
                rows += measure([(part, *matrices)])
            except Exception as error:
                if all(bool(matrix.isfinite().all()) for matrix in matrices):
                    self._faults.note(what, error, module=part.module)
        return rows

    def regular(self, candidates: Sequence[MeasurementInputs]) -> tuple[list[Row], Any]:
        """Return what is measured at every measurement, and the inputs that the model ran on.

        Args:
            candidates: What the model may be called with, the likeliest first; none where its
                first call must not be made.
        """
        model, rows, taken = self._model, list[Row](), None
        assert model is not None, "within `prepared`"
        if candidates:
            with self._faults.guard("the forward pass", effect="failed"):
                lower = None
                if self._lower is not None:
                    (lower,) = self._read(self._lower)(self._lower.parts[0])
                rows, taken = self._forward.measure(model, candidates, self._selection, lower)
        with self._faults.guard("reading weights", effect="failed"):
            rows += self._ranks("every measurement")
        with self._faults.guard("norms of weights", effect="failed"):
            matrices = self._matrices()
            rows += self._fixed + self._training_rows()
            if self._by_need["norms"]:
                rows += norm_rows("weight_norm", matrices)
                rows += norm_rows("gradient_norm", self._gradients())
            if self.has_moves:
                self._moves.mark(matrices, self._learning(matrices))
        if self.has_subspaces:
            with self._faults.guard("reading subspaces", effect="failed"):
                rows += self._subspace_rows()
        return _finite(rows) if self._processes.first else [], taken

    def expensive(self, *, begun: int, step: int) -> list[Row]:
        """Return effective ranks, overlap, and what gradients and updates show.

        Args:
            begun: Step at which the monitor began.
            step: The current step.
        """
        if begun and not self._moves.known:
            self._faults.remark(
                f"update_stable_rank is counted from step {step}: the weights before the training "
                "was resumed are not known (load_state_dict)"
            )
        rows: list[Row] = []
        with self._faults.guard("the expensive metrics", effect="failed"):
            rows += self._ranks("every tenth")
            if self._by_need["gradients"]:
                rows += self._gradient_ranks(stepped=step > begun)
            for metric in self._by_need["updates"]:
                learning = self._learning(self._matrices())
                far = sum(it.numel() * it.element_size() for it in learning.values()) > _ON_THE_GPU
                for group, _ in self._groups(learning, _SMALL):
                    now = {of: learning[of] for of in group}
                    moves = {of: [by] for of, by in self._moves.since_last(now, far=far)}
                    rank = partial(_update_rows, metric.name)
                    rows += self._attempt(metric.name, moves, moves.__getitem__, rank)
        return _finite(rows)

    def moved(self) -> list[Row]:
        """Return by how much of its size the last single step moved each weight."""
        rows: list[Row] = []
        for metric in self._by_need["step"]:
            rows += self._moves.of_one_step(metric.name, self._matrices())
        return _finite(rows) if self._processes.first else []

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what later measurements build on; all processes go through it, or none."""
        yield from self._moves.state()
        if self._processes.first:
            for part in self._with_state():
                yield from part.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, within `prepared`."""
        matrices = self._matrices()
        self._moves.load(state, matrices, self._learning(matrices))
        kept = ("copy.", "mark.")  # of the moves, which may lie elsewhere
        rest = {
            name: it.to(self._processes.device)
            for name, it in state.items()
            if not name.startswith(kept)
        }
        for part in self._with_state():
            part.load(rest)

    def _with_state(self) -> list[Any]:
        theorem1 = self._forward.theorem1
        return [*self._repeated.values(), *([] if theorem1 is None else [theorem1])]

    def _ranks(self, cadence: Cadence) -> list[Row]:
        rows: list[Row] = []
        for one in self._list:
            if one.cadence == cadence:
                rows += self._attempt(one.what, one.parts, self._read(one), one.rows)
        return rows

    def _weight_rows(self, metric: Metric, found: _Found) -> list[Row]:
        if metric.name in self._repeated:
            modules, matrices = [of.module for of, _ in found], [it for _, it in found]
            values = self._repeated[metric.name].of_all(modules, matrices)
        else:
            assert metric.measure is not None, "of weights"
            values = [metric.measure(matrix, EFFORT) for _, matrix in found]
        return [
            Row(metric.name, it.value, of.module, of.layer, bound=it.bound)
            for (of, _), it in zip(found, values, strict=True)
        ]

    def _matrices(self) -> Matrices:
        """Return the matrices that are followed, with their numbers."""
        return self._of_matrices({name: it.detach() for name, it in self._parameters.items()})

    def _learning(self, matrices: Matrices) -> Matrices:
        """Return those of the matrices that are trained."""
        known = self._parameters
        return {of: it for of, it in matrices.items() if known[of.name].requires_grad}

    def _gradients(self) -> Matrices:
        """Return the matrices that have a gradient, with it."""
        gradients = {name: it.grad for name, it in self._parameters.items() if not is_lazy(it)}
        return self._of_matrices(
            {name: it for name, it in gradients.items() if it is not None and is_real(it)}
        )

    def _of_matrices(self, tensors: Mapping[str, Tensor]) -> Matrices:
        """Return the matrices that are followed, with their part of tensors by name."""
        return {
            of: tensors[of.name] if of.expert is None else tensors[of.name][of.expert]
            for of in self._selection.matrices
            if of.name in tensors
        }

    def _gradient_ranks(self, *, stepped: bool) -> list[Row]:
        gradients = self._gradients()
        if stepped and not gradients and self._learning(self._matrices()):
            why = "no .grad is there: call step() before zero_grad(); per_layer leaves none"
            self._faults.note("gradient", why)
        chosen = self._by_need["gradients"]
        ranks = RANKS if any("ranks" in metric.collects for metric in chosen) else ()
        rows: list[Row] = []
        for of, gradient in gradients.items():
            gradient, rank = whole(gradient), partial(_gradient_rows, ranks)
            rows += self._attempt("gradient", [of], lambda _, it=gradient: [it], rank)
        return rows

    def _fixed_rows(self, model: nn.Module) -> list[Row]:
        """Return tied layers, the shapes of matrices, and the vocabulary."""
        rows = [
            Row("tied_layer", float(of), path, layer)
            for path, layer, of in tied_layers(model)
            if path.rpartition(".")[0]
            in self._selection.stacks  # heads of decoders are often shared
        ]
        if self._selection.embedding is not None:
            tokens = self._parameters[self._selection.embedding.names[0]].shape[0]
            linear = (it for it in model.modules() if isinstance(it, nn.Linear))
            if any(it.out_features == tokens for it in linear):  # one for every token
                rows.append(Row("vocabulary", float(tokens)))
        for of in self._selection.matrices:
            if of.expert is None:
                shape = self._parameters[of.name].shape
                sides = zip(("matrix_rows", "matrix_columns"), shape, strict=True)
                rows += [Row(name, float(size), of.module, of.layer) for name, size in sides]
        return rows

    def _training_rows(self) -> list[Row]:
        """Return which matrices are trained."""
        rows: list[Row] = []
        for of in self._selection.matrices:
            parameter = self._parameters[of.name]
            rows.append(Row("requires_grad", float(parameter.requires_grad), of.module, of.layer))
            optimized = self._optimizers.holds(parameter)
            if optimized is not None:
                rows.append(Row("optimized", float(optimized), of.module, of.layer))
        return rows

    def _subspace_rows(self) -> list[Row]:
        """Return what is measured of subspaces that an optimizer projects gradients to."""
        rows: list[Row] = []
        names = {id(one): plain(name) for name, one in self._parameters.items()}
        for parameter, matrix in self._optimizers.subspaces():
            name = names.get(id(parameter))
            if name is None:
                continue
            for metric in self._by_need["projection"]:
                assert metric.measure is not None, "of a projection"
                value = metric.measure(matrix)
                if value is not None:
                    module = name.removesuffix(".weight")
                    rows.append(Row(metric.name, value, module, layer_in(name)))
        return rows


def can_run(model: nn.Module) -> bool:
    """Return whether a model has all its weights: a first call would draw what is missing."""
    return not any(map(is_lazy, model.parameters()))


def _weights_of(part: Any) -> tuple[Any, ...]:
    return (part.query, part.key) if isinstance(part, AttentionPart) else (part,)


def _names_of(part: Any) -> tuple[str, ...]:
    """Return the names of the parameters that a part is made of."""
    if isinstance(part, MonitoredMatrix):
        return (part.name,)
    return tuple(name for weight in _weights_of(part) for name in weight.names)


def _score_rows(metric: Metric, found: _Found) -> list[Row]:
    """Return a rank of every head's Wqᵀ·Wk; without a head, the mean over heads."""
    assert metric.of_spectrum is not None, "of weights"
    rows: list[Row] = []
    for (of, _, _), values_HD in zip(found, _score_spectra(found), strict=True):
        ranks = metric.of_spectrum(values_HD)
        rows.append(Row(metric.name, float(ranks.mean()), of.module, of.layer))
        if len(values_HD) > 1:
            rows += [
                Row(metric.name, value, of.module, of.layer, head)
                for head, value in enumerate(ranks.tolist())
            ]
    return rows


def _score_spectra(found: _Found) -> list[Tensor]:
    """Return singular values of Wqᵀ·Wk of every head, (H, d) for each layer, in float64.

    The product, as wide as the model, has rank d at most and is never made: with Gram matrices
    Wq·Wqᵀ = R·Rᵀ of a head, its squared singular values are the eigenvalues of Rᵀ·(Wk·Wkᵀ)·R.
    Layers of one shape are computed together, which on a GPU is most of the time saved.
    """
    grams: dict[torch.Size, list[tuple[int, Tensor, Tensor]]] = {}
    for number, (of, query_ED, key_ED) in enumerate(found):
        query_HDD, key_GDD = _gram(query_ED, of.heads), _gram(key_ED, of.key_heads)
        key_HDD = key_GDD.repeat_interleave(len(query_HDD) // len(key_GDD), 0)
        grams.setdefault(query_HDD.shape, []).append((number, query_HDD, key_HDD))
    spectra: dict[int, Tensor] = {}
    for alike in grams.values():
        numbers, queries, keys = zip(*alike, strict=True)
        values, vectors = torch.linalg.eigh(torch.cat(queries))
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
        squares = torch.linalg.eigvalsh(root.mT @ torch.cat(keys) @ root)
        singular = squares.flip(-1).clamp(min=0).sqrt().chunk(len(numbers))
        spectra.update(zip(numbers, singular, strict=True))
    return [spectra[number] for number in range(len(found))]


def _gram(weight_ED: Tensor, heads: int) -> Tensor:
    weight_HDE = weight_ED.unflatten(0, (heads, -1)).double()
    return weight_HDE @ weight_HDE.mT


def _gradient_rows(ranks: Sequence[int], found: _Found) -> list[Row]:
    """Return what metrics say of one gradient: all of one decomposition.

    An r above half of the shorter side is left out, for GaLore would save nothing there.
    """
    ((of, gradient),) = found
    fitting = [rank for rank in ranks if 2 * rank <= min(gradient.shape)]
    rank = measured(of.name, gradient, fitting, EFFORT.tolerance, EFFORT.seed)
    return [
        Row(name, estimate.value, of.module, of.layer, bound=estimate.bound)
        for metric in MONITORED.values()
        if metric.needs == "gradients" and metric.measure is not None
        for name, estimate in metric.measure(rank).items()
    ]


def _update_rows(name: str, found: _Found) -> list[Row]:
    """Return the stable ranks of how weights moved."""
    changes = [change for _, change in found]
    ranks = stable_ranks(changes, tolerance=EFFORT.tolerance, seed=EFFORT.seed)
    return [
        Row(name, rank.value, of.module, of.layer, bound=rank.bound)
        for (of, _), rank in zip(found, ranks, strict=True)
    ]


def _finite(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if math.isfinite(row.value)]

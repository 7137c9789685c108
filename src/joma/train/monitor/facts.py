"""Cheap facts of a training: norms of weights, what is trained, tied layers, the optimizer."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from joma.common.sharded import is_dtensor
from joma.errors import JomaError
from joma.train.monitor.parts import MonitoredMatrix, Parts, Tensors, is_real, plain
from joma.train.monitor.record import Row
from joma.train.processes import MonitoredProcesses, whole

IsOptimized = Callable[[Tensor], bool | None]
"""Whether a parameter is in the optimizer; None where no optimizer is known."""

_MOST_WRAPPERS = 8
"""Objects around an optimizer, such as those of trainers, that are searched for it."""


class Facts:
    """Reads what costs next to nothing, at every measurement.

    Args:
        processes: The processes that train the model.
        is_optimized: Whether a parameter is in the optimizer.
    """

    def __init__(self, processes: MonitoredProcesses, is_optimized: IsOptimized) -> None:
        self._processes, self._is_optimized = processes, is_optimized
        self._last: dict[tuple[str, str | None], float] = {}

    def rows(self, model: nn.Module, tensors: Tensors, parts: Parts) -> list[Row]:
        """Return what is trained, shapes, tied layers and the vocabulary, where that changed.

        Args:
            model: The model, uncompiled.
            tensors: Its tensors.
            parts: Its parts.
        """
        rows = [
            Row("tied_layer", float(of), path, layer)
            for path, layer, of in tied_layers(model)
            if path.rpartition(".")[0] in parts.stacks  # heads of decoders are often shared
        ]
        if parts.embedding is not None and tensors.has(parts.embedding):
            tokens = tensors.shape(parts.embedding)[0]
            linear = (it for it in model.modules() if isinstance(it, nn.Linear))
            if any(it.out_features == tokens for it in linear):  # one for every token
                rows.append(Row("vocabulary", float(tokens)))
        for matrix in parts.matrices:
            parameter = tensors.parameters.get(matrix.name)
            if parameter is None:
                continue
            where = matrix.module, matrix.layer
            rows.append(Row("requires_grad", float(parameter.requires_grad), *where))
            if parameter.ndim == 2 and not is_lazy(parameter):
                sides = zip(("matrix_rows", "matrix_columns"), parameter.shape, strict=True)
                rows += [Row(name, float(size), *where) for name, size in sides]
            optimized = self._is_optimized(parameter)
            if optimized is not None:
                rows.append(Row("optimized", float(optimized), *where))
        new = [row for row in rows if self._last.get((row.name, row.module)) != row.value]
        self._last.update({(row.name, row.module): row.value for row in new})
        return new if self._processes.first else []

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what was recorded last."""
        for (name, module), value in self._last.items():
            yield f"fact.{name}|{module or ''}", torch.tensor(value, dtype=torch.float64)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave; what else is in it is left alone."""
        for key, value in state.items():
            if key.startswith("fact."):
                name, _, module = key.removeprefix("fact.").partition("|")
                self._last[name, module or None] = float(value)

    def norms(self, tensors: Tensors, matrices: Sequence[MonitoredMatrix]) -> list[Row]:
        """Return the norms of weights and of their gradients; all processes call this, or none.

        Args:
            tensors: The model's tensors.
            matrices: Those that are followed.
        """
        rows: list[Row] = []
        gradients = ((matrix, tensors.gradient(matrix.name)) for matrix in matrices)
        for name, there in (
            ("weight_norm", tensors.present(matrices)),
            ("gradient_norm", [(of, of.read(it)) for of, it in gradients if it is not None]),
        ):
            values = norms_of([tensor for _, tensor in there])
            rows += [
                Row(name, value, matrix.module, matrix.layer)
                for (matrix, _), value in zip(there, values, strict=True)
            ]
        return rows if self._processes.first else []


def norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return the Frobenius norm of every tensor, read from each device at once.

    Sharded tensors are summed over all processes, each of which calls this.
    """
    if any(is_dtensor(tensor) for tensor in tensors):
        each = [whole(torch.linalg.vector_norm(it, dtype=torch.float32)) for it in tensors]
        return [float(norm) for norm in each]
    found: dict[int, float] = {}
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    for (_, dtype), indices in groups.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch._foreach_norm([tensors[index] for index in indices], 2, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
        found.update(zip(indices, torch.stack(norms).tolist(), strict=True))
    return [found[index] for index in range(len(tensors))]


def number_of_parameters(model: nn.Module) -> int:
    """Return how many numbers a model's parameters hold; sharded ones count as a whole."""
    return sum(parameter.numel() for parameter in model.parameters() if is_real(parameter))


def tied_layers(model: nn.Module) -> list[tuple[str, int, int]]:
    """Return layers that are the same as an earlier one of their list: path, index, earlier index.

    The same module, or modules that share most of their matrices. A block that a model runs several
    times but lists once (ALBERT) is none.
    """
    found = []
    for path, listed in model.named_modules():
        if not isinstance(listed, nn.ModuleList):
            continue
        layers = [
            {id(it) for it in layer.parameters() if it.ndim > 1 and is_real(it)} for layer in listed
        ]
        for index, matrices in enumerate(layers):
            for earlier, others in enumerate(layers[:index]):
                if len(matrices & others) > 0.5 * len(matrices):
                    found.append((f"{plain(path)}.{index}", index, earlier))
                    break
    return found


class OptimizerView:
    """Reads the parameter groups of one optimizer or several, which it keeps weakly.

    `read` comes first, at every measurement: groups are added and rates change while a training
    runs. Everything is None where no optimizer was given, where it is gone, or where it holds none
    of the model's parameters (some wrappers optimize flattened copies of them).

    Args:
        optimizer: The optimizer, a sequence of them, or None. Anything that has the `param_groups`
            of `torch.optim.Optimizer` will do.

    Attributes:
        learning_rate: The largest of all groups that hold parameters.
        weight_decay: The largest of all groups that hold parameters.

    Raises:
        JomaError: It has no parameter groups.
    """

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizers = [_weakly(one) for one in _several(optimizer)]
        self.learning_rate: float | None = None
        self.weight_decay: float | None = None
        self._optimized: frozenset[int] | None = None

    def read(self, model: nn.Module) -> None:
        """Read the parameter groups as they are now.

        Args:
            model: The model, whose parameters `optimized` will be asked for.
        """
        groups = [group for one in self._living() for group in one.param_groups if group["params"]]
        self.learning_rate = _largest(groups, "lr")
        self.weight_decay = _largest(groups, "weight_decay")
        ids = frozenset(id(parameter) for group in groups for parameter in group["params"])
        knows = any(id(parameter) in ids for parameter in model.parameters())
        self._optimized = ids if knows else None

    def optimized(self, parameter: Tensor) -> bool | None:
        """Return whether an optimizer holds the parameter; None where that is not known.

        Args:
            parameter: A parameter of the model, the object itself.
        """
        return None if self._optimized is None else id(parameter) in self._optimized

    def settings(self) -> dict[str, Any] | None:
        """Return class and options of the optimizer, as JSON can hold them; None without one.

        Several are numbered. An option that groups of parameters do not share has a value for each
        group. The learning rate is the one that schedules start from.
        """
        each = [_settings(one) for one in self._living()]
        if len(each) == 1:
            return each[0]
        return {str(number): one for number, one in enumerate(each)} or None

    def record(self, *, energy: bool, angles: bool = True) -> None:
        """Let optimizers that project gradients record what `subspaces` yields.

        Args:
            energy: Whether the next step records the energy of gradients in their subspaces.
            angles: Whether subspaces record by how much they turn.
        """
        for one in self._projecting():
            one.record_energy, one.record_angles = energy, angles

    def subspaces(self) -> Iterator[tuple[Tensor, Any]]:
        """Yield the parameters whose gradients are projected, each with what is known of that."""
        for one in self._projecting():
            yield from one.subspaces()

    def _living(self) -> list[Any]:
        return [one for one in (known() for known in self._optimizers) if one is not None]

    def _projecting(self) -> list[Any]:
        """Return the optimizers that project gradients, out of the wrappers of trainers."""
        inner = [_unwrapped(one, lambda it: hasattr(it, "subspaces")) for one in self._living()]
        return [one for one in inner if hasattr(one, "subspaces")]


def _several(optimizer: Any) -> list[Any]:
    """Return the optimizers that were given, checked."""
    if optimizer is None:
        return []
    several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    for one in several:
        groups = getattr(one, "param_groups", None)
        if (
            isinstance(one, type)
            or not isinstance(groups, Iterable)
            or not all(isinstance(group, Mapping) and "params" in group for group in groups)
        ):
            raise JomaError(
                "optimizer must be a torch.optim.Optimizer, a list of them or None, got "
                f"{one!r:.60}"
            )
    return list(several)


def _unwrapped(optimizer: Any, is_it: Callable[[Any], bool]) -> Any:
    """Return the first object inside the wrappers of trainers that is it, or the innermost."""
    for _ in range(_MOST_WRAPPERS):
        if is_it(optimizer) or not hasattr(optimizer, "optimizer"):
            break
        optimizer = optimizer.optimizer
    return optimizer


def _settings(optimizer: Any) -> dict[str, Any]:
    # Accelerate's wrapper is itself an Optimizer: the one inside has the name that says something.
    optimizer = _unwrapped(
        optimizer,
        lambda it: (
            isinstance(it, torch.optim.Optimizer)
            and not isinstance(getattr(it, "optimizer", None), torch.optim.Optimizer)
        ),
    )
    found: dict[str, Any] = {"name": type(optimizer).__name__}
    groups = [group for group in optimizer.param_groups if group["params"]]
    for name in dict.fromkeys(name for group in groups for name in group):
        if name in ("params", "initial_lr", "param_names"):
            continue
        each = [group.get(name) for group in groups]
        if name == "lr":
            each = [group.get("initial_lr", group.get("lr")) for group in groups]
        values = [_option(value) for value in each]
        if any(value is not None for value in values):
            found[name] = values[0] if all(it == values[0] for it in values) else values
    return found


def _option(value: Any) -> Any:
    """Return the option of an optimizer in a type that JSON has, None for any other."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, list | tuple):
        return [_option(item) for item in value]
    return value if isinstance(value, str | bool | int | float) else None


def _weakly(optimizer: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(optimizer)
    except TypeError:  # of a class with slots
        return lambda: optimizer


def _largest(groups: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [float(group[name]) for group in groups if group.get(name) is not None]
    return max(values, default=None)

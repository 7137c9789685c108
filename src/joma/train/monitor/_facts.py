"""Cheap facts of every weight: norms, what is trained, and layers that are one and the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from joma.train.monitor._parts import Matrix, Parts
from joma.train.monitor._processes import Processes, whole
from joma.train.monitor._row import Row
from joma.train.monitor._tensors import Tensors, is_real, plain

IsOptimized = Callable[[Tensor], bool | None]
"""Whether a parameter is in the optimizer; None where no optimizer is known."""


class Facts:
    """Reads what costs next to nothing, at every measurement.

    Args:
        processes: The processes that train the model.
        is_optimized: Whether a parameter is in the optimizer.
    """

    def __init__(self, processes: Processes, is_optimized: IsOptimized) -> None:
        self._processes, self._is_optimized = processes, is_optimized
        self._last: dict[tuple[str, str | None], float] = {}

    def rows(self, model: nn.Module, tensors: Tensors, parts: Parts) -> list[Row]:
        """Return which weights are trained, tied layers and the vocabulary, where that changed.

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
            if _predicts(model, tokens):
                rows.append(Row("vocabulary", float(tokens)))
        for matrix in parts.matrices:
            parameter = tensors.parameters.get(matrix.name)
            if parameter is None:
                continue
            where = matrix.module, matrix.layer
            rows.append(Row("requires_grad", float(parameter.requires_grad), *where))
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

    def norms(self, tensors: Tensors, matrices: Sequence[Matrix]) -> list[Row]:
        """Return the norms of weights and of their gradients; all processes call this, or none.

        Args:
            tensors: The model's tensors.
            matrices: Those that are followed.
        """
        rows: list[Row] = []
        for name, read in (("weight_norm", tensors.get), ("gradient_norm", tensors.gradient)):
            found = [(matrix, read(matrix.name)) for matrix in matrices]
            there = [(matrix, matrix.read(it)) for matrix, it in found if it is not None]
            values = norms_of([tensor for _, tensor in there])
            rows += [
                Row(name, value, matrix.module, matrix.layer)
                for (matrix, _), value in zip(there, values, strict=True)
            ]
        return rows if self._processes.first else []


def _predicts(model: nn.Module, tokens: int) -> bool:
    """Return whether a linear map of the model has an output for every token."""
    return any(
        isinstance(module, nn.Linear) and module.out_features == tokens
        for module in model.modules()
    )


def norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return the Frobenius norm of every tensor, read from each device at once.

    Sharded tensors are summed over all processes, each of which calls this.
    """
    if any(isinstance(tensor, DTensor) for tensor in tensors):
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

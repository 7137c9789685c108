"""How weights move: the rank of their updates, the size of single steps, and what is frozen."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from joma.train.monitor import _weights
from joma.train.monitor._faults import Faults
from joma.train.monitor._options import Options
from joma.train.monitor._parts import Matrix
from joma.train.monitor._processes import Processes, whole
from joma.train.monitor._row import Row
from joma.train.monitor._tensors import Tensors

_COPIES_ON_THE_GPU = 2**30
"""Bytes of copies of weights kept on the GPU; beyond that they lie in the CPU's memory."""


class Updates:
    """Compares weights with copies of what they were.

    A weight that is not trained is not copied: its version says whether it was written to.

    Args:
        processes: The processes that train the model.
        options: Tolerance and seed of ranks.
        faults: Where failures are noted.
    """

    def __init__(self, processes: Processes, options: Options, faults: Faults) -> None:
        self._processes, self._options, self._faults = processes, options, faults
        self._copies: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}

    @property
    def known(self) -> bool:
        """Whether there is anything to compare with."""
        return bool(self._copies or self._versions)

    def forget_others(self, tensors: Tensors, matrices: Sequence[Matrix]) -> None:
        """Forget copies of what the model does not have any more."""
        there = {it.key: _now(tensors, it).shape for it in _present(tensors, matrices)}
        self._copies = {
            key: copy for key, copy in self._copies.items() if there.get(key) == copy.shape
        }

    def since_last(self, tensors: Tensors, matrices: Sequence[Matrix]) -> list[Row]:
        """Return the stable rank of every weight's move since this was called last."""
        rows: list[Row] = []
        there = _present(tensors, matrices)
        learning = [it for it in there if tensors.parameters[it.name].requires_grad]
        sizes = [_now(tensors, it) for it in learning]
        far = sum(it.numel() * it.element_size() for it in sizes) > _COPIES_ON_THE_GPU
        for batch in _weights.batches(learning, tensors.get):
            moved: list[tuple[Matrix, Tensor]] = []
            for matrix in batch:
                now = _now(tensors, matrix)
                before = self._copies.pop(matrix.key, None)
                if before is not None:
                    moved.append((matrix, whole(now - before.to(now.device))))
                self._copies[matrix.key] = now.cpu() if now.is_cuda and far else now.clone()
            if self._processes.first and moved:
                rows += self._ranks(moved)
        self._versions = {
            it.key: _now(tensors, it)._version
            for it in there
            if not tensors.parameters[it.name].requires_grad
        }
        return rows

    def of_one_step(self, tensors: Tensors, matrices: Sequence[Matrix]) -> list[Row]:
        """Return by how much of its size each weight moved since `since_last`, one step ago."""
        rows: list[Row] = []
        for matrix in _present(tensors, matrices):
            now, copy = _now(tensors, matrix), self._copies.get(matrix.key)
            share = None
            if copy is not None:
                copy = copy.to(now.device)
                # Both norms are made by all processes where weights are sharded.
                change = whole(torch.linalg.vector_norm(now - copy, dtype=torch.float32))
                size = whole(torch.linalg.vector_norm(copy, dtype=torch.float32))
                if self._processes.first:
                    share = float(change / size) if float(size) > 0 else None
            elif self._versions.get(matrix.key) == now._version:
                share = 0.0
            if share is not None and self._processes.first:
                where = (matrix.module, matrix.layer)
                rows.append(Row("update_relative", share, *where))
                rows.append(Row("frozen", float(share == 0.0), *where))
        return rows

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the copies by name, gathered; all processes go through them, or none."""
        for key, copy in self._copies.items():
            yield key, whole(copy)

    def load(
        self, state: Mapping[str, Tensor], tensors: Tensors, matrices: Sequence[Matrix]
    ) -> None:
        """Take copies that `state` gave; all processes call this with the same ones."""
        for matrix in _present(tensors, matrices):
            copy, now = state.get(matrix.key), _now(tensors, matrix)
            if copy is None or copy.shape != now.shape:
                continue
            copy = copy.to(now.dtype)
            if isinstance(now, DTensor):
                copy = distribute_tensor(copy, now.device_mesh, now.placements)
            self._copies[matrix.key] = copy
        self._versions = {
            it.key: _now(tensors, it)._version
            for it in _present(tensors, matrices)
            if not tensors.parameters[it.name].requires_grad
        }

    def _ranks(self, moved: Sequence[tuple[Matrix, Tensor]]) -> list[Row]:
        matrices, changes = [it for it, _ in moved], [change for _, change in moved]
        options = self._options
        found = self._faults.tried(
            "update_stable_rank",
            lambda: _weights.update_rows(matrices, changes, options.tolerance, options.seed),
            module=matrices[0].module,
        )
        return found or []


def _present(tensors: Tensors, matrices: Sequence[Matrix]) -> list[Matrix]:
    return [matrix for matrix in matrices if tensors.get(matrix.name) is not None]


def _now(tensors: Tensors, matrix: Matrix) -> Tensor:
    tensor = tensors.get(matrix.name)
    assert tensor is not None, "`_present` was asked"
    return matrix.read(tensor)

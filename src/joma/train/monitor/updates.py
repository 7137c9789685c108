"""How weights move: the rank of their updates, the size of single steps, and what is frozen."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from joma.probes.metrics import Effort
from joma.train.monitor import ranks
from joma.train.monitor.facts import norms_of
from joma.train.monitor.faults import Faults
from joma.train.monitor.parts import MonitoredMatrix, Tensors
from joma.train.monitor.processes import MonitoredProcesses, whole
from joma.train.monitor.record import Row

_COPIES_ON_THE_GPU = 2**30
"""Bytes of copies of weights kept on the GPU; beyond that they lie in the CPU's memory."""

_SAMPLED = 2**18
"""Numbers of a weight that are compared before and after one step."""


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
        there = {it.key: _now(tensors, it).shape for it in _present(tensors, matrices)}
        self._copies = {
            key: copy for key, copy in self._copies.items() if there.get(key) == copy.shape
        }

    def since_last(
        self, name: str, tensors: Tensors, matrices: Sequence[MonitoredMatrix]
    ) -> list[Row]:
        """Return the stable rank of every weight's move since this was called last, as `name`."""
        rows: list[Row] = []
        there = _present(tensors, matrices)
        learning = [it for it in there if tensors.parameters[it.name].requires_grad]
        sizes = [_now(tensors, it) for it in learning]
        far = sum(it.numel() * it.element_size() for it in sizes) > _COPIES_ON_THE_GPU
        for batch in ranks.batches(learning, tensors.get):
            moved: list[tuple[MonitoredMatrix, Tensor]] = []
            for matrix in batch:
                now = _now(tensors, matrix)
                before = self._copies.pop(matrix.key, None)
                if before is not None:
                    moved.append((matrix, whole(now - before.to(now.device))))
                self._copies[matrix.key] = now.cpu() if now.is_cuda and far else now.clone()
            if self._processes.first and moved:
                rows += self._ranks(name, moved)
        return rows

    def mark(self, tensors: Tensors, matrices: Sequence[MonitoredMatrix]) -> None:
        """Keep what the weights are now, of large ones a sample, for `of_one_step`."""
        there = _present(tensors, matrices)
        self._marks = {
            it.key: _sample(_now(tensors, it)).clone()
            for it in there
            if tensors.parameters[it.name].requires_grad
        }
        self._versions = {
            it.key: _now(tensors, it)._version
            for it in there
            if not tensors.parameters[it.name].requires_grad
        }

    def of_one_step(
        self, name: str, tensors: Tensors, matrices: Sequence[MonitoredMatrix]
    ) -> list[Row]:
        """Return by how much of its size each weight moved since `mark`, one step ago."""
        pairs: list[tuple[str, Tensor, Tensor]] = []
        for matrix in _present(tensors, matrices):
            now, mark = _sample(_now(tensors, matrix)), self._marks.get(matrix.key)
            if mark is not None and mark.shape == now.shape:
                pairs.append((matrix.key, now, mark.to(now.device)))
        # Both norms are made by all processes where weights are sharded.
        changes = norms_of([now - mark for _, now, mark in pairs])
        sizes = norms_of([mark for _, _, mark in pairs])
        shares = {
            key: change / size
            for (key, _, _), change, size in zip(pairs, changes, sizes, strict=True)
            if size > 0
        }
        for matrix in _present(tensors, matrices):
            if self._versions.get(matrix.key) == _now(tensors, matrix)._version:
                shares[matrix.key] = 0.0  # not trained, and not written to
        self._marks, self._versions = {}, {}
        if not self._processes.first:
            return []
        rows: list[Row] = []
        for matrix in _present(tensors, matrices):
            share = shares.get(matrix.key)
            if share is not None:
                where = (matrix.module, matrix.layer)
                rows.append(Row(name, share, *where))
                rows.append(Row("frozen", float(share == 0.0), *where))
        return rows

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield copies and marks by name, gathered; all processes go through them, or none."""
        for key, copy in self._copies.items():
            yield f"copy.{key}", whole(copy)
        for key, mark in self._marks.items():
            yield f"mark.{key}", whole(mark)

    def load(
        self, state: Mapping[str, Tensor], tensors: Tensors, matrices: Sequence[MonitoredMatrix]
    ) -> None:
        """Take copies that `state` gave; all processes call this with the same ones."""
        self._marks, self._versions = {}, {}
        for matrix in _present(tensors, matrices):
            now = _now(tensors, matrix)
            copy, mark = (state.get(f"{kind}.{matrix.key}") for kind in ("copy", "mark"))
            if copy is not None and copy.shape == now.shape:
                self._copies[matrix.key] = _placed(copy.to(now.dtype), now)
            if mark is not None and mark.shape == _sample(now).shape:
                self._marks[matrix.key] = _placed(mark.to(now.dtype), now)
            elif not tensors.parameters[matrix.name].requires_grad:
                self._versions[matrix.key] = now._version

    def _ranks(self, name: str, moved: Sequence[tuple[MonitoredMatrix, Tensor]]) -> list[Row]:
        matrices, changes = [it for it, _ in moved], [change for _, change in moved]
        found = self._faults.tried(
            name,
            lambda: ranks.update_rows(name, matrices, changes, self._effort),
            module=matrices[0].module,
        )
        return found or []


def _present(tensors: Tensors, matrices: Sequence[MonitoredMatrix]) -> list[MonitoredMatrix]:
    return [matrix for matrix in matrices if tensors.get(matrix.name) is not None]


def _placed(copy: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor as a weight is stored: sharded, or on its device."""
    if isinstance(like, DTensor):
        return distribute_tensor(copy, like.device_mesh, like.placements)
    return copy


def _sample(matrix: Tensor) -> Tensor:
    """Return numbers spread evenly over a matrix: all of a small or sharded one."""
    if isinstance(matrix, DTensor) or matrix.numel() <= _SAMPLED or not matrix.is_contiguous():
        return matrix
    return matrix.view(-1)[:: -(-matrix.numel() // _SAMPLED)]


def _now(tensors: Tensors, matrix: MonitoredMatrix) -> Tensor:
    tensor = tensors.get(matrix.name)
    assert tensor is not None, "`_present` was asked"
    return matrix.read(tensor)

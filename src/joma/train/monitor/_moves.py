"""Norms of weights and gradients, and how weights move."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from joma.common.sharded import is_dtensor
from joma.train.monitor._record import Row
from joma.train.monitor._selection import MonitoredMatrix
from joma.train.processes import sharded_like, whole

_SAMPLED = 2**18
"""Numbers of a weight that are compared before and after one step."""

Matrices = Mapping[MonitoredMatrix, Tensor]
"""The matrices that are followed, each with its numbers or its gradient."""


def norm_rows(name: str, matrices: Matrices) -> list[Row]:
    """Return the norms of matrices; all processes call this, or none."""
    return [
        Row(name, norm, of.module, of.layer)
        for of, norm in zip(matrices, _norms(list(matrices.values())), strict=True)
    ]


def _norms(tensors: list[Tensor]) -> list[float]:
    """Return the Frobenius norm of every tensor, read from each device at once.

    Sharded tensors are summed over all processes, each of which calls this.
    """
    if any(is_dtensor(tensor) for tensor in tensors):
        each = [whole(torch.linalg.vector_norm(it, dtype=torch.float32)) for it in tensors]
        return [float(norm) for norm in each]
    found = [0.0] * len(tensors)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    for (_, dtype), indices in groups.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch._foreach_norm([tensors[index] for index in indices], 2, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
        for index, norm in zip(indices, torch.stack(norms).tolist(), strict=True):
            found[index] = norm
    return found


class Moves:
    """Compares weights with copies of what they were.

    A weight that is not trained is not copied: its version says whether it was written to. What a
    single step does to a large weight is read off a sample of its numbers.
    """

    def __init__(self) -> None:
        self._copies: dict[MonitoredMatrix, Tensor] = {}
        self._marks: dict[MonitoredMatrix, Tensor] = {}
        self._versions: dict[MonitoredMatrix, int] = {}

    @property
    def known(self) -> bool:
        """Whether there is anything to compare with."""
        return bool(self._copies)

    def forget_others(self, matrices: Matrices) -> None:
        """Forget copies of what the model does not have any more."""
        self._copies = {
            of: copy
            for of, copy in self._copies.items()
            if of in matrices and matrices[of].shape == copy.shape
        }

    def since_last(
        self, learning: Matrices, *, far: bool
    ) -> Iterator[tuple[MonitoredMatrix, Tensor]]:
        """Yield by how much every matrix has moved since this was called last with it.

        All processes go through it, or none.

        Args:
            learning: Matrices that are trained.
            far: Whether copies of what is on a GPU lie in the CPU's memory.
        """
        for of, now in learning.items():
            before = self._copies.get(of)
            self._copies[of] = now.cpu() if now.is_cuda and far else now.clone()
            if before is not None:
                yield of, whole(now - before.to(now.device))

    def mark(self, matrices: Matrices, learning: Matrices) -> None:
        """Keep what the weights are now, of large ones a sample, for `of_one_step`."""
        self._marks = {of: _sample(now).clone() for of, now in learning.items()}
        self._versions = {of: it._version for of, it in matrices.items() if of not in learning}

    def of_one_step(self, name: str, matrices: Matrices) -> list[Row]:
        """Return by how much of its size each weight moved since `mark`, one step ago.

        All processes call this, or none: norms of sharded weights are made together.

        Args:
            name: What the share is recorded as; "frozen" says that it is 0.
            matrices: Those that are followed, trained or not.
        """
        samples = {of: _sample(now) for of, now in matrices.items() if of in self._marks}
        marks = {
            of: self._marks[of].to(now.device)
            for of, now in samples.items()
            if self._marks[of].shape == now.shape
        }
        changes = _norms([samples[of] - mark for of, mark in marks.items()])
        each = zip(marks, changes, _norms(list(marks.values())), strict=True)
        shares = {of: change / size for of, change, size in each if size > 0}
        # What is not trained, and was not written to, has not moved.
        shares |= {
            of: 0.0 for of, now in matrices.items() if self._versions.get(of) == now._version
        }
        self._marks, self._versions = {}, {}
        return [
            Row(kind, value, of.module, of.layer)
            for of, share in shares.items()
            for kind, value in ((name, share), ("frozen", float(share == 0.0)))
        ]

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield copies and marks by name, gathered; all processes go through them, or none."""
        for kind, kept in (("copy", self._copies), ("mark", self._marks)):
            for of, tensor in kept.items():
                yield f"{kind}.{of.module}.{of.name}", whole(tensor)

    def load(self, state: Mapping[str, Tensor], matrices: Matrices, learning: Matrices) -> None:
        """Take copies that `state` gave; all processes call this with the same ones."""
        self.mark(matrices, {})
        for of in learning:
            del self._versions[of]
            now = matrices[of]
            copy, mark = (state.get(f"{kind}.{of.module}.{of.name}") for kind in ("copy", "mark"))
            if copy is not None and copy.shape == now.shape:
                self._copies[of] = sharded_like(copy.to(now.dtype), now)
            if mark is not None and mark.shape == _sample(now).shape:
                self._marks[of] = sharded_like(mark.to(now.dtype), now)


def _sample(matrix: Tensor) -> Tensor:
    """Return numbers spread evenly over a matrix: all of a small or sharded one."""
    if is_dtensor(matrix) or matrix.numel() <= _SAMPLED or not matrix.is_contiguous():
        return matrix
    return matrix.view(-1)[:: -(-matrix.numel() // _SAMPLED)]

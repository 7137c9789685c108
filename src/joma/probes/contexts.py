"""A neuron's top contexts: where in a text each hidden node answers most.

For every node the k largest activations are kept with the window and the position at which they
occurred, while the text goes by: what is kept is nodes × k numbers, whatever the text's length.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.probes import _checks

_EMPTY = (-math.inf, -1, -1)
"""Value, window and position of a place for which there is no context."""


@dataclass(frozen=True, eq=False)
class TopContexts:
    """The contexts at which each node is largest, largest first.

    Of equal activations the one in the earlier window, then at the earlier position, comes first.

    Attributes:
        values: the activations, (N, k); −inf where a node has seen fewer than k contexts.
        windows: the number of the window, (N, k); −1 there.
        positions: the position in it, (N, k); −1 there.
        nodes: which node each row is, (N,).
    """

    values: Tensor
    windows: Tensor
    positions: Tensor
    nodes: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> "TopContexts":
        """Return these with values, windows and positions changed in the same way."""
        values, windows, positions = map(change, (self.values, self.windows, self.positions))
        return TopContexts(values, windows, positions, self.nodes)


def top_contexts(
    activations: Tensor,
    k: int,
    *,
    nodes: Sequence[int] | Tensor | None = None,
    counted: Tensor | None = None,
) -> TopContexts:
    """Return where in a batch of windows each node is largest, at most once in each window.

    So a passage which a node answers to all along does not take all its places.

    Args:
        activations: (B, T, H), of H nodes on B windows; compared in float32.
        k: how many contexts of each node.
        nodes: which nodes; all where None.
        counted: (B, T) or (T,), bool: which positions count; all where None.
    """
    accumulator = TopContextsAccumulator(k, nodes=nodes)
    accumulator.update(activations, counted=counted)
    return accumulator.compute()


class TopContextsAccumulator:
    """`top_contexts` over batches of windows, which are numbered as they come.

    The result does not depend on how the windows are cut into batches.

    Args:
        k: as of `top_contexts`.
        nodes: as of `top_contexts`.
    """

    def __init__(self, k: int, *, nodes: Sequence[int] | Tensor | None = None) -> None:
        self._k = whole_number("k", k, 1)
        self._nodes = None if nodes is None else _node_numbers(nodes)
        self._best: TopContexts | None = None
        self._hidden = 0
        self._windows = 0

    def update(self, activations: Tensor, *, counted: Tensor | None = None) -> None:
        """Add whole windows; arguments as of `top_contexts`, H as in earlier updates."""
        activations = _checked(activations)
        windows, _, hidden = activations.shape
        counted = _counted(counted, activations)
        best = self._best
        if best is not None and (hidden != self._hidden or activations.device != best.nodes.device):
            raise JomaError(
                f"activations must have {self._hidden} nodes on {best.nodes.device} as before, got "
                f"{hidden} on {activations.device}"
            )
        nodes = self._chosen(hidden, activations.device)
        values = activations if len(nodes) == hidden else activations[..., nodes]
        values = values if counted.all() else values.masked_fill(~counted.unsqueeze(-1), -math.inf)
        largest, positions = (of.mT for of in values.max(1))  # of equals the first
        numbers = torch.arange(self._windows, self._windows + windows, device=nodes.device)
        there = counted.any(-1)
        columns = [
            largest,
            numbers.where(there, -1).expand(positions.shape),
            positions.where(there, -1),
        ]
        columns = [
            pad(it, (0, self._k), value=nothing)
            for it, nothing in zip(columns, _EMPTY, strict=True)
        ]
        if best is not None:  # its windows are earlier, so that of equals they stay first
            before = (best.values, best.windows, best.positions)
            columns = [torch.cat(both, -1) for both in zip(before, columns, strict=True)]
        order = columns[0].sort(dim=-1, descending=True, stable=True).indices[:, : self._k]
        values, numbers, positions = (column.gather(-1, order) for column in columns)
        self._best = TopContexts(values, numbers, positions, nodes)
        self._hidden = hidden
        self._windows += windows

    def compute(self) -> TopContexts:
        """Return the top contexts of all windows so far."""
        if self._best is None:
            raise JomaError("compute needs windows: call update first")
        return self._best

    def _chosen(self, hidden: int, device: torch.device) -> Tensor:
        if self._nodes is None:
            return torch.arange(hidden, device=device)
        if int(self._nodes.max()) >= hidden:
            raise JomaError(f"nodes must lie from 0 to {hidden - 1}, got {int(self._nodes.max())}")
        return self._nodes.to(device)


def _node_numbers(nodes: Sequence[int] | Tensor) -> Tensor:
    numbers = nodes if isinstance(nodes, Tensor) else torch.tensor(list(nodes))
    if numbers.numel() == 0 or numbers.ndim != 1:
        raise JomaError(f"nodes must be a list of at least one node, got {nodes!r}")
    numbers = _checks.integers("nodes", numbers, 1)
    if int(numbers.min()) < 0:
        raise JomaError(f"nodes must be from 0 on, got {int(numbers.min())}")
    return numbers


def _checked(activations: Tensor) -> Tensor:
    activations = _checks.tensor("activations", activations, 3)
    if activations.ndim != 3 or 0 in activations.shape:
        raise JomaError(
            "activations must be of shape (B, T, H), none of them 0, got "
            f"{tuple(activations.shape)}"
        )
    if not activations.is_floating_point():
        raise JomaError(f"activations must be floating-point numbers, got {activations.dtype}")
    activations = activations.float()
    if not (activations.sum().isfinite() or activations.isfinite().all()):  # the sum is quicker
        raise JomaError("activations must be finite, got NaN or infinity")
    return activations


def _counted(counted: Tensor | None, activations: Tensor) -> Tensor:
    shape = activations.shape[:2]
    if counted is None:
        return torch.ones(shape, dtype=torch.bool, device=activations.device)
    counted = _checks.tensor("counted", counted, 1).to(activations.device)
    if counted.dtype != torch.bool or counted.shape not in (shape, shape[1:]):
        raise JomaError(
            f"counted must be bool of shape {tuple(shape)} or {tuple(shape[1:])}, got "
            f"{counted.dtype} of shape {tuple(counted.shape)}"
        )
    return counted.expand(shape)

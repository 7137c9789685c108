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

_AT_ONCE = {"cpu": 2**20, "cuda": 2**25}
"""Activations ordered at once: on a CPU they stay in its cache, a GPU wants many."""

_NOTHING = -(2**63)
"""The key of a position that does not count."""


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
    one_per_window: bool = False,
) -> TopContexts:
    """Where in a batch of windows each node is largest.

    Args:
        activations: (B, T, H), of H nodes on B windows; compared in float32.
        k: how many contexts of each node.
        nodes: which nodes; all where None.
        counted: (B, T) or (T,), bool: which positions count; all where None.
        one_per_window: keep the largest context of each window alone, so that a passage which a
            node answers to all along does not take all its places.
    """
    accumulator = TopContextsAccumulator(k, nodes=nodes, one_per_window=one_per_window)
    accumulator.update(activations, counted=counted)
    return accumulator.compute()


class TopContextsAccumulator:
    """`top_contexts` over batches of windows, which are numbered as they come.

    The result does not depend on how the windows are cut into batches.

    Args:
        k: as of `top_contexts`.
        nodes: as of `top_contexts`.
        one_per_window: as of `top_contexts`.
    """

    def __init__(
        self,
        k: int,
        *,
        nodes: Sequence[int] | Tensor | None = None,
        one_per_window: bool = False,
    ) -> None:
        self._k = whole_number("k", k, 1)
        self._nodes = None if nodes is None else _node_numbers(nodes)
        self._one_per_window = one_per_window
        self._best: TopContexts | None = None
        self._hidden = 0
        self._windows = 0

    def update(
        self, activations: Tensor, *, counted: Tensor | None = None, first: int | None = None
    ) -> None:
        """Adds windows, each of them whole.

        Args:
            activations: as of `top_contexts`, with H as in earlier updates.
            counted: as of `top_contexts`.
            first: number of the first of these windows; the next one where None.
        """
        activations = _checked(activations)
        windows, length, hidden = activations.shape
        counted = _counted(counted, activations)
        first = self._windows if first is None else whole_number("first", first, 0)
        best = self._best
        if best is not None and (hidden != self._hidden or activations.device != best.nodes.device):
            raise JomaError(
                f"activations must have {self._hidden} nodes on {best.nodes.device} as before, got "
                f"{hidden} on {activations.device}"
            )
        nodes = self._chosen(hidden, activations.device)
        at_once = _AT_ONCE.get(activations.device.type, 2**25) // max(1, windows * length)
        parts = []
        for some in nodes.split(max(1, at_once)):
            values = activations if len(some) == hidden else activations[..., some]
            find = _best_of_windows if self._one_per_window else _best_of_all
            parts.append(find(values, counted, self._k))
        values, places, positions = (torch.cat(columns) for columns in zip(*parts, strict=True))
        places = torch.where(places < 0, places, places + first)
        missing = (0, max(0, self._k - values.shape[-1]))  # empty places at the end
        places, positions = (pad(x, missing, value=-1) for x in (places, positions))
        new = TopContexts(pad(values, missing, value=-math.inf), places, positions, nodes)
        self._best = new if best is None else _best_of(best, new, self._k)
        self._hidden = hidden
        self._windows = max(self._windows, first + windows)

    def compute(self) -> TopContexts:
        """The top contexts of all windows so far."""
        if self._best is None:
            raise JomaError("compute needs windows: call update first")
        return self._best

    def _chosen(self, hidden: int, device: torch.device) -> Tensor:
        if self._nodes is None:
            return torch.arange(hidden, device=device)
        if int(self._nodes.max()) >= hidden:
            raise JomaError(f"nodes must lie from 0 to {hidden - 1}, got {int(self._nodes.max())}")
        return self._nodes.to(device)


def _best_of_all(values: Tensor, counted: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, windows and positions of the best contexts of (B, T, N), (N, k) each."""
    keys = _keys(values.permute(2, 0, 1).flatten(1), counted.flatten())
    best, places = _decoded(keys.topk(min(k, keys.shape[1])).values)
    length = counted.shape[1]
    return (
        best,
        places.div(length, rounding_mode="floor"),
        places.where(places < 0, places % length),
    )


def _best_of_windows(values: Tensor, counted: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same with one context of each window alone: the largest, of equals the first."""
    values = values if counted.all() else values.masked_fill(~counted.unsqueeze(-1), -math.inf)
    largest, positions = (of.mT for of in values.max(1))
    keys = _keys(largest, counted.any(-1))
    best, windows = _decoded(keys.topk(min(k, keys.shape[1])).values)
    positions = positions.gather(1, windows.clamp(min=0))
    return best, windows, positions.where(windows >= 0, -1)


def _keys(values: Tensor, counted: Tensor) -> Tensor:
    """Whole numbers that order values (N, n): by size, and among equals the first first.

    The upper half is the float's bits, which order as numbers do once those of negative ones are
    turned round; the lower half counts down with the place. So no two keys are equal, and what
    `topk` gives does not depend on how it breaks ties.
    """
    bits = (values + 0.0).contiguous().view(torch.int32).long()  # + 0: −0 is 0
    ordered = torch.where(bits < 0, -(2**31) - 1 - bits, bits)
    places = torch.arange(counted.numel(), device=values.device)
    return torch.where(counted, (ordered << 32) + (2**32 - 1 - places), _NOTHING)


def _decoded(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Values and places of keys; −inf and −1 where there is nothing."""
    ordered, places = keys >> 32, 2**32 - 1 - (keys & (2**32 - 1))
    bits = torch.where(ordered < 0, -(2**31) - 1 - ordered, ordered).to(torch.int32)
    there = keys != _NOTHING
    return bits.view(torch.float32).where(there, -math.inf), places.where(there, -1)


def _best_of(one: TopContexts, two: TopContexts, k: int) -> TopContexts:
    """The k best of both."""
    values = torch.cat([one.values, two.values], -1)
    windows = torch.cat([one.windows, two.windows], -1)
    positions = torch.cat([one.positions, two.positions], -1)
    order = torch.arange(values.shape[-1], device=values.device).expand(values.shape)
    for column, descending in ((positions, False), (windows, False), (values, True)):
        by = column.gather(-1, order).sort(dim=-1, descending=descending, stable=True).indices
        order = order.gather(-1, by)
    both = TopContexts(values, windows, positions, one.nodes)
    return both.each(lambda column: column.gather(-1, order)[:, :k])


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
    if activations.shape[0] * activations.shape[1] >= 2**32:
        raise JomaError("activations must have fewer than 2**32 positions in one update")
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

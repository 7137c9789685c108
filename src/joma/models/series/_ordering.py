"""Find checkpoints that stand at the wrong step, by the distances of their weights.

Training is a walk: the way through the checkpoints in their right order is short. Weights at a
wrong step make a detour, and taking them to where they belong makes the way shorter.

The *excess* of some checkpoints is how much longer the way is with them than without. They are out
of place where another place cuts their excess to less than `INSIDE` of what it is. At the ends of
the series only one neighbour bears witness, and it must be less than `AT_AN_END`, or than
`EXCHANGED_AT_AN_END` for two checkpoints in each other's place.

Why these numbers: in honest trainings (Adam and SGD; constant, cosine, cyclic and abruptly ending
learning rates; fine-tuning; weight decay strong enough to forget everything between two
checkpoints) another place never gave less than 1.01 of the excess inside and 0.92 at the ends.
Weights that do nothing but jitter around one point, with the last checkpoint in that very point, as
an average has it, would give 2 − √2 = 0.59 at the end, and 0.83 for exchanges there. Checkpoints
exchanged on purpose gave 0.01 to 0.5 wherever training had moved at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

INSIDE = 0.8
AT_AN_END = 0.55
EXCHANGED_AT_AN_END = 0.7

_NEARLY = 0.8
"""An exchange inside that gains this part of what one at the ends does is believed instead."""

_LEAST_GAIN = 1e-3
"""A shorter way must be so by this part of the detour's own length: less is rounding."""


@dataclass(frozen=True)
class Misplaced:
    """Checkpoints out of place, by their numbers in the series.

    Attributes:
        order: the numbers of all checkpoints with these where they belong.
        moved: those that fit better elsewhere, in their order.
        gain: how much shorter the way is in that order.
        share: what is left of their excess there.
        exchanged: `moved` are two that stand in each other's place.
        at_an_end: whether an end of the series is concerned.
    """

    order: tuple[int, ...]
    moved: tuple[int, ...]
    gain: float
    share: float
    exchanged: bool
    at_an_end: bool

    @property
    def after(self) -> int | None:
        """The one they fit behind, None at the beginning."""
        first = min(self.order.index(number) for number in self.moved)
        return self.order[first - 1] if first else None

    @property
    def before(self) -> int | None:
        """The one they fit in front of, None at the end."""
        last = max(self.order.index(number) for number in self.moved)
        return self.order[last + 1] if last + 1 < len(self.order) else None


def misplaced(distances_NN: NDArray[np.float64]) -> list[Misplaced]:
    """Return what is out of place, the longest detour first.

    Args:
        distances_NN: distances between the weights of all checkpoints, in the order of the series.
    """
    count = len(distances_NN)
    order, found = tuple(range(count)), []
    seen = {order}
    while (change := _best(distances_NN, order)) is not None and change.order not in seen:
        found.append(change)
        order = change.order
        seen.add(order)
    return found


def _best(distances_NN: NDArray[np.float64], order: tuple[int, ...]) -> Misplaced | None:
    """Return the change that shortens the way most; of equal ones, that of fewest checkpoints."""
    n = len(order)
    if n < 3:
        return None
    # One more place, as far from all others as from itself: the way begins and ends there, so that
    # the ends need no rules of their own.
    way = np.zeros((n + 1, n + 1))
    way[:n, :n] = distances_NN[np.ix_(order, order)]
    changes = [change for size in range(1, n // 2 + 1) for change in _moving(way, order, size)]
    changes += _exchanging(way, order)
    if not changes:
        return None
    # To 1e-9: the same new order is reached by several changes, whose sums round differently.
    longest = way.max()
    best = max(changes, key=lambda it: (round(it.gain / longest, 9), -len(it.moved)))
    if best.exchanged and best.at_an_end:
        # With its ends exchanged, a short series is another one turned round in which two inside
        # are: the ends get the benefit of the doubt.
        inside = [it for it in changes if it.exchanged and not it.at_an_end]
        inside = [it for it in inside if it.gain > _NEARLY * best.gain]
        best = max(inside, key=lambda it: it.gain, default=best)
    return best


def _moving(way: NDArray[np.float64], order: tuple[int, ...], size: int) -> list[Misplaced]:
    """Return the best new places, inside and at the ends, for `size` checkpoints in a row."""
    n = len(order)
    first = np.arange(n - size + 1)
    last, left, right = first + size - 1, first - 1, first + size
    own = way[left, first] + way[last, right] - way[left, right]
    at = np.arange(-1, n)  # between which and the next they are put
    gap = way[at, at + 1]
    there = way[first[:, None], at] + way[last[:, None], at + 1] - gap
    there[(at >= left[:, None]) & (at <= last[:, None])] = np.inf
    ends = (left < 0) | (right == n)
    at_an_end = ends[:, None] | (at < 0) | (at + 1 == n)
    changes = []
    for (i, k), gain, share in _picked(own[:, None], there, at_an_end, AT_AN_END):
        begin = k if k < i else k - size  # of the block in the new order: it was put after k − 1
        moved, rest = order[i : i + size], order[:i] + order[i + size :]
        new = rest[:begin] + moved + rest[begin:]
        passed = rest[i:begin] if begin > i else rest[begin:i]
        if len(passed) < len(moved):
            moved = passed
        both = len(passed) == len(moved)
        changes.append(
            Misplaced(
                new,
                tuple(sorted((*moved, *passed) if both else moved)),
                gain,
                share,
                both and size == 1,
                bool(at_an_end[i, k]),
            )
        )
    return changes


def _exchanging(way: NDArray[np.float64], order: tuple[int, ...]) -> list[Misplaced]:
    """Return the best exchanges, inside and at the ends, of two that are not neighbours."""
    n = len(order)
    i, j = np.triu_indices(n, 2)
    bare = way[i - 1, i + 1] + way[j - 1, j + 1]
    own = way[i - 1, i] + way[i, i + 1] + way[j - 1, j] + way[j, j + 1] - bare
    there = way[i - 1, j] + way[j, i + 1] + way[j - 1, i] + way[i, j + 1] - bare
    at_an_end = (i == 0) | (j == n - 1)
    changes = []
    for (k,), gain, share in _picked(own, there, at_an_end, EXCHANGED_AT_AN_END):
        a, b = int(i[k]), int(j[k])
        new = list(order)
        new[a], new[b] = new[b], new[a]
        moved = tuple(sorted((order[a], order[b])))
        changes.append(Misplaced(tuple(new), moved, gain, share, True, bool(at_an_end[k])))
    return changes


def _picked(
    own: NDArray[np.float64],
    there: NDArray[np.float64],
    at_an_end: NDArray[np.bool_],
    limit: float,
) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """Yield the changes that gain most and leave little of the excess, with gain and share.

    One inside and one at an end, where there are such.
    """
    own = np.broadcast_to(own, there.shape)
    gain = own - there
    counts = (own > 0) & (there < np.where(at_an_end, limit, INSIDE) * own)
    counts &= gain > max(0.0, _LEAST_GAIN * own.max(initial=0))
    for some in (counts & ~at_an_end, counts & at_an_end):
        if some.any():
            best = np.unravel_index(np.argmax(np.where(some, gain, -np.inf)), gain.shape)
            share = float(max(there[best], 0.0) / own[best])
            yield tuple(int(k) for k in best), float(gain[best]), share

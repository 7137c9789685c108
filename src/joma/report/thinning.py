"""Fewer points of a long series: the smallest and the largest value of every bucket stay."""

import numpy as np
from numpy.typing import NDArray


def kept_points(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Return the indices of the points to draw, at most `most` of them, in their order.

    The series is cut into buckets of equally many points. Of each the smallest and the largest
    finite value stay, and one value that is not finite where there is one; so do the first and the
    last point. A peak of a single step is therefore never lost.

    Args:
        values: The values, in the order of their steps.
        most: The most points to keep, at least 8.
    """
    count = values.size
    if count <= most:
        return np.arange(count)
    finite = np.isfinite(values)
    buckets = (most - 2) // (2 if finite.all() else 3)
    starts = np.linspace(0, count, buckets, endpoint=False).astype(np.intp)
    bucket = np.searchsorted(starts, np.arange(count), side="right") - 1
    kept = [np.array([0, count - 1]), _first(bucket, ~finite)]
    order = np.lexsort((np.where(finite, values, np.inf), bucket))
    order = order[finite[order]]
    edges = np.flatnonzero(np.diff(bucket[order], prepend=-1, append=buckets))
    kept += [order[edges[:-1]], order[edges[1:] - 1]]
    return np.unique(np.concatenate(kept))


def _first(bucket: NDArray[np.intp], chosen: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the first chosen point of each bucket that has one."""
    places = np.flatnonzero(chosen)
    return places[np.unique(bucket[places], return_index=True)[1]]

"""Eqn 6 from a table: v(t)/μ for very many pairs of μ and t, to about 1e-5.

`nonlinear.weights` is exact and takes some 20 µs a pair; a fit needs millions of pairs. The
solution depends on two numbers only, so that one table serves all. Its time axis is

    w = asinh((t - R(μ)) e^{μ²/2}),

in which the solution changes slowly everywhere: the sudden growth at t ≈ R(μ) takes a time of
order e^{-μ²/2}, it is approached logarithmically, and after it v/μ tends to 1 exponentially. A
cubic spline through exact values makes a finer table, between whose nodes lines are drawn.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from joma.theory._checks import Array
from joma.theory.nonlinear import _eqn6

LARGEST_MU = 6.0
"""The largest |μ| that the table holds."""

_TABLE_END = 6.5  # beyond the last μ asked for, where the spline is less exact
_MU_NODES, _TIME_NODES = 209, 257
_FINER = 5
_SETTLED = 30.0  # ln 1/δ from which v is μ
_MARGIN = 12  # nodes before t = 0, extrapolated, so that the spline is right at the edge


class _Table(NamedTuple):
    """Over fine nodes of μ: R as spline coefficients, and v/μ over fine positions in time."""

    offset: Array
    share: Array


def share_reached(mu: Array, t: Array) -> Array:
    """v(t)/μ along Eqn 6 for |μ| ≤ `LARGEST_MU` and t ≥ 0, which broadcast together."""
    table = _table()
    mu = np.abs(mu)
    row = mu * ((table.share.shape[0] - 1) / _TABLE_END)
    offset = ndimage.map_coordinates(
        table.offset, row[None], order=3, mode="mirror", prefilter=False
    )
    pace = np.exp(mu**2 / 2)
    first, last = -np.arcsinh(offset * pace), np.arcsinh(_SETTLED)
    position = np.arcsinh((t - offset) * pace) - first
    position *= (table.share.shape[1] - 1) / (last - first)
    return _between(table.share, row, np.minimum(position, table.share.shape[1] - 1))


def _between(table: Array, row: Array, column: Array) -> Array:
    """Bilinear interpolation; several times faster than SciPy's."""
    width = table.shape[1]
    i = np.minimum(row.astype(np.int64), table.shape[0] - 2)
    j = np.clip(column.astype(np.int64), 0, width - 2)
    down, right = row - i, column - j
    corner, flat = i * width + j, table.ravel()
    upper, lower = flat[corner], flat[corner + width]
    upper += right * (flat[corner + 1] - upper)
    lower += right * (flat[corner + width + 1] - lower)
    return upper + down * (lower - upper)


@cache
def _table() -> _Table:
    mu = np.linspace(0, _TABLE_END, _MU_NODES)
    t = _times(mu, _TIME_NODES)
    every_mu = np.broadcast_to(mu[:, None], t.shape)
    share = -np.expm1(-_eqn6.solve(every_mu.ravel(), t.ravel()).reshape(t.shape))
    for _ in range(_MARGIN):  # the fifth difference is zero
        before = share[:, :5] @ np.array([5.0, -10.0, 10.0, -5.0, 1.0])
        share = np.concatenate([before[:, None], share], axis=1)
    rows = np.arange(_FINER * (_MU_NODES - 1) + 1) / _FINER
    columns = _MARGIN + np.arange(_FINER * (_TIME_NODES - 1) + 1) / _FINER
    where = np.meshgrid(rows, columns, indexing="ij")
    fine = ndimage.map_coordinates(share, where, order=3, mode="mirror")
    fine_mu = rows * (_TABLE_END / (_MU_NODES - 1))
    offset = _eqn6.smooth_part(np.ones_like(fine_mu), fine_mu)
    # A small error of R is large in units of e^{-μ²/2}: here, a line is not enough.
    return _Table(ndimage.spline_filter1d(offset, mode="mirror"), np.clip(fine, 0.0, 1.0))


def _times(mu: Array, nodes: int) -> Array:
    """The times (U, nodes) of evenly spaced w, from 0 to where v is μ."""
    offset = _eqn6.smooth_part(np.ones_like(mu), mu)
    pace = np.exp(mu**2 / 2)
    first, last = -np.arcsinh(offset * pace), np.arcsinh(_SETTLED)
    w = first[:, None] + (last - first)[:, None] * np.linspace(0, 1, nodes)
    t = np.maximum(offset[:, None] + np.sinh(w) / pace[:, None], 0.0)
    t[:, 0] = 0.0
    return t

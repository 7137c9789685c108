"""Statistics of an MLP's hidden activations: how sparse, how heavy-tailed, how many nodes are dead.

They are measured where they go into the second matrix of the MLP. Where a few nodes of each token
carry nearly all of the energy Σ a², the others could be left out for that token: the question that
Deja Vu asks before it skips them.
"""

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.probes import _checks

NEAR = 0.01
TOP = (0.01, 0.1)

_AT_ONCE = {"cpu": 2**17, "cuda": 2**24}
"""Activations measured together: on a CPU they stay in its cache, a GPU wants many."""


@dataclass(frozen=True, eq=False)
class ActivationStatistics:
    """Statistics of a layer's hidden activations, over tokens and nodes.

    An entry is near zero where |a| ≤ near · rms, with rms the root of the mean square of the
    token's own activations; otherwise the node is active at that token.

    Attributes:
        tokens: how many tokens were counted.
        zero: share of entries that are exactly 0.
        near_zero: share of entries near zero, those exactly 0 among them.
        negative: share of entries below 0.
        mean: over all entries.
        std: over all entries, with n.
        kurtosis: m₄ / m₂², 3 for normal numbers; NaN where all entries are equal.
        top_energy: mean over tokens of the share of Σ a² that the largest nodes of the token hold,
            by their share of all nodes, rounded up; NaN where every token is zero.
        silent: tokens whose activations are all zero; they have no energy to share out.
        activity: share of tokens at which each node is active, (H,).
    """

    tokens: int
    zero: float
    near_zero: float
    negative: float
    mean: float
    std: float
    kurtosis: float
    top_energy: Mapping[float, float]
    silent: int
    activity: Tensor

    @property
    def dead(self) -> int:
        """How many nodes were active at no token."""
        return int((self.activity == 0).sum())


def activation_statistics(
    activations: Tensor,
    *,
    counted: Tensor | None = None,
    near: float = NEAR,
    top: Sequence[float] = TOP,
) -> ActivationStatistics:
    """Sparsity, moments and concentration of hidden activations.

    Args:
        activations: (..., H), what goes into the second matrix of an MLP.
        counted: (...), bool: which tokens count; all where None.
        near: how small, against the token's root mean square, is near zero.
        top: shares of the nodes whose part of the energy is given.

    Raises:
        ValueError: also where no token counts.
    """
    accumulator = ActivationStatisticsAccumulator(near=near, top=top)
    accumulator.update(activations, counted=counted)
    return accumulator.compute()


class ActivationStatisticsAccumulator:
    """`activation_statistics` over batches: equal to one call on all of them, to rounding.

    Args:
        near: as of `activation_statistics`.
        top: as of `activation_statistics`.
    """

    def __init__(self, *, near: float = NEAR, top: Sequence[float] = TOP) -> None:
        self._near = float(near)
        if not 0 <= self._near < math.inf:
            raise JomaError(f"near must be a number from 0 on, got {near!r}")
        self._top = tuple(float(share) for share in top)
        for share in self._top:
            if not 0 < share <= 1:
                raise JomaError(f"top must be shares above 0 up to 1, got {share:g}")
        self._sums: _ActivationSums | None = None

    def update(self, activations: Tensor, *, counted: Tensor | None = None) -> None:
        """Adds tokens; arguments as of `activation_statistics`, H as in earlier updates."""
        rows = _rows(activations, counted)
        at_once = _AT_ONCE.get(rows.device.type, 2**24) // rows.shape[-1]
        parts = rows.split(max(1, at_once))
        new = functools.reduce(_added, (_measure(part, self._near, self._top) for part in parts))
        have = self._sums
        if have is None:
            self._sums = new
            return
        if have.active.shape != new.active.shape or have.active.device != new.active.device:
            raise JomaError(
                f"activations must have {len(have.active)} nodes on {have.active.device} as "
                f"before, got {len(new.active)} on {new.active.device}"
            )
        self._sums = _added(have, new)

    def compute(self) -> ActivationStatistics:
        """The statistics of all tokens so far."""
        if self._sums is None or self._sums.tokens == 0:
            raise JomaError("compute needs tokens that count: call update first")
        sums = self._sums
        moments, loud = sums.moments, sums.tokens - sums.silent
        second, fourth = moments.squares / moments.count, moments.fourths / moments.count
        return ActivationStatistics(
            tokens=sums.tokens,
            zero=sums.zero / moments.count,
            near_zero=1 - float(sums.active.sum()) / moments.count,
            negative=sums.negative / moments.count,
            mean=moments.mean,
            std=math.sqrt(second),
            kurtosis=fourth / second**2 if second > 0 else math.nan,
            top_energy={
                share: energy / loud if loud else math.nan
                for share, energy in zip(self._top, sums.energies.tolist(), strict=True)
            },
            silent=sums.silent,
            activity=sums.active.double() / sums.tokens,
        )


@dataclass(frozen=True)
class _PowerSums:
    """Count, mean, and Σ (a − mean)ⁿ for n = 2, 3, 4."""

    count: int
    mean: float
    squares: float
    cubes: float
    fourths: float

    def __add__(self, other: "_PowerSums") -> "_PowerSums":
        """Those of both together (Pébay 2008): central, so that a large mean costs no digits."""
        if not self.count or not other.count:
            return self if self.count else other
        n, m = self.count, other.count
        count, step = n + m, other.mean - self.mean
        cubes = (
            self.cubes
            + other.cubes
            + step**3 * n * m * (n - m) / count**2
            + 3 * step * (n * other.squares - m * self.squares) / count
        )
        fourths = (
            self.fourths
            + other.fourths
            + step**4 * n * m * (n * n - n * m + m * m) / count**3
            + 6 * step**2 * (n * n * other.squares + m * m * self.squares) / count**2
            + 4 * step * (n * other.cubes - m * self.cubes) / count
        )
        squares = self.squares + other.squares + step**2 * n * m / count
        return _PowerSums(count, self.mean + step * m / count, squares, cubes, fourths)


class _ActivationSums(NamedTuple):
    """Counts of entries and tokens, energies added up over tokens, and how often nodes are active.

    `energies` has one sum for each share of the nodes, `active` (H,) one count for each node.
    """

    tokens: int
    zero: int
    negative: int
    silent: int
    energies: Tensor
    active: Tensor
    moments: _PowerSums


def _added(one: tuple[Any, ...], other: tuple[Any, ...]) -> _ActivationSums:
    """Those of both together."""
    return _ActivationSums(*map(operator.add, one, other))


def _measure(rows: Tensor, near: float, top: tuple[float, ...]) -> _ActivationSums:
    tokens, nodes = rows.shape
    if rows.dtype != torch.float64:
        rows = rows.float()
    sizes = rows.abs()
    largest = sizes.amax(-1, keepdim=True)
    if not largest.isfinite().all():
        raise JomaError("activations must be finite, got NaN or infinity")
    silent = largest == 0
    # By the largest first: squares of very large or small activations leave float32's range.
    shares = (sizes / largest.where(~silent, 1)).square_()
    energy = shares.sum(-1, keepdim=True)
    active = shares > near**2 * energy / nodes
    return _ActivationSums(
        tokens,
        rows.numel() - int(rows.count_nonzero()),
        int((rows < 0).count_nonzero()),
        int(silent.count_nonzero()),
        _energies(shares, energy.where(~silent, 1), top),
        active.sum(0, dtype=torch.int32).long(),
        _moments(rows),
    )


def _energies(shares: Tensor, energy: Tensor, top: tuple[float, ...]) -> Tensor:
    """Added up over tokens, the share of the energy in the largest nodes; in the order of `top`."""
    found: dict[float, float] = {}
    nodes = shares.shape[-1]
    for share in sorted(top, reverse=True):
        # The fewer are among the more, so each is searched in what was found before.
        shares = shares.topk(math.ceil(share * nodes), dim=-1, sorted=False).values
        found[share] = float((shares.sum(-1, keepdim=True) / energy).sum(dtype=torch.float64))
    return torch.tensor([found[share] for share in top], dtype=torch.float64)


def _moments(rows: Tensor) -> _PowerSums:
    if rows.numel() == 0:
        return _PowerSums(0, 0.0, 0.0, 0.0, 0.0)
    wide = rows.double()
    mean = wide.mean()
    wide = wide - mean
    squares = wide.square()
    sums = (squares.sum(), (squares * wide).sum(), squares.square().sum())
    return _PowerSums(rows.numel(), float(mean), *map(float, sums))


def _rows(activations: Tensor, counted: Tensor | None) -> Tensor:
    """The activations of tokens that count, (n, H)."""
    activations = _checks.tensor("activations", activations, 1)
    if not activations.is_floating_point():
        raise JomaError(f"activations must be floating-point numbers, got {activations.dtype}")
    if activations.shape[-1] == 0:
        raise JomaError(f"activations must have nodes, got shape {tuple(activations.shape)}")
    rows = activations.reshape(-1, activations.shape[-1])
    if counted is not None:
        counted = _checks.tensor("counted", counted, 0)
        if counted.dtype != torch.bool or counted.shape != activations.shape[:-1]:
            raise JomaError(
                f"counted must be bool of shape {tuple(activations.shape[:-1])}, one for each "
                f"token, got {counted.dtype} of shape {tuple(counted.shape)}"
            )
        rows = rows[counted.reshape(-1).to(rows.device)]
    return rows

"""Controls of NCorr: what the largest correlation is worth, and how much of it is chance.

A cell of JoMA's Table 1 has only C distinct inputs, one per class, and among thousands of random
nodes some always correlates with a binary pattern over so few points. Every half of the samples
contains every input, so a control over samples says nothing there: controls are made over classes,
given as `groups`.

Random splits and permutations are drawn on the CPU from `seed` alone and are the same for every
member and device: a member's result does not depend on its neighbours. Groups none of whose rows
count are left out, so C weighted rows give what the samples they stand for give.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.probes import _checks
from joma.probes.correlation import (
    CorrelationRows,
    Moments,
    against,
    centre,
    inverse_root,
    moments,
    rows,
)

_AT_ONCE = {"cuda": 1 << 25}
"""Numbers in the largest tensor of the repeats that are computed together, for a GPU to be busy.

It takes 256 MiB, and a handful of its size is held at a time.
"""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Correlations of nodes on rows that did not choose them.

    Attributes:
        splits: for each random split the mean over the latents that count and both directions,
            (..., repeats); NaN where none counts.
        counted: how many latents vary in both halves of each split, (..., repeats).
    """

    splits: Tensor
    counted: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean over the splits in which a latent counts, (...); NaN where there is none."""
        return self.splits.nanmean(-1)


@dataclass(frozen=True, eq=False)
class Shuffled:
    """NCorr of latents that belong to other rows.

    Attributes:
        permutations: for each random permutation the mean over all latents, (..., repeats).
    """

    permutations: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean over permutations, (...)."""
        return self.permutations.mean(-1)


def held_out(
    latents: Tensor,
    activations: Tensor,
    *,
    groups: Tensor | None = None,
    weights: Tensor | None = None,
    repeats: int = 16,
    seed: int = 0,
) -> HeldOut:
    """Chooses each latent's node on a random half of the groups and measures it on the other.

    Signed, as in `ncorr`, and in both directions. Halves are ⌊G/2⌋ groups and the rest; only
    latents that vary in both halves count.

    Args:
        latents: (..., S, N).
        activations: (..., S, H).
        groups: (S,) or (..., S), integers: the class of each row. None makes every row a group.
        weights: (..., S), ≥ 0, how much each row counts; equally where None.
        repeats: how many random splits.
        seed: of the splits.
    """
    given = rows(latents, activations, weights)
    grouping = _Grouping.of(given.weights, groups)
    if (grouping.sizes < 2).any():
        raise JomaError("groups must hold at least 2 groups that count, got only 1")
    means, counts = [], []
    for orders in _several(grouping.orders(repeats, seed), given):
        labels = grouping.labels.expand_as(orders)
        first = (orders.argsort(-1) < grouping.sizes.unsqueeze(-1) // 2).gather(-1, labels)
        first = first.to(given.weights.device)
        latents, activations = (_repeated(part, len(orders)) for part in given[:2])
        halves = [
            moments(CorrelationRows(latents, activations, given.weights * half))
            for half in (first, ~first)
        ]
        chosen = _correlations_of_the_others_nodes(*halves)
        varying = (halves[0].latents > 0) & (halves[1].latents > 0)
        counted = varying.sum(-1)
        means.append(torch.where(varying, chosen, 0.0).sum(-1) / counted)
        counts.append(counted)
    return HeldOut(torch.cat(means).movedim(0, -1), torch.cat(counts).movedim(0, -1))


def shuffled(
    latents: Tensor,
    activations: Tensor,
    *,
    groups: Tensor | None = None,
    weights: Tensor | None = None,
    repeats: int = 16,
    seed: int = 0,
) -> Shuffled:
    """`ncorr` after the latent vectors were permuted over the groups.

    Whole vectors move, so latents keep their correlations among each other. Activations and weights
    stay with their rows.

    Args:
        latents: (..., S, N), equal in all rows of one group.
        activations: (..., S, H).
        groups: (S,) or (..., S), integers: the class of each row. None makes every row a group.
        weights: (..., S), ≥ 0, how much each row counts; equally where None.
        repeats: how many random permutations.
        seed: of the permutations.
    """
    given = rows(latents, activations, weights)
    grouping = _Grouping.of(given.weights, groups)
    members = grouping.members.gather(-1, grouping.labels).to(given.latents.device)
    alike = (_take(given.latents, members) == given.latents).all(-1) | (given.weights == 0)
    if not alike.all():
        raise JomaError(
            "latents must be equal in all rows of a group to be permuted over groups, got "
            f"{int((~alike).sum())} rows that differ from the first row of their group"
        )
    columns, squares = centre(given.activations, given.weights)
    means = []
    for orders in _several(grouping.orders(repeats, seed), given):
        labels, members = (part.expand_as(orders) for part in (grouping.labels, grouping.members))
        source = members.gather(-1, orders.gather(-1, labels)).to(given.latents.device)
        moved, weights = (_repeated(part, len(orders)) for part in (given.latents, given.weights))
        best = against(_take(moved, source), weights, columns, squares).correlations().amax(-1)
        means.append(best.mean(-1))
    return Shuffled(torch.cat(means).movedim(0, -1))


def planted(
    latents: Tensor,
    activations: Tensor,
    correlation: float,
    *,
    weights: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Return the activations with one more node for each latent, of a known correlation with it.

    To measure the power of a control: `held_out` of what this returns says how much of a
    correlation that is there the control still reads among these very nodes. A planted node is
    ρ·y + √(1 − ρ²)·e with y the latent and e Gaussian noise, both centred and of unit length, e
    orthogonal to y: over all rows the correlation is ρ to rounding. The node of a constant latent
    is constant.

    Args:
        latents: Values of the latents, (..., S, N).
        activations: Values of the nodes, (..., S, H).
        correlation: ρ, from 0 to 1.
        weights: How much each row counts, (..., S), ≥ 0; equally where None.
        seed: Seed of the noise.

    Returns:
        (..., S, H + N) in float64: the given nodes and one for each latent, in their order.
    """
    given = rows(latents, activations, weights)
    if not 0 <= correlation <= 1:
        raise JomaError(f"correlation must lie in [0, 1], got {correlation!r}")
    generator = torch.Generator().manual_seed(whole_number("seed", seed, 0))
    noise = torch.randn(given.latents.shape[-2:], generator=generator, dtype=torch.float64)
    noise = noise.to(given.latents.device).expand_as(given.latents)
    signal = _unit(given.latents, given.weights)
    along = (given.weights.unsqueeze(-1) * signal * noise).sum(-2, keepdim=True)
    noise = _unit(noise - along * signal, given.weights)
    varies = signal.abs().amax(-2, keepdim=True) > 0
    nodes = correlation * signal + (1 - correlation**2) ** 0.5 * noise
    return torch.cat([given.activations, torch.where(varies, nodes, 0.0)], -1)


def _unit(columns: Tensor, weights: Tensor) -> Tensor:
    """Return columns (..., S, K), centred and of unit length in the weights; constant ones as 0."""
    centred, squares = centre(columns, weights)
    return centred * inverse_root(squares).unsqueeze(-2)


@dataclass(frozen=True, eq=False)
class _Grouping:
    """The groups of the rows that count, numbered in increasing order; on the CPU.

    Attributes:
        labels: number of each row's group, (..., S); meaningless where the row does not count.
        members: one row of each group that counts, (..., S), the first `sizes` of it.
        sizes: how many groups there are, (...).
    """

    labels: Tensor
    members: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, weights: Tensor, groups: Tensor | None) -> "_Grouping":
        counts = weights.cpu() > 0
        rows = torch.arange(counts.shape[-1])
        if groups is None:
            groups = rows
        groups = _checks.integers("groups", groups, 1).cpu()
        if groups.shape[-1] != rows.numel():
            raise JomaError(
                f"groups must be {rows.numel()}, one per row, got shape {tuple(groups.shape)}"
            )
        try:
            groups = groups.expand(counts.shape)
        except RuntimeError:
            raise JomaError(
                f"groups must have shape {tuple(counts.shape[-1:])} or {tuple(counts.shape)}, got "
                f"{tuple(groups.shape)}"
            ) from None
        ids, order = groups.sort(dim=-1, stable=True)
        new = torch.nn.functional.pad(ids[..., 1:] != ids[..., :-1], (1, 0))
        numbers = torch.zeros_like(order).scatter(-1, order, new.cumsum(-1))
        present = torch.zeros_like(order).scatter_add(-1, numbers, counts.long()) > 0
        labels = (present.cumsum(-1) - 1).gather(-1, numbers).clamp(min=0)
        last = rows.numel() - 1
        members = torch.full_like(labels, last).scatter_reduce(
            -1, labels, torch.where(counts, rows, last), "amin"
        )
        return cls(labels, members, present.sum(-1))

    def orders(self, repeats: int, seed: int) -> Iterator[Tensor]:
        """Random orders of the groups, (..., S), of which the first `sizes` matter."""
        repeats = whole_number("repeats", repeats, 1)
        generator = torch.Generator().manual_seed(whole_number("seed", seed, 0))
        rows = self.labels.shape[-1]
        # A group's numbers come first by group, so that they do not depend on the number of rows.
        keys = torch.rand(rows, repeats, generator=generator, dtype=torch.float64)
        real = torch.arange(rows) < self.sizes.unsqueeze(-1)
        for key in keys.T:
            yield torch.where(real, key, torch.inf).argsort(dim=-1, stable=True)


def _several(orders: Iterator[Tensor], given: CorrelationRows) -> Iterator[Tensor]:
    """Yield as many orders together as a GPU is worth, (repeats, ..., S); on a CPU one."""
    samples, latents, nodes = *given.latents.shape[-2:], given.activations.shape[-1]
    largest = max(samples * nodes, latents * nodes, samples * latents)
    numbers = given.weights.shape[:-1].numel() * largest
    at_once = max(1, _AT_ONCE.get(given.weights.device.type, 0) // numbers)
    while several := list(islice(orders, at_once)):
        yield torch.stack(several)


def _repeated(values: Tensor, repeats: int) -> Tensor:
    return values.expand(repeats, *values.shape)


def _correlations_of_the_others_nodes(first: Moments, second: Moments) -> Tensor:
    """Mean over both directions of a latent's correlation with the node the other half chose."""
    here, there = first.correlations(), second.correlations()
    forth = there.gather(-1, here.argmax(-1, keepdim=True))
    back = here.gather(-1, there.argmax(-1, keepdim=True))
    return (forth + back).squeeze(-1) / 2


def _take(latents: Tensor, rows: Tensor) -> Tensor:
    return latents.gather(-2, rows.unsqueeze(-1).expand(*rows.shape, latents.shape[-1]))

"""Do a node's contexts fall into unrelated groups? A score from their similarities alone.

Contexts are joined by average linkage: the two groups whose members are most alike on average
become one, until all are one. Of all pairs of groups that were formed on the way and have no
context in common, the best is the one that is tight inside and unrelated across:

    score = min(inside of the one, inside of the other) − max(across, 0)

where inside is the mean similarity of different contexts of a group and across that of contexts of
the two. A group must have a few contexts, and the node must answer to both about as strongly.
Contexts that are all alike score near 0 (across is as large as inside), and so do contexts that
have nothing to do with each other (inside is small).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_EQUAL = 1e-4
"""Scores nearer than this are the same, and the larger groups are better."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """The best two groups of each node's contexts.

    Attributes:
        score: from 0 to 1, (N,); 0 where no two groups can be made.
        inside: mean similarity in the looser of the two groups, (N,); 0 there.
        across: mean similarity between the groups, (N,); 0 there.
        groups: which contexts belong to the two, (N, 2, k), bool, the group with the strongest
            context first; none there.
    """

    score: Tensor
    inside: Tensor
    across: Tensor
    groups: Tensor


def best_pairs(similarity: Tensor, strength: Tensor, least: int, balance: float) -> Pairs:
    """The two most unrelated tight groups among the contexts of each node.

    Args:
        similarity: cosines between the contexts of a node, (N, k, k).
        strength: activations of the node at its contexts, (N, k), largest first.
        least: fewest contexts of a group.
        balance: least ratio of the smaller to the larger of the groups' mean activations.
    """
    members = linkage(similarity)
    sizes = members.sum(-1)
    sums = members @ similarity @ members.mT
    both = sizes.unsqueeze(-1) * sizes.unsqueeze(-2)
    own = sums.diagonal(dim1=-2, dim2=-1) - (
        members * similarity.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    ).sum(-1)
    inside = own / (sizes * (sizes - 1)).clamp(min=1)
    across = sums / both
    means = (members * strength.unsqueeze(-2)).sum(-1) / sizes
    fits = (members @ members.mT == 0) & _balanced(means, balance)
    large = sizes >= least
    fits &= large.unsqueeze(-1) & large.unsqueeze(-2)
    looser = torch.minimum(inside.unsqueeze(-1), inside.unsqueeze(-2))
    scores = (looser - across.clamp(min=0)).masked_fill(~fits, -math.inf)
    larger = (sizes.unsqueeze(-1) + sizes.unsqueeze(-2)) / similarity.shape[-1]
    place = (scores + _EQUAL * larger).flatten(1).argmax(-1)
    best = scores.flatten(1).gather(1, place.unsqueeze(1)).squeeze(1)
    found = best > _EQUAL
    pick = torch.arange(len(best), device=best.device)
    one, other = place // scores.shape[-1], place % scores.shape[-1]
    groups = torch.stack([members[pick, one], members[pick, other]], 1).bool()
    strongest = groups.int().argmax(-1)  # contexts come strongest first
    groups = torch.where((strongest[:, 0] > strongest[:, 1])[:, None, None], groups.flip(1), groups)
    return Pairs(
        best.where(found, 0.0),
        looser.flatten(1).gather(1, place.unsqueeze(1)).squeeze(1).where(found, 0.0),
        across.flatten(1).gather(1, place.unsqueeze(1)).squeeze(1).where(found, 0.0),
        groups & found[:, None, None],
    )


def linkage(similarity: Tensor) -> Tensor:
    """Average linkage: the groups formed, as (N, k − 1, k) of 0 and 1, in the order of joining."""
    nodes, k, _ = similarity.shape
    pick = torch.arange(nodes, device=similarity.device)
    members = torch.eye(k, device=similarity.device, dtype=similarity.dtype).repeat(nodes, 1, 1)
    sums = similarity.clone()
    later = torch.ones(k, k, dtype=torch.bool, device=similarity.device).triu(1)
    gone = torch.zeros(nodes, k, dtype=torch.bool, device=similarity.device)
    formed = []
    for _ in range(k - 1):
        sizes = members.sum(-1)
        means = sums / (sizes.unsqueeze(-1) * sizes.unsqueeze(-2)).clamp(min=1)
        means = means.masked_fill(~later | gone.unsqueeze(-1) | gone.unsqueeze(-2), -math.inf)
        place = means.flatten(1).argmax(-1)
        one, other = place // k, place % k
        members[pick, one] += members[pick, other]
        members[pick, other] = 0
        sums[pick, one] += sums[pick, other]
        sums[pick, :, one] += sums[pick, :, other]
        gone[pick, other] = True
        formed.append(members[pick, one])
    return torch.stack(formed, 1)


def _balanced(means: Tensor, balance: float) -> Tensor:
    """Whether the weaker of two groups is at least `balance` times as strong, (N, k−1, k−1)."""
    one, other = means.unsqueeze(-1), means.unsqueeze(-2)
    weaker, stronger = torch.minimum(one, other), torch.maximum(one, other)
    return (weaker > 0) & (weaker >= balance * stronger)


def unrelated(
    similarity: Tensor,
    strength: Tensor,
    pair: Tensor,
    *,
    least: int,
    balance: float,
    above: float,
) -> list[Tensor]:
    """The best two groups of one node and all others that are as unrelated to each of them.

    Args:
        similarity: cosines between its contexts, (k, k).
        strength: its activations, (k,).
        pair: the best two groups, (2, k), bool.
        least: fewest contexts of a group.
        balance: as of `best_pairs`.
        above: what the score of a further group with each of those there must exceed.

    Returns:
        Groups of contexts, (k,) bool each; the two best first.
    """
    groups = [group for group in pair if group.any()]
    formed = [one.bool() for one in linkage(similarity.unsqueeze(0))[0] if one.sum() >= least]
    while groups:
        scores = [
            min(_score(similarity, strength, one, other, balance) for other in groups)
            for one in formed
        ]
        best = max(range(len(formed)), key=scores.__getitem__, default=None)
        if best is None or not scores[best] > above:
            break
        groups.append(formed[best])
    return groups


def _score(
    similarity: Tensor, strength: Tensor, one: Tensor, other: Tensor, balance: float
) -> float:
    """The score of two groups, −∞ where they share a context or one is too weak."""
    if (one & other).any():
        return -math.inf
    means = torch.stack([strength[group].mean() for group in (one, other)])
    if not bool(_balanced(means, balance)[0, 1]):
        return -math.inf
    across = float(similarity[one][:, other].mean())
    return min(_inside(similarity, group) for group in (one, other)) - max(across, 0.0)


def _inside(similarity: Tensor, group: Tensor) -> float:
    own = similarity[group][:, group]
    size = len(own)
    return float((own.sum() - own.diagonal().sum()) / max(size * (size - 1), 1))

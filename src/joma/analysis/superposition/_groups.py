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
class GroupPairs:
    """The best two groups of each node's contexts.

    Attributes:
        score: From 0 to 1, (N,); 0 where no two groups can be made.
        inside: Mean similarity in the looser of the two groups, (N,); 0 there.
        across: Mean similarity between the groups, (N,); 0 there.
        groups: Which contexts belong to the two, (N, 2, k), bool, the group with the strongest
            context first; none there.
    """

    score: Tensor
    inside: Tensor
    across: Tensor
    groups: Tensor


def best_pairs(similarity: Tensor, strength: Tensor, least: int, balance: float) -> GroupPairs:
    """Return the two most unrelated tight groups among the contexts of each node.

    Args:
        similarity: Cosines between the contexts of a node, (N, k, k).
        strength: Activations of the node at its contexts, (N, k), largest first.
        least: Fewest contexts of a group.
        balance: Least ratio of the smaller to the larger of the groups' mean activations.
    """
    formed = _linkage(similarity)
    inside, across, scores = _scored(formed, similarity, strength, least, balance)
    sizes = formed.sum(-1)
    larger = (sizes.unsqueeze(-1) + sizes.unsqueeze(-2)) / similarity.shape[-1]
    place = (scores + _EQUAL * larger).flatten(1).argmax(-1)
    best, loose, between = (
        table.flatten(1).gather(1, place.unsqueeze(1)).squeeze(1)
        for table in (scores, inside, across)
    )
    found = best > _EQUAL
    pick = torch.arange(len(best), device=best.device)
    one, other = place // scores.shape[-1], place % scores.shape[-1]
    groups = torch.stack([formed[pick, one], formed[pick, other]], 1).bool()
    strongest = groups.int().argmax(-1)  # contexts come strongest first
    groups = torch.where((strongest[:, 0] > strongest[:, 1])[:, None, None], groups.flip(1), groups)
    return GroupPairs(
        best.where(found, 0.0),
        loose.where(found, 0.0),
        between.where(found, 0.0),
        groups & found[:, None, None],
    )


def unrelated_groups(
    similarity: Tensor, strength: Tensor, pair: Tensor, least: int, balance: float, above: float
) -> list[Tensor]:
    """Return the best two groups of one node and all others that are as unrelated to each of them.

    Args:
        similarity: Cosines between its contexts, (k, k).
        strength: Its activations, (k,).
        pair: The best two groups, (2, k), bool.
        least: Fewest contexts of a group.
        balance: As of `best_pairs`.
        above: What the score of a further group with each of those there must exceed.

    Returns:
        Groups of contexts, (k,) bool each; the two best first.
    """
    groups = [group for group in pair if group.any()]
    formed = _linkage(similarity.unsqueeze(0))
    every = torch.cat([formed[0], pair.to(formed.dtype)])
    scores = _scored(every.unsqueeze(0), similarity[None], strength[None], least, balance)[2][0]
    chosen = [len(formed[0]) + number for number in range(len(groups))]
    while chosen:
        worst = scores[: len(formed[0]), chosen].amin(1)
        best = int(worst.argmax())
        if not worst[best] > above:
            break
        chosen.append(best)
        groups.append(every[best].bool())
    return groups


def _linkage(similarity: Tensor) -> Tensor:
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


def _scored(
    members: Tensor, similarity: Tensor, strength: Tensor, least: int, balance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for all pairs of groups, (N, G, k), what is inside and across, and the score.

    The score is −∞ where two groups share a context, or one is too small or too weak.
    """
    sizes = members.sum(-1)
    sums = members @ similarity @ members.mT
    own = sums.diagonal(dim1=-2, dim2=-1) - (
        members * similarity.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    ).sum(-1)
    inside = own / (sizes * (sizes - 1)).clamp(min=1)
    across = sums / (sizes.unsqueeze(-1) * sizes.unsqueeze(-2))
    means = (members * strength.unsqueeze(-2)).sum(-1) / sizes
    one, other = means.unsqueeze(-1), means.unsqueeze(-2)
    weaker, stronger = torch.minimum(one, other), torch.maximum(one, other)
    large = sizes >= least
    fits = (members @ members.mT == 0) & (weaker > 0) & (weaker >= balance * stronger)
    fits &= large.unsqueeze(-1) & large.unsqueeze(-2)
    looser = torch.minimum(inside.unsqueeze(-1), inside.unsqueeze(-2))
    return looser, across, (looser - across.clamp(min=0)).masked_fill(~fits, -math.inf)

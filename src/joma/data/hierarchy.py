"""The deterministic hierarchy of JoMA's Table 1: sets of tokens, sets of those, and classes."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from joma import random
from joma.common.checks import check_at_least
from joma.data._batch import Batch, distinct_sets
from joma.errors import JomaError


class LatentHierarchy:
    """One random hierarchy for each member, and batches of the sequences of its classes.

    A latent of the lowest level is a random set of tokens, one of the next level a random set of
    those latents, and so on; a class is a random set of the uppermost latents. The sets of a level
    are all different. A class expands top-down, and its sequence has the union of its tokens in
    increasing order at the end and padding before, so a member has only as many sequences as
    classes. A member's hierarchy and batches depend on its seed alone, not on other members.

    Args:
        classes: how many classes.
        children: how many lower ones make a latent, or a class.
        latents: how many latents each level has, from the lowest up.
        tokens: how many tokens, with ids from 1; 0 is padding.
        length: positions of a sequence.
        seeds: one for each member.
        device: where batches are made.

    Attributes:
        seeds_E: the members' seeds, on the device.
        vocabulary: number of token ids, tokens + 1.
        expansions: every class's sequence, shape (E, classes, length).
        latent_values: for each level from the lowest up, which latents occur in a class, shape
            (E, classes, latents of the level), bool; last the class itself.

    Raises:
        ValueError: also where a level has fewer different sets than asked for, or a class has more
            tokens than a sequence has positions.
    """

    def __init__(
        self,
        classes: int,
        children: int,
        latents: Sequence[int] = (10, 20),
        tokens: int = 99,
        length: int = 30,
        seeds: Sequence[int] = (0,),
        device: torch.device | str = "cpu",
    ) -> None:
        _check(classes, children, latents, tokens, length)
        self.classes, self.children, self.latents = classes, children, tuple(latents)
        self.tokens, self.length, self.vocabulary = tokens, length, tokens + 1
        self.seeds_E = random.seed_tensor(seeds, device)
        sizes = (tokens, *latents, classes)
        sets = [_sets(seeds, level, *pair, children) for level, pair in enumerate(pairwise(sizes))]
        values = [torch.eye(classes, dtype=torch.bool).repeat(len(seeds), 1, 1)]
        for members in reversed(sets):
            values.append((values[-1].float() @ members.float()) > 0)
        *upper, on_ECK = values
        expansions, largest = _sequences(on_ECK, length, seeds)
        # One position in front of the longest class: padding in every sequence, if there is any.
        kept = min(length, 1 + largest)
        self.expansions = expansions.to(device)
        self.latent_values = tuple(value.to(device) for value in reversed(upper))
        self._leading = length - kept + 1
        self._shortened = self.expansions[..., length - kept :].contiguous()
        self._every_label = torch.arange(classes, device=device).repeat(len(seeds), 1)
        self._first_row_E1 = classes * torch.arange(len(seeds), device=device).unsqueeze(1)

    @property
    def unused(self) -> tuple[Tensor, ...]:
        """For each level from the lowest up, how many latents occur in no class, shape (E,)."""
        return tuple((~value.any(1)).sum(-1) for value in self.latent_values[:-1])

    def sample(self, batch: int, step: int | Tensor) -> Batch:
        """Return sequences of classes drawn uniformly; seed, batch size and step decide them.

        Args:
            batch: how many sequences for each member.
            step: see `joma.random.words`.
        """
        labels_EB = _labels(self.seeds_E, self.classes, batch, step)
        rows = (labels_EB + self._first_row_E1).flatten()

        def of_rows(table_ECN: Tensor) -> Tensor:
            chosen = table_ECN.flatten(0, 1).index_select(0, rows)
            return chosen.view(*labels_EB.shape, -1)

        return Batch(
            of_rows(self.expansions),
            labels_EB,
            tuple(of_rows(value) for value in self.latent_values),
        )

    def distinct(self, batch: int, step: int | Tensor) -> Batch:
        """Return the batch of `sample` as its different sequences with their shares as weights.

        Every class comes once, in order, also with weight 0. Sequences are cut on the left to one
        position in front of the longest, which stands for all the paddings cut off (`leading`).

        A loss that is a mean over sequences is the same as on `sample`, exactly. Equal sequences
        have equal losses, which the weights count. And in a causal transformer without positions
        the leading paddings are all alike: each sees only paddings, and attention's average of
        equal values is that value, in every layer. So any later token that sees n of them sees one
        of which n copies stand in the softmax's sum: its score gets ln n added.

        All but the weights are the same tensors in every call.
        """
        weights = _shares(_labels(self.seeds_E, self.classes, batch, step), self.classes)
        return Batch(self._shortened, self._every_label, self.latent_values, weights, self._leading)


class Joined:
    """The members of several hierarchies, to be trained as one ensemble.

    Their latents may be of different numbers, so batches hold none.

    Args:
        parts: hierarchies with as many classes, tokens and positions, on one device.

    Attributes:
        members: for each of the parts, where its members stand.
        vocabulary: number of token ids.
    """

    def __init__(self, parts: Sequence[LatentHierarchy]) -> None:
        kinds = {
            (part.classes, part.vocabulary, part.length, part.seeds_E.device) for part in parts
        }
        if len(kinds) != 1:
            raise JomaError(
                "parts must be at least one, alike in classes, tokens, length and device, got "
                f"{len(kinds)} kinds"
            )
        ((self.classes, self.vocabulary, length, _),) = kinds
        ends = list(accumulate(part.seeds_E.shape[0] for part in parts))
        self.members = [slice(start, end) for start, end in pairwise((0, *ends))]
        self._seeds_E = torch.cat([part.seeds_E for part in parts])
        sequences = [part.distinct(1, 0) for part in parts]
        kept = max(batch.tokens.shape[-1] for batch in sequences)
        self._tokens = torch.cat([part.expansions[..., length - kept :] for part in parts])
        self._labels = torch.cat([batch.labels for batch in sequences])
        self._leading = length - kept + 1

    def distinct(self, batch: int, step: int | Tensor) -> Batch:
        """Return the batches of the parts' `distinct`, joined along the members."""
        weights = _shares(_labels(self._seeds_E, self.classes, batch, step), self.classes)
        return Batch(self._tokens, self._labels, (), weights, self._leading)


def _labels(seeds_E: Tensor, classes: int, batch: int, step: int | Tensor) -> Tensor:
    check_at_least(1, batch=batch)
    return random.integers(seeds_E, "labels", step, batch, classes)


def _shares(labels_EB: Tensor, classes: int) -> Tensor:
    """Return what share of a batch each class has, shape (E, classes)."""
    members, batch = labels_EB.shape
    counts = torch.zeros(members, classes, dtype=torch.int64, device=labels_EB.device)
    return counts.scatter_add_(1, labels_EB, torch.ones_like(labels_EB)).double() / batch


def _sets(seeds: Sequence[int], level: int, below: int, count: int, children: int) -> Tensor:
    """Return which of the lower ones make each latent of a level, shape (E, count, below), bool."""
    return torch.stack(
        [distinct_sets(int(seed), f"hierarchy{level}", below, children, count) for seed in seeds]
    )


def _sequences(on_ECK: Tensor, length: int, seeds: Sequence[int]) -> tuple[Tensor, int]:
    """Return token ids after padding, (E, C, length), and the most that a class has."""
    counts_EC = on_ECK.sum(-1)
    largest = int(counts_EC.max())
    if largest > length:
        member, label = divmod(int(counts_EC.argmax()), counts_EC.shape[1])
        raise JomaError(
            f"length must be at least {largest}, the number of tokens of class {label} of the "
            f"member with seed {seeds[member]}, got {length}"
        )
    padding = torch.zeros(*counts_EC.shape, length, dtype=torch.int64)
    ids_ECK = on_ECK * torch.arange(1, on_ECK.shape[-1] + 1)
    return torch.cat([padding, ids_ECK.sort(-1).values], -1)[..., -length:].contiguous(), largest


def _check(classes: int, children: int, latents: Sequence[int], tokens: int, length: int) -> None:
    counts = {"classes": classes, "children": children, "tokens": tokens, "length": length}
    counts |= {f"latents of level {level}": count for level, count in enumerate(latents)}
    check_at_least(1, **counts)
    if len(latents) == 0:
        raise JomaError("latents must hold the size of at least one level, got none")
    names = [*(f"latents of level {level}" for level in range(len(latents))), "classes"]
    for name, (below, count) in zip(names, pairwise((tokens, *latents, classes)), strict=True):
        sets = math.comb(below, children)
        if count > sets:
            raise JomaError(
                f"{name} must be at most {sets}, the number of different sets of {children} of "
                f"the {below} one level below, got {count}"
            )

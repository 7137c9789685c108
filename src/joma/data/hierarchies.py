"""Sequences from random hierarchies of latents: JoMA's Table 1, and binary latent trees.

`LatentHierarchy` is the deterministic hierarchy of Table 1: sets of tokens, sets of those, and
classes. `HBLT` is the binary latent trees of JoMA §5 (`joma.theory.hblt`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from joma import random
from joma.common.checks import check_at_least
from joma.errors import JomaError
from joma.theory.hblt import Tree

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of all members of an ensemble, and the latents behind them.

    Attributes:
        tokens: Shape (E, B, T), int64: E members, B sequences, T positions; 0 is padding.
        labels: The sequences' classes, shape (E, B), int64.
        latents: For each level from the lowest up, the values of its latents behind every
            sequence, shape (E, B, latents of the level), bool; last the class, one-hot.
        weights: The share of the batch each sequence stands for, shape (E, B); None if all stand
            for the same.
        leading: How many identical padding tokens the first position stands for; 1 is itself only.
    """

    tokens: Tensor
    labels: Tensor
    latents: tuple[Tensor, ...]
    weights: Tensor | None = None
    leading: int = 1


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
        sets = [
            level_sets(seeds, level, *pair, children) for level, pair in enumerate(pairwise(sizes))
        ]
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


def level_sets(seeds: Sequence[int], level: int, below: int, count: int, children: int) -> Tensor:
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


class HBLT:
    """A binary latent tree for each member, and batches of sequences drawn from it.

    Leaf l that is on puts token l + 1 into the sequence: tokens stand in increasing order at the
    end, padding (0) before. There is always a padding, as a sequence has one position more than
    the tree has leaves.

    Args:
        tree: one for all members, or one for each, alike in all but their probabilities.
        seeds: one for each member.
        device: where batches are made.

    Attributes:
        seeds_E: the members' seeds, on the device.
        trees: every member's tree.
        classes: how many classes.
        vocabulary: number of token ids, leaves + 1.
        length: positions of a sequence, leaves + 1.
        latents: how many latents each level has, from just above the leaves up.
        heights: H of the common ancestor of the leaves behind two tokens, by their ids, shape
            (leaves + 1, leaves + 1): 0 for a token and itself, L for two that share only the class,
            −1 for padding and any.
    """

    def __init__(
        self,
        tree: Tree | Sequence[Tree],
        seeds: Sequence[int] = (0,),
        device: torch.device | str = "cpu",
    ) -> None:
        self.seeds_E = random.seed_tensor(seeds, device)
        self.trees = (tree,) * len(seeds) if isinstance(tree, Tree) else tuple(tree)
        _check_alike(self.trees, len(seeds))
        first = self.trees[0]
        self.classes = first.class_probs.size
        self.vocabulary = self.length = 1 + first.sizes[-1]
        self.latents = first.sizes[-2::-1]

        def limits(probabilities: list[np.ndarray]) -> Tensor:
            # A word below the limit happens with that probability, also with 0 and 1.
            return torch.from_numpy(np.rint(np.stack(probabilities) * 2.0**32).astype(np.int64))

        def cumulated(probabilities: np.ndarray) -> np.ndarray:
            total = np.cumsum(probabilities)
            return total / total[-1]

        self._class_EC = limits([cumulated(t.class_probs) for t in self.trees]).to(device)
        self._off_ECN = limits([t.child_off_probs.T for t in self.trees]).to(device)
        same_EN = limits([(1 + np.concatenate([(), *t.rhos])) / 2 for t in self.trees]).to(device)
        half = -(-same_EN.shape[1] // 2)
        self._same_E1N = same_EN[:, None, :half], same_EN[:, None, half:]
        self._parents = [torch.from_numpy(parent.copy()).to(device) for parent in first.parents]
        self.heights = torch.from_numpy(_heights(first)).to(device)
        self._tokens = torch.arange(1, self.vocabulary, device=device)
        self._labels = torch.arange(self.classes, device=device)
        self._first_row_E1 = self.classes * torch.arange(len(seeds), device=device).unsqueeze(1)

    @classmethod
    def regular(
        cls,
        depth: int,
        branching: int,
        rho: float | Sequence[float],
        classes: int,
        seeds: Sequence[int] = (0,),
        device: torch.device | str = "cpu",
        off: float = 0.05,
    ) -> "HBLT":
        """Return trees whose every latent has equally many children, with as many top latents.

        A class is drawn uniformly and says of every top latent whether it is likely on or likely
        off: a random code from the member's seed. No code comes twice before all have come once.

        Args:
            depth: L, the number of levels below the class; there are branching**depth leaves.
            branching: children of every latent, and number of top latents.
            rho: ρ of every edge between binary variables, one for all members or one for each.
            classes: how many classes.
            seeds: one for each member.
            device: where batches are made.
            off: probability that a top latent is not what its class says.
        """
        check_at_least(1, depth=depth, branching=branching, classes=classes)
        if not 0 <= off <= 1:
            raise JomaError(f"off must be a probability, got {off}")
        rhos = [float(value) for value in np.atleast_1d(np.asarray(rho, dtype=float))]
        if np.ndim(rho) == 0:
            rhos *= len(seeds)
        if len(rhos) != len(seeds):
            raise JomaError(f"rho must be one number or {len(seeds)}, one a seed, got {rho}")
        uniform = np.full(classes, 1 / classes)
        trees = []
        for seed, own_rho in zip(seeds, rhos, strict=True):
            codes = spread_codes(int(seed), "codes", branching, classes).numpy().T
            child_off = np.where(codes == 1, off, 1 - off)
            trees.append(Tree.regular(depth, branching, own_rho, uniform, child_off))
        return cls(trees, seeds, device)

    def sample(self, batch: int, step: int | Tensor) -> Batch:
        """Return sequences drawn from the class down; seed, batch size and step decide them.

        Args:
            batch: how many sequences for each member.
            step: see `joma.random.words`.
        """
        check_at_least(1, batch=batch)
        labels_EB, levels = self._draw(batch, step)
        *latents, leaves = levels
        one_hot = labels_EB.unsqueeze(-1) == self._labels
        return Batch(self._sequences(leaves), labels_EB, (*reversed(latents), one_hot))

    def _draw(self, batch: int, step: int | Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the classes, and the values of every level from the top, shape (E, B, nodes)."""
        # One draw for the whole tree: a word for the class, one for low halves, one for each top
        # latent, and one for two of the other nodes. The first of the two compares its word, whose
        # low half is made independent of the second; that one its half above the one for all. So
        # all nodes of a sample share 16 low bits, which count only for those whose upper 16 are
        # just at their limit: a joint probability of two is off by 2⁻³⁴ at most.
        members, (top, *sizes) = len(self.trees), self.trees[0].sizes
        pairs = self._same_E1N[0].shape[-1]
        drawn = random.words(self.seeds_E, "tree", step, batch * (2 + top + pairs))
        drawn_EBW = drawn.view(members, batch, 2 + top + pairs)
        low_EB1 = drawn_EBW[..., 1:2] >> 16
        top_EBN, pair_EBN = drawn_EBW[..., 2:].split((top, pairs), -1)
        labels_EB = torch.searchsorted(self._class_EC, drawn_EBW[..., 0].contiguous(), right=True)
        rows = (labels_EB + self._first_row_E1).flatten()
        off_EBN = self._off_ECN.flatten(0, 1).index_select(0, rows)
        levels = [top_EBN >= off_EBN.view(members, batch, top)]
        first_EBN = pair_EBN ^ low_EB1
        second_EBN = (pair_EBN[..., : sum(sizes) - pairs] << 16).bitwise_and_(_WORD)
        second_EBN |= low_EB1
        changed = [first_EBN >= self._same_E1N[0], second_EBN >= self._same_E1N[1]]
        flipped = torch.cat(changed, -1).split(sizes, dim=-1)
        for parent, flip in zip(self._parents, flipped, strict=True):
            levels.append(levels[-1].index_select(-1, parent).logical_xor_(flip))
        return labels_EB, levels

    def _sequences(self, on_EBN: Tensor) -> Tensor:
        """Return token ids in increasing order after padding, shape (E, B, leaves + 1)."""
        # A token's place, counted so that the last one comes last. Those that are off all go to
        # place 0, which no other can have and which is made padding again. A sort takes five times
        # as long.
        count = on_EBN.to(torch.int8 if self.length < 2**7 else torch.int32)
        place_EBN = count.cumsum(-1, dtype=count.dtype)
        place_EBN += self.length - 1 - place_EBN[..., -1:]
        place_EBN *= count
        tokens_EBT = place_EBN.new_zeros(*on_EBN.shape[:2], self.length, dtype=torch.int64)
        tokens_EBT.scatter_(-1, place_EBN.to(torch.int64), self._tokens.expand(on_EBN.shape))
        tokens_EBT[..., 0] = 0
        return tokens_EBT


def _heights(tree: Tree) -> np.ndarray:
    ancestors = [np.arange(tree.sizes[-1])]
    for parent in reversed(tree.parents):
        ancestors.append(parent[ancestors[-1]])
    between = np.full((tree.sizes[-1], tree.sizes[-1]), tree.depth, dtype=np.int64)
    for height, ancestor in reversed(list(enumerate(ancestors))):
        between[ancestor[:, None] == ancestor] = height
    return np.pad(between, (1, 0), constant_values=-1)


def _check_alike(trees: tuple[Tree, ...], members: int) -> None:
    if len(trees) != members:
        raise JomaError(
            f"tree must be one, or one for each of the {members} seeds, got {len(trees)}"
        )
    for member, tree in enumerate(trees):
        same = tree.class_probs.size == trees[0].class_probs.size and tree.sizes == trees[0].sizes
        if not same or not all(map(np.array_equal, tree.parents, trees[0].parents)):
            raise JomaError(
                "tree must have the same classes, levels and parents for all members, "
                f"got another shape for member {member} than for member 0"
            )


def distinct_sets(seed: int, stream: str, population: int, size: int, count: int) -> Tensor:
    """Return different random subsets of 0 … population − 1, shape (count, population), bool.

    The caller must make sure that there are as many.
    """
    seed_1 = torch.tensor([seed])

    def draw(attempt: int) -> Tensor:
        keys = random.words(seed_1, stream, attempt, count * population).view(count, population)
        return keys.argsort(dim=-1, stable=True)[:, :size].sort(dim=-1).values

    chosen = torch.tensor(_distinct_rows(draw, count))
    return torch.zeros(count, population, dtype=torch.bool).scatter_(1, chosen, value=True)


def spread_codes(seed: int, stream: str, bits: int, count: int) -> Tensor:
    """Return random codes of 0 and 1, repeating only once all are used, shape (count, bits)."""
    seed_1 = torch.tensor([seed])

    def draw(attempt: int) -> Tensor:
        return random.words(seed_1, name, attempt, count * bits).view(count, bits) >> 31

    codes: list[tuple[int, ...]] = []
    while len(codes) < count:
        name = f"{stream}{len(codes)}"
        codes += _distinct_rows(draw, min(count - len(codes), 2**bits))
    return torch.tensor(codes)


def _distinct_rows(draw: Callable[[int], Tensor], count: int) -> list[tuple[int, ...]]:
    """Return the first different rows that come up in attempt after attempt."""
    rows: dict[tuple[int, ...], None] = {}
    attempt = 0
    while len(rows) < count:
        rows |= dict.fromkeys(tuple(row) for row in draw(attempt).tolist())
        attempt += 1
    return list(rows)[:count]

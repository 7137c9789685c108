"""Sequences from hierarchical binary latent trees, HBLT(ρ) (JoMA §5); see `joma.theory.hblt`."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from joma import random
from joma.common.checks import check_at_least
from joma.data._batch import Batch, spread_codes
from joma.errors import JomaError
from joma.theory.hblt import Tree

_WORD = 0xFFFFFFFF


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

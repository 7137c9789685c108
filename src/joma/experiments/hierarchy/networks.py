"""The networks of the hierarchy: trees and labels, sizes, and what is measured as they learn."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from joma import random
from joma.data import HBLT, Batch
from joma.experiments._experiment import Request
from joma.experiments._frame import (
    FRESH_STEP,
    NetworkCell,
    NetworkSize,
    TransformerGroup,
    member_seeds,
)
from joma.experiments.hierarchy import SGD_STEPS
from joma.models import TransformerConfig
from joma.optim import StackedAdam, StackedSGD
from joma.probes import AttentionByHeight, attention_by_height
from joma.runs import Run
from joma.theory.hblt import Tree, posteriors

DEPTH, BRANCHING, TOPS, RHO, OFF = 3, 2, 6, 0.9, 0.05
HEIGHTS = tuple(range(1, DEPTH + 1))
"""Of the common ancestor of two different tokens; `DEPTH` where they share the class alone."""

LENGTH = 16
"""Positions of a sequence.

A sample has 6 tokens on average; one in 2,500 has more than 16, and its first ones are left out."""

SGD_RATE = 0.05
"""Learning rate of gradient descent at every scale."""

Kind = Literal["class", "token", "flat"]


@dataclass(frozen=True)
class TreeGroup(NetworkCell):
    """Networks that are trained together.

    Attributes:
        kind: "class": the label is the class at the root; "token", the label is one more token of
            the sequence; "flat", as "class", but without the lowest latents (a control).
        layers: How many layers the networks have.
    """

    kind: Kind
    layers: int

    @property
    def name(self) -> str:
        """A short name, such as "class-3"."""
        return f"{self.kind}-{self.layers}"

    def seeds(self, seed: int, count: int) -> tuple[int, ...]:
        """Return the seeds of this group's networks; different ones in every group."""
        return member_seeds(f"hierarchy/{self.name}", seed, count)

    @property
    def tree(self) -> Tree:
        """Six classes, each of which turns on one top latent, as in the remark after Theorem 5.

        In the flat control the middle level copies the top one, and a leaf's edge is as uncertain
        as its two edges are together otherwise: a leaf says as much of the class, but two leaves
        of height 1 have no more in common than two of height 2.
        """
        off = np.where(np.eye(TOPS) == 1, OFF, 1 - OFF)
        tree = Tree.regular(DEPTH, BRANCHING, RHO, np.full(TOPS, 1 / TOPS), off)
        if self.kind != "flat":
            return tree
        levels = len(tree.rhos)
        rhos = [np.ones_like(rho) for rho in tree.rhos[:-1]]
        rhos.append(np.full_like(tree.rhos[-1], RHO**levels))
        return dataclasses.replace(tree, rhos=tuple(rhos))


GROUPS = {
    group.name: group
    for group in (
        TreeGroup(kind, layers) for layers in (3, 1) for kind in ("class", "token", "flat")
    )
}

DECIDES = "class-3"
"""The networks of the published picture: several layers, and the class as label."""


@dataclass(frozen=True)
class HierarchySize(NetworkSize):
    """How large the hierarchy experiment is made.

    Attributes:
        batch: Sequences in each step.
        samples: Fresh sequences that the attention is measured on.
        optimizer: "adam", or "sgd" for plain gradient descent without momentum.
    """

    batch: int
    samples: int
    optimizer: str = "adam"

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the same size with the options that were given."""
        usual = self
        if options["optimizer"] != "adam":
            steps = SGD_STEPS * self.steps
            usual = dataclasses.replace(self, learning_rate=SGD_RATE, steps=steps)
        return super(HierarchySize, usual).with_options(options)

    @property
    def measure_at(self) -> tuple[int, ...]:
        """The steps after which networks are measured, about evenly in the logarithm."""
        some = np.rint(np.geomspace(1, self.steps, 48)).astype(int)
        return tuple(int(step) for step in np.unique([0, *some]))


SIZES = {
    "tiny": HierarchySize(5, 16, 32, learning_rate=1e-2, steps=8, batch=16, samples=32),
    "small": HierarchySize(12, 32, 128, learning_rate=2e-3, steps=500, batch=32, samples=256),
    "full": HierarchySize(32, 128, 512, learning_rate=1e-3, steps=3000, batch=128, samples=512),
}


class Sequences:
    """Tokens of a tree in random order, so that neighbours mean nothing and all are queries alike.

    Args:
        group: Says the tree and the label.
        seeds: One for each member.
        device: Where batches are made.

    Attributes:
        outputs: How many labels there are.
        heights: As of `joma.data.HBLT`.
        shuffled_EV: The tokens under other names, the same tree under wrong leaves; padding stays.
    """

    def __init__(self, group: TreeGroup, seeds: tuple[int, ...], device: str) -> None:
        self._source = source = HBLT(group.tree, seeds, device)
        self._of_token = group.kind == "token"
        self.vocabulary, self.heights = source.vocabulary, source.heights
        self.outputs = source.vocabulary if self._of_token else source.classes
        keys_EV = random.words(source.seeds_E, "shuffled tree", 0, source.vocabulary)
        keys_EV[:, 0] = -1
        self.shuffled_EV = keys_EV.argsort(-1)

    def sample(self, batch: int, step: int | Tensor) -> Batch:
        """Return sequences and their labels; the latents of the tree behind them."""
        drawn = self._source.sample(batch, step)
        shape, seeds_E = drawn.tokens.shape, self._source.seeds_E
        places = random.uniform(seeds_E, "order", step, shape[1] * shape[2]).view(shape)
        order = places.masked_fill(drawn.tokens == 0, -1.0).argsort(dim=-1, stable=True)
        tokens = drawn.tokens.gather(-1, order)
        labels = drawn.labels
        if self._of_token:
            # In random order the last one is any one.
            tokens, labels = tokens[..., :-1], tokens[..., -1]
        return Batch(tokens[..., -LENGTH:].contiguous(), labels, drawn.latents)

    def best_accuracy(self, batch: int, step: int) -> np.ndarray | None:
        """Return the accuracy of a perfect observer who knows the tree, (E,); None for tokens."""
        if self._of_token:
            return None
        tokens = self._source.sample(batch, step).tokens
        on = torch.zeros_like(tokens, dtype=torch.bool).scatter_(-1, tokens, value=True)
        pairs = zip(self._source.trees, on[..., 1:].cpu().numpy(), strict=True)
        return np.array([posteriors(tree, own)[-1].max(-1).mean() for tree, own in pairs])


class HierarchyNetworks(TransformerGroup):
    """The networks of a group, and their data.

    The metrics hold each network's loss at every step and, where it is measured, by layer: the
    entropy of its attention, `attention_mass` and `attention_uniform` (module "H0" is a token and
    itself, "padding" what is no token), and `attention_ratio` and its control `shuffled_ratio`
    (module "H1" …); then accuracy and loss on fresh samples, and once the best accuracy there can
    be.
    """

    def __init__(
        self, run: Run, cells: Sequence[TreeGroup], size: HierarchySize, request: Request
    ) -> None:
        self.size = size
        (group,) = cells
        seeds = group.seeds(request.seed, size.seeds)
        self.data = data = Sequences(group, seeds, request.device)
        self.batch = data.sample(size.samples, FRESH_STEP)
        config = TransformerConfig(
            vocabulary=data.vocabulary,
            outputs=data.outputs,
            layers=group.layers,
            width=size.width,
            hidden=size.hidden,
        )
        super().__init__(
            run,
            size,
            config,
            seeds,
            StackedAdam if size.optimizer == "adam" else StackedSGD,
            lambda step: data.sample(size.batch, step),
            request,
            "tf32",
        )

    def measure(self, step: int) -> None:
        """Measure all networks after `step` steps, always on the same samples."""
        tokens, labels = self.batch.tokens, self.batch.labels
        attention: dict[int, Tensor] = {}

        def watch(name: str, layer: int, x: Tensor) -> None:
            if name == "attention":
                attention[layer] = x.squeeze(2)  # there is one head

        with self.ensemble.evaluating() as model:
            outputs = model(tokens, watch=watch)
        self.log(step, "accuracy", (outputs.argmax(-1) == labels).double().mean(-1))
        loss = functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
        self.log(step, "held_out_loss", loss.view(labels.shape).double().mean(-1))
        for layer, weights_EBTT in sorted(attention.items()):
            self._log_layer(step, layer, weights_EBTT)
        best = self.data.best_accuracy(self.size.samples, FRESH_STEP) if step == 0 else None
        if best is not None:
            self.run.metrics.append(step, "best_accuracy", best)

    def _log_layer(self, step: int, layer: int, weights_EBTT: Tensor) -> None:
        def log(name: str, values: Tensor, module: str | None = None) -> None:
            self.log(step, name, values, module=module, layer=layer)

        tokens, heights = self.batch.tokens, self.data.heights
        log("attention_entropy", entropy(weights_EBTT, tokens))
        found = attention_by_height(weights_EBTT, tokens, heights)
        log("attention_mass", found.uncounted, "padding")
        for height in (0, *HEIGHTS):
            log("attention_mass", found.mass[:, height], f"H{height}")
            log("attention_uniform", found.uniform[:, height], f"H{height}")
        renamed = self.data.shuffled_EV.gather(1, tokens.flatten(1)).view_as(tokens)
        wrong = attention_by_height(weights_EBTT, renamed, heights)
        for name, by_height in (("attention_ratio", found), ("shuffled_ratio", wrong)):
            for height, ratio in zip(HEIGHTS, among_others(by_height).unbind(-1), strict=True):
                log(name, ratio, f"H{height}")


def among_others(found: AttentionByHeight) -> Tensor:
    """Return the attention to other tokens by height, over chance: (E, L).

    What goes to padding and to the query itself is left out on both sides: to leave padding alone
    is learned early, lifts all heights, and is no association.
    """
    mass, uniform = (part[..., 1:] for part in (found.mass, found.uniform))
    return (mass / mass.sum(-1, keepdim=True)) / (uniform / uniform.sum(-1, keepdim=True))


def entropy(weights_EBTT: Tensor, tokens_EBT: Tensor) -> Tensor:
    """Return the mean entropy of the rows whose query is a token, in nats: (E,)."""
    rows_EBT = torch.special.entr(weights_EBTT.double()).sum(-1)
    counts_EBT = (tokens_EBT != 0).double()
    return (rows_EBT * counts_EBT).sum((1, 2)) / counts_EBT.sum((1, 2))

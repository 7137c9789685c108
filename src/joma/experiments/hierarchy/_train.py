"""Training the networks of a group, and sorting their attention by height as they learn."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from joma import random
from joma.data import HBLT, Batch
from joma.experiments import _trained
from joma.experiments._experiment import Request
from joma.experiments.hierarchy._groups import GROUPS, HEIGHTS, LENGTH, Group, Size
from joma.models import Transformer, TransformerConfig
from joma.optim import StackedAdam, StackedSGD
from joma.probes import AttentionByHeight, attention_by_height
from joma.runs import Run
from joma.theory.posterior import posteriors
from joma.train import Ensemble

_FRESH = 2**40
"""A step that no training comes to: its samples are new to every network."""


def train_group(run: Run, name: str, size: Size, request: Request) -> None:
    """Trains a group in a run folder of its own, unless it is done already.

    Its metrics hold each member's loss at every step and, at the looks, by layer: the entropy of
    its attention, `attention_mass` and `attention_uniform` (module "H0" is a token and itself,
    "padding" what is no token), and `attention_ratio` and its control `shuffled_ratio` (module
    "H1" …); then accuracy and loss on fresh samples, and once the best accuracy there can be.
    """
    group = GROUPS[name]
    own = _trained.Group(name, [group], lambda own: GroupWork(own, group, size, request))
    _trained.train_groups(run, [own], size, request)


class Sequences:
    """Tokens of a tree in random order, so that neighbours mean nothing and all are queries alike.

    Args:
        group: says the tree and the label.
        seeds: one for each member.
        device: where batches are made.

    Attributes:
        outputs: how many labels there are.
        heights: as of `joma.data.HBLT`.
        shuffled_EV: the tokens under other names, the same tree under wrong leaves; padding stays.
    """

    def __init__(self, group: Group, seeds: tuple[int, ...], device: str) -> None:
        self._source = source = HBLT(group.tree, seeds, device)
        self._of_token = group.kind == "token"
        self.vocabulary, self.heights = source.vocabulary, source.heights
        self.outputs = source.vocabulary if self._of_token else source.classes
        keys_EV = random.words(source.seeds_E, "shuffled tree", 0, source.vocabulary)
        keys_EV[:, 0] = -1
        self.shuffled_EV = keys_EV.argsort(-1)

    def sample(self, batch: int, step: int | Tensor) -> Batch:
        """Sequences and their labels; the latents of the tree behind them."""
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
        """How often who knows the tree would name the right class, (E,); None for tokens."""
        if self._of_token:
            return None
        tokens = self._source.sample(batch, step).tokens
        on = torch.zeros_like(tokens, dtype=torch.bool).scatter_(-1, tokens, value=True)
        pairs = zip(self._source.trees, on[..., 1:].cpu().numpy(), strict=True)
        return np.array([posteriors(tree, own)[-1].max(-1).mean() for tree, own in pairs])


class GroupWork:
    """The networks of a group, their data, and what is looked at."""

    def __init__(self, run: Run, group: Group, size: Size, request: Request) -> None:
        seeds, device = group.seeds(request.seed, size.seeds), request.device
        self.run, self.size = run, size
        self.data = data = Sequences(group, seeds, device)
        self.batch = data.sample(size.samples, _FRESH)
        config = TransformerConfig(
            vocabulary=data.vocabulary,
            outputs=data.outputs,
            layers=group.layers,
            width=size.width,
            hidden=size.hidden,
        )
        model = Transformer(config, seeds, device=device)
        kind = StackedAdam if size.optimizer == "adam" else StackedSGD
        self.ensemble = Ensemble(
            model,
            kind(model.named_parameters(), size.learning_rate),
            lambda step: data.sample(size.batch, step),
            precision="tf32" if device == "cuda" else "float32",
        )

    def look(self, step: int) -> None:
        """Measures all networks after `step` steps, always on the same samples."""
        tokens, labels = self.batch.tokens, self.batch.labels
        attention: dict[int, Tensor] = {}

        def watch(name: str, layer: int, x: Tensor) -> None:
            if name == "attention":
                attention[layer] = x.squeeze(2)  # there is one head

        with self.ensemble.evaluating() as model:
            outputs = model(tokens, watch=watch)
        log = self.run.metrics.append
        log(step, "accuracy", _numpy((outputs.argmax(-1) == labels).double().mean(-1)))
        loss = functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
        log(step, "held_out_loss", _numpy(loss.view(labels.shape).double().mean(-1)))
        for layer, weights_EBTT in sorted(attention.items()):
            self._log_layer(step, layer, weights_EBTT)
        best = self.data.best_accuracy(self.size.samples, _FRESH) if step == 0 else None
        if best is not None:
            log(step, "best_accuracy", best)

    def _log_layer(self, step: int, layer: int, weights_EBTT: Tensor) -> None:
        def log(name: str, values: Tensor, module: str | None = None) -> None:
            self.run.metrics.append(step, name, _numpy(values), module=module, layer=layer)

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
    """How many times more than chance goes to each height, of what goes to other tokens: (E, L).

    What goes to padding and to the query itself is left out on both sides: to leave padding alone
    is learned early, lifts all heights, and is no association.
    """
    mass, uniform = (part[..., 1:] for part in (found.mass, found.uniform))
    return (mass / mass.sum(-1, keepdim=True)) / (uniform / uniform.sum(-1, keepdim=True))


def entropy(weights_EBTT: Tensor, tokens_EBT: Tensor) -> Tensor:
    """Mean entropy of the rows whose query is a token, in nats: (E,)."""
    rows_EBT = torch.special.entr(weights_EBTT.double()).sum(-1)
    counts_EBT = (tokens_EBT != 0).double()
    return (rows_EBT * counts_EBT).sum((1, 2)) / counts_EBT.sum((1, 2))


def _numpy(values: Tensor) -> Any:
    return values.detach().cpu().numpy()

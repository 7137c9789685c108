"""The search: every node's score, those of both controls, and what they show together."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from joma.analysis.superposition._contexts import (
    LayerContexts,
    SearchSettings,
    batches,
    dealt,
    describe,
    hidden_paths,
    observe,
    token_vectors,
)
from joma.analysis.superposition._groups import GroupPairs, best_pairs
from joma.common.progress import Progress, no_progress
from joma.errors import JomaError
from joma.models import Loaded, untrained
from joma.probes.inputs import run_on_tokens

CHANCE = 0.01
"""A node is above a control where no more than this share of it, the node included, is as high.

So by chance no more than this share of the nodes is, however few scores the control has; and with
fewer than 99 of them, none.
"""
_FEWEST = 100
"""Nodes of a layer from which on some can be above an untrained model's."""
_TIMES_CHANCE, _ERRORS = 2.0, 3.0
_READINGS = 4
"""Passes over the text: two by the model and two by an untrained one."""
_TOTAL_SHARE = 1.6
"""Time of a search over that of its passes over the text, as measured on a CPU."""
_BASE_BYTES = 5e8
"""Memory of Python, torch and one batch."""


@dataclass(frozen=True, eq=False)
class LayerScores:
    """The scores of a layer's nodes, and of its controls.

    Attributes:
        observed: The nodes and their contexts.
        units: What each context attends to, (U, r).
        pairs: The best two groups of each node, with the scores.
        shuffled: Scores with the contexts dealt out at random, (M,).
        untrained: Scores of the same nodes of an untrained model, (N′,).
        untrained_shuffled: Those with its contexts dealt out at random, (M′,).
    """

    observed: LayerContexts
    units: Tensor
    pairs: GroupPairs
    shuffled: Tensor
    untrained: Tensor
    untrained_shuffled: Tensor

    @property
    def above_shuffled(self) -> Tensor:
        """Which nodes score above 99% of shuffled contexts, (N,)."""
        return shares_at_least(self.shuffled, self.pairs.score) <= CHANCE

    @property
    def above_untrained(self) -> Tensor:
        """Which nodes score above 99% of the untrained model's, (N,)."""
        return shares_at_least(self.untrained, self.pairs.score) <= CHANCE

    @property
    def untrained_above(self) -> Tensor:
        """Which nodes of the untrained model score above 99% of its shuffled contexts, (N′,)."""
        return shares_at_least(self.untrained_shuffled, self.untrained) <= CHANCE


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What was found in a model.

    Attributes:
        layers: The scores of each.
        settings: How it was searched.
    """

    layers: tuple[LayerScores, ...]
    settings: SearchSettings

    @property
    def nodes(self) -> int:
        """How many nodes have a score."""
        return sum(len(layer.pairs.score) for layer in self.layers)

    @property
    def share_above_shuffled(self) -> float:
        """Share of nodes above 99% of the shuffled contexts of their layer."""
        return _share(*(layer.above_shuffled for layer in self.layers))

    @property
    def share_above_untrained(self) -> float:
        """Share of nodes above 99% of the untrained model's in their layer."""
        return _share(*(layer.above_untrained for layer in self.layers))

    @property
    def untrained_share(self) -> float:
        """Share of the untrained model's nodes above 99% of its own shuffled contexts."""
        return _share(*(layer.untrained_above for layer in self.layers))

    @property
    def beats_shuffled(self) -> bool:
        """Whether clearly more nodes than by chance score above shuffled contexts."""
        return self._beats(self.share_above_shuffled, "shuffled")

    @property
    def beats_untrained(self) -> bool:
        """Whether clearly more nodes than by chance score above the untrained model."""
        return self._beats(self.share_above_untrained, "untrained")

    @property
    def finding(self) -> str:
        """What the numbers say, in one sentence."""
        if self.nodes == 0:
            return "no node has enough contexts that differ, so nothing can be said."
        words = (
            f"of {self.nodes:,} nodes {self.share_above_shuffled:.1%} score above 99% of shuffled "
            f"contexts and {self.share_above_untrained:.1%} above 99% of an untrained model's "
            "nodes, where 1% would by chance"
        )
        if self.beats_shuffled and self.beats_untrained:
            beyond = min(self.share_above_shuffled, self.share_above_untrained) - CHANCE
            return (
                f"{words}: the model beats both controls, and beyond chance {beyond:.1%} of its "
                "nodes answer to unrelated contexts."
            )
        if self.beats_shuffled or self.beats_untrained:
            beaten = ("shuffled contexts", "the untrained model")
            one, other = beaten if self.beats_shuffled else beaten[::-1]
            return f"{words}: the model beats {one} but not {other}, so the scores show little."
        return f"{words}: the model does not beat its controls, so the scores show nothing."

    def _beats(self, share: float, control: str) -> bool:
        """Twice as many as by chance, and by more than the chance of so few scores allows."""
        controls = sum(len(getattr(layer, control)) for layer in self.layers)
        if not self.nodes or not controls:
            return False
        error = math.sqrt(CHANCE * (1 - CHANCE) * (1 / self.nodes + 1 / controls))
        return share >= _TIMES_CHANCE * CHANCE and share > CHANCE + _ERRORS * error

    def scores(self) -> dict[str, list[float]]:
        """Return all scores of all layers, of the "model" and of its controls."""
        return {
            "model": [score for layer in self.layers for score in layer.pairs.score.tolist()],
            "shuffled": [score for layer in self.layers for score in layer.shuffled.tolist()],
            "untrained": [score for layer in self.layers for score in layer.untrained.tolist()],
        }

    def ranked(self) -> list[tuple[int, int]]:
        """Return all nodes that have two groups: which of `layers`, and which row of it.

        Those above both controls come first, then the best.
        """
        rows = []
        for which, layer in enumerate(self.layers):
            below = ~(layer.above_shuffled & layer.above_untrained)
            scores = layer.pairs.score.tolist()
            for row, (score, last) in enumerate(zip(scores, below.tolist(), strict=True)):
                if score > 0:
                    rows.append((last, -score, which, row))
        return [(which, row) for *_, which, row in sorted(rows)]

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each layer."""
        return [
            {
                "layer": layer.observed.layer,
                "nodes": len(layer.pairs.score),
                "median": float(layer.pairs.score.double().median()) if len(layer.pairs.score)
                else math.nan,
                "99%": quantile(layer.pairs.score),
                "shuffled 99%": quantile(layer.shuffled),
                "untrained 99%": quantile(layer.untrained),
                "above shuffled": _share(layer.above_shuffled),
                "above untrained": _share(layer.above_untrained),
                "untrained above its shuffled": _share(layer.untrained_above),
            }
            for layer in self.layers
        ]  # fmt: skip


def search(
    loaded: Loaded,
    windows: Tensor,
    *,
    layers: Sequence[int] | None = None,
    nodes: int | None = None,
    settings: SearchSettings | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> SearchResult:
    """Score how unrelated the contexts are that each MLP node answers to, with two controls.

    The controls go through the same steps. Shuffled: the contexts of a layer's nodes are dealt out
    among them at random, each for one of the same query token, so that the text and what is
    attended to in it stay the same and only who answers to what changes. Untrained: a model of the
    same configuration with fresh weights reads the same text.

    Args:
        loaded: The model, with its map.
        windows: (W, T), tokens; at least as many windows as contexts.
        layers: Layer indices; all where None.
        nodes: How many nodes of each layer, drawn at random; all where None.
        settings: How contexts are taken and grouped.
        seed: Decides the nodes, the shuffles and the untrained weights.
        progress: Called with what is being done and how far it is.
    """
    settings = settings or SearchSettings()
    layers = check(loaded, windows, layers=layers, nodes=nodes, settings=settings)
    vectors = token_vectors(loaded, windows)

    def observed(model: Loaded, before: str) -> list[LayerContexts]:
        def tell(what: str, done: int, total: int) -> None:
            progress(f"{before}{what}", done, total)

        return observe(model, windows, layers, nodes, settings, seed, tell)

    trained = observed(loaded, "")
    control = observed(untrained(loaded, seed), "untrained model, ")
    found = []
    for number, (own, other) in enumerate(zip(trained, control, strict=True)):
        units, pairs, shuffled = _scores(own, windows, vectors, settings, seed)
        _, untrained_pairs, untrained_shuffled = _scores(other, windows, vectors, settings, seed)
        found.append(
            LayerScores(own, units, pairs, shuffled, untrained_pairs.score, untrained_shuffled)
        )
        progress("scores", number + 1, len(layers))
    return SearchResult(tuple(found), settings)


def quantile(scores: Tensor) -> float:
    """Return the 99% quantile; NaN of nothing."""
    return float(scores.double().quantile(1 - CHANCE)) if len(scores) else math.nan


def shares_at_least(control: Tensor, scores: Tensor) -> Tensor:
    """Return how often a control reaches each score, (N,), counting the score itself as once."""
    below = torch.searchsorted(control.sort().values, scores.contiguous())
    return (1 + len(control) - below).double() / (1 + len(control))


def _scores(
    observed: LayerContexts, windows: Tensor, vectors: Tensor, settings: SearchSettings, seed: int
) -> tuple[Tensor, GroupPairs, Tensor]:
    """Return what contexts attend to, the nodes' best groups, and scores of shuffled contexts."""
    if len(observed.nodes) == 0:
        nothing = torch.zeros(0)
        groups = torch.zeros(0, 2, settings.contexts, dtype=torch.bool)
        return torch.zeros(0, 1), GroupPairs(nothing, nothing, nothing, groups), nothing
    units = describe(observed, windows, vectors, settings)
    generator = torch.Generator().manual_seed(1_000_003 * seed + observed.layer)

    def pairs(index: Tensor) -> GroupPairs:
        contexts = units[index]
        return best_pairs(contexts @ contexts.mT, observed.values, settings.least, settings.balance)

    shuffled = [pairs(dealt(observed, windows, generator)).score for _ in range(settings.shuffles)]
    return units, pairs(observed.index), torch.cat(shuffled)


def _share(*several: Tensor) -> float:
    every = torch.cat([torch.zeros(0, dtype=torch.bool), *several])
    return float(every.double().mean()) if len(every) else math.nan


def check(
    loaded: Loaded,
    windows: Tensor,
    *,
    layers: Sequence[int] | None = None,
    nodes: int | None = None,
    settings: SearchSettings | None = None,
) -> list[int]:
    """Return the layers to search, if this can be searched; arguments as of `search`."""
    settings = settings or SearchSettings()
    count, length = windows.shape
    if count < settings.contexts:
        raise JomaError(
            f"windows must be at least {settings.contexts}, for a node's contexts are in different "
            f"ones, got {count} of {length} tokens; give more text or a smaller window"
        )
    shortest = max(settings.skip, settings.sink + 1) + 1  # a context, and something to attend to
    if length < shortest:
        raise JomaError(f"window must be at least {shortest} tokens, got {length}")
    if loaded.context is not None and length > loaded.context:
        raise JomaError(
            f"window must be at most {loaded.context} tokens, as many as {loaded.source} takes, "
            f"got {length}"
        )
    if nodes is not None and nodes < _FEWEST:
        raise JomaError(
            f"nodes must be at least {_FEWEST}, or none can be above 99% of a control, got {nodes}"
        )
    there = len(hidden_paths(loaded))
    chosen = list(range(there)) if layers is None else list(dict.fromkeys(layers))
    for layer in chosen:
        if not 0 <= layer < there:
            raise JomaError(f"layers must lie from 0 to {there - 1}, got {layer}")
    return chosen


def estimate(
    loaded: Loaded,
    windows: Tensor,
    *,
    layers: Sequence[int] | None = None,
    nodes: int | None = None,
) -> tuple[float, float]:
    """Return seconds and bytes that `search` will take; one batch is read for it, twice."""
    settings = SearchSettings()
    chosen = check(loaded, windows, layers=layers, nodes=nodes)
    _, batch = next(batches(loaded, windows))
    start = 0.0
    for _ in range(2):  # the first time is none to measure
        start = time.perf_counter()
        with torch.inference_mode():
            run_on_tokens(loaded.model, batch)
        if batch.is_cuda:
            torch.cuda.synchronize(batch.device)
    seconds = (time.perf_counter() - start) * len(windows) / len(batch)
    weights = sum(weight.numel() * weight.element_size() for weight in loaded.model.parameters())
    most = windows.numel() if nodes is None else nodes * settings.contexts
    rows = min(most, windows.numel()) * (windows.shape[1] + settings.directions) * 4
    memory = 2 * (weights + len(chosen) * rows) + _BASE_BYTES  # of the model and its control
    return seconds * _READINGS * _TOTAL_SHARE, memory

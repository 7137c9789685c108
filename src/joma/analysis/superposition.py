"""Fig. 10 of JoMA: MLP nodes that answer to unrelated combinations of tokens, found and scored.

For every node of an MLP the contexts at which it is largest are grouped by what their query attends
to in that layer; a node scores high where two groups are tight and have nothing to do with each
other. A best of many pairs of groups is large by chance alone, so every score is compared with two
controls that go through the same steps: contexts shuffled among nodes, and an untrained model.

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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from joma.analysis.node_contexts import (
    LayerContexts,
    SearchSettings,
    batches,
    dealt,
    describe,
    hidden_paths,
    observe,
    token_vectors,
)
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
        return chances(self.shuffled, self.pairs.score) <= CHANCE

    @property
    def above_untrained(self) -> Tensor:
        """Which nodes score above 99% of the untrained model's, (N,)."""
        return chances(self.untrained, self.pairs.score) <= CHANCE

    @property
    def untrained_above(self) -> Tensor:
        """Which nodes of the untrained model score above 99% of its shuffled contexts, (N′,)."""
        return chances(self.untrained_shuffled, self.untrained) <= CHANCE

    def row(self) -> dict[str, Any]:
        """Return what tables have of the layer."""
        return {
            "layer": self.observed.layer,
            "nodes": len(self.pairs.score),
            "median": quantile(self.pairs.score, 0.5),
            "99%": quantile(self.pairs.score),
            "shuffled 99%": quantile(self.shuffled),
            "untrained 99%": quantile(self.untrained),
            "above shuffled": _share(self.above_shuffled),
            "above untrained": _share(self.above_untrained),
            "untrained above its shuffled": _share(self.untrained_above),
        }


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
            "nodes, where 1% would by chance: the model"
        )
        if self.beats_shuffled and self.beats_untrained:
            beyond = min(self.share_above_shuffled, self.share_above_untrained) - CHANCE
            return (
                f"{words} beats both controls, and beyond chance {beyond:.1%} of its nodes answer "
                "to unrelated contexts."
            )
        if self.beats_shuffled or self.beats_untrained:
            beaten = ("shuffled contexts", "the untrained model")
            one, other = beaten if self.beats_shuffled else beaten[::-1]
            return f"{words} beats {one} but not {other}, so the scores show little."
        return f"{words} does not beat its controls, so the scores show nothing."

    def _beats(self, share: float, control: str) -> bool:
        """Twice as many as by chance, and by more than the chance of so few scores allows."""
        controls = len(self.scores()[control])
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
        return [layer.row() for layer in self.layers]


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
    trained = observe(loaded, windows, layers, nodes, settings, seed, progress)
    control = observe(untrained(loaded, seed), windows, layers, nodes, settings, seed, progress)
    found = []
    for number, (own, other) in enumerate(zip(trained, control, strict=True)):
        units, pairs, shuffled = _scores(own, windows, vectors, settings, seed)
        _, untrained_pairs, untrained_shuffled = _scores(other, windows, vectors, settings, seed)
        found.append(
            LayerScores(own, units, pairs, shuffled, untrained_pairs.score, untrained_shuffled)
        )
        progress("scores", number + 1, len(layers))
    return SearchResult(tuple(found), settings)


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


def quantile(scores: Tensor, share: float = 1 - CHANCE) -> float:
    """Return a quantile, the 99% one if not given; NaN of nothing."""
    return float(scores.double().quantile(share)) if len(scores) else math.nan


def chances(control: Tensor, scores: Tensor) -> Tensor:
    """Return how often a control reaches each score, (N,), counting the score itself as once."""
    below = torch.searchsorted(control.sort().values, scores.contiguous())
    return (1 + len(control) - below).double() / (1 + len(control))


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
    longest = math.inf if loaded.context is None else loaded.context
    if not shortest <= length <= longest:
        most = f" and at most {longest}, as many as {loaded.source} takes" if loaded.context else ""
        raise JomaError(f"window must be at least {shortest} tokens{most}, got {length}")
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

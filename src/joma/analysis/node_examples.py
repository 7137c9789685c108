"""The best nodes of a search for superposition with their contexts as text, and its tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from joma.analysis.node_contexts import LayerContexts, SearchSettings, counted, dealt_to, rarity
from joma.analysis.superposition import (
    LayerScores,
    SearchResult,
    best_pairs,
    chances,
    quantile,
    unrelated_groups,
)
from joma.models import Loaded, Tokenizer

_SHOWN, _AFTER = 32, 4
"""Tokens of a context that are shown, up to the query, and after it where they are attended to."""
_WORDS = 6
_MOST_BOLD = 5
_DRAWS = 199
_CANDIDATES = 4
_TEXT_ALONE = 0.05

Columns = dict[str, list[Any]]
"""A table, by column."""


@dataclass(frozen=True)
class Context:
    """One context of a node.

    Attributes:
        activation: Activation of the node there.
        window: In which window of the text it is.
        position: Position of the query in the window.
        pieces: Text of the tokens shown.
        attention: What the query gives to each of them, the sink and the query itself aside; the
            whole window's sums to 1.
        attended: Whether each is among the fewest that take half of that, five at most.
        query: Which piece is the query.
    """

    activation: float
    window: int
    position: int
    pieces: tuple[str, ...]
    attention: tuple[float, ...]
    attended: tuple[bool, ...]
    query: int


@dataclass(frozen=True)
class Group:
    """Contexts that attend to the same.

    Attributes:
        words: Tokens that at least two of them attend to, the most attended first, frequent tokens
            counting less.
        contexts: The contexts, strongest first.
    """

    words: tuple[str, ...]
    contexts: tuple[Context, ...]


@dataclass(frozen=True)
class FoundNode:
    """A node that answers to unrelated contexts.

    Attributes:
        layer: Index of its layer.
        node: Its index in the layer.
        score: Score of its two best groups.
        inside: Mean similarity in the looser of them.
        across: Mean similarity between them.
        p_shuffled: How often shuffled contexts of this layer score as high.
        p_untrained: How often nodes of this layer of the untrained model do.
        p_own: How often the node itself would, with other contexts of the same query tokens: large
            where the text repeats itself after a token and the node answers to the token alone.
        groups: The two best, and others unrelated to them.
    """

    layer: int
    node: int
    score: float
    inside: float
    across: float
    p_shuffled: float
    p_untrained: float
    p_own: float
    groups: tuple[Group, ...]

    def as_json(self) -> dict[str, Any]:
        """As `joma superposition --json` prints it."""
        return asdict(self)


def examples(
    search: SearchResult, loaded: Loaded, windows: Tensor, count: int, *, seed: int = 0
) -> list[FoundNode]:
    """Return the best nodes of a search with their contexts.

    They come in the order of `SearchResult.ranked`, but those that the text alone would make (see
    `FoundNode.p_own`) after the others; so a few more are examined than returned.

    Args:
        search: What was found.
        loaded: The model, for its tokenizer.
        windows: The windows that were searched.
        count: How many nodes.
        seed: Decides the random contexts of `FoundNode.p_own`.
    """
    found = [
        _found(search.layers[which], row, search.settings, loaded.tokenizer, windows, seed)
        for which, row in search.ranked()[: _CANDIDATES * count]
    ]
    found.sort(key=lambda node: node.p_own > _TEXT_ALONE)
    return found[:count]


def _found(
    layer: LayerScores,
    row: int,
    settings: SearchSettings,
    tokenizer: Tokenizer | None,
    windows: Tensor,
    seed: int,
) -> FoundNode:
    observed, pairs = layer.observed, layer.pairs
    contexts, values = layer.units[observed.index[row]], observed.values[row]
    how = (settings.least, settings.balance)
    above = max(quantile(layer.shuffled), quantile(layer.untrained))
    groups = unrelated_groups(contexts @ contexts.mT, values, pairs.groups[row], *how, above)
    generator = torch.Generator().manual_seed(seed)
    others = layer.units[dealt_to(observed, windows, row, _DRAWS, generator)]
    own = best_pairs(others @ others.mT, values.expand(_DRAWS, -1), *how).score
    score = pairs.score[row : row + 1]
    return FoundNode(
        layer=observed.layer,
        node=int(observed.nodes[row]),
        score=float(score),
        inside=float(pairs.inside[row]),
        across=float(pairs.across[row]),
        p_shuffled=float(chances(layer.shuffled, score)),
        p_untrained=float(chances(layer.untrained, score)),
        p_own=float(chances(own, score)),
        groups=tuple(
            _group(observed, row, group, settings.sink, tokenizer, windows) for group in groups
        ),
    )


def _group(
    observed: LayerContexts,
    row: int,
    group: Tensor,
    sink: int,
    tokenizer: Tokenizer | None,
    windows: Tensor,
) -> Group:
    vocabulary = int(windows.max()) + 1
    rare = rarity(windows, vocabulary)
    weights = torch.zeros(vocabulary)
    heard_in: Counter[int] = Counter()
    shown = []
    for place in group.nonzero().squeeze(-1).tolist():
        window, position = int(observed.windows[row, place]), int(observed.positions[row, place])
        raw = observed.rows[observed.index[row, place]].unsqueeze(0)
        attention = counted(raw, torch.tensor([position]), sink)[0]
        tokens = windows[window]
        content = attention * rare[tokens]
        content = content / content.sum().clamp(min=torch.finfo(content.dtype).tiny)
        own = torch.zeros(vocabulary).index_add_(0, tokens, content)
        weights += own
        heard_in.update((own > 1 / len(tokens)).nonzero().squeeze(-1).tolist())
        activation = float(observed.values[row, place])
        shown.append(_context(activation, window, position, tokens.tolist(), attention, tokenizer))
    order = weights.argsort(descending=True, stable=True).tolist()
    common = [token for token in order if heard_in[token] > 1][: 2 * _WORDS]
    decoded = [str(it) if tokenizer is None else tokenizer.decode([it]).strip() for it in common]
    return Group(tuple(filter(None, dict.fromkeys(decoded)))[:_WORDS], tuple(shown))


def _context(
    activation: float,
    window: int,
    position: int,
    tokens: list[int],
    attention: Tensor,
    tokenizer: Tokenizer | None,
) -> Context:
    """Return what stands before the query, and a little after where that is attended to."""
    after = _AFTER if bool(attention[position + 1 :].any()) else 0
    start = max(0, position + 1 - _SHOWN)
    stop = min(len(tokens), position + 1 + after)
    order = attention.argsort(descending=True, stable=True)
    enough = int((attention[order].cumsum(0) < 0.5).sum()) + 1
    bold = set(order[: min(enough, _MOST_BOLD)].tolist())
    return Context(
        activation=activation,
        window=window,
        position=position,
        pieces=tuple(_pieces(tokenizer, tokens[:stop])[start:]),
        attention=tuple(attention[start:stop].tolist()),
        attended=tuple(place in bold for place in range(start, stop)),
        query=position - start,
    )


def _pieces(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> list[str]:
    """Return the text of every token as it stands in the text; numbers without a tokenizer.

    A token alone may be decoded without the space before it, so it is what the text grows by.
    """
    if tokenizer is None:
        return [f" {token}" for token in tokens]
    found, before = [], ""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count])
        # A character in several tokens changes its shape as they come: nothing is said twice.
        found.append(text[len(before) :] if text.startswith(before) else text[len(before) - 1 :])
        before = text
    return found


def tables(search: SearchResult, found: Sequence[FoundNode]) -> dict[str, Columns]:
    """Return tables by name; one may be empty.

    `nodes` has every node with its score, `controls` every score of the controls, `layers` a line
    for each layer, and `contexts` those of the nodes found.
    """
    nodes: Columns = {}
    controls: Columns = {"layer": [], "control": [], "score": []}
    for layer in search.layers:
        observed, pairs = layer.observed, layer.pairs
        of_layer = {
            "layer": torch.full_like(observed.nodes, observed.layer),
            "node": observed.nodes,
            "score": pairs.score,
            "inside": pairs.inside,
            "across": pairs.across,
            "p_shuffled": chances(layer.shuffled, pairs.score),
            "p_untrained": chances(layer.untrained, pairs.score),
            "above_shuffled": layer.above_shuffled,
            "above_untrained": layer.above_untrained,
        }
        for name, values in of_layer.items():
            nodes.setdefault(name, []).extend(values.tolist())
        for name in ("shuffled", "untrained", "untrained_shuffled"):
            scores = getattr(layer, name).tolist()
            controls["layer"] += [observed.layer] * len(scores)
            controls["control"] += [name.replace("_", " ")] * len(scores)
            controls["score"] += scores
    contexts = [
        {
            "layer": node.layer,
            "node": node.node,
            "group": "ABCDEFGHIJKLMNOP"[number],
            "activation": it.activation,
            "window": it.window,
            "position": it.position,
            "text": "".join(it.pieces[: it.query + 1]),
            "query": it.pieces[it.query],
            "attended": " ".join(
                piece.strip()
                for piece, attended in zip(it.pieces, it.attended, strict=True)
                if attended
            ),
        }
        for node in found
        for number, group in enumerate(node.groups)
        for it in group.contexts
    ]
    return {
        "nodes": nodes,
        "controls": controls,
        "layers": _columns(search.table()),
        "contexts": _columns(contexts),
    }


def _columns(rows: Sequence[dict[str, Any]]) -> Columns:
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

"""The best nodes of a search with their contexts as text, and all of a search as tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from joma.analysis.superposition._clusters import best_pairs, unrelated
from joma.analysis.superposition._content import counted, rarity
from joma.analysis.superposition._search import LayerScores, Search, quantile, shares_at_least
from joma.analysis.superposition._shuffle import dealt_to
from joma.models import Loaded, Tokenizer

SHOWN = 32
"""Tokens of a context that are shown, up to the query."""

WORDS = 6
_AFTER = 4
_HALF = 0.5
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
        activation: of the node there.
        window: in which window of the text.
        position: of the query in the window.
        pieces: text of the tokens shown.
        attention: what the query gives to each of them, the sink and the query itself aside; the
            whole window's sums to 1.
        attended: whether each is among the fewest that take half of that, five at most.
        query: which piece is the query.
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
        words: tokens that at least two of them attend to, the most attended first, frequent tokens
            counting less.
        contexts: strongest first.
    """

    words: tuple[str, ...]
    contexts: tuple[Context, ...]


@dataclass(frozen=True)
class Found:
    """A node that answers to unrelated contexts.

    Attributes:
        layer: in which layer.
        node: which node.
        score: of its two best groups.
        inside: mean similarity in the looser of them.
        across: mean similarity between them.
        p_shuffled: how often shuffled contexts of this layer score as high.
        p_untrained: how often nodes of this layer of the untrained model do.
        p_own: how often the node itself would, with other contexts of the same query tokens: large
            where the text repeats itself after a token and the node answers to the token alone.
        groups: the two best, and others unrelated to them.
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
    search: Search, loaded: Loaded, windows: Tensor, count: int, *, seed: int = 0
) -> list[Found]:
    """The best nodes of a search with their contexts.

    They come in the order of `Search.ranked`, but those that the text alone would make (see
    `Found.p_own`) after the others; so a few more are examined than returned.

    Args:
        search: what was found.
        loaded: the model, for its tokenizer.
        windows: the windows that were searched.
        count: how many nodes.
        seed: decides the random contexts of `Found.p_own`.
    """
    rare = rarity(windows, int(windows.max()) + 1)
    found = [
        _found(search, search.layers[which], row, windows, rare, loaded.tokenizer, seed)
        for which, row in search.ranked()[: _CANDIDATES * count]
    ]
    found.sort(key=lambda node: node.p_own > _TEXT_ALONE)
    return found[:count]


def _found(
    search: Search,
    layer: LayerScores,
    row: int,
    windows: Tensor,
    rare: Tensor,
    tokenizer: Tokenizer | None,
    seed: int,
) -> Found:
    observed, pairs = layer.observed, layer.pairs
    contexts = layer.units[observed.index[row]]
    least, balance = search.settings.least, search.settings.balance
    groups = unrelated(
        contexts @ contexts.mT,
        observed.values[row],
        pairs.groups[row],
        least=least,
        balance=balance,
        above=max(quantile(layer.shuffled), quantile(layer.untrained)),
    )
    generator = torch.Generator().manual_seed(seed)
    others = layer.units[dealt_to(observed, windows, row, _DRAWS, generator)]
    strength = observed.values[row].expand(_DRAWS, -1)
    own = best_pairs(others @ others.mT, strength, least, balance).score
    score = layer.score[row : row + 1]
    p_shuffled, p_untrained, p_own = (
        float(shares_at_least(control, score)) for control in (layer.shuffled, layer.untrained, own)
    )
    return Found(
        layer=layer.layer,
        node=int(observed.nodes[row]),
        score=float(score),
        inside=float(pairs.inside[row]),
        across=float(pairs.across[row]),
        p_shuffled=p_shuffled,
        p_untrained=p_untrained,
        p_own=p_own,
        groups=tuple(
            _group(search, layer, row, group, windows, rare, tokenizer) for group in groups
        ),
    )


def _group(
    search: Search,
    layer: LayerScores,
    row: int,
    group: Tensor,
    windows: Tensor,
    rare: Tensor,
    tokenizer: Tokenizer | None,
) -> Group:
    observed = layer.observed
    weights: Counter[int] = Counter()
    heard_in: Counter[int] = Counter()
    shown = []
    for place in group.nonzero().squeeze(-1).tolist():
        window, position = int(observed.windows[row, place]), int(observed.positions[row, place])
        raw = observed.rows[observed.index[row, place]].unsqueeze(0)
        attention = counted(raw, torch.tensor([position]), search.settings.sink)[0]
        tokens = windows[window]
        content = attention * rare[tokens]
        content = content / content.sum().clamp(min=torch.finfo(content.dtype).tiny)
        own: Counter[int] = Counter()
        for token, weight in zip(tokens.tolist(), content.tolist(), strict=True):
            own[token] += weight
        weights.update(own)
        heard_in.update(token for token, weight in own.items() if weight > 1 / len(tokens))
        activation = float(observed.values[row, place])
        shown.append(_context(activation, window, position, tokens.tolist(), attention, tokenizer))
    common = [token for token, _ in weights.most_common() if heard_in[token] > 1]
    words = dict.fromkeys(piece.strip() for piece in _alone(tokenizer, common[: 2 * WORDS]))
    return Group(tuple(word for word in words if word)[:WORDS], tuple(shown))


def _context(
    activation: float,
    window: int,
    position: int,
    tokens: list[int],
    attention: Tensor,
    tokenizer: Tokenizer | None,
) -> Context:
    """Shows what stands before the query, and a little after where that is attended to."""
    after = _AFTER if bool(attention[position + 1 :].any()) else 0
    start = max(0, position + 1 - SHOWN)
    stop = min(len(tokens), position + 1 + after)
    order = attention.argsort(descending=True, stable=True)
    enough = int((attention[order].cumsum(0) < _HALF).sum()) + 1
    bold = set(order[: min(enough, _MOST_BOLD)].tolist())
    return Context(
        activation=activation,
        window=window,
        position=position,
        pieces=tuple(pieces(tokenizer, tokens[:stop])[start:]),
        attention=tuple(attention[start:stop].tolist()),
        attended=tuple(place in bold for place in range(start, stop)),
        query=position - start,
    )


def pieces(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> list[str]:
    """The text of every token as it stands in the text; numbers where there is no tokenizer.

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


def _alone(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> list[str]:
    if tokenizer is None:
        return [str(token) for token in tokens]
    return [tokenizer.decode([token]) for token in tokens]


def tables(search: Search, found: Sequence[Found]) -> dict[str, Columns]:
    """Tables by name; one may be empty.

    `nodes` has every node with its score, `controls` every score of the controls, `layers` a line
    for each layer, and `contexts` those of the nodes found.
    """
    return {
        "nodes": _nodes(search),
        "controls": _controls(search),
        "layers": _columns(search.table()),
        "contexts": _columns(_contexts(found)),
    }


def _nodes(search: Search) -> Columns:
    columns: Columns = {}
    for layer in search.layers:
        of_layer = {
            "layer": torch.full_like(layer.observed.nodes, layer.layer),
            "node": layer.observed.nodes,
            "score": layer.score,
            "inside": layer.pairs.inside,
            "across": layer.pairs.across,
            "p_shuffled": shares_at_least(layer.shuffled, layer.score),
            "p_untrained": shares_at_least(layer.untrained, layer.score),
            "above_shuffled": layer.above_shuffled,
            "above_untrained": layer.above_untrained,
        }
        for name, values in of_layer.items():
            columns.setdefault(name, []).extend(values.tolist())
    return columns


def _controls(search: Search) -> Columns:
    columns: Columns = {"layer": [], "control": [], "score": []}
    for layer in search.layers:
        for name in ("shuffled", "untrained", "untrained_shuffled"):
            scores = getattr(layer, name).tolist()
            columns["layer"] += [layer.layer] * len(scores)
            columns["control"] += [name.replace("_", " ")] * len(scores)
            columns["score"] += scores
    return columns


def _contexts(found: Sequence[Found]) -> list[dict[str, Any]]:
    return [
        {
            "layer": node.layer,
            "node": node.node,
            "group": chr(ord("A") + number),
            "activation": context.activation,
            "window": context.window,
            "position": context.position,
            "text": "".join(context.pieces[: context.query + 1]),
            "query": context.pieces[context.query],
            "attended": " ".join(
                piece.strip()
                for piece, attended in zip(context.pieces, context.attended, strict=True)
                if attended
            ),
        }
        for node in found
        for number, group in enumerate(node.groups)
        for context in group.contexts
    ]


def _columns(rows: Sequence[dict[str, Any]]) -> Columns:
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

"""What a search leaves in a run folder, as columns."""

from collections.abc import Sequence
from typing import Any

from joma.analysis.superposition._examples import Found
from joma.analysis.superposition._search import Search, shares_at_least

Columns = dict[str, list[Any]]


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
    rows = []
    for layer in search.layers:
        columns = zip(
            layer.observed.nodes.tolist(),
            layer.score.tolist(),
            layer.pairs.inside.tolist(),
            layer.pairs.across.tolist(),
            shares_at_least(layer.shuffled, layer.score).tolist(),
            shares_at_least(layer.untrained, layer.score).tolist(),
            layer.above_shuffled.tolist(),
            layer.above_untrained.tolist(),
            strict=True,
        )
        for node, score, inside, across, shuffled, untrained, *above in columns:
            rows.append(
                {
                    "layer": layer.layer,
                    "node": node,
                    "score": score,
                    "inside": inside,
                    "across": across,
                    "p_shuffled": shuffled,
                    "p_untrained": untrained,
                    "above_shuffled": above[0],
                    "above_untrained": above[1],
                }
            )
    return _columns(rows)


def _controls(search: Search) -> Columns:
    return _columns(
        [
            {"layer": layer.layer, "control": name, "score": score}
            for layer in search.layers
            for name, scores in (
                ("shuffled", layer.shuffled),
                ("untrained", layer.untrained),
                ("untrained shuffled", layer.untrained_shuffled),
            )
            for score in scores.tolist()
        ]
    )


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

"""How what `joma superposition` found looks on a terminal."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from joma.cli import _show

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_PER_GROUP = 4


def show(record: Mapping[str, Any]) -> None:
    """Prints the layers, the best nodes with their contexts, and what it all says."""
    from rich.padding import Padding
    from rich.text import Text

    _show.put(_layer_table(record["layers"]), "")
    terminal = _show.console().is_terminal
    for node in record["found"]:
        _show.put(Text(f"layer {node['layer']}, node {node['node']}", style="bold"))
        _show.put(Padding(Text(_show.printable(verdict(node))), (0, 0, 0, 2)))
        for number, group in enumerate(node["groups"]):
            words = _show.printable(", ".join(group["words"]))
            heading = f"{chr(ord('A') + number)} attends to {words}" if words else chr(65 + number)
            _show.put(Padding(Text(heading, style="italic"), (0, 0, 0, 2)))
            for context in group["contexts"][:_PER_GROUP]:
                _show.put(Padding(line(context, terminal), (0, 0, 0, 4)))
        typer.echo()
    _show.put(Padding(Text(_show.printable(sentence(record["finding"]))), (0, 0, 0, 0)))
    for path in record["figures"]:
        typer.echo(f"  {path}")


def line(context: Mapping[str, Any], terminal: bool) -> "Text":
    """A context: attended tokens bold and the query underlined, or «marked» and [marked]."""
    from rich.text import Text

    line = Text(f"{context['activation']:.2f}  ", style="dim")
    looks = [
        "query" if place == context["query"] else "attended" if attended else ""
        for place, attended in enumerate(context["attended"])
    ]
    parts = zip(looks, context["pieces"], strict=True)
    for look, together in itertools.groupby(parts, key=lambda part: part[0]):
        piece = "".join(piece for _, piece in together).replace("\t", " ")
        piece = piece.replace("\n", _sign("↵", " / "))
        shown = _show.printable("".join(sign for sign in piece if sign.isprintable()))
        before, mark, after = _marks(look, terminal)
        word = shown.strip() or shown
        start, _, rest = shown.partition(word) if word else ("", "", "")
        line.append(start).append(f"{before}{word}{after}", style=mark).append(rest)
    return line


def _marks(look: str, terminal: bool) -> tuple[str, str, str]:
    """What stands before a word, its style, and what stands after it."""
    if look == "query":
        return ("", "not dim bold underline", "") if terminal else ("[", "", "]")
    if look == "attended":
        marks = _sign("«", ">"), "", _sign("»", "<")
        return ("", "not dim bold", "") if terminal else marks
    return "", "not dim", ""


def _sign(sign: str, otherwise: str) -> str:
    """A sign, or another where the output does not have it."""
    return sign if _show.printable(sign) == sign else otherwise


def verdict(node: Mapping[str, Any]) -> str:
    """A node's score beside its controls."""
    return (
        f"score {node['score']:.2f}, {node['inside']:.2f} inside its groups and "
        f"{node['across']:.2f} across; as high score {_share(node['p_shuffled'])} of this layer's "
        f"shuffled contexts, {_share(node['p_untrained'])} of an untrained model's nodes, and "
        f"{_share(node['p_own'])} of random contexts with this node's query tokens."
    )


def _share(share: float) -> str:
    return f"{100 * share:.2g}%"


def sentence(words: str) -> str:
    """Words with a capital at the beginning."""
    return words[:1].upper() + words[1:]


def _layer_table(rows: Sequence[Mapping[str, Any]]) -> "Table":
    names = ("layer", "nodes", "median", "99%", "shuffled 99%", "untrained 99%")
    shares = ("above shuffled", "above untrained")
    table = _show.table(*names, *shares)
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        cells = [_show.printable(_cell(row[name])) for name in names]
        table.add_row(*cells, *(_show.printable(_percent(row[name])) for name in shares))
    return table


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"

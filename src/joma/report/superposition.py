"""The figures of `joma superposition`: scores with their controls, and contexts of one node."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from joma.report import figures

STYLES = {
    "model": ("this model", figures.BLUE, "-"),
    "shuffled": ("shuffled contexts", figures.GREY, "--"),
    "untrained": ("untrained model", figures.VERMILLION, ":"),
}

COLUMNS = 96
"""Characters of a context that are drawn."""

# A character is a whole number of dots wide, or rounding would move it off its shade.
_DOTS = 13
_ADVANCE = 1233 / 2048  # width of the font's characters, of its size
_CHARACTER = _DOTS / figures.DPI  # inches
_MONO = FontProperties(family="DejaVu Sans Mono", size=72 * _CHARACTER / _ADVANCE)
_LINE = 0.19  # inches
_PADDING = 0.16  # inches that `figures.save` leaves at the sides of the panels
_PER_GROUP = 5
_MARGIN = 8  # characters in front, for the activation
_FAINT = 0.01
_RUN = 8  # characters written at a time


def draw_scores(scores: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the share of nodes above each score, for the model and its controls.

    Args:
        scores: under "model", "shuffled" and "untrained".
    """
    figure, ax = figures.new(6.4, 3.6)
    lowest = 1.0
    with figures.style():
        for name, values in scores.items():
            label, color, line = STYLES[name]
            ordered = np.sort(np.asarray(values, dtype=float))
            if not len(ordered):
                continue
            shares = 1 - np.arange(len(ordered)) / len(ordered)
            lowest = min(lowest, shares[-1])
            ax.step(ordered, shares, line, color=color, label=label, where="post")
        ax.axhline(0.01, color="#c9c9c9", linewidth=1, zorder=0)
        ax.set_yscale("log")
        ax.set_ylim(min(lowest, 0.005) * 0.8, 1.1)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
        ax.set_xlim(left=0)
        ax.set(xlabel="score", ylabel="nodes that score at least so much")
        if ax.lines:
            ax.legend(loc="upper right")
    return figure


def draw_contexts(node: Mapping[str, Any]) -> Figure:
    """Draw the contexts of one node by group, with what the query attends to shaded.

    Args:
        node: a record as `joma superposition --json` prints it.
    """
    groups = node["groups"]
    rows = sum(1.6 + min(len(group["contexts"]), _PER_GROUP) for group in groups)
    width = COLUMNS + _MARGIN + 1
    figure, ax = figures.new(width * _CHARACTER + _PADDING, rows * _LINE + 0.2)
    with figures.style():
        ax.set_xlim(0, width)
        ax.set_ylim(rows, 0)
        ax.axis("off")
        line = 0.5
        for number, group in enumerate(groups):
            heading = f"{chr(ord('A') + number)} attends to: {', '.join(group['words'])}"
            heading = _drawable(heading if group["words"] else heading[0])[: COLUMNS + 8]
            ax.text(0, line, heading, va="center", fontsize=8, weight="bold", parse_math=False)
            line += 1
            for context in group["contexts"][:_PER_GROUP]:
                _draw_context(ax, line, context)
                line += 1
            line += 0.6
    return figure


def _draw_context(ax: Axes, line: float, context: Mapping[str, Any]) -> None:
    """Draw one line that ends at the query; what is further to the left is cut off."""
    texts = [_drawable(piece) for piece in context["pieces"]]
    query, attention = context["query"], context["attention"]
    strongest = max(attention, default=0.0) or 1.0
    column = COLUMNS - sum(map(len, texts[: query + 1]))
    written = []
    for place, text in enumerate(texts):
        visible = text[max(0, -column) : max(0, COLUMNS - column)]
        at = max(column, 0) + _MARGIN
        column += len(text)
        if visible and (place == query or attention[place] > _FAINT * strongest):
            fill: dict[str, Any] = {"facecolor": figures.ORANGE, "linewidth": 0}
            fill["alpha"] = 0.75 * attention[place] / strongest
            own = {"facecolor": "none", "edgecolor": figures.BLACK, "linewidth": 0.8}
            box = Rectangle(
                (at, line - 0.42), len(visible), 0.84, **(own if place == query else fill)
            )
            ax.add_patch(box)
        written.append((place == query or context["attended"][place], at, visible))
    _write(ax, 0, line, f"{context['activation']:6.2f}", figures.GREY)
    for bold, together in groupby(written, key=lambda part: part[0]):  # few artists draw faster
        parts = list(together)
        text = "".join(visible for _, _, visible in parts)
        # In short runs: over a long one the font's own width would drift from the columns.
        for start in range(0, len(text), _RUN):
            run = text[start : start + _RUN]
            if run.strip():
                _write(ax, parts[0][1] + start, line, run, figures.BLACK, bold=bold)


def _write(ax: Axes, at: float, line: float, text: str, color: str, bold: bool = False) -> None:
    font = _MONO.copy()
    font.set_weight("bold" if bold else "normal")
    ax.text(at, line, text, va="center", color=color, fontproperties=font, parse_math=False)


def _drawable(text: str) -> str:
    """Return a text on one line in characters that the font has."""
    plain = text.replace("\n", "↵").replace("\t", " ").replace("\r", "")
    return "".join(character if _has(character) else "□" for character in plain)


@cache
def _has(character: str) -> bool:
    index = get_font(findfont(_MONO)).get_char_index(ord(character))
    return character.isprintable() and bool(index)

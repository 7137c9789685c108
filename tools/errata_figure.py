"""The figure of the errata: the relative error of every printed statement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from errata_page import percent
from joma.errors import JomaError
from joma.report import figures

_ROW = 0.27  # inches
_GAP = 0.45  # rows between two slips
_LEFT = 0.007
"""Left end of the axis, as a relative error."""


@dataclass(frozen=True)
class ErratumRow:
    """One printed statement.

    Attributes:
        label: what is wrong, in a few words.
        quantity: what the relative error is of.
        relative_error: error of the printed statement in its example, 1 for 100%.
        follows: whether it follows from the row above it that does not.
    """

    label: str
    quantity: str
    relative_error: float
    follows: bool = False


def draw_errata(documents: Mapping[str, Sequence[ErratumRow]], *, width: float = 11.0) -> Figure:
    """Draw one row per statement on a logarithmic axis, under the name of its document.

    Args:
        documents: The statements of each document; those that follow from a slip stand below it.
        width: Inches.
    """
    if not any(documents.values()):
        raise JomaError("documents must hold at least one erratum, got none")
    figure, ax = figures.new(width, 1.0)
    with figures.style():
        y = 0.0
        heading = "of what (printed for derived)"
        figures.row_text(ax, "right", 0.6, heading, 9, color=figures.GREY)
        for document, rows in documents.items():
            y += 0.6
            figures.row_text(ax, "left", y, document, 10, fontweight="bold")
            slip = None
            for number, row in enumerate(rows):
                y += 1 if row.follows or not number else 1 + _GAP
                if not row.follows:
                    slip = y
                elif slip is not None:  # a thin line from a slip down to what follows from it
                    ends = {"linewidth": 2, "zorder": 1, "clip_on": False}
                    ax.plot([_LEFT, _LEFT], [slip, y], color=figures.SKY, **ends)
                _draw_row(ax, y, row)
            y += 1
        _draw_axis(ax, y, [row for rows in documents.values() for row in rows])
        _draw_legend(ax)
        figure.set_figheight(_ROW * y + 0.9)
    return figure


def _draw_row(ax: Axes, y: float, row: ErratumRow) -> None:
    color = figures.SKY if row.follows else figures.BLUE
    ax.plot([_LEFT, row.relative_error], [y, y], color=color, linewidth=2, zorder=2)
    dot = {"markerfacecolor": "white" if row.follows else color, "markeredgewidth": 1.8}
    ax.plot(row.relative_error, y, "o", color=color, markersize=7, zorder=3, **dot)
    text = {"va": "center", "fontsize": 9.5, "color": figures.BLACK}
    figures.note(ax, percent(row.relative_error), (row.relative_error, y), (8, 0), **text)
    figures.row_text(ax, "left", y, row.label, 9.5)
    figures.row_text(ax, "right", y, row.quantity, 9, color=figures.GREY)


def _draw_axis(ax: Axes, height: float, rows: Sequence[ErratumRow]) -> None:
    ticks = {tick: f"{100 * tick:.0f}%" for tick in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)}
    figures.row_axis(ax, ticks, "relative error of the printed statement")
    right = max(row.relative_error for row in rows)
    ax.set_xlim(_LEFT, max(2.0, 2.4 * right))
    ax.set_ylim(height - 0.4, -0.1)


def _draw_legend(ax: Axes) -> None:
    for label, color, face in (
        ("a slip", figures.BLUE, figures.BLUE),
        ("what follows from it", figures.SKY, "white"),
    ):
        ax.plot([], [], "o-", color=color, markerfacecolor=face, markeredgewidth=1.8, label=label)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)

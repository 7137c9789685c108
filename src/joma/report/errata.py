"""The picture of the errata: the relative error of every printed statement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from joma.errors import JomaError
from joma.report import figures

_ROW = 0.27  # inches
_GAP = 0.45  # rows between two slips
_LEFT = 0.007
"""Left end of the axis, as a relative error."""


@dataclass(frozen=True)
class Row:
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


def percent(value: float) -> str:
    """Return a relative error in percent, with one more digit below 10%."""
    return f"{100 * value:.2g}%" if value < 0.1 else f"{100 * value:.0f}%"


def draw_errata(documents: Mapping[str, Sequence[Row]], *, width: float = 11.0) -> Figure:
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
        _write(
            ax, 1.01, 0.6, "of what (printed for derived)", ha="left", size=9, color=figures.GREY
        )
        for document, rows in documents.items():
            y += 0.6
            _write(ax, -0.01, y, document, ha="right", weight="bold", size=10)
            slip = None
            for number, row in enumerate(rows):
                y += 1 if row.follows or not number else 1 + _GAP
                if not row.follows:
                    slip = y
                elif slip is not None:
                    _draw_bracket(ax, slip, y)
                _draw_row(ax, y, row)
            y += 1
        _draw_axis(ax, y, [row for rows in documents.values() for row in rows])
        _draw_legend(ax)
        figure.set_figheight(_ROW * y + 0.9)
    return figure


def _draw_row(ax: Axes, y: float, row: Row) -> None:
    color = figures.SKY if row.follows else figures.BLUE
    ax.plot([_LEFT, row.relative_error], [y, y], color=color, linewidth=2, zorder=2)
    ax.plot(
        row.relative_error,
        y,
        "o",
        color=color,
        markerfacecolor="white" if row.follows else color,
        markeredgewidth=1.8,
        markersize=7,
        zorder=3,
    )
    ax.annotate(
        percent(row.relative_error),
        (row.relative_error, y),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=9.5,
        color=figures.BLACK,
    )
    _write(ax, -0.01, y, row.label, ha="right", size=9.5)
    _write(ax, 1.01, y, row.quantity, ha="left", size=9, color=figures.GREY)


def _draw_bracket(ax: Axes, slip: float, y: float) -> None:
    """A thin line from a slip down to what follows from it, at the axis."""
    ax.plot([_LEFT, _LEFT], [slip, y], color=figures.SKY, linewidth=2, zorder=1, clip_on=False)


def _write(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    *,
    ha: Literal["left", "right"],
    size: float,
    weight: str = "normal",
    color: str = figures.BLACK,
) -> None:
    ax.text(
        x,
        y,
        text,
        transform=ax.get_yaxis_transform(),
        ha=ha,
        va="center",
        fontsize=size,
        fontweight=weight,
        color=color,
        parse_math=False,
    )


def _draw_axis(ax: Axes, height: float, rows: Sequence[Row]) -> None:
    ax.set_xscale("log")
    right = max(row.relative_error for row in rows)
    ax.set_xlim(_LEFT, max(2.0, 2.4 * right))
    ax.set_ylim(height - 0.4, -0.1)
    ticks = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_major_formatter(FixedFormatter([f"{100 * tick:.0f}%" for tick in ticks]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("relative error of the printed statement")
    ax.set_yticks([])
    ax.grid(False, axis="y")
    ax.spines["left"].set_visible(False)


def _draw_legend(ax: Axes) -> None:
    for label, color, face in (
        ("a slip", figures.BLUE, figures.BLUE),
        ("what follows from it", figures.SKY, "white"),
    ):
        ax.plot([], [], "o-", color=color, markerfacecolor=face, markeredgewidth=1.8, label=label)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)

"""The overview figure of `joma verify`: every claim's error in units of its tolerance."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from joma.common.types import Record
from joma.errors import JomaError
from joma.report import figures

LOW, HIGH = 1e-12, 1e12
"""Ratios beyond these are drawn at the edge."""

_FAILED = {"fontweight": "bold", "color": figures.VERMILLION}
_ROW = 0.205  # inches
_TOPIC_ROW = 0.42
_MOST_CLAIMS = 30
"""Claims that get a row each; more than these share the row of their topic."""
_SPREAD = (0.0, -0.18, 0.18, -0.3, 0.3, -0.09, 0.09, -0.24, 0.24)
"""Offsets of neighbouring points of a topic, in rows, so that each can be seen."""


def ratio(error: float | None, tolerance: float | None) -> float:
    """Return error over tolerance, clipped to the axis; `HIGH` where one is missing."""
    if error is None or tolerance is None:  # JSON has no NaN and no infinity
        return HIGH
    if error == 0:
        return LOW
    if tolerance == 0:
        return HIGH
    return min(max(error / tolerance, LOW), HIGH)


def draw_verdicts(
    verdicts: Sequence[Record], *, topics: Mapping[str, str] | None = None, width: float = 9.0
) -> Figure:
    """Draw each claim on a logarithmic axis; a claim holds left of one.

    Up to 30 claims have a row each. More share the row of their topic, a point for each. A printed
    form is drawn where it differs from the derived one.

    Args:
        verdicts: records as `joma verify --json` prints them.
        topics: heading of each claim id; claims of a heading stand together, in the order in which
            headings first come. Claims without one are under "Other claims"; without `topics`
            there are no headings.
        width: inches.
    """
    if not verdicts:
        raise JomaError("verdicts must hold at least one record, got none")
    groups: dict[str, list[Record]] = {}
    for record in verdicts:
        heading = "" if topics is None else topics.get(record["claim"], "Other claims")
        groups.setdefault(heading, []).append(record)
    shared = len(verdicts) > _MOST_CLAIMS and len(groups) > 1
    rows: list[tuple[str, list[Record]]] = []
    for heading, records in groups.items():
        if shared:
            rows.append((heading, records))
        else:
            rows += [(heading, [])] if heading else []
            rows += [(record["claim"], [record]) for record in records]
    figure, ax = figures.new(width, (_TOPIC_ROW if shared else _ROW) * (len(rows) + 1) + 1.1)
    with figures.style():
        _draw_axis(ax, len(rows))
        for y, (label, records) in enumerate(rows):
            if records:
                _draw_row(ax, y, label, records, of_topic=shared)
            else:
                _label(ax, -0.01, y, label, 9, fontweight="bold")
        ax.plot([], [], "o", color=figures.BLUE, markersize=5.5, label="derived")
        ax.plot([], [], "D", color=figures.VERMILLION, ms=5, label="printed, where it differs")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    return figure


def caption(verdicts: Sequence[Record]) -> str:
    """Return what the figure shows and how to read it, with its counts."""
    count = len(verdicts)
    printed = [record["printed"] for record in verdicts if record["printed"] is not None]
    derived = sum(record["derived"]["holds"] for record in verdicts)
    wrong = sum(not form["holds"] for form in printed)
    whole = f"All {count} hold" if derived == count else f"{derived} of {count} hold"
    sentences = [
        f"{count} claims, {len(printed)} of them published.",
        "Left of 1 a claim holds.",
        f"{whole} as derived; {wrong} of the {len(printed)} published ones "
        f"{'does' if wrong == 1 else 'do'} not hold as printed.",
    ]
    if count == 1:
        sentences[0] = f"1 claim, {'published' if printed else 'not published'}."
        sentences[2] = f"It {'holds' if derived else 'does not hold'} as derived"
        sentences[2] += (", not as printed." if wrong else ", as printed too.") if printed else "."
    elif not printed:
        sentences[2] = f"{whole} as derived."
    return " ".join(sentences)


def _draw_axis(ax: Axes, rows: int) -> None:
    exponents = range(-12, 13, 3)
    labels = ["1" if k == 0 else f"$10^{{{k}}}$" for k in exponents]
    labels[0], labels[-1] = "$10^{-12}$\nor less", "$10^{12}$\nor more"
    ticks = dict(zip((10.0**k for k in exponents), labels, strict=True))
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(list(ticks)))
    ax.xaxis.set_major_formatter(FixedFormatter(list(ticks.values())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("← holds      error ÷ tolerance      fails →")
    ax.set_yticks([])
    ax.grid(False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.set_xlim(LOW / 4, HIGH * 4)
    ax.set_ylim(rows - 0.3, -0.7)
    ax.axvspan(1, HIGH * 4, color=figures.VERMILLION, alpha=0.05, linewidth=0)
    ax.axvline(1, color=figures.BLACK, linewidth=1)


def _draw_row(ax: Axes, y: float, label: str, records: Sequence[Record], of_topic: bool) -> None:
    """Draw claims as points of one row, spread a little where they would meet."""
    ax.axhline(y, color="#ececec", linewidth=0.7, zorder=0)
    points = []
    for record in records:
        derived, printed = record["derived"], record["printed"]
        points.append((ratio(derived["error"], derived["tolerance"]), "o", figures.BLUE))
        if printed is not None and printed["error"] != derived["error"]:
            x = ratio(printed["error"], derived["tolerance"])
            points.append((x, "D", figures.VERMILLION))
    if not of_topic:
        places = [x for x, _, _ in points]
        ax.plot(places, [y] * len(places), color="#c9c9c9", linewidth=1, zorder=1)
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.5} if of_topic else {}
    spread = cycle(_SPREAD if of_topic else (0.0,))
    for (x, marker, color), offset in zip(sorted(points), spread, strict=False):
        size = 5 if marker == "o" else 4.5
        ax.plot(x, y + offset, marker, color=color, markersize=size, clip_on=False, **edge)
    held = sum(record["derived"]["holds"] for record in records)
    failed = _FAILED if held < len(records) else {}
    words = f"{held} of {len(records)} hold"
    if not of_topic:
        words = textwrap.shorten(records[0]["source"], 48, placeholder=" …")
    _label(ax, -0.01, y, label, 9 if of_topic else 8, **failed)
    _label(ax, 1.01, y, words, 8, **{"color": figures.GREY, **failed})


def _label(ax: Axes, x: float, y: float, text: str, size: float, **options: Any) -> None:
    """Write the label of a row to the left (x < 0) or the right of the axes, as plain text."""
    place = {"transform": ax.get_yaxis_transform(), "ha": "right" if x < 0 else "left"}
    look = {"va": "center", "fontsize": size, "parse_math": False, "color": figures.BLACK}
    ax.text(x, y, text, **{**place, **look, **options})

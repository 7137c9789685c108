"""The overview figure of `joma verify`: every claim's error in units of its tolerance."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.common.types import Record
from joma.errors import JomaError
from joma.report import figures

Groups = dict[str, list[Record]]
"""Records under their headings."""

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
    groups = _grouped(verdicts, topics)
    shared = len(verdicts) > _MOST_CLAIMS and len(groups) > 1
    rows = len(groups) if shared else _rows(groups)
    height = (_TOPIC_ROW if shared else _ROW) * (rows + 1) + 1.1
    figure, ax = figures.new(width, height)
    with figures.style():
        _draw_axis(ax, rows)
        y = 0
        for heading, records in groups.items():
            if shared:
                _draw_topic(ax, y, heading, records)
                y += 1
                continue
            if heading:
                figures.row_text(ax, "left", y, heading, 9, fontweight="bold")
                y += 1
            for record in records:
                _draw_row(ax, y, record)
                y += 1
        _draw_legend(ax)
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


def _rows(groups: Groups) -> int:
    return sum(len(records) + bool(heading) for heading, records in groups.items())


def _grouped(verdicts: Iterable[Record], topics: Mapping[str, str] | None) -> Groups:
    groups: Groups = {}
    for record in verdicts:
        heading = "" if topics is None else topics.get(record["claim"], "Other claims")
        groups.setdefault(heading, []).append(record)
    return groups


def _draw_axis(ax: Axes, rows: int) -> None:
    exponents = range(-12, 13, 3)
    labels = ["1" if k == 0 else f"$10^{{{k}}}$" for k in exponents]
    labels[0], labels[-1] = "$10^{-12}$\nor less", "$10^{12}$\nor more"
    ticks = dict(zip((10.0**k for k in exponents), labels, strict=True))
    figures.row_axis(ax, ticks, "← holds      error ÷ tolerance      fails →")
    ax.set_xlim(LOW / 4, HIGH * 4)
    ax.set_ylim(rows - 0.3, -0.7)
    ax.axvspan(1, HIGH * 4, color=figures.VERMILLION, alpha=0.05, linewidth=0)
    ax.axvline(1, color=figures.BLACK, linewidth=1)


def _draw_topic(ax: Axes, y: float, heading: str, records: Sequence[Record]) -> None:
    """Draw the claims of a topic as points of one row, spread a little where they would meet."""
    ax.axhline(y, color="#ececec", linewidth=0.7, zorder=0)
    points = [(_derived(record), "o", figures.BLUE, 5.0) for record in records]
    points += [
        (_printed(record), "D", figures.VERMILLION, 4.5) for record in records if _differs(record)
    ]
    for number, (x, marker, color, size) in enumerate(sorted(points, key=lambda point: point[0])):
        offset = _SPREAD[number % len(_SPREAD)]
        ax.plot(
            x,
            y + offset,
            marker,
            color=color,
            markersize=size,
            markeredgecolor="white",
            markeredgewidth=0.5,
            clip_on=False,
        )
    held = sum(record["derived"]["holds"] for record in records)
    failed = _FAILED if held < len(records) else {}
    figures.row_text(ax, "left", y, heading, 9, **failed)
    words = f"{held} of {len(records)} hold"
    figures.row_text(ax, "right", y, words, 8, **{"color": figures.GREY, **failed})


def _derived(record: Record) -> float:
    return ratio(record["derived"]["error"], record["derived"]["tolerance"])


def _printed(record: Record) -> float:
    return ratio(record["printed"]["error"], record["derived"]["tolerance"])


def _differs(record: Record) -> bool:
    """Whether there is a printed form that measures differently from the derived one."""
    printed = record["printed"]
    return printed is not None and printed["error"] != record["derived"]["error"]


def _draw_row(ax: Axes, y: float, record: Record) -> None:
    ax.axhline(y, color="#ececec", linewidth=0.7, zorder=0)
    x = _derived(record)
    if _differs(record):
        x_printed = _printed(record)
        ax.plot([x, x_printed], [y, y], color="#c9c9c9", linewidth=1, zorder=1)
        ax.plot(x_printed, y, "D", color=figures.VERMILLION, markersize=5, clip_on=False)
    ax.plot(x, y, "o", color=figures.BLUE, markersize=5.5, clip_on=False, zorder=3)
    failed = {} if record["derived"]["holds"] else _FAILED
    source = textwrap.shorten(record["source"], 48, placeholder=" …")
    figures.row_text(ax, "left", y, record["claim"], 8, **failed)
    figures.row_text(ax, "right", y, source, 8, **{"color": figures.GREY, **failed})


def _draw_legend(ax: Axes) -> None:
    ax.plot([], [], "o", color=figures.BLUE, markersize=5.5, label="derived")
    ax.plot([], [], "D", color=figures.VERMILLION, markersize=5, label="printed, where it differs")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)

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

_ROW = 0.205  # inches
_TALLEST = 60  # rows in one column


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
    """Draw one row per claim on a logarithmic axis; a claim holds left of one.

    A printed form is drawn where it differs from the derived one.

    Args:
        verdicts: records as `joma verify --json` prints them.
        topics: heading of each claim id; rows of a heading stand together, in the order in which
            headings first come. Claims without one are under "Other claims"; without `topics`
            there are no headings.
        width: inches of one column; with very many claims there are two.
    """
    if not verdicts:
        raise JomaError("verdicts must hold at least one record, got none")
    columns = _columns(_grouped(verdicts, topics))
    rows = max(_rows(groups) for groups in columns)
    figure, _ = figures.new(
        width * len(columns), _ROW * (rows + 1) + 1.1, rows=1, columns=len(columns)
    )
    with figures.style():
        for ax, groups in zip(figure.axes, columns, strict=True):
            _draw_axis(ax, rows)
            y = 0
            for heading, records in groups.items():
                if heading:
                    figures.row_text(ax, "left", y, heading, 9, fontweight="bold")
                    y += 1
                for record in records:
                    _draw_row(ax, y, record)
                    y += 1
        _draw_legend(figure.axes[0])
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


def _columns(groups: Groups) -> list[Groups]:
    """Return one column, or for many rows two of similar height that break no group."""
    if _rows(groups) <= _TALLEST or len(groups) < 2:
        return [groups]
    items = list(groups.items())
    halves = ((dict(items[:cut]), dict(items[cut:])) for cut in range(1, len(items)))
    return list(min(halves, key=lambda half: max(_rows(half[0]), _rows(half[1]))))


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


def _draw_row(ax: Axes, y: float, record: Record) -> None:
    derived, printed = record["derived"], record["printed"]
    tolerance = derived["tolerance"]
    ax.axhline(y, color="#ececec", linewidth=0.7, zorder=0)
    x = ratio(derived["error"], tolerance)
    if printed is not None and printed["error"] != derived["error"]:
        x_printed = ratio(printed["error"], tolerance)
        ax.plot([x, x_printed], [y, y], color="#c9c9c9", linewidth=1, zorder=1)
        ax.plot(x_printed, y, "D", color=figures.VERMILLION, markersize=5, clip_on=False)
    ax.plot(x, y, "o", color=figures.BLUE, markersize=5.5, clip_on=False, zorder=3)
    failed = {} if derived["holds"] else {"fontweight": "bold", "color": figures.VERMILLION}
    source = textwrap.shorten(record["source"], 48, placeholder=" …")
    figures.row_text(ax, "left", y, record["claim"], 8, **failed)
    figures.row_text(ax, "right", y, source, 8, **{"color": figures.GREY, **failed})


def _draw_legend(ax: Axes) -> None:
    ax.plot([], [], "o", color=figures.BLUE, markersize=5.5, label="derived")
    ax.plot([], [], "D", color=figures.VERMILLION, markersize=5, label="printed, where it differs")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)

"""The house style: figures that are legible, fit for colour-blind readers, and reproducible.

Figures are made without pyplot, so that no global state and no display is touched.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from joma.runs import Run

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#222222"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""Okabe and Ito's colours without yellow, which is too light for lines on white."""

GREY = "#5f5f5f"
DPI = 200

_TITLE = FontProperties(family="DejaVu Sans", size=12, weight="bold")
_CAPTION = FontProperties(family="DejaVu Sans", size=9)
_LINE = 1.35  # line height in font sizes
_MARGIN = 0.12  # inches between the edge, the texts and the axes

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10,
    "axes.prop_cycle": cycler(color=PALETTE),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": BLACK,
    "ytick.labelcolor": BLACK,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "joma",  # the same figure is the same file
}


@contextmanager
def style() -> Iterator[None]:
    """Apply the house style to everything drawn in the block."""
    with matplotlib.rc_context(_STYLE):
        yield


def new(
    width: float | None = None, height: float | None = None, rows: int = 1, columns: int = 1
) -> tuple[Figure, Any]:
    """Return a figure in the house style and its axes.

    Args:
        width: inches; chosen from the number of columns if not given.
        height: inches, of the panels alone: `save` adds room for title and caption.
        rows: of panels.
        columns: of panels.

    Returns:
        The figure, and its axes: one for a single panel, otherwise an array as
        `Figure.subplots` gives it.
    """
    width = width or (6.4 if columns == 1 else 4.2 * columns)
    height = height or (4.0 if rows == 1 else 3.2 * rows)
    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns)
        for ax in figure.axes:
            # Ticks and lines are made later, outside the style: what they need is set here.
            ax.tick_params(labelsize=9, color=GREY, labelcolor=BLACK)
            ax.grid(True, color="#e4e4e4", linewidth=0.7)
    return figure, axes


def color_bar(figure: Figure, mappable: Any, ax: Any, label: str, **options: Any) -> Axes:
    """Add a colour scale next to axes and return its own axes."""
    bar = figure.colorbar(mappable, ax=ax, **options)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=9)
    bar.outline.set_visible(False)  # type: ignore[operator]
    return bar.ax


def row_axis(ax: Axes, ticks: dict[float, str], label: str) -> None:
    """Make a logarithmic axis for rows that are labelled at their sides.

    Args:
        ax: the axes.
        ticks: labels of the ticks, by their place.
        label: of the axis.
    """
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(list(ticks)))
    ax.xaxis.set_major_formatter(FixedFormatter(list(ticks.values())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(label)
    ax.set_yticks([])
    ax.grid(False, axis="y")
    ax.spines["left"].set_visible(False)


def row_text(
    ax: Axes, side: Literal["left", "right"], y: float, text: str, size: float, **options: Any
) -> None:
    """Write the label of a row to the left or the right of the axes.

    Args:
        ax: the axes.
        side: of the axes.
        y: the row.
        text: plain: a dollar sign is a dollar sign.
        size: of the font.
        options: of matplotlib's `Text`.
    """
    ax.text(
        -0.01 if side == "left" else 1.01,
        y,
        text,
        transform=ax.get_yaxis_transform(),
        ha="right" if side == "left" else "left",
        va="center",
        fontsize=size,
        parse_math=False,
        **{"color": BLACK, **options},
    )


def note(
    ax: Axes, text: str, at: tuple[Any, Any], offset: tuple[float, float], **options: Any
) -> None:
    """Write a text next to a point.

    Args:
        ax: The axes.
        text: The text.
        at: The point, in the coordinates of the data.
        offset: From there to the text, in points.
        options: Options of matplotlib's `annotate`.
    """
    ax.annotate(text, at, xytext=offset, textcoords="offset points", **options)


def error_bars(ax: Axes, x: Any, values: Any, *, color: str, filled: bool, **options: Any) -> None:
    """Draw the mean and the standard deviation over networks, the last axis, at each place."""
    face = color if filled else "white"
    bars = {"color": color, "mfc": face, "elinewidth": 1, **options}
    ax.errorbar(x, values.mean(-1), values.std(-1, ddof=1), **bars)


def panels(
    count: int, columns: int, width: float, height: float = 3.3
) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels row by row, and those that are used; the others are empty.

    Args:
        count: Panels that are used.
        columns: Panels in a row.
        width: Inches of the figure.
        height: Inches of a row.
    """
    rows = -(-count // columns)
    figure, axes = new(width, height * rows, rows, columns)
    places = list(np.ravel(axes))
    for ax in places[count:]:
        ax.set_axis_off()
    return figure, places[:count]


def band(
    ax: Axes, x: Any, low: Any, middle: Any, high: Any, *, color: str, alpha: float, **line: Any
) -> None:
    """Draw a line, and the range it stands in as a band of the same colour."""
    ax.fill_between(x, low, high, color=color, alpha=alpha, lw=0)
    ax.plot(x, middle, color=color, **line)


def level(ax: Axes, y: float, text: str, side: Literal["left", "right"], up: float) -> None:
    """Write at the edge of the axes what a horizontal line is, `up` points above it."""
    x, right = (1, -1) if side == "right" else (0, 1)
    edge = {"xycoords": ("axes fraction", "data"), "ha": side, "color": GREY, "fontsize": 8}
    note(ax, text, (x, y), (3 * right, up), **edge)


def intervals(ax: Axes, names: Sequence[str], means: Any, errors: Any, colors: Any) -> None:
    """Draw a named mean ± two standard errors in each row; without a bar where the error is NaN."""
    for row, (mean, error, color) in enumerate(zip(means, errors, colors, strict=True)):
        bar = None if np.isnan(error) else 2 * error
        ax.errorbar(mean, row, xerr=bar, fmt="o", color=color, capsize=3)
    ax.axvline(0, color=GREY, lw=1)
    ax.set_yticks(range(len(names)), names, fontsize=7.5)
    ax.set_ylim(len(names) - 0.5, -0.5)


def log_steps(ax: Axes, last: int) -> None:
    """Label a logarithmic axis of training steps up to the last one; ½ stands for step 0."""
    powers = [10**k for k in range(len(str(last)))]
    ax.set_xscale("log")
    ax.set_xticks([0.5, *powers], ["0", *(f"{power:,}" for power in powers)])
    ax.minorticks_off()


def share_limits(axes: Sequence[Axes], columns: int, low: float = 1.0, high: float = 1.0) -> None:
    """Give panels one range, whose numbers stand at the left of each row alone.

    Args:
        axes: The panels, row by row.
        columns: Panels in a row.
        low: Factor of the lower end.
        high: Factor of the upper end.
    """
    ends = np.array([ax.get_ylim() for ax in axes])
    for place, ax in enumerate(axes):
        ax.set_ylim(low * ends[:, 0].min(), high * ends[:, 1].max())
        ax.tick_params(labelleft=place % columns == 0)


def save(
    run: Run,
    name: str,
    figure: Figure,
    *,
    title: str,
    published: str = "",
    finding: str = "",
    verdict: str = "",
    caption: str | None = None,
) -> list[Path]:
    """Write a figure to a run as PNG and SVG, with its title above and a caption below.

    The figure grows by what the two texts need, so that the panels keep their size. Both texts
    are plain: a dollar sign is a dollar sign.

    Args:
        run: where to write.
        name: file name without its ending.
        figure: made by `new`; saved once.
        title: what is shown, in one line.
        published: the published observation.
        finding: what is seen here.
        verdict: how the two compare, in a word or two.
        caption: takes the place of these three, where nothing published is shown again.
    """
    if caption is None:
        caption = f"Published: {published}\nHere: {finding} {verdict.capitalize()}."
    with style():
        _annotate(figure, title, caption)
        return [
            run.write_figure(f"{name}.png", _render(figure, "png", dpi=DPI)),
            run.write_figure(f"{name}.svg", _render(figure, "svg", metadata={"Date": None})),
        ]


def rendered(figure: Figure, kind: str, *, dpi: float = DPI) -> bytes:
    """Return a figure as the bytes of a file, which are the same for the same figure.

    Args:
        figure: Made by `new`, or inside `style`.
        kind: "png", "svg" or "pdf".
        dpi: Dots per inch, of what is not lines and letters.
    """
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with style():
        return _render(figure, kind, dpi=dpi, metadata=dated.get(kind))


def _annotate(figure: Figure, title: str, caption: str) -> None:
    for ax in figure.axes:
        _tidy(ax)
    width, height = figure.get_size_inches()
    room = width - 2 * _MARGIN
    title_lines = _wrap(title, _TITLE, room)
    caption_lines = _wrap(caption, _CAPTION, room)
    above = _height(title_lines, _TITLE) + 2 * _MARGIN
    below = _height(caption_lines, _CAPTION) + 2 * _MARGIN
    total = height + above + below
    figure.set_size_inches(width, total)
    figure.set_layout_engine(
        ConstrainedLayoutEngine(
            rect=(0, below / total, 1, height / total), w_pad=0.08, h_pad=0.05, hspace=0.06
        )
    )
    for y, lines, va, color, font in (
        (1 - _MARGIN / total, title_lines, "top", BLACK, _TITLE),
        (_MARGIN / total, caption_lines, "bottom", GREY, _CAPTION),
    ):
        figure.text(
            _MARGIN / width,
            y,
            "\n".join(lines),
            va=va,
            color=color,
            fontproperties=font,
            linespacing=_LINE,
            parse_math=False,
        )


def _tidy(ax: Axes) -> None:
    """Give what was made outside the style what the style would have given it."""
    ax.title.set_fontsize(10.5)
    legend = ax.get_legend()
    if legend is not None:
        legend.get_frame().set(edgecolor="none", facecolor="white", alpha=0.8)


def _wrap(text: str, font: FontProperties, width: float) -> list[str]:
    """Break a text into lines of at most `width` inches (one word, if it is longer)."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for word in paragraph.split():
            longer = f"{line} {word}" if line else word
            if line and _width(longer, font) > width:
                lines.append(line)
                line = word
            else:
                line = longer
        lines.append(line)
    return lines


def _width(text: str, font: FontProperties) -> float:
    return _ruler().get_text_width_height_descent(text, font, ismath=False)[0] / 72


@cache
def _ruler() -> RendererAgg:
    """Return a renderer that measures texts; at 72 dots per inch a dot is a point."""
    return FigureCanvasAgg(Figure(figsize=(1, 1), dpi=72)).get_renderer()


def _height(lines: list[str], font: FontProperties) -> float:
    return len(lines) * font.get_size_in_points() * _LINE / 72


def _render(figure: Figure, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, facecolor="white", **options)
    return buffer.getvalue()

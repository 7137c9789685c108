"""Figures: written, captioned without overlap, the same twice; the overview of claims."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from joma.report import claims, figures
from joma.runs import Run

LONG = "The entropy of attention falls at first and comes back later, as the theory says. " * 4


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create("figures", {}, out=tmp_path)


def drawn(rows: int = 1, columns: int = 1):
    figure, axes = figures.new(rows=rows, columns=columns)
    for ax in np.ravel(axes):
        ax.plot([0, 1], [0, 1], label="line")
        ax.set(xlabel="time", ylabel="value", title="panel")
        ax.legend()
    return figure


def texts(figure) -> dict[str, str]:
    title, caption = figure.texts
    return {"title": title.get_text(), "caption": caption.get_text()}


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 2)])
def test_save_writes_png_and_svg_and_texts_do_not_meet_the_axes(run: Run, rows, columns):
    figure = drawn(rows, columns)
    before = dict(matplotlib.rcParams)
    width, height = figure.get_size_inches()
    png, svg = figures.save(
        run, "figure", figure, title=LONG, published=LONG, finding=LONG, verdict="agrees"
    )
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in svg.read_bytes()
    assert min(png.stat().st_size, svg.stat().st_size) > 5000
    assert run.figures == [png, svg]
    assert dict(matplotlib.rcParams) == before

    title, caption = (text.get_window_extent() for text in figure.texts)
    for ax in figure.axes:
        box = ax.get_tightbbox()
        assert box is not None
        assert box.y1 < title.y0
        assert box.y0 > caption.y1
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
    assert title.y1 <= figure.bbox.y1
    assert caption.y0 >= 0
    assert max(title.x1, caption.x1) <= figure.bbox.x1
    assert figure.get_size_inches()[0] == width
    assert figure.get_size_inches()[1] > height
    panels = sum(ax.get_position().height for ax in figure.axes[::columns])
    assert panels * figure.get_size_inches()[1] > 0.5 * height


@pytest.mark.parametrize("verdict", ["agrees", "differs", "not comparable", "incomplete"])
def test_the_caption_says_both_sides_and_a_dollar_is_a_dollar(run: Run, verdict: str):
    figure = drawn()
    figures.save(
        run, "f", figure, title="$", published="costs $1.", finding="costs $2.", verdict=verdict
    )
    assert texts(figure) == {
        "title": "$",
        "caption": f"Published: costs $1.\nHere: costs $2. {verdict.capitalize()}.",
    }


def test_a_plain_caption_stands_alone(run: Run):
    figure = drawn()
    figures.save(run, "f", figure, title="t", caption="Both $ and words.")
    assert texts(figure) == {"title": "t", "caption": "Both $ and words."}


def test_the_same_figure_is_the_same_file(run: Run):
    def once() -> list[bytes]:
        paths = figures.save(
            run, "f", drawn(), title="t", published="p.", finding="f.", verdict="agrees"
        )
        return [path.read_bytes() for path in paths]

    assert once() == once()


def test_no_pyplot():
    code = "import joma.report, sys; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def record(claim: str, error: float | None, tolerance: float, printed=None, **extra):
    holds = error is not None and error <= tolerance
    return {
        "claim": claim,
        "source": "JoMA Theorem 2",
        "printed": printed,
        "derived": {"holds": holds, "error": error, "tolerance": tolerance},
        **extra,
    }


@pytest.mark.parametrize(
    ("error", "tolerance", "expected"),
    [
        (1e-9, 1e-6, 1e-3),
        (0.0, 1e-6, claims.LOW),
        (0.0, 0.0, claims.LOW),
        (0.1, 0.0, claims.HIGH),
        (None, 1e-6, claims.HIGH),
        (1e-30, 1.0, claims.LOW),
        (1e30, 1.0, claims.HIGH),
    ],
)
def test_ratio(error, tolerance, expected):
    assert claims.ratio(error, tolerance) == pytest.approx(expected)


def test_overview_has_a_row_per_claim_and_a_heading_per_topic(run: Run):
    records = [record(f"claim{k}", 1e-9, 1e-6) for k in range(24)]
    records[7] = record("claim7", 1.0, 1e-6, {"holds": False, "error": 2.0})
    topics = {f"claim{k}": f"Topic {k // 12}" for k in range(23)}
    figure = claims.draw_verdicts(records, topics=topics)
    (ax,) = figure.axes
    written = [text.get_text() for text in ax.texts]
    assert [text for text in written if re.fullmatch(r"claim\d+", text)] == [
        f"claim{k}" for k in range(24)
    ]
    assert [text for text in written if not text.startswith(("claim", "JoMA"))] == [
        "Topic 0",
        "Topic 1",
        "Other claims",
    ]
    diamonds = [line for line in ax.lines if line.get_marker() == "D"]
    assert np.concatenate([np.ravel(line.get_xdata()) for line in diamonds]) == [2e6]
    (png, _) = figures.save(
        run, "verify", figure, title="t", published="p.", finding="f.", verdict="agrees"
    )
    assert png.stat().st_size > 40_000
    claims_left = [text for text in ax.texts if text.get_horizontalalignment() == "right"]
    boxes = sorted((text.get_window_extent() for text in claims_left), key=lambda box: -box.y0)
    for upper, lower in itertools.pairwise(boxes):
        assert lower.y1 <= upper.y0 + 1  # rows do not run into each other


def test_many_claims_share_the_row_of_their_topic():
    records = [record(f"claim{k}", 1e-9, 1e-6) for k in range(60)]
    records[7] = record("claim7", 1.0, 1e-6, {"holds": False, "error": 2.0})
    topics = {f"claim{k}": f"Topic {k // 20}" for k in range(60)}
    (ax,) = claims.draw_verdicts(records, topics=topics).axes
    assert [text.get_text() for text in ax.texts] == [
        "Topic 0",
        "19 of 20 hold",
        "Topic 1",
        "20 of 20 hold",
        "Topic 2",
        "20 of 20 hold",
    ]
    points = [it for it in ax.lines if it.get_marker() == "o" and np.size(it.get_xdata())]
    assert len(points) == 60


def test_the_caption_of_the_overview_counts():
    right = record("a", 1e-9, 1e-6, {"holds": True, "error": 1e-9})
    wrong = record("b", 1e-9, 1e-6, {"holds": False, "error": 1.0})
    ours, failing = record("c", 1e-9, 1e-6), record("d", 1.0, 1e-6)
    assert claims.caption([right, wrong, ours]) == (
        "3 claims, 2 of them published. Left of 1 a claim holds. "
        "All 3 hold as derived; 1 of the 2 published ones does not hold as printed."
    )
    assert claims.caption([ours, failing]) == (
        "2 claims, 0 of them published. Left of 1 a claim holds. 1 of 2 hold as derived."
    )
    assert claims.caption([wrong]) == (
        "1 claim, published. Left of 1 a claim holds. It holds as derived, not as printed."
    )


def test_no_verdicts_are_refused():
    with pytest.raises(ValueError, match="verdicts"):
        claims.draw_verdicts([])

"""The picture of the errata: a row per statement, and labels that do not run into each other."""

import importlib
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from joma.report import figures
from joma.runs import Run

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
errata_figure = importlib.import_module("errata_figure")
ErratumRow = errata_figure.ErratumRow


def test_a_row_per_statement(tmp_path):
    documents = {
        "Paper": [
            ErratumRow("Theorem 1", "limit", 0.41),
            ErratumRow("Lemma 2", "slope", 3.66, follows=True),
        ],
        "Talk": [ErratumRow("Slide", "rate", 0.024, follows=True)],
    }
    figure = errata_figure.draw_errata(documents)
    (ax,) = figure.axes
    written = [text.get_text() for text in ax.texts]
    for text in ("Paper", "Talk", "Theorem 1", "slope", "41%", "366%", "2.4%"):
        assert text in written
    dots = [line for line in ax.lines if line.get_marker() == "o" and np.size(line.get_xdata())]
    assert [float(np.ravel(dot.get_xdata())[0]) for dot in dots] == [0.41, 3.66, 0.024]
    run = Run.create("errata", {}, out=tmp_path / "run")
    figures.save(run, "errata", figure, title="t", caption="c.")
    labels = [text for text in ax.texts if text.get_horizontalalignment() == "right"]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: -box.y0)
    for upper, lower in itertools.pairwise(boxes):
        assert lower.y1 <= upper.y0 + 1


def test_no_errata_are_refused():
    with pytest.raises(ValueError, match="at least one erratum"):
        errata_figure.draw_errata({"Paper": []})

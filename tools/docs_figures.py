"""Makes the pictures of README and docs: `make figures`.

Those of experiments that train networks are not made here, for the demo has them tiny; they are
taken from the run folders that are named, as in `python tools/docs_figures.py runs/table1`. Those
of a run with `--optimizer sgd` are kept as NAME-sgd.png, next to those of Adam.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from joma.experiments import EXPERIMENTS
from joma.runs import Run

WIDTH = 1400
_INK = 200
"""Grey value below which a pixel counts as drawn."""
_LINE_HEIGHT, _INDENT = 0.022, 0.012
"""The highest line of a caption and the largest indent of one, as shares of the width."""
_LAST_LINES = 2
TARGET = Path(__file__).parent.parent / "docs" / "figures"


def main(runs: Sequence[str]) -> None:
    """Keeps the pictures of these runs, or those of a demo if there are none."""
    TARGET.mkdir(exist_ok=True)
    if runs:
        for folder in runs:
            keep(Run.open(folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "demo"
        subprocess.run([sys.executable, "-m", "joma", "demo", "--out", str(out)], check=True)
        keep(Run.open(out))
        for name, experiment in EXPERIMENTS.items():
            if not experiment.scales:
                keep(Run.open(out / name))


def keep(run: Run) -> None:
    """Keeps the pictures of a run, small enough to live in a repository."""
    optimizer = run.config.get("options", {}).get("optimizer", "adam")
    suffix = "" if optimizer == "adam" else f"-{optimizer}"
    for picture in run.figures:
        if picture.suffix == ".png":
            image = without_caption(Image.open(picture).convert("RGB"))
            height = round(image.height * WIDTH / image.width)
            image = image.resize((WIDTH, height), Image.Resampling.LANCZOS)
            # Of Pillow's ways this one keeps the line colours apart (within 18 of 255); k-means
            # takes the tint out of grids and pale cells.
            image = image.quantize(
                256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE
            )
            image.save(TARGET / f"{picture.stem}{suffix}.png", optimize=True)


def without_caption(image: Image.Image) -> Image.Image:
    """Return a picture without the lines of text under it: on a page they would be too small.

    Lines of the caption begin at the same column as the last one, which no label of an axis does.
    """
    ink = np.asarray(image.convert("L")) < _INK
    rows = np.flatnonzero(ink.any(axis=1))
    blocks = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    first = [int(np.flatnonzero(ink[block].any(axis=0))[0]) for block in blocks]
    end = len(blocks)
    margin = min(first[-_LAST_LINES:])
    while end > 1 and _is_line(blocks[end - 1], first[end - 1] - margin, image.width):
        end -= 1
    if end == len(blocks):
        return image
    return image.crop((0, 0, image.width, int(blocks[end - 1][-1]) + round(0.012 * image.width)))


def _is_line(rows: np.ndarray, indent: int, width: int) -> bool:
    return len(rows) < _LINE_HEIGHT * width and indent < _INDENT * width


if __name__ == "__main__":
    main(sys.argv[1:])

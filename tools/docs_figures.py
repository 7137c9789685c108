"""Makes the pictures of README and docs anew: `make figures`.

Those of experiments that train networks are not made here, for the demo has them tiny; they are
taken from the run folders that are named, as in `python tools/docs_figures.py runs/table1`.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from joma.experiments import EXPERIMENTS
from joma.report import claims, figures
from joma.runs import Run

WIDTH = 1400
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
        draw_errata(out)
        keep(Run.open(out))
        for name, experiment in EXPERIMENTS.items():
            if not experiment.scales:
                keep(Run.open(out / name))


def keep(run: Run) -> None:
    """Keeps the pictures of a run, small enough to live in a repository."""
    for picture in run.figures:
        if picture.suffix == ".png":
            image = Image.open(picture).convert("RGB")
            height = round(image.height * WIDTH / image.width)
            image = image.resize((WIDTH, height), Image.Resampling.LANCZOS)
            # Of Pillow's ways this one keeps the line colours apart (within 13 of 255).
            image = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            image.save(TARGET / picture.name, optimize=True)


def draw_errata(out: Path) -> None:
    """The claims that do not hold as printed, alone: what README shows."""
    records = json.loads((out / "verdicts.json").read_text(encoding="utf-8"))
    wrong = [r for r in records if r["printed"] is not None and not r["printed"]["holds"]]
    figures.save(
        Run.open(out),
        "errata",
        claims.draw_verdicts(wrong),
        title="What the papers print and what holds",
        caption=f"The {len(wrong)} claims of {len(records)} that do not hold as printed: error "
        "over tolerance of the printed form and of the derived one, against the same reference.",
    )


if __name__ == "__main__":
    main(sys.argv[1:])

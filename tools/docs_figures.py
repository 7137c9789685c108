"""Makes the pictures of README and docs anew: `make figures`.

Those of experiments that train networks are not made here, for the demo has them tiny; they are
taken from the run folders that are named, as in `python tools/docs_figures.py runs/table1`. Those
of a run with `--optimizer sgd` are kept as NAME-sgd.png, next to those of Adam.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

import errata_figure
from joma.experiments import EXPERIMENTS
from joma.experiments.claims import errata
from joma.report import figures
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
        draw_errata(Run.open(out))
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
            image = Image.open(picture).convert("RGB")
            height = round(image.height * WIDTH / image.width)
            image = image.resize((WIDTH, height), Image.Resampling.LANCZOS)
            # Of Pillow's ways this one keeps the line colours apart (within 13 of 255).
            image = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            image.save(TARGET / f"{picture.stem}{suffix}.png", optimize=True)


def draw_errata(run: Run) -> list[Path]:
    """Draw how far the printed statements of the errata are off: what README shows."""
    documents = {
        document[0].upper() + document[1:]: [
            errata_figure.ErratumRow(
                erratum.title, erratum.quantity, erratum.relative_error(), bool(erratum.root)
            )
            for members in roots.values()
            for erratum in members
        ]
        for document, roots in errata.group(errata.ERRATA).items()
    }
    counts = "; ".join(
        f"{document}: {errata.count(document, errata.ERRATA)}" for document in errata.DOCUMENTS
    )
    return figures.save(
        run,
        "errata",
        errata_figure.draw_errata(documents),
        title="How far the printed statements are off",
        caption=f"{counts}. Errors are of the examples in docs/errata.md and depend on them.",
    )


if __name__ == "__main__":
    main(sys.argv[1:])

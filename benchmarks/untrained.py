"""Table 1's numbers of networks that were never trained, over many seeds.

    python -m benchmarks.untrained [--device auto|cpu|cuda] [--seeds 24] [--seed 100] [--cell NAME]

For every cell: NCorr at s = 0 and 1 before training and after one step, with its controls over
classes, and what it cannot exceed because some latents are in no class; mean ± standard deviation
over the seeds.
"""

import argparse
import platform
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from joma.experiments import Request
from joma.experiments.table1.printed import CELLS, SIZES, Table1Networks, largest_possible
from joma.runs import Run

COLUMNS = (
    ("ncorr", 0, "untrained"),
    ("ncorr", 1, "after one step"),
    ("held_out_classes", 0, "node chosen on other classes"),
    ("shuffled_classes", 0, "shuffled over classes"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--cell", action="append", choices=[cell.name for cell in CELLS])
    options = parser.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    size = replace(SIZES["full"], seeds=options.seeds, repeats=4, hidden=options.hidden)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {name}; {size.seeds} seeds"
    )
    print("| cell | s | published | at most |", " | ".join(title for *_, title in COLUMNS), "|")
    print("|---" * (4 + len(COLUMNS)) + "|")
    for cell in CELLS:
        if options.cell and cell.name not in options.cell:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = Run.create("untrained", {}, out=Path(folder) / "run", device=device)
            work = Table1Networks(run, [cell], size, Request(seed=options.seed, device=device))
            work.measure(0)
            work.ensemble.advance(1)
            work.measure(1)
            del work
            run.metrics.flush()
            log = run.metrics.read()
        bounds = largest_possible([cell], size, options.seed)[0]
        for s in range(2):
            entries = []
            for measure, step, _ in COLUMNS:
                rows = (log["name"] == measure) & (log["step"] == step) & (log["layer"] == s)
                entries.append(_spread(log["value"][rows]))
            known = f"{cell.published[s]:.2f} | {_spread(bounds[s])}"
            print(f"| {cell.name} | {s} | {known} |", " | ".join(entries), "|", flush=True)


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


if __name__ == "__main__":
    main()

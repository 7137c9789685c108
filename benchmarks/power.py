"""Power of Table 1's control over classes, in networks of any size after few steps.

    python -m benchmarks.power [--device auto|cpu|cuda] [--hidden 4096] [--steps 100] [--seeds 3]
        [--cell NAME ...] [--json FILE]

To the nodes of a network one is added for each latent, of a known correlation with it over all
classes (`joma.probes.planted`). The table has what the control then reads, before training and
after the steps, mean over the seeds; "none" is the control as it is. `joma reproduce table1` prints
the same of networks that are trained to the end.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from joma.experiments import Request
from joma.experiments.table1.printed import CELLS, SIZES, Table1Networks
from joma.experiments.table1.results import PLANTED, planted_name
from joma.runs import Run

NAMES = {"none": "held_out_classes", **{f"{known:g}": planted_name(known) for known in PLANTED}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cell", action="append", choices=[cell.name for cell in CELLS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    size = replace(
        SIZES["full"], seeds=options.seeds, hidden=options.hidden, steps=options.steps, repeats=8
    )
    print("| cell | s | step | NCorr | shuffled | " + " | ".join(NAMES) + " |")
    print("|---" * (5 + len(NAMES)) + "|")
    records = []
    for cell in CELLS:
        if options.cell and cell.name not in options.cell:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = Run.create("power", {}, out=Path(folder) / "run", device=device)
            work = Table1Networks(run, [cell], size, Request(seed=options.seed, device=device))
            work.measure(0)
            for step in range(0, options.steps, 50):
                work.ensemble.advance(min(50, options.steps - step))
                work.ensemble.losses()
            if options.steps:
                work.measure(options.steps)
            del work
            run.metrics.flush()
            log = run.metrics.read()
        for s in range(2):
            for step in sorted({0, options.steps}):
                at = (log["step"] == step) & (log["layer"] == s)
                read = {
                    name: float(log["value"][at & (log["name"] == name)].mean())
                    for name in ("ncorr", "shuffled_classes", *NAMES.values())
                }
                print(f"| {cell.name} | {s} | {step} | " + _cells(read), flush=True)
                records.append({"cell": cell.name, "s": s, "step": step, **read})
    if options.json is not None:
        options.json.write_text(json.dumps(records), encoding="utf-8")


def _cells(read: dict[str, float]) -> str:
    return " | ".join(f"{value:.2f}" for value in read.values()) + " |"


if __name__ == "__main__":
    main()

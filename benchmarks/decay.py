"""NCorr at s = 1 in small networks of Table 1, with Adam's coupled weight decay and without.

    python -m benchmarks.decay [--seeds 5] [--steps 2000] [--cell C20-N2-10-20]

Width 64, hidden 512, learning rate 1e-3, on a CPU. For each weight decay: NCorr and its shuffled
control before training, half-way and at the end, mean ± standard deviation over the seeds.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from joma.experiments import Request
from joma.experiments.table1.printed import CELLS, SIZES, Table1Networks
from joma.runs import Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--cell", choices=[cell.name for cell in CELLS], default=CELLS[0].name)
    options = parser.parse_args()
    cell = next(cell for cell in CELLS if cell.name == options.cell)
    measured_at = (0, options.steps // 2, options.steps)
    print("| weight decay | | " + " | ".join(f"step {step:,}" for step in measured_at) + " |")
    print("|---" * (2 + len(measured_at)) + "|")
    for decay in (1e-4, 0.0):
        size = replace(SIZES["small"], seeds=options.seeds, steps=options.steps, weight_decay=decay)
        with tempfile.TemporaryDirectory() as folder:
            run = Run.create("decay", {}, out=Path(folder) / "run")
            work = Table1Networks(run, [cell], size, Request())
            for step in measured_at:
                while work.ensemble.step < step:
                    work.ensemble.advance(min(50, step - work.ensemble.step))
                    work.ensemble.losses()
                work.measure(step)
            run.metrics.flush()
            log = run.metrics.read()
        for name in ("ncorr", "shuffled_classes"):
            entries = []
            for step in measured_at:
                rows = (log["name"] == name) & (log["step"] == step) & (log["layer"] == 1)
                values = log["value"][rows]
                entries.append(f"{values.mean():.3f} ± {values.std(ddof=1):.3f}")
            print(f"| {decay:g} | {name} | " + " | ".join(entries) + " |", flush=True)


if __name__ == "__main__":
    main()

"""`joma report` on many long runs: processor time of the process, and the size of the page.

python -m benchmarks.report [--runs 50] [--rows 20000] [--json]

The runs are made first and do not count.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.probe_command import run
from joma.runs import Run

METRICS = ("attention_entropy", "attention_effective", "stable_rank", "mlp_zero")
LAYERS = 10


def write_ended(root: Path, name: str, rows: int) -> None:
    """Write a run of random walks, `rows` numbers long."""
    run = Run.create("ended", {"lr": 1e-3}, out=root / name)
    rng = np.random.default_rng(0)
    steps = np.arange(rows // (LAYERS * len(METRICS)))
    for metric in METRICS:
        for layer in range(LAYERS):
            values = np.cumsum(rng.normal(size=(len(steps), 1)), axis=0)
            run.metrics.append_many(steps, metric, values, module=f"h.{layer}", layer=layer)
    run.metrics.append_many(steps, "loss", np.exp(-steps / 100)[:, None] + 2)
    run.metrics.compact()
    run.write_json("outcome", {"status": "done"})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--runs", type=int, default=50)
    arguments.add_argument("--rows", type=int, default=20_000, help="rows of each run")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.runs):
            write_ended(Path(folder), f"run-{number}", given.rows)
        page = Path(folder) / "page.html"
        runs = [str(Path(folder) / f"run-{number}") for number in range(given.runs)]
        seconds, used = run([sys.executable, "-m", "joma", "report", *runs, "--out", str(page)])
        size = page.stat().st_size / 1e6
    result = {"runs": given.runs, "seconds": seconds, "processor seconds": used, "MB": size}
    if given.json:
        print(json.dumps(result))
    else:
        print(", ".join(f"{name} {value:.3g}" for name, value in result.items()))


if __name__ == "__main__":
    main()

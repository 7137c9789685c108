"""Stable rank and attention entropy over training, on several seeds, with the validation loss.

    python -m benchmarks.rebound PRESET --out FILE.json [--seeds 1,2,3] [--device auto|cpu|cuda]
        [--set SECTION.ENTRY=VALUE ...] [--text embedded] [--threads 2]

The question of JoMA's Fig. 7: does the stable rank of the MLPs' lower layers drop and bounce back?
Every seed is trained by `joma train` and its checkpoints are measured by `joma probe --series`, the
path that public checkpoints take; all seeds run at the same time. For each seed the file has the
validation losses, by how much the last exceeds the lowest, and by layer the stable rank and the
attention entropy at every checkpoint.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from joma.runs import Run

LOWER = "mlp.dense_h_to_4h"
"""How the module of an MLP's lower layer ends in a GPT-NeoX, which the presets train."""


def commands(options: argparse.Namespace, seed: int, folder: Path) -> list[list[str]]:
    """Return the two commands of one seed."""
    joma = [sys.executable, "-m", "joma"]
    changes = [f"training.seed={seed}", *options.change]
    train = [*joma, "train", options.preset, "--device", options.device]
    train += [word for change in changes for word in ("--set", change)]
    probe = [*joma, "probe", "--series", str(folder / "train" / "series"), "--text", options.text]
    probe += ["--metrics", "attention_entropy,stable_rank", "--device", options.device]
    return [[*train, "--out", str(folder / "train")], [*probe, "--out", str(folder / "probe")]]


def curves(folder: Path) -> dict[str, Any]:
    """Read what one seed's training and its checkpoints gave."""
    losses = Run.open(folder / "train").metrics.read("validation_loss")
    order = np.argsort(losses["step"], kind="stable")
    steps, values = losses["step"][order], losses["value"][order]
    points = [[int(step), float(value)] for step, value in zip(steps, values, strict=True)]
    lowest = int(values.argmin())
    log = Run.open(folder / "probe").metrics.read()
    lower = np.array([str(module).endswith(LOWER) for module in log["module"]])
    return {
        "validation": points,
        "lowest_validation": [int(steps[lowest]), float(values[lowest])],
        "last_over_lowest": float(values[-1] / values[lowest]),
        "stable_rank": _by_layer(log, (log["name"] == "stable_rank") & lower),
        "attention_entropy": _by_layer(
            log, (log["name"] == "attention_entropy") & (log["head"] == -1)
        ),
    }


def _by_layer(log: dict[str, np.ndarray], chosen: np.ndarray) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    for step, layer, value in zip(
        *(log[key][chosen] for key in ("step", "layer", "value")), strict=True
    ):
        found.setdefault(str(layer), []).append([int(step), float(value)])
    return {layer: sorted(points) for layer, points in sorted(found.items())}


def rise(points: list[list[float]]) -> float:
    """Return the last value over the lowest."""
    values = [value for _, value in points]
    return values[-1] / min(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--set", dest="change", action="append", default=[])
    parser.add_argument("--text", default="embedded")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    start, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as home:
        for stage in range(2):
            work = {
                seed: subprocess.Popen(
                    commands(options, seed, Path(home) / str(seed))[stage],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                )
                for seed in seeds
            }
            # A series that was found wanting is measured all the same, and exits with 1.
            failed += [f"{seed}: {process.wait()}" for seed, process in work.items()]
        found = {str(seed): curves(Path(home) / str(seed)) for seed in seeds}
    record = {
        "preset": options.preset,
        "changes": options.change,
        "text": options.text,
        "seconds": round(time.monotonic() - start, 1),
        "exit_codes": failed,
        "seeds": found,
    }
    options.out.write_text(json.dumps(record), encoding="utf-8")
    for seed, own in found.items():
        ranks = ", ".join(f"{rise(own['stable_rank'][layer]):.2f}" for layer in own["stable_rank"])
        last = own["validation"][-1]
        print(
            f"seed {seed}: validation loss {own['lowest_validation'][1]:.3f} at step "
            f"{own['lowest_validation'][0]}, {last[1]:.3f} at step {last[0]} "
            f"({own['last_over_lowest'] - 1:+.1%}); stable rank, last over lowest by layer: {ranks}"
        )


if __name__ == "__main__":
    main()

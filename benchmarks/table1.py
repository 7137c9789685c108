"""Table 1's networks trained as ensembles against a plain loop that trains one at a time.

    python -m benchmarks.table1 [--device auto|cpu|cuda] [--scale full] [--steps 60] [--json]

Both sides run here, one after the other, and do the same work: the three-layer network on its
cell's data, Adam, batches of 128. The plain loop (`benchmarks.plain`) is written for this: float32,
one network, sequences of 30 tokens, data made sample by sample. Next to the time stands the floor:
the operations and bytes that the ensemble's step cannot do without, over the device's rates.
"""

import argparse
import json
import math
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import plain
from joma.experiments import Request
from joma.experiments.table1.printed import GROUPS, SIZES, Table1Networks, Table1Size
from joma.runs import Run

COPY, PRODUCTS = 4.3e12, 790e12
"""Bytes a second of a device copy and bf16 operations a second, as measured on an H200."""

ADAM_BYTES = 4 + 2 + 4 + 4 + 4 + 4 + 4 + 2
"""For each parameter: original, gradient, moments read; original, moments, rounded written."""

PRODUCT_BYTES = 2 + 2 + 2
"""For each parameter: read forward and backward, and its gradient written."""


def floor(work: Table1Networks) -> dict[str, float]:
    """Operations and bytes of one step of a group, and the seconds they need at least."""
    config, batch = work.ensemble.model.config, work.data.distinct(128, 0)
    members, sequences, length = batch.tokens.shape
    rows, d, h = sequences * length, config.width, config.hidden
    below = (config.layers - 1) * rows * (3 * d * d + 2 * d * h)
    top = rows * 2 * d * d + sequences * (d * d + 2 * d * h)
    attention = (config.layers - 1) * rows * length * 2 * d
    operations = 6.0 * members * (below + top + attention)
    parameters = sum(p.numel() for p in work.ensemble.model.parameters())
    moved = parameters * (ADAM_BYTES + PRODUCT_BYTES)
    seconds = operations / PRODUCTS + parameters * ADAM_BYTES / COPY
    return {
        "rows": rows,
        "tflop": operations / 1e12,
        "gigabytes": moved / 1e9,
        "floor_ms": 1e3 * seconds,
    }


def ours(group: str, size: Table1Size, device: str, steps: int) -> dict[str, Any]:
    """Time the steps of a group's ensemble, after they were captured."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    options = {"learning-rate": None, "hidden": None}
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create("bench", {}, out=Path(folder) / "run", device=device)
        work = Table1Networks(run, GROUPS[group], size, Request(device=device, options=options))
        work.ensemble.advance(2)
        work.ensemble.losses()
        start = time.perf_counter()
        work.ensemble.advance(steps)
        work.ensemble.losses()
        step = (time.perf_counter() - start) / steps
        start = time.perf_counter()
        work.measure(0)
        _wait(device)
        measurement = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else math.nan
    return {
        "group": group,
        "networks": work.ensemble.members,
        "step_ms": 1e3 * step,
        "measurement_s": measurement,
        "peak_gib": peak,
        **floor(work),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--scale", choices=list(SIZES), default="full")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--group", action="append", choices=list(GROUPS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZES[options.scale]
    size = replace(size, hidden=options.hidden or size.hidden)
    rows = []
    for group in options.group or GROUPS:
        cell = GROUPS[group][0]
        one = plain.train(
            cell.classes,
            cell.children,
            cell.latents,
            steps=min(40, options.steps),
            hidden=size.hidden,
            width=size.width,
            device=device,
        )
        row = {**ours(group, size, device, options.steps), "plain_ms": 1e3 * one}
        rows.append({**row, "ratio": row["networks"] * row["plain_ms"] / row["step_ms"]})
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    if options.json:
        print(json.dumps({"device": name, "torch": torch.__version__, "groups": rows}))
        return
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {name}")
    columns = "group | networks | rows | step | floor | measurement"
    print(f"| {columns} | plain, one network | ratio | peak |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['group']} | {row['networks']} | {row['rows']:,} | {row['step_ms']:.2f} ms "
            f"| {row['floor_ms']:.2f} ms | {row['measurement_s']:.2f} s | {row['plain_ms']:.2f} ms "
            f"| {row['ratio']:.1f}× | {row['peak_gib']:.1f} GiB |"
        )
    total = {
        name: size.steps * sum(row[name] for row in rows) / 1e3 for name in ("step_ms", "floor_ms")
    }
    alone = size.steps * sum(row["networks"] * row["plain_ms"] for row in rows) / 1e3
    print(
        f"All {size.steps:,} steps: {total['step_ms']:.0f} s, floor {total['floor_ms']:.0f} s, "
        f"plain {alone / 60:.0f} min: {alone / total['step_ms']:.1f}×"
    )


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

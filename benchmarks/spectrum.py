"""What the ways to a stable rank buy a probe of weights and a monitored training.

    python -m benchmarks.spectrum [--device cuda|cpu] [--layers 8] [--steps 300] [--json]

Besides the certificate and one Lanczos iteration there are three ways, each switched off in turn:
`graph`, the iteration on large matrices as captured CUDA graphs with kernels of its own;
`squaring`, certificates of many small matrices at once on a GPU; and `refresh`, a warm start from
the vectors of the last measurement.

The probe measures the stable rank of every MLP weight of a random stack of layers (4096 × 11008 and
its transpose on a GPU, 256 × 1024 on a CPU), first all anew, then five times with a small change in
between, as a monitor does. The training is that of `benchmarks.monitor`, timed inside
`monitor.step`.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.monitor import synchronize, train
from joma.probes.spectrum import release, stable, stable_rank, stable_ranks

WAYS = ("graph", "squaring", "refresh")


@contextmanager
def without(way: str | None) -> Iterator[None]:
    """Switch one way to a stable rank off."""
    if way == "graph":
        from joma.probes.spectrum import _graph  # Triton comes with torch's CUDA builds alone

        patch = mock.patch.object(_graph, "iterate", return_value=None)
    elif way == "squaring":
        patch = mock.patch.object(stable, "_SQUARED", 0)
    elif way == "refresh":
        patch = mock.patch.object(stable, "_refreshed", return_value=None)
    else:
        patch = mock.patch.object(stable, "_SQUARED", stable._SQUARED)
    release()
    with patch:
        yield


def weights(device: str, layers: int) -> list[torch.Tensor]:
    """Return the MLP weights of a stack of layers."""
    wide, inner = (4096, 11008) if device == "cuda" else (256, 1024)
    torch.manual_seed(0)
    with torch.device(device):
        pairs = [(nn.Linear(wide, inner), nn.Linear(inner, wide)) for _ in range(layers)]
    return [linear.weight.detach() for pair in pairs for linear in pair]


def probe_seconds(device: str, layers: int) -> tuple[float, float]:
    """Return seconds of the first and of the second pass over all weights."""
    matrices, seconds = weights(device, layers), []
    for _ in range(2):
        synchronize(device)
        start = time.perf_counter()
        stable_ranks(matrices)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


def followed_seconds(device: str, layers: int) -> float:
    """Return the mean seconds of a measurement of all weights that change a little in between."""
    matrices = weights(device, layers)
    last = [stable_rank(matrix, tolerance=7e-3, keep=True) for matrix in matrices]
    total, times = 0.0, 5
    for _ in range(times):
        for matrix in matrices:
            matrix += 1e-4 * matrix.std() * torch.randn_like(matrix)
        synchronize(device)
        start = time.perf_counter()
        for matrix, kept in zip(matrices, last, strict=True):
            stable_rank(matrix, tolerance=7e-3, start=kept)
        synchronize(device)
        total += time.perf_counter() - start
    return total / times


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    for way in (None, *(WAYS if given.device == "cuda" else ("refresh",))):
        with without(way):
            first, second = probe_seconds(given.device, given.layers)
            followed = followed_seconds(given.device, given.layers)
            inside = train(given.device, given.steps, watched=True)["inside"] if given.steps else []
        rows.append(
            {
                "without": way or "nothing",
                "probe s, first": first,
                "probe s": second,
                "measurement of moved weights s": followed,
                "inside monitor.step s": sum(inside),
                "its first measurement s": max(inside[:2], default=0.0),
            }
        )
        if not given.json:
            name, *times = rows[-1].items()
            shown = [f"{what} {seconds:.4g}" for what, seconds in times]
            print(", ".join([f"without {name[1]}", *shown]), flush=True)
    if given.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

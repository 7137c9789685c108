"""A GaLore step of one LLaMA-1B layer next to AdamW's fused step, and the choice of subspaces.

    python -m benchmarks.galore_step [--rank 512] [--bits 8] [--json]

Seven matrices (4 × 2048 × 2048, 3 × 2048 · 5461) in bfloat16 on a GPU. Gradients have singular
values that fall as 1/i, and a first one twenty times the next: stable rank near 1. All optimizers
are timed in one process, in turn; `step()` is called without waiting, as in a training.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from joma.optim import GaLoreAdamW

SHAPES = [(2048, 2048)] * 4 + [(5461, 2048)] * 2 + [(2048, 5461)]
GAP = 200
ROUNDS = 5


def gradient(rows: int, columns: int) -> torch.Tensor:
    """A gradient with a few strong directions and a long tail."""
    length = min(rows, columns)
    left, right = (
        torch.linalg.qr(torch.randn(side, length, device="cuda"))[0] for side in (rows, columns)
    )
    sizes = 1 / torch.arange(1, length + 1, device="cuda").float()
    sizes[0] = 10.0
    return ((left * sizes) @ right.mT).bfloat16()


def parameters() -> list[nn.Parameter]:
    """The matrices of a layer, with gradients."""
    torch.manual_seed(0)
    found = []
    for shape in SHAPES:
        one = nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02)
        one.grad = gradient(*shape)
        found.append(one)
    return found


def per_call(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Milliseconds of a call on the device's clock, and of Python's part of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begun = time.perf_counter()
    start.record()
    for _ in range(count):
        call()
    host = time.perf_counter() - begun
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count, host / count * 1e3


def captured(optimizer: GaLoreAdamW) -> list[float]:
    """The share of the SVD's energy that each subspace captures."""
    shares = []
    for parameter, matrix in optimizer.subspaces():
        assert parameter.grad is not None
        values = torch.linalg.svdvals(parameter.grad.float()).square()
        best = (values[: matrix.rank].sum() / values.sum()).item()
        shares.append((matrix.captured or 0.0) / best)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=512)
    parser.add_argument("--bits", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    plain, ours = parameters(), parameters()
    adamw = torch.optim.AdamW(plain, 1e-4, fused=True)
    settings: dict[str, Any] = {"rank": options.rank, "bits": options.bits, "verbose": False}
    steady = GaLoreAdamW(ours, 1e-4, gap=10**9, **settings)
    turning = GaLoreAdamW(parameters(), 1e-4, gap=1, **settings)
    whole = GaLoreAdamW(parameters(), 1e-4, gap=GAP, **settings)
    for one in (adamw, steady, turning, whole):
        for _ in range(10):
            one.step()
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, one, count in (
            ("adamw", adamw, 200),
            ("galore", steady, 200),
            ("with_refresh", turning, 10),
            ("gap_200", whole, 2 * GAP),
        ):
            device, host = per_call(one.step, count)
            times.setdefault(name, []).append(device)
            times.setdefault(f"{name}_host", []).append(host)
    middle = {name: statistics.median(some) for name, some in times.items()}
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rank": options.rank,
        "bits": options.bits,
        "milliseconds": middle,
        "refresh": middle["with_refresh"] - middle["galore"],
        "step_ratio": middle["galore"] / middle["adamw"],
        "gap_200_ratio": middle["gap_200"] / middle["adamw"],
        "captured_of_svd": min(captured(turning)),
        "all": times,
    }
    if options.json:
        print(json.dumps(record))
        return
    for name, value in middle.items():
        print(f"{name:20} {value:8.3f} ms")
    print(
        f"refresh {record['refresh']:.2f} ms, {record['captured_of_svd']:.4%} of the SVD's energy"
    )
    print(f"step {record['step_ratio']:.3f} × fused AdamW, gap 200 {record['gap_200_ratio']:.3f} ×")


if __name__ == "__main__":
    main()

"""Batches for a whole ensemble at once against a generator that makes one sample after another.

    python -m benchmarks.data [--device auto|cpu|cuda] [--json]

The peer draws with `random.Random`, expands the class in Python sets and lists, and makes tensors
of 128 samples. Ours makes 128 samples (on a GPU also more) for each of 60 members, by the call and,
on a GPU, as a captured CUDA graph; times are the shortest of several repeats. On a CPU both sides
use one thread.
"""

import argparse
import json
import platform
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from joma.data import HBLT, Batch, LatentHierarchy

MEMBERS = 60
BATCH = 128
MARKS = {"cpu": 20, "cuda": 100}


class PlainHierarchy:
    """The peer of `LatentHierarchy`: 20 classes, (10, 20) latents, 99 tokens, 2 children each."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.latents0 = self.different(10, range(1, 100))
        self.latents1 = self.different(20, range(10))
        self.classes = self.different(20, range(20))

    def different(self, count: int, below: range) -> list[tuple[int, ...]]:
        """As many pairs as asked for, none twice."""
        chosen: list[tuple[int, ...]] = []
        while len(chosen) < count:
            candidate = tuple(sorted(self.rng.sample(below, 2)))
            if candidate not in chosen:
                chosen.append(candidate)
        return chosen

    def one(self) -> tuple[Any, ...]:
        """The tokens, the label and the latents, level by level, of one sample."""
        label = self.rng.randrange(20)
        upper = set(self.classes[label])
        lower = {child for latent in upper for child in self.latents1[latent]}
        found = sorted({token for latent in lower for token in self.latents0[latent]})
        tokens = [0] * (30 - len(found)) + found
        return (
            tokens,
            label,
            [latent in lower for latent in range(10)],
            [latent in upper for latent in range(20)],
            [other == label for other in range(20)],
        )


class PlainTree:
    """The peer of `HBLT`: depth 3, branching 3, 20 classes, ρ = .9."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.off = [[self.rng.choice((0.05, 0.95)) for _ in range(3)] for _ in range(20)]

    def one(self) -> tuple[Any, ...]:
        """The tokens, the label and the latents, level by level, of one sample."""
        draw = self.rng.random
        label = self.rng.randrange(20)
        top = [draw() >= off for off in self.off[label]]
        middle = [value ^ (draw() >= 0.95) for value in top for _ in range(3)]
        leaves = [value ^ (draw() >= 0.95) for value in middle for _ in range(3)]
        found = [token for token, value in enumerate(leaves, 1) if value]
        tokens = [0] * (28 - len(found)) + found
        return tokens, label, middle, top, [other == label for other in range(20)]


def plain_batch(peer: PlainHierarchy | PlainTree, device: str) -> list[torch.Tensor]:
    samples = [peer.one() for _ in range(BATCH)]
    return [torch.tensor(column, device=device) for column in zip(*samples, strict=True)]


def seconds_on_clock(call: Callable[[], Any], repeats: int, device: str) -> float:
    """The shortest time of a call that ends on the CPU, or has its work waited for."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def seconds_by_events(call: Callable[[], Any], repeats: int) -> float:
    """The shortest time of ten calls in a row on the GPU, by CUDA events, for one of them."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream())
        for _ in range(10):
            call()
        end.record(torch.cuda.current_stream())
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e4)
    return min(times)


def captured(make: Callable[[torch.Tensor], Batch]) -> Callable[[], None]:
    """A CUDA graph of one batch that also counts the step."""
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        make(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        make(step)
        step += 1
    return graph.replay


def compare(
    name: str,
    peer: PlainHierarchy | PlainTree,
    ours: Callable[[int, int | torch.Tensor], Batch],
    device: str,
) -> list[dict[str, Any]]:
    """Times the peer once, and ours at each size and in each way."""
    plain_batch(peer, device)
    peer_s = seconds_on_clock(lambda: plain_batch(peer, device), 40, device) / BATCH
    rows = []
    for batch in (BATCH,) if device == "cpu" else (BATCH, 10 * BATCH, 100 * BATCH):
        ours(batch, 0)
        if device == "cpu":
            ways = {"call": seconds_on_clock(lambda b=batch: ours(b, 1), 40, device)}
        else:
            step = torch.ones((), dtype=torch.int64, device=device)
            graph = captured(lambda s, b=batch: ours(b, s))
            ways = {
                "call": seconds_by_events(lambda b=batch, s=step: ours(b, s), 10),
                "graph": seconds_by_events(graph, 10),
            }
        for way, seconds in ways.items():
            sample_s = seconds / (MEMBERS * batch)
            rows.append(
                {
                    "what": name,
                    "members": MEMBERS,
                    "batch": batch,
                    "way": way,
                    "batch_s": seconds,
                    "sample_s": sample_s,
                    "peer_sample_s": peer_s,
                    "ratio": peer_s / sample_s,
                    "mark": MARKS[device],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="batches for an ensemble against one by one")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    # Until a process has freed something larger than its batches, as any that trains has, glibc
    # gives their pages back after every batch, and taking them anew is a third of the time.
    torch.zeros(28_000_000, dtype=torch.uint8)
    seeds = range(MEMBERS)
    hierarchy = LatentHierarchy(20, 2, seeds=seeds, device=device)
    tree = HBLT.regular(3, 3, 0.9, 20, seeds=seeds, device=device)
    results = [
        *compare("LatentHierarchy.sample", PlainHierarchy(), hierarchy.sample, device),
        *compare("LatentHierarchy.distinct", PlainHierarchy(), hierarchy.distinct, device),
        *compare("HBLT.sample", PlainTree(), tree.sample, device),
    ]
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    hardware = f"{platform.machine()}, {platform.system()}, one thread"
    if device == "cuda":
        hardware = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {hardware}")
    print("| what | members × batch | by | a batch | a sample | peer, a sample | ratio | mark |")
    print("|---|---|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r['what']} | {r['members']} × {r['batch']:,} | {r['way']} "
            f"| {r['batch_s'] * 1e3:.3f} ms | {r['sample_s'] * 1e9:,.1f} ns "
            f"| {r['peer_sample_s'] * 1e6:.1f} µs | {r['ratio']:,.0f}× | {r['mark']}× |"
        )


if __name__ == "__main__":
    main()

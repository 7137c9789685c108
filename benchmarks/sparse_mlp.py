"""How long an MLP of a 7B model takes on a CPU, dense and with half of its neurons left out.

    python -m benchmarks.sparse_mlp [--threads 1] [--dtype bfloat16] [--sparsity 0.5] [--json]

Both sides in one run, in alternating pairs, medians and the quartiles of the paired ratio. The
sparse side includes its predictor, of the rank-to-width ratio that `joma sparsify fit` has unless
given, and the choice of the largest scores. Several MLPs follow each other, so that no weight is
still in a cache when its turn comes again. Shapes are halved unless `--scale 1` is given. Bytes are
counted beforehand, and what they predict is printed next to what was measured.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from joma.inference.sparsify import (
    RANK_RATIO,
    Predictor,
    kept_of,
    largest,
    rank_of,
    rows_times,
    times_rows,
)

SHAPES = {"gated 4096 x 11008": (4096, 11008, True), "ReLU 4096 x 16384": (4096, 16384, False)}
COPIES, PAIRS = 4, 31


class OneMlp:
    """The weights of one MLP, as the dense and as the sparse side store them."""

    def __init__(self, width: int, neurons: int, gated: bool, given: argparse.Namespace) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=getattr(torch, given.dtype)) / shape[-1] ** 0.5

        self.inputs = [random(neurons, width) for _ in range(2 if gated else 1)]
        self.rows = random(neurons, width)
        self.down = self.rows.T.contiguous()
        self.activation = functional.silu if gated else functional.relu
        rank = rank_of(given.rank_ratio, width)
        shapes = ((rank, width), (rank,), (neurons, rank), (neurons,))
        self.predictor = Predictor(*(random(*it) for it in shapes))
        self.keep = kept_of(neurons, given.sparsity)
        self.bytes = sum(it.nbytes for it in (*self.inputs, self.down))
        self.gathered_bytes = self.bytes * self.keep / neurons + self.predictor.nbytes

    def dense(self, token: Tensor) -> Tensor:
        """The whole MLP."""
        hidden = self.activation(functional.linear(token, self.inputs[0]))
        for up in self.inputs[1:]:
            hidden = hidden * functional.linear(token, up)
        return functional.linear(hidden, self.down)

    def gathered(self, token: Tensor) -> Tensor:
        """The neurons that the predictor chooses, by gathered products."""
        index = largest(self.predictor(token), self.keep)
        hidden = self.activation(rows_times(self.inputs[0], token, index))
        for up in self.inputs[1:]:
            hidden = hidden * rows_times(up, token, index)
        return times_rows(hidden, self.rows, index)


@torch.inference_mode()
def compare(shape: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the times of one shape."""
    width, neurons, gated = SHAPES[shape]
    width, neurons = int(width * given.scale), int(neurons * given.scale)
    mlps = [OneMlp(width, neurons, gated, given) for _ in range(COPIES)]
    token = torch.randn(1, width, dtype=getattr(torch, given.dtype))
    times: dict[str, list[float]] = {"dense": [], "gathered": []}
    for number in range(PAIRS + 2):
        for name in sorted(times, reverse=bool(number % 2)):
            start = time.perf_counter()
            for one in mlps:
                getattr(one, name)(token)
            if number >= 2:
                times[name].append((time.perf_counter() - start) / COPIES)
    ratios = [a / b for a, b in zip(times["dense"], times["gathered"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "shape": f"{'gated' if gated else 'ReLU'} {width} x {neurons}",
        **{f"{name}_ms": 1e3 * statistics.median(found) for name, found in times.items()},
        "speedup": middle,
        "speedup_quartiles": [low, high],
        "predicted_speedup": mlps[0].bytes / mlps[0].gathered_bytes,
    }


def main() -> None:
    """Time every shape and print it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--dtype", default="float32")
    arguments.add_argument("--scale", type=float, default=0.5)
    arguments.add_argument("--sparsity", type=float, default=0.5)
    arguments.add_argument("--rank-ratio", type=float, default=RANK_RATIO)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    found = [compare(shape, given) for shape in SHAPES]
    if given.json:
        print(json.dumps({**vars(given), "mlps": found}, indent=2))
        return
    print(f"{given.threads} threads, {given.dtype}, {given.sparsity:.0%} of the neurons left out")
    for one in found:
        low, high = one["speedup_quartiles"]
        print(
            f"{one['shape']}: dense {one['dense_ms']:.3f} ms, gathered {one['gathered_ms']:.3f} "
            f"ms, {one['speedup']:.2f} x faster (quartiles {low:.2f} to {high:.2f}), by bytes "
            f"{one['predicted_speedup']:.2f} x"
        )


if __name__ == "__main__":
    main()

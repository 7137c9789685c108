"""How long an MLP of the size of a 7B model takes, dense and with half of its neurons left out.

    python -m benchmarks.sparse_mlp [--device cuda] [--batch 1 8] [--sparsity 0.5] [--json]

Both sides in one run, in alternating pairs, medians and the quartiles of the paired ratio. The
sparse side includes its predictor, of the rank-to-width ratio that `joma sparsify fit` has unless
given, and the choice of the largest scores. Several MLPs follow each other, so that no weight is
still in a cache when its turn comes again. On a GPU both sides are replayed as CUDA graphs in
bfloat16. On a CPU shapes are halved unless `--scale 1` is given. Bytes are counted beforehand, and
what they predict is printed next to what was measured.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(eq=False)
class OneMlp:
    """The weights of one MLP, as the dense and as the sparse side store them."""

    inputs: list[Tensor]
    down: Tensor
    down_rows: Tensor
    predictor: Predictor
    keep: int

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """SiLU where there is a gate, ReLU where there is none."""
        return functional.silu if len(self.inputs) == 2 else functional.relu

    def dense(self, tokens: Tensor, state: Tensor) -> Tensor:
        """The whole MLP."""
        hidden = self.activation(functional.linear(tokens, self.inputs[0]))
        if len(self.inputs) == 2:
            hidden = hidden * functional.linear(tokens, self.inputs[1])
        return functional.linear(hidden, self.down)

    def choose(self, tokens: Tensor, state: Tensor) -> Tensor:
        """The predictor, and the numbers of the largest scores."""
        return largest(self.predictor(state), self.keep)

    def gathered(self, tokens: Tensor, state: Tensor) -> Tensor:
        """The neurons that were chosen, by gathered products."""
        index = self.choose(tokens, state)
        hidden = self.activation(rows_times(self.inputs[0], tokens, index))
        if len(self.inputs) == 2:
            hidden = hidden * rows_times(self.inputs[1], tokens, index)
        return times_rows(hidden, self.down_rows, index)

    def masked(self, tokens: Tensor, state: Tensor) -> Tensor:
        """All neurons, and those that were not chosen set to zero."""
        index = self.choose(tokens, state)
        mask = torch.zeros(
            len(tokens), len(self.inputs[0]), dtype=tokens.dtype, device=tokens.device
        )
        mask.scatter_(1, index, 1.0)
        hidden = self.activation(functional.linear(tokens, self.inputs[0]))
        if len(self.inputs) == 2:
            hidden = hidden * functional.linear(tokens, self.inputs[1])
        return functional.linear(hidden * mask, self.down)


def make(
    width: int, neurons: int, gated: bool, sparsity: float, ratio: float, where: dict[str, Any]
) -> OneMlp:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, **where) / shape[-1] ** 0.5

    inputs = [random(neurons, width) for _ in range(2 if gated else 1)]
    down_rows = random(neurons, width)
    rank = rank_of(ratio, width)
    parts = (random(rank, width), random(1, rank)[0], random(neurons, rank), random(1, neurons)[0])
    down = down_rows.T.contiguous()
    return OneMlp(inputs, down, down_rows, Predictor(*parts), kept_of(neurons, sparsity))


def count_bytes(one: OneMlp, tokens: int) -> dict[str, float]:
    """Bytes of weights each side reads: gathered rows once for every token."""
    neurons = len(one.inputs[0])
    dense = sum(it.nbytes for it in one.inputs) + one.down.nbytes
    gathered = tokens * dense * one.keep / neurons + one.predictor.nbytes
    return {
        "dense_bytes": dense,
        "predictor_bytes": one.predictor.nbytes,
        "gathered_bytes": gathered,
        "predicted_speedup": dense / gathered,
    }


def repeated(
    mlps: list[OneMlp], method: str, tokens: Tensor, state: Tensor, device: str
) -> Callable[[], None]:
    """A call that runs every MLP once by one method; on a GPU the replay of a CUDA graph."""

    def run() -> None:
        for one in mlps:
            getattr(one, method)(tokens, state)

    if device == "cpu":
        return run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds(run: Callable[[], None], device: str, clock: str) -> float:
    if device == "cpu":
        now = time.process_time if clock == "process" else time.perf_counter
        start = now()
        run()
        return now() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


@torch.inference_mode()
def compare(shape: str, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    width, neurons, gated = SHAPES[shape]
    width, neurons = (int(size * given.scale) for size in (width, neurons))
    where = {"device": given.device, "dtype": getattr(torch, given.dtype)}
    mlps = [
        make(width, neurons, gated, given.sparsity, given.rank_ratio, where)
        for _ in range(given.copies)
    ]
    tokens, state = torch.randn(batch, width, **where), torch.randn(batch, width, **where)
    apart = mlps[0].gathered(tokens, state).float() - mlps[0].masked(tokens, state).float()
    error = float(apart.norm() / mlps[0].masked(tokens, state).float().norm())
    methods = ("dense", "gathered", "masked", "choose")
    runs = {name: repeated(mlps, name, tokens, state, given.device) for name in methods}
    times: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(given.pairs + 2):
        # The order turns in every round, so that none always follows the same.
        for name in (*methods[number % 4 :], *methods[: number % 4]):
            took = seconds(runs[name], given.device, given.clock) / given.copies
            if number >= 2:
                times[name].append(took)
    ratios = [a / b for a, b in zip(times["dense"], times["gathered"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "shape": f"{'gated' if gated else 'ReLU'} {width} x {neurons}",
        "batch": batch,
        **{f"{name}_ms": 1e3 * statistics.median(times[name]) for name in methods},
        "speedup": middle,
        "speedup_quartiles": [low, high],
        **count_bytes(mlps[0], batch),
        "relative_error": error,
        "rank": mlps[0].predictor.rank,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    arguments.add_argument("--scale", type=float, help="default: 1 on a GPU, 0.5 on a CPU")
    arguments.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    arguments.add_argument("--sparsity", type=float, default=0.5)
    arguments.add_argument("--rank-ratio", type=float, default=RANK_RATIO)
    arguments.add_argument("--copies", type=int, default=4, help="MLPs that follow each other")
    arguments.add_argument("--pairs", type=int, default=31)
    arguments.add_argument("--threads", type=int, help="of a CPU")
    arguments.add_argument(
        "--clock",
        choices=("wall", "process"),
        default="wall",
        help="process: the CPU time of all threads, for one thread on a machine that others use",
    )
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    on_cpu = given.device == "cpu"
    given.dtype = given.dtype or ("float32" if on_cpu else "bfloat16")
    given.scale = given.scale or (0.5 if on_cpu else 1.0)
    if given.threads:
        torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    name = f"CPU, {torch.get_num_threads()} threads" if on_cpu else torch.cuda.get_device_name()
    found = [compare(shape, batch, given) for shape in SHAPES for batch in given.batch]
    result = {"device": name, "dtype": given.dtype, "sparsity": given.sparsity}
    result["clock"] = given.clock if on_cpu else "CUDA events"
    result |= {"rank_ratio": given.rank_ratio, "pairs": given.pairs, "mlps": found}
    if given.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{name}, {given.dtype}, {given.sparsity:.0%} of the neurons left out")
    for one in found:
        low, high = one["speedup_quartiles"]
        print(
            f"{one['shape']}, batch {one['batch']}: dense {one['dense_ms']:.3f} ms, gathered "
            f"{one['gathered_ms']:.3f} ms ({one['choose_ms']:.3f} ms to choose), "
            f"{one['speedup']:.2f} x faster (quartiles {low:.2f} to {high:.2f}), by bytes "
            f"{one['predicted_speedup']:.2f} x; masked {one['masked_ms']:.3f} ms"
        )


if __name__ == "__main__":
    main()

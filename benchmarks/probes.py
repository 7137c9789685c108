"""Attention entropy and stable rank on a GPU, each next to its peers, timed in one run.

    python -m benchmarks.probes [--device cuda|cpu] [--parts NAME,…] [--spectra 1000] [--json]

Attention: 16 heads of 64, bfloat16, causal; the peers are one `scaled_dot_product_attention`
forward, which makes no entropy, and the softmax written out, which makes all of it. Stable rank:
4096 × 11008 float32 with σ_i ∝ i^−½ and Gaussian; the peers are `torch.linalg.svdvals` and thirty
power iterations. Times are medians; those of attention by device events, behind enough work that
the device never waits for a launch, and next to them those of a call; those of spectra by the wall
clock from call to number. Then the bound is tested on random and adversarial spectra, which
is all there is to see on a CPU. With `--parts masks,shapes,random,errors`, on either, attention
with masks and at many sizes: see `benchmarks.attention`.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import attention as masked_attention
from joma.probes import attention_entropy, attention_statistics
from joma.probes.spectrum import stable_rank

HEADS, HEAD, LENGTHS = 16, 64, (2048, 8192, 16384)
ROWS, COLUMNS = 4096, 11008


def by_events(work: Callable[[], Any], repeats: int = 30) -> float:
    """Median milliseconds on the device; the flush of caches in between keeps it busy meanwhile."""
    flush = torch.empty(1 << 32, dtype=torch.int8, device="cuda")
    for _ in range(5):
        work()
    pairs = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def by_clock(work: Callable[[], Any], repeats: int = 21) -> float:
    """Median milliseconds from call to answer."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def extra_memory(work: Callable[[], Any]) -> float:
    """MiB beyond what was there before, at the most."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = work()
    torch.cuda.synchronize()
    del out
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def materialised(query: Tensor, key: Tensor) -> Tensor:
    """Entropy from the whole attention matrix, as one writes it down."""
    length = query.shape[-2]
    score = (query.float() @ key.float().mT) * HEAD**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
    share = score.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.special.entr(share).sum(-1)


def attention() -> list[dict[str, Any]]:
    rows = []
    for length in LENGTHS:
        dice = torch.Generator("cuda").manual_seed(length)
        shape = (1, HEADS, length, HEAD)
        q, k, v = (torch.randn(shape, generator=dice, device="cuda").bfloat16() for _ in range(3))
        peer = by_events(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))  # noqa: B023
        entropy = by_events(lambda: attention_entropy(q, k))  # noqa: B023
        received = by_events(lambda: attention_statistics(q, k, received=True))  # noqa: B023
        masses = by_events(lambda: attention_statistics(q, k, first=4, last=64))  # noqa: B023
        memory = extra_memory(lambda: attention_statistics(q, k, received=True))  # noqa: B023
        whole = by_events(lambda: materialised(q, k), 5)  # noqa: B023
        few = slice(0, 2048)
        error = (attention_entropy(q[:, :, few], k[:, :, few]).double()
                 - _exact_entropy(q[:, :, few], k[:, :, few])).abs().max()  # fmt: skip
        rows.append(
            {
                "T": length,
                "sdpa ms": peer,
                "entropy ms": entropy,
                "× sdpa": entropy / peer,
                "with received ms": received,
                "received × sdpa": received / peer,
                "with first and last ms": masses,
                "materialised ms": whole,
                "entropy, call ms": by_clock(lambda: attention_entropy(q, k)),  # noqa: B023
                "sdpa, call ms": by_clock(
                    lambda: scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: B023
                ),
                "extra MiB": memory,
                "largest error": float(error),
            }
        )
    return rows


def _exact_entropy(query: Tensor, key: Tensor) -> Tensor:
    score = (query.double() @ key.double().mT) * HEAD**-0.5
    length = query.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
    return torch.special.entr(score.masked_fill(hidden, -torch.inf).softmax(-1)).sum(-1)


def power_iterations(matrix: Tensor) -> float:
    """Thirty power iterations with one vector."""
    x = torch.randn(matrix.shape[0], device="cuda")
    for _ in range(30):
        x = matrix @ (matrix.mT @ x)
        x = x / x.norm()
    return float(matrix.norm() ** 2 / (matrix.mT @ x).norm() ** 2)


def spectra() -> list[dict[str, Any]]:
    dice = torch.Generator("cuda").manual_seed(0)
    plain = torch.randn(ROWS, COLUMNS, generator=dice, device="cuda")
    left = torch.linalg.qr(torch.randn(ROWS, ROWS, generator=dice, device="cuda")).Q
    right = torch.linalg.qr(torch.randn(COLUMNS, ROWS, generator=dice, device="cuda")).Q
    falling = (left * torch.arange(1, ROWS + 1, device="cuda") ** -0.5) @ right.mT
    rows = []
    for name, matrix in (("sigma_i = i^-1/2", falling), ("Gaussian", plain)):
        true = _true(matrix)
        change = torch.randn(ROWS, COLUMNS, generator=dice, device="cuda")
        moved = matrix + change * (1e-3 * matrix.norm() / change.norm())
        kept = stable_rank(matrix, keep=True)
        runs: list[tuple[str, Callable[[], Any], float]] = [
            ("ours, bound 1e-3", lambda: stable_rank(matrix), true),  # noqa: B023
            ("ours, bound 7e-3", lambda: stable_rank(matrix, tolerance=7e-3), true),  # noqa: B023
            ("ours, warm start", lambda: stable_rank(moved, start=kept), _true(moved)),  # noqa: B023
            ("ours, certificate", lambda: stable_rank(matrix, method="exact"), true),  # noqa: B023
            ("30 power iterations", lambda: power_iterations(matrix), true),  # noqa: B023
            ("svdvals", lambda: _by_svd(matrix), true),  # noqa: B023
        ]
        for how, work, right_value in runs:
            found = work()
            value = getattr(found, "value", found)
            bound = getattr(found, "bound", None)
            slow = how in ("svdvals", "ours, certificate")
            rows.append(
                {
                    "matrix": name,
                    "how": how,
                    "ms": by_clock(work, 3 if slow else 21),
                    "relative error": abs(value - right_value) / right_value,
                    "bound": None if bound is None else bound / value,
                }
            )
    return rows


def _true(matrix: Tensor) -> float:
    wide = matrix.double()
    squares = torch.linalg.eigvalsh(wide @ wide.mT)
    return float(squares.sum() / squares[-1])


def _by_svd(matrix: Tensor) -> float:
    values = torch.linalg.svdvals(matrix)
    return float(values.square().sum() / values[0] ** 2)


def bounds(count: int, device: str) -> list[dict[str, Any]]:
    """How often a bound is met, each spectrum with a start of its own."""
    side = 1024 if device == "cuda" else 512
    place = torch.arange(side, dtype=torch.float64)
    dice = torch.Generator().manual_seed(1)
    outside, certain, worst = 0, 0, 0.0
    for trial in range(count):
        kind = trial % 8
        top = int(torch.randint(1, 40, (), generator=dice))
        gap = float(torch.rand((), generator=dice)) ** 3
        decay = 3 * float(torch.rand((), generator=dice))
        squares = {
            0: torch.where(place < top, 1.0, (1 - gap) * (1 + place - top).clamp(min=1) ** -decay),
            1: torch.where(place < 1, 1.0, 1 - gap),
            2: (1 - place / side) ** (2 / 3 + decay),
            3: torch.exp(-place * gap),
            4: torch.where(place < top, 1.0, 1e-6 * gap),
            5: torch.rand(side, generator=dice, dtype=torch.float64) ** (1 + decay),
            6: (1 + place) ** -decay,
            7: torch.zeros(side) if trial % 80 == 7 else torch.where(place < 1, 1.0, 0.0),
        }[kind].double()  # fmt: skip
        matrix = torch.zeros(side, side, device=device)
        matrix.diagonal().copy_(squares.sqrt())
        found = stable_rank(matrix, method="lanczos", seed=trial)
        stored = matrix.diagonal().double().square()
        true = float(stored.sum() / stored.amax()) if float(stored.amax()) else 0.0
        off = abs(found.value - true)
        outside += off > found.bound + 1e-7 * true
        certain += found.certain
        worst = max(worst, off / found.bound if found.bound else 0.0)
    row = {"spectra": count, "values each": side, "outside": outside, "certified": certain}
    return [row | {"worst error over bound": worst}]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--spectra", type=int, default=1000)
    arguments.add_argument(
        "--parts", help="of masks, shapes, random, errors; all others without it"
    )
    arguments.add_argument("--most", type=float, default=math.inf, help="scores of a shape")
    arguments.add_argument("--seconds", type=float, default=0.15, help="spent on a shape")
    arguments.add_argument("--cases", type=int, default=200, help="of the part `random`")
    arguments.add_argument("--seed", type=int, default=0, help="of the part `random`")
    arguments.add_argument("--threads", type=int, default=1, help="of a CPU")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    parts: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {}
    if given.device == "cuda":
        parts = {"attention": attention, "stable rank": spectra}
    parts["bounds"] = lambda: bounds(given.spectra, given.device)
    if given.parts:
        names = given.parts.split(",")
        more: dict[str, dict[str, Any]] = {"shapes": {"most": given.most, "seconds": given.seconds}}
        more["random"] = {**more["shapes"], "cases": given.cases, "seed": given.seed}
        parts = {
            name: partial(getattr(masked_attention, name), given.device, **more.get(name, {}))
            for name in names
        }
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__}
    if not given.json:
        print(result["device"], "torch", result["torch"], flush=True)
    for name, part in parts.items():
        result[name] = []
        for row in part():
            result[name].append(row)
            if not given.json:
                print("  ", ", ".join(f"{k} {_short(v)}" for k, v in row.items()), flush=True)
    if given.json:
        print(json.dumps(result, indent=1))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

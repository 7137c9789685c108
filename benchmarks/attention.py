"""Attention statistics with masks and at many sizes, next to what one would write instead.

    python -m benchmarks.probes --parts masks,shapes,random,errors [--device cuda|cpu]

`masks`: boolean and additive masks, padding, windows and softcaps at T = 2,048 and 8,192 (512 and
1,024 on a CPU), 16 heads of 64, bfloat16. The peers are one `scaled_dot_product_attention` given
the same mask (it has no softcap: there the causal one), and one without a mask, causal.

`shapes`: 20 shapes from 2¹⁴ to 2³⁰ scores (2²⁶ on a CPU), with each of these and without. The peer
is softmax and entropy written out in plain operations, in the faster of two ways.

`random`: next to the same peer, shapes, masks and types drawn at random (`--cases`, `--seed`), to
2²⁴ scores; the last row counts those that are slower, and says what the slowest takes.

`errors`: the largest error of entropies against float64.

Both sides are timed in turns, and the ratio is the median over the pairs: on a GPU by device events
behind enough work that the device never waits for a launch, and by the clock from call to answer;
on a CPU by the process's time with one thread, and by the clock with several.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from joma.probes import attention_entropy, attention_statistics

SHAPES = (
    (1, 1, 1, 128, 128, 64), (1, 4, 4, 64, 64, 32), (2, 4, 4, 64, 64, 64),
    (1, 4, 4, 128, 128, 64), (1, 16, 16, 1, 4096, 64), (2, 8, 2, 128, 128, 64),
    (1, 4, 4, 256, 256, 64), (1, 16, 4, 256, 256, 64), (1, 4, 4, 512, 512, 128),
    (4, 8, 8, 16, 2048, 64), (1, 12, 12, 512, 512, 64), (8, 12, 12, 256, 256, 64),
    (2, 8, 8, 1024, 512, 64), (1, 32, 8, 512, 512, 128), (1, 16, 16, 1024, 1024, 64),
    (1, 4, 4, 2048, 2048, 64), (2, 8, 8, 1448, 1448, 64), (1, 16, 16, 2048, 2048, 64),
    (1, 32, 8, 3000, 3000, 128), (1, 16, 16, 8192, 8192, 64),
)  # fmt: skip
"""Sequences, heads of queries and of keys, queries, keys, head size."""
SMALLER = ((1, 2, 1, 2048, 4096, 64), (4, 16, 4, 1000, 1000, 64))
"""In place of the last two on a CPU."""
KINDS = ("causal", "bidirectional", "bool", "added", "padding", "window", "softcap")
WITH_MASKS = ("causal", "bool", "added", "biased", "padding", "window", "softcap")
"""`added` is a causal mask of 0 and −∞; `biased` adds another number for each distance."""
SOFTCAP = 50.0

Work = Callable[[], Any]


def drawn(shape: tuple[int, ...], kind: str, dtype: torch.dtype, device: str) -> Any:
    """Queries, keys and options of a case."""
    B, H, Hk, T, S, D = shape
    dice = torch.Generator(device).manual_seed(T)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=dice, device=device)

    q, k = normal(B, H, T, D).to(dtype), normal(B, Hk, S, D).to(dtype)
    past = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
    real = torch.ones(B, S, dtype=torch.bool, device=device)
    real[:, : S // 5] = False
    if kind == "bool":
        return q, k, {"causal": False, "mask": (past & (normal(T, S) > -1.5))[None, None]}
    if kind in ("added", "biased"):
        added = torch.zeros(B, 1, T, S, device=device)
        if kind == "biased":
            added -= 0.01 * (torch.arange(T, device=device)[:, None] + S - T) - 0.01 * torch.arange(
                S, device=device
            )
        added.masked_fill_(~past, -torch.inf)
        return q, k, {"causal": False, "mask": added.to(dtype)}
    options = {
        "bidirectional": {"causal": False},
        "padding": {"padding": real},
        "window": {"window": max(1, S // 8)},
        "softcap": {"softcap": SOFTCAP},
    }
    return q, k, options.get(kind, {})


def hidden(q: Tensor, k: Tensor, given: dict[str, Any]) -> Tensor | None:
    """What is hidden, as one boolean mask."""
    T, S = q.shape[-2], k.shape[-2]
    parts = []
    ones = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if given.get("causal", True):
        parts.append(ones.triu(S - T + 1))
    if "window" in given:
        parts.append(ones.tril(S - T - given["window"]))
    if "padding" in given:
        parts.append(~given["padding"][:, None, None])
    if "mask" in given and given["mask"].dtype == torch.bool:
        parts.append(~given["mask"])
    if not parts:
        return None
    found = parts[0]
    for part in parts[1:]:
        found = found | part
    return found


def scores(q: Tensor, k: Tensor, given: dict[str, Any]) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, 1) if group > 1 else k
    found = (q @ k.mT) * q.shape[-1] ** -0.5
    if "softcap" in given:
        found = given["softcap"] * torch.tanh(found / given["softcap"])
    if "mask" in given and given["mask"].dtype != torch.bool:
        found = found + given["mask"]
    return found


def written_out(q: Tensor, k: Tensor, given: dict[str, Any], *, logs: bool = False) -> Tensor:
    """Entropy from the whole attention matrix, as one writes it down; float64 stays what it is."""
    wide = torch.promote_types(q.dtype, torch.float32)
    found, unseen = scores(q.to(wide), k.to(wide), given), hidden(q, k, given)
    if unseen is not None:
        found = found.masked_fill(unseen, -1e30 if logs else -torch.inf)
    if logs:
        log = found.log_softmax(-1)
        return -(log.exp() * log).sum(-1)
    return torch.special.entr(found.softmax(-1)).sum(-1)


def in_turns(device: str, ours: Work, peer: Work, seconds: float = 0.15) -> dict[str, float]:
    """Medians of both in milliseconds, and of the ratio of the pairs."""
    found = {}
    for name, clock in _clocks(device).items():
        for _ in range(3):
            ours()
            peer()
        start = time.perf_counter()
        clock(ours)
        clock(peer)
        took = time.perf_counter() - start
        pairs = max(5, min(51, int(seconds / took)))
        times = [(clock(ours), clock(peer)) for _ in range(pairs)]
        found |= {
            f"{name} ms": statistics.median(a for a, _ in times),
            f"{name} peer ms": statistics.median(b for _, b in times),
            f"{name} ratio": statistics.median(a / b for a, b in times),
        }
    return found


def _clocks(device: str) -> dict[str, Callable[[Work], float]]:
    if device == "cuda":
        return {"device": _by_events, "call": _by_clock}
    tick = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    return {"cpu": lambda work: _repeated(work, tick)}


def _by_events(work: Work) -> float:
    """Milliseconds on the device, which is busy while the work is launched."""
    torch.empty(1 << 28, dtype=torch.int8, device="cuda").zero_()
    torch.cuda._sleep(2_000_000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _by_clock(work: Work) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _repeated(work: Work, tick: Callable[[], float]) -> float:
    """Milliseconds, over so many calls that the clock can see them."""
    start, count = tick(), 0
    while True:
        work()
        count += 1
        took = tick() - start
        if took > 1e-3:
            return took / count * 1e3


def masks(device: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each length and kind of mask."""
    for length in (2048, 8192) if device == "cuda" else (512, 1024):
        for kind in WITH_MASKS:
            shape = (1, 16, 16, length, length, 64)
            q, k, given = drawn(shape, kind, torch.bfloat16, device)
            value = torch.randn_like(k)
            mask = given.get("mask")
            if mask is None and kind in ("padding", "window"):
                unseen = hidden(q, k, given)
                assert unseen is not None
                mask = ~unseen
                mask = mask | ~mask.any(-1, keepdim=True)  # a row without a key would be NaN

            def ours(q: Tensor = q, k: Tensor = k, given: Any = given) -> Any:
                return attention_statistics(q, k, **given)

            def peer(q: Tensor = q, k: Tensor = k, v: Any = value, mask: Any = mask) -> Any:
                return scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)

            def flash(q: Tensor = q, k: Tensor = k, v: Any = value) -> Any:
                return scaled_dot_product_attention(q, k, v, is_causal=True)

            row = {"T": length, "with": kind} | in_turns(device, ours, peer)
            causal = in_turns(device, ours, flash)
            row |= {f"causal sdpa, {k}": v for k, v in causal.items() if k.endswith("ratio")}
            yield row


def shapes(device: str, most: float = math.inf, seconds: float = 0.15) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape of at most so many scores, kind of mask, and type."""
    every = SHAPES if device == "cuda" else (*SHAPES[:-2], *SMALLER)
    for shape in sorted(every, key=_count):
        for kind in KINDS if _count(shape) <= most else ():
            for dtype in (torch.float32, torch.bfloat16):
                yield _next_to_written_out(shape, kind, dtype, device, seconds)


def random(
    device: str, most: float = math.inf, seconds: float = 0.15, cases: int = 200, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield a row for each of so many cases drawn at random, and one that counts the slower."""
    dice, rows = Random(seed), list[dict[str, Any]]()
    clock = next(name for name in _clocks(device))
    while len(rows) < cases:
        kind, dtype = dice.choice(KINDS), dice.choice((torch.float32, torch.bfloat16))
        head, group, heads = (2 ** dice.randint(*ends) for ends in ((5, 7), (0, 2), (0, 3)))
        scores = 2 ** dice.uniform(14, math.log2(min(most, 2**24)))
        queries = max(1, round(min(2 ** dice.uniform(0, 12), scores**0.5)))
        keys = round(scores / (group * heads * queries))
        if queries <= keys <= 2**17:  # others are rare in models
            shape = (1, group * heads, heads, queries, keys, head)
            rows.append(_next_to_written_out(shape, kind, dtype, device, seconds))
            yield rows[-1]
    ratios = [row[f"{clock} ratio"] for row in rows]
    yield {
        "cases": len(rows),
        "slower": sum(ratio > 1 for ratio in ratios),
        "slower by more than 5%": sum(ratio > 1.05 for ratio in ratios),
        "slowest": max(ratios),
        "median": statistics.median(ratios),
    }


def _next_to_written_out(
    shape: tuple[int, ...], kind: str, dtype: torch.dtype, device: str, seconds: float
) -> dict[str, Any]:
    """Return a case and its times next to those of the faster way to write it out."""
    q, k, given = drawn(shape, kind, dtype, device)

    def ours() -> Any:
        return attention_statistics(q, k, **given)

    def peer() -> Any:
        return written_out(q, k, given)

    def other() -> Any:
        return written_out(q, k, given, logs=True)

    with torch.no_grad():
        clock = next(name for name in _clocks(device))
        faster = in_turns(device, other, peer, seconds / 3)[f"{clock} ratio"] < 1
        found = in_turns(device, ours, other if faster else peer, seconds)
    row = {"shape": shape, "scores": _count(shape), "with": kind, "type": str(dtype)}
    return row | found


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1] * shape[3] * shape[4]


def errors(device: str) -> Iterator[dict[str, Any]]:
    """Yield the largest error of each shape, kind of mask, and type."""
    for shape in ((1, 4, 2, 640, 640, 64), (1, 2, 2, 200, 777, 128), (2, 2, 1, 100, 100, 64)):
        for kind in KINDS:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                q, k, given = drawn(shape, kind, dtype, device)
                if "mask" in given and given["mask"].dtype != torch.bool:
                    given["mask"] = given["mask"].float()
                wide = written_out(q.double(), k.double(), given)
                off = (attention_entropy(q, k, **given).double() - wide.nan_to_num(0)).abs().max()
                yield {"shape": shape, "with": kind, "type": str(dtype), "error": float(off)}

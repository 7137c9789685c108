"""Attention statistics and stable ranks, each next to its peers, timed in one run.

    python -m benchmarks.probes [--device cuda|cpu] [--parts plain,masks,shapes,spectra,bounds]

`plain`: 16 heads of 64, bfloat16, causal, next to one `scaled_dot_product_attention` forward, which
makes no entropy, and with masses and with received mass. `masks`: masks, padding, windows and
softcaps, next to it given the same mask (it has no softcap: there the causal one), and next to the
causal one. `shapes`: sizes from 2¹⁴ scores on, next to softmax and entropy written out.
`spectra`: stable ranks of spectra that weights have, at bounds of 1e-2 and 1e-3, refreshed, and by
certificate; 4096 × 11008 on a GPU. `bounds`: random spectra, how often the truth lies outside the
bound (never) and how often the bound is wider than the tolerance (never).

Both sides are timed in turns, and the ratio is the median over the pairs: on a GPU by device events
behind enough work that the device never waits for a launch, and by the clock from call to answer;
on a CPU by the process's time. All of it are medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from joma.probes import attention_entropy, attention_statistics, stable_rank, stable_ranks

SHAPES = (
    (1, 1, 1, 128, 128, 64), (1, 4, 4, 64, 64, 32), (2, 4, 4, 64, 64, 64),
    (1, 4, 4, 128, 128, 64), (1, 16, 16, 1, 4096, 64), (2, 8, 2, 128, 128, 64),
    (1, 4, 4, 256, 256, 64), (1, 16, 4, 256, 256, 64), (1, 4, 4, 512, 512, 128),
    (4, 8, 8, 16, 2048, 64), (1, 12, 12, 512, 512, 64), (8, 12, 12, 256, 256, 64),
    (2, 8, 8, 1024, 512, 64), (1, 32, 8, 512, 512, 128), (1, 16, 16, 1024, 1024, 64),
    (1, 4, 4, 2048, 2048, 64), (2, 8, 8, 1448, 1448, 64), (1, 16, 16, 2048, 2048, 64),
    (1, 32, 8, 3000, 3000, 128), (1, 16, 16, 8192, 8192, 64),
)  # fmt: skip
"""Sequences, heads of queries and of keys, queries, keys, head size; the last two on a GPU."""
KINDS = ("causal", "bidirectional", "bool", "added", "padding", "window", "softcap")
WITH_MASKS = ("causal", "bool", "added", "biased", "padding", "window", "softcap")
"""`added` is a causal mask of 0 and −∞; `biased` adds another number for each distance."""
SOFTCAP = 50.0

TOLERANCE = 1e-3

Work = Callable[[], Any]
Rows = Iterator[dict[str, Any]]


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


def plain(device: str) -> Rows:
    """Yield a row for each length: entropy, masses and received mass, causal and nothing else."""
    for length in (2048, 8192, 16384) if device == "cuda" else (512,):
        shape = (1, 16, 16, length, length, 64)
        q, k, _ = drawn(shape, "causal", torch.bfloat16, device)
        row: dict[str, Any] = {"T": length}
        every: dict[str, dict[str, Any]] = {
            "entropy": {},
            "masses": {"first": 4, "last": 64},
            "received": {"received": True},
        }
        for name, asked in every.items():
            found = in_turns(
                device,
                lambda: attention_statistics(q, k, **asked),  # noqa: B023
                lambda: scaled_dot_product_attention(q, k, k, is_causal=True),  # noqa: B023
            )
            row |= {f"{name}, {what}": value for what, value in found.items()}
        short = q[..., :2048, :], k[..., :2048, :]
        exact = written_out(short[0].double(), short[1].double(), {})
        row["largest error"] = float((attention_entropy(*short).double() - exact).abs().max())
        yield row


def masks(device: str) -> Rows:
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


def shapes(device: str) -> Rows:
    """Yield a row for each shape, kind and type, next to the faster way to write it out."""
    for shape in SHAPES if device == "cuda" else SHAPES[:-2]:
        for kind in KINDS:
            for dtype in (torch.float32, torch.bfloat16):
                q, k, given = drawn(shape, kind, dtype, device)
                with torch.no_grad():
                    found = [
                        in_turns(
                            device,
                            lambda: attention_statistics(q, k, **given),  # noqa: B023
                            lambda: written_out(q, k, given, logs=logs),  # noqa: B023
                        )
                        for logs in (False, True)
                    ]
                slower = max(found, key=lambda row: next(v for n, v in row.items() if "ratio" in n))
                yield {"shape": shape, "with": kind, "type": str(dtype)} | slower


class Dice:
    """Random matrices of one seed on a device."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def gaussian(self, rows: int, columns: int) -> Tensor:
        """Return independent normal numbers."""
        return torch.randn(rows, columns, generator=self._generator, device=self._device)

    def uniform(self, low: float, high: float) -> float:
        """Return a number between two."""
        return low + (high - low) * float(
            torch.rand((), generator=self._generator, device=self._device)
        )

    def whole(self, low: int, high: int) -> int:
        """Return a whole number between two, both included."""
        return int(self.uniform(low, high + 1 - 1e-9))

    def orthonormal(self, rows: int, columns: int) -> Tensor:
        """Return orthonormal columns in random directions."""
        return torch.linalg.qr(self.gaussian(rows, columns)).Q

    def noisy(self, rows: int, columns: int, top: Tensor, noise: float) -> Tensor:
        """Return a matrix of these singular values plus Gaussian noise, a share of the last."""
        left = self.orthonormal(rows, len(top)) * top.to(self._device)
        low_rank = left @ self.orthonormal(columns, len(top)).mT
        size = noise * float(top[-1]) / (rows**0.5 + columns**0.5)
        return low_rank.add_(self.gaussian(rows, columns), alpha=size)

    def with_values(self, columns: int, values: Tensor) -> Tensor:
        """Return a matrix with these singular values, as many rows, in random directions."""
        rows = len(values)
        left = self.orthonormal(rows, rows) * values.float().to(self._device)
        return left @ self.orthonormal(columns, rows).mT


def listed(rows: int, columns: int, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the spectra that are timed."""
    dice = Dice(0, device)
    place = torch.arange(1, min(rows, columns) + 1, dtype=torch.float64)
    for noise in (0.1, 0.5, 0.9, 0.01):
        yield f"rank 8 + noise {noise}", dice.noisy(rows, columns, torch.ones(8), noise)
    spread = torch.arange(1, 9) ** -0.5
    yield "rank 8, σ ∝ i^−½, + noise 0.5", dice.noisy(rows, columns, spread, 0.5)
    yield "rank 1 + noise 0.5", dice.noisy(rows, columns, torch.ones(1), 0.5)
    yield "rank 64 + noise 0.5", dice.noisy(rows, columns, torch.ones(64), 0.5)
    yield "rank 8", dice.noisy(rows, columns, torch.ones(8), 0.0)
    yield "Gaussian", dice.gaussian(rows, columns)
    wide = (lambda values: dice.with_values(columns, values)) if rows <= columns else (
        lambda values: dice.with_values(rows, values).mT
    )  # fmt: skip
    yield "σ ∝ i^−½", wide(place**-0.5)
    yield "σ ∝ 1/i", wide(1 / place)
    yield "σ ∝ exp(−i/50)", wide(torch.exp(-place / 50))
    for count, gap in ((2, 1e-4), (2, 1e-6), (2, 0.0), (8, 0.0), (32, 0.0)):
        values = 0.5 * place**-0.25
        values[:count] = 1 - gap * torch.arange(count)
        yield f"{count} top values {gap:g} apart", wide(values)


def drawn_matrix(trial: int, device: str, low: int = 200, high: int = 1500) -> Tensor:
    """Return one of the matrices whose bounds are tested, its shorter side from `low` to `high`."""
    dice = Dice(trial, device)
    side = dice.whole(low, high)
    other = dice.whole(side, min(2 * side, side + 400))
    place = torch.arange(side, dtype=torch.float64)
    top, gap, decay = dice.whole(1, 40), dice.uniform(0, 1) ** 3, dice.uniform(0, 3)
    noise = 10 ** dice.uniform(-4, 0)
    kind = trial % 10
    if kind < 3:  # some equal, some apart by little, some decaying
        values = 1 - gap * (kind > 0) * torch.arange(top) / top
        matrix = dice.noisy(side, other, values if kind < 2 else values**8, noise)
    elif kind == 3:
        matrix = dice.gaussian(side, other)
    elif kind == 4:
        squares = torch.where(
            place < top, 1.0, (1 - gap) * (1 + place - top).clamp(min=1) ** -decay
        )
        matrix = dice.with_values(other, squares.sqrt())
    elif kind == 5:
        matrix = dice.with_values(other, torch.where(place < 1, 1.0, 1 - gap))
    else:
        squares = {
            6: torch.exp(-place * gap),
            7: (1 + place) ** -decay,
            8: (1 - place / side) ** (2 / 3 + decay),
            9: torch.where(place < top % 5, 1.0, gap * 1e-6 * (trial % 20 < 10)),
        }[kind]
        matrix = torch.zeros(side, other, device=device)
        matrix.diagonal().copy_(squares.sqrt())
    return matrix if trial % 2 else matrix.mT.contiguous()


def true_stable_rank(matrix: Tensor) -> float:
    """Return the stable rank by all eigenvalues of the Gram matrix in float64."""
    wide = matrix.double()
    gram = wide @ wide.mT if matrix.shape[0] <= matrix.shape[1] else wide.mT @ wide
    top = float(torch.linalg.eigvalsh(gram)[-1])
    return float(gram.diagonal().sum()) / top if top > 0 else 0.0


def spectra(device: str) -> Rows:
    """Yield a row for each spectrum: times, bounds, and the distance to the truth."""
    for name, matrix in listed(*((4096, 11008) if device == "cuda" else (512, 1376)), device):
        whole = matrix.contiguous()
        kept = stable_rank(whole, keep=True)
        exact = true_stable_rank(whole)
        row: dict[str, Any] = {"matrix": name}
        for how, work in (
            ("1e-2", lambda: stable_rank(whole, tolerance=1e-2, method="lanczos")),  # noqa: B023
            ("1e-3", lambda: stable_rank(whole, method="lanczos")),  # noqa: B023
            ("refresh", lambda: stable_rank(whole, start=kept)),  # noqa: B023
        ):
            row |= _timed(how, work, device, exact)
        yield row
    dice = Dice(1, device)
    small = [dice.noisy(256, 1024, torch.ones(8), 0.5) for _ in range(64)]
    together = [_clock(lambda: stable_ranks(small), device) for _ in range(7)]
    yield {"matrix": "64 of 256 × 1024, together", "ms": statistics.median(together[2:])}


def _timed(how: str, work: Work, device: str, exact: float) -> dict[str, Any]:
    times = [_clock(work, device) for _ in range(9)][2:]
    found = work()
    return {
        f"{how} ms": statistics.median(times),
        f"{how} products": found.products,
        f"{how} bound": found.bound / found.value,
        f"{how} error over bound": abs(found.value - exact) / found.bound,
    }


def _clock(work: Work, device: str) -> float:
    return _by_clock(work) if device == "cuda" else _repeated(work, time.process_time)


def bounds(count: int, device: str) -> Rows:
    """Yield how many of that many spectra lie outside their bound, and the worst of them."""
    smallest, rows = 200 if device == "cpu" else 1024, []
    for trial in range(count):
        matrix = drawn_matrix(trial, device, smallest)
        found, true = stable_rank(matrix, method="lanczos", seed=trial), true_stable_rank(matrix)
        off = abs(found.value - true)
        rows.append(
            {
                "outside": off > found.bound + 1e-9 * true,
                "wide": found.bound > TOLERANCE * found.value,
                "certified": found.certain,
            }
        )
    yield {"spectra": count} | {name: sum(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--parts", default="plain,masks,shapes,spectra,bounds")
    arguments.add_argument("--spectra", type=int, default=1000, help="of the part `bounds`")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    parts: dict[str, Callable[[], Rows]] = {
        "plain": lambda: plain(given.device),
        "masks": lambda: masks(given.device),
        "shapes": lambda: shapes(given.device),
        "spectra": lambda: spectra(given.device),
        "bounds": lambda: bounds(given.spectra, given.device),
    }
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU, one thread"
    print(json.dumps({"device": name, "torch": torch.__version__}), flush=True)
    for part in given.parts.split(","):
        for row in parts[part]():
            if given.json:
                print(json.dumps({"part": part} | row), flush=True)
            else:
                shown = (
                    f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                )
                print("  ", ", ".join(shown), flush=True)


if __name__ == "__main__":
    main()

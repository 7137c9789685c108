"""Stable rank over the spectra that weights have: time, bound, and the certificate next to it.

    python -m benchmarks.stable_rank [times] [bounds] [--device cuda|cpu] [--shape 4096x11008]
        [--spectra 1000] [--json]

`times` measures one float32 matrix per spectrum: rank 8 plus noise whose norm is a share of σ₈,
other ranks, decaying, Gaussian, nearly equal top values, and low rank; `stable_rank` at its default
tolerance and the certificate (`method="exact"`) in alternation, medians, on a GPU by the wall clock
from call to number, on a CPU by the process's CPU time in one thread. The last row is 64 small
matrices, together and one by one. `bounds` measures many spectra, each from a start of its own:
how often the true value, by eigenvalues in float64, lies outside the bound (never, but for one
start in a million), and how often the bound is within the tolerance (always).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from joma.probes.spectrum import StableRank, stable_rank, stable_ranks

TOLERANCE = 1e-3
SMALL = (256, 1024, 64)
"""Rows, columns and number of the small matrices."""


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


def drawn(trial: int, device: str, low: int = 200, high: int = 1500) -> Tensor:
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


def judged(matrix: Tensor, seed: int) -> dict[str, float]:
    """Return how far a value is from the truth, over its bound, and the bound over the value."""
    found, true = stable_rank(matrix, method="lanczos", seed=seed), true_stable_rank(matrix)
    off = abs(found.value - true)
    return {
        "outside": float(off > found.bound + 1e-9 * true),
        "wide": float(found.bound > TOLERANCE * found.value),
        "certified": float(found.certain),
        "error over bound": off / found.bound if found.bound else 0.0,
    }


def bounds(count: int, device: str) -> list[dict[str, Any]]:
    """Return how many of that many spectra lie outside their bound, and the worst of them."""
    smallest = 200 if device == "cpu" else 1024  # shorter sides are certified on a GPU
    rows = [judged(drawn(trial, device, smallest), trial) for trial in range(count)]
    sums = {name: int(sum(row[name] for row in rows)) for name in ("outside", "wide", "certified")}
    worst = max(row["error over bound"] for row in rows)
    return [{"spectra": count} | sums | {"worst error over bound": worst}]


def _clock(work: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def alternated(works: list[Callable[[], Any]], device: str, repeats: int) -> list[float]:
    """Return the median milliseconds of each, run in turns, after two turns that do not count."""
    turns = [[_clock(work, device) for work in works] for _ in range(repeats + 2)][2:]
    return [1e3 * statistics.median(column) for column in zip(*turns, strict=True)]


def _row(name: str, times: list[float], found: StableRank, certified: StableRank) -> dict[str, Any]:
    off = abs(found.value - certified.value)
    return {
        "matrix": name,
        "ms": times[0],
        "certificate ms": times[1],
        "products": found.products,
        "bound": found.bound / max(found.value, 1e-300),
        "off the certificate by": off / max(certified.value, 1e-300),
    }


def times(rows: int, columns: int, device: str, repeats: int) -> list[dict[str, Any]]:
    """Return a row per spectrum: time, bound, and the certificate's."""
    result = []
    for name, matrix in listed(rows, columns, device):
        whole = matrix.contiguous()
        works = [
            lambda: stable_rank(whole, method="lanczos"),  # noqa: B023
            lambda: stable_rank(whole, method="exact"),  # noqa: B023
        ]
        spent = alternated(works, device, repeats)
        result.append(_row(name, spent, works[0](), works[1]()))
    height, width, count = SMALL
    dice = Dice(1, device)
    small = [dice.noisy(height, width, torch.ones(8), 0.5) for _ in range(count)]
    spent = alternated(
        [lambda: stable_ranks(small), lambda: [stable_rank(matrix) for matrix in small]],
        device,
        min(repeats, 5),
    )
    name = f"{count} of {height} × {width}, together"
    return [*result, {"matrix": name, "ms": spent[0], "one by one ms": spent[1]}]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("parts", nargs="*", choices=("times", "bounds", []))
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--shape", help="default 4096x11008 on a GPU, 1024x2752 on a CPU")
    arguments.add_argument("--spectra", type=int, default=1000)
    arguments.add_argument("--repeats", type=int, default=11)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    on_gpu = given.device != "cpu"
    if not on_gpu:
        torch.set_num_threads(1)
    shape = given.shape or ("4096x11008" if on_gpu else "1024x2752")
    rows, columns = (int(side) for side in shape.split("x"))
    name = torch.cuda.get_device_name() if on_gpu else "CPU, one thread"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "shape": shape}
    work: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "times": lambda: times(rows, columns, given.device, given.repeats),
        "bounds": lambda: bounds(given.spectra, given.device),
    }
    for part in given.parts or work:
        result[part] = work[part]()
        if not given.json:
            for row in result[part]:
                shown = (f"{what} {_short(value)}" for what, value in row.items())
                print(", ".join(shown), flush=True)
    if given.json:
        print(json.dumps(result, indent=1))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

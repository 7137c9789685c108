"""Block Lanczos of one large matrix on a GPU as captured graphs: `_krylov` without the waiting.

A step on 64 columns is a dozen kernels of a few microseconds, less than it takes to launch them one
by one. So for each shape the steps are captured once, over buffers of their own, and replayed. The
mathematics is that of `_krylov`, with three-term recurrence alone: what orthogonality rounding
costs is measured at the end and enters the bound; where it is too much, or a block loses rank, or
the kernel K grows out of the range of float32, no answer is given and the careful way is taken.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.probes.spectrum import _dither_kernel
from joma.probes.spectrum._krylov import chi_square_floor

STOPS = (4, 12, 18, 26)
"""After how many applications of the Gram matrix bounds are looked at."""
_COLUMNS = 32
_FULL = 16384.0
_LOW = 2048.0
_SQUARINGS = 15
_LARGEST = 1e12
"""K is added up to this size only: beyond, its least eigenvalue drowns in rounding."""
_WHITENED = (1, 5)
"""Steps after which K is brought back to 1, by a change of basis."""
_MARGIN = 1.01
_SHARES = (
    0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0, 1.5, 2.5, 5.0, 8.0,
    20.0, 100.0,
)  # fmt: skip
"""Excesses of the top eigenvalue over its estimate that are tried, in units of the tolerance."""


class Look(NamedTuple):
    """What a stop shows.

    Attributes:
        numbers: three, in float64: how far above the next the copy's top eigenvalue can lie, as a
            share, which may be ∞; an estimate of that eigenvalue, for ‖A‖_F = 1; and 1 where no
            block lost rank and orthogonality held.
        vector_S: a unit vector near the top eigenvector.
    """

    numbers: Tensor
    vector_S: Tensor


@lru_cache(maxsize=2)
def plan(rows: int, columns: int, device: torch.device, failure: float) -> "Plan":
    """The buffers and graphs of one shape; those of the two shapes used last are kept."""
    return Plan(rows, columns, device, failure)


class Plan:
    """Buffers and graphs for matrices of one shape.

    Args:
        rows: of the matrix.
        columns: of the matrix.
        device: a GPU.
        failure: probability, over the start, that a bound does not hold.
    """

    def __init__(self, rows: int, columns: int, device: torch.device, failure: float) -> None:
        side, other = min(rows, columns), max(rows, columns)
        b, room = _COLUMNS, STOPS[-1] + 1
        real = {"device": device, "dtype": torch.float32}
        self._seed: int | None = None
        self._wide = rows <= columns
        self._size = rows * columns
        self._half = torch.empty(rows, columns, device=device, dtype=torch.float16)
        self._grid = _dither_kernel.grid(self._size, 1)
        self._squares = torch.zeros(1, self._grid[0], **real)
        self._largest = torch.zeros(1, self._grid[0], **real)
        self._start_SB = torch.empty(side, b, **real)
        self._quantile = chi_square_floor(b, failure)
        self._excess_G = torch.zeros(len(_SHARES), **real)
        self._tolerance = 0.0
        # Blocks lie side by side, so that a step's operands are one slice of columns.
        self._basis = torch.zeros(side, room * b, **real)
        self._thin = torch.empty(side, 2 * b, device=device, dtype=torch.float16)
        self._long = torch.empty(other, 2 * b, device=device, dtype=torch.float16)
        self._columns = torch.zeros(room, 2 * b, b, **real)  # V_{j−1}ᵀMV_j over V_jᵀMV_j
        self._roots = torch.zeros(room, b, b, **real)
        self._one = torch.eye(b, **real)
        self.likely = 0
        """Where the last matrix of this shape was done: where to look first at the next."""
        self._graphs: dict[object, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}

    def load(self, matrix: Tensor, tolerance: float, seed: int) -> Tensor:
        """Takes a matrix in; its ‖A‖_F and the least power of two above its entries, (2,).

        Args:
            matrix: of the plan's shape, contiguous.
            tolerance: wanted bound, about which excesses are tried.
            seed: of the random start and the rounding.
        """
        if seed != self._seed:
            self._seed = seed
            dice = torch.Generator(matrix.device).manual_seed(seed)
            self._start_SB.normal_(generator=dice)
        if tolerance != self._tolerance:
            self._tolerance = tolerance
            self._excess_G.copy_(torch.tensor(_SHARES) * tolerance)
        _dither_kernel.launch_norms(matrix, self._squares, self._largest, self._grid)
        numbers, scale, self._factor = self._replay("scales", self._scales)
        _dither_kernel.launch_dither(matrix, self._half, scale, self._grid, seed)
        return numbers

    def advance(self, stop: int, since: int | None) -> Look:
        """Goes on to `STOPS[stop]` applications, from `STOPS[since]` or the start."""
        first = 0 if since is None else STOPS[since]
        return Look(*self._replay((since, stop), lambda: self._steps(first, STOPS[stop])))

    def _replay(self, key: object, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if key not in self._graphs:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # kernels are compiled and libraries set up outside the capture
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = work()
            self._graphs[key] = graph, out
        graph, out = self._graphs[key]
        graph.replay()
        return out

    def _scales(self) -> tuple[Tensor, ...]:
        norm, most, scale = _dither_kernel.scales(self._squares, self._largest)
        return torch.cat([norm, most]), scale, (most / norm / _FULL**2).float()

    def _block(self, first: int, count: int = 1) -> Tensor:
        return self._basis[:, first * _COLUMNS : (first + count) * _COLUMNS]

    def _steps(self, first: int, last: int) -> tuple[Tensor, ...]:
        if first == 0:
            self._append(0, self._start_SB)
        for j in range(first, last):
            rest = self._applied(self._block(j))
            old = self._block(j - 1, 2) if j else self._block(0)
            known = self._columns[j] if j else self._columns[0, _COLUMNS:]
            torch.mm(old.mT, rest, out=known)
            self._append(j + 1, rest.addmm_(old, known, alpha=-1))
        return self._look(last)

    def _append(self, j: int, block: Tensor) -> None:
        # A block without full rank makes NaN of all that follows, which `sound` finds.
        root = torch.linalg.cholesky_ex(block.mT @ block, upper=True).L
        self._roots[j] = root
        self._block(j).copy_(torch.linalg.solve_triangular(root, block, upper=True, left=False))

    def _applied(self, block: Tensor) -> Tensor:
        """M of a block, scaled so that ‖A‖_F = 1."""
        half = self._half if self._wide else self._half.mT
        _launch(_split, block, self._thin, block.stride(0))
        product = torch.mm(half.mT, self._thin, out_dtype=torch.float32)
        _launch(_middle, product, self._long, self._factor)
        product = torch.mm(half, self._long, out_dtype=torch.float32)
        out = torch.empty(len(product), _COLUMNS, device=product.device)
        _launch(_joined, product, out, self._factor)
        return out

    def _look(self, count: int) -> tuple[Tensor, ...]:
        b = _COLUMNS
        project = self._basis.new_zeros(count * b, count * b)
        blocks = project.view(count, b, count, b)
        own, cross = self._columns[:count, b:], self._columns[1:count, :b]
        blocks.diagonal(0, 0, 2).copy_(own.permute(1, 2, 0))
        blocks.diagonal(1, 0, 2).copy_(cross.permute(1, 2, 0))
        blocks.diagonal(-1, 0, 2).copy_(cross.permute(2, 1, 0))
        power = project
        for squaring in range(_SQUARINGS):
            if squaring % 3 == 0:  # in between, powers stay within float32
                power = power / power.diagonal().amax()
            power = power @ power
        best_N1 = power.index_select(1, power.diagonal().argmax().unsqueeze(0))
        best_N1 = best_N1 / torch.linalg.vector_norm(best_N1)
        top = (best_N1 * (project @ best_N1)).sum()
        vector_S = (self._block(0, count) @ best_N1).squeeze(-1)
        vector_S = vector_S / torch.linalg.vector_norm(vector_S)
        return self._excess(count, top), vector_S

    def _excess(self, count: int, top: Tensor) -> Tensor:
        b = _COLUMNS
        inverse = torch.linalg.solve_triangular(
            self._roots[: count + 1], self._one.expand(count + 1, b, b), upper=True
        ).contiguous()
        all_SN = self._block(0, count + 1)
        defect = (all_SN.mT @ all_SN).abs().sum(-1).amax()
        out_G = torch.empty_like(self._excess_G, dtype=torch.int32)
        _excluded[(len(out_G),)](
            self._columns,
            inverse,
            top,
            self._excess_G,
            defect,
            out_G,
            count,
            self._quantile / _MARGIN,
            BLOCK=b,
            LARGEST=_LARGEST,
            EARLY=_WHITENED[0],
            LATE=_WHITENED[1],
            num_warps=4,
        )
        # The first excess from which on all are excluded, ∞ where the last is not.
        at = len(_SHARES) - out_G.flip(0).cumprod(0).sum()
        padded = torch.nn.functional.pad(self._excess_G, (0, 1), value=float("inf"))
        sound = (defect < 1.1) & top.isfinite()
        excess = padded.index_select(0, at.unsqueeze(0)).squeeze(0)
        return torch.stack([excess.double(), top.double(), sound.double()])


def _launch(kernel: Any, source: Tensor, out: Tensor, more: Any) -> None:
    kernel[(triton.cdiv(len(source), 32),)](
        source, out, more, len(source), FULL=_FULL, LOW=_LOW, B=_COLUMNS, ROWS=32
    )


@triton.jit
def _store_parts(x, out, row, inside, FULL: tl.constexpr, LOW: tl.constexpr, B: tl.constexpr):
    """A block as two float16 parts side by side, 22 bits."""
    x = x * FULL
    high = x.to(tl.float16)
    low = ((x - high.to(tl.float32)) * LOW).to(tl.float16)
    at = out + row[:, None] * (2 * B) + tl.arange(0, B)[None, :]
    tl.store(at, high, mask=inside)
    tl.store(at + B, low, mask=inside)


@triton.jit
def _load_parts(product, factor, row, inside, LOW: tl.constexpr, B: tl.constexpr):
    """The sum of the products of both parts."""
    at = product + row[:, None] * (2 * B) + tl.arange(0, B)[None, :]
    x = tl.load(at, mask=inside, other=0.0) + tl.load(at + B, mask=inside, other=0.0) / LOW
    return x * tl.load(factor)


@triton.jit
def _split(
    block,
    out,
    stride,
    rows,
    FULL: tl.constexpr,
    LOW: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    at = block + row[:, None] * stride + tl.arange(0, B)[None, :]
    _store_parts(tl.load(at, mask=inside, other=0.0), out, row, inside, FULL, LOW, B)


@triton.jit
def _middle(
    product,
    out,
    factor,
    rows,
    FULL: tl.constexpr,
    LOW: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    _store_parts(_load_parts(product, factor, row, inside, LOW, B), out, row, inside, FULL, LOW, B)


@triton.jit
def _joined(
    product,
    out,
    factor,
    rows,
    FULL: tl.constexpr,
    LOW: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    at = out + row[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(at, _load_parts(product, factor, row, inside, LOW, B), mask=inside)


@triton.jit
def _white(kernel, factor, now, before, BLOCK: tl.constexpr):
    """L⁻¹ of factor and polynomials, for the Cholesky factor L of K, by elimination."""
    row, place = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)
    pivots = tl.full([BLOCK], 1.0, tl.float64)
    for k in range(BLOCK):
        line = tl.sum(tl.where(row == k, kernel, 0.0), 0)
        pivot = tl.sum(tl.where(place == k, line, 0.0), 0)
        pivots = tl.where(place == k, pivot, pivots)
        share = tl.where(place > k, line / pivot, 0.0)[:, None]
        kernel -= share * line[None, :]
        factor -= share * tl.sum(tl.where(row == k, factor, 0.0), 0)[None, :]
        now -= share * tl.sum(tl.where(row == k, now, 0.0), 0)[None, :]
        before -= share * tl.sum(tl.where(row == k, before, 0.0), 0)[None, :]
    scale = (1.0 / tl.sqrt(pivots))[:, None]
    return factor * scale, now * scale, before * scale


@triton.jit
def _excluded(
    columns,
    inverse,
    top,
    excess,
    defect,
    out,
    count,
    quantile,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
):
    """Whether r·K(λ) ≻ 1, one λ per program.

    K(λ) = Σ P_j·P_jᵀ with P_{j+1} = (λ·P_j − P_j·A_j − P_{j−1}·B_j)·R⁻¹, in float64. After a
    change of basis by F the test is r·F·K·Fᵀ ≻ F·Fᵀ.
    """
    row, place = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)
    at = row * BLOCK + place[None, :]
    size: tl.constexpr = BLOCK * BLOCK
    one = tl.where(row == place[None, :], 1.0, 0.0).to(tl.float64)
    level = tl.load(top).to(tl.float64)
    level *= 1.0 + tl.load(excess + tl.program_id(0)).to(tl.float64)
    before = tl.zeros([BLOCK, BLOCK], tl.float64)
    now = tl.load(inverse + at).to(tl.float64)
    total = tl.dot(now, tl.trans(now), out_dtype=tl.float64)
    factor = one
    inside = level > 0
    for j in range(count):
        cross = tl.load(columns + j * 2 * size + at).to(tl.float64)
        own = tl.load(columns + j * 2 * size + size + at).to(tl.float64)
        back = tl.load(inverse + (j + 1) * size + at).to(tl.float64)
        new = level * now - tl.dot(now, own, out_dtype=tl.float64)
        new -= tl.dot(before, cross, out_dtype=tl.float64)
        new = tl.dot(new, back, out_dtype=tl.float64)
        gain = tl.dot(new, tl.trans(new), out_dtype=tl.float64)
        # Beyond the range nothing is added; what was added so far is a bound already.
        inside &= tl.max(tl.max(tl.abs(gain), 1), 0) < LARGEST
        total += tl.where(inside, gain, 0.0)
        before, now = now, new
        if (j == EARLY) | (j == LATE):
            factor, now, before = _white(total, factor, now, before, BLOCK)
            total = one
    # Gaussian elimination: positive definite if and only if all pivots are positive.
    rest = total * (quantile / tl.load(defect))
    rest -= tl.dot(factor, tl.trans(factor), out_dtype=tl.float64)
    positive = inside | (level > 0)
    for k in range(BLOCK):
        line = tl.sum(tl.where(row == k, rest, 0.0), 0)
        pivot = tl.sum(tl.where(place == k, line, 0.0), 0)
        positive &= pivot > 0  # false for NaN too
        rest -= line[:, None] * line[None, :] / pivot
    tl.store(out + tl.program_id(0), positive.to(tl.int32))

"""Buffers and captured graphs of one shape of matrix, for `_graph`."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from joma.common.float32 import float32_products
from joma.probes.spectrum import _dither_kernel, _graph_kernels
from joma.probes.spectrum._krylov import chi_square_floor
from joma.probes.spectrum._matrix import wide_product
from joma.probes.spectrum._pace import STOPS, Pace

_COLUMNS = 32
_WARPS = 4
"""Warps of a program that tests one value."""
_EACH = 32
"""Numbers that one program adds up."""
_FULL = 16384.0
"""Factor that brings entries of a block to the range of float16."""
_LOW = 2048.0
"""Factor that brings what float16 leaves of them to its range."""
_ROWS = 64
"""Rows of a block one program works on."""
_GUARD = 0.15
"""Share of the tolerance by which the top eigenvalue of the projection may be missed."""
_LARGEST = 1e12
"""K is added up to this size only: beyond, its least eigenvalue drowns in rounding."""
_RAISED = 1e8
"""Size from which on K is brought back to 1, by a change of basis."""
_RIDGE = 1e-4
"""Directions of a new block below this share of ‖M‖ are not blown up to length 1."""
_STEEP = 1e-3
"""Least pivot of a Gram matrix, as a share of its entries, that float32 can be trusted with."""
_EXACT_SQUARINGS = 6
"""Squarings in float32; an error of the later ones, in tf32, is raised to a small power only."""
_MARGIN = 1.01
"""By how much r·K must exceed 1; see `_krylov.excluded`."""
SHARES = (
    0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.88, 0.91, 0.94, 0.97, 1.0, 1.5, 2.5, 5.0, 8.0,
    20.0, 100.0,
)  # fmt: skip
"""Excesses of the top eigenvalue over its estimate that are tried, in units of the tolerance.

None is below `_GUARD`: only beyond the top eigenvalue of the projection K grows.
"""


class StepBounds(NamedTuple):
    """What is known after some steps.

    Attributes:
        numbers: three, in float64: how far above the next the copy's top eigenvalue can lie, as a
            share, which may be ∞; an estimate of that eigenvalue, for ‖A‖_F = 1; and an upper bound
            of the norm of Qᵀ·Q, 1 for an orthonormal basis.
        vector_S: a unit vector near the top eigenvector.
        length: ‖Aᵀ·vector‖ with the matrix itself, in float64, (1,).
    """

    numbers: Tensor
    vector_S: Tensor
    length: Tensor


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
        wide = {"device": device, "dtype": torch.float64}
        self._seed: int | None = None
        self._wide = rows <= columns
        self._half = torch.empty(rows, columns, device=device, dtype=torch.float16)
        count = _dither_kernel.blocks(rows * columns)
        self._squares, self._largest = (torch.zeros(1, count, **real) for _ in range(2))
        self._scale = torch.ones(1, **real)
        self._factor = torch.ones(1, **real)
        self._quantile = chi_square_floor(b, failure)
        self._excess_G = torch.zeros(len(SHARES), **real)
        self._known_numbers = torch.empty(3, **wide)
        self._kernels = torch.empty(2, len(SHARES), b, b, **wide)  # K, and what kept it small
        self._tolerance = 0.0
        self._known_scale = False
        # Blocks lie side by side, so that a step's operands are one slice of columns.
        self._basis = torch.zeros(side, room * b, **real)
        self._thin = torch.empty(side, 2 * b, device=device, dtype=torch.float16)
        self._long = torch.empty(other, 2 * b, device=device, dtype=torch.float16)
        self._columns = torch.zeros(room, 2 * b, b, **real)  # V_{j−1}ᵀMV_j, by R_jᵀ, over A_j
        self._roots = torch.zeros(room, b, b, **real)
        self._inverses = torch.zeros(room, b, b, **real)
        self._gram = torch.empty(b, b, **wide)
        self._narrow = torch.empty(b, b, **real)
        self._sizes = torch.zeros(3, **wide)  # of the projection so far, the ridge, the least pivot
        self._partial = torch.empty(triton.cdiv(side, _ROWS), 3 * b * b, **wide)
        self._total = torch.empty(3 * b * b, **wide)
        # On a CPU, where Triton's interpreter runs the kernels in tests, nothing is captured.
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if device.type == "cuda":
            self._streams = _own_streams(self, device)
        self.pace = Pace()
        self._graphs: dict[object, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}

    def load(self, matrix: Tensor, tolerance: float, seed: int, *, rescale: bool = False) -> Tensor:
        """Load a matrix; return ‖A‖_F, the least power of two above its entries, and 1 if it fits.

        Args:
            matrix: of the plan's shape, contiguous.
            tolerance: wanted bound, about which excesses are tried.
            seed: of the random start and the rounding.
            rescale: find the scale of the entries first, which takes one reading. Otherwise they
                are scaled as those of the last matrix were, and may not fit in float16.
        """
        if seed != self._seed:
            self._seed = seed
            self._begin(seed)
        if tolerance != self._tolerance:
            self._tolerance, self.pace = tolerance, Pace()
            self._excess_G.copy_(torch.tensor(SHARES) * tolerance)
        norms = self._squares, self._largest
        guess, self._known_scale = self._known_scale and not rescale, True
        if guess:
            _dither_kernel.launch_dither(matrix, self._half, self._scale, seed, norms)
            self._know(guessed=True)
            return self._known_numbers
        _dither_kernel.launch_norms(matrix, *norms)
        self._know(guessed=False)
        _dither_kernel.launch_dither(matrix, self._half, self._scale, seed)
        return self._known_numbers

    def advance(self, matrix: Tensor, stop: int, since: int | None) -> StepBounds:
        """Run to `STOPS[stop]` applications, from `STOPS[since]` or the start.

        Args:
            matrix: the one that was loaded.
            stop: stop to run to.
            since: stop it is at, or None at the start.
        """
        first, last = 0 if since is None else STOPS[since], STOPS[stop]
        squarings = _squarings(last * _COLUMNS, _GUARD * self._tolerance)
        key = (since, stop, squarings)
        top, vector_S = self._replay(key, lambda: self._steps(first, last, squarings))
        # The bound keeps a few multiprocessors busy: the product with the matrix runs beside it.
        with self._beside(1):
            turned = matrix.mT if self._wide else matrix
            image = wide_product(turned, vector_S[:, None])
            length = torch.linalg.vector_norm(image, dtype=torch.float64).unsqueeze(0)
        (numbers,) = self._replay(("bound", *key), lambda: self._excess(last, top))
        self._join(1)
        return StepBounds(numbers, vector_S, length)

    @contextmanager
    def _beside(self, which: int) -> Iterator[None]:
        """Run the block on another stream, after what was launched so far."""
        if not self._streams:
            yield
            return
        other = self._streams[which]
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            yield

    def _join(self, which: int) -> None:
        """Let what follows wait for another stream."""
        if self._streams:
            torch.cuda.current_stream().wait_stream(self._streams[which])

    def _replay(self, key: object, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if not self._streams:
            return work()
        if key not in self._graphs:
            stream = self._streams[0]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # kernels are compiled and libraries set up outside the capture
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = work()
            self._graphs[key] = graph, out
        graph, out = self._graphs[key]
        graph.replay()
        return out

    def _know(self, *, guessed: bool) -> None:
        """Find ‖A‖_F and the scale of the matrix, or whether it fits the one that was guessed."""
        numbers = self._factor, self._known_numbers
        _dither_kernel.launch_known(
            self._squares, self._largest, self._scale, *numbers, _FULL, guessed=guessed
        )

    def _block(self, first: int, count: int = 1) -> Tensor:
        return self._basis[:, first * _COLUMNS : (first + count) * _COLUMNS]

    def _begin(self, seed: int) -> None:
        """Draw the Gaussian start Ω = V_0·R_0, the same for every matrix."""
        dice = torch.Generator(self._basis.device).manual_seed(seed)
        start = torch.randn(
            len(self._basis), _COLUMNS, generator=dice, device=self._basis.device
        ).double()
        root = torch.linalg.cholesky(start.mT @ start, upper=True)
        inverse = torch.linalg.inv(root)
        self._inverses[0] = inverse.float()
        self._block(0).copy_(start @ inverse)

    def _steps(self, first: int, last: int, squarings: int) -> tuple[Tensor, ...]:
        side, stride = self._basis.shape
        tiles = (len(self._partial),)
        _launch(_graph_kernels.split, self._block(first), self._thin, stride)
        for j in range(first, last):
            product = self._applied()
            shape = {"FIRST": j == 0, "B": _COLUMNS}
            _graph_kernels.gathered[tiles](
                product,
                self._basis,
                self._roots,
                self._factor,
                self._partial,
                j,
                stride,
                side,
                LOW=_LOW,
                ROWS=_ROWS,
                **shape,
            )
            _graph_kernels.added[(len(self._total) // _EACH,)](
                self._partial,
                self._total,
                len(self._partial),
                SIZE=len(self._total),
                EACH=_EACH,
                ROWS=_ROWS,
            )
            _graph_kernels.formed[(1,)](
                self._total,
                self._columns,
                self._roots,
                self._gram,
                self._narrow,
                self._sizes,
                j,
                RIDGE=_RIDGE**2,
                STEEP=_STEEP,
                **shape,
            )
            # One warp: elimination is a chain of exchanges, which are expensive between warps.
            _graph_kernels.rooted[(1,)](
                self._gram,
                self._narrow,
                self._sizes,
                self._roots,
                self._inverses,
                j,
                B=_COLUMNS,
                num_warps=1,
            )
            _graph_kernels.turned[tiles](
                self._basis,
                self._inverses,
                self._columns,
                self._thin,
                j,
                stride,
                side,
                FULL=_FULL,
                LOW=_LOW,
                ROWS=_ROWS,
                B=_COLUMNS,
            )
        return self._top(last, squarings)

    def _applied(self) -> Tensor:
        """Return M of the two parts of the last block, to be added up and scaled."""
        half = self._half if self._wide else self._half.mT
        product = _product(half.mT, self._thin)
        _launch(_graph_kernels.middle, product, self._long, self._factor)
        return _product(half, self._long)

    def _top(self, count: int, squarings: int) -> tuple[Tensor, ...]:
        """Return the top eigenvalue of the projection, up to the guard, and its vector."""
        b = _COLUMNS
        project = self._basis.new_zeros(count * b, count * b)
        blocks = project.view(count, b, count, b)
        own, cross = self._columns[:count, b:], self._columns[1:count, :b]
        blocks.diagonal(0, 0, 2).copy_(own.permute(1, 2, 0))
        blocks.diagonal(1, 0, 2).copy_(cross.permute(1, 2, 0))
        blocks.diagonal(-1, 0, 2).copy_(cross.permute(2, 1, 0))
        power = project
        for squaring in range(squarings):
            if squaring % 3 == 0:  # in between, powers stay within float32
                power = power / power.diagonal().amax()
            with float32_products("ieee" if squaring < _EXACT_SQUARINGS else "tf32"):
                power = power @ power
        power = power / power.diagonal().amax()
        size, image = len(power), project @ power
        quotient_N = power.new_empty(size)
        _graph_kernels.quotients[(triton.cdiv(size, 16),)](
            power, image, quotient_N, size, COLUMNS=16, ROWS=128
        )
        best = quotient_N.argmax().unsqueeze(0)
        top = quotient_N.index_select(0, best).squeeze(0)
        best_N1 = power.index_select(1, best)
        vector_S = (self._block(0, count) @ best_N1).squeeze(-1)
        vector_S = vector_S / torch.linalg.vector_norm(vector_S)
        return top, vector_S

    def _excess(self, count: int, top: Tensor) -> tuple[Tensor, ...]:
        with self._beside(2):  # K grows without it
            # In float16, whose rounding changes the norm of the basis by less than 2⁻¹¹·√columns.
            all_SN = self._block(0, count + 1).half()
            defect = _gram(all_SN).abs().sum(-1).amax()
        rounding = (1 + 1.05 * 2.0**-11 * math.sqrt(all_SN.shape[1])) ** 2
        values, (kernels, factors) = (len(SHARES),), self._kernels
        _graph_kernels.grown[values](
            self._columns,
            self._inverses,
            top,
            self._excess_G,
            kernels,
            factors,
            count,
            BLOCK=_COLUMNS,
            LARGEST=_LARGEST,
            RAISED=_RAISED,
            num_warps=_WARPS,
        )
        self._join(2)
        out_G = torch.empty_like(self._excess_G, dtype=torch.int32)
        quantile = self._quantile / (_MARGIN * rounding)
        _graph_kernels.excluded[values](
            kernels, factors, top, defect, out_G, quantile, BLOCK=_COLUMNS, num_warps=_WARPS
        )
        numbers = torch.empty(3, device=top.device, dtype=torch.float64)
        places = triton.next_power_of_2(len(SHARES))
        _graph_kernels.concluded[(1,)](
            out_G, self._excess_G, top, defect, numbers, len(SHARES), PLACES=places, num_warps=1
        )
        return (numbers,)


_free_streams: dict[torch.device, list[tuple[torch.cuda.Stream, ...]]] = {}


def _own_streams(owner: object, device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Return three streams that no other plan has while the owner lives.

    Graphs use the scratch memory of the stream they were captured on, which torch takes back with
    any of them. It hands out 32 streams in turn: of ever new ones, two plans would have the same.
    """
    free = _free_streams.setdefault(device, [])
    streams = free.pop() if free else tuple(torch.cuda.Stream(device) for _ in range(3))
    weakref.finalize(owner, free.append, streams)
    return streams


def _gram(block_SN: Tensor) -> Tensor:
    """Return BᵀB of a tall block in float16: in parts, since few columns are work for few."""
    parts = next(count for count in (16, 8, 4, 2, 1) if len(block_SN) % count == 0)
    block_PSN = block_SN.unflatten(0, (parts, -1))
    return _product(block_PSN.mT, block_PSN).sum(0)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of float16 factors in float32; a CPU has no such product of its own."""
    if left.is_cuda:
        multiply = torch.mm if left.ndim == 2 else torch.bmm
        return multiply(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _launch(kernel: Any, source: Tensor, out: Tensor, more: Any) -> None:
    kernel[(triton.cdiv(len(source), 32),)](
        source, out, more, len(source), FULL=_FULL, LOW=_LOW, B=_COLUMNS, ROWS=32
    )


def _squarings(size: int, miss: float) -> int:
    """Return how often a matrix of that size is squared to find its top eigenvalue up to a share.

    The column of the power 2^s that has most of the top eigenvector has at least 1/size of it, so
    the best of all columns misses at most (ln size + 1)/2^(s+1) of the eigenvalue.
    """
    return max(0, math.ceil(math.log2((math.log(size) + 1) / (2 * miss))))

"""Block Lanczos of one large matrix on a GPU as captured graphs.

The mark of 1 ms for a 4096 × 11008 matrix needs this module and its kernels: launched one by one
from Python a step takes 1 ms, as a graph of library calls 0.14, with these kernels 0.095, and there
are 3 to 18 steps (`docs/performance.md`). `python -m benchmarks.spectrum` shows what that buys a
probe and a monitored training.

A step is eight kernels, all but the two products of a few microseconds. For each shape the steps
are captured once, over buffers of their own, and replayed. The mathematics is that of `_krylov`,
with three-term recurrence alone, M·V_j = V_{j−1}·R_jᵀ + V_j·A_j + V_{j+1}·R_{j+1}: the
orthogonality lost to rounding is measured at the end and enters the bound; where too much is lost,
or a block loses rank, there is no answer and `_krylov` is used.

**Products go through a half-precision copy** whose rounding is random. An entry goes to one of its
two neighbours in float16 with probabilities that make the copy Ã right on average. Then uᵀ(Ã − A)v
for the top singular vectors u, v of A, which are independent of the dice, is a sum of independent
terms of mean zero, by Hoeffding below ½·step·√(2 ln(1/failure)) but with probability `failure`,
step ≤ 2⁻¹⁰·max|A|. Since σ₁(Ã) ≥ uᵀÃv = σ₁(A) + uᵀ(Ã − A)v, a bound above Ã is one above A with
that slack. The lower bound is a Rayleigh quotient of A itself. Blocks go in as two float16 parts,
22 bits.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from joma.common.float32 import float32_products
from joma.probes.spectrum import _dither_kernel, _graph_kernels
from joma.probes.spectrum._krylov import Iterated, chi_square_floor
from joma.probes.spectrum._matrix import check_finite, wide_product

STOPS = (3, 8, 12, 15, 18, 22)
"""Applications of the Gram matrix after which bounds are computed."""
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
_GUARD = 0.3
"""Share of the tolerance by which the top eigenvalue of the projection may be missed."""
_LARGEST = 1e12
"""K is added up to this size only: beyond, its least eigenvalue drowns in rounding."""
_WHITENED = (1, 5)
"""Steps after which K, where it has grown, is brought back to 1, by a change of basis."""
_RAISED = 1e8
"""Size of K from which on it has grown."""
_EXACT_SQUARINGS = 5
"""Squarings in float32; an error of the later ones, in tf32, is raised to a small power only."""
_MARGIN = 1.01
"""By how much r·K must exceed 1; see `_krylov.excluded`."""
_SHARES = (
    0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.88, 0.91, 0.94, 0.97, 1.0, 1.5, 2.5, 5.0, 8.0,
    20.0, 100.0,
)  # fmt: skip
"""Excesses of the top eigenvalue over its estimate that are tried, in units of the tolerance.

None is below `_GUARD`: only beyond the top eigenvalue of the projection K grows.
"""


class StepBounds(NamedTuple):
    """What is known after some steps.

    Attributes:
        numbers: three, in float64: how far above the next the copy's top eigenvalue can lie, as a
            share, which may be ∞; an estimate of that eigenvalue, for ‖A‖_F = 1; and 1 where no
            block lost rank and the basis stayed orthogonal.
        vector_S: a unit vector near the top eigenvector.
        length: ‖Aᵀ·vector‖ with the matrix itself, in float64, (1,).
    """

    numbers: Tensor
    vector_S: Tensor
    length: Tensor


def iterate(matrix: Tensor, tolerance: float, seed: int, failure: float) -> Iterated | None:
    """Iterate until the bound is at most the tolerance; return None where there is no answer.

    Args:
        matrix: a whole matrix on a GPU, not of float64.
        tolerance: wanted bound as a share of the value.
        seed: of the random start and the rounding.
        failure: probability that the bound does not hold.
    """
    matrix = matrix if matrix.is_contiguous() else matrix.mT
    if not matrix.is_contiguous():
        return None
    shape = plan(*matrix.shape, matrix.device, failure * 0.9)
    scales = shape.load(matrix, tolerance, seed)
    since, stop = None, shape.likely
    direct = stop > 0
    while stop < len(STOPS):
        check = shape.advance(matrix, stop, since)
        numbers = torch.cat([check.numbers, scales, check.length]).tolist()  # one wait
        excess, top, sound, norm, most, fits, length = numbers
        if not fits:  # entries of another size than the last matrix had
            scales = shape.load(matrix, tolerance, seed, rescale=True)
            since, stop = None, shape.likely
            continue
        check_finite(norm)
        if norm == 0:
            return Iterated(0.0, 0.0, 0.0, 1, check.vector_S)
        if not sound and not direct:
            return None
        if not sound:  # gone too far for so fast a spectrum: once more, with all checks
            shape.likely = stop = 0
            since, direct = None, False
            continue
        floor = (length / norm) ** 2
        exact = matrix.dtype != torch.float32
        share = top * (1 + excess) / floor - 1 + _slack(most, norm, floor, failure / 10, exact)
        if share < 0:  # a ceiling below the floor is rounding that got out of hand
            return None
        if share <= tolerance:
            shape.likely = stop
            return Iterated(floor, share, norm, 2 * STOPS[stop] + 1, check.vector_S)
        since, stop = stop, stop + 1
    return None


def _slack(most: float, norm: float, top: float, failure: float, exact: bool) -> float:
    """Return what the half-precision copy may hide of the top eigenvalue, as a share of it.

    Args:
        most: the least power of two above the entries of the matrix.
        norm: its ‖A‖_F.
        top: its top eigenvalue over ‖A‖_F².
        failure: probability that the dice hide more.
        exact: whether its entries were representable.
    """
    if exact:
        return 3e-5
    # The largest entry lies in [most/2, most), where float16 has steps of 2⁻¹⁰·most/2.
    sway = 0.5 * (most / 2 / norm * 2.0**-10) * math.sqrt(2 * math.log(1 / failure))
    return 3e-5 + 2 * sway / math.sqrt(max(top, 1e-300))


@lru_cache(maxsize=4)
def plan(rows: int, columns: int, device: torch.device, failure: float) -> "Plan":
    """Return the buffers and graphs of one shape; those of the four shapes used last are kept.

    `joma.probes.spectrum.release` frees them.
    """
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
        wide = {"device": device, "dtype": torch.float64}
        self._seed: int | None = None
        self._wide = rows <= columns
        self._half = torch.empty(rows, columns, device=device, dtype=torch.float16)
        count = _dither_kernel.blocks(rows * columns)
        self._squares, self._largest = (torch.zeros(1, count, **real) for _ in range(2))
        self._scale = torch.ones(1, **real)
        self._factor = torch.ones(1, **real)
        self._quantile = chi_square_floor(b, failure)
        self._excess_G = torch.zeros(len(_SHARES), **real)
        self._tolerance = 0.0
        self._known_scale = False
        # Blocks lie side by side, so that a step's operands are one slice of columns.
        self._basis = torch.zeros(side, room * b, **real)
        self._thin = torch.empty(side, 2 * b, device=device, dtype=torch.float16)
        self._long = torch.empty(other, 2 * b, device=device, dtype=torch.float16)
        self._columns = torch.zeros(room, 2 * b, b, **real)  # V_{j−1}ᵀMV_j, by R_jᵀ, over A_j
        self._roots = torch.zeros(room, b, b, **real)
        self._inverses = torch.zeros(room, b, b, **real)
        self._gram = torch.empty(b, b, **real)
        self._crossed = torch.empty(b, b, **real)
        self._partial = torch.empty(triton.cdiv(side, _ROWS), 4 * b * b, **wide)
        self._total = torch.empty(4 * b * b, **wide)
        self._second_stream = torch.cuda.Stream(device)
        # Graphs use the scratch memory of the stream they were captured on, which torch may take
        # back with any of them: no plan's graphs are on another's.
        self._captured = torch.cuda.Stream(device)
        self.likely = 0
        """The stop at which the last matrix was done, where the next one is checked first."""
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
            self._tolerance, self.likely = tolerance, 0
            self._excess_G.copy_(torch.tensor(_SHARES) * tolerance)
        norms = self._squares, self._largest
        guess, self._known_scale = self._known_scale and not rescale, True
        if guess:
            _dither_kernel.launch_dither(matrix, self._half, self._scale, seed, norms)
            return self._replay("guessed", self._guessed)[0]
        _dither_kernel.launch_norms(matrix, *norms)
        (numbers,) = self._replay("scales", self._scales)
        _dither_kernel.launch_dither(matrix, self._half, self._scale, seed)
        return numbers

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
        # The bound keeps a few multiprocessors busy: the product with the matrix runs alongside.
        here = torch.cuda.current_stream()
        self._second_stream.wait_stream(here)
        with torch.cuda.stream(self._second_stream):
            turned = matrix.mT if self._wide else matrix
            image = wide_product(turned, vector_S[:, None])
            length = torch.linalg.vector_norm(image, dtype=torch.float64).unsqueeze(0)
        (numbers,) = self._replay(("bound", *key), lambda: self._excess(last, top))
        here.wait_stream(self._second_stream)
        return StepBounds(numbers, vector_S, length)

    def _replay(self, key: object, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if key not in self._graphs:
            stream = self._captured
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

    def _scales(self) -> tuple[Tensor, ...]:
        norm, most, scale = _dither_kernel.scales(self._squares, self._largest)
        self._scale.copy_(scale)
        return self._known(norm, most, torch.ones_like(norm))

    def _guessed(self) -> tuple[Tensor, ...]:
        norm, most, fits = _dither_kernel.unscaled(self._squares, self._largest, self._scale)
        return self._known(norm, most, fits)

    def _known(self, norm: Tensor, most: Tensor, fits: Tensor) -> tuple[Tensor, ...]:
        self._factor.copy_(1 / (norm * self._scale.double() * _FULL))
        return (torch.cat([norm, most, fits]),)

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
                self._total, self._columns, self._roots, self._gram, self._crossed, j, **shape
            )
            # One warp: elimination is a chain of exchanges, which are expensive between warps.
            _graph_kernels.rooted[(1,)](
                self._gram, self._roots, self._inverses, j, B=_COLUMNS, num_warps=1
            )
            _graph_kernels.turned[tiles](
                self._basis,
                self._inverses,
                self._columns,
                self._crossed,
                self._thin,
                j,
                stride,
                side,
                FULL=_FULL,
                LOW=_LOW,
                ROWS=_ROWS,
                **shape,
            )
        return self._top(last, squarings)

    def _applied(self) -> Tensor:
        """Return M of the two parts of the last block, to be added up and scaled."""
        half = self._half if self._wide else self._half.mT
        product = torch.mm(half.mT, self._thin, out_dtype=torch.float32)
        _launch(_graph_kernels.middle, product, self._long, self._factor)
        return torch.mm(half, self._long, out_dtype=torch.float32)

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
        square_N = power.square().sum(0)
        quotient_N = (power * (project @ power)).sum(0) / square_N
        # Columns that vanished have no quotient; NaN elsewhere is passed on, to be found.
        best = quotient_N.where(square_N > 1e-20, 0.0).argmax().unsqueeze(0)
        top = quotient_N.index_select(0, best).squeeze(0)
        best_N1 = power.index_select(1, best)
        vector_S = (self._block(0, count) @ best_N1).squeeze(-1)
        vector_S = vector_S / torch.linalg.vector_norm(vector_S)
        return top, vector_S

    def _excess(self, count: int, top: Tensor) -> tuple[Tensor, ...]:
        # In float16, whose rounding changes the norm of the basis by less than 2⁻¹¹ of √columns.
        all_SN = self._block(0, count + 1).half()
        defect = torch.mm(all_SN.mT, all_SN, out_dtype=torch.float32).abs().sum(-1).amax()
        rounding = (1 + 1.05 * 2.0**-11 * math.sqrt(all_SN.shape[1])) ** 2
        out_G = torch.empty_like(self._excess_G, dtype=torch.int32)
        _graph_kernels.excluded[(len(out_G),)](
            self._columns,
            self._inverses,
            top,
            self._excess_G,
            defect,
            out_G,
            count,
            self._quantile / (_MARGIN * rounding),
            BLOCK=_COLUMNS,
            LARGEST=_LARGEST,
            RAISED=_RAISED,
            EARLY=_WHITENED[0],
            LATE=_WHITENED[1],
            num_warps=_WARPS,
        )
        # The first excess from which on all are excluded, ∞ where the last is not.
        at = len(_SHARES) - out_G.flip(0).cumprod(0).sum()
        padded = torch.nn.functional.pad(self._excess_G, (0, 1), value=float("inf"))
        sound = (defect < 1.1) & top.isfinite()
        excess = padded.index_select(0, at.unsqueeze(0)).squeeze(0)
        return (torch.stack([excess.double(), top.double(), sound.double()]),)


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

"""A GaLore step of many bfloat16 matrices on a GPU (Triton, and torch's products).

One kernel multiplies gradients by bases and advances Adam's moments while the products are still in
registers. Tiles of all matrices are worked on by one launch: those of one matrix would leave most
of the GPU idle. Weights then move by torch's own products, whose tiles are shared between
processors, which Triton cannot do.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import contextvars
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.kernels.choice import Fitting
from joma.optim.blockwise import BLOCK
from joma.optim.galore import layout
from joma.optim.galore.subspace import Side

_TILES = {
    "eight": {"BM": 64, "BN": 256, "BK": 64, "num_warps": 8},
    "wide": {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8},
    "narrow": {"BM": 128, "BN": 128, "BK": 64, "num_warps": 4},
}
"""Tiles for moments in eight bits, and otherwise for ranks above 128 and up to it."""
_STAGES = {"eight": (4, 3, 2, 1), "wide": (4, 3, 2, 1), "narrow": (3, 2, 1)}
"""Tiles that are loaded ahead, and the one that is worked on, as many as a GPU has room for."""
_fit = Fitting()
_MOST_TABLES = 256
"""Tables for different sets of matrices after which all are made again."""
_NUMBERS = tl.constexpr(9)
"""Numbers of each matrix in the table of `Work.numbers`."""
_FIELDS = tl.constexpr(12)
"""Numbers of each matrix in the table of addresses and sides, as `_Tables.fill` has them."""


@dataclass(frozen=True)
class Work:
    """A matrix and what its step needs.

    Attributes:
        weights: W (m, n), bfloat16.
        gradient: G, bfloat16.
        basis: P, bfloat16, with a rank that is a multiple of 16.
        first: First moment, bfloat16, or the codes of eight bits; rows as `aligned_rows` has them.
        second: Second moment, likewise.
        scales: Scales of the two in eight bits, or None.
        side: Side of the basis.
        numbers: −η/(1 − β₁ᵗ), 1/√(1 − β₂ᵗ), ε, decay factor, β₁, β₂, scale, and the two of
            `seed_numbers`.
    """

    weights: Tensor
    gradient: Tensor
    basis: Tensor
    first: Tensor
    second: Tensor
    scales: tuple[Tensor, Tensor] | None
    side: Side
    numbers: tuple[float, ...]


def seed_numbers(seed: int) -> tuple[float, float]:
    """Return the upper and the lower half of a seed's 32 bits, each exact in float32."""
    return float(seed % 2**32 >> 16), float(seed % 2**16)


def aligned_rows(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows lie as the kernels read them, which may be the one given."""
    rows, columns = matrix.shape
    if matrix.stride() == (layout.row_length(columns), 1) and matrix.data_ptr() % 16 == 0:
        return matrix
    padded = torch.zeros(rows, layout.row_length(columns), dtype=matrix.dtype, device=matrix.device)
    padded[:, :columns] = matrix
    return padded[:, :columns]


def step(works: Sequence[Work], workspace: dict[Any, Any]) -> None:
    """Move matrices, all on one GPU and with moments of one type.

    Args:
        works: The matrices.
        workspace: Keeps tables and buffers from one call to the next; may be dropped at any time.
    """
    for places in layout.launches([work.weights.numel() for work in works]):
        some = [works[at] for at in places]
        device = some[0].weights.device
        shapes = tuple((work.side, *work.weights.shape, work.basis.shape[1]) for work in some)
        key = some[0].first.dtype, device, shapes
        if key not in workspace:
            if len(workspace) > _MOST_TABLES:  # other matrices have gradients at every step
                workspace.clear()
            workspace[key] = _Tables(some)
        tables: _Tables = workspace[key]
        buffer = workspace.get(device)
        if buffer is None or len(buffer) < tables.numbers:
            buffer = torch.empty(tables.numbers, dtype=torch.bfloat16, device=device)
            workspace[device] = buffer
        tables.take(buffer)
        with torch.cuda.device_of(some[0].weights):  # Triton launches on the current device
            arguments = tables.fill(some)
            # Triton asks an allocator for descriptors' memory; that of others stays as it is.
            contextvars.copy_context().run(_launch, tables, *arguments)
            for work, update, padded in zip(some, tables.updates, tables.padded, strict=True):
                _lift(work, update, padded)


def _launch(tables: "_Tables", places: Tensor, numbers: Tensor) -> None:
    triton.set_allocator(_scratch)
    flags = {"EIGHT": tables.eight, "SCALES": BLOCK}

    def launch(stages: int) -> None:
        _project[(len(tables.tiles),)](
            tables.tiles, places, numbers, **flags, **tables.shape, num_stages=stages
        )

    _fit.launch((places.device, tables.kind), _STAGES[tables.kind], launch)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _lift(work: Work, update: Tensor, padded: Tensor | None) -> None:
    """Move weights by an update in the subspace."""
    weights, kept, scale = work.weights, work.numbers[3], work.numbers[6]
    columns = weights.shape[1]
    left, right = (work.basis, update) if work.side == "left" else (update, work.basis.mT)
    if padded is None:
        weights.addmm_(left, right, beta=kept, alpha=kept * scale)
        return
    # Rows that begin anywhere slow a product down fourfold; the buffer's own rows do not.
    torch.mm(left, right, out=padded if work.side == "left" else padded[:, :columns])
    grid = (triton.cdiv(weights.numel(), 1024),)
    wide = padded.shape[1]
    _add[grid](weights, padded, kept, scale, columns, wide, weights.numel(), BLOCK=1024)


class _Tables:
    """Which tile is whose, where each matrix lies, and what is between the passes."""

    def __init__(self, works: Sequence[Work]) -> None:
        device = works[0].weights.device
        self.eight = works[0].first.dtype == torch.uint8
        most = max(work.basis.shape[1] for work in works)
        self.kind = "eight" if self.eight else "wide" if most > 128 else "narrow"
        self.shape = _TILES[self.kind]
        self.updates: list[Tensor] = []
        self.padded: list[Tensor | None] = []
        self._sides: list[tuple[tuple[int, int], int, Side]] = []
        for work in works:
            rows, columns = work.weights.shape
            self._sides.append(((rows, columns), work.basis.shape[1], work.side))
        self.numbers = sum(layout.buffer_numbers(*one) for one in self._sides)
        tiles: list[tuple[int, ...]] = []
        for item, one in enumerate(self._sides):
            tiles += _tiles(item, layout.update_shape(*one), self.shape)
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self.places = torch.empty(len(works), _FIELDS.value, dtype=torch.int64, device=device)
        self._buffer: Tensor | None = None
        self._known: Any = None

    def take(self, buffer: Tensor) -> None:
        """Put updates, and gradients whose rows are not aligned, into a buffer."""
        if buffer is self._buffer:
            return
        self._buffer, self.updates, self.padded = buffer, [], []
        for shape, rank, side in self._sides:
            rows, columns = layout.update_shape(shape, rank, side)
            update, buffer = buffer[: rows * columns], buffer[rows * columns :]
            self.updates.append(update.view(rows, columns))
            wide, padded = layout.row_length(shape[1]), None
            if wide != shape[1]:
                padded, buffer = buffer[: shape[0] * wide], buffer[shape[0] * wide :]
                padded = padded.view(shape[0], wide)
            self.padded.append(padded)

    def fill(self, works: Sequence[Work]) -> tuple[Tensor, Tensor]:
        """Return the tables of addresses and of numbers, on the device."""
        rows = []
        for work, update, padded in zip(works, self.updates, self.padded, strict=True):
            gradient = work.gradient
            if padded is not None:
                gradient = _pad(gradient, padded)
            scales = [0, 0] if work.scales is None else [one.data_ptr() for one in work.scales]
            tensors = gradient, work.basis, work.first, work.second, update
            rows.append(
                [
                    *(one.data_ptr() for one in tensors),
                    *scales,
                    *work.weights.shape,
                    work.basis.shape[1],
                    gradient.shape[1],
                    int(work.side == "left"),
                ]
            )
        if rows != self._known:
            self.places.copy_(torch.tensor(rows, dtype=torch.int64))
            self._known = rows
        numbers = torch.tensor([work.numbers for work in works], dtype=torch.float32)
        return self.places, numbers.to(self.places.device, non_blocking=True)


def _pad(matrix: Tensor, padded: Tensor) -> Tensor:
    """Copy a matrix into one with longer rows, and return that."""
    (rows, columns), wide = matrix.shape, padded.shape[1]
    grid = triton.cdiv(wide, 1024), triton.cdiv(rows, 4)
    _copy[grid](matrix, padded, rows, columns, wide, ROWS=4, COLUMNS=1024)
    return padded


def _tiles(item: int, shape: tuple[int, int], settings: dict[str, int]) -> list[tuple[int, ...]]:
    """Return item, tile row and tile column of all tiles."""
    rows, columns = (-(-one // settings[key]) for one, key in zip(shape, ("BM", "BN"), strict=True))
    return [(item, row, column) for row in range(rows) for column in range(columns)]


@triton.jit
def _copy(
    source, target, rows, columns, wide, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Copy rows to longer ones, with zeros at their end."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(source + row * columns + column, mask=inside, other=0.0)
    place = row * tl.multiple_of(wide, 16) + column
    tl.store(target + place, values, mask=(row < rows) & (column < wide))


@triton.jit
def _add(weights, change, kept, scale, columns, wide, count, BLOCK: tl.constexpr):
    """Set W to kept · (W + scale · change), for changes in longer rows."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    row = place // columns
    change += row * wide + (place - row * columns)
    moved = tl.load(change, mask=inside, other=0.0).to(tl.float32) * scale
    before = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(weights + place, (kept * (before + moved)).to(tl.bfloat16), mask=inside)


@triton.jit
def _address(places, item, field: tl.constexpr, kind: tl.constexpr):
    start = tl.load(places + item * _FIELDS + field).to(tl.pointer_type(kind))
    return tl.multiple_of(start, 16)


@triton.jit
def _side(places, item, field: tl.constexpr):
    return tl.load(places + item * _FIELDS + field).to(tl.int32)


@triton.jit
def _aligned_side(places, item, field: tl.constexpr):
    size = tl.load(places + item * _FIELDS + field).to(tl.int32)
    return tl.multiple_of(size, 16)


@triton.jit
def _multiply(
    a, b, a_rows, a_columns, b_rows, b_columns, row, column, length,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return a tile of AB, or of AᵀB, in float32; outside of the matrices are zeros."""
    result = tl.zeros((BM, BN), dtype=tl.float32)
    left = tl.make_tensor_descriptor(
        a, [a_rows, a_columns], [a_columns, 1], [BK, BM] if TRANSPOSED else [BM, BK]
    )
    right = tl.make_tensor_descriptor(b, [b_rows, b_columns], [b_columns, 1], [BK, BN])
    for inner in range(0, length, BK):
        part = left.load([inner, row]).T if TRANSPOSED else left.load([row, inner])
        result = tl.dot(part, right.load([inner, column]), result)
    return result


@triton.jit
def _halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _advance(first, second, projected, number):
    """Return both moments after a gradient, √v, and the update."""
    rate, root, epsilon = tl.load(number), tl.load(number + 1), tl.load(number + 2)
    one, two = tl.load(number + 4), tl.load(number + 5)
    first = first * one + projected * (1 - one)
    second = second * two + projected * projected * (1 - two)
    deviation = tl.sqrt(second)
    return first, second, deviation, first / (deviation * root + epsilon) * rate


@triton.jit
def _adam(projected, m1, m2, out, number, row, start, rows, length, BN: tl.constexpr):
    """Advance moments in bfloat16, and write the update."""
    column = start + tl.arange(0, BN)
    place = row[:, None] * length + column[None, :]
    inside = (row < rows)[:, None] & (column < length)[None, :]
    first = tl.load(m1 + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(m2 + place, mask=inside, other=0.0).to(tl.float32)
    first, second, _, update = _advance(first, second, projected, number)
    tl.store(out + place, update.to(tl.bfloat16), mask=inside)
    tl.store(m1 + place, first.to(tl.bfloat16), mask=inside)
    tl.store(m2 + place, second.to(tl.bfloat16), mask=inside)


@triton.jit
def _random(positions, seed):
    """Return numbers in [0, 1) that are a hash of position and seed, as in `blockwise`."""
    mixed = positions.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32) * 0x85EBCA77
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    mixed = mixed ^ (mixed >> 16)
    return (mixed >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _encode(sizes, random, LEVELS: tl.constexpr, OCTAVES: tl.constexpr, ROOT: tl.constexpr):
    """Return codes of magnitudes that are shares of their block's largest, as in `blockwise`."""
    per_octave: tl.constexpr = (LEVELS - 1) / OCTAVES
    smallest: tl.constexpr = 2.0**-OCTAVES
    step: tl.constexpr = 2.0 ** (OCTAVES / (LEVELS - 1)) - 1
    below = tl.floor(tl.log2(tl.maximum(sizes, 1e-37)) * per_octave)
    below = tl.maximum(below, 1.0 - LEVELS)
    up = (sizes / tl.exp2(below / per_octave) - 1) / step
    codes = tl.minimum(below + LEVELS + tl.where(random < up, 1.0, 0.0), LEVELS * 1.0)
    kept = sizes > 0 if ROOT else random < sizes / smallest
    return tl.where(sizes < smallest, tl.where(kept, 1.0, 0.0), codes)


@triton.jit
def _adam_in_eight_bits(
    projected, m1, m2, s1, s2, out, number, row, start, rows, columns, length,
    SCALES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Advance moments in eight bits, one block of a scale to a tile's row; write the update."""
    column = start + tl.arange(0, BN)
    place = row[:, None] * length + column[None, :]
    inside = (row < rows)[:, None] & (column < length)[None, :]
    block = row * tl.cdiv(columns, SCALES) + start // SCALES
    codes = tl.load(m1 + place, mask=inside, other=0).to(tl.float32)
    sign = tl.where(codes >= 128, -1.0, 1.0)
    codes = tl.where(codes >= 128, codes - 128, codes)
    scale = tl.load(s1 + block, mask=row < rows, other=0.0)
    first = tl.exp2((codes - 127) * (13.0 / 126)) * sign * scale[:, None]
    first = tl.where(codes > 0, first, 0.0)
    codes = tl.load(m2 + place, mask=inside, other=0).to(tl.float32)
    scale = tl.load(s2 + block, mask=row < rows, other=0.0)
    second = tl.exp2((codes - 255) * (15.0 / 254)) * scale[:, None]
    second = tl.where(codes > 0, second, 0.0)
    first, _, deviation, update = _advance(first, second * second, projected, number)
    tl.store(out + place, update.to(tl.bfloat16), mask=inside)
    counted = (row < rows)[:, None] & (column < columns)[None, :]
    first, deviation = tl.where(counted, first, 0.0), tl.where(counted, deviation, 0.0)
    position = row[:, None] * columns + column[None, :]
    seed = tl.load(number + 7).to(tl.uint32) * 65536 + tl.load(number + 8).to(tl.uint32)
    largest = tl.max(tl.abs(first), 1)
    tl.store(s1 + block, largest, mask=row < rows)
    sizes = tl.abs(first) / tl.where(largest > 0, largest, 1.0)[:, None]
    codes = _encode(sizes, _random(position, seed * 2), 127, 13.0, False)
    codes = tl.where((first < 0) & (codes > 0), codes + 128, codes)
    tl.store(m1 + place, codes.to(tl.uint8), mask=inside)
    largest = tl.max(deviation, 1)
    tl.store(s2 + block, largest, mask=row < rows)
    sizes = deviation / tl.where(largest > 0, largest, 1.0)[:, None]
    codes = _encode(sizes, _random(position, seed * 2 + 1), 255, 15.0, True)
    tl.store(m2 + place, codes.to(tl.uint8), mask=inside)


@triton.jit
def _project(
    tiles, places, numbers,
    EIGHT: tl.constexpr, SCALES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Project gradients, advance the moments and write the updates in the subspace.

    The moments of a tile are worked on in quarters, one after the other, for they would not all fit
    into the registers with the product.
    """
    tile = tiles + tl.program_id(0) * 3
    item = tl.load(tile)
    m, n = _side(places, item, 7), _side(places, item, 8)
    r, wide = _aligned_side(places, item, 9), _aligned_side(places, item, 10)
    g = _address(places, item, 0, tl.bfloat16)
    p = _address(places, item, 1, tl.bfloat16)
    top, start = tl.load(tile + 1) * BM, tl.load(tile + 2) * BN
    left = tl.load(places + item * _FIELDS + 11) != 0
    if left:  # R = PᵀG, (r, n)
        projected = _multiply(p, g, m, r, m, wide, top, start, m, True, BM, BN, BK)
    else:  # R = GP, (m, r)
        projected = _multiply(g, p, m, wide, n, r, top, start, n, False, BM, BN, BK)
    rows, columns = tl.where(left, r, m), tl.where(left, n, r)
    length = tl.where(left, wide, r)
    row = top + tl.arange(0, BM)
    number = numbers + item * _NUMBERS
    out = _address(places, item, 4, tl.bfloat16)
    if EIGHT:
        m1 = _address(places, item, 2, tl.uint8)
        m2 = _address(places, item, 3, tl.uint8)
        s1 = _address(places, item, 5, tl.float32)
        s2 = _address(places, item, 6, tl.float32)
        _adam_in_eight_bits(
            projected, m1, m2, s1, s2, out, number, row, start, rows, columns, length, SCALES, BN
        )
    else:
        m1 = _address(places, item, 2, tl.bfloat16)
        m2 = _address(places, item, 3, tl.bfloat16)
        quarter: tl.constexpr = BN // 4
        half_1, half_2 = _halves(projected, BM, BN)
        part_1, part_2 = _halves(half_1, BM, BN // 2)
        part_3, part_4 = _halves(half_2, BM, BN // 2)
        _adam(part_1, m1, m2, out, number, row, start, rows, length, quarter)
        _adam(part_2, m1, m2, out, number, row, start + quarter, rows, length, quarter)
        _adam(part_3, m1, m2, out, number, row, start + 2 * quarter, rows, length, quarter)
        _adam(part_4, m1, m2, out, number, row, start + 3 * quarter, rows, length, quarter)

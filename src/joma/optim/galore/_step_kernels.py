"""A GaLore step of many bfloat16 matrices in two passes, for the GPU (Triton).

The first pass multiplies gradients by bases and advances Adam's moments while the products are
still in registers; the second multiplies by the bases again and moves the weights. Tiles of all
matrices of one kind are worked on by one launch: those of one matrix would leave most of the GPU
idle.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.optim.blockwise import BLOCK
from joma.optim.galore.subspace import Side

FIELDS = 13
"""Of each matrix: addresses of G, P, both moments, W, the update and both scales; m, n, r, the
length of a row of G and of the update, and whether P stands left."""
_PROJECT = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
_PROJECT_EIGHT = {"BM": 64, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}
_LIFT = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}


@dataclass(frozen=True)
class Work:
    """A matrix and what its step needs.

    Attributes:
        weights: W (m, n), bfloat16.
        gradient: G, bfloat16.
        basis: P, bfloat16.
        first: First moment, bfloat16 or float32, or the codes of eight bits.
        second: Second moment, likewise.
        scales: Scales of the two in eight bits, or None.
        side: Side of the basis.
        numbers: −η/(1 − β₁ᵗ), 1/√(1 − β₂ᵗ), ε, decay factor, β₁, β₂, scale, and the seed of the
            rounding as a number below 2²⁴.
    """

    weights: Tensor
    gradient: Tensor
    basis: Tensor
    first: Tensor
    second: Tensor
    scales: tuple[Tensor, Tensor] | None
    side: Side
    numbers: tuple[float, ...]


def step(works: Sequence[Work], workspace: dict[Any, Any]) -> None:
    """Move matrices, all on one GPU and with moments of one type.

    Args:
        works: The matrices.
        workspace: Keeps tables and buffers from one call to the next; may be dropped at any time.
    """
    kinds: dict[tuple[bool, bool], list[Work]] = {}
    for work in works:
        aligned = work.weights.shape[1] % 16 == 0 and work.basis.shape[1] % 16 == 0
        kinds.setdefault((_is_even(work), aligned), []).append(work)
    for (even, aligned), same in kinds.items():
        dtype = same[0].first.dtype
        key = (
            even,
            dtype,
            same[0].weights.device,
            tuple((work.side, *work.weights.shape, work.basis.shape[1]) for work in same),
        )
        if key not in workspace:
            workspace[key] = _Tables(same, even)
        tables: _Tables = workspace[key]
        places, numbers = tables.fill(same)
        eight = dtype == torch.uint8
        store = {"EIGHT": eight, "FLOAT": dtype == torch.float32, "SCALES": BLOCK}
        grid = (len(tables.first),)
        shape = _PROJECT_EIGHT if eight else _PROJECT
        flags = {"EVEN": even, "ALIGNED": aligned}
        _project[grid](tables.first, places, numbers, **flags, **store, **shape)
        _lift[(len(tables.second),)](tables.second, places, numbers, **flags, **_LIFT)


def _is_even(work: Work) -> bool:
    """Return whether sides are multiples of the tiles, once rows of a wide matrix are padded."""
    (rows, columns), rank = work.weights.shape, work.basis.shape[1]
    inner = rows if work.side == "left" else columns
    return rank % 256 == 0 and inner % 64 == 0


class _Tables:
    """Which tile is whose, where each matrix lies, and buffers for what is between the passes."""

    def __init__(self, works: Sequence[Work], even: bool) -> None:
        first, second = [], []
        self.updates: list[Tensor] = []
        self.padded: list[Tensor | None] = []
        device = works[0].weights.device
        shape = _PROJECT_EIGHT if works[0].first.dtype == torch.uint8 else _PROJECT
        for item, work in enumerate(works):
            (rows, columns), rank = work.weights.shape, work.basis.shape[1]
            left = work.side == "left"
            first += _tiles(item, (rank, columns) if left else (rows, rank), shape)
            second += _tiles(item, (rows, columns), _LIFT)
            wide = -(-columns // 256) * 256 if even and left else columns
            self.updates.append(
                torch.zeros(
                    (rank, wide) if left else (rows, rank), dtype=torch.bfloat16, device=device
                )
            )
            padded = None
            if wide != columns:
                padded = torch.zeros(rows, wide, dtype=torch.bfloat16, device=device)
            self.padded.append(padded)
        self.first = torch.tensor(first, dtype=torch.int32, device=device)
        self.second = torch.tensor(second, dtype=torch.int32, device=device)
        self.places = torch.empty(len(works), FIELDS, dtype=torch.int64, device=device)
        self.known: Any = None

    def fill(self, works: Sequence[Work]) -> tuple[Tensor, Tensor]:
        """Return the tables of addresses and of numbers, on the device."""
        rows = []
        for work, update, padded in zip(works, self.updates, self.padded, strict=True):
            gradient = work.gradient
            if padded is not None:
                padded[:, : gradient.shape[1]].copy_(gradient)
                gradient = padded
            scales = [0, 0] if work.scales is None else [one.data_ptr() for one in work.scales]
            tensors = gradient, work.basis, work.first, work.second, work.weights, update
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
        if rows != self.known:
            self.places.copy_(torch.tensor(rows, dtype=torch.int64))
            self.known = rows
        numbers = torch.tensor([work.numbers for work in works], dtype=torch.float32)
        return self.places, numbers.to(self.places.device, non_blocking=True)


def _tiles(item: int, shape: tuple[int, int], settings: dict[str, int]) -> list[tuple[int, ...]]:
    """Return item, tile row and tile column of all tiles."""
    rows, columns = (-(-one // settings[key]) for one, key in zip(shape, ("BM", "BN"), strict=True))
    return [(item, row, column) for row in range(rows) for column in range(columns)]


@triton.jit
def _address(places, item, field: tl.constexpr, kind: tl.constexpr, EVEN: tl.constexpr):
    start = tl.load(places + item * 13 + field).to(tl.pointer_type(kind))
    return tl.multiple_of(start, 16) if EVEN else start


@triton.jit
def _side(places, item, field: tl.constexpr, EVEN: tl.constexpr):
    size = tl.load(places + item * 13 + field).to(tl.int32)
    return tl.multiple_of(size, 16) if EVEN else size


@triton.jit
def _multiply(
    a, b, a_rows, a_step, b_columns, b_step, a_rows_inside, b_columns_inside, length, offsets,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the tile of a product, in float32."""
    result = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, length, BK):
        if EVEN:
            left = tl.load(a + a_rows)
            right = tl.load(b + b_columns)
        else:
            inside = start + offsets < length
            left = tl.load(a + a_rows, mask=a_rows_inside & inside[None, :], other=0.0)
            right = tl.load(b + b_columns, mask=inside[:, None] & b_columns_inside, other=0.0)
        result = tl.dot(left, right, result)
        a += a_step
        b += b_step
    return result


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
def _project(
    tiles, places, numbers,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr, EIGHT: tl.constexpr, FLOAT: tl.constexpr,
    SCALES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Project gradients, advance the moments and write the updates in the subspace."""
    tile = tiles + tl.program_id(0) * 3
    item = tl.load(tile)
    m, n = _side(places, item, 8, False), _side(places, item, 9, ALIGNED)
    r, wide = _side(places, item, 10, EVEN), _side(places, item, 11, EVEN)
    g = _address(places, item, 0, tl.bfloat16, EVEN)
    p = _address(places, item, 1, tl.bfloat16, EVEN)
    row = tl.load(tile + 1) * BM + tl.arange(0, BM)
    column = tl.load(tile + 2) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    left = tl.load(places + item * 13 + 12) != 0
    if left:  # R = PᵀG, (r, n)
        projected = _multiply(
            p, g,
            inner[None, :] * r + row[:, None], BK * r,
            inner[:, None] * wide + column[None, :], BK * wide,
            (row < r)[:, None], (column < n)[None, :], m, inner, BM, BN, BK, EVEN,
        )  # fmt: skip
        rows, columns, length = r, n, wide
    else:  # R = GP, (m, r)
        projected = _multiply(
            g, p,
            (row % m)[:, None] * wide + inner[None, :], BK,
            inner[:, None] * r + column[None, :], BK * r,
            (row < m)[:, None], (column < r)[None, :], n, inner, BM, BN, BK, EVEN,
        )  # fmt: skip
        rows, columns, length = m, r, r
    if ALIGNED:
        columns, length = tl.multiple_of(columns, 16), tl.multiple_of(length, 16)
    number = numbers + item * 8
    rate, root, epsilon = tl.load(number), tl.load(number + 1), tl.load(number + 2)
    one, two = tl.load(number + 4), tl.load(number + 5)
    place = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if EIGHT:
        m1, m2 = (
            _address(places, item, 2, tl.uint8, EVEN),
            _address(places, item, 3, tl.uint8, EVEN),
        )
        s1, s2 = (
            _address(places, item, 6, tl.float32, EVEN),
            _address(places, item, 7, tl.float32, EVEN),
        )
        blocks = tl.cdiv(columns, SCALES)
        block = row * blocks + tl.load(tile + 2) * BN // SCALES
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
        second = second * second
    else:
        if FLOAT:
            m1, m2 = (
                _address(places, item, 2, tl.float32, EVEN),
                _address(places, item, 3, tl.float32, EVEN),
            )
        else:
            m1, m2 = (
                _address(places, item, 2, tl.bfloat16, EVEN),
                _address(places, item, 3, tl.bfloat16, EVEN),
            )
        first = tl.load(m1 + place, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(m2 + place, mask=inside, other=0.0).to(tl.float32)
    first = first * one + projected * (1 - one)
    second = second * two + projected * projected * (1 - two)
    deviation = tl.sqrt(second)
    update = first / (deviation * root + epsilon) * rate
    out = _address(places, item, 5, tl.bfloat16, EVEN)
    place_out = row[:, None] * length + column[None, :]
    tl.store(out + place_out, update.to(tl.bfloat16), mask=inside)
    if EIGHT:
        first = tl.where(inside, first, 0.0)
        deviation = tl.where(inside, deviation, 0.0)
        seed = tl.load(number + 7).to(tl.uint32)
        largest = tl.max(tl.abs(first), 1)
        tl.store(s1 + block, largest, mask=row < rows)
        sizes = tl.abs(first) / tl.where(largest > 0, largest, 1.0)[:, None]
        codes = _encode(sizes, _random(place, seed * 2), 127, 13.0, False)
        codes = tl.where((first < 0) & (codes > 0), codes + 128, codes)
        tl.store(m1 + place, codes.to(tl.uint8), mask=inside)
        largest = tl.max(deviation, 1)
        tl.store(s2 + block, largest, mask=row < rows)
        sizes = deviation / tl.where(largest > 0, largest, 1.0)[:, None]
        codes = _encode(sizes, _random(place, seed * 2 + 1), 255, 15.0, True)
        tl.store(m2 + place, codes.to(tl.uint8), mask=inside)
    else:
        tl.store(m1 + place, first.to(m1.dtype.element_ty), mask=inside)
        tl.store(m2 + place, second.to(m2.dtype.element_ty), mask=inside)


@triton.jit
def _lift(
    tiles, places, numbers,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Move weights by updates in the subspace."""
    tile = tiles + tl.program_id(0) * 3
    item = tl.load(tile)
    m, n = _side(places, item, 8, False), _side(places, item, 9, ALIGNED)
    r, wide = _side(places, item, 10, EVEN), _side(places, item, 11, EVEN)
    p = _address(places, item, 1, tl.bfloat16, EVEN)
    update = _address(places, item, 5, tl.bfloat16, EVEN)
    row = tl.load(tile + 1) * BM + tl.arange(0, BM)
    column = tl.load(tile + 2) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_rows = (row % m)[:, None] * r + inner[None, :]
    if tl.load(places + item * 13 + 12) != 0:  # PN, P (m, r), N (r, n)
        product = _multiply(
            p, update, a_rows, BK,
            inner[:, None] * wide + column[None, :], BK * wide,
            (row < m)[:, None], (column < n)[None, :], r, inner, BM, BN, BK, EVEN,
        )  # fmt: skip
    else:  # NPᵀ, N (m, r), P (n, r)
        product = _multiply(
            update, p, a_rows, BK,
            inner[:, None] + (column % n)[None, :] * r, BK,
            (row < m)[:, None], (column < n)[None, :], r, inner, BM, BN, BK, EVEN,
        )  # fmt: skip
    number = numbers + item * 8
    kept, scale = tl.load(number + 3), tl.load(number + 6)
    weights = _address(places, item, 4, tl.bfloat16, True)
    place = row[:, None] * n + column[None, :]
    inside = (row < m)[:, None] & (column < n)[None, :]
    before = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(weights + place, (kept * (before + scale * product)).to(tl.bfloat16), mask=inside)
